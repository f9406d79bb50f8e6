"""A Hub on loopback, as far as a client that downloads models sees it, with faults on demand.

Two ports: one speaks the API and serves small files, the other plays the storage that large (LFS)
files are redirected to. Every request is kept in `requests`.
"""

import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_FROM_BYTES = 10_000
ALWAYS = 10**9  # times
PIECE = 4096  # bytes of a slow answer
COMMIT = "c0ffee" + "0" * 34


def git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Repository:
    """One model repository: its files at one commit, and what leads to that commit."""

    files: dict[str, bytes]
    commit: str = COMMIT
    names: tuple[str, ...] = ("main",)  # branches and tags
    token: str | None = None  # only this token may read
    gated: bool = False
    altered: Callable[[dict[str, Any]], Any] = lambda answer: answer  # what the API really says

    def is_lfs(self, path: str) -> bool:
        return len(self.files[path]) >= LFS_FROM_BYTES or path.endswith(".safetensors")

    def digest(self, path: str) -> str:
        data = self.files[path]
        return sha256(data) if self.is_lfs(path) else git_sha1(data)


@dataclass
class Fault:
    """What goes wrong with the body of a file (or an API call, by its path): once, or more often.

    drop: the connection breaks after `after` bytes; short: they come as if they were all;
    stall: after as many bytes nothing more comes, until the server ends; flip: one bit is wrong;
    drip: they come in small pieces; more: too many come, and are promised;
    status: an HTTP error; noranges: ranges are ignored (with `after` it drops as well);
    unsatisfied: ranges are refused (416);
    shifted: another range comes than was asked for; gzip: the bytes are said to be compressed;
    redirect: to `location`, or to the same address again; answer: `body` instead, of an API call;
    flood: an answer that has no end.
    """

    path: str
    kind: str
    after: int = 0
    status: int = 500
    times: int = 1
    retry_after: str = "3600"
    location: str = ""
    body: bytes = b"<html>log in to this network first</html>"


@dataclass
class Request:
    method: str
    path: str
    port: int
    range: str | None
    token: str | None


@dataclass
class HubServer:
    """Use as a context manager; `url` is what HF_ENDPOINT wants."""

    repositories: dict[str, Repository]
    faults: list[Fault] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    bytes_served: int = 0

    def __enter__(self) -> "HubServer":
        self.lock = threading.Lock()
        self.stalled, self.ending = threading.Event(), threading.Event()
        self.servers, self.threads = [], []
        for _ in range(2):
            server = _Server(("127.0.0.1", 0), _Handler)
            server.daemon_threads = False  # closing waits for the last answer
            server.hub = self
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            self.servers.append(server)
            self.threads.append(thread)
        self.ports = [server.server_address[1] for server in self.servers]
        self.url = f"http://127.0.0.1:{self.ports[0]}"
        self.storage_url = f"http://127.0.0.1:{self.ports[1]}"
        return self

    def __exit__(self, *reason: object) -> None:
        self.ending.set()
        for server, thread in zip(self.servers, self.threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()

    def take_fault(self, path: str) -> Fault | None:
        """The next fault planned for a path, used up."""
        with self.lock:
            for fault in self.faults:
                if fault.path == path and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None

    def files_got(self) -> list[str]:
        """The paths of files whose bytes were asked for, in order."""
        marks = [re.search(r"/(?:resolve|storage)/[^/]+/(.+)", r.path) for r in self.requests]
        pairs = zip(marks, self.requests, strict=True)
        return [mark[1] for mark, request in pairs if mark and request.method == "GET"]


class _Server(ThreadingHTTPServer):
    def handle_error(self, *reason: Any) -> None:
        """Say nothing of a client that was killed."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(*reason)


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    @property
    def hub(self) -> HubServer:
        return self.server.hub

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        with self.hub.lock:
            port = self.server.server_address[1]
            self.hub.requests.append(
                Request(self.command, path, port, self.headers.get("Range"), token)
            )
        if match := re.fullmatch(r"/storage/([^/]+)/(.+)", path):
            return self.body(self.hub.repositories[match[1].replace("--", "/")], match[2])
        if match := re.fullmatch(
            r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+))?(?:/.*)?", path
        ):
            return self.api(match[1], match[2] or "revision", match[3] or "main", token)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.resolve(match[1], match[2], match[3], token)
        return self.error(404, "EntryNotFound")

    def find(self, name: str, revision: str, token: str | None) -> Repository | None:
        """The repository, or an error to the client as the Hub words it."""
        repository = self.hub.repositories.get(name)
        if repository is None:
            self.error(404 if token else 401, "RepoNotFound")
        elif repository.token not in (None, token):
            code = "GatedRepo" if repository.gated else "RepoNotFound"
            self.error(403 if repository.gated and token else 401, code)
        elif revision not in (repository.commit, *repository.names):
            self.error(404, "RevisionNotFound")
        else:
            return repository
        return None

    def api(self, name: str, kind: str, revision: str, token: str | None) -> None:
        fault = self.hub.take_fault("api")
        if fault and self.refused(fault):
            return None
        if fault and fault.kind == "answer":
            return self.send(200, fault.body, {})
        repository = self.find(name, revision, token)
        if repository is None:
            return None
        if kind == "revision":
            sizes = "blobs=true" in self.path.lower()
            files = [self.sibling(repository, path, sizes) for path in sorted(repository.files)]
            answer: Any = {"id": name, "modelId": name, "sha": repository.commit, "siblings": files}
            answer = repository.altered(answer)
        else:
            answer = [self.entry(repository, path) for path in sorted(repository.files)]
        data, headers = json.dumps(answer).encode(), {"Content-Type": "application/json"}
        return self.faulty(200, data, headers, fault)

    def served(self, count: int) -> None:
        with self.hub.lock:
            self.hub.bytes_served += count

    def refused(self, fault: Fault) -> bool:
        """Answer with a fault that takes the place of the whole answer; False for another one."""
        if fault.kind == "status":
            self.error(fault.status, "", fault.retry_after)
        elif fault.kind == "redirect":
            self.send(302, b"", {"Location": fault.location or self.path})
        elif fault.kind == "flood":
            self.send(200, b"", {"Content-Length": str(10**12)})
            with suppress(OSError):  # the client leaves
                while not self.hub.ending.is_set():
                    self.wfile.write(b"x" * 2**20)
                    self.served(2**20)
        else:
            return False
        return True

    def faulty(
        self, status: int, data: bytes, headers: dict[str, str], fault: Fault | None
    ) -> None:
        """Send an answer, of which some part may not come."""
        kind, promised = fault.kind if fault else "", len(data)
        if kind in ("drop", "short", "stall") or (kind == "noranges" and fault.after):
            data = data[: fault.after]
        headers["Content-Length"] = str(len(data) if kind == "short" else promised)
        if kind == "drip":
            self.send(status, b"", headers)
            for start in range(0, len(data), PIECE):
                self.wfile.write(data[start : start + PIECE])
                self.wfile.flush()
                self.served(PIECE)
                self.hub.ending.wait(0.001)
            return
        self.served(len(data))
        self.send(status, data, headers)
        if kind == "stall":
            self.wfile.flush()
            self.hub.stalled.set()
            self.hub.ending.wait()

    def sibling(self, repository: Repository, path: str, sizes: bool) -> dict[str, Any]:
        data = repository.files[path]
        item: dict[str, Any] = {"rfilename": path}
        if sizes:
            item |= {"size": len(data), "blobId": git_sha1(data)}
            if repository.is_lfs(path):
                item["lfs"] = {"size": len(data), "sha256": sha256(data), "pointerSize": 130}
        return item

    def entry(self, repository: Repository, path: str) -> dict[str, Any]:
        data = repository.files[path]
        item = {"type": "file", "path": path, "size": len(data), "oid": git_sha1(data)}
        if repository.is_lfs(path):
            item["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 130}
        return item

    def resolve(self, name: str, revision: str, path: str, token: str | None) -> None:
        repository = self.find(name, revision, token)
        if repository is None:
            return None
        if path not in repository.files:
            return self.error(404, "EntryNotFound")
        digest, size = repository.digest(path), len(repository.files[path])
        headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{digest}"'}
        if repository.is_lfs(path):
            headers |= {"X-Linked-Size": str(size), "X-Linked-Etag": f'"{digest}"'}
            headers["Location"] = f"{self.hub.storage_url}/storage/{name.replace('/', '--')}/{path}"
            return self.send(302, b"", headers)
        if self.command == "HEAD":
            return self.send(200, repository.files[path], headers)
        return self.body(repository, path, headers)

    def body(
        self, repository: Repository, path: str, headers: dict[str, str] | None = None
    ) -> None:
        """The bytes of a file, or of a range of it, with the fault that is due."""
        data, headers = repository.files[path], dict(headers or {})
        fault = self.hub.take_fault(path)
        kind, status = fault.kind if fault else "", 200
        if fault and self.refused(fault):
            return None
        if kind == "flip":
            data = flipped(data)
        if kind == "more":
            data += b"x" * 1000
        if kind == "gzip":
            headers["Content-Encoding"] = "gzip"
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if wanted and kind != "noranges":
            start = int(wanted[1]) + (7 if kind == "shifted" else 0)
            if start >= len(data) or kind == "unsatisfied":
                return self.send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        return self.faulty(status, data, headers, fault)

    def error(self, status: int, code: str, retry_after: str = "") -> None:
        headers = {"X-Error-Code": code} if code else {}
        headers |= {"Retry-After": retry_after} if retry_after else {}
        self.send(status, b"{}", headers)

    def send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def point_client_to(monkeypatch: Any, url: str) -> None:
    """Let this process's client take an address for the Hub, as HF_ENDPOINT would before import."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def bad_in(cache: Path, repository: Repository) -> list[str]:
    """The files of a cache, complete by their names, that are not what the repository holds."""
    blobs = [path for path in cache.glob("models--*/blobs/*") if path.suffix != ".incomplete"]
    bad = [
        path.name
        for path in blobs
        if path.name not in (sha256(path.read_bytes()), git_sha1(path.read_bytes()))
    ]
    for folder in cache.glob("models--*/snapshots/*"):
        for path in folder.rglob("*"):
            name = str(path.relative_to(folder))
            if path.is_file() and path.read_bytes() != repository.files.get(name):
                bad.append(name)
    return bad


def flipped(data: bytes, at: int | None = None) -> bytes:
    """The same bytes with one bit changed."""
    at = len(data) // 2 if at is None else at
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def safetensors_file(seed: int, size: int) -> bytes:
    """A safetensors file with one tensor of `size` bytes."""
    entry = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({f"tensor{seed}": entry}).encode()
    block = hashlib.sha256(str(seed).encode()).digest()
    return len(header).to_bytes(8, "little") + header + (block * (size // 32 + 1))[:size]


def wan_files(kilobytes: int = 64) -> dict[str, bytes]:
    """A repository in the layout of Wan 2.1's, with all that a download must leave aside."""
    size = kilobytes * 1024
    files = {
        "model_index.json": {"_class_name": "WanPipeline", "transformer": ["diffusers", "Wan"]},
        "scheduler/scheduler_config.json": {"flow_shift": 3.0},
        "text_encoder/config.json": {"d_model": 4096},
        "tokenizer/tokenizer_config.json": {},
        "tokenizer/special_tokens_map.json": {"pad_token": "<pad>"},
        "tokenizer/tokenizer.json": {"model": {"vocab": ["a" * 9] * 2000}},
        "transformer/config.json": {"num_layers": 30},
        "vae/config.json": {"z_dim": 16},
    }
    found = {path: json.dumps(value).encode() for path, value in files.items()}
    for folder, stem, count in (
        ("text_encoder", "model", 3),
        ("transformer", "diffusion_pytorch_model", 2),
    ):
        names = [f"{stem}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        index = {"metadata": {}, "weight_map": {f"t{i}": name for i, name in enumerate(names)}}
        found[f"{folder}/{stem}.safetensors.index.json"] = json.dumps(index).encode()
        for name in names:
            found[f"{folder}/{name}"] = safetensors_file(len(found), size)
    found["vae/diffusion_pytorch_model.safetensors"] = safetensors_file(99, size)
    return found | {
        "README.md": b"# Wan",
        ".gitattributes": b"*.safetensors filter=lfs",
        "assets/video.mp4": b"x" * 50_000,
        "tokenizer/spiece.model": b"x" * 50_000,
        "transformer/diffusion_pytorch_model.bin": b"x" * 50_000,
        "transformer/stray.safetensors": safetensors_file(7, 50_000),
    }
