"""Recipes in MP4 files: every prompt comes back, and other files are refused."""

import json
import os
import subprocess

import pytest

from svgen.errors import FileError, UsageError
from svgen.recipe import RECIPE_BYTES_MAX, read_recipe
from svgen.video import ffmpeg_exe
from tests.mp4 import read_mp4
from tests.videos import recipe, write

PROMPTS = [
    "a cat",
    "猫が波に乗る 🐈 è́ \u202e right to left",
    "quotes \" ' ` and = ; # \\ \\\\ {} % $HOME",
    "lines\nof\r\nall\ttypes\u2028\x00\x1b[31m",
    ";FFMETADATA1\n[CHAPTER]\ncomment=no",
    "a lone surrogate \ud800",
    "long " * 60_000,
]


@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
def test_recipe_comes_back(tmp_path, prompt):
    path = tmp_path / "video.mp4"
    write(path, recipe=recipe(prompt))
    assert read_recipe(path) == recipe(prompt)
    assert json.loads(read_mp4(path).comment) == recipe(prompt)


def test_recipe_survives_a_copy_by_ffmpeg(tmp_path):
    path, copy = tmp_path / "video.mp4", tmp_path / "copy.mp4"
    write(path, recipe=recipe(PROMPTS[2]))
    command = [ffmpeg_exe(), "-v", "error", "-nostdin", "-i", str(path), "-c", "copy", str(copy)]
    subprocess.run(command, check=True)
    assert read_recipe(copy) == recipe(PROMPTS[2])


def atom(name, body):
    return (len(body) + 8).to_bytes(4, "big") + name + body


def commented(comment):
    """The least file that has a comment."""
    data = atom(b"\xa9cmt", atom(b"data", bytes(8) + comment))
    meta = atom(b"meta", bytes(4) + atom(b"ilst", data))
    return atom(b"ftyp", b"isom") + atom(b"moov", atom(b"udta", meta))


def test_recipe_is_read_from_the_least_file(tmp_path):
    path = tmp_path / "video.mp4"
    path.write_bytes(commented(json.dumps(recipe()).encode()))
    assert read_recipe(path) == recipe()


GOOD = commented(json.dumps(recipe()).encode())
NO_RECIPES = {
    "empty": b"",
    "text": b"not a video at all, but long enough to hold an atom",
    "no comment": atom(b"ftyp", b"isom") + atom(b"moov", b""),
    "not JSON": commented(b"made with another program"),
    "other JSON": commented(b'{"prompt": "a cat"}'),
    "a list": commented(b'["svgen", "request"]'),
    "request is text": commented(b'{"svgen": "0.1.0", "request": "a cat"}'),
    "not UTF-8": commented(b'{"svgen": "\xff", "request": {}}'),
    "deep": commented(b"[" * 200_000),
    "huge number": commented(b'{"svgen": "1", "request": {"seed": ' + b"9" * 9999 + b"}}"),
    "size zero": bytes(4) + b"free" + GOOD,
    "size past the end": (2**31).to_bytes(4, "big") + b"moov" + GOOD,
    "huge 64-bit size": b"\0\0\0\1moov" + b"\xff" * 8 + GOOD,
    "too long": commented(b" " * (RECIPE_BYTES_MAX + 1)),
    "many atoms": atom(b"free", b"") * 70_000 + GOOD,
} | {f"cut at {size}": GOOD[:size] for size in range(1, len(GOOD) - 1, 13)}


@pytest.mark.parametrize("data", NO_RECIPES.values(), ids=NO_RECIPES.keys())
def test_recipe_is_refused_when_there_is_none(tmp_path, data):
    path = tmp_path / "video.mp4"
    path.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        read_recipe(path)
    assert caught.value.code == "E_RECIPE"


def test_recipe_of_a_missing_file(tmp_path):
    for path in (tmp_path / "none.mp4", tmp_path):
        with pytest.raises(FileError) as caught:
            read_recipe(path)
        assert caught.value.code == "E_READ"


def test_recipe_must_be_one(tmp_path):
    for wrong in ({}, {"svgen": 1, "request": {}}, {**recipe(), "nan": float("nan")}):
        with pytest.raises(ValueError):
            write(tmp_path / "video.mp4", recipe=wrong)
    assert not os.listdir(tmp_path)
