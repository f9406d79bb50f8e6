"""Block sizes: data that change speed only."""

from svgen.kernels.splash import Blocks
from svgen.kernels.tables import TileSizes


def choose(chip: str, head_size: int, frames: int, positions: int) -> tuple[TileSizes, Blocks]:
    """Pick tile sizes for one chip and geometry."""
    del chip, head_size
    sizes = TileSizes(
        queries=2048,
        keys=2048,
        strided_queries=144,
        strided_keys=144,
        sink=(frames - 1) * 144,
    )
    return sizes, Blocks()
