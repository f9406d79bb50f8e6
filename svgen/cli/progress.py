"""Progress of a known amount of work: silent, as one line per 10 %, or as a bar on a terminal."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

TENTHS = 10
COLUMNS, ROWS = 80, 24


def _amount(count: int, unit: str) -> str:
    """Write a number of things, bytes in decimal multiples."""
    if unit != "B":
        return str(count)
    for size, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {name}"
    return f"{count} B"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _size() -> dict[str, Any]:
    """Follow the terminal's size; some terminals say 0 x 0, where tqdm shows nothing."""
    with suppress(OSError, ValueError):
        if os.get_terminal_size(sys.stderr.fileno()).columns > 0:
            return {"dynamic_ncols": True}
    return {"ncols": COLUMNS, "nrows": ROWS}


class Bar:
    """Counts and says nothing. The other bars count in the same way."""

    def __init__(self, total: int | None, label: str, unit: str):
        self.total, self.label, self.unit = total, label, unit
        self.done = 0

    def update(self, n: int = 1) -> None:
        """Count n more."""
        self.done += n

    def note(self, text: str) -> None:
        """Show a word about what is going on, until the next one."""

    def restart(self) -> None:
        """Measure time from now on: what came before belongs to something else."""


class ReportedBar(Bar):
    """Another bar, each of whose steps is reported too."""

    def __init__(self, inner: Bar, report: Callable[[Bar], None]):
        super().__init__(inner.total, inner.label, inner.unit)
        self._inner, self._report = inner, report

    def update(self, n: int = 1) -> None:
        """Count n more, here and there."""
        self._inner.update(n)
        super().update(n)
        self._report(self)

    def note(self, text: str) -> None:
        """Hand the word on."""
        self._inner.note(text)

    def restart(self) -> None:
        """Let the other bar measure from now on."""
        self._inner.restart()


class PlainBar(Bar):
    """One line whenever another tenth of the work is done, for logs and pipes."""

    def __init__(self, total: int | None, label: str, unit: str, *, say: Callable[[str], None]):
        super().__init__(total, label, unit)
        self._say, self._text, self._tenth = say, "", 0
        self._start = self._since = time.monotonic()
        self._before = 0  # done when the rate was measured anew

    def update(self, n: int = 1) -> None:
        """Count n more, and speak when a tenth is full."""
        self.done += n
        tenth = min(TENTHS, self.done * TENTHS // self.total) if self.total else 0
        if tenth > self._tenth:
            self._tenth = tenth
            self._say(self._line())

    def note(self, text: str) -> None:
        """Say this in the next line."""
        self._text = text

    def restart(self) -> None:
        """Measure from now on."""
        self._since, self._before = time.monotonic(), self.done
        if not self.done:
            self._start = self._since

    def _line(self) -> str:
        done, total = _amount(self.done, self.unit), _amount(self.total or 0, self.unit)
        now = time.monotonic()
        left = (now - self._since) * max((self.total or 0) - self.done, 0)
        left /= self.done - self._before
        times = f"{_clock(now - self._start)} spent, {_clock(left)} left"
        parts = (f"{self._tenth * 100 // TENTHS:3d}%", f"{done}/{total}", times, self._text)
        return f"{self.label}: " + "  ".join(part for part in parts if part)


class LiveBar(Bar):
    """A bar that moves, with the time left. A context manager: it leaves the terminal clean."""

    def __init__(self, total: int | None, label: str, unit: str, *, color: bool = False):
        from tqdm import tqdm  # late: `svgen --help` needs none of it

        super().__init__(total, label, unit)
        scaled: dict[str, Any] = {"unit_scale": True} if unit == "B" else {}
        self._tqdm = tqdm(
            total=total,
            desc=label,
            unit=unit,
            file=sys.stderr,
            **_size(),
            colour="green" if color else None,
            **scaled,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self._tqdm.close()

    def update(self, n: int = 1) -> None:
        """Count n more."""
        self.done += n
        self._tqdm.update(n)

    def note(self, text: str) -> None:
        """Show this beside the bar."""
        self._tqdm.set_postfix_str(text)

    def restart(self) -> None:
        """Measure from now on; once it runs, its average follows a new pace by itself."""
        if not self.done:
            self._tqdm.reset(self.total)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Make room for a line of text above the bar."""
        self._tqdm.clear()
        try:
            yield
        finally:
            self._tqdm.refresh()
