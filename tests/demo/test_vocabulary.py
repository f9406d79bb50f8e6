"""The small model's tokenizer, through the same loader as the big ones'."""

import json

import numpy as np
import pytest

from svgen.demo.captions import caption, words
from svgen.demo.scenes import sample
from svgen.demo.vocabulary import SPECIAL, TOKENIZER_CLASS, pieces, write_tokenizer
from svgen.tokenizer import Tokenizer

UNKNOWN = SPECIAL.index("<unk>")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write_tokenizer(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return Tokenizer.load(checkpoint, vocabulary=len(pieces()))


def encode(tokenizer, text):
    return tokenizer.encode(text, truncate=False, allow_empty=True).ids.tolist()


def texts(count):
    rng = np.random.default_rng(0)
    return [caption(sample(rng), rng, held_out=number % 2 == 1) for number in range(count)]


def test_vocabulary_is_small_and_without_doubles():
    assert len(set(pieces())) == len(pieces()) < 400
    assert pieces()[:3] == ["<pad>", "</s>", "<unk>"]


def test_every_word_is_one_token_of_its_own(tokenizer):
    ids = [encode(tokenizer, word) for word in words()]
    assert all(len(one) == 2 and one[1] == 1 for one in ids)
    assert len({one[0] for one in ids}) == len(words())


def test_caption_has_one_token_for_each_word_and_mark(tokenizer):
    for text in texts(200):
        marks = text.count(",") + text.count(".")
        assert len(encode(tokenizer, text)) == len(text.split()) + marks + 1


def test_case_makes_no_difference(tokenizer):
    assert encode(tokenizer, "A RED Ball") == encode(tokenizer, "a red ball")
    assert encode(tokenizer, "a red ball") != encode(tokenizer, "a blue ball")


def test_other_words_are_spelled_and_foreign_letters_unknown(tokenizer):
    spelled = encode(tokenizer, "zebra 42")
    assert UNKNOWN not in spelled and len(spelled) > 7
    assert UNKNOWN in encode(tokenizer, "漢")
    assert encode(tokenizer, "") == [1]


def test_files_are_the_same_each_time(checkpoint, tmp_path):
    write_tokenizer(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (checkpoint / "tokenizer" / path.name).read_bytes()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == TOKENIZER_CLASS


@pytest.mark.parity
@pytest.mark.parametrize("named", ["AutoTokenizer", TOKENIZER_CLASS])
def test_ids_are_those_of_transformers(named, checkpoint, tokenizer):
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, named).from_pretrained(checkpoint / "tokenizer")
    special = ["<pad>", "</s>", "<unk>"]
    assert [theirs.pad_token, theirs.eos_token, theirs.unk_token] == special
    for text in ["", "A RED Ball, moving to the Right!", "zebra 42", "漢 é", *texts(100)]:
        assert theirs(text).input_ids == encode(tokenizer, text)
