"""`svgen generate --preview-every`: on the small checkpoint, in this process."""

import json
import signal

import numpy as np
import pytest

import svgen.cli.previewing as module
from svgen.cli import run
from svgen.cli.output import Console
from svgen.cli.previewing import Previews
from svgen.errors import FileError
from svgen.preview import is_preview, write_preview
from tests.helpers import ROOT
from tests.videos import decoded

TINY = str(ROOT / "tests/golden/tiny")
SMALL = ("--model", TINY, "--res", "32x32", "--frames", "5", "--steps", "4", "--seed", "3")
SMALL += ("--save-every", "1000")


@pytest.fixture
def made(capsys, tmp_path, monkeypatch):
    """Run in a folder of its own, each preview written before the next step; returns (exit code,
    events, the notes and numbers of frames of what was written).
    """
    monkeypatch.chdir(tmp_path)
    seen = []

    def noting(path, projection, frames, note):
        write_preview(path, projection, frames, note)
        seen.append((path.name, note, len(frames)))

    monkeypatch.setattr(module, "write_preview", noting)
    see = Previews.see

    def seeing(self, state):
        see(self, state)
        self._finish(wait=True)

    monkeypatch.setattr(Previews, "see", seeing)

    def call(*args):
        code = run(["generate", *args, *SMALL, "--json=events"])
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return code, events, seen

    return call


def kinds(events):
    return [event["kind"] for event in events if event["event"] == "saved"]


def test_previews_come_every_n_steps_and_go_when_the_video_is_there(made, tmp_path):
    code, events, seen = made("a cat", "-o", "x.mp4", "--preview-every", "2")
    assert (code, events[-1]["warnings"]) == (0, [])
    assert seen == [("x.preview.png", "step 2 of 4", 2), ("x.preview.png", "step 4 of 4", 2)]
    assert kinds(events) == ["preview", "preview", "latents", "video"]
    assert next(one["path"] for one in events if one.get("kind") == "preview") == "x.preview.png"
    assert [path.name for path in tmp_path.iterdir()] == ["x.mp4"]

    assert made("a cat", "-o", "y.mp4")[0] == 0
    assert len(seen) == 2, "none without the flag"
    assert np.array_equal(decoded(tmp_path / "x.mp4"), decoded(tmp_path / "y.mp4"))


def test_failing_preview_is_one_warning(made, tmp_path, monkeypatch):
    def fail(*_):
        raise FileError("E_WRITE", "the disk is gone")

    monkeypatch.setattr(module, "write_preview", fail)
    code, events, _ = made("a cat", "-o", "x.mp4", "--preview-every", "1")
    assert (code, kinds(events)) == (0, ["latents", "video"])
    assert events[-1]["warnings"] == ["no more previews: the disk is gone"]

    def out(*_):
        raise MemoryError

    monkeypatch.setattr("svgen.pipeline.fit", out)
    code, events, _ = made("a cat", "-o", "y.mp4", "--preview-every", "1")
    assert (code, kinds(events)) == (0, ["latents", "video"])
    assert events[-1]["warnings"] == ["no more previews: memory ran out"]


def test_stopped_run_keeps_its_preview_and_goes_on_with_previews(made, tmp_path, monkeypatch):
    def stopping(path, projection, frames, note):
        write_preview(path, projection, frames, note)
        signal.raise_signal(signal.SIGINT)

    args = ("a cat", "-o", "x.mp4", "--preview-every", "1")
    with monkeypatch.context() as patch:
        patch.setattr(module, "ThreadPoolExecutor", lambda *_: Immediately())
        patch.setattr(module, "write_preview", stopping)
        code, _, _ = made(*args)
    assert code == 130
    assert is_preview(tmp_path / "x.preview.png"), "it shows how far the run came"

    code, _, seen = made(*args)
    assert code == 0
    assert [note for _, note, _ in seen] == [f"step {step} of 4" for step in (2, 3, 4)]
    assert [path.name for path in tmp_path.iterdir()] == ["x.mp4"]


class Immediately:
    """An executor without a thread: signals are raised in the main one."""

    def submit(self, action, *args):
        done = module.Future()
        done.set_result(action(*args))
        return done

    def shutdown(self):
        pass


def test_file_of_somebody_else_is_refused_before_anything_is_loaded(made, tmp_path, monkeypatch):
    monkeypatch.setattr("svgen.pipeline.load_module", None)
    (tmp_path / "x.preview.png").write_text("mine")
    code, events, _ = made("a cat", "-o", "x.mp4", "--preview-every", "1")
    assert (code, events[-1]["error"]["code"]) == (2, "E_OUTPUT_EXISTS")
    assert (tmp_path / "x.preview.png").read_text() == "mine"


def test_no_preview_every_zero_steps(made):
    code, events, _ = made("a cat", "--preview-every", "0")
    assert (code, events[-1]["error"]["code"]) == (2, "E_USAGE")


def test_lines_of_a_batch_have_previews_of_their_own(made, tmp_path, capsys):
    lines = (
        {"prompt": "a", "output": "a.mp4", "preview_every": 4},
        {"prompt": "b", "output": "b.mp4", "preview_every": 2},
        {"prompt": "c", "output": "c.mp4"},
    )
    (tmp_path / "batch.jsonl").write_text("\n".join(map(json.dumps, lines)))
    code, events, seen = made("--prompts", "batch.jsonl")
    assert (code, events[-1]["data"]["done"]) == (0, 3)
    assert [(name, note) for name, note, _ in seen] == [
        ("a.preview.png", "step 4 of 4"),
        ("b.preview.png", "step 2 of 4"),
        ("b.preview.png", "step 4 of 4"),
    ]
    fits = [one for one in events if one.get("name") == "fit the previews" and "seconds" in one]
    assert len(fits) == 1, "once for all"


def test_step_that_comes_while_one_is_written_waits_for_nothing(tmp_path):
    class Never:
        def done(self):
            return False

    previews = Previews(Console("generate", verbosity=-1), tmp_path / "x.mp4", 1)
    previews.projection, previews._writing = object(), Never()
    previews.see(None)  # neither reads the state nor blocks
