"""Output names: templates, what may stand in them, and names that every file system takes."""

import os
from dataclasses import replace
from datetime import date

import pytest

from svgen.cli.naming import DEVICES, NAME_BYTES, output_path
from svgen.config import Request
from svgen.errors import UsageError

TODAY = date(2026, 3, 4)
REQUEST = Request(
    prompt="A cat, surfing a wave at sunset!",
    model="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    width_px=832,
    height_px=480,
    frames=81,
    fps=16,
    steps=50,
    guidance=5.0,
    shift=3.0,
    seed=42,
    preset="480p-dense",
)
HASH = REQUEST.fingerprint[:8]


def named(spec, *, index=0, **changes):
    return str(output_path(spec, replace(REQUEST, **changes), index=index, today=TODAY))


def slug(prompt):
    return named("{slug}", prompt=prompt).removesuffix(".mp4")


def problem(spec, **changes):
    with pytest.raises(UsageError) as caught:
        named(spec, **changes)
    assert caught.value.code == "E_OUTPUT_NAME" and caught.value.why and caught.value.hint
    return caught.value


def test_default_name():
    assert named(None) == f"svgen-42-{HASH}.mp4"


@pytest.mark.parametrize(
    "spec, name",
    [
        ("x.mp4", "x.mp4"),
        ("x", "x.mp4"),
        ("X.MP4", "X.MP4"),
        ("take1.5", "take1.5.mp4"),
        ("v2.mp4.mp4", "v2.mp4.mp4"),
        ("a/b/../x.mp4", "a/b/../x.mp4"),
        ("/nowhere/x.mp4", "/nowhere/x.mp4"),
        ("a: b*?.mp4", "a: b*?.mp4"),  # what the user typed is the user's
        ("猫.mp4", "猫.mp4"),
        ("{{x}}.mp4", "{x}.mp4"),
        ("nowhere/", f"nowhere/svgen-42-{HASH}.mp4"),
        ("{date}/", f"2026-03-04/svgen-42-{HASH}.mp4"),
        ("{date}/{res}/{seed}", "2026-03-04/832x480/42.mp4"),
        ("{model}", "Wan2.1-T2V-1.3B-Diffusers.mp4"),
        ("{preset}_{frames}.mp4", "480p-dense_81.mp4"),
        ("{index}-{index:03d}-{seed:6}", "7-007-    42.mp4"),
        ("{slug}.mp4", "a-cat-surfing-a-wave-at-sunset.mp4"),
    ],
)
def test_specs(spec, name):
    assert named(spec, index=7) == name


def test_folder_that_is_there(tmp_path):
    assert named(str(tmp_path)) == f"{tmp_path}/svgen-42-{HASH}.mp4"
    (tmp_path / "a{b}.avi").mkdir()
    assert named(f"{tmp_path}/a{{b}}.avi").startswith(f"{tmp_path}/a{{b}}.avi/svgen-")


def test_folder_by_dots(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert named(".") == f"svgen-42-{HASH}.mp4"
    assert named("..") == f"../svgen-42-{HASH}.mp4"


@pytest.mark.parametrize("suffix", [".avi", ".mov", ".webm", ".gif", ".m4v"])
def test_other_suffix_is_refused(suffix):
    found = problem(f"renders/x{suffix}")
    assert suffix in found.message and ".mp4" in found.why
    assert found.hint == "-o x.mp4"


@pytest.mark.parametrize(
    "spec", ["", " ", "-", ".mp4", "nowhere/.mp4", "nowhere/..", "a\nb", "a\0"]
)
def test_spec_that_names_nothing(spec):
    problem(spec)


@pytest.mark.parametrize(
    "spec, guess",
    [
        ("{sed}", "{seed}"),
        ("{Seed}", "{seed}"),
        ("{hash}", "{hash8}"),
        ("{resolution}", "{res}"),
        ("{prompt_slug}", "{slug}"),
    ],
)
def test_unknown_field(spec, guess):
    found = problem(f"a/{spec}/x.mp4")
    assert guess in found.hint
    for name in ("model", "preset", "res", "frames", "seed", "index", "hash8", "date", "slug"):
        assert f"{{{name}}}" in found.why


@pytest.mark.parametrize(
    "spec",
    [
        "{", "}", "{seed", "{}", "{0}", "{seed.real}", "{slug[0]}", "{slug!r}", "{seed!s}",
        "{slug:9}", "{seed:999999999}", "{seed:{frames}}", "{seed:x}", "{__class__}", "{seed/x}",
    ],
)  # fmt: skip
def test_only_plain_fields(spec):
    problem(spec)


@pytest.mark.parametrize(
    "prompt, name",
    [
        ("猫が波に乗る。すごい！", "猫が波に乗る-すごい"),
        ("Ünïcödé — ДОМ", "ünïcödé-дом"),
        ("../../etc/passwd", "etc-passwd"),
        ('a/b\\c:d*e?f"g<h>i|j', "a-b-c-d-e-f-g-h-i-j"),
        ("line\none\ttwo\x00three\x1b[31m\u202e", "line-one-two-three-31m"),
        ("...", "video"),
        ("", "video"),
        ("🐈", "video"),
        ("\ud800", "video"),
        ("℀ ／", "a-c"),  # compatibility forms of a/c and of the slash
        ("con", "con_"),
        ("LPT1", "lpt1_"),
        ("console", "console"),
    ],
)
def test_slugs(prompt, name):
    assert slug(prompt) == name


@pytest.mark.parametrize(
    "model, name",
    [
        ("/data/models/wan 14B/", "wan-14B"),
        ("C:\\models\\wan", "wan"),
        ("..", "model"),
        ("a/..", "model"),
        ("/", "model"),
        ("-rf", "rf"),
        (".hidden. ", "hidden"),
        ("a:b*c", "a-b-c"),
        ("cafe\u0301", "caf\u00e9"),
        ("NUL.x", "NUL_.x"),
    ],
)
def test_models(model, name):
    assert named("{model}", model=model) == f"{name}.mp4"


def test_presets():
    assert named("{preset}", preset=None) == "none.mp4"
    assert named("{preset}", preset="../my/720p.toml") == "my-720p.toml.mp4"


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_no_filled_name_is_a_device(name):
    assert named("{model}", model=name.lower()) == f"{name.lower()}_.mp4"
    assert named("{model}/x", model=name) == f"{name}_/x.mp4"


def test_device_put_together_from_pieces():
    assert named("com{index}", index=1) == "com1_.mp4"


@pytest.mark.parametrize(
    "prompt", ["cat " * 200, "猫" * 500, "é" * 500, "e\u0301" * 500, "𠀀" * 500]
)
def test_long_prompts_are_cut_between_characters(prompt):
    name = slug("a" + prompt)  # so that the limit falls inside a character
    assert 50 <= len(name.encode()) <= NAME_BYTES
    assert not name.endswith("-") and "\ufffd" not in name


def test_free_text_is_cut_and_numbers_are_not():
    changes = {"prompt": "猫" * 500, "model": "m" * 200, "preset": "p" * 90}
    name = named("{slug}-{model}-{preset}-{seed}-{hash8}", **changes)
    fingerprint = replace(REQUEST, **changes).fingerprint[:8]
    assert len(name.encode()) <= NAME_BYTES + 4
    assert name.endswith(f"-42-{fingerprint}.mp4")
    twice = named("{model}{model}-{seed}", model="m" * 200)
    assert twice == "m" * 116 + "-42.mp4"


def test_names_differ_wherever_requests_do():
    prompt = "the same long beginning " * 20
    names = {named("{slug}-{hash8}", prompt=prompt + end) for end in "abc"}
    assert len(names) == 3


def test_what_the_user_typed_is_never_cut():
    literal = "x" * 200
    assert named(literal) == literal + ".mp4"
    assert named(f"{literal}-{{slug}}-{{seed}}") == f"{literal}--42.mp4"
    for spec in ("x" * 241, "猫" * 81, "{seed}" + "x" * 240):
        assert "240" in problem(spec).why


def test_every_name_can_be_created(tmp_path):
    for prompt in ("猫" * 500, "a/b", "con", "x" * 999, "\ud800 y"):
        path = output_path(
            f"{tmp_path}/{{slug}}-{{model}}", replace(REQUEST, prompt=prompt), today=TODAY
        )
        path.touch()
        assert path.parent == tmp_path
    assert len(os.listdir(tmp_path)) == 5
