"""How near two videos of the same seed are: PSNR and SSIM, frame by frame, and over many videos."""

from collections.abc import Sequence
from typing import Any

import numpy as np

PEAK = 255.0
MOST_DB = 100.0  # of frames that are equal
SSIM_WINDOW = 8  # pixels along each side
SSIM_C1, SSIM_C2 = (0.01 * PEAK) ** 2, (0.03 * PEAK) ** 2


def psnr_db(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """PSNR of each frame over RGB, float64 [T], of uint8 frames [T, h, w, 3]; at most 100 dB."""
    difference = ours.astype(np.float64) - theirs
    error = np.square(difference).mean(axis=(1, 2, 3))
    return np.minimum(10 * np.log10(PEAK**2 / np.maximum(error, 1e-12)), MOST_DB)


def ssim(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Structural similarity of each frame, float64 [T]: the mean over RGB and over windows of 8x8
    pixels at every place (Wang et al. 2004, with even weights).
    """
    scores = [
        _ssim(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(ours, theirs, strict=True)
    ]
    return np.array(scores)


def of_video(frames: np.ndarray) -> dict[str, Any]:
    """Summarise the scores [T] of one video's frames."""
    shown = [round(float(value), 4) for value in frames]
    return {"mean": float(frames.mean()), "worst": float(frames.min()), "frames": shown}


def of_videos(videos: Sequence[np.ndarray]) -> dict[str, float]:
    """Summarise several videos by the means over their frames: the mean of all and the worst; and
    the worst frame of any.
    """
    means = [frames.mean() for frames in videos]
    worst_frame = min(frames.min() for frames in videos)
    worst = {"worst": float(min(means)), "worst_frame": float(worst_frame)}
    return {"mean": float(np.mean(means)), **worst}


def _ssim(a: np.ndarray, b: np.ndarray) -> float:
    mean_a, mean_b = _windows(a), _windows(b)
    var_a = _windows(a * a) - mean_a**2
    var_b = _windows(b * b) - mean_b**2
    both = _windows(a * b) - mean_a * mean_b
    light = (2 * mean_a * mean_b + SSIM_C1) / (mean_a**2 + mean_b**2 + SSIM_C1)
    return float((light * (2 * both + SSIM_C2) / (var_a + var_b + SSIM_C2)).mean())


def _windows(x: np.ndarray) -> np.ndarray:
    """Mean over every window of x [h, w, 3]."""
    size = SSIM_WINDOW
    sums = np.pad(x.cumsum(0).cumsum(1), ((1, 0), (1, 0), (0, 0)))
    total = sums[size:, size:] - sums[:-size, size:] - sums[size:, :-size] + sums[:-size, :-size]
    return total / size**2
