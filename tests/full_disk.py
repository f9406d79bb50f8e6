"""Disks that are really full: a small tmpfs in a mount namespace of a helper's own, which others
reach through /proc; and a limit on the size of files, where nothing may be mounted.
"""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

PAGE = 4096
FILLER = "filler"
LIMITED = """
import os, resource, sys
size = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
os.execv(sys.argv[2], sys.argv[2:])
"""
KEEP_MOUNTED = """
mount -t tmpfs -o {options} none "$1" || exit 1
echo mounted
while read -r command; do eval "$command" && echo done; done
"""


def fill(folder: Path, *, pages: int = 0) -> None:
    """Take all space of a disk but some pages."""
    with open(folder / FILLER, "ab", buffering=0) as file:
        with suppress(OSError):
            while file.write(b"\0" * PAGE):
                pass
        file.truncate(max(file.tell() // PAGE - pages, 0) * PAGE)


def take_names(folder: Path) -> None:
    """Take all files that a disk can hold."""
    with suppress(OSError):
        for number in range(10_000):
            (folder / f"{FILLER}{number}").touch()


def empty(folder: Path) -> None:
    """Give back what was taken."""
    for path in folder.glob(f"{FILLER}*"):
        path.unlink()


class Disk:
    """A small disk of its own. A context manager; skips the test where none can be mounted."""

    def __init__(self, folder: Path, options: str = "size=4m"):
        self.mounted_at, self.options = folder, options

    def __enter__(self) -> "Disk":
        self.mounted_at.mkdir(exist_ok=True)
        script = KEEP_MOUNTED.format(options=self.options)
        command = ["unshare", "-rm", "sh", "-c", script, "sh", str(self.mounted_at)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        try:
            self.helper = subprocess.Popen(command, text=True, **pipes)
        except OSError as error:
            pytest.skip(f"no tmpfs can be mounted here: {error}")
        if self.helper.stdout.readline() != "mounted\n":
            pytest.skip(f"no tmpfs can be mounted here: {self.helper.communicate()[1].strip()}")
        self.folder = Path(f"/proc/{self.helper.pid}/root{self.mounted_at}")
        return self

    def __exit__(self, *reason: object) -> None:
        self.helper.communicate()

    def remount(self, how: str) -> None:
        """Make it read-only (`ro`), or let it be written again (`rw`)."""
        self.helper.stdin.write(f'mount -o remount,{how} "$1"\n')
        self.helper.stdin.flush()
        assert self.helper.stdout.readline() == "done\n"


def limited(size: int) -> list[str]:
    """Words to put before a command, so that it writes no file larger than `size` bytes. (To set
    the limit between fork and exec would be unsafe here: JAX has threads.)
    """
    return [sys.executable, "-c", LIMITED, str(size)]


def names(folder: Path) -> list[str]:
    """What lies in a folder, but for what fills it."""
    return sorted(name for name in os.listdir(folder) if not name.startswith(FILLER))
