"""`kill -9` at random moments of a run: whatever was saved is whole, no part of a video ever has
the video's name, and the same command makes what an undisturbed run makes.

Moments come from a seeded generator. Some lie a random time after an event of the run; where a
moment is too short to be met from outside, the run kills itself before or after one call of `os`.
Several kills follow each other before a run comes to its end.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.helpers import ROOT
from tests.videos import decoded

pytestmark = pytest.mark.faults

TINY = "tests/golden/tiny"
STEPS, FRAMES = 8, 5
ARGS = ("a red ball", "--model", TINY, "--res", "32x32", "--frames", str(FRAMES))
FLAGS = ("--steps", str(STEPS), "--seed", "3", "--save-every", "0", "--json=events")
QUOTAS = {"load": 7, "denoise": 8, "save": 8, "decode": 7, "encode": 7, "rename": 7}
BEFORE_LATENTS = ("load", "denoise", "save")  # later stages leave none of these to do
IN_A_ROW = 4
WAIT_S = 120
SUICIDE = """
import os, signal
from svgen.cli import main
name, mark, count, after = {point!r}
inner, left = getattr(os, name), count
def deadly(*given, **options):
    global left
    first = f"/proc/self/fd/{{given[0]}}" if isinstance(given[0], int) else ""
    shown = os.readlink(first) if first else " ".join(map(str, given))
    left -= mark in shown
    if not left and not after:
        os.kill(os.getpid(), signal.SIGKILL)
    found = inner(*given, **options)
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return found
setattr(os, name, deadly)
main()
"""


class Point(NamedTuple):
    """A call of `os.NAME` about a file with a mark in its name, and which one of them."""

    name: str
    mark: str
    count: int
    after: bool


class Run:
    """A process of `svgen generate`, with its events as they come and when each did."""

    def __init__(self, folder: Path, env, point: Point | None = None):
        self.folder, self.events, self.changed = folder, [], threading.Condition()
        program = ("-c", SUICIDE.format(point=tuple(point))) if point else ("-m", "svgen")
        with (folder.parent / "stderr").open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *program, "generate", *ARGS, *FLAGS, "-o", str(folder / "x.mp4")],
                env={**os.environ, "PYTHONPATH": str(ROOT), **env},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self.changed:
                self.events.append((time.monotonic(), json.loads(line)))
                self.changed.notify()

    def wait_for(self, wanted) -> bool:
        """Whether an event came, before the process ended."""
        with self.changed:
            self.changed.wait_for(
                lambda: any(wanted(event) for _, event in self.events) or not self.reads(), WAIT_S
            )
            return any(wanted(event) for _, event in self.events)

    def reads(self) -> bool:
        return self.process.poll() is None

    def end(self) -> int:
        """Wait for the end of the process; returns its status."""
        status = self.process.wait(WAIT_S)
        self.reader.join(WAIT_S)
        self.process.stdout.close()
        return status

    @property
    def said(self) -> str:
        return (self.folder.parent / "stderr").read_text()


def is_event(what: str, /, **values):
    return lambda event: (
        event.get("event") == what and all(event.get(key) == value for key, value in values.items())
    )


def steps_done(count: int):
    return lambda event: (
        event.get("event") == "step" and event["name"] == "denoise" and event["done"] >= count
    )


TRIGGERS = {  # stage -> the event after which it begins, and one that ends it
    "load": (is_event("start"), steps_done(1)),
    "denoise": (steps_done(1), is_event("saved", kind="latents")),
    "decode": (is_event("stage", name="load vae"), is_event("step", name="decode", done=FRAMES)),
    "encode": (is_event("step", name="decode", done=FRAMES), is_event("saved", kind="video")),
}


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    names = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "TMPDIR")
    return dict.fromkeys(names, str(home)) | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


class Undisturbed(NamedTuple):
    frames: np.ndarray
    seconds: dict[str, float]  # that each stage took


@pytest.fixture(scope="module")
def undisturbed(env, tmp_path_factory):
    """What a run makes that nobody kills, and how long its stages take; the first one compiles."""
    for _ in range(2):
        folder = tmp_path_factory.mktemp("made") / "out"
        folder.mkdir()
        run = Run(folder, env)
        assert run.end() == 0, run.said
        assert [one.name for one in folder.iterdir()] == ["x.mp4"]

    def when(wanted) -> float:
        return next(at for at, event in run.events if wanted(event))

    seconds = {stage: when(last) - when(first) for stage, (first, last) in TRIGGERS.items()}
    return Undisturbed(decoded(folder / "x.mp4"), seconds)


def kill(stage: str, folder: Path, env, draw: random.Random, seconds) -> bool:
    """Start the command and kill it within a stage; False if it ended before."""
    if stage in ("save", "rename"):
        run = Run(folder, env, point_of(stage, draw))
        return run.end() == -signal.SIGKILL
    run = Run(folder, env)
    first = steps_done(draw.randint(1, STEPS - 1)) if stage == "denoise" else TRIGGERS[stage][0]
    delay_s = draw.random() * seconds[stage] / (STEPS if stage == "denoise" else 1)
    if run.wait_for(first):
        time.sleep(delay_s)  # the random moment
    run.process.kill()
    return run.end() == -signal.SIGKILL


def point_of(stage: str, draw: random.Random) -> Point:
    """A call to die at: while a state or the latents are written, or the video gets its name."""
    if stage == "save":
        marks = [("fsync", ".state."), ("replace", ".state."), ("replace", ".latents.")]
        name, mark = draw.choice(marks)
        return Point(
            name, mark, draw.randint(1, 3) if mark == ".state." else 1, draw.random() < 0.5
        )
    name, mark = draw.choice(
        [("link", ".x.partial"), ("link", ".x.partial"), ("unlink", ".latents.")]
    )
    return Point(name, mark, 1, draw.random() < 0.5)


def chains(draw: random.Random):
    """All kills, in rows of those that can follow each other."""
    rest = [stage for stage, count in QUOTAS.items() for _ in range(count)]
    draw.shuffle(rest)
    while rest:
        row, rest = rest[:IN_A_ROW], rest[IN_A_ROW:]
        yield sorted(row, key=lambda stage: (stage not in BEFORE_LATENTS, stage == "rename"))


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


def encoders(folder: Path) -> list[str]:
    """Processes that write into a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command and "ffmpeg" in command:
            found.append(command)
    return found


def wait_until(condition) -> bool:
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_killed_runs_lose_nothing_that_was_saved(env, undisturbed, tmp_path, capsys):
    draw, killed, resumed, steps_saved = random.Random(7), Counter(), 0, 0
    for number, row in enumerate(chains(draw)):
        folder = tmp_path / str(number) / "out"
        folder.mkdir(parents=True)
        saved = 0
        for stage in row:
            there = kill(stage, folder, env, draw, undisturbed.seconds)
            killed[stage] += there
            now = check_rest(folder, undisturbed.frames)
            assert now >= saved or (folder / "x.mp4").exists()
            saved = now
        whole = (folder / "x.mp4").exists()
        run = Run(folder, env)
        assert run.end() == 0 or (whole and "E_OUTPUT_EXISTS" in run.said), run.said
        if not whole and saved:
            said = "all steps are done" if saved == STEPS else f"going on after step {saved} of"
            assert said in run.said
        assert np.array_equal(decoded(folder / "x.mp4"), undisturbed.frames)
        assert [one.name for one in folder.iterdir()] == ["x.mp4"]
        resumed, steps_saved = resumed + 1, steps_saved + saved
    with capsys.disabled():
        print(
            f"\nkilled {sum(killed.values())} times, {dict(killed)}; {resumed} runs to the end, "
            f"{steps_saved} of {resumed * STEPS} steps not taken again, all frames identical"
        )
    assert sum(killed.values()) >= 40 and min(killed.values()) >= 3
