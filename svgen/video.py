"""Frames become an MP4: streamed into ffmpeg, tagged as BT.709, read back, put in place whole."""

import contextlib
import json
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import imageio_ffmpeg
import numpy as np

from svgen.errors import FileError, MachineError, NumericalError
from svgen.partial import check_output, check_space, locked_partial, publish, sync, write_error
from svgen.recipe import comment_of, read_recipe

__all__ = [
    "Written",
    "check_output",
    "ffmpeg_exe",
    "needed_bytes",
    "read_recipe",
    "to_uint8",
    "write_video",
]

BYTES_PER_PIXEL = 0.25  # a generous estimate at crf 17; pure noise takes 0.7
SPARE_BYTES = 1 << 20  # with less than this free, a failed write means that the disk is full
NTSC_TOLERANCE = 2e-6  # 23.976 and 29.97 lie 1e-6 (relative) from 24000/1001 and 30000/1001
FULL_WORDS = ("No space left on device", "File too large", "Disk quota exceeded")
BT709 = (
    "scale=out_color_matrix=bt709:out_range=tv,"
    "setparams=range=tv:color_primaries=bt709:color_trc=bt709:colorspace=bt709"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A finished MP4."""

    path: Path
    frames: int
    size_bytes: int


class _Encoding(NamedTuple):
    """How frames are read and coded; checked by `_encoding`."""

    rate: Fraction
    width_px: int
    height_px: int
    crf: int


def to_uint8(frames: np.ndarray) -> np.ndarray:
    """Map [-1, 1] to 0..255 as round(clip((x + 1) / 2) * 255).

    Raises NumericalError for NaN or infinity.
    """
    if not np.issubdtype(frames.dtype, np.floating):
        raise ValueError(f"frames are {frames.dtype}, not floats")
    bad = frames.size - np.count_nonzero(np.isfinite(frames))
    if bad:
        raise NumericalError(
            "E_NAN",
            f"{bad} of {frames.size} values of the decoded frames are NaN or infinite",
            why="such frames would be written as black or as noise",
            hint="verify the model's files, then decode the saved latents again in float32",
        )
    unit = np.clip(frames.astype(np.float32) * np.float32(0.5) + np.float32(0.5), 0.0, 1.0)
    return np.rint(unit * np.float32(255.0)).astype(np.uint8)


def ffmpeg_exe() -> str:
    """Find the ffmpeg program that imageio-ffmpeg brings, or the one it is told to use."""
    try:
        return imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise _no_ffmpeg(str(error)) from error


def needed_bytes(*, frames: int, width_px: int, height_px: int) -> int:
    """Estimate the disk space that an MP4 takes, generously."""
    return SPARE_BYTES + int(frames * width_px * height_px * BYTES_PER_PIXEL)


def write_video(
    chunks: Iterable[np.ndarray],  # uint8, each [T, H, W, 3] with any T
    path: Path,
    *,
    fps: float | Fraction,
    width_px: int,
    height_px: int,
    recipe: Mapping[str, Any] | None = None,
    crf: int = 17,
    overwrite: bool = False,
    frame_count: int | None = None,
    ffmpeg: str | None = None,
) -> Written:
    """Encode frames as they come and put the MP4 in place when it was read back whole.

    Frames larger than width x height lose their right columns and bottom rows; nothing is rescaled.
    `frame_count`, where known, sizes the check of free space and must be met. Whatever is raised,
    by `chunks` too, leaves neither a partial file nor anything new under the final name. If the
    target appeared meanwhile and `overwrite` is not set, the video is kept as NAME-1.mp4 and
    UsageError E_OUTPUT_EXISTS says so (`details["saved"]`).
    """
    encoding = _encoding(fps, width_px, height_px, crf)
    comment = None if recipe is None else comment_of(recipe)
    exe = ffmpeg or ffmpeg_exe()
    if frame_count is not None:
        need = needed_bytes(frames=frame_count, width_px=width_px, height_px=height_px)
        check_space(path.parent, need)
    with locked_partial(path) as (partial, lock):
        coding = {"encoding": encoding, "comment": comment, "exe": exe, "lock": lock}
        frames = _encode(chunks, partial, **coding)
        if frame_count not in (None, frames):
            raise ValueError(f"{frames} frames came, {frame_count} were announced")
        try:
            sync(partial)
        except OSError as error:
            raise write_error(path, error) from error
        _verify(partial, encoding, frames=frames, exe=exe)
        if comment is not None and read_recipe(partial) != json.loads(comment):
            raise FileError("E_ENCODE", f"{path}: the recipe in the MP4 does not read back")
        size = partial.stat().st_size
        publish(partial, path, overwrite=overwrite)
    with contextlib.suppress(OSError):  # not every system lets a folder be opened
        sync(path.parent)
    return Written(path=path, frames=frames, size_bytes=size)


# Encoding.


def _encoding(fps: float | Fraction, width_px: int, height_px: int, crf: int) -> _Encoding:
    if width_px % 2 or height_px % 2 or min(width_px, height_px) < 2:
        raise ValueError(f"{width_px}x{height_px}: width and height must be even and positive")
    if not 1 <= crf <= 51:
        raise ValueError(f"crf is {crf}, not within 1 to 51")
    return _Encoding(_rate(fps), width_px, height_px, crf)


def _rate(fps: float | Fraction) -> Fraction:
    """The exact rate that is meant: 16 -> 16/1, 12.5 -> 25/2, 23.976 -> 24000/1001."""
    if not 0 < fps <= 1000:
        raise ValueError(f"fps is {fps}, not within 0 to 1000")
    ntsc = Fraction(round(fps) * 1000, 1001)
    if ntsc and abs(fps / ntsc - 1) < NTSC_TOLERANCE:
        return ntsc
    rate = Fraction(fps).limit_denominator(1001)
    if not rate:
        raise ValueError(f"fps is {fps}, less than one frame in 1001 seconds")
    return rate


def _url(path: Path) -> str:
    """The path as ffmpeg must be given it: `a:b.mp4` would name a protocol, `-x.mp4` an option."""
    return f"file:{path.absolute()}"


def _command(exe: str, target: Path, encoding: _Encoding, metadata: Path | None) -> list[str]:
    """Spell out one call of ffmpeg; frames come through its stdin."""
    rate, width, height, crf = encoding
    size, keyframes = f"{width}x{height}", max(1, round(2 * rate))
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-framerate", str(rate)]
    notes = ["-f", "ffmetadata", "-i", _url(metadata), "-map_metadata", "1"] if metadata else []
    coding = ["-vf", BT709, "-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", str(crf)]
    coding += ["-preset", "medium", "-g", str(keyframes), "-movflags", "+faststart"]
    base = [exe, "-hide_banner", "-nostdin", "-v", "error", "-y"]
    return [
        *base, *source, "-i", "pipe:0", *notes, "-map", "0:v:0", *coding, "-f", "mp4", _url(target)
    ]  # fmt: skip


def _encode(
    chunks: Iterable[np.ndarray],
    target: Path,
    *,
    encoding: _Encoding,
    comment: str | None,
    exe: str,
    lock: int | None = None,
) -> int:
    """Run ffmpeg over all frames and return how many there were. It inherits the target's lock, for
    where it outlives svgen no other run may write there.
    """
    frames, broken = 0, False
    with contextlib.ExitStack() as stack:
        metadata = stack.enter_context(_metadata(comment))
        command = _command(exe, target, encoding, metadata)
        process, log = stack.enter_context(_running(command, lock))
        for chunk in chunks:
            data = _cropped(chunk, encoding)
            frames += len(data)
            broken = not _feed(process.stdin, data)
            if broken:
                break
        broken |= not _close(process.stdin)
        status = process.wait()
    if status or broken:
        raise _encode_error(target, status, log)
    if not frames:
        raise ValueError("there is not one frame to write")
    return frames


def _cropped(chunk: np.ndarray, encoding: _Encoding) -> np.ndarray:
    """Check a chunk and cut it to size; the result is contiguous."""
    _, width, height, _ = encoding
    if chunk.dtype != np.uint8 or chunk.ndim != 4 or chunk.shape[3] != 3:
        raise ValueError(f"frames are {chunk.dtype} {chunk.shape}, not uint8 [T, H, W, 3]")
    if chunk.shape[1] < height or chunk.shape[2] < width:
        raise ValueError(f"frames are {chunk.shape}, smaller than {width}x{height}")
    return np.ascontiguousarray(chunk[:, :height, :width])


def _feed(stdin: BinaryIO, data: np.ndarray) -> bool:
    """Write to ffmpeg; False when it no longer reads (its exit status and stderr say why)."""
    try:
        stdin.write(data)
    except OSError:
        return False
    return True


def _close(stdin: BinaryIO) -> bool:
    try:
        stdin.close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _metadata(comment: str | None) -> Iterator[Path | None]:
    """Give ffmpeg the comment as a file: arguments are limited in length and seen by every user."""
    if comment is None:
        yield None
        return
    escaped = "".join(f"\\{char}" if char in "=;#\\\n" else char for char in comment)
    path = Path("a temporary file")
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="svgen-"))
            path = Path(folder, "comment.ffmeta")
            path.write_text(f";FFMETADATA1\ncomment={escaped}\n", encoding="ascii")
        except OSError as error:
            raise write_error(path, error, "set TMPDIR to another folder") from error
        yield path


@contextlib.contextmanager
def _running(
    command: list[str], lock: int | None = None
) -> Iterator[tuple[subprocess.Popen, deque[str]]]:
    """Start ffmpeg, collect the end of its stderr as it comes, and end it whatever happens.

    It gets a process group of its own: Ctrl-C is svgen's to answer, not the encoder's.
    """
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    held = () if lock is None else (lock,)
    try:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=null, stderr=pipe, process_group=0, pass_fds=held
        )
    except OSError as error:
        raise _no_ffmpeg(f"{command[0]}: {error.strerror or error}") from error
    log: deque[str] = deque(maxlen=40)
    reader = threading.Thread(target=_collect, args=(process.stderr, log), daemon=True)
    reader.start()
    try:
        yield process, log
    finally:
        if process.poll() is None:
            process.kill()
        _close(process.stdin)
        process.wait()
        reader.join()
        process.stderr.close()


def _collect(stream: BinaryIO, log: deque[str]) -> None:
    for line in iter(lambda: stream.readline(4096), b""):
        log.append(line.decode(errors="replace").rstrip())


def _verify(path: Path, encoding: _Encoding, *, frames: int, exe: str) -> None:
    """Decode the whole file again; raise FileError unless every frame is there, at its size."""
    command = [exe, "-hide_banner", "-nostdin", "-v", "error", "-xerror", "-i", _url(path)]
    command += ["-map", "0:v:0", "-f", "framehash", "-hash", "adler32", "pipe:1"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, process_group=0, check=False
    )
    lines = done.stdout.decode(errors="replace").splitlines()
    rows = [line for line in lines if not line.startswith("#")]
    size = f"#dimensions 0: {encoding.width_px}x{encoding.height_px}"
    if done.returncode or len(rows) != frames or size not in lines:
        log = done.stderr.decode(errors="replace").splitlines()
        log.append(f"{len(rows)} of {frames} frames read back, size as asked: {size in lines}")
        raise _encode_error(path, done.returncode, log)


# What went wrong, for the user.


def _encode_error(target: Path, status: int, log: Iterable[str]) -> FileError:
    """Tell a full disk from any other failure of ffmpeg."""
    tail = [line for line in log if line][-5:]
    details = {"status": status, "stderr": tail}
    folder, why = target.parent, " | ".join(tail) or "it said nothing"
    full = status < 0 and -status == getattr(signal, "SIGXFSZ", None)
    full |= any(word in line for word in FULL_WORDS for line in tail)
    with contextlib.suppress(OSError):  # the folder itself may be gone
        full |= shutil.disk_usage(folder).free < SPARE_BYTES
    if full:
        hint = "free some space, or choose another disk with -o; then decode the saved latents"
        message = f"{folder} ran full while the video was written"
        why = tail[-1] if tail else why  # the lines before say the same
        return FileError("E_DISK_FULL", message, why=why, hint=hint, details=details)
    end = f"was ended by signal {-status}" if status < 0 else f"failed with status {status}"
    hint = "decode the saved latents again; `svgen doctor` checks ffmpeg"
    return FileError("E_ENCODE", f"ffmpeg {end}", why=why, hint=hint, details=details)


def _no_ffmpeg(reason: str) -> MachineError:
    return MachineError(
        "E_LIBRARY",
        f"ffmpeg cannot be started: {reason}",
        why="svgen writes MP4 files with the ffmpeg program of imageio-ffmpeg",
        hint="pip install --force-reinstall imageio-ffmpeg, or set IMAGEIO_FFMPEG_EXE",
    )
