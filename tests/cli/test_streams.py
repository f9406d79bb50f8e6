"""Streams that are closed or full: what is cheap to try; tests/faults tries whole runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from svgen.cli.output import Console, is_moving
from svgen.errors import UsageError
from tests.helpers import ROOT

COMMAND = '"$@" {}; exit ${{PIPESTATUS[0]}}'
OCCUPY = """
import os
from svgen.cli.streams import occupy_closed
occupy_closed()
print(os.open(os.devnull, os.O_RDONLY) > 2)
"""


def shell(redirection, *args):
    """Run Python with the redirections of a shell; what is left is captured."""
    return subprocess.run(
        ["bash", "-c", COMMAND.format(redirection), "bash", sys.executable, *args],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_no_file_gets_the_number_of_a_closed_stream():
    """Else what a library prints goes into a video."""
    assert shell("<&- 2>&-", "-c", OCCUPY).stdout == "True\n"


@pytest.mark.parametrize(
    ("args", "redirection", "code"),
    [
        (["presets", "list"], "2>/dev/full >&-", 0),
        (["presets", "show", "nope"], "2>/dev/full", 2),
        (["presets", "list", "--json"], "| head -0", 0),
        ([], "2>/dev/full", 2),
    ],
)
def test_what_nobody_can_read_changes_no_exit_code(args, redirection, code):
    done = shell(redirection, "-m", "svgen", *args)
    assert (done.returncode, done.stderr) == (code, "")


def test_help_that_does_not_fit_is_an_error():
    done = shell(">/dev/full", "-m", "svgen", "--help")
    assert (done.returncode, len(done.stderr.splitlines())) == (6, 3)
    assert done.stderr.startswith("error[E_WRITE]: the standard output cannot be written")


def test_full_stdout_ends_no_run_and_fails_at_its_end(monkeypatch, capfd):
    console = Console("generate", json=True, events=True, verbosity=-1)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        console.event("step", done=1)
        console.event("saved", kind="video", path=Path("a/x.mp4"))
        console.result({})
        assert console.exit_code == 0
        console.finish()
    assert console.exit_code == 6
    assert "it is whole: a/x.mp4" in capfd.readouterr().err


def test_first_failure_stands_before_a_full_stdout(monkeypatch, capfd):
    console = Console("generate", json=True, verbosity=-1)
    console.fail(UsageError("E_VALUE", "wrong"))
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        console.finish()
    assert console.exit_code == 2
    assert capfd.readouterr().err == "error[E_VALUE]: wrong\n"


def test_nothing_moves_on_a_dumb_terminal(monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    assert is_moving(Terminal()) and not is_moving(None)
    monkeypatch.setenv("TERM", "dumb")
    assert not is_moving(Terminal())
