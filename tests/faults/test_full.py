"""Disks that run full at every stage: exit 6 with the place and the way out, nothing lost that was
saved, nothing broken left, and the rerun makes what an undisturbed run makes.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.full_disk import Disk, empty, fill, limited, names
from tests.helpers import ROOT
from tests.videos import decoded

pytestmark = pytest.mark.faults
STEPS = 4
SIZE = ("--model", "tests/golden/tiny", "--res", "32x32", "--frames", "1", "--steps", str(STEPS))
ARGS = ("generate", "a red ball", *SIZE, "--seed", "3")
STATE = r"\.x-\w+\.state\.partial"
LATENTS = r"\.x-\w+\.latents\.partial"
VIDEO = r"/\.x\.partial"


class Runs:
    """Runs of svgen with one home, counted and timed."""

    def __init__(self, home: Path):
        homes = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "TMPDIR")
        shared = dict.fromkeys(homes, str(home))
        self.env = {**os.environ, **shared, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        self.env["PYTHONPATH"] = str(ROOT)
        self.count, self.spent_s = 0, 0.0

    def __call__(self, *args, program=("svgen",), before=(), env=None, cwd=ROOT):
        start = time.monotonic()
        done = subprocess.run(
            [*before, sys.executable, "-m", *program, *map(str, args)],
            env=self.env | (env or {}),
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        self.count, self.spent_s = self.count + 1, self.spent_s + time.monotonic() - start
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
        return done

    def filling(self, when, count, how, folder, *args, **options):
        program = ("tests.faults.filling", when, str(count), str(how), str(folder))
        return self(*args, program=program, **options)


@pytest.fixture(scope="module")
def svgen(tmp_path_factory):
    runs = Runs(tmp_path_factory.mktemp("home"))
    yield runs
    print(f"\nfull disks: {runs.count} runs of svgen in {runs.spent_s:.0f} s")


@pytest.fixture(scope="module")
def undisturbed(svgen, tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "x.mp4"
    done = svgen(*ARGS, "-o", path, "--keep-latents")
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def disk(tmp_path):
    with Disk(tmp_path / "disk", "size=4m,nr_inodes=100") as mounted:
        yield mounted


def full(done, *named) -> dict:
    """Check that a run ended as it must on a full disk; returns its error."""
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (6, "E_DISK_FULL"), done.stderr
    assert "free some space" in error["hint"]
    for text in named:
        assert str(text) in error["message"] + error["hint"], error
    return error


def nothing_runs_in(folder: Path) -> None:
    """Check that no program still works on a file of a folder."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = process.read_bytes()
        except OSError:
            continue
        assert b"ffmpeg" not in line or str(folder).encode() not in line


def same(path: Path, other: Path) -> bool:
    return np.array_equal(decoded(path), decoded(other))


@pytest.mark.parametrize(("count", "step"), [(1, 0), (5, 1)])
def test_disk_full_while_a_state_is_saved(svgen, disk, undisturbed, count, step):
    path = disk.folder / "x.mp4"
    done = svgen.filling(STATE, count, 0, disk.folder, *ARGS, "-o", path, "--json")
    full(done, disk.folder)
    assert [name.partition(".")[2] for name in names(disk.folder)] == (
        ["state.safetensors"] if step else []
    )
    empty(disk.folder)
    again = svgen(*ARGS, "-o", path)
    assert again.returncode == 0, again.stderr
    assert (f"going on after step {step} of {STEPS}" in again.stderr) is bool(step)
    assert names(disk.folder) == ["x.mp4"] and same(path, undisturbed)


def test_disk_full_while_the_latents_are_saved(svgen, disk, undisturbed):
    path = disk.folder / "x.mp4"
    full(svgen.filling(LATENTS, 1, 0, disk.folder, *ARGS, "-o", path, "--json"), disk.folder)
    assert [name.partition(".")[2] for name in names(disk.folder)] == ["state.safetensors"]
    empty(disk.folder)
    again = svgen(*ARGS, "-o", path)
    assert f"going on after step {STEPS - 1} of {STEPS}" in again.stderr
    assert names(disk.folder) == ["x.mp4"] and same(path, undisturbed)


@pytest.mark.parametrize(
    ("when", "count", "how"),
    [(VIDEO, 2, 0), (r"/x\.mp4$", 1, "names")],
    ids=["encode", "publish"],
)
def test_disk_full_while_the_video_is_written(svgen, disk, undisturbed, when, count, how):
    path = disk.folder / "x.mp4"
    done = svgen.filling(when, count, how, disk.folder, *ARGS, "-o", path, "--json")
    error = full(done, disk.folder)
    nothing_runs_in(disk.folder)
    (kept,) = names(disk.folder)
    assert kept.endswith(".latents.safetensors")
    assert error["details"]["latents"] == str(disk.folder / kept)
    empty(disk.folder)
    again = svgen(*ARGS, "-o", path)
    assert again.returncode == 0 and "all steps are done" in again.stderr, again.stderr
    assert same(path, undisturbed)


def test_full_temporary_folder_is_named(svgen, disk, tmp_path):
    fill(disk.folder)
    done = svgen(*ARGS, "-o", tmp_path / "x.mp4", "--json", env={"TMPDIR": str(disk.folder)})
    assert done.returncode in (0, 6), done.stderr  # Python looks for another one by itself
    assert done.returncode == 0 or "TMPDIR" in full(done)["hint"]
    assert not any(name.startswith(".") for name in os.listdir(tmp_path))


def test_full_disk_is_found_before_anything_is_loaded(svgen, disk):
    fill(disk.folder, pages=10)
    error = full(svgen(*ARGS, "-o", disk.folder / "x.mp4", "--json"), disk.folder)
    assert error["details"]["free_bytes"] == 10 * 4096
    assert names(disk.folder) == []


def test_full_disk_of_the_compilation_cache_ends_no_run(svgen, disk, tmp_path, undisturbed):
    fill(disk.folder, pages=20)
    env = {"XDG_CACHE_HOME": str(disk.folder)}
    for number in range(3):
        path = tmp_path / f"{number}.mp4"
        done = svgen(*ARGS, "-o", path, env=env)
        assert done.returncode == 0, done.stderr
        assert same(path, undisturbed)
        if number == 0:
            empty(disk.folder)


def test_full_disk_of_the_logs_ends_with_the_error_itself(svgen, disk, tmp_path):
    probe = [sys.executable, "tests/cli/probe.py", "probe", "crash", "-q"]
    fill(disk.folder)
    env = svgen.env | {"XDG_STATE_HOME": str(disk.folder)}
    done = subprocess.run(
        probe, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (1, 3)
    assert lines[0] == "error[E_INTERNAL]: ValueError: boom" and "-vv" in lines[2]
    assert not [path for path in disk.folder.rglob("*.log")]


def test_full_disk_in_a_batch_keeps_what_is_done(svgen, disk, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a red ball", "output": f"full/{n}.mp4"} for n in "ab"]
    (tmp_path / "full").symlink_to(disk.folder)
    prompts.write_text("\n".join(map(json.dumps, lines)))
    model = ("--model", ROOT / "tests" / "golden" / "tiny")
    args = ("generate", "--prompts", prompts, *SIZE[2:], *model, "--seed", "3", "--json")
    done = svgen.filling(r"/\.b\.partial", 2, 0, disk.folder, *args, cwd=tmp_path)
    body = json.loads(done.stdout)
    assert (done.returncode, body["error"]["code"]) == (1, "E_PARTIAL"), done.stderr
    assert [row["state"] for row in body["data"]["items"]] == ["done", "failed"]
    assert body["data"]["items"][1]["error"]["code"] == "E_DISK_FULL"
    assert [name.rpartition(".")[2] for name in names(disk.folder)] == ["mp4", "safetensors"]
    empty(disk.folder)
    again = json.loads(svgen(*args, cwd=tmp_path).stdout)
    assert [row["state"] for row in again["data"]["items"]] == ["skipped", "done"]


def test_full_disk_under_what_profile_heads_found(svgen, disk):
    dump = disk.folder / "heads.json"
    args = ("profile-heads", *SIZE, "--route-all", "-o", dump, "--json")
    done = svgen.filling(r"/\.heads\.partial", 2, 0, disk.folder, *args)
    full(done, dump)
    assert json.loads(done.stdout)["data"]["dump"], "what was found is not lost"
    assert names(disk.folder) == []


def test_full_disk_under_the_times_of_a_bench(svgen, disk):
    saved = disk.folder / "times.json"
    args = ("bench", *SIZE[:6], "--only", "embed", "--save", saved, "--json")
    done = svgen.filling(r"/\.times\.partial", 2, 0, disk.folder, *args)
    assert "--save" in full(done, saved)["hint"]
    assert json.loads(done.stdout)["data"]["rows"]
    assert names(disk.folder) == []


@pytest.mark.parametrize("name", ["side-by-side", "report"])
def test_full_disk_under_a_quality_report(svgen, disk, name):
    folder = disk.folder / "q"
    args = ("quality", "a red ball", *SIZE, "--preset", "presets/480p-aggressive.toml")
    done = svgen.filling(rf"/\.{name}\.partial", 1, 0, disk.folder, *args, "-o", folder, "--json")
    full(done, folder)
    assert (json.loads(done.stdout)["data"] is None) is (name == "side-by-side")
    assert not [one for one in names(folder) if "partial" in one or name in one]


def test_read_only_places(svgen, disk, tmp_path, undisturbed):
    (disk.folder / "cache").mkdir()
    disk.remount("ro")
    done = svgen(*ARGS, "-o", disk.folder / "x.mp4", "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (6, "E_WRITE")
    assert str(disk.folder) in error["message"] and "Read-only" in error["message"]
    env = {f"XDG_{kind}_HOME": str(disk.folder / "cache") for kind in ("CACHE", "STATE")}
    done = svgen(*ARGS, "-o", tmp_path / "x.mp4", env=env)
    assert done.returncode == 0, done.stderr
    assert "compiled programs are not kept" in done.stderr
    assert same(tmp_path / "x.mp4", undisturbed)


@pytest.mark.parametrize("what", ["state", "latents", "video"])
def test_files_may_be_no_larger(svgen, tmp_path, undisturbed, what):
    """The same by a limit on the size of files, which needs no mount; ffmpeg meets it too."""
    (kept,) = undisturbed.parent.glob("*.latents.safetensors")
    latents, video = kept.stat().st_size, undisturbed.stat().st_size
    limit = {"state": latents + 100, "latents": latents - 100, "video": latents + 100}[what]
    assert limit < video
    program = ("tests.faults.filling", "nothing", "1", "0", "/") if what == "state" else ("svgen",)
    path = tmp_path / "x.mp4"
    done = svgen(*ARGS, "-o", path, "--json", program=program, before=limited(limit))
    error = full(done, path.parent)
    kept = [name.split(".")[1] for name in names(path.parent)]
    assert kept == (["latents"] if what == "video" else []), error
    again = svgen(*ARGS, "-o", path)
    assert again.returncode == 0, again.stderr
    assert same(path, undisturbed)
