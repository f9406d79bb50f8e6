"""Captions: they name what the scene shows, vary, and keep some phrasings for tests."""

import re
from dataclasses import replace

import numpy as np
import pytest

from svgen.demo import captions
from svgen.demo.captions import HELD_OUT_PATTERNS, PATTERNS, caption, phrases_of, words
from svgen.demo.scenes import MOTIONS, sample
from tests.demo.test_scenes import SCENE


def captions_of(scene, count, *, held_out=False):
    rng = np.random.default_rng(0)
    return [caption(scene, rng, held_out=held_out) for _ in range(count)]


def test_captions_repeat_when_the_seed_does_and_vary_otherwise():
    assert captions_of(SCENE, 20) == captions_of(SCENE, 20)
    assert len(set(captions_of(SCENE, 200))) > 150


def test_canonical_phrase_is_one_of_training():
    assert "a red ball moving to the right on a white background" in captions_of(SCENE, 20_000)


def test_captions_name_every_attribute_but_sometimes_the_size():
    texts = [text.lower() for text in captions_of(SCENE, 300)]
    for pattern in ("red", "ball|circle", "right|rightwards", "white"):
        assert all(re.search(rf"\b({pattern})\b", text) for text in texts)
    assert 100 < sum(bool(re.search("small|little|tiny", text)) for text in texts) < 200


def test_article_fits_the_word_that_follows():
    texts = captions_of(replace(SCENE, color="orange"), 200)
    found = {pair.lower() for text in texts for pair in re.findall(r"\b(?:a|an) \w+", text, re.I)}
    assert {"an orange", "a small"} <= found
    assert not {pair for pair in found if pair.startswith("an ") != (pair.split()[1][0] in "aeiou")}


def test_some_captions_begin_with_a_capital_or_end_with_a_period():
    texts = captions_of(SCENE, 200)
    assert 20 < sum(text[0].isupper() for text in texts) < 100
    assert 20 < sum(text.endswith(".") for text in texts) < 100


def skeleton(text):
    """A caption without its thing, motion and place: what is left is the pattern."""
    text = text.lower().removesuffix(".")
    text = re.sub(r"\ba red ball", "{thing}", text)
    text = re.sub(r"\bmoving to the right", "{moving}", text)
    text = re.sub(r"\bmoves to the right", "{moves}", text)
    return re.sub(r"\bon a white background", "{place}", text)


def test_held_out_phrasings_never_occur_in_training(monkeypatch):
    monkeypatch.setattr(captions, "PLACES", ("on a {} background",))
    monkeypatch.setattr(captions, "THINGS", {})
    monkeypatch.setattr(captions, "SIZE_SHARE", 0.0)
    only = (("moving to the right", "moves to the right"),)
    monkeypatch.setattr(captions, "phrases_of", lambda motion: only)
    seen = {skeleton(text) for text in captions_of(SCENE, 500)}
    kept = {skeleton(text) for text in captions_of(SCENE, 500, held_out=True)}
    assert seen == set(PATTERNS) and kept == set(HELD_OUT_PATTERNS)
    assert not seen & kept


def test_held_out_phrasings_use_no_word_that_training_lacks():
    rng = np.random.default_rng(1)
    trained, tested = (
        {
            word
            for _ in range(4000)
            for word in re.findall("[a-z]+", caption(sample(rng), rng, held_out=held_out).lower())
        }
        for held_out in (False, True)
    )
    assert tested <= trained == set(words())


@pytest.mark.parametrize("motion", MOTIONS)
def test_phrases_of_one_motion_never_mean_another(motion):
    own = set(phrases_of(motion))
    assert own
    assert not own & {pair for other in MOTIONS if other != motion for pair in phrases_of(other)}
