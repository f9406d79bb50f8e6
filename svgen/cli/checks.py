"""What `svgen doctor` looks at. Each check reads, returns findings, and changes nothing.

`root` stands for `/` so that a check can be pointed at a folder that plays a machine.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from svgen import __version__
from svgen.catalog import CATALOG
from svgen.cli.device import (
    LOCK_FILE,
    ROOT,
    cache_folder,
    choose,
    tpu_chips,
    tpu_holders,
)
from svgen.cli.endings import state_folder
from svgen.cli.room import available_memory
from svgen.errors import MachineError
from svgen.private import unsafe

OK, WARNING, PROBLEM = "ok", "warning", "problem"
DISTRIBUTION = "svgen-tpu"
SHOWN = ("jax", "jaxlib", "libtpu", "flax", "huggingface_hub")
GIB, GB = 2**30, 10**9
LOW_MEMORY_GIB = 16.0  # the text encoder of Wan alone has 11.4 GB in bfloat16
LOW_SHARED_GIB = 1.0
PROBE_S, HUB_S, FFMPEG_S, KILL_S = 60.0, 5.0, 20.0, 5.0
PROBE = """
import json, jax
devices = jax.devices()
stats = [device.memory_stats() or {} for device in jax.local_devices()]
print(json.dumps({
    "platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices),
    "memory": [[one.get("bytes_limit", 0), one.get("bytes_in_use", 0)] for one in stats],
}))
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report."""

    level: str  # ok, warning or problem
    check: str
    text: str
    fix: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def versions(root: Path = ROOT) -> list[Finding]:
    """Name the versions in use, and say which of them do not fit together."""
    found = []
    for name in SHOWN:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    lines = [
        Finding(
            level=OK,
            check="versions",
            text=f"svgen {__version__}, Python {platform.python_version()}",
        ),
        Finding(level=OK, check="versions", text=", ".join(found)),
    ]
    wrong = [*misfits(DISTRIBUTION), *misfits("jax", _jax_extra())]
    fix = f"pip install --upgrade {DISTRIBUTION}"
    return lines + [Finding(level=PROBLEM, check="versions", text=text, fix=fix) for text in wrong]


def _jax_extra() -> str:
    try:
        version("libtpu")
    except PackageNotFoundError:
        return ""
    return "tpu"


def misfits(distribution: str, extra: str = "") -> list[str]:
    """Say which requirements of an installed distribution are not met."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(line) for line in requires(distribution) or []]
    except PackageNotFoundError:  # a bare checkout
        return []
    found: dict[str, None] = {}
    for one in wanted:
        if one.marker is not None and not one.marker.evaluate({"extra": extra}):
            continue
        try:
            installed = version(one.name)
        except PackageNotFoundError:
            found[f"{one.name} is not installed; {distribution} needs {one}"] = None
            continue
        if not one.specifier.contains(installed, prereleases=True):
            found[f"{one.name} {installed} does not fit: {distribution} needs {one.specifier}"] = (
                None
            )
    return list(found)


def tpu(root: Path = ROOT) -> list[Finding]:
    """Look for chips, for processes that hold them, and for libtpu's lock file."""
    chips, holders = tpu_chips(root), tpu_holders(root)
    if chips:
        lines = [Finding(level=OK, check="tpu", text=f"{len(chips)} chip(s): {', '.join(chips)}")]
    else:
        text = "no TPU is attached to this machine"
        fix = "--device cpu runs small models; Wan's own need a TPU"
        lines = [Finding(level=WARNING, check="tpu", text=text, fix=fix)]
    for holder in holders:
        text = f"in use by {holder}, user id {holder.user_id}"
        fix = f"wait for it, or end it: kill {holder.pid}"
        lines.append(Finding(level=PROBLEM, check="tpu", text=text, fix=fix))
    return lines + _lock(root, held=bool(holders))


def _lock(root: Path, held: bool) -> list[Finding]:
    """A lock file is normal; one of another user, with nobody at work, stops libtpu."""
    lock = root / LOCK_FILE
    try:
        owner = lock.stat().st_uid
    except OSError:
        return []
    text = f"/{LOCK_FILE} is there, of user id {owner}"
    if held or owner == os.getuid() or os.access(lock, os.W_OK):
        return [Finding(level=OK, check="lock", text=text)]
    fix = f"if nobody uses the TPU: sudo rm /{LOCK_FILE}"
    return [Finding(level=WARNING, check="lock", text=text, fix=fix)]


def hosts(root: Path = ROOT) -> list[Finding]:
    """Say whether this machine is one worker of several."""
    names = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES", "")
    count = len([name for name in names.split(",") if name.strip()])
    if count <= 1:
        return []
    worker = os.environ.get("TPU_WORKER_ID", "?")
    fix = "start the same command on every worker, or JAX waits for the others"
    text = f"this is worker {worker} of {count}"
    return [Finding(level=WARNING, check="hosts", text=text, fix=fix)]


def devices(root: Path = ROOT) -> list[Finding]:
    """Ask JAX, in a process of its own that may hang, what it sees."""
    if tpu_holders(root) or hosts(root):
        why = (
            "another process holds the TPU"
            if tpu_holders(root)
            else "it would wait for the other workers"
        )
        return [Finding(level=WARNING, check="jax", text=f"JAX was not started: {why}")]
    try:
        choice = choose("auto", root)
    except MachineError as error:
        return [Finding(level=PROBLEM, check="jax", text=error.message, fix=error.hint)]
    chosen = {"JAX_PLATFORMS": choice.platforms} if choice.platforms else {}
    code, output, errors = run_briefly(
        [sys.executable, "-c", PROBE], PROBE_S, {**os.environ, **chosen}
    )
    if code is None:
        text = f"JAX did not start within {PROBE_S:.0f} s"
        fix = "the TPU hangs: restart the machine, or see who uses it"
        return [Finding(level=PROBLEM, check="jax", text=text, fix=fix)]
    try:
        seen = json.loads(output.splitlines()[-1]) if code == 0 else None
    except (ValueError, IndexError):
        seen = None
    if seen is None:
        last = (errors.strip().splitlines() or ["no reason given"])[-1][:300]
        fix = "--device cpu, or mend what it names"
        return [Finding(level=PROBLEM, check="jax", text=f"JAX does not start: {last}", fix=fix)]
    return _seen(seen, choice.reason)


def _seen(seen: dict[str, Any], reason: str) -> list[Finding]:
    text = f"JAX sees {seen['count']} x {seen['kind']}: {reason}"
    lines = [Finding(level=OK, check="jax", text=text)]
    limits = [limit for limit, _ in seen["memory"] if limit]
    if limits and seen["platform"] != "cpu":
        free = min(limit - used for limit, used in seen["memory"] if limit)
        text = f"{free / GIB:.1f} of {min(limits) / GIB:.1f} GiB free on the fullest chip"
        low = free < min(limits) / 2
        fix = "another program uses it" if low else ""
        lines.append(Finding(level=WARNING if low else OK, check="hbm", text=text, fix=fix))
    return lines


def run_briefly(
    command: list[str], seconds: float, environment: dict[str, str]
) -> tuple[int | None, str, str]:
    """Run a command for a limited time; the code is None if it did not end by itself."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
        errors="replace",
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # stuck in a driver: not even a kill ends it
            process.communicate(timeout=KILL_S)
        return None, "", ""
    return process.returncode, output, errors


def memory(root: Path = ROOT) -> list[Finding]:
    """Look at the host's memory, a container's limit included, and at shared memory."""
    free = available_memory(root)
    lines = []
    if free is not None:
        low = free < LOW_MEMORY_GIB * GIB
        fix = "close other programs; Wan's text encoder needs 11.4 GB while it works" if low else ""
        text = f"{free / GIB:.1f} GiB of memory available"
        lines.append(Finding(level=WARNING if low else OK, check="memory", text=text, fix=fix))
    shared = root / "dev/shm"
    if shared.is_dir():
        size = shutil.disk_usage(shared).free
        low = size < LOW_SHARED_GIB * GIB and bool(tpu_chips(root))
        fix = "in a container: --shm-size=16g" if low else ""
        text = f"{size / GIB:.1f} GiB free in /dev/shm"
        lines.append(Finding(level=WARNING if low else OK, check="memory", text=text, fix=fix))
    return lines


def folders(root: Path = ROOT) -> list[Finding]:
    """Look at the folders that svgen writes to: their room, and who may write there."""
    from svgen.hub.cache import cache_folder as models_folder

    models = models_folder()
    lines = [_room(models)]
    for name, folder in (
        ("models", models),
        ("cache", cache_folder() / "compile"),
        ("state", state_folder()),
    ):
        lines.append(_rights(name, folder))
    return lines


def _room(folder: Path) -> Finding:
    free = shutil.disk_usage(_nearest(folder)).free
    smallest = min(CATALOG.values(), key=lambda entry: entry.download_bytes)
    text = f"{free / GB:.0f} GB free for models in {folder}"
    if free >= smallest.download_bytes:
        return Finding(level=OK, check="disk", text=text)
    fix = f"{smallest.name} has {smallest.download_bytes / GB:.0f} GB: free space, or set HF_HOME"
    return Finding(level=WARNING, check="disk", text=text, fix=fix)


def _nearest(folder: Path) -> Path:
    """The folder itself, or the closest one above it that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _rights(name: str, folder: Path) -> Finding:
    there = _nearest(folder)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        text, fix = (
            f"{folder} cannot be written",
            f"chmod u+rwx {there}, or set HF_HOME or XDG_*_HOME",
        )
        return Finding(level=PROBLEM, check=name, text=text, fix=fix)
    reason = unsafe(folder, shared=name == "models") if folder.exists() else ""
    if reason:
        return Finding(
            level=WARNING, check=name, text=f"{folder}: {reason}", fix=f"chmod go-w {folder}"
        )
    return Finding(level=OK, check=name, text=f"{folder} can be written")


def hub(root: Path = ROOT) -> list[Finding]:
    """Ask the Hub for its front page, for some seconds at most; offline, ask nothing."""
    from svgen.hub.cache import is_offline

    if is_offline():
        text = "offline: HF_HUB_OFFLINE is set, and nothing was asked"
        return [Finding(level=OK, check="hub", text=text)]
    address = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if not address.startswith(("http://", "https://")):
        fix = "HF_ENDPOINT=https://huggingface.co"
        text = f"HF_ENDPOINT is {address!r}, which is no address"
        return [Finding(level=PROBLEM, check="hub", text=text, fix=fix)]
    code = "import sys, urllib.request as r, urllib.error as e\n"
    code += f"try: r.urlopen(r.Request(sys.argv[1], method='HEAD'), timeout={HUB_S})\n"
    code += "except e.HTTPError: pass\n"  # it answers: that is enough
    code += "except Exception as error: sys.exit(str(getattr(error, 'reason', error)))\n"
    done, _, errors = run_briefly(
        [sys.executable, "-c", code, address], 2 * HUB_S, dict(os.environ)
    )
    shown = address.rpartition("@")[2] if "@" in address else address  # no password on the screen
    if done == 0:
        return [Finding(level=OK, check="hub", text=f"{shown} answers")]
    why = (errors.strip().splitlines() or [f"no answer in {2 * HUB_S:.0f} s"])[-1][:200]
    fix = "HF_ENDPOINT names a mirror; HF_HUB_OFFLINE=1 uses the models on disk"
    return [Finding(level=WARNING, check="hub", text=f"{shown} cannot be reached: {why}", fix=fix)]


def ffmpeg(root: Path = ROOT) -> list[Finding]:
    """Start ffmpeg, and look for its H.264 encoder."""
    from imageio_ffmpeg import get_ffmpeg_exe

    fix = "pip install --force-reinstall imageio-ffmpeg, and unset IMAGEIO_FFMPEG_EXE"
    try:
        program = get_ffmpeg_exe()
        done, output, _ = run_briefly([program, "-version"], FFMPEG_S, dict(os.environ))
    except (OSError, RuntimeError) as error:
        text = f"ffmpeg does not start: {str(error).splitlines()[0]}"
        return [Finding(level=PROBLEM, check="ffmpeg", text=text, fix=fix)]
    if done != 0 or "--enable-libx264" not in output:
        text = f"{program} does not work" if done else f"{program} has no libx264 encoder"
        return [Finding(level=PROBLEM, check="ffmpeg", text=text, fix=fix)]
    name = " ".join(output.split()[:3])
    return [Finding(level=OK, check="ffmpeg", text=f"{name}, with libx264")]


CHECKS: tuple[Callable[[Path], list[Finding]], ...] = (
    versions,
    tpu,
    hosts,
    devices,
    memory,
    folders,
    hub,
    ffmpeg,
)
