"""PSNR and SSIM against values worked out by hand."""

import numpy as np
import pytest

from svgen.quality import MOST_DB, of_video, of_videos, psnr_db, ssim


def test_psnr_of_each_frame():
    theirs = np.full((3, 8, 8, 3), 100, np.uint8)
    ours = theirs.copy()
    ours[1] += 1
    ours[2, :, :, 0] += 30  # a third of the values: a mean square of 300
    found = psnr_db(ours, theirs)
    assert found[0] == MOST_DB
    assert found[1] == pytest.approx(48.1308, abs=1e-4)
    assert found[2] == pytest.approx(10 * np.log10(255**2 / 300))


def test_ssim_is_one_for_equal_frames_and_known_for_flat_ones():
    flat = np.full((1, 16, 16, 3), 100, np.uint8)
    assert ssim(flat, flat)[0] == pytest.approx(1)
    found = ssim(flat, np.full_like(flat, 50))[0]  # no variance: the term of light alone
    assert found == pytest.approx((2 * 100 * 50 + 6.5025) / (100**2 + 50**2 + 6.5025))


def test_ssim_equals_the_sum_over_windows():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (2, 1, 10, 9, 3)).astype(np.uint8)
    scores = []
    for y in range(3):
        for x in range(2):
            for c in range(3):
                one, two = (v[0, y : y + 8, x : x + 8, c].astype(float).ravel() for v in (a, b))
                cov = np.cov(one, two, bias=True)
                light = (2 * one.mean() * two.mean() + 6.5025) / (
                    one.mean() ** 2 + two.mean() ** 2 + 6.5025
                )
                scores.append(light * (2 * cov[0, 1] + 58.5225) / (cov[0, 0] + cov[1, 1] + 58.5225))
    assert ssim(a, b)[0] == pytest.approx(np.mean(scores), rel=1e-9)


def test_video_is_summed_up_by_its_mean_and_worst_frame():
    found = of_video(np.array([30.0, 20.0, 40.00006]))
    assert found == {"mean": pytest.approx(30.00002), "worst": 20, "frames": [30.0, 20.0, 40.0001]}


def test_worst_of_videos_is_the_lowest_mean_and_not_the_lowest_frame():
    steady, uneven = np.array([30.0, 30.0]), np.array([10.0, 60.0])
    assert of_videos([steady, uneven]) == {"mean": 32.5, "worst": 30, "worst_frame": 10}
