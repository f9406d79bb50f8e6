"""Stopping in good order: while a step runs, Ctrl-C and SIGTERM wait until it has ended.

The second Ctrl-C does not wait.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from svgen.cli.endings import Terminated

AGAIN_S = 0.05


def take_signals() -> None:
    """Let SIGTERM, and Ctrl-C unless it is ignored (as by nohup), end the run in good order."""
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    sys.unraisablehook = _send_again


def _terminate(*_: Any) -> NoReturn:
    raise Terminated


def _interrupt(*_: Any) -> NoReturn:
    """Stop in good order at the first Ctrl-C; the second ends the process at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


def _send_again(lost: Any) -> None:
    """Send a signal once more that came where nothing can be raised: in a finalizer, or in what JAX
    calls at each collection of garbage. Python drops the exception there.
    """
    if not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    number = signal.SIGTERM if issubclass(lost.exc_type, Terminated) else signal.SIGINT
    if number == signal.SIGINT:
        signal.signal(signal.SIGINT, _interrupt)
    again = threading.Timer(AGAIN_S, os.kill, [os.getpid(), number])
    again.daemon = True
    again.start()


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
