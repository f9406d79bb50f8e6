"""Equality with what diffusers computed once on the small checkpoint, without torch at hand."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from svgen.pipeline import Pipeline, draw_noise
from tests.equality import FRAME_SHARE, PART_TOLERANCE, part_errors, request_for, run_errors

GOLDEN = Path(__file__).parent / "golden"
SIZE = (64, 48, 9)


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    return load_file(GOLDEN / "golden.safetensors")


def test_every_part_equals_diffusers(reference):
    clip = np.random.default_rng(0).uniform(-1, 1, (1, 9, 48, 64, 3)).astype(np.float32)
    errors = part_errors(GOLDEN / "tiny", reference, clip)
    assert all(error <= PART_TOLERANCE for error in errors.values()), errors


def test_whole_run_equals_diffusers(reference):
    steps, frames = run_errors(GOLDEN / "tiny", reference)
    assert len(steps) == 8
    assert max(steps) <= PART_TOLERANCE
    assert (frames <= 1).mean() >= FRAME_SHARE


def test_noise_is_the_reference_noise(reference):
    pipeline = Pipeline(GOLDEN / "tiny")
    grid = pipeline.grid(request_for(*SIZE))
    noise = draw_noise(grid, 8, seed=7)
    assert np.array_equal(noise, reference["noise"])
    assert not np.array_equal(noise, draw_noise(grid, 8, seed=8))
    assert not np.array_equal(noise, draw_noise(grid, 8, seed=7, item=1))
