"""Presets: what ships, how one is found, and what is refused."""

import tomllib
from dataclasses import replace

import pytest

from svgen import presets
from svgen.config import SparsitySchedule
from svgen.errors import UsageError, shown
from svgen.grid import RESOLUTIONS
from svgen.presets import list_presets, load_preset, presets_folder, read_preset
from tests.helpers import ROOT, json_of, run_svgen

GOOD = {"schema": "1", "resolution": '"720p"'}


def write(folder, name="mine.toml", **keys):
    """Write a preset of raw TOML values; a key of None is left out."""
    values = {**GOOD, **keys}
    text = "".join(f"{key} = {value}\n" for key, value in values.items() if value is not None)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def problems_of(path):
    with pytest.raises(UsageError) as caught:
        read_preset(path)
    assert {problem.code for problem in caught.value.problems} == {"E_PRESET"}
    assert all(problem.hint for problem in caught.value.problems)
    return caught.value.problems


def test_shipped_presets_are_named_after_what_they_hold():
    found = list_presets()
    names = {f"{size}-{name}" for size in RESOLUTIONS for name in presets.SCHEDULES}
    assert {preset.name for preset in found} == names
    for preset in found:
        resolution, schedule = preset.name.split("-", 1)
        assert RESOLUTIONS[resolution] == (preset.width_px, preset.height_px)
        assert preset.schedule == schedule
        assert (preset.frames, preset.steps, preset.shift) == (None, None, None)
        assert (preset.sparsity is None) == (schedule == "dense")


@pytest.mark.parametrize("size", RESOLUTIONS)
def test_conservative_and_small_models_keep_more(size):
    found = {name: load_preset(f"{size}-{name}") for name in ("conservative", "aggressive")}
    mild, hard = found["conservative"], found["aggressive"]
    for one, other in ((mild.sparsity, hard.sparsity), (mild.small_sparsity, hard.small_sparsity)):
        assert one.band_share > other.band_share
        assert one.dense_steps >= other.dense_steps
        assert one.budget is not None and other.budget is None
    for preset in (mild, hard):
        assert preset.small_sparsity.band_share > preset.sparsity.band_share >= 0.2
        assert preset.small_sparsity.dense_steps > preset.sparsity.dense_steps


def test_presets_folder_is_the_packaged_one_when_installed(tmp_path, monkeypatch):
    package = tmp_path / "svgen"
    package.mkdir()
    monkeypatch.setattr(presets, "__file__", str(package / "presets.py"))
    assert presets_folder() == tmp_path / "presets"
    (package / "_presets").mkdir()
    assert presets_folder() == package / "_presets"


def test_wheel_takes_the_presets_along():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    target = config["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert target == {"presets": "svgen/_presets"}


def test_full_name_keeps_its_size_whatever_the_resolution():
    preset = load_preset("720p-dense", (832, 480))
    assert (preset.width_px, preset.height_px) == (1280, 720)


def test_schedule_takes_the_size_it_is_wanted_for():
    assert load_preset("dense", (1920, 1080)).name == "1080p-dense"
    portrait = load_preset("dense", (480, 832))
    assert (portrait.name, portrait.width_px, portrait.height_px) == ("480p-dense", 480, 832)
    odd = load_preset("aggressive", (1152, 640))  # nearest in pixels to 1280x720
    assert (odd.name, odd.width_px, odd.made_px) == ("720p-aggressive", 1152, (1280, 720))
    assert odd.sparsity == load_preset("720p-aggressive").sparsity


@pytest.mark.parametrize(
    ("name", "resolution", "hint"),
    [
        ("dense", None, "--preset 480p-dense"),
        ("720p-agressive", None, "--preset 720p-aggressive"),
        ("720-dense", None, "--preset 720p-dense"),
        ("zzz", None, "svgen presets list"),
    ],
)
def test_unknown_preset_says_what_would_work(name, resolution, hint):
    with pytest.raises(UsageError) as caught:
        load_preset(name, resolution)
    assert caught.value.code == "E_PRESET"
    assert caught.value.hint.startswith(hint)


def test_file_gives_every_field(tmp_path):
    path = write(
        tmp_path,
        resolution=None,
        width="640",
        height="384",
        frames="41",
        steps="12",
        shift="3",
        description='"für Tests"',
    )
    preset = load_preset(str(path))
    assert (preset.width_px, preset.height_px, preset.frames, preset.steps) == (640, 384, 41, 12)
    assert preset.shift == 3.0
    assert isinstance(preset.shift, float)
    assert (preset.name, preset.description, preset.source) == ("mine", "für Tests", str(path))


def test_extends_inherits_what_is_not_given(tmp_path):
    path = write(tmp_path, resolution=None, extends='"1080p-dense"', steps="9")
    preset = read_preset(path)
    assert (preset.width_px, preset.height_px, preset.steps) == (1920, 1080, 9)
    path = write(tmp_path, resolution=None, extends='"1080p-dense"', width="64", height="48")
    preset = read_preset(path)
    assert (preset.width_px, preset.height_px) == (64, 48)


def test_extends_refuses_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(presets, "presets_folder", lambda: tmp_path)
    first = write(tmp_path, "first.toml", extends='"second"')
    write(tmp_path, "second.toml", extends='"first"')
    assert "extends" in problems_of(first)[0].message


SPARSE = """
[sparsity]
band_share = 0.3
dense_steps = 2
budget = 1
[sparsity.small]
band_share = 0.4
dense_steps = 0.25
"""


def sparse(folder, table=SPARSE, **keys):
    path = write(folder, **{"schedule": '"mine"', **keys})
    path.write_text(path.read_text() + table)
    return path


def test_small_models_inherit_what_their_table_does_not_say(tmp_path):
    preset = read_preset(sparse(tmp_path))
    assert preset.sparsity == SparsitySchedule(band_share=0.3, dense_steps=2, budget=1.0)
    assert preset.small_sparsity == SparsitySchedule(band_share=0.4, dense_steps=0.25, budget=1.0)
    assert isinstance(preset.sparsity.budget, float)


def test_extends_lays_nested_tables_over_each_other(tmp_path):
    table = "[sparsity]\ndense_layers = 7\n[sparsity.small]\nrows = 9\n"
    child = read_preset(sparse(tmp_path, table, extends='"720p-aggressive"'))
    parent = load_preset("720p-aggressive")
    assert child.sparsity == replace(parent.sparsity, dense_layers=7)
    assert child.small_sparsity == replace(parent.small_sparsity, rows=9)
    dense = read_preset(write(tmp_path, schedule='"dense"', extends='"720p-aggressive"'))
    assert dense.sparsity is None


@pytest.mark.parametrize(
    ("table", "message", "hint"),
    [
        ("[sparsity]\n", "sparsity.band_share is missing", "band_share = 0.3"),
        ("", "schedule = 'mine'", "[sparsity] with band_share = 0.3"),
        ("[sparsity]\nband_share = 0\n", "sparsity.band_share = 0", "band_share = 0.01"),
        ("[sparsity]\nband_share = nan\n", "sparsity.band_share = nan", "band_share = 0.01"),
        (
            "[sparsity]\nband_share = 0.3\ndense_steps = 1.5\n",
            "sparsity.dense_steps = 1.5",
            "dense_steps = 1.0",
        ),
        (
            "[sparsity]\nband_share = 0.3\nband_shar = 1\n",
            "unknown key 'sparsity.band_shar'",
            "write band_share",
        ),
        (
            "[sparsity]\nband_share = 0.3\n[sparsity.small]\nrows = 0.5\n",
            "sparsity.small.rows = 0.5",
            "rows = 64",
        ),
        (
            "[sparsity]\nband_share = 0.3\n[sparsity.small.small]\n",
            "unknown key 'sparsity.small.small'",
            "remove it",
        ),
    ],
)
def test_bad_sparsity_names_itself_and_a_good_one(tmp_path, table, message, hint):
    (problem,) = problems_of(sparse(tmp_path, table))
    assert message in problem.message
    assert problem.hint == hint


def test_dense_schedule_has_no_sparsity(tmp_path):
    (problem,) = problems_of(sparse(tmp_path, schedule='"dense"'))
    assert problem.why == "a dense schedule has no [sparsity]"


@pytest.mark.parametrize(
    ("keys", "message", "hint"),
    [
        ({"stepz": "50"}, "unknown key 'stepz'", "write steps"),
        ({"guidance_high": "5"}, "unknown key 'guidance_high'", "remove it"),
        ({"schema": None}, "schema is missing", "schema = 1"),
        ({"schema": "2"}, "schema = 2", "schema = 1"),
        ({"schema": "true"}, "schema = True", "schema = 1"),
        ({"steps": '"50"'}, "steps = '50'", "steps = 50"),
        ({"steps": "5.0"}, "steps = 5.0", "steps = 50"),
        ({"steps": "0"}, "steps = 0", "steps = 1"),
        ({"steps": "1001"}, "steps = 1001", "steps = 1000"),
        ({"shift": "nan"}, "shift = nan", "shift = 0.01"),
        ({"shift": "inf"}, "shift = inf", "shift = 100.0"),
        ({"frames": "80"}, "frames = 80", "frames = 77 or frames = 81"),
        ({"frames": "1" + "0" * 100}, "frames = 1000", "frames = 3997 or frames = 4001"),
        ({"sparsity": "1"}, "sparsity = 1", "[sparsity]"),
        ({"resolution": '"720"'}, "resolution = '720'", 'resolution = "720p"'),
        ({"resolution": None}, "the size is given by nothing", 'resolution = "720p"'),
        ({"width": "1280"}, "given by resolution and width", 'resolution = "720p"'),
        (
            {"resolution": None, "width": "1000", "height": "700"},
            "width = 1000, height = 700",
            "width = 992, height = 688 or width = 1008, height = 704",
        ),
        ({"extends": '"720p-dens"'}, "extends = '720p-dens'", 'extends = "720p-dense"'),
        ({"description": '"a\\nb"'}, "description = 'a\\nb'", "shorten it to one line"),
        ({"description": f'"{"x" * 201}"'}, "description = 'xxx", "shorten it to one line"),
    ],
)
def test_bad_value_names_itself_and_a_good_one(tmp_path, keys, message, hint):
    (problem,) = problems_of(write(tmp_path, **keys))
    assert message in problem.message
    assert problem.hint == hint


def test_all_problems_come_at_once(tmp_path):
    path = write(
        tmp_path, schema="7", stepz="1", steps="0", shift="true", frames="2", resolution='"4k"'
    )
    assert len(problems_of(path)) == 6


@pytest.mark.parametrize(
    "data",
    [
        b"schema = ",
        b"schema = 1\nschema = 1\n",
        b"\xff\xfe",
        b"x = " + b"[" * 20_000,
        b"x = " + b"9" * 5000,
        b"#" * (64 * 1024 + 1),
    ],
    ids=["cut", "twice", "not-utf-8", "deep", "digits", "large"],
)
def test_file_that_is_no_preset_is_refused(tmp_path, data):
    path = tmp_path / "bad.toml"
    path.write_bytes(data)
    assert len(problems_of(path)) == 1


def test_missing_file_and_folder_are_refused(tmp_path):
    assert "no such" in problems_of(tmp_path / "none.toml")[0].message
    assert "no such" in problems_of(tmp_path)[0].message


def test_list_command_gives_all_presets():
    done = run_svgen("presets", "list", "--json")
    body = json_of(done)
    assert done.returncode == 0
    assert (body["schema"], body["command"]) == ("svgen.presets.list/1", "presets list")
    assert [one["name"] for one in body["data"]["presets"]] == [one.name for one in list_presets()]
    first = body["data"]["presets"][0]
    assert (first["name"], first["width"]) == ("480p-aggressive", 832)
    assert first["sparsity"]["band_share"] < first["small_sparsity"]["band_share"]
    lines = run_svgen("presets", "list").stdout.splitlines()
    assert len(lines) == 13
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", ["480p-dense", "480p-conservative"])
def test_show_command_prints_a_file_that_check_accepts(tmp_path, name):
    shown = run_svgen("presets", "show", name)
    copy = tmp_path / "copy.toml"
    copy.write_text(shown.stdout, encoding="utf-8")
    done = run_svgen("presets", "check", str(copy))
    assert (done.returncode, done.stdout) == (0, f"ok  {copy}\n")
    again, preset = read_preset(copy), load_preset(name)
    for field in ("width_px", "height_px", "schedule", "sparsity", "small_sparsity", "steps"):
        assert getattr(again, field) == getattr(preset, field)


def test_check_command_reports_every_file(tmp_path):
    good, bad = write(tmp_path), write(tmp_path, "bad.toml", steps="0", frames="2")
    done = run_svgen("presets", "check", str(good), str(bad), "--json")
    body = json_of(done)
    assert done.returncode == 2
    assert [row["ok"] for row in body["data"]["files"]] == [True, False]
    assert len(body["data"]["files"][1]["problems"]) == 2
    assert body["error"]["code"] == "E_PRESET"
    assert done.stderr.count("error[E_PRESET]") == 2


def test_value_of_a_file_is_shown_however_deep_or_long_it_is():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep, 60) == "a list in many others"
    assert shown("x" * 100_000, 10) == "'xxxxxx..."
    assert shown({"a": [1]}, 60) == "{'a': [1]}"
    while deep:  # to free it at once would recurse as deeply
        deep = deep[0]
