"""What a tokenizer.json may be made of: the parts of T5's, none of which makes text grow."""

import base64
import json

import pytest

from svgen.errors import DownloadError
from svgen.tokenizer import Tokenizer
from svgen.tokenizer_parts import MAX_ENTRY_BYTES, check_parts
from tests.helpers import ROOT

TINY = json.loads((ROOT / "tests/golden/tiny/tokenizer/tokenizer.json").read_text())


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*parts):
    return {"normalizer": {"type": "Sequence", "normalizers": list(parts)}}


def charsmap(*texts):
    """A character map with an empty trie and these texts."""
    blob = (0).to_bytes(4, "little") + b"".join(text + b"\0" for text in texts)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}


def template(*single):
    return {"post_processor": {"type": "TemplateProcessing", "single": list(single)}}


TEXT, END = {"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "</s>"}}
GOOD = {
    "as converted": sequence(
        charsmap(b"a", b"x" * MAX_ENTRY_BYTES),
        {"type": "Strip", "strip_left": False, "strip_right": True},
        replace({"Regex": " {2,}"}, "▁"),
    ),
    "white space": sequence(replace({"Regex": "\\s+"}, " "), replace({"String": "ab"}, "")),
    "class": sequence(replace({"Regex": "[ \t]{2,9}"}, " ")),
    "template": template(TEXT, END),
    "none": {"normalizer": None, "pre_tokenizer": None, "post_processor": None},
}
BAD = {
    "doubling": sequence(*[replace({"String": "a"}, "aa")] * 30),
    "growing": sequence(replace({"String": "a"}, "b" * 1000)),
    "between": sequence(replace({"String": ""}, "b")),
    "empty match": sequence(replace({"Regex": "x*"}, "b")),
    "none or more": sequence(replace({"Regex": "x{0,9}"}, "b")),
    "backtracking": sequence(replace({"Regex": "^(a+)+$"}, "b")),
    "no pattern": sequence(replace(None, "b")),
    "many": sequence(*[replace({"String": "a"}, "b")] * 40),
    "twice": sequence({"type": "NFKD"}, {"type": "NFKD"}),
    "nested": sequence({"type": "Sequence", "normalizers": []}),
    "map": sequence(charsmap(b"x" * (MAX_ENTRY_BYTES + 1))),
    "no map": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "?"}},
    "before": {"normalizer": {"type": "Prepend", "prepend": "x" * 1000}},
    "split": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}}},
    "bytes": {"pre_tokenizer": {"type": "ByteLevel"}},
    "unknown": {"normalizer": {"type": "Other"}},
    "no type": {"normalizer": {}},
    "type": {"normalizer": {"type": ["Strip"]}},
    "text": {"normalizer": "NFC"},
    "list": {"normalizer": {"type": "Sequence", "normalizers": "NFC"}},
    "text twice": template(TEXT, TEXT),
    "no text": template(END),
    "long": template(TEXT, *[END] * 20),
    "model": {"model": {"type": "BPE", "vocab": {}, "merges": []}},
    "no model": {"model": None},
}


@pytest.mark.parametrize("name", GOOD)
def test_parts_of_t5_pass(name):
    check_parts(json.dumps(TINY | GOOD[name]).encode())


@pytest.mark.parametrize("name", BAD)
def test_other_parts_are_refused_before_the_library_sees_them(tmp_path, monkeypatch, name):
    def fail(*_):
        raise AssertionError("the library builds it")

    monkeypatch.setattr("svgen.tokenizer.tokenizers.Tokenizer.from_buffer", fail)
    path = tmp_path / "tokenizer/tokenizer.json"
    path.parent.mkdir()
    path.write_text(json.dumps(TINY | BAD[name]))
    with pytest.raises(DownloadError, match="is not a usable tokenizer") as caught:
        Tokenizer.load(tmp_path)
    assert caught.value.code == "E_CHECKPOINT" and caught.value.why


def test_id_that_the_text_encoder_lacks_is_refused(tmp_path):
    """The library puts ids of a template into the text without looking at its vocabulary."""
    content = json.loads(json.dumps(TINY))
    content["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<x>", "type_id": 0}})
    special = content["post_processor"]["special_tokens"]
    special["<x>"] = {"id": "<x>", "ids": [2**32 - 1], "tokens": ["<x>"]}
    path = tmp_path / "tokenizer/tokenizer.json"
    path.parent.mkdir()
    path.write_text(json.dumps(content))
    with pytest.raises(DownloadError) as caught:
        Tokenizer.load(tmp_path, vocabulary=64).encode("a", truncate=False)
    assert f"the id {2**32 - 1}" in caught.value.why
