"""What ffprobe would say of an MP4, read from its atoms and from the H.264 parameter set."""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

CONTAINERS = ("moov", "trak", "mdia", "minf", "stbl", "udta", "meta", "ilst", "\xa9cmt")
CHROMA = {0: "gray", 1: "4:2:0", 2: "4:2:2", 3: "4:4:4"}


@dataclass(frozen=True, kw_only=True)
class Mp4:
    """One video track, and the file around it."""

    order: list[str]  # top-level atoms
    width_px: int
    height_px: int
    frames: int
    fps: Fraction
    keyframes: list[int]  # counted from 1, as in the file
    profile: int
    level: int
    chroma: str
    bits: int
    full_range: bool
    stream_colours: tuple[int, int, int]  # primaries, transfer, matrix: in the H.264 stream
    atom_colours: tuple[str, int, int, int, bool]  # and in the `colr` atom, with full range
    comment: str | None


def read_mp4(path: Path) -> Mp4:
    """Read the whole file; fail on anything that svgen would not write."""
    data = path.read_bytes()
    found = dict(_walk(data, 0, len(data), ""))
    stbl = "moov/trak/mdia/minf/stbl/"
    entry = found[stbl + "stsd"][8:]
    assert entry[4:8] == b"avc1"
    boxes = dict(_atoms(entry, 8 + 78, len(entry)))
    avcc, colr = boxes["avcC"], boxes["colr"]
    sps = _parameter_set(avcc[8 : 8 + int.from_bytes(avcc[6:8])])
    stts, stsz, stss = (found.get(stbl + name) for name in ("stts", "stsz", "stss"))
    assert _ints(stts, 4)[1] == 1, "frames of several lengths"
    _, _, count, delta = _ints(stts, 4)
    assert _ints(stsz, 3)[2] == count
    comment = found.get("moov/udta/meta/ilst/\xa9cmt/data")
    return Mp4(
        order=[name for name, _ in _atoms(data, 0, len(data))],
        width_px=int.from_bytes(entry[32:34]),
        height_px=int.from_bytes(entry[34:36]),
        frames=count,
        fps=Fraction(int.from_bytes(found["moov/trak/mdia/mdhd"][12:16]), delta),
        keyframes=_ints(stss, 2 + _ints(stss, 2)[1])[2:] if stss else list(range(1, count + 1)),
        atom_colours=(colr[:4].decode(), *_shorts(colr[4:10]), bool(colr[10] & 128)),
        comment=None if comment is None else comment[8:].decode(),
        **sps,
    )


def _atoms(data: bytes, start: int, end: int) -> Iterator[tuple[str, bytes]]:
    while start < end:
        size = int.from_bytes(data[start : start + 4])
        assert 8 <= size <= end - start, "a broken or 64-bit atom"
        yield data[start + 4 : start + 8].decode("latin1"), data[start + 8 : start + size]
        start += size


def _walk(data: bytes, start: int, end: int, parent: str) -> Iterator[tuple[str, bytes]]:
    for name, body in _atoms(data, start, end):
        yield parent + name, body
        if name in CONTAINERS:
            yield from _walk(body, 4 if name == "meta" else 0, len(body), f"{parent}{name}/")


def _ints(body: bytes, count: int) -> list[int]:
    return [int.from_bytes(body[4 * i : 4 * i + 4]) for i in range(count)]


def _shorts(body: bytes) -> list[int]:
    return [int.from_bytes(body[i : i + 2]) for i in range(0, len(body), 2)]


class _Bits:
    """The bits of a NAL unit, without its emulation prevention."""

    def __init__(self, unit: bytes):
        unit = unit.replace(b"\0\0\3", b"\0\0")
        self.bits, self.at = "".join(f"{byte:08b}" for byte in unit), 0

    def take(self, count: int) -> int:
        self.at += count
        return int(self.bits[self.at - count : self.at], 2)

    def golomb(self) -> int:
        zeros = self.bits.index("1", self.at) - self.at
        self.at += zeros
        return self.take(zeros + 1) - 1


def _parameter_set(unit: bytes) -> dict:
    """ITU-T H.264, 7.3.2.1.1 and E.1.1, as far as the colours."""
    bits = _Bits(unit[1:])
    profile, _, level = bits.take(8), bits.take(8), bits.take(8)
    bits.golomb()
    assert profile == 100, "not High profile"
    chroma, luma_bits, chroma_bits = bits.golomb(), 8 + bits.golomb(), 8 + bits.golomb()
    assert luma_bits == chroma_bits
    assert bits.take(2) == 0, "lossless, or scaling lists"
    bits.golomb()
    order = bits.golomb()
    if order == 0:
        bits.golomb()
    assert order in (0, 2)
    bits.golomb()
    bits.take(1)
    bits.golomb(), bits.golomb()
    assert bits.take(1) == 1, "interlaced"
    bits.take(1)
    if bits.take(1):  # cropping to the picture
        [bits.golomb() for _ in range(4)]
    assert bits.take(1), "no VUI"
    if bits.take(1) and bits.take(8) == 255:  # aspect ratio
        bits.take(32)
    if bits.take(1):  # overscan
        bits.take(1)
    assert bits.take(1), "no video signal type"
    bits.take(3)
    full_range = bool(bits.take(1))
    assert bits.take(1), "no colour description"
    return {
        "profile": profile,
        "level": level,
        "chroma": CHROMA[chroma],
        "bits": luma_bits,
        "full_range": full_range,
        "stream_colours": (bits.take(8), bits.take(8), bits.take(8)),
    }
