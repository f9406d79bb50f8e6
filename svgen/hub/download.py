"""One file over HTTP: resumed where it stopped, hashed on the way, renamed when whole.

After a process ended, huggingface_hub starts a file again from its first byte, and its xet
transfers are known to hang; shards here have up to 10 GB. So bytes come by plain ranged GET
requests through its HTTP client, with a read timeout, and what has come is kept.
"""

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svgen.errors import DownloadError
from svgen.hub.snapshot import corrupt, feed, new_hasher

RETRY_STATUS = frozenset({408, 416, 425, 429, 500, 502, 503, 504})
MAX_WAIT_S = 60.0
TRIES = 2  # at bytes with the right hash
PLAIN = {"Accept-Encoding": "identity"}  # what comes is what lies there: no bomb unfolds


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How often to try again when nothing new came, and the first wait, which doubles."""

    attempts: int = 5
    wait_s: float = 1.0

    def wait_after(self, failures: int, asked_s: float = 0.0) -> float:
        """Seconds to wait after so many failures, or as many as the server asked for."""
        if not self.wait_s:
            return 0.0
        return min(max(self.wait_s * 2 ** (failures - 1), asked_s), MAX_WAIT_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class Remote:
    """One file of a repository."""

    path: str
    size: int
    digest: str


class Stopped(Exception):
    """Another file failed, or the user stopped the download."""


class BadStatus(Exception):
    """The server answered with an error."""

    def __init__(self, status: int, retry_after_s: float = 0.0):
        super().__init__(f"HTTP status {status}")
        self.status, self.retry_after_s = status, retry_after_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """How to reach the server: an httpx-like client, headers, the base class of its failures."""

    client: Any
    headers: Mapping[str, str]
    failures: type[Exception]
    timeout_s: float
    patience: Patience
    stop: threading.Event

    def attempt(self, action: Callable[[], bool]) -> None:
        """Repeat `action` until it is done. It says whether it moved forward before it failed."""
        failures = 0
        while True:
            if self.stop.is_set():
                raise Stopped
            moved, wait_s = False, 0.0
            try:
                if action():
                    return
                moved = True
            except BadStatus as error:
                if error.status not in RETRY_STATUS or failures >= self.patience.attempts:
                    raise
                wait_s = error.retry_after_s
            except self.failures:
                if failures >= self.patience.attempts:
                    raise
            failures = 0 if moved else failures + 1
            if self.stop.wait(self.patience.wait_after(max(failures, 1), wait_s)):
                raise Stopped


def check_status(response: Any) -> None:
    """Raise BadStatus for an answer that is an error."""
    if response.status_code >= 400:
        asked = response.headers.get("Retry-After", "")
        raise BadStatus(response.status_code, float(asked) if asked.isdecimal() else 0.0)


class _Partial:
    """The file as far as it came: its bytes on disk, their number and their hash."""

    def __init__(self, path: Path, remote: Remote):
        self.remote = remote
        self.file = path.open("ab")
        self.done = self.most = self.file.tell()  # most: how far it ever came
        self.hasher = new_hasher(remote.digest, remote.size)
        if self.done > remote.size:
            self.reset()
        else:
            feed(self.hasher, path, lambda _: None)

    def write(self, chunk: bytes) -> None:
        self.file.write(chunk)
        self.hasher.update(chunk)
        self.done += len(chunk)

    def advanced(self) -> bool:
        """Whether there is more now than there ever was. To come as far as before, again and again,
        is no progress: it would never end.
        """
        before, self.most = self.most, max(self.most, self.done)
        return self.done > before

    def reset(self) -> None:
        self.file.truncate(0)
        self.done = 0
        self.hasher = new_hasher(self.remote.digest, self.remote.size)

    def close(self) -> None:
        try:
            self.file.flush()
            os.fsync(self.file.fileno())
        finally:
            self.file.close()


def partial_of(target: Path) -> Path:
    """Where the bytes of an unfinished file wait."""
    return target.with_name(target.name + ".incomplete")


def fetch(
    link: Link, url: str, remote: Remote, target: Path, on_bytes: Callable[[int], None]
) -> None:
    """Bring one file to `target`.

    `on_bytes` gets the number of new bytes, negative when old ones turned out to be useless.
    Raises what the client raises, `BadStatus`, `Stopped`, OSError, and DownloadError if the bytes
    have another hash than was promised.
    """
    partial = _Partial(partial_of(target), remote)
    try:
        for _ in range(TRIES):
            link.attempt(lambda: _stream(link, url, partial, on_bytes))
            if partial.hasher.hexdigest() == remote.digest:
                break
            on_bytes(-partial.done)
            partial.reset()
            partial.most = 0
        else:
            raise wrong_bytes(remote)
    finally:
        partial.close()
    os.replace(partial_of(target), target)


def wrong_bytes(remote: Remote) -> DownloadError:
    """The error for a file that never came as it was promised."""
    return corrupt(
        f"{remote.path} came twice with another hash than the Hub promised",
        why=f"its digest must be {remote.digest}",
        hint="look at HF_ENDPOINT and at proxies on the way, then try again",
        files=[remote.path],
    )


def _stream(link: Link, url: str, partial: _Partial, on_bytes: Callable[[int], None]) -> bool:
    """Make one request for what is missing: is the file complete?

    A break that brought no new byte raises.
    """
    before = partial.done
    if before == partial.remote.size:
        return True
    broken: Exception | None = None
    headers = {**link.headers, **PLAIN}
    if before:
        headers["Range"] = f"bytes={before}-"
    try:
        with link.client.stream(
            "GET", url, headers=headers, timeout=link.timeout_s, follow_redirects=True
        ) as response:
            if before and response.status_code in (200, 416):  # no ranges here: all of it again
                on_bytes(-before)
                partial.reset()
            check_status(response)
            for chunk in response.iter_raw():
                if link.stop.is_set():
                    raise Stopped
                chunk = chunk[: partial.remote.size - partial.done]
                partial.write(chunk)
                on_bytes(len(chunk))
                if partial.done == partial.remote.size:
                    break
    except link.failures as error:
        broken = error
    if partial.done == partial.remote.size:
        return True
    if not partial.advanced():
        raise broken or BadStatus(502)  # a whole answer without a new byte: a gateway's fault
    return False
