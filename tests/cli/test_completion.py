"""Scripts for shells, and the completions that they ask for."""

import os
import subprocess
import sys

import pytest

from svgen.cli import run
from tests.helpers import ROOT


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_asks_svgen(shell, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")  # nothing is started to make it
    assert run(["completion", shell]) == 0
    shown = capsys.readouterr().out
    assert f"_SVGEN_COMPLETE={shell}_complete" in shown
    assert shown.endswith("\n") and not shown.endswith("\n\n")


def test_script_is_valid_bash(capsys):
    run(["completion", "bash"])
    script = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_unknown_shell_is_an_error(capsys):
    assert run(["completion", "tcsh"]) == 2
    assert "bash" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("svgen gen", "generate"),
        ("svgen generate --dt", "--dtype"),
        ("svgen models ve", "verify"),
        ("svgen cache cl", "clear"),
    ],
)
def test_completions_come_without_heavy_libraries(words, expected):
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('loaded', *{'jax', 'numpy'} & set(sys.modules)))\n"
        "from svgen.cli import main\nmain()"
    )
    asked = {"_SVGEN_COMPLETE": "bash_complete", "COMP_WORDS": words}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **asked, "COMP_CWORD": str(len(words.split()) - 1)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [f"plain,{expected}", "loaded"]
