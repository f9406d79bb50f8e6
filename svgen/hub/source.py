"""What a model name means: a catalog name, `organisation/repository[@revision]`, or a folder."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from svgen.catalog import CATALOG, entry_of
from svgen.errors import MachineError, UsageError
from svgen.hub import snapshot

REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*")
PATH = re.compile(r"[./~]")  # how a name starts that can only be a path
DEFAULT_MODEL = "wan2.1-14b"
DEMO_NAME = "demo"  # the model inside the package
DEMO = Path(__file__).parents[1] / "demo" / "snapshot"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a model comes from: a folder, or a revision of a repository."""

    name: str  # as the user wrote it
    folder: Path | None = None
    repository: str = ""
    revision: str = ""


def _expand(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:  # ~ of a user who does not exist
        return Path(model)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is no path: too long, a zero byte
        return False


def _holds_model(folder: Path) -> bool:
    return _exists(folder) and (folder / snapshot.MODEL_INDEX).is_file()


def is_bundled(model: str) -> bool:
    """Whether a name means the small model inside the package."""
    return model == DEMO_NAME and _holds_model(DEMO)


def _is_repository(name: str) -> bool:
    return bool(REPOSITORY.fullmatch(name)) and "--" not in name and ".." not in name


def parse(model: str) -> Source:
    """Read a model name; raises UsageError for one that means nothing."""
    path = _expand(model)
    if _holds_model(path):
        return Source(name=model, folder=path)
    if is_bundled(model):
        return Source(name=model, folder=DEMO)
    base, at, revision = model.partition("@")
    entry = entry_of(base)
    a_path = bool(PATH.match(model)) or _exists(path)
    if not entry and (a_path or not _is_repository(base)):
        why = "a model is a catalog name, organisation/repository[@revision], or a folder"
        if a_path:
            why = "a checkpoint folder holds model_index.json and one folder per part"
        raise UsageError("E_MODEL", f"unknown model {model!r}", why=why, hint=suggest(base))
    if at and not REVISION.fullmatch(revision):
        why = "a revision is a commit, a tag or a branch"
        message = f"{model!r} has no usable revision"
        raise UsageError("E_MODEL", message, why=why, hint=f"use {base}")
    pinned = entry.revision if entry else "main"
    return Source(
        name=model,
        repository=entry.repository if entry else base,
        revision=revision or pinned,
    )


def parse_repository(model: str) -> Source:
    """Read the name of a model of the Hub; raises UsageError for a folder."""
    source = parse(model)
    if source.folder:
        why = "only models of the Hub are downloaded and removed"
        hint = f"known models: {', '.join(CATALOG)}"
        raise UsageError("E_MODEL", f"{model} is a folder of yours", why=why, hint=hint)
    return source


def resolve_auto(platform: str) -> str:
    """The model that `--model auto` means on a machine whose accelerator is `platform`."""
    if platform == "tpu":
        return DEFAULT_MODEL
    if is_bundled(DEMO_NAME):
        return DEMO_NAME
    raise MachineError(
        "E_NO_TPU",
        "no TPU is attached",
        why="`--model auto` means a Wan model, which runs elsewhere only when that is asked for",
        hint="name both: --device cpu --model wan2.1-1.3b",
    )


def suggest(name: str) -> str:
    """The way out of a wrong name: the nearest known model, or all of them."""
    close = difflib.get_close_matches(name.lower().rpartition("/")[2], CATALOG, n=1, cutoff=0.4)
    return f"did you mean {close[0]}?" if close else f"known models: {', '.join(CATALOG)}"
