"""Block sizes, chosen by the static count on each chip (tests/aot/tune.py; NOTES.md has what was
tried). They change speed only.

Sides of contiguous tiles, and how many rows strided ones should have, are data, per kind of chip.
For a geometry, strided tiles take as many positions as come near to that number of rows and leave
least of the matrix unit's 256 lines empty. 21 frames of 3,600 positions on a v6e:

    contiguous   3,328 queries x 3,072 keys
    strided      21 x 144 = 3,024 queries x 20 x 128 = 2,560 keys, and sinks of 2,560 keys
"""

from dataclasses import dataclass

from svgen.kernels.splash import DEFAULT, Blocks
from svgen.kernels.tables import TileSizes

PACKED = 16  # tile sides are multiples of this
MATRIX = 256  # lines of a matrix unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """What suits one kind of chip, in rows."""

    queries: int = 3328
    keys: int = 3072
    strided_queries: int = 3072
    strided_keys: int = 2560
    blocks: Blocks = DEFAULT


CHIPS = {
    # 16 MiB of VMEM
    "v4": Chip(queries=2048, keys=1024, strided_queries=2048, strided_keys=1024),
    "v5e": Chip(queries=2048),
    "v5p": Chip(queries=2048),
    "v6e": Chip(),
    "tpu7x": Chip(queries=2048),
}
DEVICE_KINDS = {  # as `jax.Device.device_kind` has it
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _side(lines: int, positions: int, rows: int, *, whole: bool) -> int:
    """How many positions a strided tile of `lines` takes to have about `rows` rows, at most.

    `whole`: whether a ragged last tile is computed in full, as that of queries is.
    """
    most = max(PACKED, min(rows // lines, _round_up(positions, PACKED)))

    def cost(size: int) -> float:
        filled = _round_up(lines * size, MATRIX) / (lines * size)
        return filled * (-(-positions // size) * size / positions if whole else 1)

    sides = range(_round_up(most * 2 // 3, PACKED), most + 1, PACKED)
    return min(sides, key=lambda size: (round(cost(size), 2), -size), default=PACKED)


def choose(chip: str, frames: int, positions: int) -> tuple[TileSizes, Blocks]:
    """Pick the sides of tiles, and the rest, for one kind of chip and one geometry."""
    if chip not in CHIPS:
        raise ValueError(f"chip {chip!r} must be one of {', '.join(CHIPS)}")
    found, tokens = CHIPS[chip], _round_up(frames * positions, PACKED)
    strided_keys = _side(max(frames - 1, 1), positions, found.strided_keys, whole=False)
    sizes = TileSizes(
        queries=min(found.queries, tokens),
        keys=min(found.keys, tokens),
        strided_queries=_side(frames, positions, found.strided_queries, whole=True),
        strided_keys=strided_keys,
        sink=max(frames - 1, 1) * strided_keys,
    )
    return sizes, found.blocks
