"""Small videos for tests, written and decoded by the real ffmpeg."""

import subprocess

import numpy as np

from svgen.video import ffmpeg_exe, write_video


def recipe(prompt="a cat"):
    return {"svgen": "0.1.0", "request": {"prompt": prompt, "seed": 7, "shift": 3.0}}


def moving(frames, height, width):
    """Frames of a moving gradient, cheap to encode at any size."""
    t, y, x = np.ogrid[:frames, :height, :width]
    planes = (
        x * 255 // width + 0 * (y + t),
        y * 255 // height + 0 * (x + t),
        (x + y + 9 * t) % 256,
    )
    return np.stack(planes, -1).astype(np.uint8)


def noise(frames, height, width):
    return np.random.default_rng(0).integers(0, 256, (frames, height, width, 3), np.uint8)


def write(path, chunks=None, *, width_px=32, height_px=16, fps=16, **options):
    chunks = [moving(5, height_px, width_px)] if chunks is None else chunks
    return write_video(
        chunks, path, fps=fps, width_px=width_px, height_px=height_px, **options
    )  # fmt: skip


def decoded(path, pix_fmt="yuv420p"):
    """The raw bytes of all frames, as stored."""
    command = [ffmpeg_exe(), "-v", "error", "-nostdin", "-i", str(path)]
    command += ["-f", "rawvideo", "-pix_fmt", pix_fmt, "pipe:1"]
    return np.frombuffer(subprocess.run(command, capture_output=True, check=True).stdout, np.uint8)
