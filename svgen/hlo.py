"""Reads a program that XLA has compiled for a TPU: its estimated cycles, and what chips exchange.

The compiler writes an estimate beside each fusion; loops name their bodies, and the number of their
turns is the constant that the condition compares with. Kernels have no estimate: `cycles` counts
them.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
WHILE = re.compile(r" while\(.*condition=%?([\w.-]+), body=%?([\w.-]+)")
BRANCHES = re.compile(r" conditional\(.*branch_computations=\{([^}]*)\}")
CALL = re.compile(r" (?:call|async-start)\(.*(?:to_apply|calls)=%?([\w.-]+)")
CONSTANT = re.compile(r" s32\[\]\S* constant\((\d+)\)")
COLLECTIVE = re.compile(
    r" = (.*?) (all-to-all|all-gather|all-reduce|collective-permute|reduce-scatter)(?:-start)?\("
)
SHAPE = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
KERNEL = 'custom_call_target="tpu_custom_call"'


@dataclass(slots=True)
class Cost:
    """What a program costs on one chip."""

    cycles: float = 0.0  # of everything but kernels
    counts: Counter = field(default_factory=Counter)  # collective -> how often it runs
    moved: Counter = field(default_factory=Counter)  # collective -> bytes that arrive
    kernels: Counter = field(default_factory=Counter)  # name -> how often it runs

    def add(self, other: "Cost", times: int = 1) -> None:
        """Add what runs so many times."""
        self.cycles += times * other.cycles
        for name in ("counts", "moved", "kernels"):
            mine = getattr(self, name)
            mine.update({key: times * value for key, value in getattr(other, name).items()})


def computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Split a module into its computations, name -> instructions; also the name of the entry."""
    found: dict[str, list[str]] = {}
    entry, current = "", None
    for line in text.splitlines():
        header = HEADER.match(line)
        if header:
            current = found.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    return found, entry


def cost(text: str) -> Cost:
    """Add up a module. Of the branches of a conditional the dearest counts."""
    parts, entry = computations(text)
    known: dict[str, Cost] = {}

    def total(name: str) -> Cost:
        if name not in known:
            known[name] = Cost()  # a computation never calls itself
            known[name] = _sum(parts.get(name, ()), total, parts)
        return known[name]

    return total(entry)


def dearest(costs: Iterable[Cost]) -> Cost:
    """The branch with most cycles."""
    return max(costs, key=lambda cost: cost.cycles)


def _sum(
    lines: Iterable[str],
    total: Callable[[str], Cost],
    parts: dict[str, list[str]],
) -> Cost:
    found = Cost()
    for line in lines:
        estimate = ESTIMATE.search(line)
        if estimate:
            found.cycles += int(estimate[1])
        if KERNEL in line:
            found.kernels[line.split()[0].lstrip("%").partition(".")[0]] += 1
        exchanged = COLLECTIVE.search(line)
        if exchanged:
            found.counts[exchanged[2]] += 1
            found.moved[exchanged[2]] += size_of(exchanged[1])
        _add_called(found, line, total, parts)
    return found


def _add_called(
    found: Cost,
    line: str,
    total: Callable[[str], Cost],
    parts: dict[str, list[str]],
) -> None:
    loop, branches, call = WHILE.search(line), BRANCHES.search(line), CALL.search(line)
    if loop:
        found.add(total(loop[2]), turns(parts.get(loop[1], ())))
    elif branches:
        names = [name.strip().lstrip("%") for name in branches[1].split(",")]
        found.add(dearest([total(name) for name in names]))
    elif call:
        found.add(total(call[1]))


def turns(condition: Iterable[str]) -> int:
    """How often a loop turns that counts from 0 up to a constant."""
    constants = [int(match[1]) for line in condition if (match := CONSTANT.search(line))]
    return max(constants, default=1)


def size_of(shapes: str) -> int:
    """Bytes of a shape, or of a tuple of shapes."""
    return sum(
        BYTES.get(kind, 4) * math.prod(int(side) for side in sides.split(",") if side)
        for kind, sides in SHAPE.findall(re.sub(r"\{[^}]*\}", "", shapes))
    )
