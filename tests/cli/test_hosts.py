"""Two real processes that make one video over loopback; flags that do not fit; one that dies."""

import json
import os
import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from svgen.cli import run
from svgen.resume import load_latents
from tests.helpers import ROOT, run_svgen
from tests.videos import decoded

TINY = "tests/golden/tiny"
ARGS = ("a red ball", "--model", TINY, "--res", "64x48", "--frames", "5", "--mesh", "1x2")
SHORT_WAIT = "from svgen.cli import hosts, main\nhosts.MEET_S = 3\nmain()"
ENDLESS = ("--steps", "300")


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(index: int, port: int, path, env, *more: str, code: str = "", count: int = 2):
    program = ("-c", code) if code else ("-m", "svgen")
    hosts = ("--coordinator", f"127.0.0.1:{port}", "--num-processes", str(count))
    flags = (*hosts, "--process-id", str(index), "-o", str(path), "--json")
    return subprocess.Popen(
        [sys.executable, *program, "generate", *ARGS, *flags, *more],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_make_the_video_of_one(env, port, tmp_path):
    """The seed is drawn by one and told to the other; only one writes and prints."""
    paths = [tmp_path / "first" / "x.mp4", tmp_path / "second" / "x.mp4"]
    for path in paths:
        path.parent.mkdir()
    more = ("--steps", "3", "--keep-latents")
    team = [start(index, port, path, env, *more) for index, path in enumerate(paths)]
    (said, heard), (nothing, quiet) = (one.communicate(timeout=300) for one in team)
    assert [one.returncode for one in team] == [0, 0], heard + quiet
    assert nothing == ""
    assert [one.name for one in tmp_path.rglob("*.mp4")] == ["x.mp4"]
    data = json.loads(said)["data"]
    assert (data["mesh"], data["output"]) == ("1x2", str(paths[0]))
    alone = tmp_path / "alone.mp4"
    args = (*ARGS[:-2], *more, "--seed", str(data["seed"]), "-o", str(alone))
    assert run_svgen("generate", *args, env=env, cwd=ROOT).returncode == 0
    kept = [next(path.parent.glob("*.latents.safetensors")) for path in (alone, paths[0])]
    one, two = (load_latents(path)[0] for path in kept)  # sums in another order
    assert np.abs(one - two).max() <= 1e-5 * np.abs(one).max()
    difference = np.abs(decoded(alone).astype(int) - decoded(paths[0]))
    assert difference.mean() < 1 and difference.max() <= 16  # H.264 makes levels of a few bits


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_dies_the_other_saves_its_state_and_says_so(env, port, tmp_path, victim):
    paths = [tmp_path / "first" / "x.mp4", tmp_path / "second" / "x.mp4"]
    for path in paths:
        path.parent.mkdir()
    more = (*ENDLESS, "--seed", "3")
    events = "from svgen.cli import main\nmain()"
    team = [start(index, port, path, env, *more, code=events) for index, path in enumerate(paths)]
    for line in team[0].stderr:
        if line.startswith("denoise:  10%"):
            break
    team[victim].send_signal(signal.SIGKILL)
    other = team[1 - victim]
    said, heard = other.communicate(timeout=60)
    team[victim].communicate()
    assert other.returncode == 3, heard
    assert "error[E_PEER]" in heard
    step = int(re.search(r"goes on after step (\d+)", heard)[1])
    assert step >= 30
    assert len(list(paths[1 - victim].parent.glob("*.state.safetensors"))) == 1
    if victim == 1:  # the state lies with process 0 alone: both go on from it, as its note says
        assert json.loads(said)["error"]["code"] == "E_PEER"
        again = [start(index, port, path, env, *more) for index, path in enumerate(paths)]
        heard = [one.communicate(timeout=300)[1] for one in again]
        assert [one.returncode for one in again] == [0, 0], heard
        assert f"going on after step {step} of 300" in heard[0]


def test_abort_from_another_thread_leaves_time_to_end_otherwise():
    """As JAX aborts when the first process dies, in a race with whoever saves the state."""
    program = (
        "import ctypes, os, threading\n"
        "from svgen.cli import hosts\n"
        "hosts._delay_abort()\n"
        "thread = threading.Thread(target=ctypes.CDLL(None).abort)\n"
        "thread.start()\n"
        "thread.join(1)\n"
        "os._exit(3)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 3


def test_process_that_waits_in_vain_says_so(env, port, tmp_path):
    alone = start(0, port, tmp_path / "x.mp4", env, "--steps", "3", code=SHORT_WAIT)
    said, heard = alone.communicate(timeout=120)
    assert alone.returncode == 3, heard
    assert json.loads(said)["error"]["code"] == "E_PEER"


@pytest.mark.parametrize(
    "flags",
    [
        ("--num-processes", "2"),
        ("--coordinator", "127.0.0.1:1", "--num-processes", "2"),
        ("--coordinator", "127.0.0.1", "--num-processes", "2", "--process-id", "0"),
        ("--coordinator", "127.0.0.1:1", "--num-processes", "2", "--process-id", "2"),
        ("--coordinator", "127.0.0.1:1", "--num-processes", "0", "--process-id", "0"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, capsys, tmp_path):
    arguments = ("generate", *ARGS[:3], "-o", str(tmp_path / "x.mp4"), *flags, "--json")
    assert run(arguments) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "E_USAGE"
    assert "--process-id 0" in error["hint"]
