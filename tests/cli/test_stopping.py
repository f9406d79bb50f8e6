"""Signals are heard wherever they come."""

import signal
import subprocess
import sys

import pytest

from tests.helpers import ROOT

LOST = """
import gc, os, signal, time
from svgen.cli.stopping import take_signals

def collected(*_):
    gc.callbacks.remove(collected)
    os.kill(os.getpid(), {number})
    for _ in range(1000):
        pass  # Python raises here, and drops it

take_signals()
gc.callbacks.append(collected)
try:
    gc.collect()
    print("lost", flush=True)
    signal.pause()
except KeyboardInterrupt as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGTERM, "Terminated"), (signal.SIGINT, "KeyboardInterrupt")]
)
def test_signal_during_a_collection_of_garbage_is_heard_after_it(number, name):
    done = subprocess.run(
        [sys.executable, "-c", LOST.format(number=int(number))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["lost", name]
    assert done.stderr == ""
