"""Which platform is chosen, on folders that play machines; how JAX is brought up, for real."""

import json
import os
import subprocess
import sys
import time

import pytest

from svgen.cli import device as module
from svgen.cli.device import Device, choose, tpu_chips, tpu_holders
from svgen.errors import MachineError
from svgen.processes import clock, process_of
from tests.helpers import ROOT


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """An empty machine, on which libtpu is installed and JAX's CUDA plugin is not."""
    monkeypatch.delenv("JAX_PLATFORMS")
    install(monkeypatch, "libtpu")
    for folder in ("dev", "proc", "tmp", "sys/bus/pci/devices"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def install(monkeypatch, *names):
    monkeypatch.setattr(module, "find_spec", lambda name: "spec" if name in names else None)


def add(machine, *paths, text=""):
    for path in paths:
        (machine / path).parent.mkdir(parents=True, exist_ok=True)
        (machine / path).write_text(text)


def add_process(machine, pid, name, *files):
    folder = machine / f"proc/{pid}/fd"
    folder.mkdir(parents=True)
    (machine / f"proc/{pid}/comm").write_text(name + "\n")
    for number, file in enumerate(files):
        (folder / str(number)).symlink_to(file)


BOOT = 1_790_000_000  # seconds since the epoch


def add_start(machine, pid, seconds, *words):
    """Say when a process started, `seconds` after the machine did, and with which command."""
    ticks = int(seconds * os.sysconf("SC_CLK_TCK"))
    fields = ["S", *["0"] * 18, str(ticks), *["0"] * 30]
    add(machine, f"proc/{pid}/stat", text=f"{pid} (a (very) odd name) {' '.join(fields)}")
    add(machine, f"proc/{pid}/cmdline", text="\0".join(words) + "\0")
    add(machine, "proc/stat", text=f"cpu 1 2 3\nbtime {BOOT}\nprocesses 9\n")


def test_auto_is_the_cpu_on_an_empty_machine(machine):
    assert choose("auto", machine).platforms == "cpu"


def test_auto_is_the_tpu_where_a_chip_is(machine):
    add(machine, "dev/accel0", "dev/accel1")
    assert tpu_chips(machine) == ["/dev/accel0", "/dev/accel1"]
    assert choose("auto", machine).platforms == "tpu,cpu"


def test_folder_of_other_accelerators_is_no_tpu(machine):
    (machine / "dev/accel").mkdir()
    add(machine, "dev/accel/accel0")
    assert tpu_chips(machine) == []


@pytest.mark.parametrize(("vendor", "count"), [("0x1ae0\n", 2), ("0x10de\n", 0)])
def test_vfio_is_a_tpu_only_with_a_google_device(machine, vendor, count):
    add(machine, "dev/vfio/0", "dev/vfio/1", "dev/vfio/vfio")
    add(machine, "sys/bus/pci/devices/0000:00:04.0/vendor", text=vendor)
    assert len(tpu_chips(machine)) == count


def test_vfio_is_trusted_where_the_bus_is_hidden(machine):
    add(machine, "dev/vfio/0", "dev/vfio/vfio")
    assert tpu_chips(machine) == ["/dev/vfio/0"]


def test_environment_of_a_tpu_machine_counts_only_with_libtpu(machine, monkeypatch):
    monkeypatch.setenv("TPU_NAME", "mine")
    assert choose("auto", machine).platforms == "tpu,cpu"
    install(monkeypatch)
    assert choose("auto", machine).platforms == "cpu"


def test_variable_of_jax_decides_for_auto_and_not_for_a_flag(machine, monkeypatch):
    add(machine, "dev/accel0")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert choose("auto", machine).platforms is None
    assert choose("tpu", machine).platforms == "tpu,cpu"


def test_gpu_needs_a_device_and_the_plugin(machine, monkeypatch):
    for installed, files in (((), ("dev/nvidia0",)), (("jax_cuda13_plugin",), ())):
        install(monkeypatch, *installed)
        with pytest.raises(MachineError) as caught:
            choose("gpu", machine / ("" if files else "sys"))
        assert caught.value.code == "E_DEVICE"
        add(machine, "dev/nvidia0")
    install(monkeypatch, "jax_cuda13_plugin")
    assert choose("gpu", machine).platforms == "cuda,cpu"
    assert choose("auto", machine).platforms == "cuda,cpu"


def test_auto_says_why_a_gpu_is_not_used(machine):
    add(machine, "dev/nvidia0")
    choice = choose("auto", machine)
    assert choice.platforms == "cpu"
    assert "svgen-tpu[cuda]" in choice.reason


def test_tpu_that_is_not_there_is_an_error_with_a_way_out(machine):
    with pytest.raises(MachineError) as caught:
        choose("tpu", machine)
    assert caught.value.code == "E_NO_TPU"
    assert "--device cpu" in caught.value.hint


@pytest.mark.parametrize("device", ["auto", "tpu"])
def test_tpu_without_libtpu_is_an_error_and_never_the_cpu(machine, monkeypatch, device):
    add(machine, "dev/accel0")
    install(monkeypatch)
    with pytest.raises(MachineError) as caught:
        choose(device, machine)
    assert caught.value.code == "E_LIBRARY"


def test_holders_are_the_other_processes_with_a_chip_open(machine):
    add_process(machine, 7, "train.py", "/dev/null", "/dev/accel0")
    add_process(machine, 5, "serve", "/dev/vfio/3")
    add_process(machine, 9, "shell", "/dev/vfio/vfio", "/dev/accel0.txt")
    add_process(machine, os.getpid(), "svgen", "/dev/accel0")
    assert [(holder.pid, holder.process.name) for holder in tpu_holders(machine)] == [
        (5, "serve"),
        (7, "train.py"),
    ]


BUSY_TEXT = "ABORTED: The TPU is already in use by process with pid 4242. Not attempting to load"


def test_busy_tpu_names_its_holder(machine):
    problem = module._start_problem(BUSY_TEXT, "tpu", machine)
    assert (problem.code, problem.details) == ("E_TPU_BUSY", {"pids": [4242]})
    assert "4242" in problem.message
    add_process(machine, 7, "train.py", "/dev/accel0")
    problem = module._start_problem("INTERNAL: anything", "tpu", machine)
    assert (problem.code, problem.message) == (
        "E_TPU_BUSY",
        "the TPU is in use by train.py (pid 7)",
    )


@pytest.mark.parametrize("text", [BUSY_TEXT, "INTERNAL: anything"])
def test_busy_tpu_says_who_holds_it_and_since_when(machine, text):
    """Seen by its open chip; and, where that is hidden, by the number that libtpu names."""
    add_process(machine, 4242, "python3", *(() if text == BUSY_TEXT else ("/dev/accel0",)))
    add_start(machine, 4242, 90, "/venv/bin/python3", "-m", "svgen", "generate", "a secret cat")
    problem = module._start_problem(text, "tpu", machine)
    since = clock(BOOT + 90)
    assert problem.message == (
        f"the TPU is in use by python3 (pid 4242, `python3 -m svgen`, since {since})"
    )
    assert "secret" not in json.dumps(problem.as_json())
    assert problem.details == {
        "pids": [4242],
        "holders": [
            {"pid": 4242, "name": "python3", "command": "python3 -m svgen", "since": BOOT + 90}
        ],
    }


def test_real_process_has_a_name_a_command_and_a_start():
    command = [sys.executable, "-c", "print(flush=True);input()"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline(), "it runs"
    own, other = process_of(os.getpid()), process_of(child.pid)
    child.communicate(b"\n")
    assert own.since <= other.since
    assert abs(other.since - time.time()) < 600, "in seconds since the epoch"
    assert other.command == f"{os.path.basename(sys.executable)} -c print(flush=True);input()"
    assert process_of(2**30).since is None


def test_lock_of_a_process_that_is_gone_is_named(machine):
    text = 'Internal error when accessing libtpu multi-process lockfile. Run "$ sudo rm".'
    problem = module._start_problem(text, "tpu", machine)
    assert problem.code == "E_TPU_BUSY"
    assert "/tmp/libtpu_lockfile" in problem.hint


def test_other_failures_keep_their_reason(machine):
    problem = module._start_problem("NOT_FOUND: no device\nmore", "tpu", machine)
    assert (problem.code, problem.why) == ("E_NO_TPU", "NOT_FOUND: no device")
    assert module._start_problem("x", "cuda", machine).code == "E_DEVICE"


PREPARE = """
import json, sys
from dataclasses import asdict
from svgen.cli.device import prepare_jax
assert "jax" not in sys.modules
device = prepare_jax(sys.argv[1])
import jax, jax.numpy as jnp
jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((4, 4))).block_until_ready()
print(json.dumps([asdict(device), jax.config.jax_compilation_cache_dir, jax.__version__]))
"""


def prepared(device="cpu", **env):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", **env}
    environment.pop("JAX_PLATFORMS")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PREPARE, device],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    found, cache, version = json.loads(done.stdout)
    return Device(**{**found, "warnings": tuple(found["warnings"])}), cache, version


def test_prepared_jax_keeps_its_programs_in_a_private_folder(home):
    device, cache, version = prepared()
    folder = home / "cache/svgen/compile" / f"{version}-cpu"
    assert (device.platform, device.kind, device.count, device.warnings) == ("cpu", "cpu", 1, ())
    assert cache == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("mode", "which", "why"),
    [
        (0o777, "compile", "everyone may write to it"),
        (0o1777, "compile", "everyone may write to it"),
        (0o770, "compile", "may write to it"),
        (0o777, ".", "and so put another folder in its place"),
    ],
)
def test_folder_that_others_can_write_is_not_used(home, mode, which, why):
    folder = home / "cache/svgen/compile"
    folder.mkdir(parents=True)
    (folder.parent / which).chmod(mode)
    device, cache, _ = prepared()
    assert cache is None
    assert why in device.warnings[0]
    assert "only you may write there" in device.warnings[0]


def test_folder_that_a_variable_names_is_held_to_the_same(home, tmp_path):
    open_to_all = tmp_path / "shared"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    device, cache, _ = prepared(JAX_COMPILATION_CACHE_DIR=str(open_to_all))
    assert cache is None
    assert device.warnings[0].startswith(f"compiled programs are not kept in {open_to_all}")
    assert list(open_to_all.iterdir()) == []
    _, cache, _ = prepared(JAX_COMPILATION_CACHE_DIR=str(tmp_path / "new"))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert cache == str(tmp_path / "new")


def test_cache_folder_that_cannot_be_made_is_a_warning(home):
    (home / "cache").write_text("a file")
    device, cache, _ = prepared()
    assert cache is None
    assert device.warnings[0].startswith("compiled programs are not kept")


def test_cache_variable_of_jax_wins(home, tmp_path):
    _, cache, _ = prepared(JAX_COMPILATION_CACHE_DIR=str(tmp_path))
    assert cache == str(tmp_path)
    assert not (home / "cache").exists()
