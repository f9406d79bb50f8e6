"""What is measured in drawn clips is what was drawn, noise and blur or not; wrong clips show."""

from dataclasses import replace

import numpy as np
import pytest

from svgen.demo.measure import UNCLEAR, measure
from svgen.demo.scenes import MOTIONS, SHAPES, render, sample
from tests.demo.test_scenes import SCENE

ATTRIBUTES = ("color", "shape", "size", "motion", "background")
CLIPS = 60
NOISE = 12.0


def blur(frames):
    """Average each pixel with its neighbours: 1 2 1 down and across."""
    frames = frames.astype(np.float32)
    for axis in (1, 2):
        sides = np.roll(frames, 1, axis) + np.roll(frames, -1, axis)
        frames = (sides + 2 * frames) / 4
    return frames


def spoil(frames, rng):
    noise = NOISE * rng.standard_normal(frames.shape, np.float32)
    return (blur(frames) + noise).round().clip(0, 255).astype(np.uint8)


def shade(frames, factor):
    return (frames * factor).round().astype(np.uint8)


@pytest.mark.parametrize("spoiled", [False, True])
def test_measured_is_what_was_drawn(spoiled):
    rng = np.random.default_rng(7)
    for number in range(CLIPS):
        scene = sample(rng, held_out=number % 2 == 1)
        frames = render(scene)
        found = measure(spoil(frames, rng) if spoiled else frames)
        wrong = [name for name in ATTRIBUTES if getattr(found, name) != getattr(scene, name)]
        assert not wrong, (scene, found)


@pytest.mark.parametrize("motion", MOTIONS)
def test_reversed_clip_shows_the_opposite_motion(motion):
    frames = render(replace(SCENE, motion=motion))[::-1]
    opposite = {"right": "left", "left": "right", "up": "down", "down": "up", "growing": UNCLEAR}
    assert measure(frames).motion == opposite.get(motion, motion)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("motion", MOTIONS)
def test_each_shape_and_motion_is_told_at_another_size_and_length(shape, motion):
    found = measure(render(replace(SCENE, shape=shape, motion=motion), frames=17, size_px=192))
    assert (found.shape, found.motion) == (shape, motion)


def test_colors_are_told_when_they_are_a_little_off():
    found = measure(shade(render(SCENE, frames=9), 0.95))
    assert (found.color, found.background) == ("red", "white")


def test_nothing_is_seen_in_a_plain_clip_and_in_noise():
    gray = np.full((9, 64, 64, 3), 140, np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, gray.shape, np.uint8)
    assert measure(gray).background == "gray"
    assert measure(gray).color == measure(gray).motion == UNCLEAR
    assert measure(noise).motion in (UNCLEAR, "still")


def test_motion_is_unclear_when_the_object_jumps_or_is_gone_half_the_time():
    frames = render(SCENE)
    order = np.random.default_rng(0).permutation(len(frames))
    assert measure(frames[order]).motion == UNCLEAR
    assert measure(np.where(np.arange(33)[:, None, None, None] < 16, frames, 245)).color == UNCLEAR


def test_motion_is_unclear_when_the_object_goes_aslant_or_too_little():
    right, down = (render(replace(SCENE, motion=motion)) for motion in ("right", "down"))
    aslant = np.stack([np.roll(frame, step, 0) for step, frame in enumerate(right)])
    assert measure(down).motion == "down"
    assert measure(aslant).motion == UNCLEAR
    assert measure(right[:10]).motion == UNCLEAR
