"""Files that anybody may have written: only plain files are opened, and no more is read than asked.

A pipe would be waited for, a device such as /dev/zero never ends. A link may lead anywhere (the
Hub's cache is made of links), if a plain file is at its end.
"""

import errno
import os
import re
import stat
from pathlib import Path
from typing import BinaryIO

MAX_HEADER_BYTES = 4 << 20  # of a safetensors file; Wan's largest has 0.2 MB
SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}\.safetensors")  # a name beside its index
FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)  # a pipe without a writer would be waited for
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_BINARY", 0)
)


def check_plain(path: Path) -> None:
    """Raise OSError unless `path` is a plain file, or leads to one; opens nothing."""
    _check(os.stat(path).st_mode, path)


def _check(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a device or socket"
        raise OSError(errno.EINVAL, f"It is {kind}, not a file", str(path))


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading; raises OSError for anything else, and never waits."""
    check_plain(path)  # before it is opened: that alone makes some devices act
    descriptor = os.open(path, FLAGS)
    try:
        _check(os.fstat(descriptor).st_mode, path)  # it may have been exchanged
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_start(path: Path, count: int) -> bytes:
    """Read at most so many bytes of a plain file; raises OSError."""
    with open_plain(path) as file:
        return file.read(count)


def check_safetensors(path: Path) -> None:
    """Raise OSError unless the safetensors library may open a file: a plain one, whose header is as
    long as the file allows and no longer than a model needs (parsed, it takes many times as much).
    """
    with open_plain(path) as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
    if length > size - 8:
        raise OSError(errno.EINVAL, f"Its header claims {length} of {size} bytes", str(path))
    if length > MAX_HEADER_BYTES:
        why = f"Its header has {length} bytes, more than {MAX_HEADER_BYTES}"
        raise OSError(errno.EINVAL, why, str(path))
