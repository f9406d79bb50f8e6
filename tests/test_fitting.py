"""Which size is timed, with speeds that the test names."""

from pathlib import Path

import pytest

from svgen import fitting
from svgen.pipeline import Pipeline
from tests.equality import request_for
from tests.helpers import ROOT

STAGES = ("embed", "attention", "step", "decode")
TINY = Path(ROOT, "tests/golden/tiny")


@pytest.fixture(scope="module")
def pipeline():
    return Pipeline(TINY)


def sizes(requests):
    return [(one.width_px, one.height_px, one.frames) for one in requests]


def test_frames_are_halved_before_sides(pipeline):
    stride = pipeline.rules.frame_stride
    request = request_for(512, 256, 1 + 4 * stride)
    found = sizes(fitting.smaller(pipeline, request, sized=False))
    frames = [1 + 4 * stride, 1 + 2 * stride, 1 + stride]
    assert found == [(512, 256, n) for n in frames] + [(256, 128, n) for n in frames] + [
        (128, 64, n) for n in frames
    ]
    assert sizes(fitting.smaller(pipeline, request, sized=True)) == found[:3]


def test_the_largest_that_fits_is_taken(pipeline, monkeypatch):
    request = request_for(256, 256, 33)
    monkeypatch.setattr(fitting, "product_speed", lambda dtype: 1e9)
    candidates = list(fitting.smaller(pipeline, request, sized=False))
    speed = 1e9 * fitting.EFFICIENCY
    costs = [fitting.estimate_s(pipeline, one, STAGES, speed) for one in candidates]
    assert costs[0] > costs[1] > costs[-1]
    assert fitting.estimate_s(pipeline, request, ("attention",), speed) < costs[0] / 2
    chosen = [
        fitting.fitting(pipeline, request, STAGES, budget, sized=False)[0]
        for budget in (costs[0], costs[1], costs[-1] / 2)
    ]
    assert chosen == [request, candidates[1], candidates[-1]]
