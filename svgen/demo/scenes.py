"""Simple scenes and their frames: one plain object moves in one way before one plain background.

Lengths are in frame widths, time runs from 0 to 1 over the clip, y points down:

    margin     free range of the centre     margin
    |<-->|<------------------------------->|<-->|
              o ------> travel

A scene's `x` and `y` say where in its free range the path lies, so that every scene stays inside.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

COLORS = {
    "red": (220, 35, 35),
    "green": (35, 165, 60),
    "blue": (35, 80, 230),
    "yellow": (250, 225, 40),
    "orange": (250, 130, 20),
    "purple": (135, 30, 180),
    "black": (15, 15, 15),
    "white": (245, 245, 245),
}
BACKGROUNDS = {
    "white": (245, 245, 245),
    "black": (15, 15, 15),
    "gray": (140, 140, 140),
    "cyan": (160, 220, 250),
    "pink": (250, 180, 205),
    "navy": (20, 25, 90),
}
SHAPES = ("ball", "square", "triangle", "star")
SIZES = {"small": 0.12, "big": 0.18}  # radius of the ball; the other shapes have about its area
MOTIONS = ("right", "left", "up", "down", "still", "growing", "bouncing", "circling")

CONTRAST = 90.0  # least distance in RGB between an object and its background
MARGIN = 0.03  # between an object and the frame's edge
EDGE_PX = 3.0  # over which an object's edge fades at 128 pixels: few numbers describe such edges
REACH = {"ball": 1.0, "square": 0.89, "triangle": 1.38, "star": 1.37}  # from the centre, in radii
DIRECTIONS = {"right": (1.0, 0.0), "left": (-1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}
TRAVEL = (0.38, 0.44)  # of the four straight motions
GROWTH = (0.65, 1.6)  # first and last radius, in radii of the size
BOUNCE = 0.34  # height
BOUNCES = 2  # a clip
ORBIT = 0.21  # radius of the one clockwise turn
MIDDLE = 0.3  # paths lie in this middle part of their free range: they are learnt much sooner
SPREAD = 0.15  # of the phases, in turns
LIGHT = (12.0, 24.0)  # how much brighter than the middle the right and the upper edge are, in RGB
HELD_OUT_SHARE = 0.12


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What a clip shows, in words and in numbers from 0 to 1."""

    color: str
    shape: str
    size: str
    motion: str
    background: str
    x: float  # place of the path within its free range
    y: float
    pace: float  # from the shortest to the longest travel
    phase: float  # of bouncing and circling: where the object is first


def render(scene: Scene, *, frames: int = 33, size_px: int = 128) -> np.ndarray:
    """Draw a scene as uint8 frames [T, size_px, size_px, 3] with smooth edges."""
    time = np.linspace(0.0, 1.0, frames)
    centers, radii = centers_of(scene, time) * size_px, radii_of(scene, time) * size_px
    distance, edge = DISTANCES[scene.shape], np.float32(EDGE_PX * size_px / 128)
    color = np.array(COLORS[scene.color], np.float32)
    stage = lit_background(scene, size_px)
    video = np.empty((frames, size_px, size_px, 3), np.uint8)
    video[:] = np.rint(stage)
    for picture, center, radius in zip(video, centers, radii, strict=True):
        reach = REACH[scene.shape] * radius + edge
        x0, y0 = np.floor(center - reach).astype(int).clip(0)
        x1, y1 = np.ceil(center + reach).astype(int).clip(max=size_px)
        x = np.arange(x0, x1, dtype=np.float32)[None, :] + np.float32(0.5 - center[0])
        y = np.arange(y0, y1, dtype=np.float32)[:, None] + np.float32(0.5 - center[1])
        coverage = (0.5 - distance(x, y, np.float32(radius)) / edge).clip(0.0, 1.0)[:, :, None]
        behind = stage[y0:y1, x0:x1]
        picture[y0:y1, x0:x1] = np.rint(behind + coverage * (color - behind))
    return video


def sample(rng: np.random.Generator, *, held_out: bool = False) -> Scene:
    """Draw a scene, all allowed combinations being equally likely.

    Held-out combinations of colour, shape, motion and background never come with
    `held_out=False`, and no others with `held_out=True`.
    """
    while True:
        words = {
            "color": _choose(rng, COLORS),
            "shape": _choose(rng, SHAPES),
            "motion": _choose(rng, MOTIONS),
            "background": _choose(rng, BACKGROUNDS),
        }
        if has_contrast(words["color"], words["background"]) and is_held_out(**words) == held_out:
            break
    x, y, pace, phase = (float(value) for value in rng.random(4))
    x, y = (0.5 + MIDDLE * (value - 0.5) for value in (x, y))
    phase = SPREAD * (phase - 0.5) % 1.0
    return Scene(**words, size=_choose(rng, SIZES), x=x, y=y, pace=pace, phase=phase)


def has_contrast(color: str, background: str) -> bool:
    """Whether an object of this colour is clearly seen before this background."""
    difference = np.subtract(COLORS[color], BACKGROUNDS[background])
    return bool(np.linalg.norm(difference) >= CONTRAST)


def is_held_out(*, color: str, shape: str, motion: str, background: str) -> bool:
    """Whether training never sees this combination: a fixed share, the same on every machine."""
    key = " ".join((color, shape, motion, background)).encode()
    number = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big")
    return number < HELD_OUT_SHARE * 2**32


def centers_of(scene: Scene, time: np.ndarray) -> np.ndarray:
    """Return the object's centre at each time, [T, 2] as x and y."""
    path = _path(scene, time)
    reach = MARGIN + REACH[scene.shape] * radii_of(scene, np.linspace(0.0, 1.0, 2)).max()
    extent = _path(scene, np.linspace(0.0, 1.0, 201))  # of the whole path, whatever the frames
    low, high = reach - extent.min(0), 1.0 - reach - extent.max(0)
    return path + low + (high - low) * np.array([scene.x, scene.y])


def radii_of(scene: Scene, time: np.ndarray) -> np.ndarray:
    """Return the object's radius at each time, [T]."""
    first, last = GROWTH if scene.motion == "growing" else (1.0, 1.0)
    return SIZES[scene.size] * (first + (last - first) * time)


def _path(scene: Scene, time: np.ndarray) -> np.ndarray:
    """Return the way from an origin of no meaning, [T, 2]."""
    if scene.motion in DIRECTIONS:
        travel = TRAVEL[0] + (TRAVEL[1] - TRAVEL[0]) * scene.pace
        return travel * time[:, None] * np.array(DIRECTIONS[scene.motion])
    if scene.motion == "bouncing":
        part = (BOUNCES * time + scene.phase) % 1.0
        height = 4.0 * BOUNCE * part * (1.0 - part)
        return np.stack([np.zeros_like(time), -height], 1)
    if scene.motion == "circling":
        angle = 2.0 * np.pi * (time + scene.phase)
        return ORBIT * np.stack([np.cos(angle), np.sin(angle)], 1)
    return np.zeros((len(time), 2))


def _ball(x: np.ndarray, y: np.ndarray, radius: np.float32) -> np.ndarray:
    return np.hypot(x, y) - radius


def _square(x: np.ndarray, y: np.ndarray, radius: np.float32) -> np.ndarray:
    return np.maximum(abs(x), abs(y)) - np.float32(0.886) * radius


def _triangle(x: np.ndarray, y: np.ndarray, radius: np.float32) -> np.ndarray:
    """Equilateral, point up, its middle a bit above the centroid so that it looks centred."""
    y = y - np.float32(0.15) * radius
    sides = np.float32(3**0.5 / 2) * abs(x) - np.float32(0.5) * y
    return np.maximum(sides, y) - np.float32(0.76) * radius


def _star(x: np.ndarray, y: np.ndarray, radius: np.float32) -> np.ndarray:
    """Five points, one up: the angle is folded to the line from a point to its valley."""
    fifth = np.float32(2 * np.pi / 5)
    angle = abs((np.arctan2(x, -y) + fifth / 2) % fifth - fifth / 2)
    distance = np.hypot(x, y)
    point = 1.32
    valley = 0.66 * np.exp(1j * np.pi / 5)
    normal = 1j * (point - valley) / abs(point - valley)
    side = distance * (
        np.cos(angle) * np.float32(normal.real) + np.sin(angle) * np.float32(normal.imag)
    )
    return side - np.float32(point * normal.real) * radius


DISTANCES: dict[str, Callable] = {
    "ball": _ball,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
}


def lit_background(scene: Scene, size_px: int) -> np.ndarray:
    """Light the background from the upper right, float32 [size_px, size_px, 3].

    A rotary transformer knows no absolute place: without light, an even background gives none.
    """
    across = np.linspace(-1.0, 1.0, size_px, dtype=np.float32)
    light = LIGHT[0] * across[None, :] - LIGHT[1] * across[:, None]
    color = np.array(BACKGROUNDS[scene.background], np.float32)
    return (color + light[:, :, None]).clip(0.0, 255.0).astype(np.float32)


def _choose(rng: np.random.Generator, words: dict | tuple) -> str:
    return tuple(words)[rng.integers(len(words))]
