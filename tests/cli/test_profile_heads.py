"""`svgen profile-heads` on the small checkpoint, in this process."""

import importlib.util
import io
import json
from contextlib import redirect_stdout
from dataclasses import replace

import numpy as np
import pytest
from matplotlib import image

from svgen.cli import run
from svgen.cli.profiling import routed
from svgen.config import Request, SparsitySchedule
from svgen.errors import UsageError
from tests.helpers import ROOT

TINY = str(ROOT / "tests/golden/tiny")
SMALL = ("--model", TINY, "--res", "32x32", "--frames", "9", "--steps", "3", "--seed", "1")
HEADS = "2:3,1:0"


def said(capsys, *args):
    code = run(["profile-heads", *args, "--json"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1, lines
    return code, json.loads(lines[0])


def codes_of(body):
    error = body["error"]
    return [problem["code"] for problem in error["details"].get("problems", [error])]


@pytest.fixture(scope="module")
def made(tmp_path_factory, env):
    """One run with all files, on four chips: its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("made")
    flags = ("-o", str(folder / "a.npz"), "--plot", str(folder / "a.png"), "--summary")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as shown:
        for name in env.keys() - {"XLA_FLAGS"}:
            patch.setenv(name, env[name])
        assert run(["profile-heads", *SMALL, *flags, "--heads", HEADS, "--mesh", "2x2"]) == 0
    return folder, shown.getvalue().splitlines()


def test_run_writes_the_dump_and_both_pictures(made):
    folder, _ = made
    assert sorted(path.name for path in folder.iterdir()) == ["a-heads.png", "a.npz", "a.png"]
    with np.load(folder / "a.npz") as dump:
        assert dump["routes"].shape == (3, 3, 2, 4)
        # Small models leave 30 % of three steps dense, and two layers.
        assert dump["sampled"].tolist() == [[False] * 3] + [[False, False, True]] * 2
        assert set(np.unique(dump["routes"][1:, 2])) <= {1, 2}
        header = json.loads(str(dump["header"]))
    assert header["schema"] == "svgen.heads/1"
    assert (header["request"]["schedule"], header["request"]["seed"]) == ("aggressive", 1)
    for name in ("a.png", "a-heads.png"):
        assert len(np.unique(image.imread(folder / name).reshape(-1, 4), axis=0)) > 20


def test_summary_is_a_row_per_layer_of_80_columns_and_then_the_files(made):
    folder, lines = made
    assert lines[-3:] == [str(folder / name) for name in ("a.npz", "a.png", "a-heads.png")]
    rows = [line.split() for line in lines[4:-3]]
    assert max(map(len, lines[:-3])) <= 80
    assert [row[:4] for row in rows[:2]] == [[str(layer), "0", "0", "8"] for layer in range(2)]
    assert int(rows[2][1]) + int(rows[2][2]) == 8 and rows[2][3] == "0"
    assert [row[-1] for row in rows] == ["0", "0", "2"]


def test_one_chip_says_and_draws_the_same_and_json_holds_a_dump_without_a_file(
    made, capsys, tmp_path
):
    folder, plot = made[0], tmp_path / "b.png"
    code, body = said(capsys, *SMALL, "--plot", str(plot), "--heads", HEADS)
    data = body["data"]
    assert (code, body["schema"], data["output"]) == (0, "svgen.profile-heads/1", None)
    assert data["plots"] == [str(plot), str(tmp_path / "b-heads.png")]
    assert data["mesh"] == "1x1"
    with np.load(folder / "a.npz") as dump:
        assert data["dump"]["routes"] == dump["routes"].tolist()
        np.testing.assert_allclose(data["dump"]["errors"], dump["errors"], rtol=1e-3, atol=1e-5)
    pictures = [image.imread(path) for path in (folder / "a-heads.png", tmp_path / "b-heads.png")]
    assert np.mean(np.abs(pictures[0] - pictures[1]) > 0.02) < 1e-3
    last = data["summary"][2]
    assert last["spatial"] + last["temporal"] == 8 and last["routed_steps"] == 2


def test_route_all_leaves_nothing_dense_by_schedule():
    schedule = SparsitySchedule(band_share=0.4, dense_steps=2, dense_layers=3, rows=9)
    values = {"prompt": "x", "model": "x", "width_px": 32, "height_px": 32, "frames": 9, "fps": 16}
    request = Request(
        **values, steps=2, guidance=1, shift=1, seed=0, schedule="mine", sparsity=schedule
    )
    with pytest.raises(UsageError, match="none of 2 steps is routed"):
        routed(request, everywhere=False)
    found = routed(request, everywhere=True)
    assert found.sparsity == SparsitySchedule(band_share=0.4, rows=9)
    assert replace(found, sparsity=schedule) == request


@pytest.fixture
def loads_nothing(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("svgen.pipeline.load_module", fail)


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--heads", "9:99", "--plot", "x.png"], "E_VALUE"),
        (["--heads", "2:4", "--plot", "x.png"], "E_VALUE"),
        (["--heads", "1-2"], "E_VALUE"),
        (["--heads", ",".join(f"0:{head}" for head in range(13))], "E_VALUE"),
        (["--heads", "0:0"], "E_USAGE"),
        (["-o", "x.csv"], "E_OUTPUT_NAME"),
        (["-o", "x"], "E_OUTPUT_NAME"),
        (["--plot", "x.jpg"], "E_OUTPUT_NAME"),
        (["-o", "nowhere/x.json"], "E_WRITE"),
        (["--preset", "480p-dense"], "E_PRESET"),
        (["--preset", "480p-dens"], "E_PRESET"),
        (["--steps", "1"], "E_VALUE"),
        (["--frames", "8"], "E_FRAMES"),
        (["--mesh", "9x9"], "E_MESH"),
    ],
)
def test_bad_input_is_found_before_anything_is_loaded(
    flags, code, capsys, tmp_path, monkeypatch, loads_nothing
):
    monkeypatch.chdir(tmp_path)
    _, body = said(capsys, *SMALL, "--device", "cpu", *flags)
    assert codes_of(body) == [code]
    assert body["error"]["why"] or code == "E_WRITE"
    assert body["error"]["hint"]
    assert list(tmp_path.iterdir()) == []


def test_existing_files_are_replaced_only_if_asked(capsys, tmp_path, loads_nothing):
    paths = [tmp_path / name for name in ("x.json", "x.png", "x-heads.png")]
    for path in paths:
        path.write_bytes(b"mine")
    flags = ("-o", str(paths[0]), "--plot", str(paths[1]), "--heads", "0:0")
    code, body = said(capsys, *SMALL, *flags)
    assert (code, codes_of(body)) == (2, ["E_OUTPUT_EXISTS"] * 3)
    assert all(path.read_bytes() == b"mine" for path in paths)
    told = said(capsys, *SMALL, *flags, "--overwrite")[1]["error"]["message"]
    assert "weights are loaded" in told  # all checks are passed


def test_missing_matplotlib_is_told_before_anything_is_loaded(
    capsys, tmp_path, monkeypatch, loads_nothing
):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "svgen.cli.profiling.find_spec",
        lambda name: None if name == "matplotlib" else found(name),
    )
    code, body = said(capsys, *SMALL, "--plot", str(tmp_path / "x.png"))
    assert (code, codes_of(body)) == (3, ["E_LIBRARY"])
    assert body["error"]["hint"] == "pip install matplotlib"
