"""The known models: name -> repository, pinned revision, and the sampling values its makers
recommend.

Sampling values are the official ones (Wan 2.1 README and configs), not those in the repositories'
scheduler_config.json, whose flow shift of 3.0 is what the converter wrote, for every model.
"""

from dataclasses import dataclass

NEGATIVE_WAN = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，"
    "JPEG压缩残留，丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，"
    "手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Default values of a run, for a model that says nothing else."""

    steps: int = 50
    guidance: float = 5.0
    shift: float = 5.0
    frames: int = 81
    fps: float = 16
    resolution: str = "480p"
    negative: str = ""
    max_frames: int | None = None  # more than it was trained on is a warning
    resolutions: tuple[str, ...] = ()  # trained on; others are a warning


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
                resolutions=("480p",),
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
                resolution="720p",
                negative=NEGATIVE_WAN,
                max_frames=81,
                resolutions=("480p", "720p"),
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
