"""The known models: name -> repository, pinned revision, and how their makers sample.

Sampling values are the official ones (Wan 2.1 README and configs), not those in the repositories'
scheduler_config.json, whose flow shift of 3.0 is what the converter wrote, for every model. A
checkpoint folder may bring its own, in svgen.json.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from svgen.errors import DownloadError, SvgenError, shown
from svgen.untrusted import read_start

NEGATIVE_WAN = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，"
    "JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，"
    "手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)


SIZE_480P, SIZE_720P = (832, 480), (1280, 720)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Default values of a run, for a model that says nothing else."""

    steps: int = 50
    guidance: float = 5.0
    shift: float = 5.0
    frames: int = 81
    fps: float = 16
    size_px: tuple[int, int] = (832, 480)  # width, height
    negative: str = ""
    max_frames: int | None = None  # more than it was trained on is a warning
    trained_px: tuple[tuple[int, int], ...] = ()  # sizes trained on; others are a warning


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogEntry:
    """One known model."""

    name: str
    repository: str
    revision: str
    parameters: int  # of the transformer
    download_bytes: int  # of the files that svgen needs
    licence: str
    sampling: Sampling


CATALOG: dict[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="wan2.1-1.3b",
            repository="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
            revision="0fad780a534b6463e45facd96134c9f345acfa5b",
            parameters=1_418_996_800,
            download_bytes=28_928_000_000,
            licence="Apache-2.0",
            sampling=Sampling(
                guidance=6.0,
                shift=8.0,
                negative=NEGATIVE_WAN,
                max_frames=81,
                trained_px=(SIZE_480P,),
            ),
        ),
        CatalogEntry(
            name="wan2.1-14b",
            repository="Wan-AI/Wan2.1-T2V-14B-Diffusers",
            revision="38ec498cb3208fb688890f8cc7e94ede2cbd7f68",
            parameters=14_288_491_584,
            download_bytes=80_407_000_000,
            licence="Apache-2.0",
            sampling=Sampling(
                size_px=SIZE_720P,
                negative=NEGATIVE_WAN,
                max_frames=81,
                trained_px=(SIZE_480P, SIZE_720P),
            ),
        ),
    )
}

# A checkpoint folder, or a repository that is not in the catalog.
UNKNOWN = Sampling(frames=81)


def entry_of(name: str) -> CatalogEntry | None:
    """Find a model by its catalog name or its repository, whatever the case; None if it is not
    known.
    """
    wanted = name.lower()
    for entry in CATALOG.values():
        if wanted in (entry.name, entry.repository.lower()):
            return entry
    return None


def sampling_of(name: str) -> Sampling:
    """Sampling defaults of a model, by name or repository; general ones if it is not known."""
    entry = entry_of(name)
    return entry.sampling if entry else UNKNOWN


SAMPLING_FILE = "svgen.json"
MAX_SAMPLING_BYTES = 64 << 10


def read_sampling(folder: Path) -> Sampling | None:
    """Sampling defaults that a checkpoint folder brings in its svgen.json; None if it has none.

    Raises DownloadError for a file that is not an object of known fields of the right types.
    """
    path = folder / SAMPLING_FILE
    try:
        data = read_start(path, MAX_SAMPLING_BYTES + 1)
        values = json.loads(data) if len(data) <= MAX_SAMPLING_BYTES else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise _bad_sampling(path, str(error)) from error
    if not isinstance(values, dict):
        raise _bad_sampling(path, "it must hold a small JSON object")
    return _sampling_from(path, values)


def _sampling_from(path: Path, values: Mapping[str, Any]) -> Sampling:
    default, checked = Sampling(), {}
    known = {item.name for item in fields(Sampling)}
    for name, value in values.items():
        if name not in known:
            raise _bad_sampling(path, f"unknown key {name[:40]!r}")
        checked[name] = _like(getattr(default, name), value)
        if checked[name] is None:
            raise _bad_sampling(path, f"{name} = {shown(value, 40)} has another type")
    return Sampling(**checked)


def _like(default: Any, value: Any) -> Any:
    """A JSON value as the type of a field's default; None if it is of another."""
    if isinstance(default, tuple):
        return _sizes(default, value)
    if isinstance(default, str):
        return value if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
        return None
    is_count = default is None or isinstance(default, int)
    return value if isinstance(value, int) or not is_count else None


def _sizes(default: tuple, value: Any) -> tuple | None:
    """`size_px` holds two whole numbers, `trained_px` pairs of them."""
    if not isinstance(value, list) or len(value) > 64:
        return None
    if default and isinstance(default[0], int):
        whole = len(value) == 2 and all(isinstance(side, int) and 0 < side < 1e6 for side in value)
        return tuple(value) if whole else None
    pairs = [_sizes((0, 0), one) for one in value]
    return None if None in pairs else tuple(pairs)


def _bad_sampling(path: Path, why: str) -> SvgenError:
    return DownloadError(
        "E_CHECKPOINT",
        f"{path} cannot be used",
        why=why,
        hint=f"mend or delete {path}: it holds nothing but default values",
    )
