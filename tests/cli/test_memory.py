"""Memory is counted before anything is loaded: never too much, and with settings that fit."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from svgen import programs
from svgen.cli import run
from svgen.cli.endings import explain
from svgen.cli.execution import make_video
from svgen.cli.memory import Memory, advised, check_memory
from svgen.cli.output import Console
from svgen.cli.room import GIB, host_room
from svgen.errors import OutOfMemory
from svgen.grid import RESOLUTIONS, WAN21, grid_of
from svgen.memory import FLOAT32, cache_cells, needs_of
from svgen.pipeline import Pipeline
from svgen.resume import load_state, state_path
from svgen.shapes import SPECS
from svgen.sharding import Split
from tests.cli.test_execution import REQUEST, TINY
from tests.helpers import ROOT

WAN = replace(REQUEST, model="wan2.1-1.3b", width_px=832, height_px=480, frames=81)
MIB = 2**20


@pytest.fixture
def machine(tmp_path):
    """A machine with 4 MiB free and 1 MiB of swap; this process is in the group a/b."""
    files = {
        "proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:   4096 kB\nSwapFree: 1024 kB\n",
        "proc/self/cgroup": "0::/a/b\n",
        "proc/self/status": "Name: x\nRssAnon: 512 kB\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def limit(machine, group, most, used, files=0):
    folder = machine / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {files}\nactive_file 0\n")


def test_swap_counts_as_room(machine):
    assert host_room(machine) == 5 * MIB


@pytest.mark.parametrize("group", ["a/b", "a", ""])
def test_limit_of_any_group_counts_and_files_in_it_are_no_use(machine, group):
    limit(machine, group, 3 * MIB, 2 * MIB, files=MIB // 2)
    assert host_room(machine) == MIB * 3 // 2 + MIB, "with the swap"
    limit(machine, group, "max", 2 * MIB)
    assert host_room(machine) == 5 * MIB


def test_variable_says_what_the_system_does_not(machine, monkeypatch):
    monkeypatch.setenv("SVGEN_MEMORY_GIB", "2.5")
    assert host_room(machine) == 2.5 * GIB
    monkeypatch.setenv("SVGEN_MEMORY_GIB", "much")
    assert host_room(machine) is None


def test_own_limit_counts():
    code = "import resource as r; r.setrlimit(r.RLIMIT_AS, (3 << 28,) * 2)\n"
    code += "from svgen.cli.room import host_room; print(host_room())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert 0 < int(done.stdout) < 3 << 28


# What is needed.


def test_cache_of_the_vae_is_counted_exactly():
    specs, grid = SPECS["wan2.1-1.3b"], grid_of(*RESOLUTIONS["480p"], 81, WAN21)
    graph, weights = nnx.split(programs.abstract_parts(specs, jnp.bfloat16)["vae"])
    z = jax.ShapeDtypeStruct((1, 1, grid.rows, grid.columns, 16), jnp.float32)
    cache = jax.eval_shape(partial(programs.decode_first, graph), weights, z)[2]
    assert sum(leaf.size for leaf in jax.tree.leaves(cache)) == cache_cells(specs.vae, grid)
    assert FLOAT32 * cache_cells(specs.vae, grid) >= 3.5 * GIB


PLANNED = (  # README: model, size, mesh -> GiB of a chip while denoising and decoding, of a plan
    ("wan2.1-1.3b", "480p", Split(2, 2), 1.3, 3.8),
    ("wan2.1-1.3b", "480p", Split(1, 1), 4.5, 7.9),
    ("wan2.1-14b", "720p", Split(2, 4), 5.9, 4.2),
    ("wan2.1-14b", "1440p", Split(2, 4), 12.5, 15.4),
    ("wan2.1-14b", "1440p", Split(2, 8), 5.6, 8.9),
)


@pytest.mark.parametrize(("model", "size", "split", "denoise", "decode"), PLANNED)
def test_no_plan_of_a_tpu_takes_less_than_is_counted(model, size, split, denoise, decode):
    grid = grid_of(*RESOLUTIONS[size], 81, WAN21)
    needs = needs_of(SPECS[model], grid, branches=2, dtype="bfloat16", split=split)
    found = {name: (need.least / GIB, need.likely / GIB) for name, need in needs.items()}
    rounding = 0.05
    for name, planned in (("denoise", denoise), ("decode", decode)):
        least, likely = found[name]
        print(f"{model} {size} {split} {name}: {least:.2f} <= {planned} <= {likely:.2f} GiB")
        assert planned / 3 < least <= planned + rounding
        assert likely >= planned - rounding


@pytest.mark.parametrize("size", [(128, 128, 17)])
def test_compiled_programs_need_no_less_than_is_counted(size):
    pipeline = Pipeline(ROOT / "svgen/demo/snapshot")
    grid = grid_of(*size, pipeline.rules)
    need = needs_of(pipeline.specs, grid, branches=2, dtype="float32")
    graph, weights = nnx.split(pipeline._abstract["vae"])
    z = jax.ShapeDtypeStruct((1, 1, grid.rows, grid.columns, 8), jnp.float32)
    cache = jax.eval_shape(partial(programs.decode_first, graph), weights, z)[2]
    memory = programs.decode_next.lower(graph, weights, z, cache).compile().memory_analysis()
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert need["decode"].least <= needed <= need["decode"].likely


def test_needs_grow_with_size_frames_and_numbers_and_shrink_with_chips():
    memory = Memory(specs=SPECS["wan2.1-1.3b"], split=Split(1, 1), host=0, chip=None, on_host=True)

    def needed(**changes):
        return sum(need.least for need in memory.needs(replace(WAN, **changes)).values())

    assert needed(width_px=1280, height_px=720) > needed() > needed(frames=41)
    assert needed() > needed(dtype="bfloat16")
    assert needed() > needed(guidance=1.0)
    spread = replace(memory, split=Split(2, 2))
    assert sum(need.least for need in spread.needs(WAN).values()) < needed()


# What is done about it.


def memory(gib, **options):
    values = {"host": int(gib * GIB), "chip": None, "on_host": True, **options}
    return Memory(specs=SPECS["wan2.1-1.3b"], split=Split(1, 1), **values)


@pytest.mark.parametrize("gib", [15, 24, 30, 40])
def test_every_setting_that_is_named_fits(gib):
    request = replace(WAN, width_px=2560, height_px=1440)
    with pytest.raises(OutOfMemory) as caught:
        memory(gib).check(request)
    error = caught.value
    assert (error.exit_code, error.details["available_bytes"]) == (7, gib * GIB)
    assert error.details["would_fit"], error.hint
    for setting in error.details["would_fit"]:
        changed = {"frames": setting.get("frames", 81), "dtype": setting.get("dtype", "float32")}
        if "res" in setting:
            width, height = map(int, setting["res"].split("x"))
            changed |= {"width_px": width, "height_px": height}
        assert memory(gib).lacks(replace(request, **changed), likely=True) == []
        assert all(f"--{name} {value}" in error.hint for name, value in setting.items())


def test_chip_and_host_are_looked_at_apart():
    request = replace(WAN, dtype="bfloat16")
    on_tpu = memory(4, chip=31 * GIB, on_host=False)
    assert on_tpu.lacks(request) == [], "the host holds one tensor at a time"
    assert {lack.place for lack in replace(on_tpu, host=GIB).lacks(request)} == {"host"}
    assert {lack.place for lack in replace(on_tpu, chip=8 * GIB).lacks(request)} == {"chip"}
    assert replace(on_tpu, host=None, chip=None).lacks(request) == []


def test_nothing_that_fits_is_said_too():
    with pytest.raises(OutOfMemory) as caught:
        memory(1).check(WAN)
    assert caught.value.details["would_fit"] == []
    assert "more memory" in caught.value.hint and "SVGEN_MEMORY_GIB" in caught.value.hint


def test_decoding_alone_needs_less_and_offers_no_other_size():
    memory(10).check(WAN, "decode")
    with pytest.raises(OutOfMemory) as caught:
        memory(3).check(WAN, "decode")
    assert (caught.value.details["stage"], caught.value.details["would_fit"]) == ("decode", [])


@pytest.fixture
def generate(capsys, monkeypatch, tmp_path):
    """Run `generate` in this process with so much memory; weights may not be loaded."""

    def fail(*_):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("svgen.pipeline.load_module", fail)

    def call(gib, *args):
        monkeypatch.setenv("SVGEN_MEMORY_GIB", str(gib))
        code = run(["generate", "a red ball", "-o", str(tmp_path / "x.mp4"), *args, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


def test_run_that_cannot_fit_is_refused_before_loading(generate):
    code, body = generate(0.7, "--res", "1280x720")
    assert (code, body["error"]["code"]) == (7, "E_MEMORY")
    sizes = [one["res"] for one in body["error"]["details"]["would_fit"] if "res" in one]
    assert sizes
    code, body = generate(0.7, "--res", sizes[0], "--dry-run")
    assert code == 0 and not any("memory" in text for text in body["warnings"])


def test_dry_run_warns_of_another_machine(generate):
    code, body = generate(0.7, "--res", "1280x720", "--dry-run")
    assert (code, body["error"]) == (0, None)
    assert any("GiB of memory are needed at least" in text for text in body["warnings"])


def test_model_that_is_not_on_disk_is_counted_before_it_is_fetched(generate):
    flags = ("--model", "wan2.1-1.3b", "--device", "cpu", "--offline")
    assert generate(8, *flags)[1]["error"]["code"] == "E_MEMORY"
    assert generate(400, *flags)[1]["error"]["code"] == "E_OFFLINE"
    check_memory("some/repository", None, WAN)  # of which nothing is known


@pytest.mark.parametrize(
    "exhaust", [lambda: np.zeros(1 << 50, np.uint8), lambda: jnp.zeros(1 << 48, jnp.uint8)]
)
def test_memory_that_runs_out_is_answered_with_settings_that_fit(exhaust):
    """NumPy and XLA are really asked for more than any machine has."""
    request = replace(REQUEST, width_px=64, height_px=64, frames=9)
    with pytest.raises(OutOfMemory) as caught, advised(Pipeline(TINY), request):
        exhaust()
    problem = caught.value
    assert (problem.exit_code, problem.code) == (7, "E_MEMORY")
    settings = problem.details["would_fit"]
    assert settings and all(set(one) <= {"res", "frames", "dtype"} for one in settings)
    assert "--res " in problem.hint


def test_memory_that_runs_out_between_two_steps_loses_nothing_that_was_saved(tmp_path, monkeypatch):
    pipeline, target = Pipeline(TINY), tmp_path / "x.mp4"
    steps = pipeline.denoise

    def failing(*arguments):
        yield next(steps(*arguments))
        jnp.zeros(1 << 48, jnp.uint8)

    monkeypatch.setattr(pipeline, "denoise", failing)
    text = jnp.zeros((2, 64, 32), jnp.float32)
    with pytest.raises(OutOfMemory) as caught:
        console = Console("generate", verbosity=-2)
        make_video(console, pipeline, REQUEST, target, keep_latents=False, text=text, save_every=0)
    assert caught.value.code == "E_MEMORY"
    state = load_state(state_path(target, REQUEST), REQUEST, pipeline.latents_shape(REQUEST))
    assert int(state["step"]) == 1


def test_other_errors_pass_as_they_are():
    error = ValueError("x")
    with pytest.raises(ValueError) as caught, advised(Pipeline(TINY), REQUEST):
        raise error
    assert caught.value is error
    assert explain(error).code == "E_INTERNAL"
