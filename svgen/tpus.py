"""TPUs by name: what their makers publish of one chip, and how slices of them are called."""

import re
from dataclasses import dataclass

from svgen.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Tpu:
    """One generation: what its makers publish, and how its slices are called."""

    chip: str  # of `cycles.TOPOLOGIES`
    hbm_gib: float
    hbm_gbs: float
    link_gbs: float  # of one chip to all its neighbours, both ways together, GB/s
    cores: int = 1  # that a name counts for each chip
    shapes: dict[int, str]  # chips -> topology


FLAT = {4: "2x2x1", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
FLAT_V5E = {**FLAT, 4: "2x4"}  # its smallest topology that compiles; four chips of it are taken
SOLID = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}
TPUS = {
    "v4": Tpu(chip="v4", hbm_gib=32, hbm_gbs=1228, link_gbs=300, cores=2, shapes=SOLID),
    "v5e": Tpu(chip="v5e", hbm_gib=16, hbm_gbs=819, link_gbs=200, shapes=FLAT_V5E),
    "v5p": Tpu(chip="v5p", hbm_gib=95, hbm_gbs=2765, link_gbs=600, cores=2, shapes=SOLID),
    "v6e": Tpu(chip="v6e", hbm_gib=32, hbm_gbs=1640, link_gbs=448, shapes=FLAT),
    "v7x": Tpu(chip="tpu7x", hbm_gib=96, hbm_gbs=7380, link_gbs=600, shapes=SOLID),
}
NAME = re.compile(r"(v\d+[a-z]*)-(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Chips of one name: `v6e-8`."""

    name: str
    tpu: Tpu
    chips: int

    @property
    def topology(self) -> str:
        """The topology to compile for; one chip is taken out of the smallest."""
        shapes = self.tpu.shapes
        return f"{self.tpu.chip}:{shapes.get(self.chips, shapes[min(shapes)])}"


def parse_slice(name: str) -> Slice:
    """Read the name of TPU chips; raises UsageError (E_TPU_NAME)."""
    match = NAME.fullmatch(name)
    tpu = TPUS.get(match[1]) if match else None
    chips = int(match[2]) / tpu.cores if tpu else 0
    if tpu and (chips == 1 or chips in tpu.shapes):
        return Slice(name=name, tpu=tpu, chips=int(chips))
    known = ", ".join(f"{one}-N" for one in TPUS)
    counts = ", ".join(str(count * tpu.cores) for count in (1, *tpu.shapes)) if tpu else ""
    raise UsageError(
        "E_TPU_NAME",
        f"--tpu {name[:40]} is not known",
        why=f"N of {match[1]} is one of {counts}" if tpu else f"names are {known}",
        hint="--tpu v6e-8",
    )
