"""Captions of scenes in several natural phrasings, and the words that they are made of.

pattern:  "{place}, {thing} {moves}"
caption:  "on a black background, a small blue star stays still"
"""

import re

import numpy as np

from svgen.demo.scenes import BACKGROUNDS, COLORS, MOTIONS, Scene

PATTERNS = (  # seen in training; the first twice as often
    "{thing} {moving} {place}",
    "{thing} {moving} {place}",
    "{thing} {moves} {place}",
    "{thing} is {moving} {place}",
    "{place}, {thing} {moves}",
    "{place}, {thing} is {moving}",
    "{thing} {place}, {moving}",
    "{thing} that {moves} {place}",
    "a video of {thing} {moving} {place}",
    "there is {thing} {moving} {place}",
)
HELD_OUT_PATTERNS = (  # for tests only: the same words in other orders
    "{thing} {place} {moves}",
    "{moving} {place}, {thing}",
    "a video of {thing} {place}, {moving}",
    "{place} there is {thing} {moving}",
    "{thing} {place} is {moving}",
    "{place}, {thing} that {moves}",
    "there is {thing} that {moves} {place}",
)
THINGS = {
    "ball": ("ball", "ball", "circle"),
    "square": ("square", "square", "box"),
    "triangle": ("triangle",),
    "star": ("star",),
}
COLOR_WORDS = {"purple": ("purple", "purple", "violet")}
SIZE_WORDS = {"small": ("small", "small", "little", "tiny"), "big": ("big", "big", "large", "huge")}
SIZE_SHARE = 0.5  # of the captions name the size
PLACES = (
    "on a {} background",
    "on a {} background",
    "on a plain {} background",
    "against a {} background",
    "in front of a {} background",
    "over a {} background",
    "on {}",
    "over {}",
)
BACKGROUND_WORDS = {
    "gray": ("gray", "gray", "grey"),
    "cyan": ("cyan", "cyan", "light blue", "sky blue"),
    "navy": ("navy", "navy", "dark blue", "navy blue"),
}
TRAVELING = (("moving", "moves"), ("moving", "moves"), ("sliding", "slides"), ("going", "goes"))
WAYS = {
    "right": ("to the right", "to the right", "right", "rightwards", "from left to right"),
    "left": ("to the left", "to the left", "left", "leftwards", "from right to left"),
    "up": ("up", "up", "upwards", "to the top"),
    "down": ("down", "down", "downwards", "to the bottom"),
}
VERBS = {
    "up": (("rising", "rises"),),
    "down": (("falling", "falls"),),
    "still": (("staying still", "stays still"), ("standing still", "stands still")),
    "growing": (
        ("growing", "grows"),
        ("growing", "grows"),
        ("getting bigger", "gets bigger"),
        ("growing larger", "grows larger"),
    ),
    "bouncing": (
        ("bouncing", "bounces"),
        ("bouncing", "bounces"),
        ("bouncing up and down", "bounces up and down"),
    ),
    "circling": (
        ("circling", "circles"),
        ("circling around", "circles around"),
        ("moving in circles", "moves in circles"),
        ("going around in circles", "goes around in circles"),
    ),
}
ARTICLES = ("a", "an")
CAPITAL_SHARE, PERIOD_SHARE = 0.25, 0.25


def caption(scene: Scene, rng: np.random.Generator, *, held_out: bool = False) -> str:
    """Say what a scene shows, in one of the phrasings of training or of those held out."""
    moving, moves = _pick(rng, phrases_of(scene.motion))
    place = _pick(rng, PLACES).format(_word(rng, BACKGROUND_WORDS, scene.background))
    pattern = _pick(rng, HELD_OUT_PATTERNS if held_out else PATTERNS)
    text = pattern.format(thing=_thing(scene, rng), moving=moving, moves=moves, place=place)
    if rng.random() < CAPITAL_SHARE:
        text = text[0].upper() + text[1:]
    return text + "." if rng.random() < PERIOD_SHARE else text


def phrases_of(motion: str) -> tuple[tuple[str, str], ...]:
    """Return the phrasings of a motion, each as "moving ..." and "moves ..."."""
    ways = WAYS.get(motion, ())
    led = [(f"{ing} {way}", f"{s} {way}") for ing, s in TRAVELING for way in ways]
    return (*led, *VERBS.get(motion, ()))


def words() -> list[str]:
    """Return every word that a caption can hold, in lower case and sorted."""
    texts = [*ARTICLES, *PATTERNS, *HELD_OUT_PATTERNS, *PLACES, *COLORS, *BACKGROUNDS]
    for table in (THINGS, COLOR_WORDS, SIZE_WORDS, BACKGROUND_WORDS):
        texts += [text for synonyms in table.values() for text in synonyms]
    texts += [text for motion in MOTIONS for pair in phrases_of(motion) for text in pair]
    return sorted(set(re.findall(r"[a-z]+", re.sub(r"\{.*?\}", " ", " ".join(texts)))))


def _thing(scene: Scene, rng: np.random.Generator) -> str:
    named = [_word(rng, COLOR_WORDS, scene.color), _word(rng, THINGS, scene.shape)]
    if rng.random() < SIZE_SHARE:
        named.insert(0, _pick(rng, SIZE_WORDS[scene.size]))
    return " ".join([ARTICLES[named[0][0] in "aeiou"], *named])


def _word(rng: np.random.Generator, synonyms: dict[str, tuple[str, ...]], word: str) -> str:
    return _pick(rng, synonyms.get(word, (word,)))


def _pick(rng: np.random.Generator, choices: tuple) -> str | tuple[str, str]:
    return choices[rng.integers(len(choices))]
