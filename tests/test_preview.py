"""The picture of a video on its way: the map, the sheet, the PNG, and whose file it is."""

import subprocess

import numpy as np
import pytest

from svgen.errors import UsageError
from svgen.preview import (
    GAP_LEVEL,
    GAP_PX,
    Projection,
    check_preview,
    fit,
    is_preview,
    layout,
    png,
    preview_path,
    sheet,
    shown,
    write_preview,
)
from svgen.video import ffmpeg_exe

MATRIX = np.array([[20, 0, 5], [0, -30, 5]], np.float32)
OFFSET = np.array([100, 120, 90], np.float32)
GREY = Projection(np.full((1, 3), 10, np.float32), np.zeros(3, np.float32))


def linear(frame: np.ndarray) -> np.ndarray:
    """A VAE that is linear: each latent position [1, 1, H, W, 2] becomes 8x8 pixels."""
    colours = frame[0, 0] @ MATRIX + OFFSET
    assert colours.min() > 0 and colours.max() < 255, "nothing is clipped"
    return np.rint(colours).astype(np.uint8).repeat(8, axis=0).repeat(8, axis=1)


@pytest.mark.parametrize("side", [6, 16, 40])
def test_fit_finds_the_map_of_a_linear_vae(side):
    found = fit(linear, (1, 3, side, 16, 2))
    assert np.allclose(found.matrix, MATRIX, atol=0.2)
    assert np.allclose(found.offset, OFFSET, atol=0.2)


def test_fit_decodes_no_more_than_it_must():
    shapes = []

    def decode(frame):
        shapes.append(frame.shape)
        return linear(frame)

    fit(decode, (1, 21, 90, 160, 2))
    assert shapes == [(1, 1, 32, 32, 2)] * 4  # 16 patches each


@pytest.mark.parametrize(
    ("frames", "expected"), [(1, (1, 1)), (5, (2, 2)), (9, (3, 3)), (21, (3, 4))]
)
def test_sheet_is_full(frames, expected):
    assert layout(frames) == expected


def test_first_and_last_frame_are_shown():
    estimate = np.arange(21, dtype=np.float32).reshape(1, 21, 1, 1, 1)
    found = shown(estimate)
    assert found.ravel().tolist() == [0, 2, 4, 5, 7, 9, 11, 13, 15, 16, 18, 20]
    estimate[:] = -1  # the buffer is used again by the next step
    assert found.min() == 0


def test_frames_lie_in_reading_order_with_gaps():
    frames = np.array([1, 2, 3, 4], np.float32).reshape(4, 1, 1, 1)
    found = sheet(GREY, frames)[..., 0]
    row = [10] * 4 + [GAP_LEVEL] * GAP_PX + [20] * 4
    assert found.shape == (4 + GAP_PX + 4, len(row))
    assert found[0].tolist() == row
    assert found[4].tolist() == [GAP_LEVEL] * len(row)
    assert (found[8, 0], found[-1, -1]) == (30, 40)


def test_enlarging_is_linear_between_centres():
    found = sheet(GREY, np.array([0, 8], np.float32).reshape(1, 1, 2, 1))[0, :, 0]
    assert found.tolist() == [0, 0, 10, 30, 50, 70, 80, 80]


def test_colours_outside_are_clipped():
    assert GREY.colours(np.array([[-1], [30], [0.26]], np.float32)).tolist() == [
        [0] * 3,
        [255] * 3,
        [3] * 3,
    ]


def test_png_is_read_by_ffmpeg_as_it_was_drawn(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 10, 3), np.uint8)
    path = tmp_path / "a.png"
    path.write_bytes(png(pixels, "step 3 of 8"))
    command = [ffmpeg_exe(), "-v", "error", "-xerror", "-i", str(path)]
    done = subprocess.run(
        [*command, "-f", "rawvideo", "-pix_fmt", "rgb24", "pipe:1"], capture_output=True, check=True
    )
    assert not done.stderr
    assert np.array_equal(np.frombuffer(done.stdout, np.uint8).reshape(6, 10, 3), pixels)
    assert b"step 3 of 8" in path.read_bytes()


def test_only_a_preview_of_svgen_is_replaced(tmp_path):
    video = tmp_path / "a.mp4"
    path = preview_path(video)
    assert path.name == "a.preview.png"
    frames = np.zeros((1, 2, 2, 1), np.float32)
    for note in ("first", "second"):
        check_preview(video, overwrite=False)
        write_preview(path, GREY, frames, note)
        assert note.encode() in path.read_bytes()
    assert is_preview(path) and [one.name for one in tmp_path.iterdir()] == [path.name]

    path.write_bytes(b"a picture of somebody else")
    with pytest.raises(UsageError) as caught:
        check_preview(video, overwrite=False)
    assert caught.value.code == "E_OUTPUT_EXISTS"
    check_preview(video, overwrite=True)
