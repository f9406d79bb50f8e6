"""From flags, presets, recipes and defaults to one request; recipes that cannot be trusted."""

import io
import json
import math
from dataclasses import asdict, replace

import pytest

from svgen.catalog import CATALOG, NEGATIVE_WAN
from svgen.cli.planning import read_request, settle
from svgen.cli.resolve import (
    RANGES,
    even_problem,
    range_problems,
    read_prompt,
    recipe_model,
    resolve,
)
from svgen.config import DENSE, Preset, Request, SparsitySchedule
from svgen.errors import UsageError
from svgen.grid import Rules, size_problem
from tests.videos import write

PRESET = Preset(name="mine", width_px=640, height_px=384, steps=30, source="x")
RECIPE = {
    "prompt": "old",
    "negative": "",
    "model": "wan2.1-1.3b",
    "revision": None,
    "width_px": 320,
    "height_px": 192,
    "frames": 33,
    "fps": 24.0,
    "steps": 9,
    "guidance": 3.0,
    "shift": 2.0,
    "seed": 12,
    "item": 4,
    "preset": "480p-dense",
    "schedule": "mine",
    "sparsity": SparsitySchedule(band_share=0.3, dense_steps=2),
    "dtype": "bfloat16",
    "truncate": True,
}
STORED = {**RECIPE, "sparsity": asdict(RECIPE["sparsity"])}  # as an MP4 has it


def resolved(model="wan2.1-1.3b", **options):
    flags = {"prompt": "a cat", **options.pop("flags", {})}
    return resolve(flags, model=model, dtype="float32", **options)


def test_model_gives_what_nobody_else_says():
    found = resolved()
    request = found.request
    assert found.problems == ()
    assert (request.width_px, request.height_px, request.frames) == (832, 480, 81)
    assert (request.steps, request.guidance, request.shift, request.fps) == (50, 6.0, 8.0, 16.0)
    assert request.negative == NEGATIVE_WAN
    assert request.revision == CATALOG["wan2.1-1.3b"].revision
    assert set(found.origin.values()) == {"flag", "model", "drawn"}


def test_recipe_wins_over_the_model_and_repeats_every_field():
    found = resolve({}, model="wan2.1-1.3b", dtype="bfloat16", recipe=RECIPE)
    revision = CATALOG["wan2.1-1.3b"].revision
    assert found.request == Request(**{**RECIPE, "revision": revision})
    assert set(found.origin.values()) == {"recipe"}


SPARSE = replace(
    PRESET,
    schedule="mine",
    sparsity=SparsitySchedule(band_share=0.2, dense_steps=0.3),
    small_sparsity=SparsitySchedule(band_share=0.4, dense_steps=4),
)


def test_share_of_dense_steps_becomes_a_count_rounded_up():
    for steps, count in ((30, 9), (31, 10), (1, 1)):
        found = resolved(model="wan2.1-14b", preset=SPARSE, flags={"steps": steps}).request
        assert found.sparsity == SparsitySchedule(band_share=0.2, dense_steps=count)
        assert found.schedule == "mine"


@pytest.mark.parametrize(
    ("model", "parameters", "share"),
    [
        ("wan2.1-14b", None, 0.2),
        ("wan2.1-1.3b", None, 0.4),
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers@main", None, 0.4),
        ("./folder", 10**7, 0.4),
        ("./folder", 5 * 10**9, 0.2),
        ("someone/unknown", None, 0.2),
    ],
)
def test_small_models_take_their_own_schedule(model, parameters, share):
    found = resolved(model=model, preset=SPARSE, parameters=parameters).request
    assert found.sparsity.band_share == share


def test_dense_preset_wins_over_a_sparse_recipe():
    found = resolved(recipe=RECIPE, preset=PRESET).request
    assert (found.schedule, found.sparsity) == (DENSE, None)


def test_schedule_at_another_size_than_its_own_is_told():
    assert resolved(preset=SPARSE).notes == ()
    (note,) = resolved(preset=SPARSE, flags={"res": (832, 480)}).notes
    assert note == "mine was made for 640x384; this video has 832x480"
    moved = replace(SPARSE, width_px=832, height_px=480, made_px=(640, 384))
    assert resolved(preset=moved).notes == (note,)
    assert resolved(preset=PRESET, flags={"res": (832, 480)}).notes == ()


def test_preset_wins_over_the_recipe_and_flags_win_over_both():
    flags = {"steps": 5, "negative": ""}
    found = resolved(flags=flags, preset=PRESET, recipe=RECIPE)
    request = found.request
    assert (request.width_px, request.steps, request.frames) == (640, 5, 33)
    assert (request.preset, request.negative, request.prompt) == ("mine", "", "a cat")
    origin = {name: found.origin[name] for name in ("size", "steps", "frames", "negative")}
    assert origin == {"size": "preset", "steps": "flag", "frames": "recipe", "negative": "flag"}


def test_drawn_seeds_differ():
    assert resolved().request.seed != resolved().request.seed


@pytest.mark.parametrize(
    ("seconds", "fps", "frames"), [(5, 16, 81), (5.2, 16, 85), (0.01, 16, 1), (3, 24, 73)]
)
def test_duration_becomes_the_nearest_number_of_frames(seconds, fps, frames):
    found = resolved(flags={"duration": seconds, "fps": fps})
    assert (found.request.frames, found.origin["frames"]) == (frames, "flag")
    assert f"{frames} frames" in found.notes[0]


def test_range_error_names_a_value_that_passes():
    for name, (least, most, _) in RANGES.items():
        good = {one: low for one, (low, _, _) in RANGES.items()}
        assert range_problems(good) == []
        for value in (least - 1, most * 2, math.nan, math.inf, -math.inf):
            (problem,) = range_problems({**good, name: value})
            flag, _, number = problem.hint.partition(" ")
            assert (problem.code, flag) == ("E_VALUE", f"--{name}")
            assert range_problems({**good, name: json.loads(number)}) == []


def test_problem_says_where_the_value_came_from():
    found = resolved(recipe={**RECIPE, "steps": 0, "width_px": 321})
    assert [one.message for one in found.problems] == [
        "--steps 0 is out of range (it is in the recipe)",
        "--res 321x192 cannot be made by this model (it is in the recipe)",
    ]


def test_odd_size_is_refused_where_the_model_could_make_it():
    rules = Rules(stride=1, frame_stride=4, patch=(1, 1, 3), max_positions=1000)
    assert size_problem(33, 21, rules) is None
    found = resolved(flags={"res": (33, 21)}, rules=rules)
    assert [one.code for one in found.problems] == ["E_SIZE"]
    assert found.problems[0].hint == "--res 30x20 or --res 36x22"
    for size in found.problems[0].details["nearest"]:
        assert even_problem(*size, rules) is None
        assert size_problem(*size, rules) is None


def test_use_outside_of_training_is_a_warning():
    flags = {"res": (1280, 720), "frames": 85, "fps": 24.0}
    texts = resolved(flags=flags).warnings
    assert len(texts) == 3
    assert resolved(flags={"res": (480, 832)}).warnings == ()
    assert resolved(model="./folder", flags=flags).warnings == ()


@pytest.mark.parametrize(
    ("name", "revision", "model"),
    [
        ("wan2.1-1.3b", None, "wan2.1-1.3b"),
        ("wan2.1-1.3b", CATALOG["wan2.1-1.3b"].revision, "wan2.1-1.3b"),
        ("wan2.1-1.3b", "abc", "wan2.1-1.3b@abc"),
        ("a/b", "main", "a/b@main"),
        ("a/b@v1", "v1", "a/b@v1"),
    ],
)
def test_recipe_names_a_model_with_its_revision(name, revision, model):
    assert recipe_model({"model": name, "revision": revision}) == model


@pytest.mark.parametrize("name", ["/a/b", "./a", "~/b", "a/b/c", "", "a", "../a", "a\\b", 3, None])
def test_recipe_may_not_name_a_folder(name):
    with pytest.raises(UsageError) as caught:
        recipe_model({"model": name})
    assert (caught.value.code, caught.value.hint) == ("E_RECIPE", "add --model and the folder")


def test_recipe_may_not_name_a_folder_that_looks_like_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert recipe_model({"model": "a/b"}) == "a/b"
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/model_index.json").write_text("{}")
    with pytest.raises(UsageError):
        recipe_model({"model": "a/b"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("width_px", "832"),
        ("width_px", 832.5),
        ("width_px", True),
        ("width_px", 10**400),
        ("frames", None),
        ("frames", [81]),
        ("fps", "fast"),
        ("fps", 10**400),
        ("steps", 5.0),
        ("seed", -1),
        ("seed", 2**70),
        ("item", -1),
        ("prompt", 5),
        ("negative", None),
        ("model", {}),
        ("truncate", 1),
        ("dtype", "float16"),
        ("schedule", "dense"),
        ("sparsity", None),
        ("sparsity", 0.3),
        ("sparsity", {"band_share": 0.3, "sparsity": 1}),
        ("sparsity", {"band_share": 7.0}),
        ("sparsity", {"dense_steps": 2}),
        ("sparsity", {"band_share": 0.5, "dense_steps": True}),
        ("preset", 7),
        ("stepz", 7),
    ],
)
def test_bad_field_of_a_recipe_is_named(tmp_path, field, value):
    path = tmp_path / "x.mp4"
    write(path, recipe={"svgen": "0.1.0", "request": {**STORED, field: value}})
    with pytest.raises(UsageError) as caught:
        read_request(str(path))
    assert caught.value.code == "E_RECIPE"
    names = (field, "band_share", "dense_steps") if field == "sparsity" else (field,)
    assert any(name in caught.value.message for name in names)
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("field", ["width_px", "steps", "model", "seed"])
def test_missing_field_of_a_recipe_is_named(tmp_path, field):
    values = {name: value for name, value in STORED.items() if name != field}
    write(tmp_path / "x.mp4", recipe={"svgen": "0.1.0", "request": values})
    with pytest.raises(UsageError) as caught:
        read_request(str(tmp_path / "x.mp4"))
    assert field in caught.value.message


def test_recipe_without_a_prompt_takes_one_from_the_command_line(tmp_path):
    values = {name: one for name, one in STORED.items() if name not in ("prompt", "negative")}
    write(tmp_path / "x.mp4", recipe={"svgen": "0.1.0", "request": values})
    recipe = read_request(str(tmp_path / "x.mp4"))
    assert recipe == {name: RECIPE[name] for name in values}
    assert resolved(recipe=recipe).problems == ()
    found = resolved(recipe=recipe, flags={"prompt": None}).problems
    assert [one.code for one in found] == ["E_PROMPT_EMPTY"]


def test_prompt_is_text_a_file_or_standard_input(tmp_path):
    stdin = io.TextIOWrapper(io.BytesIO("ü\n".encode()))
    assert read_prompt("-", stdin) == "ü\n"
    assert read_prompt(" @file", stdin) == " @file"
    assert read_prompt(None, stdin) is None


def test_stronger_of_excluding_options_is_kept():
    options = {"frames": 9, "duration": 2.0, "overwrite": True, "skip_existing": True}
    said = {"frames": "svgen.toml", "duration": "SVGEN_DURATION", "skip_existing": "svgen.toml"}
    kept = settle(options, said)
    assert (kept["frames"], kept["duration"]) == (None, 2.0)
    assert (kept["overwrite"], kept["skip_existing"]) == (True, None)
    with pytest.raises(UsageError) as caught:
        settle(options, {})
    assert len(caught.value.problems) == 2
