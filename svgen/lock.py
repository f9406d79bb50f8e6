"""One run at a time on one output: `.NAME.lock` beside it, which says who holds it.

The lock is the kernel's (flock), not the file: it ends with its process, however that ends, and a
file that a killed run has left is taken over. State and latents lie under the output's name, so
whoever holds the output holds them.
"""

import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from svgen.errors import FileError
from svgen.partial import fcntl, is_same, take, write_error

HOLDER_BYTES = 1 << 16  # read of a lock's file, which another user may have written
SHOWN_LETTERS = 200  # of the holder's command


def lock_path(target: Path) -> Path:
    """Where the lock of an output lies."""
    return target.with_name(f".{target.stem}.lock")


@contextmanager
def sole_run(target: Path) -> Iterator[None]:
    """Hold an output; raises FileError (E_HELD) at once, naming the holder, if another run does."""
    if fcntl is None:  # Windows: no advisory locks
        yield
        return
    lock = _taken(target)
    try:
        _describe_self(lock)
        yield
    finally:
        path = lock_path(target)
        with suppress(OSError):  # the folder may be gone, or read-only by now
            if is_same(path, lock):
                path.unlink()
        os.close(lock)


def check_free(target: Path) -> None:
    """Raise FileError (E_HELD) if another run holds an output now."""
    if fcntl is not None and lock_path(target).exists():
        with sole_run(target):
            pass


def _taken(target: Path) -> int:
    """Open and lock the file, again if its holder deletes it meanwhile."""
    path, flags = lock_path(target), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        try:
            lock = os.open(path, flags, 0o666)
        except OSError as error:
            raise write_error(path, error) from error
        if not take(lock):
            holder = _holder(lock)
            os.close(lock)
            raise _held(target, holder)
        if is_same(path, lock):
            return lock
        os.close(lock)


def _describe_self(lock: int) -> None:
    """Write who holds the lock, for those who find it taken; a full disk is no reason to stop."""
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": _cut(shlex.join(["svgen", *sys.argv[1:]])),
    }
    with suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps(holder, ensure_ascii=True).encode(), 0)


def _holder(lock: int) -> dict[str, Any]:
    """What a lock's file says of its holder: nothing, if it has not been written yet."""
    try:
        found = json.loads(os.pread(lock, HOLDER_BYTES, 0))
        return {"pid": int(found["pid"])} | {
            name: _cut(str(found[name])) for name in ("host", "since", "command")
        }
    except (OSError, ValueError, OverflowError, RecursionError, KeyError, TypeError):
        return {}


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}..."


def _held(target: Path, holder: dict[str, Any]) -> FileError:
    who, way_out = "another svgen has it open", "wait for it"
    if holder:
        pid, host = holder["pid"], holder["host"]
        who = f"pid {pid} on {host} since {holder['since']}: {holder['command']}"
        way_out += f", end it with `kill {pid}`" if host == socket.gethostname() else ""
    return FileError(
        "E_HELD",
        f"{target} is being made by another run",
        why=who,
        hint=f"{way_out}, or choose another output with -o",
        details={"path": str(target), **holder},
    )
