"""The Hub's cache on disk, as huggingface_hub lays it out: blobs named by digest, links to them."""

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from svgen.errors import SvgenError
from svgen.hub import snapshot
from svgen.hub.download import Remote, Stopped, partial_of
from svgen.hub.source import Source

COMMIT = re.compile(r"[0-9a-f]{40}")


def cache_folder() -> Path:
    """The Hub's cache: HF_HUB_CACHE, or `hub` in HF_HOME."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def is_offline(asked: bool = False) -> bool:
    """Whether the network may not be used: by flag, or by HF_HUB_OFFLINE."""
    if asked:
        return True
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def free_bytes(folder: Path) -> int:
    """Free space on the disk that holds a folder, which need not exist yet."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def repository_folder(repository: str) -> Path:
    """Where the cache keeps a repository."""
    return cache_folder() / ("models--" + repository.replace("/", "--"))


def snapshot_of(source: Source) -> Path | None:
    """The folder of a revision in the cache, complete or not; None if nothing of it is there."""
    folder = repository_folder(source.repository)
    commit = source.revision
    if not COMMIT.fullmatch(commit):
        ref = folder / "refs" / commit
        commit = ref.read_text(errors="replace").strip() if ref.is_file() else ""
    found = folder / "snapshots" / commit
    return found if COMMIT.fullmatch(commit) and found.is_dir() else None


def is_ours(folder: Path) -> bool:
    """Whether a snapshot holds a model that svgen runs."""
    try:
        snapshot.check_pipeline(snapshot.read_bounded(folder / snapshot.MODEL_INDEX), folder.name)
    except SvgenError:
        return False
    return True


def disk_bytes(folder: Path) -> int:
    """What a folder takes on the disk; links count nothing."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)


def is_there(folder: Path, file: Remote) -> bool:
    """Whether a snapshot has a file, by its size and the name of its blob."""
    path = folder / file.path
    return (
        path.is_file()
        and path.stat().st_size == file.size
        and snapshot.cached_digest(path) in (None, file.digest)
    )


def partial_bytes(folder: Path, file: Remote) -> int:
    """How much of an unfinished file a repository's folder keeps."""
    partial = partial_of(folder / "blobs" / file.digest)
    size = partial.stat().st_size if partial.is_file() else 0
    return size if size <= file.size else 0


def delete(path: Path) -> None:
    """Delete a file and what it links to inside the cache."""
    real = path.resolve()
    if real.is_relative_to(cache_folder().resolve()):
        real.unlink(missing_ok=True)
    path.unlink(missing_ok=True)


@contextmanager
def locked(repository: str, digest: str, stop: threading.Event) -> Iterator[None]:
    """Hold the lock that huggingface_hub takes for a file, so that no two processes write it."""
    from huggingface_hub.utils import WeakFileLock

    path = cache_folder() / ".locks" / repository_folder(repository).name / f"{digest}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        if stop.is_set():
            raise Stopped
        lock = WeakFileLock(path, timeout=1.0)
        try:
            lock.__enter__()
        except TimeoutError:
            continue
        try:
            yield
        finally:
            lock.__exit__(None, None, None)
        return


def point(pointer: Path, blob: Path) -> None:
    """Make a file of a snapshot a link to its blob; where links are impossible, move it."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.unlink(missing_ok=True)
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError:
        os.replace(blob, pointer)


def write_ref(path: Path, commit: str) -> None:
    """Remember which commit a branch or tag meant."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        fresh.write_text(commit)
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
