"""From pixels to tokens: which sizes a model can make, and what they become on the latent grid.

A video of T frames, width x height pixels, becomes F = 1 + (T-1)/t latent frames of (height/s) x
(width/s) cells, where the VAE's strides are t = 4 and s = 8; the transformer joins 1x2x2 cells to a
token, so one token covers 16x16 pixels.

    1280x720, 81 frames:  F = 21,  latent 90 x 160,  grid 21 x 45 x 80 = 75,600 tokens
"""

from dataclasses import dataclass

from svgen.config import TransformerSpec, VaeSpec
from svgen.errors import SvgenError, UsageError

RESOLUTIONS: dict[str, tuple[int, int]] = {  # name -> (width, height) in pixels
    "480p": (832, 480),
    "720p": (1280, 720),
    "1080p": (1920, 1080),
    "1440p": (2560, 1440),
}
MAX_SIDE_PX = 8192
MAX_FRAMES = 4001


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The sizes of one video, in every unit of its way. Made by `grid_of`."""

    width_px: int  # what the user gets
    height_px: int
    frames: int
    rows: int  # latent cells, computed (may cover more than height_px: the rest is cropped)
    columns: int
    latent_frames: int
    patch: tuple[int, int, int]
    stride: int

    @property
    def tokens_per_axis(self) -> tuple[int, int, int]:
        """Latent frames, rows and columns of tokens."""
        return (
            self.latent_frames // self.patch[0],
            self.rows // self.patch[1],
            self.columns // self.patch[2],
        )

    @property
    def tokens(self) -> int:
        """N: how many video tokens self-attention sees."""
        frames, rows, columns = self.tokens_per_axis
        return frames * rows * columns

    @property
    def computed_px(self) -> tuple[int, int]:
        """Width and height that the networks compute, before cropping."""
        return self.columns * self.stride, self.rows * self.stride


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What a model's strides and patch demand of a size in pixels."""

    stride: int  # pixels per latent cell
    frame_stride: int
    patch: tuple[int, int, int]
    max_positions: int  # tokens along each axis

    @classmethod
    def of(cls, transformer: TransformerSpec, vae: VaeSpec) -> "Rules":
        """The rules of a checkpoint."""
        return cls(
            stride=vae.stride,
            frame_stride=vae.frame_stride,
            patch=transformer.patch,
            max_positions=transformer.max_positions,
        )


WAN21 = Rules(stride=8, frame_stride=4, patch=(1, 2, 2), max_positions=1024)


def grid_of(width_px: int, height_px: int, frames: int, rules: Rules) -> Grid:
    """Lay a video on the latent grid. Sizes must have passed `size_problem` and `frames_problem`.

    1080 rows are computed as 1088 and cropped: rows and columns are rounded up to whole tokens.
    """
    row_px, column_px = rules.stride * rules.patch[1], rules.stride * rules.patch[2]
    return Grid(
        width_px=width_px,
        height_px=height_px,
        frames=frames,
        rows=-(-height_px // row_px) * rules.patch[1],
        columns=-(-width_px // column_px) * rules.patch[2],
        latent_frames=1 + (frames - 1) // rules.frame_stride,
        patch=rules.patch,
        stride=rules.stride,
    )


def _size_ok(width_px: int, height_px: int, rules: Rules) -> bool:
    if (width_px, height_px) == RESOLUTIONS["1080p"] and _sides_ok(width_px, 1088, rules):
        return True  # the one size that is cropped
    return _sides_ok(width_px, height_px, rules)


def _sides_ok(width_px: int, height_px: int, rules: Rules) -> bool:
    steps = (rules.stride * rules.patch[2], rules.stride * rules.patch[1])
    return all(
        side % step == 0 and step <= side <= min(MAX_SIDE_PX, step * rules.max_positions)
        for side, step in zip((width_px, height_px), steps, strict=True)
    )


def _neighbours(value: int, step: int, highest: int) -> list[int]:
    below, above = value // step * step, -(-value // step) * step
    return sorted({min(max(step, side), highest // step * step) for side in (below, above)})


def size_problem(width_px: int, height_px: int, rules: Rules) -> SvgenError | None:
    """Say what is wrong with a size, naming the nearest sizes that this same check accepts; None if
    nothing is.
    """
    if _size_ok(width_px, height_px, rules):
        return None
    column_px, row_px = rules.stride * rules.patch[2], rules.stride * rules.patch[1]
    widest = min(MAX_SIDE_PX, column_px * rules.max_positions)
    highest = min(MAX_SIDE_PX, row_px * rules.max_positions)
    widths, heights = (
        _neighbours(width_px, column_px, widest),
        _neighbours(height_px, row_px, highest),
    )
    nearest = [(widths[0], heights[0]), (widths[-1], heights[-1])]
    nearest = [size for size in dict.fromkeys(nearest) if _size_ok(*size, rules)]
    multiple = (
        f"{column_px}" if column_px == row_px else f"{column_px} (width) and {row_px} (height)"
    )
    return UsageError(
        "E_SIZE",
        f"--res {width_px}x{height_px} cannot be made by this model",
        why=f"width and height must be multiples of {multiple}, at most {widest}x{highest}",
        hint=" or ".join(f"--res {width}x{height}" for width, height in nearest),
        details={"nearest": [list(size) for size in nearest]},
    )


def _frames_ok(frames: int, rules: Rules) -> bool:
    fits = 1 <= frames <= MAX_FRAMES and (frames - 1) % rules.frame_stride == 0
    latent = 1 + (frames - 1) // rules.frame_stride
    return fits and latent % rules.patch[0] == 0 and latent // rules.patch[0] <= rules.max_positions


def frames_problem(frames: int, rules: Rules) -> SvgenError | None:
    """Say what is wrong with a number of frames, naming the nearest valid; None if nothing is."""
    if _frames_ok(frames, rules):
        return None
    valid = [other for other in range(1, MAX_FRAMES + 1) if _frames_ok(other, rules)]
    valid = sorted(valid, key=lambda other: (abs(other - frames), other))[:2]
    return UsageError(
        "E_FRAMES",
        f"--frames {frames} cannot be made by this model",
        why=f"the VAE packs {rules.frame_stride} frames into one after the first: "
        f"{rules.frame_stride}k+1, at most {MAX_FRAMES}",
        hint=" or ".join(f"--frames {other}" for other in sorted(valid)),
        details={"nearest": sorted(valid)},
    )
