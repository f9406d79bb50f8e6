"""Plans: names of TPUs, sums worked out by hand, and the command's errors. Compiling is for aot."""

import pytest

from svgen.cli import run
from svgen.config import SparsitySchedule
from svgen.errors import UsageError
from svgen.grid import WAN21, grid_of
from svgen.hlo import Cost
from svgen.plan import (
    Compiled,
    Job,
    between_seconds,
    exchange_seconds,
    step_seconds,
    would_decode,
    would_fit,
)
from svgen.shapes import SPECS
from svgen.sharding import Split
from svgen.tpus import parse_slice
from tests.helpers import json_of, run_svgen

COMPILE_S = 1500  # at most, on a slow machine


@pytest.mark.parametrize(
    ("name", "chips", "topology"),
    [
        ("v6e-8", 8, "v6e:2x4"),
        ("v6e-1", 1, "v6e:2x2x1"),
        ("v5e-4", 4, "v5e:2x4"),
        ("v5p-8", 4, "v5p:2x2x1"),
        ("v4-16", 8, "v4:2x2x2"),
        ("v7x-8", 8, "tpu7x:2x2x2"),
    ],
)
def test_names_of_tpus(name, chips, topology):
    found = parse_slice(name)
    assert (found.chips, found.topology) == (chips, topology)


@pytest.mark.parametrize("name", ["v6e", "v6e-7", "v9z-8", "v5p-5", "", "v6e-0", "x" * 500])
def test_unknown_tpus_are_refused_with_those_that_work(name):
    with pytest.raises(UsageError) as caught:
        parse_slice(name)
    assert caught.value.code == "E_TPU_NAME"
    assert len(caught.value.message) < 100


def test_a_step_is_its_kernels_its_fusions_and_its_exchanges():
    specs = SPECS["wan2.1-14b"]
    job = Job(
        specs=specs,
        grid=grid_of(1280, 720, 81, WAN21),
        steps=50,
        branches=2,
        sparsity=SparsitySchedule(band_share=0.3, dense_layers=10),
        slice=parse_slice("v6e-8"),
    )
    cost = Cost(cycles=1.75e9)
    cost.moved["all-to-all"] = 112e9
    assert exchange_seconds(job, cost) == pytest.approx(1.0)
    compiled = Compiled(memory={}, cost=cost)
    per_head = {"dense": 4e6, "splash": 8e6, "spatial": 1e6, "temporal": 3e6}
    attention = {route: {"cycles_per_head": cycles} for route, cycles in per_head.items()}
    found = step_seconds(job, {"dense": compiled, "sparse": compiled}, attention, heads=10)
    gauge = 40 * 10 * 0.7 * 75_600 / 1.75e9
    assert found["dense"] == pytest.approx(2 + 40 * 10 * 4e6 / 1.75e9 + gauge)
    assert found["splash"] == pytest.approx(2 + 40 * 10 * 8e6 / 1.75e9)
    assert found["sparse"] == pytest.approx(2 + (10 * 4e7 + 30 * 2e7) / 1.75e9 + gauge)


@pytest.mark.parametrize(
    ("name", "calls"), [("v6e-8", 6 * 387_072_000 / 1640e9), ("v7x-8", 3 * 302_400 / 1.9e9)]
)
def test_kernels_between_take_their_traffic_or_their_cycles(name, calls):
    """18,900 tokens of 40 heads: 387 MB a call; a v7x moves them faster than it norms them."""
    specs, grid = SPECS["wan2.1-14b"], grid_of(1280, 720, 81, WAN21)
    job = Job(specs=specs, grid=grid, steps=50, branches=2, sparsity=None, slice=parse_slice(name))
    found = between_seconds(job, Split(cfg=2, seq=4))
    traffic = 3 * 387_072_000 / 7380e9 if name == "v7x-8" else 0
    assert found == pytest.approx(40 * (calls + traffic), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "arguments", "temporaries", "wanted"),
    [
        ("v6e-8", 4.0, 27.0, {}),
        ("v6e-8", 4.0, 28.0, {"tpu": "v6e-16", "frames": 77}),  # 20.4 of 21 latent frames
        ("v5p-16", 100.0, 300.0, {"tpu": "v5p-128"}),  # 34.5 chips: 40 of 64, two cores each
        ("v6e-8", 10.0, 900.0, {}),
        ("v6e-8", 9e9, 1.0, {}),
    ],
)
def test_what_would_fit(name, arguments, temporaries, wanted):
    job = Job(
        specs=SPECS["wan2.1-14b"],
        grid=grid_of(1280, 720, 81, WAN21),
        steps=50,
        branches=2,
        sparsity=None,
        slice=parse_slice(name),
    )
    memory = {
        "arguments": arguments,
        "temporaries": temporaries,
        "total": arguments + temporaries,
    }
    limit = job.slice.tpu.hbm_gib * 31.25 / 32
    assert would_fit(job, memory, limit) == wanted


def test_more_chips_decode_where_fewer_frames_would_not():
    job = Job(
        specs=SPECS["wan2.1-14b"],
        grid=grid_of(1280, 720, 81, WAN21),
        steps=50,
        branches=2,
        sparsity=None,
        slice=parse_slice("v6e-8"),
    )
    memory = {"arguments": 4.0, "temporaries": 28.0, "total": 32.0}
    assert would_decode(job, memory, 31.25) == {"tpu": "v6e-16"}
    assert would_decode(job, memory, 32.0) == {}


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--model", "./folder"), "E_MODEL"),
        (("--tpu", "v6e-7"), "E_TPU_NAME"),
        (("--res", "1000x700", "--frames", "80"), "E_SIZE"),
        (("--preset", "agressive"), "E_PRESET"),
        (("--kernel", "--tpu", "v3"), "E_TPU_NAME"),
        (("--kernel", "--frames", "80"), "E_FRAMES"),
        (("--kernel", "--model", "wan2.1-1.3b"), "E_USAGE"),
        (("--heads", "10"), "E_USAGE"),
    ],
)
def test_bad_flags_are_found_before_anything_is_compiled(flags, code, capsys):
    assert run(["plan", *flags, "--json"]) == 2
    assert f'"code": "{code}"' in capsys.readouterr().out


@pytest.mark.aot
def test_small_plan_is_compiled_once_and_adds_up(tmp_path):
    flags = ("--model", "wan2.1-1.3b", "--res", "256x256", "--frames", "9", "--tpu", "v6e-4")
    env = {"XDG_CACHE_HOME": str(tmp_path), "XLA_FLAGS": ""}
    done = run_svgen("plan", *flags, "--json", env=env, timeout_s=COMPILE_S)
    assert done.returncode == 0, done.stderr
    plan = json_of(done)["data"]
    assert (plan["tpu"], plan["chips"], plan["mesh"], plan["fits"]) == ("v6e-4", 4, "2x2", True)
    assert 0.6 < plan["hbm_gib_per_chip"]["arguments"] < 1.0  # 2.65 GiB of weights, in four parts
    # So short a video gains nothing: two tiles of keys hold it, and every head reads both.
    assert plan["attention"]["kept_pairs"] == 1.0
    assert 0.5 < plan["step_s"]["sparse"] / plan["step_s"]["dense"] < 2
    assert 0.001 < plan["attention"]["dense_ms"] < 1
    assert plan["attention"]["heads_per_chip"] == 6
    total = 15 * plan["step_s"]["dense"] + 35 * plan["step_s"]["sparse"]
    assert plan["denoise_s"] == pytest.approx(total)
    assert 0.001 < plan["decode_s"] < 0.1
    assert 0.2 < plan["decode_gib_per_chip"]["total"] < 2  # 0.24 GiB of weights
    again = run_svgen("plan", *flags, env=env)
    assert "compiling" not in again.stderr
    assert max(map(len, again.stdout.splitlines())) <= 80


@pytest.mark.aot
def test_kernel_plan_counts_each_mask_and_splash(tmp_path):
    flags = ("--res", "480p", "--frames", "17", "--heads", "2", "--tpu", "v6e")
    env = {"XDG_CACHE_HOME": str(tmp_path), "XLA_FLAGS": ""}
    done = run_svgen("plan", "--kernel", *flags, "--json", env=env, timeout_s=COMPILE_S)
    assert done.returncode == 0, done.stderr
    plan = json_of(done)["data"]
    assert (plan["chip"], plan["tokens"], plan["heads"]) == ("v6e", 7_800, 2)
    kernel = plan["kernel"]
    assert list(kernel) == ["splash", "dense", "naive", "exact", "rounded", "rounded_temporal"]
    assert kernel["dense"]["visited_pairs"] == 7_800**2
    assert kernel["dense"]["ms"] < kernel["splash"]["ms"]
    assert kernel["naive"]["interior"] > kernel["rounded"]["interior"]
    assert all(one["visited_pairs"] <= 7_800**2 for one in kernel.values())
    again = run_svgen("plan", "--kernel", *flags, env=env)
    assert "compiling" not in again.stderr
    assert max(map(len, again.stdout.splitlines())) <= 80
