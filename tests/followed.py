"""A real run of `svgen generate` whose events are followed, so that it can be met in a stage."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers import ROOT

TINY = "tests/golden/tiny"
STEPS, FRAMES = 16, 5
ARGS = ("a red ball", "--model", TINY, "--res", "32x32", "--frames", str(FRAMES))
FLAGS = ("--steps", str(STEPS), "--seed", "3", "--save-every", "0", "--json=events")
WAIT_S = 120
SIGNALLED = """
import os
from svgen.cli import main
name, mark, count, after, signals = {point}
inner, left = getattr(os, name), count
def strike():
    for number in signals:
        os.kill(os.getpid(), number)
def watched(*given, **options):
    global left
    first = f"/proc/self/fd/{{given[0]}}" if isinstance(given[0], int) else ""
    shown = os.readlink(first) if first else " ".join(map(str, given))
    left -= mark in shown
    if not left and not after:
        left = -1
        strike()
    found = inner(*given, **options)
    if not left:
        left = -1
        strike()
    return found
setattr(os, name, watched)
main()
"""
Wanted = Callable[[dict[str, Any]], bool]  # of an event


class Point(NamedTuple):
    """A call of `os.NAME` about a file with a mark in its name, which one of them, and the signals
    that the process sends itself before or after it.
    """

    name: str
    mark: str
    count: int
    after: bool
    signals: tuple[int, ...]

    def __str__(self) -> str:
        """Spell it as Python."""
        return repr((*self[:4], tuple(map(int, self.signals))))


class Run:
    """A process of `svgen generate`, with its events as they come and when each did."""

    def __init__(
        self, folder: Path, env: dict[str, str], point: Point | None = None, flags: Sequence = FLAGS
    ):
        self.folder, self.errors = folder, folder.parent / "stderr"
        self.events: list[tuple[float, dict[str, Any]]] = []
        self.changed = threading.Condition()
        program = ("-c", SIGNALLED.format(point=point)) if point else ("-m", "svgen")
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *program, "generate", *ARGS, *flags, "-o", str(folder / "x.mp4")],
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
        with self.changed:
            self.changed.notify()

    def when(self, wanted: Wanted) -> float | None:
        """When the first such event came; None before it has."""
        return next((at for at, event in self.events if wanted(event)), None)

    def wait_for(self, wanted: Wanted) -> bool:
        """Wait for an event; False if the process ended without it."""

        def is_settled() -> bool:
            return self.when(wanted) is not None or not self.reader.is_alive()

        with self.changed:
            while not is_settled():
                self.changed.wait(0.1)
            return self.when(wanted) is not None

    def end(self) -> int:
        """Wait for the end of the process; returns its status."""
        status = self.process.wait(WAIT_S)
        self.reader.join(WAIT_S)
        self.process.stdout.close()
        return status

    @property
    def said(self) -> str:
        """What stderr shows."""
        return self.errors.read_text()

    @property
    def result(self) -> dict[str, Any]:
        """The last line of stdout."""
        return self.events[-1][1]


def is_event(kind: str, /, **values: Any) -> Wanted:
    """Tell events of a kind that have these values."""
    return lambda event: (
        event.get("event") == kind and all(event.get(key) == value for key, value in values.items())
    )


def steps_done(count: int) -> Wanted:
    """Tell events after at least so many steps."""
    return lambda event: is_event("step", name="denoise")(event) and event["done"] >= count


def encoders(folder: Path) -> list[str]:
    """The ffmpeg processes that write into a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command and "ffmpeg" in command:
            found.append(command)
    return found


def wait_until(condition: Callable[[], bool]) -> bool:
    """Poll a condition; False if it does not come true."""
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
