"""`kill -9` at random moments of a run: whatever was saved is whole, no part of a video ever has
the video's name, and the same command makes what an undisturbed run makes.

Moments come from a seeded generator. Some lie a random time after an event of the run; where a
moment is too short to be met from outside, the run kills itself before or after one call of `os`.
Several kills follow each other before a run comes to its end.
"""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.faults.conftest import TRIGGERS
from tests.followed import STEPS, Point, Run, encoders, steps_done, wait_until
from tests.videos import decoded

pytestmark = pytest.mark.faults

KILLS = int(os.environ.get("KILLS", "6"))  # in each stage
ORDER = {"load": 0, "denoise": 0, "save": 0, "latents": 1, "decode": 2, "encode": 2, "rename": 3}
ROWS = KILLS + 1  # of kills that follow each other, each stage at most once in one
KILL = (signal.SIGKILL,)
POINTS = {  # of stages too short to be met from outside: calls of `os`, and a mark of their files
    "save": [(name, ".state.", count) for name in ("fsync", "replace") for count in (1, 2, 3)],
    "latents": [("fsync", ".latents.", 1), ("replace", ".latents.", 1), ("unlink", ".state.", 1)],
    "rename": [  # the first partial file only tries whether the output can be written
        ("link", ".x.partial", 1),
        ("unlink", ".x.partial", 2),
        ("unlink", ".latents.", 1),
    ],
}


def kill(stage: str, folder: Path, env, draw: random.Random, seconds) -> bool:
    """Start the command and kill it within a stage; False if it ended before."""
    run = Run(folder, env, point_of(stage, draw) if stage in POINTS else None)
    if stage in POINTS:
        return is_killed(run)
    first = steps_done(draw.randint(1, STEPS // 2)) if stage == "denoise" else TRIGGERS[stage][0]
    delay_s = draw.random() * seconds[stage] / (STEPS if stage == "denoise" else 1)
    if run.wait_for(first):
        time.sleep(delay_s)  # the random moment
    run.process.kill()
    return is_killed(run)


def is_killed(run: Run) -> bool:
    status = run.end()
    assert status in (0, -signal.SIGKILL), run.said
    return status != 0


def point_of(stage: str, draw: random.Random) -> Point:
    """A call to die at, or just after."""
    return Point(*draw.choice(POINTS[stage]), draw.random() < 0.5, KILL)


def rows(draw: random.Random) -> list[list[str]]:
    """All kills, in rows of those that can follow each other."""
    found: list[list[str]] = [[] for _ in range(ROWS)]
    for stage in ORDER:
        shortest = sorted(found, key=lambda row: (len(row), draw.random()))
        for row in shortest[:KILLS]:
            row.append(stage)
    for row in found:
        row.sort(key=lambda stage: (ORDER[stage], draw.random()))
    return found


def check_rest(folder: Path, frames: np.ndarray) -> int:
    """Hold what a killed run has left against the rules; returns the steps that it saved."""
    assert wait_until(lambda: not encoders(folder)), "an encoder is left"
    steps = 0
    for path in folder.iterdir():
        if path.name == "x.mp4":
            assert np.array_equal(decoded(path), frames), "a video that is not whole"
        elif path.name.startswith("x-"):
            arrays = load_file(path)
            assert all(np.isfinite(array).all() for array in arrays.values())
            steps = max(steps, int(arrays.get("step", STEPS)))
        else:
            assert path.name == ".x.lock" or path.name.endswith(".partial.mp4"), path.name
    return steps


def test_killed_runs_lose_nothing_that_was_saved(env, undisturbed, tmp_path, capsys):
    draw, start = random.Random(7), time.monotonic()
    killed, missed, ended, steps_saved = Counter(), 0, 0, 0
    for row in rows(draw):
        folder, saved = new_folder(tmp_path), 0
        for stage in row:
            if not kill(stage, folder, env, draw, undisturbed.seconds):
                missed += 1  # it came to its end first
                check_end(folder, undisturbed.frames)
                folder, saved = new_folder(tmp_path), 0
                continue
            killed[stage] += 1
            now = check_rest(folder, undisturbed.frames)
            assert now >= saved or (folder / "x.mp4").exists()
            saved = now
        finish(folder, env, saved)
        check_end(folder, undisturbed.frames)
        ended, steps_saved = ended + 1, steps_saved + saved
    with capsys.disabled():
        print(
            f"\nkilled {killed.total()} times, {dict(killed)}, missed {missed}; {ended} runs "
            f"came to the end, {steps_saved} of {ended * STEPS} steps were not taken again, all "
            f"frames identical; {time.monotonic() - start:.0f} s"
        )
    assert killed.total() >= KILLS * len(ORDER) - 2 and set(killed) == set(ORDER)


def new_folder(base: Path) -> Path:
    folder = base / str(len(list(base.iterdir()))) / "out"
    folder.mkdir(parents=True)
    return folder


def check_end(folder: Path, frames: np.ndarray) -> None:
    assert np.array_equal(decoded(folder / "x.mp4"), frames)
    assert [one.name for one in folder.iterdir()] == ["x.mp4"]


def finish(folder: Path, env, saved: int) -> None:
    """Run the command to its end, which says what it goes on from."""
    whole = (folder / "x.mp4").exists()
    run = Run(folder, env)
    assert run.end() == 0, run.said
    if whole:
        assert "is whole, made by a run that was killed later" in run.said
    elif saved:
        said = "all steps are done" if saved == STEPS else f"going on after step {saved} of"
        assert said in run.said
