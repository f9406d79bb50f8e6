"""SIGTERM and Ctrl-C in every stage: the documented exit code, the way on, and nothing half done.

One output goes through all stages: each run is stopped in a later one than the run before it.
"""

import shlex
import signal
import time

import numpy as np
import pytest

from tests.followed import STEPS, Point, Run, encoders, is_event, steps_done
from tests.videos import decoded

pytestmark = pytest.mark.faults

INT, TERM = signal.SIGINT, signal.SIGTERM
MET = {  # stages that are met from outside: the event that begins each, least steps saved after it
    "before loading": (is_event("start"), 0),
    "loading": (is_event("stage", name="load text encoder"), 0),
    "compiling": (is_event("stage", name="compile the step"), 0),
    "denoising": (steps_done(2), 2),
    "loading again": (is_event("stage", name="load transformer"), 2),
}
STRUCK = {  # stages that are too short for that: which call is met by the signal, steps after it
    "saving": (("fsync", ".state.", 1, False), 3),
    "the last step": (("replace", ".state.", STEPS - 4, True), STEPS - 1),
    "saving the latents": (("replace", ".latents.", 1, False), STEPS),
}
DECODING = is_event("step", name="decode", done=1)
ENCODING = ("fsync", ".x.partial", 1, False)


def check(run: Run, folder, number: int, status: int, steps: int) -> None:
    """Hold what a stopped run says and leaves against the rules."""
    assert run.end() == status, run.said
    error = run.result["error"]
    assert (run.result["ok"], error["code"]) == (False, "E_INTERRUPTED")
    assert (
        f"error[E_INTERRUPTED]: stopped by {'SIGTERM' if number == TERM else 'Ctrl-C'}" in run.said
    )
    left = sorted(path.name for path in folder.iterdir())
    assert not encoders(folder)
    kept = error["details"].get("latents") or error["details"].get("state")
    assert left == ([kept.rpartition("/")[2]] if steps else []), left
    if steps:
        assert "the same command with --seed 3 goes on" in error["hint"]
        command = shlex.split(error["details"]["command"])
        assert command[:2] == ["svgen", "generate"] and "--seed" in command


@pytest.mark.parametrize(("number", "status"), [(INT, 130), (TERM, 143)])
def test_run_that_is_stopped_in_every_stage(env, undisturbed, tmp_path, capsys, number, status):
    folder = tmp_path / "out"
    folder.mkdir()
    start = time.monotonic()
    for wanted, steps in MET.values():
        run = Run(folder, env)
        assert run.wait_for(wanted), run.said
        run.process.send_signal(number)
        check(run, folder, number, status, steps)
    for point, steps in STRUCK.values():
        run = Run(folder, env, Point(*point, (number,)))
        check(run, folder, number, status, steps)
    run = Run(folder, env)
    assert run.wait_for(DECODING), run.said
    assert "all steps are done" in run.said
    run.process.send_signal(number)
    check(run, folder, number, status, STEPS)
    check(Run(folder, env, Point(*ENCODING, (number,))), folder, number, status, STEPS)
    run = Run(folder, env)
    assert run.end() == 0, run.said
    assert np.array_equal(decoded(folder / "x.mp4"), undisturbed.frames)
    assert [path.name for path in folder.iterdir()] == ["x.mp4"]
    with capsys.disabled():
        stages = (*MET, *STRUCK, "decoding", "encoding")
        print(
            f"\nstopped with {status} while {', '.join(stages)}; {time.monotonic() - start:.0f} s"
        )


def test_second_ctrl_c_does_not_wait(env, undisturbed, tmp_path):
    """Both come while a state is saved: the first would wait until that is done."""
    folder = tmp_path / "out"
    folder.mkdir()
    run = Run(folder, env, Point("fsync", ".state.", 3, False, (INT, INT)))
    assert run.end() == -INT
    assert "error[" not in run.said
    run = Run(folder, env)
    assert run.end() == 0, run.said
    assert "going on after step 2 of" in run.said
    assert np.array_equal(decoded(folder / "x.mp4"), undisturbed.frames)
    assert [path.name for path in folder.iterdir()] == ["x.mp4"]
