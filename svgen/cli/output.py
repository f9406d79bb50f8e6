"""What a command says, and where: results on stdout, all else on stderr, JSON with `--json`.

    level        flag    stderr shows
    silent       -qq     nothing
    quiet        -q      errors
    normal               errors, warnings, notes, progress
    verbose      -v      also stages and their times
    debug        -vv     also tracebacks and the logs of JAX

stdout always carries the result, whatever the level: lines; with `--json` one object; with
`--json=events` one object a line while the run goes on, and that same object last.
"""

import json
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path, PurePath
from typing import Any, NoReturn, TextIO

from svgen import __version__
from svgen.cli.endings import explain
from svgen.cli.progress import Bar, LiveBar, PlainBar, ReportedBar
from svgen.cli.secrets import hide
from svgen.cli.streams import abandon, give_up_stdout
from svgen.errors import SvgenError

KEPT = ("video", "dump", "picture")  # kinds of saved files that are results
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
QUIET, NORMAL, VERBOSE, DEBUG = -1, 0, 1, 2
COLORS = {"red": "31;1", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}


def truthy(value: str | None) -> bool:
    """Read an environment variable as a switch."""
    return (value or "").lower() not in ("", "0", "false", "no", "off", "n", "f")


def color_wanted(stream: TextIO | None, flag: bool | None = None) -> bool:
    """Decide about colour: the flag, NO_COLOR, FORCE_COLOR, TERM=dumb, then if it is a terminal."""
    if flag is not None:
        return flag
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and stream is not None and stream.isatty()


def is_moving(stream: TextIO | None) -> bool:
    """Whether a bar can move on a stream: on a terminal that is not a dumb one."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def printable(text: str) -> str:
    """Escape control characters, which could steer a terminal, and those that turn the direction
    of text, behind which words could hide; line breaks and tabs stay.
    """
    return STEERING.sub(lambda found: ascii(found[0])[1:-1], text)


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _plain(value: object) -> Any:
    """Make JSON of what a command may put into its data beside plain values."""
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no place in JSON")


class Console:
    """The voice of one run of one command, which gets it from `with_console`."""

    def __init__(
        self,
        command: str,
        *,
        verbosity: int = NORMAL,
        json: bool = False,
        events: bool = False,
        color: bool | None = None,
    ):
        self.command, self.verbosity, self.json, self.color = command, verbosity, json, color
        self.events = events  # of the run, as JSON lines; only with `json`
        self.muted = False
        self.warnings: list[str] = []
        self.timings: dict[str, float] = {}  # stage -> seconds
        self.exit_code = 0
        self._data: dict[str, Any] | None = None
        self._error: SvgenError | None = None
        self._unwritten: OSError | None = None  # why the result could not be written
        self._saved = ""  # the last file that was made
        self._bar: LiveBar | None = None  # one that is shown
        self._counting: Bar | None = None  # one in use, shown or not

    @property
    def debug(self) -> bool:
        """Tracebacks were asked for."""
        return self.verbosity >= DEBUG or truthy(os.environ.get("SVGEN_DEBUG"))

    def paint(self, text: str, color: str, stream: TextIO | None = None) -> str:
        """Colour a text for a stream (stdout if none is given), where colour is wanted there."""
        if not color_wanted(stream or sys.stdout, self.color):
            return text
        return f"\x1b[{COLORS[color]}m{text}\x1b[0m"

    def mute(self) -> None:
        """Say nothing from now on but errors: another process speaks for this one."""
        self.verbosity, self.json, self.events, self.muted = QUIET, False, False, True

    def note(self, text: str) -> None:
        """Say something useful to everyone."""
        self._say(text, NORMAL)

    def detail(self, text: str) -> None:
        """Say something that `-v` shows."""
        self._say(text, VERBOSE)

    def warn(self, text: str) -> None:
        """Say what may surprise; `--json` keeps it in `warnings`."""
        self.warnings.append(text)
        self._say(
            f"{self.paint('warning:', 'yellow', sys.stderr)} {printable(text)}", NORMAL, raw=True
        )

    def result(
        self, data: dict[str, Any], lines: Sequence[str] = (), *, error: SvgenError | None = None
    ) -> None:
        """Give the result: its lines now, or its data as JSON when the command ends. Call it once.

        With `error` the result stands, but the run failed: a batch that finished in part, a check
        that found something.
        """
        assert self._data is None, "a command has one result"
        self._data = data
        if not self.json and not self.muted:
            self._emit("".join(f"{line}\n" for line in lines))
        if error is not None:
            self.fail(error)

    def line(self, text: str) -> None:
        """Give a line of the result before the command ends: of a batch, one for each item."""
        if not self.json and not self.muted:
            self._emit(f"{text}\n")

    def event(self, name: str, /, **values: Any) -> None:
        """Tell a program what goes on: start, stage, step, saved. Nothing without events."""
        if values.get("kind") in KEPT:
            self._saved = str(values["path"])
        if self.events:
            self._emit(json.dumps({"event": name, **values}, default=_plain) + "\n")

    def fail(self, error: SvgenError) -> None:
        """Report an error, in three lines for each of its problems; JSON follows in `finish`."""
        self._error, self.exit_code = error, error.exit_code
        for problem in error.problems:
            label = self.paint(f"error[{problem.code}]:", "red", sys.stderr)
            lines = [f"{label} {_one_line(problem.message)}"]
            lines += [f"  why: {_one_line(problem.why)}"] if problem.why else []
            lines += [f"  try: {_one_line(problem.hint)}"] if problem.hint else []
            self._say("\n".join(lines), QUIET, raw=True)

    def crash(self, error: BaseException) -> None:
        """Report whatever ended the command, expected or not."""
        problem = explain(error)
        if self.debug and problem.code == "E_INTERNAL":
            self._say("".join(traceback.format_exception(error)).rstrip(), QUIET)
        self.fail(problem)

    def leave(self, error: SvgenError) -> NoReturn:
        """Report an error and end the process at once, from any thread: what Python or JAX would
        wait for never comes.
        """
        self.fail(error)
        self.finish()
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):
                stream.flush()
        os._exit(error.exit_code)

    def finish(self) -> None:
        """Write the one JSON object, with `--json`; fail if the result could not be written."""
        if self.json:
            self._finish_json()
        if self._unwritten is not None and self._error is None:
            self.fail(give_up_stdout(self._unwritten, self._saved))

    def _finish_json(self) -> None:
        body = {
            "schema": f"svgen.{self.command.replace(' ', '.')}/1" if self.command else "svgen/1",
            "ok": self._error is None,
            "command": self.command,
            "version": __version__,
            "data": self._data,
            "warnings": self.warnings,
            "error": self._error.as_json() if self._error else None,
        }
        body = {"event": "result", **body} if self.events else body
        self._emit(json.dumps(body, default=_plain, allow_nan=False) + "\n")

    @contextmanager
    def bar(self, total: int | None, label: str, unit: str = "step") -> Iterator[Bar]:
        """Show progress with time left: a bar on a terminal, else a line per 10 %, with -q nothing.

        Unit "B" counts bytes and is shown in kB, MB, GB. Each step is an event.
        """
        with self._shown_bar(total, label, unit) as shown:
            bar = ReportedBar(shown, self._report_step) if self.events else shown
            self._counting = bar
            try:
                yield bar
            finally:
                self._counting = None

    def _report_step(self, bar: Bar) -> None:
        self.event("step", name=bar.label, done=bar.done, total=bar.total, unit=bar.unit)

    @contextmanager
    def _shown_bar(self, total: int | None, label: str, unit: str) -> Iterator[Bar]:
        if self.verbosity < NORMAL:
            yield Bar(total, label, unit)
        elif not is_moving(sys.stderr):
            yield PlainBar(total, label, unit, say=self.note)
        else:
            with LiveBar(total, label, unit, color=color_wanted(sys.stderr, self.color)) as bar:
                self._bar = bar
                try:
                    yield bar
                finally:
                    self._bar = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a part of the run; `-v` says when it starts and how long it took.

        A bar that has counted nothing yet does not count this time either.
        """
        self.detail(f"{name} ...")
        self.event("stage", name=name)
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self.timings[name] = self.timings.get(name, 0.0) + seconds
            self.detail(f"{name}: {seconds:.1f} s")
            self.event("stage", name=name, seconds=round(seconds, 3))
            if self._counting and not self._counting.done:
                self._counting.restart()

    def _say(self, text: str, level: int, *, raw: bool = False) -> None:
        """Write to stderr, above a bar that is shown. That nobody can read it is no failure."""
        if self.verbosity < level or sys.stderr is None:
            return
        line = hide(text if raw else printable(text)) + "\n"
        try:
            with self._bar.aside() if self._bar else nullcontext():
                sys.stderr.write(line)
                sys.stderr.flush()
        except OSError:
            abandon(sys.stderr)

    def send(self, path: Path) -> None:
        """Write the bytes of a file to stdout, as the result; raises FileError if they do not all
        arrive.
        """
        with path.open("rb") as file:
            try:
                shutil.copyfileobj(file, sys.stdout.buffer)
                sys.stdout.buffer.flush()
            except OSError as error:
                raise give_up_stdout(error, str(path)) from None

    def _emit(self, text: str) -> None:
        """Write text to stdout. A reader that left early (`| head`) ends the output quietly; a full
        disk is a failure, which `finish` reports: it is no reason to end a run.
        """
        if sys.stdout is None:
            return
        try:
            sys.stdout.write(hide(text))
            sys.stdout.flush()
        except OSError as error:
            abandon(sys.stdout)
            if not isinstance(error, BrokenPipeError):
                self._unwritten = error
