"""Standard streams that are closed, full or without a reader, and terminals of every kind: each
command ends with the right code and says nothing odd, and a video that was made is there.
"""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import ROOT
from tests.videos import decoded

pytestmark = pytest.mark.faults
SIZE = ("--model", "tests/golden/tiny", "--res", "32x32", "--frames", "1")
RUN = ("generate", "a red ball", *SIZE, "--steps", "2", "--seed", "3", "-o", "{out}")
COMMANDS = {
    "generate": RUN,
    "generate json": (*RUN, "--json=events"),
    "decode": ("decode", "{latents}", *SIZE[:2], "-o", "{out}"),
    "models": ("models", "list"),
    "presets": ("presets", "list"),
    "doctor": ("doctor", "--json"),
    "bench": ("bench", *SIZE, "--only", "embed"),
    "help": ("generate", "--help"),
}
OPEN, FULL_OUT = "", ">/dev/full"
STREAMS = {  # name -> (what the shell does, whether stdout arrives, the exit code)
    "no stdout": (">&-", False, 0),
    "no stderr": ("2>&-", True, 0),
    "no stdin": ("<&-", True, 0),
    "nothing": ("<&- >&- 2>&-", False, 0),
    "full stdout": (FULL_OUT, False, 6),
    "full stderr": ("2>/dev/full", True, 0),
    "head -1": ("| head -1", True, 0),
    "head -0": ("| head -0", False, 0),
}
ODD = ("Traceback", "Exception ignored", "BrokenPipe", "OSError", "E_INTERNAL")


class Shell:
    """Runs of svgen in a shell, with one home, counted and timed."""

    def __init__(self, home: Path):
        homes = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "TMPDIR")
        shared = dict.fromkeys(homes, str(home))
        self.env = {**os.environ, **shared, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        self.env |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        self.command = [sys.executable, "-m", "svgen"]
        self.count, self.spent_s = 0, 0.0

    def __call__(self, redirection, *args):
        """Run with the redirections of a shell; what is left is captured."""
        start = time.monotonic()
        script = f'"$@" {redirection}; exit ${{PIPESTATUS[0]}}'
        done = subprocess.run(
            ["bash", "-c", script, "bash", *self.command, *map(str, args)],
            env=self.env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=300,
            check=False,
        )
        self.count, self.spent_s = self.count + 1, self.spent_s + time.monotonic() - start
        assert not [word for word in ODD if word in done.stdout + done.stderr], done.stderr
        return done

    def on_terminal(self, *args, columns=80, hang_up_after=b"", **env):
        """Run with a terminal for all streams; returns the exit code and what it showed."""
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        process = subprocess.Popen(
            ["bash", "-c", "trap '' HUP; exec \"$@\"", "bash", *self.command, *map(str, args)],
            env=self.env | env,
            cwd=ROOT,
            stdin=follower,
            stdout=follower,
            stderr=follower,
        )
        os.close(follower)
        shown, open_ = b"", True
        while open_:
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # the other end is closed
                break
            shown += chunk
            open_ = bool(chunk) and not (hang_up_after and hang_up_after in shown)
        os.close(leader)
        self.count += 1
        text = shown.decode()
        code = process.wait(timeout=300)
        assert not [word for word in ODD if word in text], text
        return code, text


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    found = Shell(tmp_path_factory.mktemp("home"))
    yield found
    print(f"\nstreams: {found.count} runs of svgen, {found.spent_s:.0f} s of them off a terminal")


@pytest.fixture(scope="module")
def made(shell, tmp_path_factory):
    """The video of an undisturbed run; its latents lie beside it."""
    path = tmp_path_factory.mktemp("made") / "x.mp4"
    done = shell(OPEN, *(str(one).format(out=path) for one in RUN), "--keep-latents")
    assert (done.returncode, done.stdout) == (0, f"{path}\n"), done.stderr
    return path


def filled_in(command, made, out):
    (latents,) = made.parent.glob("*.latents.safetensors")
    return [one.format(out=out, latents=latents) for one in COMMANDS[command]]


CASES = [
    *((command, stream) for command in ("models", "presets", "help") for stream in STREAMS),
    *(("generate", stream) for stream in ("no stderr", "nothing", "full stdout", "head -0")),
    *(("decode", stream) for stream in ("no stdin", "full stdout", "full stderr")),
    *(("bench", stream) for stream in ("nothing", "full stdout")),
    *(("doctor", stream) for stream in ("no stderr", "full stdout", "head -0")),
    ("generate json", "full stdout"),
    ("generate json", "head -1"),
]


@pytest.mark.parametrize(("command", "stream"), CASES, ids=lambda name: name.replace(" ", "_"))
def test_stream_in_any_state(shell, made, tmp_path, command, stream):
    redirection, arrives, code = STREAMS[stream]
    out = tmp_path / "x.mp4"
    done = shell(redirection, *filled_in(command, made, out))
    assert done.returncode == code, done.stderr
    assert bool(done.stdout) is arrives
    if code and "2>" not in redirection:
        assert "error[E_WRITE]: the standard output cannot be written" in done.stderr
        assert done.stderr.count("error[") == 1
    if command.split()[0] in ("generate", "decode"):
        assert np.array_equal(decoded(out), decoded(made))
        assert os.listdir(tmp_path) == ["x.mp4"]
        assert code == 0 or f"it is whole: {out}" in done.stderr


def test_video_that_cannot_be_sent_is_kept(shell, made):
    args = (*RUN[:-1], "-")
    for redirection in (FULL_OUT, "| true"):
        done = shell(redirection, *args)
        assert done.returncode == 6, done.stderr
        (kept,) = re.findall(r"it is whole: (\S+)", done.stderr)
        assert np.array_equal(decoded(Path(kept)), decoded(made))
        Path(kept).unlink()
        Path(kept).parent.rmdir()
    refused = shell(">&-", *args)
    assert (refused.returncode, "E_OUTPUT_NAME" in refused.stderr) == (2, True)


def test_prompt_from_a_closed_stdin_is_an_error(shell):
    done = shell("<&-", "generate", "-", *SIZE)
    assert (done.returncode, "error[E_READ]" in done.stderr) == (6, True)


@pytest.mark.parametrize(
    ("env", "colored", "moving"),
    [({}, True, True), ({"NO_COLOR": "1"}, False, True), ({"TERM": "dumb"}, False, False)],
    ids=["plain", "no-color", "dumb"],
)
def test_narrow_terminals(shell, made, tmp_path, env, colored, moving):
    out = tmp_path / "x.mp4"
    code, shown = shell.on_terminal(*filled_in("generate", made, out), columns=40, **env)
    assert code == 0 and np.array_equal(decoded(out), decoded(made))
    assert (re.search(r"\x1b\[[0-9;]*m", shown) is not None) is colored
    assert (re.search(r"\r[^\r\n]", shown) is not None) is moving
    bars = re.findall(r"\r([^\r\n]+)", re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", shown))
    assert all(len(bar) <= 40 for bar in bars), bars
    code, shown = shell.on_terminal("presets", "show", "nope", columns=40, **env)
    assert code == 2 and ("\x1b[31;1merror" in shown) is colored


def test_terminal_that_hangs_up_costs_the_result_line_only(shell, made, tmp_path):
    out = tmp_path / "x.mp4"
    code, shown = shell.on_terminal(*filled_in("generate", made, out), hang_up_after=b"on cpu")
    assert code == 6 and "x.mp4" not in shown
    assert np.array_equal(decoded(out), decoded(made))
