"""A file under construction: `.NAME.partial.mp4` beside its target, renamed when it is whole.

Beside, so that the rename stays on one file system. Nothing is replaced that was not meant to be.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from svgen.errors import FULL_DISK, FileError, SvgenError, UsageError

try:
    import fcntl
except ImportError:  # Windows: no advisory locks, so two runs must not write one name at a time
    fcntl = None

WAY = "choose another place with -o"
PARTIAL_STEM_BYTES = 200  # leaves room for the affixes within the 255 bytes of a file name


def check_output(path: Path, *, overwrite: bool, needed: int = 0, flag: str = "-o") -> None:
    """Raise unless a file can be written to `path`: call it before anything is loaded.

    The partial file is really created, and deleted. `needed` is the free space to ask for, `flag`
    what names the output.
    """
    folder = path.parent
    if os.path.isdir(path):
        raise UsageError(
            "E_OUTPUT_NAME",
            f"{path} is a folder",
            why="the output is one file",
            hint=f"-o {path / 'NAME.mp4'}",
        )
    if not os.path.isdir(folder):
        is_file = os.path.lexists(folder)
        raise FileError(
            "E_WRITE",
            f"{path} cannot be written: {folder} is not {'a folder' if is_file else 'there'}",
            why="svgen creates the file, not the folder around it",
            hint=f"choose another output with {flag}" if is_file else f"mkdir -p {folder}",
        )
    if _is_there(path) and not overwrite:
        hint = f"--overwrite, or another name with {flag}"
        raise _exists(path, f"{path} is there already", hint)
    with partial_file(path):
        pass
    check_space(folder, needed)


def _is_there(path: Path) -> bool:
    """Whether the name is taken, by a dangling link too; raise for a name that cannot exist."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise write_error(path, error) from error
    return True


def _partial_name(target: Path, number: int) -> str:
    stem = target.stem.encode("utf-8", "surrogateescape")[:PARTIAL_STEM_BYTES]
    infix = f".{number}" if number else ""
    return f".{stem.decode('utf-8', 'ignore')}{infix}.partial.mp4"


@contextlib.contextmanager
def partial_file(target: Path) -> Iterator[Path]:
    """Hold a partial file beside the target, locked against other runs; delete it if left over."""
    with locked_partial(target) as (path, _):
        yield path


@contextlib.contextmanager
def locked_partial(target: Path) -> Iterator[tuple[Path, int | None]]:
    """Like `partial_file`, with the open file that holds the lock, where there are locks: a child
    that inherits it keeps the lock for as long as it lives.
    """
    try:
        path, lock = _claim(target)
    except OSError as error:
        raise write_error(target, error) from error
    try:
        yield path, lock
    finally:
        if lock is None:
            path.unlink(missing_ok=True)
        else:
            if is_same(path, lock):
                path.unlink()
            os.close(lock)


def _claim(target: Path) -> tuple[Path, int | None]:
    """Create the partial file, or take over one that a killed run left; pass by those in use."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    for number in range(100):
        path = target.with_name(_partial_name(target, number))
        try:
            lock = os.open(path, flags, 0o666)
        except OSError:
            if os.path.lexists(path):  # another user's, or a link
                continue
            raise
        if fcntl is None:
            os.close(lock)  # Windows renames no open file
            return path, None
        if take(lock) and is_same(path, lock):
            if os.fstat(lock).st_nlink == 1:
                return path, lock
            path.unlink()  # a run was killed while it renamed: the video has this name too
        os.close(lock)
    raise OSError(errno.EEXIST, "a hundred partial files are in use")


def take(lock: int) -> bool:
    """Lock an open file for this process, unless another one has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def is_same(path: Path, opened: int) -> bool:
    """Whether the name still stands for the file that was opened."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(opened))
    except FileNotFoundError:
        return False


def sync(path: Path) -> None:
    """Bring a file or a folder to the disk; raise OSError where that is not possible."""
    opened = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def publish(partial: Path, target: Path, *, overwrite: bool) -> None:
    """Give the finished file its name; where that fails, keep it under a free name and say so."""
    try:
        if overwrite:
            os.replace(partial, target)
        else:
            _rename_new(partial, target)
        return
    except OSError as error:
        problem = error
    try:
        saved = _save_aside(partial, target)
    except OSError as error:
        raise write_error(target, error) from error
    what, hint = f"the finished file could not be named {target}", f"it is whole: {saved}"
    if isinstance(problem, FileExistsError):
        found = _exists(target, f"{what}: a file of that name appeared meanwhile", hint)
    else:
        found = FileError("E_WRITE", f"{what}: {problem.strerror}", hint=hint)
    found.details["saved"] = str(saved)
    raise found from problem


def write_whole(path: Path, data: bytes, *, overwrite: bool = False, way: str = WAY) -> None:
    """Write a small file that appears whole or not at all."""
    with partial_file(path) as partial:
        try:
            partial.write_bytes(data)
            sync(partial)
        except OSError as error:
            raise write_error(path, error, way) from error
        publish(partial, path, overwrite=overwrite)


def _rename_new(source: Path, target: Path) -> None:
    """Rename, but raise FileExistsError rather than replace anything."""
    with contextlib.suppress(OSError):
        os.link(source, target)  # the caller deletes the first name
        return
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:  # a file system without hard links: the empty file just made claims the name
        os.replace(source, target)
    except OSError:
        target.unlink()
        raise


def _save_aside(partial: Path, target: Path) -> Path:
    for number in range(1, 1000):
        path = target.with_name(f"{target.stem}-{number}{target.suffix}")
        with contextlib.suppress(FileExistsError):
            _rename_new(partial, path)
            return path
    raise OSError(errno.EEXIST, "a thousand files of that name are there")


def check_space(folder: Path, needed: int) -> None:
    """Raise FileError E_DISK_FULL if the disk of `folder` has less than `needed` bytes free."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise write_error(folder, error) from error
    if free < needed:
        raise FileError(
            "E_DISK_FULL",
            f"{folder} has {free / 1e6:.1f} MB free",
            why=f"the video may take {needed / 1e6:.1f} MB",
            hint="free some space, or choose another disk with -o",
            details={"free_bytes": free, "needed_bytes": needed},
        )


def _exists(path: Path, message: str, hint: str) -> UsageError:
    why = "an existing file is replaced only when that was asked for"
    return UsageError("E_OUTPUT_EXISTS", message, why=why, hint=hint, details={"path": str(path)})


def write_error(path: Path, error: OSError, way: str = WAY) -> SvgenError:
    """Say for the user why a file cannot be written, and the way out."""
    if error.errno == errno.ENAMETOOLONG:
        message, hint = f"the name {path.name} is too long", "choose a shorter one with -o"
        return UsageError("E_OUTPUT_NAME", message, why="the disk allows no more", hint=hint)
    full = error.errno in FULL_DISK
    code, hint = "E_DISK_FULL" if full else "E_WRITE", f"free some space, or {way}" if full else way
    why = "svgen needs a folder that it may write to, on a disk with room"
    message = f"{path} cannot be written: {error.strerror or error}"
    return FileError(code, message, why=why, hint=hint)
