"""Holds what a run needs of memory against what is there, before weights are loaded; names settings
that fit.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from svgen.catalog import entry_of
from svgen.cli.endings import explain
from svgen.cli.room import GIB, VARIABLE, chip_room, host_room
from svgen.config import ModelSpecs, Request
from svgen.errors import OutOfMemory, UsageError
from svgen.grid import RESOLUTIONS, Rules, frames_problem, grid_of, size_problem
from svgen.shapes import SPECS

if TYPE_CHECKING:
    from svgen.memory import Need
    from svgen.pipeline import Pipeline
    from svgen.sharding import Split

T = TypeVar("T")
HOST, CHIP = "host", "chip"
NAMES = {HOST: "memory", CHIP: "memory of a chip"}
DOING = {"embed": "encoding the prompt", "denoise": "denoising", "decode": "decoding"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lack:
    """Where memory does not suffice."""

    place: str  # host or chip
    stage: str
    needed: int
    available: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What the runs of one model need, and what is there for them, in bytes."""

    specs: ModelSpecs
    split: "Split"
    host: int | None  # None: not known, and not checked
    chip: int | None
    on_host: bool  # the chips are the host's own processors
    processes: int = 1

    @classmethod
    def now(cls, specs: ModelSpecs, split: "Split") -> "Memory":
        """What is there now, for a model that may still have to be fetched. JAX must be up."""
        import jax

        return cls(
            specs=specs,
            split=split,
            host=host_room(),
            chip=chip_room(),
            on_host=jax.devices()[0].platform == "cpu",
            processes=jax.process_count(),
        )

    @property
    def rules(self) -> Rules:
        """The size rules of the model."""
        return Rules.of(self.specs.transformer, self.specs.vae)

    def needs(self, request: Request) -> "dict[str, Need]":
        """What a chip needs for a request, stage by stage."""
        from svgen.memory import needs_of

        grid = grid_of(request.width_px, request.height_px, request.frames, self.rules)
        options = {"dtype": request.dtype, "split": self.split}
        return needs_of(self.specs, grid, branches=2 if request.guidance > 1 else 1, **options)

    def lacks(self, request: Request, *, likely: bool = False) -> list[Lack]:
        """What is too little for a request: surely, or `likely`."""
        chips = max(1, self.split.chips // self.processes)
        found = []
        for stage, need in self.needs(request).items():
            each = need.likely if likely else need.least
            on_host = each * chips if self.on_host else need.leaf
            for place, needed, there in ((HOST, on_host, self.host), (CHIP, each, self.chip)):
                if there is not None and needed > there:
                    found.append(Lack(place=place, stage=stage, needed=needed, available=there))
        return sorted(found, key=lambda lack: lack.available - lack.needed)

    def check(self, request: Request, *stages: str) -> None:
        """Raise OutOfMemory if a request cannot run in what is there; of all stages, or of some."""
        lacks = [lack for lack in self.lacks(request) if lack.stage in stages or not stages]
        if not lacks:
            return
        lack = lacks[0]
        settings = [] if stages else self.settings(request)  # what is made already has its size
        raise OutOfMemory(
            "E_MEMORY",
            f"{_gib(lack.needed)} GiB of {NAMES[lack.place]} are needed at least, "
            f"{_gib(lack.available)} are available",
            why=f"so much is needed for {DOING[lack.stage]}: weights, and {_video(request)}",
            hint=hint_of(settings),
            details={
                "place": lack.place,
                "stage": lack.stage,
                "needed_bytes": lack.needed,
                "available_bytes": lack.available,
                "would_fit": settings,
            },
        )

    def settings(self, request: Request) -> list[dict[str, Any]]:
        """Settings that fit, each alone if it can, best first: flag -> value."""
        narrow = replace(request, dtype="bfloat16")
        if request.dtype == narrow.dtype:
            return self._smaller(request)
        changed = {"dtype": narrow.dtype}
        found = self._smaller(request)
        if not self.lacks(narrow, likely=True):
            return [changed, *found]
        return found or [{**changed, **one} for one in self._smaller(narrow)]

    def _smaller(self, request: Request) -> list[dict[str, Any]]:
        """The largest smaller size, and the most frames, that fit."""
        sizes, frames = smaller_sizes(request, self.rules), fewer_frames(request, self.rules)
        size = self._first(sizes, lambda one: replace(request, width_px=one[0], height_px=one[1]))
        count = self._first(frames, lambda one: replace(request, frames=one))
        found = [{"res": f"{size[0]}x{size[1]}"}] if size else []
        return found + ([{"frames": count}] if count else [])

    def _first(self, values: Sequence[T], made: Callable[[T], Request]) -> T | None:
        """The first of values, which need less and less, that fits."""
        low, high = 0, len(values)
        while low < high:
            middle = (low + high) // 2
            if self.lacks(made(values[middle]), likely=True):
                low = middle + 1
            else:
                high = middle
        return values[low] if low < len(values) else None


def smaller_sizes(request: Request, rules: Rules) -> list[tuple[int, int]]:
    """Valid sizes with fewer pixels, largest first: of nearly the same shape, or with a name."""
    width, height = request.width_px, request.height_px
    step = rules.stride * rules.patch[2]
    rows = rules.stride * rules.patch[1]
    same = [
        (columns, max(rows, round(columns * height / width / rows) * rows))
        for columns in range(step, width, step)
    ]
    found = {
        size
        for size in (*same, *RESOLUTIONS.values())
        if size[0] <= width
        and size[1] <= height
        and size != (width, height)
        and size_problem(*size, rules) is None
    }
    return sorted(found, key=lambda size: (size[0] * size[1], size), reverse=True)


def fewer_frames(request: Request, rules: Rules) -> list[int]:
    """Valid numbers of frames below a request's, most first."""
    step = rules.frame_stride
    counts = range(request.frames - step, 0, -step)
    return [count for count in counts if frames_problem(count, rules) is None]


def hint_of(settings: Sequence[dict[str, Any]]) -> str:
    """Settings as flags; without any, what else there is."""
    if not settings:
        return (
            "a machine with more memory, more chips, or a smaller --model; "
            f"{VARIABLE}=N if there is more than the system says"
        )
    said = [" ".join(f"--{name} {value}" for name, value in one.items()) for one in settings]
    return " or ".join(said)


def check_memory(
    model: str, pipeline: "Pipeline | None", request: Request, mesh: str = "auto"
) -> None:
    """Raise OutOfMemory if a run surely does not fit. A model of the catalog may still have to be
    fetched; of others nothing is known before.
    """
    from svgen.stand_in import StandIn

    entry = entry_of(model)
    known = SPECS.get(entry.name) if entry else None
    if pipeline is None and known:
        pipeline = StandIn(known, dtype=request.dtype, mesh=mesh)
    with suppress(UsageError):  # a mesh that cannot be is told elsewhere
        if pipeline:
            Memory.now(pipeline.specs, pipeline.split(request)).check(request)


@contextmanager
def advised(pipeline: "Pipeline", request: Request) -> Iterator[None]:
    """Name settings that fit, with whatever runs out of memory in the block."""
    memory = Memory.now(pipeline.specs, pipeline.split(request))
    try:
        yield
    except Exception as error:
        problem = explain(error)
        if problem.code != "E_MEMORY" or "would_fit" in problem.details:
            raise
        settings = affordable(memory, request)
        problem.details["would_fit"] = settings
        problem.hint = "; ".join(filter(None, (hint_of(settings), problem.hint)))
        raise problem from error


def affordable(memory: Memory, request: Request) -> list[dict[str, Any]]:
    """Settings that fit where a request has failed: what it was counted to need was too much."""
    place = HOST if memory.on_host else CHIP
    spent = max(need.likely for need in memory.needs(request).values()) - 1
    there = getattr(memory, place)
    less = {place: spent if there is None else min(there, spent)}
    return replace(memory, **less).settings(request)


def _gib(count: int) -> str:
    return f"{count / GIB:.1f}" if count >= GIB / 10 else f"{count / GIB:.3f}"


def _video(request: Request) -> str:
    size = f"{request.width_px}x{request.height_px}, {request.frames} frames"
    return f"the numbers of {size} in {request.dtype}"
