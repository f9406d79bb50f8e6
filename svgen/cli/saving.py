"""What a run keeps on disk while it goes, beside its output: its state between two steps, then its
latents. Both are read at the start of the same command, and deleted when the MP4 is whole.

How often a state is saved follows from what it costs: the next save comes no earlier than a hundred
times what the last one took, so that saving takes less than 1 % of a run.
"""

import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from svgen.cli.endings import explain
from svgen.cli.hosts import shared_latents, shared_state
from svgen.cli.output import Console
from svgen.cli.resolve import recipe_model
from svgen.config import Request
from svgen.errors import NumericalError, SvgenError
from svgen.partial import partial_file
from svgen.resume import (
    latents_path,
    load_finished,
    load_state,
    save_latents,
    save_state,
    state_path,
)

if TYPE_CHECKING:
    from svgen.cli.execution import Team
    from svgen.pipeline import Pipeline
    from svgen.scheduler import DenoiseState

GAP = 100  # between two saves, in times of what the last one took
GUESSED_BYTES_PER_S = 100e6  # of the first save: a slow disk
GUESSED_S = 0.02  # what bringing even a small file to the disk takes


class Pace:
    """When a state is saved: `every_s` seconds apart, or by what a save takes if that is None.

    The clock counts from the start of the computer, so nothing happens when the date is changed.
    """

    def __init__(self, every_s: float | None = None):
        self.every_s, self.gap_s, self.since = every_s, every_s, time.monotonic()

    def is_due(self, size_bytes: int) -> bool:
        """Whether a state of this size may be saved now."""
        if self.gap_s is None:
            self.gap_s = GAP * (GUESSED_S + size_bytes / GUESSED_BYTES_PER_S)
        return time.monotonic() - self.since >= self.gap_s

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Save in the block; the next one waits accordingly."""
        start = time.monotonic()
        yield
        self.since = time.monotonic()
        self.gap_s = GAP * (self.since - start) if self.every_s is None else self.every_s


class Saved:
    """The state of a run on disk: read at its start, written now and then, deleted at its end."""

    def __init__(
        self,
        console: Console,
        target: Path,
        request: Request,
        team: "Team",
        *,
        every_s: float | None = None,
        resumable: bool = True,
    ):
        self.console, self.request, self.team = console, request, team
        self.resumable = resumable  # the same command writes to the same place
        self.target, self.path = target, state_path(target, request)
        self.latents_path = latents_path(target, request)
        self.pace = Pace(every_s)
        self.step = 0  # that the file holds
        self.last: dict[str, np.ndarray] = {}  # in a team, whose buffers may die with a peer

    def read_latents(self, pipeline: "Pipeline") -> np.ndarray | None:
        """The latents to decode, if a former run of the same request has left them."""
        shape = pipeline.latents_shape(self.request)
        writes = self.team.writes
        found = load_finished(self.latents_path, self.request, shape) if writes else None
        if self.team.count > 1:  # all go on where the one that writes can
            found = shared_latents(found, shape)
        if found is not None:
            self.console.note(f"all steps are done: decoding {self.latents_path}")
        return found

    def read(self, pipeline: "Pipeline") -> "DenoiseState | None":
        """The state to go on from, if a former run has left one."""
        from svgen.scheduler import DenoiseState

        shape = pipeline.latents_shape(self.request)
        found = load_state(self.path, self.request, shape) if self.team.writes else None
        if self.team.count > 1:
            found = shared_state(found, shape)
        if found is None:
            return None
        self.step = int(found["step"])
        self.console.note(f"going on after step {self.step} of {self.request.steps}: {self.path}")
        return DenoiseState(**found)

    def write(self, state: "DenoiseState", *, now: bool = False) -> None:
        """Write a state, `now` or only if it is time to."""
        if self.team.count > 1:
            self.last = {name: np.array(value) for name, value in state._asdict().items()}
        size = sum(value.nbytes for value in state)
        if self.team.writes and self.resumable and (now or self.pace.is_due(size)):
            self._save(state._asdict())

    def _save(self, state: Mapping[str, np.ndarray]) -> None:
        with self.pace.measured():
            save_state(self.path, state, self.request)
        self.step = int(state["step"])
        self.console.event("saved", kind="state", path=self.path, step=self.step)

    def write_latents(self, latents: np.ndarray) -> None:
        """Write what the last step has made; it takes the place of the state."""
        self.last = {}
        if not self.team.writes:
            return
        save_latents(self.latents_path, latents, self.request)
        self.delete_state()
        self.console.detail(f"latents saved: {self.latents_path}")
        self.console.event("saved", kind="latents", path=self.latents_path)

    def delete_state(self) -> None:
        """Sweep up after the last step, what a killed run had half written too."""
        with suppress(OSError, SvgenError):
            self.path.unlink(missing_ok=True)
            self.step = 0
            with partial_file(self.path):
                pass

    def sweep(self, *, keep_latents: bool) -> None:
        """Sweep up after the MP4 is whole: the latents, and what a killed run had half written."""
        if not keep_latents:
            with suppress(OSError):
                self.latents_path.unlink(missing_ok=True)
        with suppress(OSError, SvgenError), partial_file(self.target):
            pass

    def explain(self, error: BaseException, state: "DenoiseState | None" = None) -> SvgenError:
        """Say how to go on after an error: after `state`, which is saved, or the last one that is
        known.
        """
        problem = explain(error)
        if state is None and self.last:
            self._save(self.last)
        if self.step:
            problem.details["state"] = str(self.path)
            self._add_way_on(problem, f"goes on after step {self.step}")
        return problem

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Say how to go on, with what ends the block, where a state is on disk."""
        try:
            yield
        except NumericalError:  # it would come again
            raise
        except (Exception, KeyboardInterrupt) as error:
            told = isinstance(error, SvgenError) and "state" in error.details
            if told or not (self.step or self.last):
                raise
            raise self.explain(error) from error

    @contextmanager
    def good_kept(self) -> Iterator[None]:
        """Save the last good state of a block whose numbers go bad, and say where it is."""
        try:
            yield
        except NumericalError as error:
            if error.state is not None and int(error.state.step) and self.resumable:
                self.write(error.state, now=True)
                error.details["state"] = str(self.path)
                error.hint += f"; the good latents after step {self.step} are kept in {self.path}"
                self._add_way_on(error, "goes on from them")
            raise

    @contextmanager
    def keeping_latents(self) -> Iterator[None]:
        """Say, with whatever ends the block, that the latents are kept and how to decode them."""
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            problem, kept = explain(error), str(self.latents_path)
            if self.team.writes:
                problem.details["latents"] = kept
                words = ["svgen", "decode", kept, "-o", "NAME.mp4"]
                if not _is_named(self.request):  # a folder has to be named again
                    words += ["--model", self.request.model]
                again = f"the latents are kept: {shlex.join(words)}"
                problem.hint = f"{problem.hint}; {again}" if problem.hint else again
                if self.resumable:
                    self._add_way_on(problem, "goes on with them")
            raise problem from error

    def _add_way_on(self, problem: SvgenError, what: str) -> None:
        seed = self.request.seed
        again = f"the same command with --seed {seed} {what}"
        problem.hint = f"{problem.hint}; {again}" if problem.hint else again
        problem.details["command"] = shlex.join(_with_seed(["svgen", *sys.argv[1:]], seed))


def _is_named(request: Request) -> bool:
    """Whether `svgen decode` takes the model from the latents."""
    with suppress(SvgenError):
        return bool(recipe_model(request.as_json()))
    return False


def _with_seed(command: list[str], seed: int) -> list[str]:
    """The command of this run, with the seed that it drew if it names none."""
    if any(word == "--seed" or word.startswith("--seed=") for word in command):
        return command
    end = command.index("--") if "--" in command else len(command)
    return [*command[:end], "--seed", str(seed), *command[end:]]
