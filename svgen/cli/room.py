"""How much memory this process may still take: of the machine, within the limits of its containers
and its own, and of the accelerator's chips.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from svgen.processes import ROOT

VARIABLE = "SVGEN_MEMORY_GIB"  # counts instead of what the system says of the host
GIB = 2**30
FILES = ("inactive_file", "active_file", "slab_reclaimable")  # a container gives them up when asked


def available_memory(root: Path = ROOT) -> int | None:
    """Bytes that this process may still take without swapping; None where the system does not say.

    What a container holds of files does not count as used: it is given up before memory runs out.
    """
    meminfo = _table(root / "proc/meminfo")
    found = [meminfo["MemAvailable"]] if "MemAvailable" in meminfo else []
    found += [room for folder in _groups(root) if (room := _group_room(folder)) is not None]
    return min(found) if found else None


def host_room(root: Path = ROOT) -> int | None:
    """Bytes that this process can take at the very most: with swap, and within its own limits."""
    said = os.environ.get(VARIABLE, "")
    if said:
        return _gib(said)
    free = available_memory(root)
    if free is None:
        return None
    free += _table(root / "proc/meminfo").get("SwapFree", 0)
    return max(min([free, *_own_limits(root)]), 0)


def _gib(text: str) -> int | None:
    """The variable's value; what is no number counts as no limit that is known."""
    try:
        return int(float(text) * GIB)
    except (ValueError, OverflowError):
        return None


def _own_limits(root: Path) -> Iterator[int]:
    """What `ulimit -v` and `-d` leave, above what is in memory now. Windows has no such limits."""
    try:
        import resource
    except ImportError:
        return
    held = _table(root / "proc/self/status").get("RssAnon", 0)
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            yield soft - held


def _groups(root: Path) -> Iterator[Path]:
    """Folders of the control groups (version 2) that this process is in, the root's last."""
    top = root / "sys/fs/cgroup"
    lines = _text(root / "proc/self/cgroup").splitlines()
    named = next((line[3:] for line in lines if line.startswith("0::")), "/").strip("/")
    folder = top / named
    while folder != top and ".." not in folder.parts:
        yield folder
        folder = folder.parent
    yield top


def _group_room(folder: Path) -> int | None:
    """What a control group leaves; None if it has no limit."""
    limit, used = (_text(folder / f"memory.{name}").strip() for name in ("max", "current"))
    if not limit.isdigit() or not used.isdigit():
        return None
    stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
    files = sum(int(stat.get(name, 0)) for name in FILES)
    return max(int(limit) - int(used) + min(files, int(used)), 0)


def chip_room() -> int | None:
    """Bytes free on the fullest of this process' chips; None where JAX does not say, as on a CPU.
    Call it once JAX is up.
    """
    import jax

    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    free = [
        one["bytes_limit"] - one.get("bytes_in_use", 0) for one in stats if "bytes_limit" in one
    ]
    return min(free) if free else None


def _table(path: Path) -> dict[str, int]:
    """A file of lines like `MemAvailable:  12 kB`, in bytes."""
    found = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
