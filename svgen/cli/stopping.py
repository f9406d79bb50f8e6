"""Stopping in good order: while a step runs, Ctrl-C and SIGTERM wait until it has ended.

The second Ctrl-C does not wait.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from svgen.cli.endings import Terminated


class Stop:
    """Whether the user, or the machine, wants the run to stop."""

    def __init__(self) -> None:
        self.wanted: type[KeyboardInterrupt] | None = None
        self._former: dict[int, Any] = {}

    def listen(self) -> None:
        """Take signals from now on; one that the process ignores stays ignored."""
        for number in (signal.SIGINT, signal.SIGTERM):
            taken = number in self._former
            if not taken and signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL, None):
                self._former[number] = signal.signal(number, self.ask)

    def ask(self, number: int, _: Any) -> None:
        """Take a signal."""
        self.wanted = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def end(self) -> None:
        """Leave signals to whoever had them before."""
        while self._former:
            signal.signal(*self._former.popitem())

    def raise_if_wanted(self) -> None:
        """End the run, if that was asked for."""
        if self.wanted:
            raise self.wanted


@contextmanager
def stopping_between_steps() -> Iterator[Stop]:
    """Let the block `listen` for signals, until it does `end` that or ends itself."""
    stop = Stop()
    try:
        yield stop
    finally:
        stop.end()
