"""`svgen quality` on the small checkpoint: one real run, and what is refused before it."""

import json
from types import SimpleNamespace

import pytest

from svgen.cli import run
from svgen.cli.comparing import FILES, presets_of, table
from svgen.config import Request
from tests.helpers import ROOT, run_svgen
from tests.mp4 import read_mp4

SMALL = ("--model", "tests/golden/tiny", "--frames", "9", "--steps", "2", "--seed", "3")
MINE = """
schema = 1
width = 64
height = 48
schedule = "mine"
[sparsity]
band_share = 0.1
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory, env):
    """A run of two prompts, one preset and a sweep: (folder, the events)."""
    folder = tmp_path_factory.mktemp("compared")
    preset, prompts = folder / "mine.toml", folder / "prompts.txt"
    preset.write_text(MINE)
    prompts.write_text("a blue cube\n")
    flags = ("--preset", str(preset), "--sweep", "0.1", "--prompts", str(prompts))
    output = folder / "out"
    done = run_svgen(
        "quality", "a red ball", *SMALL, *flags, "-o", str(output), "--json=events",
        env=env, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return output, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def said(capsys):
    """Run in this process with --json; returns (exit code, codes, messages)."""

    def call(*args):
        code = run(["quality", *args, "--json"])
        error = json.loads(capsys.readouterr().out)["error"]
        problems = error["details"].get("problems", [error])
        return code, [one["code"] for one in problems], [one["message"] for one in problems]

    return call


def test_folder_holds_report_video_and_plot(compared):
    folder, events = compared
    data = events[-1]["data"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert json.loads((folder / "report.json").read_text()) == data
    assert (data["width_px"], data["height_px"], data["seed"]) == (64, 48, 3)
    assert data["prompts"] == ["a red ball", "a blue cube"]
    video = read_mp4(folder / "side-by-side.mp4")
    assert (video.width_px, video.height_px, video.frames) == (64 + 4 + 64, 48, 18)
    assert data["side_by_side"] == ["dense", "mine"]
    assert (folder / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_floor_is_near_100_db_and_a_schedule_that_keeps_less_is_below(compared):
    rows = {row["name"]: row for row in compared[1][-1]["data"]["schedules"]}
    assert list(rows) == ["dense", "floor", "mine", "share 0.1"]
    psnr = {name: row["psnr_db"]["mean"] for name, row in rows.items()}
    kept = {name: row["kept_pairs"] for name, row in rows.items()}
    assert psnr["dense"] == 100 and psnr["mine"] < 80 < psnr["floor"] < 100
    assert kept["mine"] < 0.8 < kept["floor"] == kept["dense"] == 1
    assert [one["seed"] for one in rows["mine"]["videos"]] == [3, 4]
    assert all(len(one["ssim"]["frames"]) == 9 for one in rows["mine"]["videos"])
    assert rows["share 0.1"]["same_as"] == "mine"


def test_networks_are_loaded_once_and_schedules_compiled_once(compared):
    stages = [one["name"] for one in compared[1] if one["event"] == "stage" and "seconds" in one]
    loads = ("load text encoder", "load transformer", "load vae")
    assert [stages.count(name) for name in loads] == [1, 1, 1]
    assert stages.count("compile the step") == 3  # share 0.1 is the preset


def test_table_has_80_columns_and_marks_what_is_the_same(compared):
    lines = table(compared[1][-1]["data"]["schedules"])
    assert len(lines) == 5 and max(map(len, lines)) <= 80
    assert lines[1].split()[:2] == ["dense", "100.0%"]
    assert lines[-1].endswith("= mine")


def test_existing_report_is_not_replaced(compared, said):
    folder, _ = compared
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code, codes, messages = said("a", *SMALL, "--res", "64x48", "-o", str(folder))
    assert (code, codes) == (2, ["E_OUTPUT_EXISTS"] * 3)
    assert [name in message for name, message in zip(FILES, messages, strict=True)] == [True] * 3
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_all_problems_are_told_before_anything_is_written(said, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}\n")
    flags = ("--preset", "nix", "--prompts", str(prompts), "--frames", "8")
    code, codes, _ = said(*SMALL, *flags, "-o", str(tmp_path / "out"))
    assert code == 2
    assert {"E_PROMPTS", "E_PRESET", "E_FRAMES"} == set(codes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shares", ["0.1,x", "0", "1.5", "nan", ""])
def test_sweep_that_is_no_list_of_shares_is_refused(said, shares):
    assert said("a", "--sweep", shares)[:2] == (2, ["E_VALUE"])


def test_prompt_is_needed(said, tmp_path):
    code, codes, _ = said(*SMALL, "-o", str(tmp_path / "out"))
    assert (code, codes) == (2, ["E_PROMPT_EMPTY"])


def test_long_prompt_is_named_before_loading(said, tmp_path):
    prompt = "ball " * 600
    code, codes, _ = said("a", prompt, *SMALL, "--res", "64x48", "-o", str(tmp_path / "out"))
    assert (code, codes) == (2, ["E_PROMPT_LONG"])


@pytest.mark.parametrize("output", ["-", ""])
def test_output_that_is_no_folder_is_refused(said, output):
    code, codes, _ = said("a", *SMALL, "--res", "64x48", "-o", output)
    assert (code, codes) == (2, ["E_OUTPUT_NAME"])


def test_presets_have_names_of_their_own_and_the_schedule_for_the_size_of_the_model(tmp_path):
    files = [tmp_path / folder / "aggressive.toml" for folder in ("a", "b")]
    for file, share in zip(files, ("0.2", "0.3"), strict=True):
        file.parent.mkdir()
        file.write_text(MINE.replace("0.1", share) + "dense_steps = 0.5\n")
    values = {"prompt": "", "model": "m", "width_px": 64, "height_px": 48, "frames": 9, "fps": 16}
    request = Request(**values, steps=3, guidance=1, shift=1, seed=0)
    small = SimpleNamespace(parameters=1000)
    run = SimpleNamespace(request=request, model="m", pipeline=small)
    names = ("aggressive", *map(str, files), "dense")
    found, notes = presets_of(names, run, {"res": None})
    assert list(found) == ["aggressive", str(files[0]), str(files[1])]
    assert found["aggressive"].band_share == 0.45  # of 480p-aggressive, for small models
    assert found[str(files[1])].band_share == 0.3
    assert [one.dense_steps for one in found.values()] == [1, 2, 2]
    assert notes[0] == "480p-aggressive was made for 832x480; this video has 64x48"
    assert notes[1:] == ("dense is dense: what the others are compared with",)
