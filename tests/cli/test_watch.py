"""What a failed run looks like is told, and a good one passes."""

import numpy as np
import pytest

from svgen.cli.watch import Watch
from tests.videos import moving, noise


def warnings_of(*chunks):
    watch = Watch()
    for chunk in chunks:
        watch.see(chunk)
    return watch.warnings()


def still(frames, level=None):
    if level is None:
        return np.repeat(noise(1, 16, 32), frames, axis=0)
    return np.full((frames, 16, 32, 3), level, np.uint8)


@pytest.mark.parametrize("chunks", [[moving(5, 16, 32)], [noise(1, 16, 32)], []])
def test_good_video_has_no_warning(chunks):
    assert warnings_of(*chunks) == []


def test_black_video_is_told():
    assert "black" in warnings_of(still(1, 0), still(4, 2))[0]


def test_video_of_one_colour_is_told_even_when_it_changes():
    assert "one colour" in warnings_of(still(1, 0), still(4, 200))[0]
    assert "one colour" in warnings_of(still(2, (200, 0, 0)))[0]


def test_video_that_stands_still_is_told():
    assert "nothing moves" in warnings_of(still(1), still(4))[0]


def test_slow_or_late_motion_is_motion():
    fade = np.concatenate([np.clip(still(1).astype(int) + level, 0, 255) for level in range(9)])
    assert warnings_of(fade.astype(np.uint8)) == []
    last = still(1)
    last[:, ::4, ::4] ^= 255
    assert warnings_of(still(4), last) == []
