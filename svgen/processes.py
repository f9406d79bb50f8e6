"""What Linux says of other processes: their name, their command, since when they run.

`root` stands for `/`, so that a folder can play a machine.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
SHOWN_WORDS = 3  # of a command: what follows may be a prompt, or secret
SHOWN_LETTERS = 60
UNKNOWN = "?"  # the name of a process that is not seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process that runs, or that has just ended."""

    pid: int
    name: str
    command: str  # its first words; empty where it is not known
    since: float | None  # seconds since the epoch

    def __str__(self) -> str:
        about = [f"pid {self.pid}"]
        about += [f"`{self.command}`"] if self.command not in ("", self.name) else []
        about += [f"since {clock(self.since)}"] if self.since is not None else []
        return f"{self.name} ({', '.join(about)})"


def process_of(pid: int, root: Path = ROOT) -> Process:
    """Look at one process; what cannot be known is left open."""
    folder = root / f"proc/{pid}"
    name = _read(folder / "comm").strip() or UNKNOWN
    return Process(pid=pid, name=name, command=_command(folder), since=_started(folder, root))


def clock(moment: float) -> str:
    """A moment in local time, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _command(folder: Path) -> str:
    words = _read(folder / "cmdline").split("\0")[:SHOWN_WORDS]
    text = " ".join(word for word in (os.path.basename(words[0]), *words[1:]) if word)
    return text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}..."


def _started(folder: Path, root: Path) -> float | None:
    """When a process started: field 22 of its `stat`, in clock ticks since the machine did."""
    fields = _read(folder / "stat").rpartition(")")[2].split()  # a name may hold anything
    lines = _read(root / "proc/stat").splitlines()
    booted = [line.split()[1] for line in lines if line.startswith("btime ")]
    try:
        return int(booted[0]) + int(fields[22 - 3]) / os.sysconf("SC_CLK_TCK")
    except (IndexError, ValueError):
        return None
