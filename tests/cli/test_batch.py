"""`svgen generate --prompts`: a batch on the small checkpoint, and what its lines may hold."""

import gc
import json
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import svgen.cli.execution
from svgen.cli import run
from svgen.cli.batch import _surviving
from svgen.cli.lines import read_line
from svgen.errors import FileError, NumericalError, UsageError
from svgen.recipe import read_recipe
from tests.helpers import ROOT

SMALL = ("--model", str(ROOT / "tests/golden/tiny"), "--res", "32x32", "--frames", "5")
LINES = ({"prompt": "a", "output": "a.mp4"}, {"prompt": "b"}, {"prompt": "c", "seed": 40})


@pytest.fixture
def batch(capsys, tmp_path, monkeypatch):
    """Run lines as a batch with --json, in a folder of its own; returns (exit code, the object)."""
    monkeypatch.chdir(tmp_path)

    def call(lines, *flags):
        text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "batch.jsonl").write_text("\n".join(text))
        code = run(["generate", "--prompts", "batch.jsonl", *SMALL, *flags, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


def messages_of(body):
    error = body["error"]
    return [(one["code"], one["message"]) for one in error["details"].get("problems", [error])]


def test_item_that_fails_stops_no_other_and_is_made_by_a_rerun(batch, tmp_path, monkeypatch):
    make_video = svgen.cli.execution.make_video

    def failing(console, pipeline, request, target, **options):
        if request.prompt == "b":
            raise FileError("E_WRITE", "b cannot be written")
        return make_video(console, pipeline, request, target, **options)

    flags = ("--steps", "1", "--seed", "7", "-o", "{index}-{seed}.mp4")
    with monkeypatch.context() as patch:
        patch.setattr(svgen.cli.execution, "make_video", failing)
        patch.setattr("svgen.cli.watch.Watch.warnings", lambda _: ["it is black"])
        code, body = batch(LINES, *flags)
    assert (code, body["ok"], body["error"]["code"]) == (1, False, "E_PARTIAL")
    assert body["error"]["details"]["lines"] == [2]
    rows = body["data"]["items"]
    assert [(row["line"], row["state"], row["output"], row["seed"]) for row in rows] == [
        (1, "done", "a.mp4", 7),
        (2, "failed", "1-8.mp4", 8),
        (3, "done", "2-40.mp4", 40),
    ]
    assert rows[1]["error"]["code"] == "E_WRITE"
    assert rows[0]["warnings"] == ["it is black"]
    assert read_recipe(tmp_path / "a.mp4")["request"] == rows[0]["request"]
    first = (tmp_path / "a.mp4").stat().st_mtime_ns

    code, body = batch(LINES, *flags)
    assert (code, [row["state"] for row in body["data"]["items"]]) == (
        0,
        ["skipped", "done", "skipped"],
    )
    assert (tmp_path / "a.mp4").stat().st_mtime_ns == first
    assert {path.name for path in tmp_path.glob("*")} == {
        "batch.jsonl", "a.mp4", "1-8.mp4", "2-40.mp4"
    }  # fmt: skip

    changed = [{**LINES[0], "steps": 2}]  # the same file for another request
    code, body = batch(changed, *flags)
    assert (code, messages_of(body)[0][0]) == (2, "E_PROMPTS")
    assert "a.mp4 is there already" in messages_of(body)[0][1]


@pytest.mark.parametrize("kind", [FileError, RuntimeError, NumericalError])
def test_item_that_has_failed_holds_nothing_of_its_run(kind):
    failed, held = {}, []

    def fail():
        latents = np.zeros(9)
        held.append(weakref.ref(latents))
        if kind is RuntimeError:
            raise RuntimeError("x")
        if kind is FileError:
            raise FileError("E_WRITE", "x") from ValueError("y")
        error = NumericalError("E_NAN", "x")
        error.state = latents
        raise error

    with _surviving(failed, SimpleNamespace(line=3)):
        fail()
    gc.collect()
    assert list(failed) == [3] and held[0]() is None


def test_bad_lines_are_all_told_before_anything_is_loaded(batch, tmp_path, monkeypatch):
    def fail(*_):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("svgen.pipeline.load_module", fail)
    lines = (
        {"prompt": "a", "sede": 3},
        "{",
        {"prompt": "a", "frames": 8},
        {"prompt": "a", "steps": "many"},
        {"prompt": "fine"},
        {"seed": 3},
    )
    code, body = batch(lines)
    found = messages_of(body)
    assert (code, {kind for kind, _ in found}) == (2, {"E_PROMPTS"})
    assert [message.split(":")[0] for _, message in found] == [
        f"batch.jsonl line {line}" for line in (1, 2, 3, 4, 6)
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["batch.jsonl"]


def test_dry_run_shows_each_line_with_flags_of_its_own(batch):
    lines = ({"prompt": "a"}, {"prompt": "b", "duration": "1s", "res": "64x48"})
    code, body = batch(lines, "--dry-run")
    first, second = body["data"]["items"]
    assert (code, first["frames"], first["width_px"], first["seed"]) == (0, 5, 32, 0)
    assert (second["frames"], second["width_px"], second["seed"]) == (17, 64, 1)


def test_two_lines_of_one_file_are_refused(batch):
    line = {"prompt": "a", "output": "a.mp4"}
    code, body = batch([line, {"prompt": "b"}, line], "--dry-run")
    assert (code, messages_of(body)) == (
        2,
        [("E_PROMPTS", "batch.jsonl line 3: it writes a.mp4, as line 1")],
    )


@pytest.mark.parametrize("args", [("a prompt",), ("-o", "-")])
def test_what_a_batch_excludes_is_refused(batch, args):
    assert batch(LINES, *args)[0] == 2


def test_empty_file_is_refused(batch):
    code, body = batch(["", " "])
    assert (code, messages_of(body)[0][0]) == (2, "E_PROMPTS")


def test_line_is_read_as_flags_are():
    found = read_line('{"prompt": "a", "res": "480p", "keep_latents": true, "guidance": 3}')
    assert found == {"prompt": "a", "res": (832, 480), "keep_latents": True, "guidance": 3.0}


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"prompt": 3}',
        '{"prompt": "-"}',
        '{"prompt": "a", "device": "cpu"}',
        '{"prompt": "a", "prompts": "x"}',
        '{"prompt": "a", "seed": true}',
        '{"prompt": "a", "seed": 1.5}',
        '{"prompt": "a", "res": "4k"}',
        '{"prompt": "a", "dtype": "float8"}',
    ],
)
def test_line_that_no_flag_would_take_is_refused(text):
    with pytest.raises(UsageError) as caught:
        read_line(text)
    assert caught.value.code == "E_PROMPTS"
