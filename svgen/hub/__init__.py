"""Model name -> a local checkpoint folder: the Hub's cache, what is fetched into it and checked.

Only this package imports huggingface_hub, inside functions, because that library reads its
environment when it is imported. Offline, nothing here asks it for more than where its cache is.
"""

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from svgen.catalog import entry_of
from svgen.errors import DownloadError, FileError, SvgenError, UsageError
from svgen.hub import snapshot
from svgen.hub.cache import (
    cache_folder,
    delete,
    disk_bytes,
    free_bytes,
    is_offline,
    is_ours,
    is_there,
    locked,
    partial_bytes,
    point,
    repository_folder,
    snapshot_of,
    write_ref,
)
from svgen.hub.client import (
    explained,
    file_error,
    list_files,
    offline_error,
    open_link,
    read_small,
    url_of,
)
from svgen.hub.download import Link, Patience, Remote, fetch
from svgen.hub.snapshot import FileCheck
from svgen.hub.source import Source, parse, parse_repository
from svgen.hub.source import resolve_auto as resolve_auto
from svgen.private import make_private

DISK_MARGIN = 0.05
PARALLEL_FILES = 4

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, name of a file


def _silent(done: int, total: int, name: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a pull would do."""

    source: Source
    commit: str
    files: tuple[Remote, ...]
    missing: tuple[Remote, ...]
    fetch_bytes: int
    total_bytes: int
    free_bytes: int
    folder: Path

    def check_space(self) -> None:
        """Raise FileError unless the disk holds what is to be fetched, and a margin."""
        if self.fetch_bytes * (1 + DISK_MARGIN) > self.free_bytes:
            raise disk_full(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """One repository in the cache."""

    repository: str
    name: str  # its catalog name, or the repository
    commits: tuple[str, ...]  # those whose files are all there
    disk_bytes: int


def find(model: str) -> Path | None:
    """The folder of a model whose files are all on disk, else None. Opens no socket."""
    source = parse(model)
    folder = source.folder or snapshot_of(source)
    return folder if folder and not snapshot.missing_in(folder) else None


def locate(
    model: str,
    *,
    offline: bool = False,
    progress: Progress = _silent,
    on_plan: Callable[[Plan], None] | None = None,
    patience: Patience | None = None,
) -> Path:
    """Give the checkpoint folder of a model, after downloading what is not on disk.

    `on_plan` sees what would be downloaded before it is, and may raise. Offline, or with
    HF_HUB_OFFLINE, a missing file is a DownloadError and no socket is opened.
    """
    source = parse(model)
    folder = source.folder or snapshot_of(source)
    missing = snapshot.missing_in(folder) if folder else list(snapshot.REQUIRED)
    if folder and not missing:
        snapshot.check_pipeline(snapshot.read_bounded(folder / snapshot.MODEL_INDEX), model)
        return folder
    if source.folder:
        checks = [FileCheck(path=name, problem="missing") for name in missing]
        hint = "copy the whole folder, in the layout that diffusers' save_pretrained writes"
        raise snapshot.bad_files_error(checks, model, hint)
    if is_offline(offline):
        raise offline_error(model, missing)
    return pull(model, progress=progress, on_plan=on_plan, patience=patience)


def plan(model: str, *, patience: Patience | None = None) -> Plan:
    """Ask the Hub which files a model has and how large they are. Writes nothing."""
    return _plan(parse_repository(model), open_link(patience))


def pull(
    model: str,
    *,
    offline: bool = False,
    repair: bool = False,
    progress: Progress = _silent,
    on_plan: Callable[[Plan], None] | None = None,
    patience: Patience | None = None,
) -> Path:
    """Download what is missing of a model, if the disk can hold it, and return its folder.

    With `repair`, files that are there are hashed first, and those that are not whole are fetched
    again.
    """
    source = parse_repository(model)
    if is_offline(offline):
        folder = snapshot_of(source)
        missing = snapshot.missing_in(folder) if folder else list(snapshot.REQUIRED)
        if folder and not missing and not repair:
            return folder
        raise offline_error(model, missing)
    link = open_link(patience)
    found = _plan(source, link)
    if repair:
        _drop_bad(found, progress)
        found = _plan(source, link)
    if on_plan:
        on_plan(found)
    found.check_space()
    _fetch_all(found, link, progress)
    return found.folder


def verify(
    model: str,
    *,
    offline: bool = False,
    progress: Progress = _silent,
    patience: Patience | None = None,
) -> list[FileCheck]:
    """Check presence, size and hash of every file that a run needs, against the Hub's listing.

    Offline, hashes come from the cache itself, which names each file by its hash. A plain folder
    has none: there, each safetensors file must have the length that its header asks for.
    """
    source = parse(model)
    folder = source.folder or snapshot_of(source)
    if folder is None:
        if is_offline(offline):
            raise offline_error(model, list(snapshot.REQUIRED))
        raise not_here(model)
    if source.folder or is_offline(offline):
        names = snapshot.needed_in(folder)
        wanted = [(name, None, snapshot.cached_digest(folder / name)) for name in names]
    else:
        found = _plan(replace(source, revision=folder.name), open_link(patience))
        wanted = [(file.path, file.size, file.digest) for file in found.files]
    return _check_all(folder, wanted, progress)


def bad_files(model: str, checks: list[FileCheck]) -> SvgenError | None:
    """One error that names every bad file and the command that mends them, if there are any."""
    hint = f"svgen models pull {model} --repair"
    if parse(model).folder:
        hint = "copy or save the checkpoint folder again"
    return snapshot.bad_files_error(checks, model, hint)


def installed() -> list[Installed]:
    """List the repositories in the cache that are known, or hold a model that svgen runs."""
    found = []
    for folder in sorted(cache_folder().glob("models--*--*")):
        repository = folder.name.removeprefix("models--").replace("--", "/", 1)
        entry = entry_of(repository)
        commits = sorted(path for path in folder.glob("snapshots/*") if is_ours(path))
        if not entry and not commits:
            continue
        found.append(
            Installed(
                repository=repository,
                name=entry.name if entry else repository,
                commits=tuple(path.name for path in commits if not snapshot.missing_in(path)),
                disk_bytes=disk_bytes(folder),
            )
        )
    return found


def remove(model: str) -> int:
    """Delete a model's repository, every revision of it, from the cache; return the bytes freed."""
    from huggingface_hub import scan_cache_dir

    source = parse_repository(model)
    folder = repository_folder(source.repository)
    if not folder.is_dir():
        raise not_here(model)
    freed = disk_bytes(folder)
    try:
        cache = scan_cache_dir(cache_folder())
        ours = [repo for repo in cache.repos if Path(repo.repo_path).name == folder.name]
        alone = replace(cache, repos=frozenset(ours))  # a copy elsewhere may share its commits
        commits = [one.commit_hash for repo in ours for one in repo.revisions]
        alone.delete_revisions(*commits).execute()
        if folder.exists():  # never finished a file, so the library does not count it
            shutil.rmtree(folder)
    except OSError as error:
        raise file_error(error, model) from error
    return freed


def _plan(source: Source, link: Link) -> Plan:
    commit, listed = list_files(source, link)
    folder = repository_folder(source.repository)

    def read(name: str) -> bytes:
        """A small file's bytes: from the cache, else from the Hub into memory."""
        if name not in listed:
            raise _incomplete(source, [name])
        blob = folder / "blobs" / listed[name].digest
        data = snapshot.read_bounded(blob) if blob.is_file() else b""
        if data and snapshot.digest_of(data, listed[name].digest) == listed[name].digest:
            return data
        return read_small(source, commit, listed[name], link)

    snapshot.check_pipeline(read(snapshot.MODEL_INDEX), source.name)
    names = snapshot.needed_files(listed.__contains__, read)
    if absent := [name for name in names if name not in listed]:
        raise _incomplete(source, absent)
    files = tuple(listed[name] for name in names)
    target = folder / "snapshots" / commit
    missing = tuple(file for file in files if not is_there(target, file))
    return Plan(
        source=source,
        commit=commit,
        files=files,
        missing=missing,
        fetch_bytes=sum(file.size - partial_bytes(folder, file) for file in missing),
        total_bytes=sum(file.size for file in files),
        free_bytes=free_bytes(folder),
        folder=target,
    )


def _incomplete(source: Source, absent: list[str]) -> DownloadError:
    return snapshot.corrupt(
        f"{source.repository} has no {', '.join(absent[:3])}",
        why="a run needs every part of a checkpoint in the diffusers layout",
        hint="use a repository in that layout: `svgen models list`",
        files=absent,
    )


def not_here(model: str) -> UsageError:
    """The error for a model to be checked or removed that is not on disk."""
    why = f"{cache_folder()} does not hold it"
    hint = f"svgen models list, or svgen models pull {model}"
    return UsageError("E_MODEL", f"{model} is not on disk", why=why, hint=hint)


def _check_all(
    folder: Path, wanted: list[tuple[str, int | None, str | None]], progress: Progress
) -> list[FileCheck]:
    sizes = [(folder / name).stat().st_size for name, *_ in wanted if (folder / name).is_file()]
    total, done, checks = sum(sizes), 0, []
    for name, size, digest in wanted:

        def count(step: int, name: str = name) -> None:
            nonlocal done
            done += step
            progress(done, total, name)

        checks.append(snapshot.check_file(folder, name, size, digest, count))
    return checks


def _drop_bad(found: Plan, progress: Progress) -> None:
    """Delete the files of a plan that are there but not whole."""
    wanted = [(file.path, file.size, file.digest) for file in found.files]
    checks = _check_all(found.folder, wanted, progress)
    with explained(found.source, "a bad file"):
        for file, check in zip(found.files, checks, strict=True):
            if check.problem:
                delete(found.folder / file.path)
                delete(found.folder.parent.parent / "blobs" / file.digest)


def _fetch_all(found: Plan, link: Link, progress: Progress) -> None:
    """Fetch every missing file, some at a time; the first failure stops the others."""
    folder = found.folder.parent.parent
    done, lock = found.total_bytes - found.fetch_bytes, threading.Lock()

    def fetch_one(file: Remote) -> None:
        def count(step: int) -> None:
            nonlocal done
            with lock:
                done += step
                progress(done, found.total_bytes, file.path)

        with explained(found.source, file.path):
            _fetch_one(found, file, link, count)

    with explained(found.source, "the cache"):
        make_private(cache_folder())
        (folder / "blobs").mkdir(parents=True, exist_ok=True)
        if found.source.revision != found.commit:
            write_ref(folder / "refs" / found.source.revision, found.commit)
    with ThreadPoolExecutor(PARALLEL_FILES) as pool:
        tasks = [pool.submit(fetch_one, file) for file in found.missing]
        try:
            for task in as_completed(tasks):
                task.result()
        except BaseException:
            link.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _fetch_one(found: Plan, file: Remote, link: Link, count: Callable[[int], None]) -> None:
    blob = found.folder.parent.parent / "blobs" / file.digest
    with locked(found.source.repository, file.digest, link.stop):
        if blob.is_file() and blob.stat().st_size != file.size:
            delete(blob)
        if blob.is_file():
            count(file.size - partial_bytes(blob.parent.parent, file))
        else:
            blob.unlink(missing_ok=True)  # a link to nowhere
            fetch(link, url_of(found.source, found.commit, file.path), file, blob, count)
        point(found.folder / file.path, blob)


def disk_full(found: Plan) -> FileError:
    """The error for a disk that cannot hold a plan."""
    return FileError(
        "E_DISK_FULL",
        f"{found.source.name} needs {found.fetch_bytes:,} bytes more; "
        f"{found.free_bytes:,} are free for {cache_folder()}",
        why=f"the download must fit, with {DISK_MARGIN:.0%} to spare",
        hint="free some space, or set HF_HOME to a folder on a larger disk",
        details={"needed_bytes": found.fetch_bytes, "free_bytes": found.free_bytes},
    )
