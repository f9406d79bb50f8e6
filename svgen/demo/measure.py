"""Say what a video shows by measuring its pixels, with no knowledge of the prompt.

The background is a plane of colour through most pixels, the object what differs from it by more
than half of the greatest difference; its motion follows from where the object is and how large in
each frame.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from svgen.demo.scenes import BACKGROUNDS, COLORS, SIZES

UNCLEAR = "unclear"  # the answer where none of the words fits
SIDE_PX = 64  # frames are averaged down to about this width, which takes noise away too
LIT = 80.0  # most that light changes a background, in RGB
SEEN = 45.0  # least difference from the background, in RGB, that is an object
OBJECT_SHARE = 0.003  # of a clip's pixels lie surely within the object
PRESENT_SHARE = 0.75  # of the frames must show the object
# All lengths are in frame widths.
STILL_RANGE = 0.08
WANDER = 0.15  # a growing or bouncing object may shift so much sideways
GROWN = 1.35  # radius of the last quarter of the clip over that of the first
SHRUNK = 0.75
NET = 0.22  # least way of a straight motion, and height of a bounce
STRAIGHT = 0.75  # least share of its path that takes a straight motion forward
BACK_AND_FORTH = 2.2  # least path of bouncing, in heights
TURN = 1.4 * np.pi  # least angle of circling
SIZE_BORDER = sum(SIZES.values()) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a video shows, in the words of `scenes`, or `UNCLEAR`."""

    color: str
    shape: str
    size: str
    motion: str
    background: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Track:
    """Where the object is in the frames that show it."""

    x: np.ndarray  # [T] middle, as all lengths in frame widths
    y: np.ndarray  # [T]
    radius: np.ndarray  # [T] of the ball of equal area


def measure(frames: np.ndarray) -> Measured:
    """Measure uint8 frames [T, height, width, 3] of one object before a plain background."""
    video = _shrink(frames)
    background = _background(video)
    difference = np.linalg.norm(video - background, axis=-1)
    contrast = np.quantile(difference, 1 - OBJECT_SHARE)
    masks = difference > max(contrast / 2, SEEN)
    masks &= _neighbors(masks) >= 3  # single pixels are noise
    shown = masks.any((1, 2))
    name = nearest(background.mean((0, 1)), BACKGROUNDS)
    if shown.mean() < PRESENT_SHARE:
        return Measured(color=UNCLEAR, shape=UNCLEAR, size=UNCLEAR, motion=UNCLEAR, background=name)
    core = masks & (_neighbors(masks) == 9)
    color = np.median(video[core if core.any() else masks], 0)
    track = _track(masks[shown])
    return Measured(
        color=nearest(color, COLORS),
        shape=_shape(masks[shown]),
        size="big" if track.radius.mean() > SIZE_BORDER else "small",
        motion=_motion(track),
        background=name,
    )


def nearest(color: np.ndarray, names: dict[str, tuple[int, int, int]]) -> str:
    """Return the name whose RGB is nearest."""
    return min(names, key=lambda name: np.linalg.norm(color - np.array(names[name])))


def _background(video: np.ndarray) -> np.ndarray:
    """Fit an evenly lit background to the pixels near the middle colour, float32 [h, w, 3]."""
    near = np.linalg.norm(video - np.median(video.reshape(-1, 3), 0), axis=-1) < LIT
    count = near.sum(0)
    mean = (video * near[..., None]).sum(0) / np.maximum(count, 1)[..., None]
    height, width = count.shape
    y, x = (axis.ravel() for axis in np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j])
    plane = np.stack([np.ones_like(x), x, y], 1)
    weight = np.sqrt(count.reshape(-1, 1))
    fit = np.linalg.lstsq(weight * plane, weight * mean.reshape(-1, 3), rcond=None)[0]
    return (plane @ fit).reshape(height, width, 3).clip(0, 255).astype(np.float32)


def _shrink(frames: np.ndarray) -> np.ndarray:
    """Average blocks of pixels, float32 [T, about 64, about 64, 3]."""
    time, height, width, _ = frames.shape
    step = max(1, min(height, width) // SIDE_PX)
    rows, columns = height // step, width // step
    whole = frames[:, : rows * step, : columns * step].astype(np.float32)
    return whole.reshape(time, rows, step, columns, step, 3).mean((2, 4))


def _neighbors(masks: np.ndarray) -> np.ndarray:
    """Count the set pixels of each 3 x 3 neighbourhood; those outside count as the edge does."""
    height, width = masks.shape[1:]
    padded = np.pad(masks.astype(np.uint8), ((0, 0), (1, 1), (1, 1)), mode="edge")
    rows = sum(padded[:, dy : dy + height] for dy in range(3))
    return sum(rows[:, :, dx : dx + width] for dx in range(3))


def _track(masks: np.ndarray) -> Track:
    width = masks.shape[2]
    places = [np.median(np.nonzero(mask), 1) / width for mask in masks]
    y, x = _smooth(np.array(places)).T
    radius = np.sqrt(masks.sum((1, 2)) / np.pi) / width
    return Track(x=x, y=y, radius=radius)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Average each frame with its two neighbours, [T, ...]."""
    padded = np.concatenate([values[:1], values, values[-1:]])
    return (padded[:-2] + padded[1:-1] + padded[2:]) / 3


def _motion(track: Track) -> str:
    wide, high = np.ptp(track.x), np.ptp(track.y)
    quarter = max(1, len(track.radius) // 4)
    growth = track.radius[-quarter:].mean() / track.radius[:quarter].mean()
    if growth > GROWN:
        return "growing" if max(wide, high) < WANDER else UNCLEAR
    if growth < SHRUNK:
        return UNCLEAR
    if max(wide, high) < STILL_RANGE:
        return "still"
    return _straight(track) or _turning(track) or UNCLEAR


def _straight(track: Track) -> str | None:
    """Return the direction of a motion that goes one way and little to the sides."""
    net = np.array([_net(track.x), _net(track.y)])
    along = int(abs(net[1]) > abs(net[0]))
    path, side = _path(track.x), abs(net[1])
    if along:
        path, side = _path(track.y), abs(net[0])
    way = abs(net[along])
    if way < NET or side > way / 2 or way < STRAIGHT * path:
        return None
    return (("left", "right"), ("up", "down"))[along][int(net[along] > 0)]


def _turning(track: Track) -> str | None:
    """Tell an orbit, and going up and down in one place, from anything else."""
    wide, high = np.ptp(track.x), np.ptp(track.y)
    if high > NET and wide < WANDER:
        return "bouncing" if _path(track.y) > BACK_AND_FORTH * high else None
    middle = complex(track.x.max() + track.x.min(), track.y.max() + track.y.min()) / 2
    arms = track.x + 1j * track.y - middle
    turned = abs(np.sum(np.angle(arms[1:] * arms[:-1].conj())))
    is_round = min(wide, high) > max(wide, high) / 2 and abs(arms).min() > abs(arms).max() / 3
    return "circling" if turned > TURN and is_round and wide > NET else None


def _net(places: np.ndarray) -> float:
    return float(places[-1] - places[0])


def _path(places: np.ndarray) -> float:
    return float(abs(np.diff(places)).sum())


def _shape(masks: np.ndarray) -> str:
    """Tell the shapes apart by how much of their box they fill, and how much of its lower half."""
    fill, low = np.median(list(_boxes(masks)), 0)
    if low > 0.62:
        return "triangle"
    if fill > 0.89:
        return "square"
    return "ball" if fill > 0.62 else "star"


def _boxes(masks: np.ndarray) -> Iterator[tuple[float, float]]:
    """Yield for each frame the filled share of the object's box, and its lower half's share."""
    for mask in masks:
        y, x = np.nonzero(mask)
        area = (np.ptp(y) + 1) * (np.ptp(x) + 1)
        middle = (y.min() + y.max()) / 2
        yield len(y) / area, ((y > middle).sum() + (y == middle).sum() / 2) / len(y)
