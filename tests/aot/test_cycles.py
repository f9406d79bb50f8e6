"""What the compiler schedules for the attention kernel on a v6e, and that other chips take it.

Targets are for D = 128, bfloat16, 81 frames, band share 0.35; times are predictions for 10 heads.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

from svgen import cycles
from svgen.kernels import splash
from tests.aot import compile_attention

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu"),
]
COUNT = ("-m", "svgen.cycles")
COMPILE = (str(Path(__file__).with_name("compile_attention.py")),)
NEW = jax.__version_info__ >= (0, 12)  # older compilers schedule strided tiles less tightly
INTERIOR = 1650 if NEW else 1710  # cycles per 2^20 pairs of a whole tile; the roof is about 1,536
TEMPORARIES = 1 << 20  # bytes
DENSE_MS, SPARSE_MS = 52.0 if NEW else 52.5, 22.0


def run(program: tuple[str, ...], lines: list[dict]) -> list[dict]:
    """Give a program its cases, and read what it found."""
    done = subprocess.run(
        [sys.executable, *program],
        input="".join(json.dumps(line) + "\n" for line in lines),
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "XLA_FLAGS": ""},
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_schedule_reaches_its_targets_at_720p():
    dense, spatial, temporal = run(
        COUNT, [{"route": route} for route in ("dense", "spatial", "temporal")]
    )
    for found in (dense, spatial, temporal):
        assert 1431 < found["interior"] <= INTERIOR, found["route"]
        assert found["temporaries"] < TEMPORARIES
    assert dense["ms"] <= DENSE_MS
    assert max(spatial["ms"], temporal["ms"]) <= SPARSE_MS
    for found in (spatial, temporal):
        assert abs(found["density"] - 0.3887) < 0.01


def test_schedule_reaches_its_targets_at_1440p():
    for found in run(COUNT, [{"positions": 14400, "route": "temporal"}]):
        assert 1431 < found["interior"] <= INTERIOR
        assert found["temporaries"] < TEMPORARIES


def test_kernels_compile_for_other_chips():
    cases = [
        {"chip": "v4", "route": "temporal", "positions": 1560},
        {"chip": "v5e", "route": "temporal", "positions": 1560},
        {"chip": "v5p", "route": "spatial", "positions": 8160},
        {"chip": "tpu7x", "route": "temporal", "positions": 3600},
    ]
    for found in run(COUNT, cases):
        assert found["temporaries"] < TEMPORARIES
        assert found["per_pairs"] > cycles.roof(cycles.Case(chip=found["chip"]))


def test_jax_splash_is_counted_where_memory_is_small():
    ours, splash = run(
        COUNT, [{"chip": "v5e", "route": route, "positions": 1560} for route in ("dense", "splash")]
    )
    assert ours["interior"] < splash["interior"] < 6000


def test_whole_call_moves_no_tokens():
    (found,) = run(COMPILE, [{"chip": "v6e", "frames": 21, "positions": 3600}])
    assert found["kernels"] == 7
    assert found["moves"] == []
    assert found["temporaries"] < TEMPORARIES


@pytest.mark.parametrize(
    ("chip", "head_size", "cycles_"), [("v6e", 128, 1536), ("v6e", 64, 1280), ("v5e", 128, 4096)]
)
def test_matrix_units_take_their_time(chip, head_size, cycles_):
    assert cycles.roof(cycles.Case(chip=chip, head_size=head_size)) == cycles_


def test_visits_take_as_long_as_the_matrix_units():
    case = cycles.Case(chip="v5e", positions=14400)
    table, _, _ = cycles.build(case)
    bodies = [10] + [1000] * len(splash.sources(table)) + [20]
    found = cycles.predict(case, table, sum(bodies) + 30, bodies)
    assert found["visit"][0] == 1000
    assert 4096 < found["per_pairs"] < 4300


def test_bodies_are_found_when_regions_nest_and_repeat(tmp_path):
    schedule = tmp_path / "final_bundles.txt"
    lines = [f"{hex(i) if i else '0'}  : {{ x }}" for i in range(200)]
    lines[10] = "// Start region 1\n" + lines[10]
    lines[20] = lines[20].replace("}", "} // Start region 2")
    lines[20] = "0x14 LB: { // Start region 2\n // Start region 3"
    lines[99] = lines[99] + "\n// End region 3\n// End region 2"
    lines[150] += "\n// End region 1"
    schedule.write_text("\n".join(lines))
    count, regions = cycles.read_schedule(schedule)
    assert count == 200
    usage = [[int(20 <= i < 100)] + [0] * 9 for i in range(200)]
    assert [body.bundles for body in cycles.find_bodies(regions, usage)] == [80]


def test_move_is_seen():
    text = (
        "%x = bf16[10,75600,128]{2,1,0} copy(%y)\n%z = f32[10]{0} copy(%w)\nROOT %b = bitcast(%x)"
    )
    assert [re.sub(r"\s.*", "", line) for line in compile_attention.moves(text, 1000)] == ["%x"]
