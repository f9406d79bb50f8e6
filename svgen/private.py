"""Folders that the user alone may write to: compiled programs in them are run, so whoever can write
there can run anything as the user.
"""

import os
import stat
from pathlib import Path

MODE = 0o700


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are not there, for the user alone."""
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    for part in reversed(missing):
        part.mkdir(mode=MODE, exist_ok=True)


def unsafe(folder: Path, *, shared: bool = False) -> str:
    """Say why code must not be loaded from a folder; empty if it may. One that is `shared` holds
    no code: its group may write there.
    """
    status = folder.stat()
    if status.st_mode & stat.S_IWOTH:
        return "everyone may write to it"
    if status.st_mode & stat.S_IWGRP and not shared:
        return f"its group (id {status.st_gid}) may write to it"
    if status.st_uid not in (0, os.getuid()):
        return f"it belongs to another user (id {status.st_uid})"
    for above in folder.resolve().parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"everyone may write to {above}, and so put another folder in its place"
    return ""
