"""Config files: what they may hold, which value wins, and where a dry run says it came from."""

import json
from pathlib import Path

import pytest

from svgen.cli import run
from svgen.cli.settings import MAX_BYTES, read_file, user_file
from svgen.errors import UsageError
from tests.helpers import ROOT

TINY = str(ROOT / "tests/golden/tiny")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Write the project's file, and stand beside it."""
    monkeypatch.chdir(tmp_path)
    return lambda text: Path("svgen.toml").write_text(text)


@pytest.fixture
def user():
    """Write the user's file."""

    def write(text):
        user_file().parent.mkdir(parents=True)
        user_file().write_text(text)

    return write


@pytest.fixture
def planned(capsys):
    def call(*args):
        code = run(["generate", "a cat", "--model", TINY, "--dry-run", "--json", *args])
        return code, json.loads(capsys.readouterr().out)

    return call


def problems_of(text, path="svgen.toml"):
    Path(path).write_text(text)
    with pytest.raises(UsageError) as caught:
        read_file(Path(path))
    assert {one.code for one in caught.value.problems} == {"E_CONFIG"}
    assert all(one.message.startswith(f"{path}: ") for one in caught.value.problems)
    return caught.value.problems


def test_flag_beats_variable_beats_project_beats_user_beats_model(
    project, user, planned, monkeypatch
):
    keys = {"steps": 11, "guidance": 2, "shift": 3.5, "fps": 8.0, "seed": 4}
    user("[generate]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items()))
    project('[generate]\nguidance = 7\nshift = 6.5\nfps = 9\nseed = 5\nres = "64x48"\n')
    monkeypatch.setenv("SVGEN_SHIFT", "8.5")
    monkeypatch.setenv("SVGEN_SEED", "6")
    code, body = planned("--seed", "9")
    request, origin = body["data"]["request"], body["data"]["origin"]
    assert code == 0
    expected = {"steps": 11, "guidance": 7, "shift": 8.5, "fps": 9, "seed": 9, "frames": 81}
    assert {name: request[name] for name in expected} == expected
    assert body["data"]["width_px"] == 64
    assert {name: origin[name] for name in (*expected, "size", "model")} == {
        "steps": str(user_file()),
        "guidance": "svgen.toml",
        "shift": "SVGEN_SHIFT",
        "fps": "svgen.toml",
        "seed": "flag",
        "frames": "model",
        "size": "svgen.toml",
        "model": "flag",
    }


def test_dry_run_shows_values_and_origins(project, capsys):
    project('[generate]\nres = "32x32"\nduration = "1s"\nno-metadata = true\nverbose = 1\n')
    assert run(["generate", "a cat", "--model", TINY, "--dry-run", "--seed", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in ("size      32x32  (svgen.toml)", "frames    17  (svgen.toml)"):
        assert line in lines
    for line in ("seed      3  (flag)", "steps     50  (model)", "dtype     float32  (device)"):
        assert line in lines


def test_recipe_and_preset_stand_between_files_and_the_model(project, planned, tmp_path):
    from tests.videos import write

    request = {"prompt": "p", "model": "x/y", "width_px": 64, "height_px": 48, "frames": 9}
    request |= {"fps": 16.0, "steps": 3, "guidance": 2.0, "shift": 4.0, "seed": 1}
    write(tmp_path / "old.mp4", recipe={"svgen": "0.1.0", "request": request})
    Path("mine.toml").write_text("schema = 1\nwidth = 32\nheight = 32\nsteps = 6\n")
    project("[generate]\nguidance = 5.5\n")
    code, body = planned("--from", "old.mp4", "--preset", "mine.toml")
    found, origin = body["data"]["request"], body["data"]["origin"]
    assert code == 0
    assert (found["width_px"], origin["size"]) == (32, "preset")
    assert (found["steps"], origin["steps"]) == (6, "preset")
    assert (found["frames"], origin["frames"]) == (9, "recipe")
    assert (found["guidance"], origin["guidance"]) == (5.5, "svgen.toml")


def test_stronger_of_frames_and_duration_wins(project, planned):
    project("[generate]\nframes = 9\n")
    assert planned("--duration", "2s")[1]["data"]["frames"] == 33
    project('[generate]\nduration = "2s"\n')
    assert planned("--frames", "9")[1]["data"]["frames"] == 9
    project('[generate]\nduration = "2s"\nframes = 9\n')
    assert planned()[0] == 2


def test_bad_value_of_a_file_is_told_with_the_file(project, planned):
    project('[generate]\nres = "1000x560"\nsteps = 0\n')
    code, body = planned()
    messages = [one["message"] for one in body["error"]["details"]["problems"]]
    assert code == 2
    assert all(message.endswith("(from svgen.toml)") for message in messages)


def test_every_problem_of_a_file_is_named_with_a_way_out(project):
    text = """
        model = "x"
        [generat]
        steps = 1
        [generate]
        step = 1
        no_metadata = true
        overwrite = true
        frames = 9.5
        seed = true
        offline = "yes"
        res = "4k"
        dtype = "float16"
        model = 3
        [decode]
        steps = 3
        offline = true
        """
    project("")
    found = {one.message: one for one in problems_of(text)}
    hints = {
        "unknown table [model]": "remove it",
        "unknown table [generat]": "did you mean [generate]?",
        "unknown generate.step": "did you mean steps?",
        "unknown generate.no_metadata": "did you mean no-metadata?",
        "unknown generate.overwrite": "remove it",
        "generate.frames = 9.5": "see --frames",
        "generate.seed = True": "see --seed",
        "generate.offline = 'yes'": "see --offline",
        "generate.res = '4k'": "--res 720p",
        "generate.dtype = 'float16'": "see --dtype",
        "generate.model = 3": "see --model",
        "unknown decode.steps": "remove it",
    }
    assert {one.partition(": ")[2] for one in found} == set(hints)
    for message, hint in hints.items():
        assert found[f"svgen.toml: {message}"].hint.startswith(hint)


@pytest.mark.parametrize("text", ["[generate", "a = 1\na = 2", "\ud800", "x = " + "[" * 5000])
def test_file_that_is_not_toml_is_an_error(project, text):
    project("")
    Path("svgen.toml").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(UsageError) as caught:
        read_file(Path("svgen.toml"))
    assert caught.value.message == "svgen.toml: is not valid TOML"


def test_huge_file_and_folder_are_errors(project):
    project("#" * (MAX_BYTES + 1))
    assert run(["generate", "x"]) == 2
    Path("svgen.toml").unlink()
    Path("svgen.toml").mkdir()
    assert run(["generate", "x"]) == 2


def test_broken_files_are_both_named_and_help_still_works(project, user, planned, capsys):
    project("[")
    user("[")
    code, body = planned()
    assert (code, len(body["error"]["details"]["problems"])) == (2, 2)
    assert run(["generate", "-h"]) == 0
    assert run(["generate", "--help-all"]) == 0
    assert run(["presets", "list"]) == 0


def test_decode_reads_its_own_table(project, capsys):
    project('[decode]\nmodel = "nobody"\n[generate]\nsteps = 3\n')
    assert run(["decode", "missing.safetensors", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "E_LATENTS"
