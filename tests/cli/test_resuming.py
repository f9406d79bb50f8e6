"""A run that was stopped goes on where it was, and makes what it would have made."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from svgen.cli import run
from tests.helpers import ROOT, run_svgen
from tests.videos import decoded

TINY = "tests/golden/tiny"
STEPS = 6
ARGS = ("a red ball", "--model", TINY, "--res", "32x32", "--frames", "5", "--steps", str(STEPS))
EACH_STEP = ("--save-every", "0")
SEEDED = (*ARGS, "--seed", "3")
STOP_AT = """
import os, signal
from svgen.cli import main, saving
write = saving.Saved.write
def stopping(self, state, **options):
    if int(state.step) == {step} and "{when}" == "before":
        os.kill(os.getpid(), signal.{name})
    write(self, state, **options)
    if int(state.step) == {step} and "{when}" == "after":
        os.kill(os.getpid(), signal.{name})
saving.Saved.write = stopping
main()
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, env):
    path = tmp_path_factory.mktemp("made") / "x.mp4"
    done = run_svgen("generate", *SEEDED, "-o", str(path), env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert [one.name for one in path.parent.iterdir()] == ["x.mp4"], "no state is left"
    return path


def stopped(path: Path, env, *, step=3, name="SIGINT", when="after", args=SEEDED):
    """A run that sends itself a signal once it has (or has not) saved a step."""
    code = STOP_AT.format(step=step, name=name, when=when)
    return subprocess.run(
        [sys.executable, "-c", code, "generate", *args, "-o", str(path), *EACH_STEP, "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def go_on(path: Path, env, undisturbed: Path, step: int) -> None:
    done = run_svgen("generate", *SEEDED, "-o", str(path), env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert f"going on after step {step} of {STEPS}" in done.stderr
    assert np.array_equal(decoded(path), decoded(undisturbed))
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_stopped_run_says_how_to_go_on_and_does(env, undisturbed, tmp_path, name, status):
    path = tmp_path / "x.mp4"
    done = stopped(path, env, name=name)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (status, "E_INTERRUPTED"), done.stderr
    # The signal came while step 3 was being saved; it is heard when that is done.
    assert error["hint"] == "the same command with --seed 3 goes on after step 3"
    assert shlex.split(error["details"]["command"])[:2] == ["svgen", "generate"]
    assert [str(one) for one in tmp_path.iterdir()] == [error["details"]["state"]]
    go_on(path, env, undisturbed, 3)


@pytest.mark.parametrize(("when", "step"), [("before", 2), ("after", 3)])
def test_killed_run_goes_on_after_the_step_it_saved(env, undisturbed, tmp_path, when, step):
    path = tmp_path / "x.mp4"
    done = stopped(path, env, name="SIGKILL", when=when)
    assert done.returncode == -signal.SIGKILL
    left = {one.name for one in tmp_path.iterdir()}
    assert ".x.lock" in left and len(left) == 2, "the state, and a lock that holds nobody"
    go_on(path, env, undisturbed, step)


def test_drawn_seed_is_named_so_that_the_run_can_go_on(env, tmp_path):
    done = stopped(tmp_path / "x.mp4", env, args=ARGS)
    error = json.loads(done.stdout)["error"]
    seed = error["hint"].split("--seed ")[1].split()[0]
    state = load_file(error["details"]["state"])
    again = run_svgen(
        "generate", *ARGS, "--seed", seed, "-o", str(tmp_path / "x.mp4"), env=env, cwd=ROOT
    )
    assert f"going on after step {int(state['step'])}" in again.stderr


@pytest.fixture
def state(env, tmp_path):
    """The path of a state that was left behind."""
    done = stopped(tmp_path / "x.mp4", env)
    return Path(json.loads(done.stdout)["error"]["details"]["state"])


def test_state_that_is_none_of_this_run_is_refused_before_loading(state, tmp_path, capsys):
    good, header = load_file(state), header_of(state)
    changed = json.loads(header["request"]) | {"steps": 9}
    cases = {
        "steps differs (9 there, 6 here)": (good, header | {"request": json.dumps(changed)}),
        "svgen's version differs": (good, header | {"svgen": "0.0.1"}),
        "does not say svgen.state/1": (good, header | {"schema": "svgen.latents/1"}),
        "it must hold": ({name: good[name] for name in good if name != "estimate"}, header),
        "latents is F32[1, 1, 1, 1, 1]": (
            good | {"latents": np.zeros((1, 1, 1, 1, 1), np.float32)},
            header,
        ),
        "it has done 0 of 6 steps": (good | {"step": np.zeros((), np.int32)}, header),
        "NaN": (good | {"estimate": np.full_like(good["estimate"], np.nan)}, header),
    }
    for words, (tensors, metadata) in cases.items():
        save_file(tensors, state, metadata)
        assert run(["generate", *SEEDED, "-o", str(tmp_path / "x.mp4"), "--json"]) == 2
        error = json.loads(capsys.readouterr().out)["error"]
        assert error["code"] == "E_STATE"
        assert words in error["why"], (words, error)
        assert f"delete {state}" in error["hint"]


def header_of(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return file.metadata()
