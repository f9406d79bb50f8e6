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

    def ask(self, number: int, _: Any) -> None:
        """Take a signal."""
        self.wanted = Terminated if number == signal.SIGTERM else KeyboardInterrupt
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def raise_if_wanted(self) -> None:
        """End the run, if that was asked for."""
        if self.wanted:
            raise self.wanted


@contextmanager
def stopping_between_steps() -> Iterator[Stop]:
    """Take signals until the end of the block; a signal that the process ignores stays ignored."""
    stop, former = Stop(), {}
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL, None):
            former[number] = signal.signal(number, stop.ask)
    try:
        yield stop
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
