"""Decide where JAX computes, before it is imported; find TPU chips and who holds them.

Left alone, JAX tries each platform in turn, prints what failed, and computes on the CPU in silence.
Here the platform is named beforehand, so a TPU that does not come up is an error with its reason.
"""

import importlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from svgen.cli.hosts import Hosts, meet
from svgen.errors import MachineError
from svgen.private import make_private, unsafe
from svgen.processes import UNKNOWN, Process, process_of

ROOT = Path("/")
GOOGLE_PCI_VENDOR = "0x1ae0"
LOCK_FILE = "tmp/libtpu_lockfile"
TPU_ENVIRONMENT = ("TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE", "JAX_FORCE_TPU_INIT")
CUDA_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")
NVIDIA_FILES = ("dev/nvidia0", "dev/nvidiactl", "dev/dxg")  # bare metal, containers, WSL
NAMES = {"tpu": "tpu,cpu", "gpu": "cuda,cpu", "cpu": "cpu"}  # --device -> jax_platforms
BUSY = ("already in use", "Device or resource busy", "lockfile", "Couldn't open device")
CACHE_MIN_COMPILE_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Where this process computes."""

    platform: str  # tpu, gpu or cpu
    kind: str  # as JAX names the chip: "TPU v6 lite"
    count: int
    reason: str  # why this platform
    warnings: tuple[str, ...] = ()
    processes: int = 1
    process: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What JAX is told, and why. `platforms` is None where the user's own JAX_PLATFORMS stands."""

    platforms: str | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A process that has a TPU chip open."""

    process: Process
    user_id: int

    @property
    def pid(self) -> int:
        """Its id."""
        return self.process.pid

    def __str__(self) -> str:
        return str(self.process)


def tpu_chips(root: Path = ROOT) -> list[str]:
    """List the device files of TPU chips: /dev/accel0 ..., or /dev/vfio/0 ..., if Google's."""
    found = sorted((root / "dev").glob("accel[0-9]*"))
    if not found and _google_on_bus(root):
        found = sorted((root / "dev/vfio").glob("[0-9]*"))
    return [f"/{path.relative_to(root)}" for path in found]


def _google_on_bus(root: Path) -> bool:
    """VFIO serves other devices too. A machine that hides its bus gets the benefit of the doubt."""
    vendors = list((root / "sys/bus/pci/devices").glob("*/vendor"))
    return not vendors or any(_read(vendor) == GOOGLE_PCI_VENDOR for vendor in vendors)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def tpu_holders(root: Path = ROOT) -> list[Holder]:
    """Find the other processes that have a chip open, as far as this user may look."""
    own = str(os.getpid())
    found = []
    for process in (root / "proc").glob("[0-9]*"):
        if process.name != own and any(_is_chip(link) for link in _open_files(process)):
            with suppress(OSError):  # it has just ended
                owner = process.stat().st_uid
                found.append(Holder(process=process_of(int(process.name), root), user_id=owner))
    return sorted(found, key=lambda holder: holder.pid)


def _open_files(process: Path) -> Iterator[str]:
    try:
        for link in (process / "fd").iterdir():
            yield os.readlink(link)
    except OSError:  # another user's process, or one that has just ended
        return


def _is_chip(target: str) -> bool:
    return re.fullmatch(r"/dev/(accel\d+|vfio/\d+)", target) is not None


def has_cuda(root: Path = ROOT) -> bool:
    """Whether an NVIDIA device and JAX's plugin for it are here."""
    return has_nvidia(root) and any(find_spec(plugin) for plugin in CUDA_PLUGINS)


def has_nvidia(root: Path = ROOT) -> bool:
    """Whether an NVIDIA device is here."""
    return any((root / name).exists() for name in NVIDIA_FILES)


def choose(device: str, root: Path = ROOT) -> Choice:
    """Decide what JAX is told for a `--device`; raises MachineError for one that is not there."""
    by_name = {"auto": _choose_auto, "tpu": _choose_tpu, "gpu": _choose_gpu, "cpu": _choose_cpu}
    return by_name[device](root)


def _choose_auto(root: Path) -> Choice:
    asked = os.environ.get("JAX_PLATFORMS", "")
    if asked:
        return Choice(platforms=None, reason=f"JAX_PLATFORMS is {asked}")
    if _tpu_signs(root):
        return _choose_tpu(root)
    if has_cuda(root):
        return _choose_gpu(root)
    missing = "no TPU is attached"
    if has_nvidia(root):
        missing += ", and the GPU needs JAX's CUDA plugin (pip install 'svgen-tpu[cuda]')"
    return Choice(platforms=NAMES["cpu"], reason=missing)


def _tpu_signs(root: Path) -> str:
    """Say what shows that a TPU is attached; empty if nothing does."""
    chips = tpu_chips(root)
    if chips:
        return f"{chips[0]} is there"
    if find_spec("libtpu") is None:
        return ""
    if "tpu" in os.environ.get("JAX_PLATFORMS", "").split(","):
        return "JAX_PLATFORMS names tpu"
    return next((f"{name} is set" for name in TPU_ENVIRONMENT if os.environ.get(name)), "")


def _choose_tpu(root: Path) -> Choice:
    signs = _tpu_signs(root)
    if not signs:
        raise no_tpu(
            "no chip is found in /dev/accel* or /dev/vfio/*, and no TPU_* variable names one"
        )
    if find_spec("libtpu") is None and not os.environ.get("TPU_LIBRARY_PATH"):
        raise MachineError(
            "E_LIBRARY",
            "a TPU is attached, but libtpu is not installed",
            why=f"{signs}; JAX drives TPUs through libtpu",
            hint="pip install 'jax[tpu]'",
        )
    return Choice(platforms=NAMES["tpu"], reason=signs)


def _choose_gpu(root: Path) -> Choice:
    if has_cuda(root):
        return Choice(platforms=NAMES["gpu"], reason="an NVIDIA device and JAX's plugin are there")
    here = has_nvidia(root)
    raise MachineError(
        "E_DEVICE",
        "--device gpu: JAX can use no GPU here",
        why="JAX's CUDA plugin is not installed" if here else "no NVIDIA device is found in /dev",
        hint="pip install 'svgen-tpu[cuda]'"
        if here
        else "--device cpu, or run on a machine with one",
    )


def _choose_cpu(_: Path) -> Choice:
    return Choice(platforms=NAMES["cpu"], reason="--device cpu")


def no_tpu(why: str) -> MachineError:
    """The error for a TPU that is asked for and not there."""
    hint = "run on a TPU VM, add --device cpu for a small model, or ask `svgen doctor`"
    return MachineError("E_NO_TPU", "no TPU is attached to this machine", why=why, hint=hint)


def prepare_jax(
    device: str = "auto",
    root: Path = ROOT,
    hosts: Hosts | None = None,
    give_up: Callable[[MachineError], None] = lambda error: None,
) -> Device:
    """Bring JAX up on one platform, with its compilation cache; raises MachineError if that fails.

    `--device auto` is a TPU where one is attached, else CUDA where JAX's plugin is installed, else
    the CPU; JAX_PLATFORMS, if set, decides instead. Call it before anything imports jax.

    Compiled programs are kept in `$XDG_CACHE_HOME/svgen/compile/JAX_VERSION-PLATFORM`, or where
    JAX_COMPILATION_CACHE_DIR says. They are executable code: a folder that others can write is not
    used, and a warning says so. With `hosts`, the other processes are waited for (`hosts.meet`).
    """
    choice = choose(device, root)
    if choice.platforms is not None:
        os.environ["JAX_PLATFORMS"] = choice.platforms
    jax = _import_jax()
    if choice.platforms is not None:
        jax.config.update("jax_platforms", choice.platforms)
    named = (choice.platforms or os.environ["JAX_PLATFORMS"]).split(",")[0]
    warnings = _enable_cache(jax, named)
    if hosts:
        meet(jax, hosts, give_up)
    devices = _devices(jax, named, root)
    _check_platform(device, devices[0].platform)
    return Device(
        platform=devices[0].platform,
        kind=devices[0].device_kind,
        count=len(devices),
        reason=choice.reason,
        warnings=warnings,
        processes=jax.process_count(),
        process=jax.process_index(),
    )


def _import_jax() -> Any:
    try:
        return importlib.import_module("jax")
    except (ImportError, RuntimeError) as error:  # RuntimeError: jax and jaxlib do not fit
        raise MachineError(
            "E_LIBRARY",
            "jax cannot be imported",
            why=str(error),
            hint="pip install --upgrade --force-reinstall svgen-tpu",
        ) from error


def _devices(jax: Any, platform: str, root: Path) -> list[Any]:
    try:
        return jax.devices()
    except RuntimeError as error:
        raise _start_problem(str(error), platform, root) from error


def _start_problem(text: str, platform: str, root: Path) -> MachineError:
    """Say why JAX did not come up, with the process that stands in the way."""
    line = text.strip().splitlines()[0] if text.strip() else "JAX gave no reason"
    if platform != "tpu":
        hint = "--device cpu, or `svgen doctor`"
        return MachineError("E_DEVICE", f"JAX cannot start on {platform}", why=line, hint=hint)
    holders = tpu_holders(root)
    named = re.search(r"in use by process with pid (\d+)", text)
    if not holders and not any(sign in text for sign in BUSY):
        return no_tpu(line)
    found = [holder.process for holder in holders]
    found = found or ([process_of(int(named[1]), root)] if named else [])
    pids, known = [one.pid for one in found], [one for one in found if one.name != UNKNOWN]
    who = ", ".join(map(str, known)) or (f"pid {pids[0]}" if pids else "another process")
    lock = f"/{LOCK_FILE}"
    stale = f"if no process uses the TPU, remove {lock}"
    return MachineError(
        "E_TPU_BUSY",
        f"the TPU is in use by {who}",
        why=line,
        hint=f"wait for it, or end it with `kill {pids[0]}`"
        if pids
        else f"`svgen doctor`; {stale}",
        details={"pids": pids, **({"holders": [asdict(one) for one in known]} if known else {})},
    )


def _check_platform(device: str, found: str) -> None:
    if device not in ("auto", found):
        raise MachineError(
            "E_DEVICE",
            f"--device {device}: JAX runs on {found}",
            why="JAX was started on it before, in this process",
            hint=f"--device {found}, or a new process",
        )


def compiled_folder() -> Path:
    """Where compiled programs are kept, unless JAX_COMPILATION_CACHE_DIR says."""
    return cache_folder() / "compile"


def cache_folder() -> Path:
    """Where svgen keeps what it can make again: `$XDG_CACHE_HOME/svgen`."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path("~/.cache").expanduser()) / "svgen"


def _enable_cache(jax: Any, platform: str) -> tuple[str, ...]:
    """Turn the persistent compilation cache on, before the first array exists; say why if not."""
    if not os.environ.get("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        jax.config.update("jax_persistent_cache_min_compile_time_secs", CACHE_MIN_COMPILE_S)
    if not os.environ.get("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"):
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    asked = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    if "://" in asked:  # a bucket has its own rules
        return ()
    try:
        folder = Path(asked) if asked else compiled_folder() / f"{jax.__version__}-{platform}"
        make_private(folder)
        reason = ("" if asked else unsafe(folder.parent)) or unsafe(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        folder, reason = None, str(error)
    if not reason:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        return ()
    jax.config.update("jax_compilation_cache_dir", None)
    where = f" in {folder}" if folder else ""
    rule = "; compiled programs are run, so only you may write there: chmod go-w it" * bool(folder)
    return (f"compiled programs are not kept{where}: {reason}{rule}",)
