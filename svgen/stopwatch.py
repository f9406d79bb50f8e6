"""Times things side by side: each round runs every one of them once, so that a machine whose speed
drifts is unfair to none.

A first round warms up and is not counted; the second says how many fit into the time. Compiling is
timed apart. Of n times the median is given, with the least and the most as its spread.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Ready = Callable[[], object]  # does the thing, and returns when it is done
Variant = Callable[[], Ready]  # makes one ready, outside of the clock

LEAST_ROUNDS, MOST_ROUNDS = 3, 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiling:
    """What it took to compile one program."""

    seconds: float
    cached: bool  # whether it came from the cache of compiled programs


class Stopwatch:
    """Keeps the times of a bench that shall be over after `budget_s` seconds."""

    def __init__(
        self,
        budget_s: float,
        *,
        clock: Callable[[], float] = time.perf_counter,
        hits: Callable[[], int] = lambda: 0,
    ):
        self._clock, self._hits = clock, hits  # `hits` counts programs found in the cache
        self.end = clock() + budget_s
        self.compiling: dict[str, Compiling] = {}
        self.seconds: dict[str, list[float]] = {}

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self.end - self._clock()

    def compile(self, name: str, make: Callable[[], T]) -> T:
        """Time what compiles a program."""
        before, hits = self._clock(), self._hits()
        made = make()
        self.compiling[name] = Compiling(seconds=self._clock() - before, cached=self._hits() > hits)
        return made

    def repeat(self, variants: Mapping[str, Variant], share: float) -> None:
        """Run variants in turn, as often as a share of the time left allows: from 3 to 20 rounds
        that count.
        """
        until = self._clock() + share * self.left_s
        self._round(variants)
        start = self._clock()
        found = [self._round(variants)]
        one = self._clock() - start
        more = rounds_within(until - self._clock(), one, done=1)
        found += [self._round(variants) for _ in range(more)]
        for name in variants:
            self.seconds[name] = [seconds[name] for seconds in found]

    def _round(self, variants: Mapping[str, Variant]) -> dict[str, float]:
        seconds = {}
        for name, prepare in variants.items():
            ready = prepare()
            start = self._clock()
            ready()
            seconds[name] = self._clock() - start
        return seconds


def rounds_within(left_s: float, one_s: float, *, done: int = 0) -> int:
    """How many rounds more to run, of `one_s` seconds each, within the bounds above."""
    fitting = int(max(left_s, 0) / one_s) if one_s > 0 else MOST_ROUNDS
    return min(max(done + fitting, LEAST_ROUNDS), MOST_ROUNDS) - done


def summary(seconds: Sequence[float]) -> dict[str, float | int]:
    """Median and spread in milliseconds, as data."""
    return {
        "median_ms": statistics.median(seconds) * 1e3,
        "least_ms": min(seconds) * 1e3,
        "most_ms": max(seconds) * 1e3,
        "n": len(seconds),
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | int]:
    """Ratio of the times of two variants, round by round: median and spread."""
    found = [a / b for a, b in zip(ours, theirs, strict=True) if b > 0]
    if not found:
        return {}
    return {
        "median": statistics.median(found),
        "least": min(found),
        "most": max(found),
        "n": len(found),
    }
