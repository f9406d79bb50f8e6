"""Sizes: token counts of the published table, and advice that is itself accepted."""

import random
import re

import pytest

from svgen.config import TransformerSpec, VaeSpec
from svgen.errors import UsageError
from svgen.grid import (
    MAX_FRAMES,
    MAX_SIDE_PX,
    RESOLUTIONS,
    WAN21,
    Rules,
    frames_problem,
    grid_of,
    size_problem,
)

WAN22_5B = Rules(stride=16, frame_stride=4, patch=(1, 2, 2), max_positions=1024)
ODD = Rules(stride=4, frame_stride=2, patch=(1, 3, 5), max_positions=77)
FLAT = Rules(stride=1, frame_stride=1, patch=(1, 1, 1), max_positions=9000)
DEEP = Rules(stride=8, frame_stride=8, patch=(3, 1, 2), max_positions=40)
FIVES = Rules(stride=2, frame_stride=4, patch=(1, 5, 5), max_positions=1024)
ALL_RULES = (WAN21, WAN22_5B, ODD, FLAT, DEEP, FIVES)


@pytest.mark.parametrize(
    ("resolution", "axes", "tokens"),
    [
        ("480p", (21, 30, 52), 32_760),
        ("720p", (21, 45, 80), 75_600),
        ("1080p", (21, 68, 120), 171_360),
        ("1440p", (21, 90, 160), 302_400),
    ],
)
def test_tokens_of_named_resolutions(resolution, axes, tokens):
    width, height = RESOLUTIONS[resolution]
    assert size_problem(width, height, WAN21) is None
    grid = grid_of(width, height, 81, WAN21)
    assert (grid.tokens_per_axis, grid.tokens) == (axes, tokens)


def test_tokens_of_a_vae_with_stride_16():
    assert size_problem(1280, 704, WAN22_5B) is None
    assert grid_of(1280, 704, 121, WAN22_5B).tokens == 27_280


def test_1080p_is_computed_at_1088_rows_and_other_sizes_as_they_are():
    grid = grid_of(1920, 1080, 81, WAN21)
    assert (grid.width_px, grid.height_px) == (1920, 1080)
    assert (grid.computed_px, grid.rows, grid.columns) == ((1920, 1088), 136, 240)
    for width, height in ((832, 480), (1280, 720), (2560, 1440), (16, 16)):
        assert grid_of(width, height, 1, WAN21).computed_px == (width, height)


@pytest.mark.parametrize("rules", ALL_RULES)
def test_1080p_where_it_is_accepted_fits_the_model(rules):
    if size_problem(1920, 1080, rules) is not None:
        return
    grid = grid_of(1920, 1080, 1, rules)
    width, height = grid.computed_px
    assert width == 1920 and 1080 <= height <= 1088
    assert max(grid.tokens_per_axis) <= rules.max_positions


def test_1080p_when_positions_do_not_reach_is_refused():
    short = Rules(stride=8, frame_stride=4, patch=(1, 2, 2), max_positions=67)
    assert size_problem(1920, 1080, short) is not None


@pytest.mark.parametrize(
    ("width", "height"),
    [
        *[(1080, 1920), (1920, 1073), (854, 480), (0, 0), (-16, 16), (16, 0), (15, 16)],
        *[(MAX_SIDE_PX + 16, 16), (16, MAX_SIDE_PX + 16), (10**30, 16)],
    ],
)
def test_sizes_that_cannot_be_made_are_refused(width, height):
    problem = size_problem(width, height, WAN21)
    assert isinstance(problem, UsageError) and problem.code == "E_SIZE"
    assert f"{width}x{height}" in problem.message and "multiples of 16" in problem.why


@pytest.mark.parametrize(("width", "height"), [(16, 16), (MAX_SIDE_PX, 16), (16, MAX_SIDE_PX)])
def test_the_largest_and_smallest_sides_are_accepted(width, height):
    assert size_problem(width, height, WAN21) is None


def test_size_message_by_hand():
    problem = size_problem(1000, 560, WAN21)
    assert problem.hint == "--res 992x560 or --res 1008x560"
    assert problem.details == {"nearest": [[992, 560], [1008, 560]]}
    assert (
        "multiples of 20 (width) and 12 (height), at most 1540x924" in size_problem(1, 1, ODD).why
    )


@pytest.mark.parametrize("rules", ALL_RULES)
def test_suggested_sizes_are_accepted_near_and_on_either_side(rules):
    rng = random.Random(0)
    column, row = rules.stride * rules.patch[2], rules.stride * rules.patch[1]
    refused = 0
    for _ in range(3000):
        most = rng.choice([40, 2000, 20_000])
        width, height = rng.randint(-20, most), rng.randint(-20, most)
        problem = size_problem(width, height, rules)
        if problem is None:
            grid = grid_of(width, height, 1, rules)
            assert max(grid.tokens_per_axis) <= rules.max_positions
            assert grid.computed_px == (width, height) or (width, height) == (1920, 1080)
            continue
        refused += 1
        offered = [tuple(map(int, pair)) for pair in re.findall(r"(\d+)x(\d+)", problem.hint)]
        assert 1 <= len(offered) <= 2
        assert [list(size) for size in offered] == problem.details["nearest"]
        for other in offered:
            assert size_problem(*other, rules) is None, (width, height, other)
        highest = [min(MAX_SIDE_PX, step * rules.max_positions) for step in (column, row)]
        if column <= width <= highest[0] - column and row <= height <= highest[1] - row:
            assert all(abs(other[0] - width) < column for other in offered)
            assert all(abs(other[1] - height) < row for other in offered)
    assert refused > 500


@pytest.mark.parametrize("rules", ALL_RULES)
def test_suggested_frames_are_accepted_and_the_nearest(rules):
    patch, stride = rules.patch[0], rules.frame_stride
    latent = range(patch, patch * rules.max_positions + 1, patch)
    valid = [1 + (count - 1) * stride for count in latent if 1 + (count - 1) * stride <= MAX_FRAMES]
    assert len(valid) > 10
    rng = random.Random(1)
    samples = [rng.randint(-50, MAX_FRAMES + 50) for _ in range(30)] + [0, -1, 2, 10**30, -(10**30)]
    for frames in samples:
        problem = frames_problem(frames, rules)
        if problem is None:
            assert frames in valid
            continue
        assert (problem.code, problem.exit_code) == ("E_FRAMES", 2)
        offered = [int(number) for number in re.findall(r"--frames (\d+)", problem.hint)]
        assert offered == problem.details["nearest"] and len(offered) == 2
        assert set(offered) <= set(valid)
        distance = sorted(abs(other - frames) for other in valid)[:2]
        assert sorted(abs(other - frames) for other in offered) == distance


def test_frames_by_hand():
    assert [frames for frames in range(-3, 18) if frames_problem(frames, WAN21) is None] == [
        *(1, 5, 9, 13, 17)
    ]
    assert frames_problem(MAX_FRAMES, WAN21) is None
    assert frames_problem(MAX_FRAMES + 4, WAN21) is not None
    problem = frames_problem(80, WAN21)
    assert problem.hint == "--frames 77 or --frames 81" and "4k+1" in problem.why


@pytest.mark.parametrize("rules", ALL_RULES)
def test_latent_frames_fill_whole_patches_and_positions(rules):
    for frames in range(1, 200):
        if frames_problem(frames, rules) is None:
            grid = grid_of(
                rules.stride * rules.patch[2], rules.stride * rules.patch[1], frames, rules
            )
            assert grid.latent_frames % rules.patch[0] == 0
            assert grid.tokens == grid.latent_frames // rules.patch[0] <= rules.max_positions
            assert 1 + (grid.latent_frames - 1) * rules.frame_stride == frames


def test_rules_come_from_the_two_configs():
    transformer = TransformerSpec(
        heads=1, head_dim=8, layers=1, mlp_width=8, patch=(2, 1, 3), max_positions=99
    )
    vae = VaeSpec(
        base_width=4,
        z_channels=1,
        multipliers=(1, 2, 2),
        temporal_downsample=(True, False),
        latents_mean=(0.0,),
        latents_std=(1.0,),
    )
    expected = Rules(stride=4, frame_stride=2, patch=(2, 1, 3), max_positions=99)
    assert Rules.of(transformer, vae) == expected
