"""A checkpoint folder in the diffusers layout: which files a run needs, and whether each is whole.

A digest is what the Hub names a file by: 64 hex digits are the SHA-256 of its bytes (LFS), 40 are
git's blob SHA-1.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from svgen.errors import DownloadError, FileError, SvgenError, UsageError, shown
from svgen.untrusted import MAX_HEADER_BYTES, SHARD, open_plain, read_start

MODEL_INDEX = "model_index.json"
REQUIRED = (
    MODEL_INDEX,
    "text_encoder/config.json",
    "tokenizer/tokenizer.json",
    "transformer/config.json",
    "vae/config.json",
)
OPTIONAL = (
    "scheduler/scheduler_config.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer/special_tokens_map.json",
)
WEIGHTS = (
    ("text_encoder", "model"),
    ("transformer", "diffusion_pytorch_model"),
    ("vae", "diffusion_pytorch_model"),
)
PIPELINE = "WanPipeline"
REPAIR_HINT = "svgen models pull NAME --repair, or use another checkpoint"
MAX_JSON_BYTES = 16 << 20
JSON_RULE = f"it must be a JSON object of at most {MAX_JSON_BYTES:,} bytes"
CHUNK_BYTES = 1 << 20
SHOWN_LETTERS = 200  # of a name in a message
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class Hasher(Protocol):
    """What this file needs of a `hashlib` object."""

    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FileCheck:
    """The state of one file; `problem` is empty when it is whole."""

    path: str
    problem: str = ""  # "", "missing", "size" or "hash"
    expected_bytes: int | None = None
    actual_bytes: int | None = None
    expected_digest: str | None = None
    actual_digest: str | None = None

    @property
    def message(self) -> str:
        """What is wrong with the file, in a few words."""
        if self.problem == "size":
            return f"{self.path} has {self.actual_bytes:,} bytes, not {self.expected_bytes:,}"
        if self.problem == "hash":
            return f"{self.path} has the hash {self.actual_digest}, not {self.expected_digest}"
        return f"{self.path} is {self.problem or 'whole'}"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def corrupt(message: str, *, why: str, hint: str, **details: Any) -> DownloadError:
    """The error for a checkpoint that cannot be used."""
    return DownloadError("E_CHECKPOINT", message, why=why, hint=hint, details=details)


def too_large(path: str) -> DownloadError:
    """The error for a JSON file that is not read at all."""
    message = f"{path} has more than {MAX_JSON_BYTES:,} bytes"
    return corrupt(message, why=JSON_RULE, hint=REPAIR_HINT)


def parse_json(data: bytes, path: str) -> dict[str, Any]:
    """Read a JSON object of bounded size; raises DownloadError for anything else."""
    why, hint = JSON_RULE, REPAIR_HINT
    if len(data) > MAX_JSON_BYTES:
        raise too_large(path)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise corrupt(f"{path} is not JSON", why=why, hint=hint) from error
    if not isinstance(value, dict):
        raise corrupt(f"{path} holds no JSON object", why=why, hint=hint)
    return value


def read_bounded(path: Path) -> bytes:
    """Read a small file, one byte past the limit at most: `parse_json` refuses what is longer."""
    try:
        return read_start(path, MAX_JSON_BYTES + 1)
    except OSError as error:
        message = f"{path} cannot be read: {error.strerror}"
        hint = "check the permissions of the folder"
        raise FileError("E_READ", message, why="every file of a model is read", hint=hint) from None


def shards_of(index_path: str, data: bytes) -> list[str]:
    """List the files that a safetensors index names; a name that leaves the folder is refused."""
    mapping = parse_json(data, index_path).get("weight_map")
    hint = REPAIR_HINT
    if not isinstance(mapping, dict) or not mapping:
        why = "a safetensors index maps each tensor to the file that holds it"
        raise corrupt(f"{index_path} has no weight_map", why=why, hint=hint)
    names = dict.fromkeys(map(str, mapping.values()))
    for name in names:
        if not SHARD.fullmatch(name):
            why = "a shard is a .safetensors file beside its index"
            what = f"{index_path} names the file {shown(name, SHOWN_LETTERS)}"
            raise corrupt(what, why=why, hint=hint)
    folder = index_path.rpartition("/")[0]
    return [f"{folder}/{name}" for name in names]


def needed_files(exists: Callable[[str], bool], read: Callable[[str], bytes]) -> list[str]:
    """List the files that a run needs, there or not: small ones first, then the weights."""
    small = [*REQUIRED, *filter(exists, OPTIONAL)]
    weights = []
    for folder, stem in WEIGHTS:
        index = f"{folder}/{stem}.safetensors.index.json"
        if exists(index):
            small.append(index)
            weights += shards_of(index, read(index))
        else:
            weights.append(f"{folder}/{stem}.safetensors")
    return small + weights


def needed_in(folder: Path) -> list[str]:
    """List the files that a run needs of a folder on disk."""
    return needed_files(
        lambda name: (folder / name).is_file(), lambda name: read_bounded(folder / name)
    )


def missing_in(folder: Path) -> list[str]:
    """List the needed files that are not in a folder on disk."""
    return [name for name in needed_in(folder) if not (folder / name).is_file()]


def check_pipeline(data: bytes, model: str) -> None:
    """Raise UsageError unless model_index.json describes a pipeline that svgen runs."""
    index = parse_json(data, f"{MODEL_INDEX} of {model}")
    found, second = index.get("_class_name"), index.get("transformer_2")
    hint = "use a Wan 2.1 text-to-video model: `svgen models list`"
    if found != PIPELINE:
        why = f"svgen runs checkpoints of the class {PIPELINE}"
        raise UsageError(
            "E_MODEL", f"{model} is a {shown(found, SHOWN_LETTERS)} model", why=why, hint=hint
        )
    if second not in (None, [None, None]):
        why = "svgen runs models with one transformer"
        raise UsageError("E_MODEL", f"{model} has two transformers", why=why, hint=hint)


def new_hasher(digest: str, size: int) -> Hasher:
    """Make the hash object that a digest of this length was made with."""
    if len(digest) == 64:
        return hashlib.sha256()
    hasher = hashlib.sha1(usedforsecurity=False)
    hasher.update(b"blob %d\0" % size)
    return hasher


def digest_of(data: bytes, like: str) -> str:
    """The digest of some bytes, of the same kind as another digest."""
    hasher = new_hasher(like, len(data))
    hasher.update(data)
    return hasher.hexdigest()


def feed(hasher: Hasher, path: Path, on_bytes: Callable[[int], None]) -> None:
    """Hash a file, telling how far it came."""
    with open_plain(path) as file:
        while chunk := file.read(CHUNK_BYTES):
            hasher.update(chunk)
            on_bytes(len(chunk))


def cached_digest(path: Path) -> str | None:
    """The digest of a file in the Hub's cache, where it is the link's target; None elsewhere."""
    name = Path(os.readlink(path)).name if path.is_symlink() else ""
    return name if DIGEST.fullmatch(name) else None


def declared_bytes(path: Path) -> int | None:
    """The length that the header of a safetensors file asks for; None if it has no header."""
    with open_plain(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= MAX_HEADER_BYTES:
            return None
        text = file.read(length)
    try:
        header = json.loads(text)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__"]
        return 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None


def check_file(
    folder: Path, name: str, size: int | None, digest: str | None, on_bytes: Callable[[int], None]
) -> FileCheck:
    """Check one file against its size and digest; without a digest, against its own header."""
    path = folder / name
    if not path.is_file():
        return FileCheck(path=name, problem="missing", expected_bytes=size, expected_digest=digest)
    actual = path.stat().st_size
    if size is None and digest is None and name.endswith(".safetensors"):
        size = declared_bytes(path) or -1
    if size is not None and size != actual:
        return FileCheck(
            path=name,
            problem="size" if size >= 0 else "without a safetensors header",
            expected_bytes=size if size >= 0 else None,
            actual_bytes=actual,
        )
    if digest is None:
        return FileCheck(path=name, expected_bytes=size, actual_bytes=actual)
    hasher = new_hasher(digest, actual)
    feed(hasher, path, on_bytes)
    found = hasher.hexdigest()
    return FileCheck(
        path=name,
        problem="" if found == digest else "hash",
        expected_bytes=size,
        actual_bytes=actual,
        expected_digest=digest,
        actual_digest=found,
    )


def bad_files_error(checks: Sequence[FileCheck], model: str, hint: str) -> SvgenError | None:
    """One error that names every bad file; None when all are whole."""
    bad = [check for check in checks if check.problem]
    if not bad:
        return None
    more = f" (and {len(bad) - 3} more files)" if len(bad) > 3 else ""
    message = f"{model}: " + "; ".join(check.message for check in bad[:3]) + more
    files = [check.as_json() for check in bad]
    return corrupt(message, why="a run needs every file whole", hint=hint, files=files)
