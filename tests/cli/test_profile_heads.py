"""`svgen profile-heads` on the small checkpoint, in this process."""

import importlib.util
import json

import numpy as np
import pytest
from matplotlib import image

from svgen.cli import run
from tests.helpers import ROOT

TINY = str(ROOT / "tests/golden/tiny")
SMALL = ("--model", TINY, "--res", "32x32", "--frames", "9", "--steps", "3", "--seed", "1")


def said(capsys, *args):
    code = run(["profile-heads", *args, "--json"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1, lines
    return code, json.loads(lines[0])


def codes_of(body):
    error = body["error"]
    return [problem["code"] for problem in error["details"].get("problems", [error])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One run with all files, on four chips: its folder."""
    folder = tmp_path_factory.mktemp("made")
    flags = ("-o", str(folder / "a.json"), "--plot", str(folder / "a.png"), "--summary")
    assert run(["profile-heads", *SMALL, *flags, "--heads", "2:3,1:0", "--mesh", "2x2"]) == 0
    return folder


def test_run_writes_the_dump_and_both_pictures(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["a-heads.png", "a.json", "a.png"]
    dump = json.loads((folder / "a.json").read_text())
    assert dump["schema"] == "svgen.heads/1"
    assert np.shape(dump["routes"]) == (3, 3, 2, 4)
    assert np.shape(dump["errors"]) == (3, 3, 2, 4, 2)
    # Small models leave 30 % of three steps dense, and two layers.
    assert dump["sampled"] == [[False] * 3] + [[False, False, True]] * 2
    assert set(np.unique(np.array(dump["routes"])[1:, 2])) <= {1, 2}
    assert dump["request"]["schedule"] == "aggressive" and dump["request"]["seed"] == 1
    for name in ("a.png", "a-heads.png"):
        assert len(np.unique(image.imread(folder / name).reshape(-1, 4), axis=0)) > 20


def test_json_holds_the_dump_where_no_file_does_and_one_chip_says_the_same(folder, capsys):
    code, body = said(capsys, *SMALL)
    data, dump = body["data"], json.loads((folder / "a.json").read_text())
    assert (code, body["schema"], data["output"]) == (0, "svgen.profile-heads/1", None)
    assert (data["mesh"], data["dump"]["routes"]) == ("1x1", dump["routes"])
    np.testing.assert_allclose(data["dump"]["errors"], dump["errors"], rtol=1e-3, atol=1e-5)
    last = data["summary"][2]
    assert last["spatial"] + last["temporal"] == 8 and last["routed_steps"] == 2


def test_summary_fits_a_terminal_and_everything_can_be_routed(capsys, tmp_path):
    flags = ("--route-all", "--guidance", "1", "-o", str(tmp_path / "a.npz"), "--summary")
    assert run(["profile-heads", *SMALL, *flags, "--steps", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == str(tmp_path / "a.npz")
    assert max(map(len, lines[:-1])) <= 80
    rows = [line.split() for line in lines[4:7]]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert all(int(row[1]) + int(row[2]) == 4 and row[5] == "1.00" for row in rows)
    with np.load(tmp_path / "a.npz") as file:
        assert file["sampled"].all() and file["routes"].shape == (1, 3, 1, 4)


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
