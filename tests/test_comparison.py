"""What is compared, and what a report makes of it: on hand-made schedules, times and scores."""

from types import SimpleNamespace

import numpy as np
import pytest

from svgen.attention.masks import tables
from svgen.comparison import (
    EVERY_TILE,
    Rendering,
    Schedule,
    Score,
    report,
    requests_of,
    schedules_of,
    side_by_side,
    twins,
    width_of,
)
from svgen.config import Request, SparsitySchedule
from svgen.kernels.reference import tile_sizes

DEMO = (9, 64)  # the token grid of 128x128 pixels and 33 frames
REQUEST = Request(
    prompt="first",
    model="m",
    width_px=16,
    height_px=16,
    frames=5,
    fps=16,
    steps=4,
    guidance=1,
    shift=1,
    seed=2**63 - 1,
    sparsity=EVERY_TILE,
)


def demo_tables(schedules):
    sizes = tile_sizes(*DEMO)
    return {
        one.name: tables(*DEMO, one.sparsity.band_share, sizes) if one.sparsity else None
        for one in schedules
    }


def test_schedules_sweep_the_last_preset():
    presets = {
        "mild": SparsitySchedule(band_share=0.6, dense_steps=4),
        "hard": SparsitySchedule(band_share=0.4, dense_steps=2, dense_layers=1),
    }
    found = schedules_of(presets, (0.1, 0.25))
    assert [(one.name, one.kind) for one in found] == [
        ("dense", "dense"),
        ("floor", "floor"),
        ("mild", "preset"),
        ("hard", "preset"),
        ("share 0.1", "sweep"),
        ("share 0.25", "sweep"),
    ]
    assert found[1].sparsity == SparsitySchedule(band_share=1)
    assert found[-1].sparsity == SparsitySchedule(band_share=0.25, dense_steps=2, dense_layers=1)


def test_requests_are_dense_with_seeds_that_count_up():
    found = requests_of(REQUEST, ["a", "b"])
    assert [(one.prompt, one.seed) for one in found] == [("a", 2**63 - 1), ("b", 0)]
    assert all(one.sparsity is None for one in found)


def test_shares_that_read_the_same_tiles_are_twins():
    schedules = schedules_of({}, (0.05, 0.1, 0.2))
    assert twins(schedules, demo_tables(schedules)) == {"share 0.1": "share 0.05"}


def test_equal_tables_with_other_dense_steps_are_no_twins():
    presets = {
        name: SparsitySchedule(band_share=0.3, dense_steps=steps)
        for name, steps in (("a", 0), ("b", 1), ("c", 1))
    }
    schedules = schedules_of(presets)
    assert twins(schedules, demo_tables(schedules)) == {"c": "b"}


def test_videos_lie_side_by_side_with_a_gap():
    videos = [np.full((2, 3, 4, 3), value, np.uint8) for value in (10, 20, 30)]
    found = side_by_side(videos)
    assert found.shape == (2, 3, width_of(4, 3), 3) == (2, 3, 20, 3)
    row = [10] * 4 + [0] * 4 + [20] * 4 + [0] * 4 + [30] * 4
    assert (found == np.array(row, np.uint8)[None, None, :, None]).all()


def made(seconds, calls):
    return Rendering(latents=[], seconds=seconds, calls=np.array(calls))


def test_report_weighs_pairs_by_calls_and_times_by_dense():
    sparse = SparsitySchedule(band_share=0.3)
    schedules = [
        Schedule(name="dense", kind="dense", sparsity=None),
        Schedule(name="mine", kind="preset", sparsity=sparse),
        Schedule(name="share 0.3", kind="sweep", sparsity=sparse),
    ]
    table = demo_tables(schedules[1:])["mine"]
    renderings = {"dense": made([4.0, 2.0], [8, 0, 0]), "mine": made([1.0, 0.5], [4, 1, 3])}
    exact = Score(np.full(2, 100.0), np.ones(2))
    near = [
        Score(np.array([20.0, 40.0]), np.array([0.5, 1])),
        Score(np.array([10.0, 30.0]), np.array([0.5, 0.5])),
    ]
    compared = [{"dense": exact, "mine": score} for score in near]
    requests = [SimpleNamespace(prompt=name, seed=seed) for name, seed in (("a", 3), ("b", 4))]
    dense, mine, same = report(
        requests,
        schedules,
        {"dense": None, "mine": table, "share 0.3": table},
        renderings,
        compared,
    )
    assert (dense["kept_pairs"], dense["ratio_to_dense"], dense["denoise_s"]) == (1, 1, 3)
    kept = (4 + table.spatial.density + 3 * table.temporal.density) / 8
    assert mine["kept_pairs"] == pytest.approx(kept) and 0.5 < kept < 0.75
    assert (mine["denoise_s"], mine["ratio_to_dense"], mine["same_as"]) == (0.75, 0.25, None)
    assert mine["psnr_db"] == {"mean": 25, "worst": 20, "worst_frame": 10}
    assert mine["ssim"] == {"mean": 0.625, "worst": 0.5, "worst_frame": 0.5}
    assert [(one["seed"], one["psnr_db"]["mean"]) for one in mine["videos"]] == [(3, 30), (4, 20)]
    assert same["same_as"] == "mine"
    assert {**same, "name": "mine", "kind": "preset", "same_as": None} == mine
