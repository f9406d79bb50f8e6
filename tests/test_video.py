"""MP4 files by the real ffmpeg: what is in them, and what is left when ffmpeg fails."""

import os
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from svgen.errors import FileError, MachineError, NumericalError, UsageError
from svgen.partial import partial_file
from svgen.video import check_output, ffmpeg_exe, needed_bytes, to_uint8
from tests.followed import wait_until
from tests.mp4 import read_mp4
from tests.videos import decoded, moving, noise, recipe, write

ROOT = Path(__file__).resolve().parent.parent
COLOURS = [
    (0, 255, 0), (255, 0, 0), (0, 0, 255), (255, 255, 0), (255, 255, 255), (0, 0, 0),
    (128, 128, 128), (12, 200, 77),
]  # fmt: skip
COLOUR_TOLERANCE = 3  # of 255: limited range keeps 219 levels of luma and 224 of chroma, crf 17


def planes(path, width, height):
    """Y, U, V of every frame: [T, H, W], [T, H/2, W/2] twice."""
    frames = decoded(path).reshape(-1, width * height * 3 // 2)
    y, u, v = np.split(frames, [width * height, width * height * 5 // 4], axis=1)
    halves = (-1, height // 2, width // 2)
    return y.reshape(-1, height, width), u.reshape(halves), v.reshape(halves)


def program(path, text):
    """Make an executable script that stands in for ffmpeg."""
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)
    return str(path)


# What is in the file.


@pytest.mark.parametrize(
    "given, width, height, level",
    [((16, 16), 16, 16, 10), ((1088, 1920), 1920, 1080, 40), ((1440, 2560), 2560, 1440, 50)],
)
def test_file_plays_everywhere(tmp_path, given, width, height, level):
    path = tmp_path / "video.mp4"
    frames = moving(3, *given)
    done = write(path, [frames[:1], frames[1:]], width_px=width, height_px=height, fps=24)
    found = read_mp4(path)
    assert (done.path, done.frames, done.size_bytes) == (path, 3, path.stat().st_size)
    assert (found.width_px, found.height_px, found.frames, found.fps) == (width, height, 3, 24)
    assert (found.profile, found.level, found.chroma, found.bits) == (100, level, "4:2:0", 8)
    assert found.stream_colours == (1, 1, 1) and not found.full_range
    assert found.atom_colours == ("nclx", 1, 1, 1, False)
    assert found.order.index("ftyp") < found.order.index("moov") < found.order.index("mdat")
    assert found.comment is None
    assert os.listdir(tmp_path) == ["video.mp4"]


def test_frames_are_cropped_and_never_rescaled(tmp_path):
    frames = np.zeros((1, 36, 40, 3), np.uint8)
    frames[:, :32, :32] = 128
    frames[:, 32:] = frames[:, :, 32:] = 255  # what must not be seen, not even mixed in
    path = tmp_path / "video.mp4"
    write(path, [frames], width_px=32, height_px=32)
    y, u, v = planes(path, 32, 32)
    assert np.all(np.abs(y.astype(int) - 126) <= 1)  # 16 + 219 * 128 / 255
    assert np.all(np.abs(np.stack([u, v]).astype(int) - 128) <= 1)


@pytest.mark.parametrize("colour", COLOURS)
def test_colours_come_back_by_bt709(tmp_path, colour):
    path = tmp_path / "video.mp4"
    write(path, [np.full((2, 32, 32, 3), colour, np.uint8)], width_px=32, height_px=32)
    y, u, v = (plane[:, 4:12, 4:12].mean() for plane in planes(path, 32, 32))
    luma, blue, red = (y - 16) / 219, (u - 128) / 224, (v - 128) / 224
    r, b = luma + 2 * (1 - 0.2126) * red, luma + 2 * (1 - 0.0722) * blue  # ITU-R BT.709-6, 3.2
    g = (luma - 0.2126 * r - 0.0722 * b) / 0.7152
    assert np.abs(255 * np.array([r, g, b]) - colour).max() <= COLOUR_TOLERANCE


@pytest.mark.parametrize(
    "fps, rate",
    [
        (16, Fraction(16)),
        (24.0, Fraction(24)),
        (12.5, Fraction(25, 2)),
        (23.976, Fraction(24000, 1001)),
        (30000 / 1001, Fraction(30000, 1001)),
        (Fraction(60000, 1001), Fraction(60000, 1001)),
        (0.5, Fraction(1, 2)),
    ],
)
def test_frame_rate_is_exact(tmp_path, fps, rate):
    path = tmp_path / "video.mp4"
    write(path, fps=fps)
    assert read_mp4(path).fps == rate


def test_keyframes_come_every_two_seconds(tmp_path):
    path = tmp_path / "video.mp4"
    write(path, [moving(1, 16, 32), moving(40, 16, 32)], fps=8)
    assert read_mp4(path).frames == 41
    assert read_mp4(path).keyframes == [1, 17, 33]


def test_every_frame_arrives_in_order(tmp_path):
    path = tmp_path / "video.mp4"
    levels = np.linspace(0, 255, 21).astype(np.uint8)
    frames = np.broadcast_to(levels[:, None, None, None], (21, 16, 16, 3))
    chunks = [frames[:1], frames[:0], frames[1:5], frames[5:]]
    write(path, iter(chunks), width_px=16, height_px=16, frame_count=21)
    y, _, _ = planes(path, 16, 16)
    assert np.abs(y.mean((1, 2)) - (16 + 219 / 255 * levels)).max() < 2


def test_names_that_ffmpeg_would_misread(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("-y.mp4", "a:b.mp4", "%03d.mp4", "it's [1] 猫.mp4", "x" * 230 + ".mp4"):
        write(Path(name), recipe=recipe())
        assert read_mp4(tmp_path / name).frames == 5


def test_new_file_has_the_usual_permissions(tmp_path):
    path = tmp_path / "video.mp4"
    write(path)
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert path.stat().st_nlink == 1


# What is left when writing fails.


def test_ffmpeg_is_killed_in_the_middle(tmp_path):
    pid = tmp_path / "pid"
    text = f"import os\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\n"
    exe = program(tmp_path / "ffmpeg", f"{text}import sys\nos.execv({ffmpeg_exe()!r}, sys.argv)")
    out = tmp_path / "out"
    out.mkdir()

    def chunks():
        yield noise(8, 64, 64)  # more than a pipe holds: ffmpeg is there and reads
        assert os.getpgid(int(pid.read_text())) != os.getpgrp()  # Ctrl-C does not reach it
        os.kill(int(pid.read_text()), signal.SIGKILL)
        for _ in range(50):
            yield noise(8, 64, 64)

    with pytest.raises(FileError) as caught:
        write(out / "video.mp4", chunks(), width_px=64, height_px=64, ffmpeg=exe)
    assert caught.value.code == "E_ENCODE" and "signal 9" in caught.value.message
    assert not os.listdir(out)


@pytest.mark.parametrize(
    "text, code, said",
    [
        ("sys.stderr.write('Unknown encoder: libx264\\n'); sys.exit(8)", "E_ENCODE", "libx264"),
        ("sys.stderr.write('x' * 10**6 + '\\nlast words'); sys.exit(1)", "E_ENCODE", "last words"),
        (
            "sys.stderr.write('Error: No space left on device'); sys.exit(228)",
            "E_DISK_FULL",
            "No sp",
        ),
        ("sys.stdin.buffer.read()", "E_ENCODE", "0 of 5 frames"),  # success, but an empty file
        ("sys.stdin.close()", "E_ENCODE", ""),
    ],
)
def test_ffmpeg_that_fails(tmp_path, text, code, said):
    exe = program(tmp_path / "ffmpeg", f"import sys\n{text}")
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(FileError) as caught:
        write(out / "video.mp4", [moving(5, 512, 512)], width_px=512, height_px=512, ffmpeg=exe)
    assert caught.value.code == code and caught.value.exit_code == 6
    assert said in caught.value.why
    assert not os.listdir(out)


def test_file_that_lacks_frames_is_found_out(tmp_path):
    """An encoder that drops frames and reports success."""
    text = f"""import subprocess, sys
if 'pipe:0' not in sys.argv:
    sys.exit(subprocess.call([{ffmpeg_exe()!r}, *sys.argv[1:]]))
data = sys.stdin.buffer.read()[: 3 * 16 * 32 * 3]
subprocess.run([{ffmpeg_exe()!r}, *sys.argv[1:]], input=data, check=True)"""
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(FileError, match="ffmpeg") as caught:
        write(out / "video.mp4", ffmpeg=program(tmp_path / "ffmpeg", text))
    assert "3 of 5 frames" in caught.value.why
    assert not os.listdir(out)


def test_ffmpeg_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", lambda: str(tmp_path / "none"))
    with pytest.raises(MachineError) as caught:
        write(tmp_path / "video.mp4")
    assert caught.value.code == "E_LIBRARY"
    assert not os.listdir(tmp_path)


def test_disk_that_runs_full(tmp_path):
    """A process that may write files of 64 KiB only: the limit is real, and ffmpeg meets it."""
    text = """
import resource, sys
from pathlib import Path
sys.path.insert(0, ".")
from tests.videos import noise, write
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    write(Path(sys.argv[1], "video.mp4"), [noise(24, 64, 64)], width_px=64, height_px=64)
except Exception as error:
    print(error.code, error.exit_code)
"""
    command = [sys.executable, "-c", text, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout == "E_DISK_FULL 6\n", done.stderr
    assert not os.listdir(tmp_path)


def test_space_is_asked_for_first(tmp_path):
    with pytest.raises(FileError) as caught:
        write(tmp_path / "video.mp4", pytest.fail, frame_count=10**12)
    assert caught.value.code == "E_DISK_FULL"
    with pytest.raises(FileError) as caught:
        check_output(tmp_path / "video.mp4", overwrite=False, needed=1 << 60)
    assert caught.value.details["needed_bytes"] == 1 << 60
    assert not os.listdir(tmp_path)
    assert needed_bytes(frames=81, width_px=2560, height_px=1440) < 100e6


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, BrokenPipeError, UsageError])
def test_what_the_frames_raise_passes_and_leaves_nothing(tmp_path, error):
    problem = error("E_VALUE", "no") if error is UsageError else error()

    def chunks():
        yield moving(5, 16, 32)
        assert os.listdir(tmp_path) == [".video.partial.mp4"]
        raise problem

    with pytest.raises(error) as caught:
        write(tmp_path / "video.mp4", chunks())
    assert caught.value is problem
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "chunks, options",
    [
        ([], {}),
        ([np.zeros((0, 16, 32, 3), np.uint8)], {}),
        ([np.zeros((1, 16, 32, 3), np.float32)], {}),
        ([np.zeros((16, 32, 3), np.uint8)], {}),
        ([np.zeros((1, 16, 32, 4), np.uint8)], {}),
        ([np.zeros((1, 16, 31, 3), np.uint8)], {}),
        ([np.zeros((1, 17, 32, 3), np.uint8)], {"height_px": 17}),
        (None, {"width_px": 0}),
        (None, {"fps": 0}),
        (None, {"fps": float("nan")}),
        (None, {"fps": float("inf")}),
        (None, {"fps": 1e-9}),
        (None, {"crf": 0}),
        (None, {"frame_count": 6}),
    ],
)
def test_wrong_calls_are_refused_and_leave_nothing(tmp_path, chunks, options):
    with pytest.raises(ValueError):
        write(tmp_path / "video.mp4", chunks, **options)
    assert not os.listdir(tmp_path)


# From numbers to levels.


def test_to_uint8_rounds_and_clips():
    levels = np.arange(256)
    exact = (levels / 127.5 - 1).astype(np.float32)
    assert np.array_equal(to_uint8(exact), levels)
    below, above = (levels[1:] - 0.51) / 127.5 - 1, (levels[:-1] + 0.49) / 127.5 - 1
    assert np.array_equal(to_uint8(below.astype(np.float32)), levels[:-1])
    assert np.array_equal(to_uint8(above.astype(np.float32)), levels[:-1])
    assert to_uint8(np.array([-9, -1, 1, 1.01, 3e38], np.float32)).tolist() == [0, 0] + [255] * 3
    assert to_uint8(np.zeros((2, 4, 4, 3), np.float16)).dtype == np.uint8


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_to_uint8_finds_what_is_not_finite(bad):
    frames = np.zeros((1, 2, 2, 3), np.float32)
    frames[0, 1, 1, 2] = bad
    with pytest.raises(NumericalError) as caught:
        to_uint8(frames)
    assert caught.value.code == "E_NAN" and caught.value.exit_code == 8
    assert caught.value.message.startswith("1 of 12 ")


def test_to_uint8_wants_floats():
    with pytest.raises(ValueError):
        to_uint8(np.zeros(3, np.uint8))


def test_no_jax_is_loaded():
    text = "import sys, svgen.video, svgen.cli.naming; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], cwd=ROOT, check=False).returncode == 0


ORPHAN = """
import os, signal, sys
from pathlib import Path
from tests.videos import moving, write

def chunks():
    while not Path(sys.argv[1], "encoder").exists():
        pass
    os.kill(os.getpid(), signal.SIGKILL)
    yield moving(5, 16, 32)

write(Path(sys.argv[1], "video.mp4"), chunks(), ffmpeg=sys.argv[2])
"""


def test_encoder_that_outlives_its_run_keeps_its_file_to_itself(tmp_path):
    ready = f"echo $$ > {tmp_path}/new && mv {tmp_path}/new {tmp_path}/encoder"
    encoder = tmp_path / "slow"
    encoder.write_text(f"#!/bin/sh\n{ready}\nexec sleep 600\n")
    encoder.chmod(0o700)
    command = [sys.executable, "-c", ORPHAN, str(tmp_path), str(encoder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(command, env=environment, cwd=ROOT, check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL

    def free_name() -> str:
        with partial_file(tmp_path / "video.mp4") as path:
            return path.name

    try:
        assert free_name() == ".video.1.partial.mp4"
    finally:
        os.kill(int((tmp_path / "encoder").read_text()), signal.SIGKILL)
    assert wait_until(lambda: free_name() == ".video.partial.mp4")
