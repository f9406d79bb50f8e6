"""Drawn scenes: repeatable, whole inside the frame, moving as named, held-out ones apart."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from svgen.demo.scenes import (
    BACKGROUNDS,
    COLORS,
    DIRECTIONS,
    MOTIONS,
    SHAPES,
    SIZES,
    Scene,
    centers_of,
    has_contrast,
    is_held_out,
    lit_background,
    radii_of,
    render,
    sample,
)

SCENE = Scene(
    color="red",
    shape="ball",
    size="small",
    motion="right",
    background="white",
    x=0.5,
    y=0.5,
    pace=0.0,
    phase=0.0,
)


def key_of(scene):
    return {name: getattr(scene, name) for name in ("color", "shape", "motion", "background")}


def object_pixels(scene, frames):
    return (frames != np.rint(lit_background(scene, frames.shape[1]))).any(-1)


def test_scenes_repeat_when_the_seed_does():
    first, again, other = (sample(np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert first == again != other
    assert np.array_equal(render(first), render(again))


def test_frames_have_the_shape_asked_for():
    frames = render(SCENE, frames=5, size_px=48)
    assert frames.shape == (5, 48, 48, 3) and frames.dtype == np.uint8


def test_ball_has_its_area_color_and_place():
    middle = render(SCENE, frames=3)[1]
    behind = lit_background(SCENE, 128)[..., 1]
    share = (behind - middle[..., 1]) / (behind - COLORS["red"][1])
    assert share.sum() == pytest.approx(np.pi * (SIZES["small"] * 128) ** 2, rel=0.01)
    assert tuple(middle[64, 64]) == COLORS["red"]
    assert np.average(np.arange(128) + 0.5, weights=share.sum(0)) == pytest.approx(64, abs=0.05)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_have_about_the_ball_s_area(shape):
    frames = render(replace(SCENE, shape=shape), frames=1, size_px=256)
    area = object_pixels(SCENE, frames).sum()
    assert area == pytest.approx(np.pi * (SIZES["small"] * 256) ** 2, rel=0.25)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("motion", MOTIONS)
def test_object_stays_whole_inside_when_its_path_touches_a_corner(shape, motion, size):
    for x, y in product((0.0, 1.0), repeat=2):
        scene = replace(SCENE, shape=shape, motion=motion, size=size, x=x, y=y, pace=1.0, phase=0.3)
        drawn = object_pixels(scene, render(scene, frames=9))
        assert drawn.any((1, 2)).all()
        assert not drawn[:, [0, -1]].any() and not drawn[:, :, [0, -1]].any()


@pytest.mark.parametrize("motion", MOTIONS)
def test_object_moves_far_unless_it_stays_or_grows(motion):
    scene = replace(SCENE, motion=motion)
    time = np.linspace(0, 1, 33)
    spread = 128 * np.ptp(centers_of(scene, time), axis=0)
    radii = radii_of(scene, time)
    if motion in ("still", "growing"):
        assert spread.max() == 0
        assert radii[-1] / radii[0] > 2 if motion == "growing" else radii[-1] == radii[0]
    else:
        assert spread.max() >= 40


@pytest.mark.parametrize(("motion", "way"), DIRECTIONS.items())
def test_object_goes_the_way_that_the_motion_names(motion, way):
    first, last = centers_of(replace(SCENE, motion=motion), np.array([0.0, 1.0]))
    assert np.sign(np.round(last - first, 6)).tolist() == list(way)


def test_light_tells_every_place_of_a_background_from_its_neighbours():
    for name in BACKGROUNDS:
        lit = lit_background(replace(SCENE, background=name), 128).sum(-1)
        rows, columns = np.diff(lit[:, 0]), np.diff(lit[64])
        assert (rows <= 0).all() and (columns >= 0).all()
        assert (rows < 0).mean() > 0.3 or (columns > 0).mean() > 0.3


def test_samples_held_out_and_not_are_disjoint_and_cover_every_word():
    rng = np.random.default_rng(0)
    for held_out in (False, True):
        scenes = [sample(rng, held_out=held_out) for _ in range(400)]
        assert all(is_held_out(**key_of(scene)) == held_out for scene in scenes)
        for name, table in (
            ("color", COLORS),
            ("shape", SHAPES),
            ("size", SIZES),
            ("motion", MOTIONS),
            ("background", BACKGROUNDS),
        ):
            count = Counter(getattr(scene, name) for scene in scenes)
            assert min(count[word] for word in table) >= 400 / len(table) / 2, (name, count)


def test_held_out_share_of_each_word_leaves_most_to_training():
    combinations = [
        dict(zip(("color", "shape", "motion", "background"), words, strict=True))
        for words in product(COLORS, SHAPES, MOTIONS, BACKGROUNDS)
        if has_contrast(words[0], words[3])
    ]
    apart = [words for words in combinations if is_held_out(**words)]
    assert 0.1 < len(apart) / len(combinations) < 0.14
    for name in combinations[0]:
        total, held = (Counter(words[name] for words in some) for some in (combinations, apart))
        assert all(0.05 < held[word] / total[word] < 0.2 for word in total)


def test_object_is_never_drawn_in_its_background_s_color():
    rng = np.random.default_rng(0)
    seen = {(scene.color, scene.background) for scene in (sample(rng) for _ in range(1000))}
    assert not seen & {("white", "white"), ("black", "black"), ("black", "navy")}
    assert ("red", "white") in seen
