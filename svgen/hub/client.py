"""Questions to the Hub through huggingface_hub's client, and its failures as errors of ours."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlsplit

from svgen.errors import FULL_DISK, AccessError, DownloadError, FileError, SvgenError, UsageError
from svgen.hub import snapshot
from svgen.hub.cache import COMMIT, cache_folder
from svgen.hub.download import (
    PLAIN,
    TRIES,
    BadStatus,
    Link,
    Patience,
    Remote,
    check_status,
    wrong_bytes,
)
from svgen.hub.source import Source, suggest

LISTING = "the list of files"
LISTING_ATTEMPTS = 2  # without a network, say so soon
MAX_FILE_BYTES = 2**50


def endpoint() -> str:
    """The Hub's address for messages: HF_ENDPOINT, or the public one, without a password in it."""
    from huggingface_hub import constants

    return re.sub(r"//[^/@]*@", "//", constants.ENDPOINT)


def open_link(patience: Patience | None) -> Link:
    """Get the client, the token's headers and the time limits, as the environment sets them."""
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import build_hf_headers

    from svgen import __version__

    if not _is_address(constants.ENDPOINT):
        why = "it must start with https:// or http://"
        raise UsageError("E_VALUE", "HF_ENDPOINT is no address", why=why, hint="unset HF_ENDPOINT")
    return Link(
        client=get_session(),
        headers=build_hf_headers(library_name="svgen", library_version=__version__),
        failures=http_error(),
        timeout_s=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        patience=patience or Patience(),
        stop=threading.Event(),
    )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        sound = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
    return sound and parts.scheme in ("http", "https") and not re.search(r"\s", url)


def http_error() -> type[Exception]:
    """The base class of every failure of the client, whichever HTTP library lies under it."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")


def list_files(source: Source, link: Link) -> tuple[str, dict[str, Remote]]:
    """Ask for the commit and the files of a revision."""
    from huggingface_hub import constants

    attempts = min(link.patience.attempts, LISTING_ATTEMPTS)
    link = replace(link, patience=replace(link.patience, attempts=attempts))
    revision = quote(source.revision, safe="")
    url = f"{constants.ENDPOINT}/api/models/{source.repository}/revision/{revision}?blobs=true"
    with explained(source, LISTING):
        data = _get(url, link)
    try:
        return _listed(data, source.revision)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise _network_error("the answer is not the Hub's", source, LISTING) from None


def _listed(data: bytes, revision: str) -> tuple[str, dict[str, Remote]]:
    """Read what the Hub says of a revision; any failure means that it is no such answer."""
    if len(data) > snapshot.MAX_JSON_BYTES:
        raise ValueError("too long")
    answer = json.loads(data)
    commit, files = answer["sha"], map(_remote, answer["siblings"])
    if not COMMIT.fullmatch(commit) or (COMMIT.fullmatch(revision) and commit != revision):
        raise ValueError("another commit than was asked for")
    return commit, {file.path: file for file in files if file}


def _remote(item: Any) -> Remote | None:
    """A file of the list; None if it has no size or no digest that a file can have."""
    path, size = item["rfilename"], item.get("size")
    digest = (item.get("lfs") or {}).get("sha256") or item.get("blobId") or ""
    if type(size) is not int or not 0 <= size <= MAX_FILE_BYTES:
        return None
    sound = snapshot.DIGEST.fullmatch(digest)
    return Remote(path=path, size=size, digest=digest) if sound else None


def _get(url: str, link: Link, least: int = 0) -> bytes:
    """Read a short answer into memory, a chunk past the limit at most; one of less than `least`
    bytes has failed.
    """
    data = bytearray()

    def ask() -> bool:
        data.clear()
        with link.client.stream(
            "GET",
            url,
            headers={**link.headers, **PLAIN},
            timeout=link.timeout_s,
            follow_redirects=True,
        ) as response:
            check_status(response)
            for chunk in response.iter_raw():
                data.extend(chunk)
                if len(data) > snapshot.MAX_JSON_BYTES:
                    break
        if len(data) < least:
            raise BadStatus(502)
        return True

    link.attempt(ask)
    return bytes(data)


def url_of(source: Source, commit: str, path: str) -> str:
    """The address of a file."""
    from huggingface_hub import hf_hub_url

    return hf_hub_url(source.repository, path, revision=commit)


def read_small(source: Source, commit: str, file: Remote, link: Link) -> bytes:
    """Read a small file into memory; raises DownloadError if it has another hash than promised."""
    if file.size > snapshot.MAX_JSON_BYTES:
        raise snapshot.too_large(file.path)
    for _ in range(TRIES):
        with explained(source, file.path):
            data = _get(url_of(source, commit, file.path), link, least=file.size)
        if snapshot.digest_of(data, file.digest) == file.digest:
            return data
    raise wrong_bytes(file)


@contextmanager
def explained(source: Source, what: str) -> Iterator[None]:
    """Turn what the client raises into errors of ours, without its texts: they may hold secrets."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        yield
    except BadStatus as error:
        raise _status_error(error.status, source, what) from None
    except OfflineModeIsEnabled:
        raise offline_error(source.name, [what]) from None
    except http_error() as error:
        response = getattr(error, "response", None)
        if response is not None:
            raise _status_error(response.status_code, source, what) from None
        raise _network_error(_reason(error), source, what) from None
    except OSError as error:
        raise file_error(error, source.name) from None


def offline_error(model: str, missing: list[str]) -> DownloadError:
    """The error for files that are not there while the network may not be used."""
    shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    return DownloadError(
        "E_OFFLINE",
        f"{model} is not on disk: {shown}",
        why="--offline or HF_HUB_OFFLINE forbids the network",
        hint=f"once, with the network: svgen models pull {model}",
        details={"files": missing},
    )


def _status_error(status: int, source: Source, what: str) -> SvgenError:
    page = f"{endpoint()}/{source.repository}"
    if status in (401, 403):
        return AccessError(
            "E_AUTH",
            f"the Hub refuses access to {source.repository} (HTTP {status})",
            why="the repository does not exist, is private, or asks to accept its licence first",
            hint=f"check the name, accept the licence at {page}, then `hf auth login` or HF_TOKEN",
        )
    if status == 404 and what == LISTING:
        why = f"{endpoint()} has no {what} there"
        message = f"{source.repository} at {source.revision} was not found"
        return UsageError("E_MODEL", message, why=why, hint=suggest(source.repository))
    return _network_error(f"the Hub answered HTTP {status}", source, what)


def _network_error(reason: str, source: Source, what: str) -> DownloadError:
    return DownloadError(
        "E_NETWORK",
        f"{what} of {source.repository}: {reason}",
        why=f"the files come from {endpoint()}",
        hint=f"check network, proxy and HF_ENDPOINT; resume: svgen models pull {source.name}",
        details={"file": what},
    )


def file_error(error: OSError, model: str) -> FileError:
    """The error for a cache that cannot be written."""
    if error.errno in FULL_DISK:
        return FileError(
            "E_DISK_FULL",
            f"the disk of {cache_folder()} is full",
            why=f"{model} is stored there",
            hint=f"free some space or set HF_HOME, then continue: svgen models pull {model}",
        )
    return FileError(
        "E_WRITE",
        f"{error.filename or cache_folder()} cannot be written: {error.strerror or error}",
        why=f"models are stored in {cache_folder()}",
        hint="check its permissions, or set HF_HOME to another folder",
    )


def _reason(error: Exception) -> str:
    """Name a failure of the network."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower()
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return f"{words} ({cause.strerror})"
        cause = cause.__cause__ or cause.__context__
    return words
