"""One run at a time on an output; a lock of a run that has ended holds nobody."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from svgen import lock
from svgen.errors import FileError
from svgen.lock import check_free, lock_path, sole_run
from tests.helpers import ROOT

HOLD = """
import sys
from pathlib import Path
from svgen.lock import sole_run
with sole_run(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds an output."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "x.mp4"), "a cat", "-o", "x.mp4"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def held(path: Path) -> FileError:
    with pytest.raises(FileError) as caught, sole_run(path):
        pass
    assert (caught.value.code, caught.value.exit_code) == ("E_HELD", 6)
    return caught.value


def test_second_run_is_told_who_holds_the_output(holder, tmp_path):
    error = held(tmp_path / "x.mp4")
    assert error.details["pid"] == holder.pid and f"kill {holder.pid}" in error.hint
    assert f"pid {holder.pid} on " in error.why and " since 2" in error.why
    assert error.why.endswith("x.mp4 'a cat' -o x.mp4")
    with pytest.raises(FileError):
        check_free(tmp_path / "x.mp4")
    with sole_run(tmp_path / "y.mp4"):
        pass
    assert os.listdir(tmp_path) == [".x.lock"]


def test_lock_of_a_killed_run_is_taken_over(holder, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert lock_path(tmp_path / "x.mp4").exists()
    with sole_run(tmp_path / "x.mp4"):
        held(tmp_path / "x.mp4")
        said = json.loads(lock_path(tmp_path / "x.mp4").read_text())
        assert said["pid"] == os.getpid()
    assert not os.listdir(tmp_path)


def test_lock_that_its_holder_deletes_meanwhile_is_made_anew(tmp_path, monkeypatch):
    path, take = tmp_path / "x.mp4", lock.take

    def late(opened):
        monkeypatch.setattr(lock, "take", take)
        lock_path(path).unlink()
        return take(opened)

    monkeypatch.setattr(lock, "take", late)
    with sole_run(path):
        held(path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[1]",
        b'{"pid": 1}',
        b'{"pid": 1e999, "host": "", "since": "", "command": ""}',
        b'{"pid": "x", "host": "", "since": "", "command": ""}',
        b"\xff\xfe" * 100_000,
        b"[" * 60_000,
    ],
)
def test_lock_that_says_nothing_still_holds(holder, tmp_path, text):
    lock_path(tmp_path / "x.mp4").write_bytes(text)
    error = held(tmp_path / "x.mp4")
    assert error.why == "another svgen has it open" and "kill" not in error.hint


def test_command_is_shown_short(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["svgen", "generate", "x" * 100_000 + "\ud800"])
    with sole_run(tmp_path / "x.mp4"):
        assert len(held(tmp_path / "x.mp4").why) < 400


def test_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("data")
    lock_path(tmp_path / "x.mp4").symlink_to(tmp_path / "precious")
    with pytest.raises(FileError) as caught, sole_run(tmp_path / "x.mp4"):
        pass
    assert caught.value.code == "E_WRITE"
    assert (tmp_path / "precious").read_text() == "data"


def test_system_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "fcntl", None)
    with sole_run(tmp_path / "x.mp4"):
        check_free(tmp_path / "x.mp4")
        assert not os.listdir(tmp_path)
