"""What a run keeps on disk while it goes, how often, and what the next run makes of it; inside one
process.
"""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from svgen.cli import execution, run, saving
from svgen.cli.saving import GAP, Pace
from svgen.lock import lock_path, sole_run
from svgen.pipeline import Pipeline
from tests.cli.test_resuming import header_of
from tests.helpers import ROOT
from tests.videos import decoded

STEPS = 3
MODEL = ("--model", str(ROOT / "tests/golden/tiny"), "--res", "16x16", "--frames", "1")
ARGS = ("a red ball", *MODEL, "--steps", str(STEPS))
SEEDED = (*ARGS, "--seed", "3")


class Clock:
    """A clock that goes only when it is told to."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(saving, "time", clock)
    return clock


def saves(clock: Clock, pace: Pace, steps: int, step_s: float, cost_s) -> list[float]:
    """When a run of so many steps saves, if the n-th save takes cost_s(n)."""
    found = []
    for _ in range(steps):
        clock.now += step_s
        if pace.is_due(10**6):
            found.append(clock.now)
            with pace.measured():
                clock.now += cost_s(len(found))
    return found


@pytest.mark.parametrize("cost_s", [0.001, 0.05, 2.0, 30.0])
def test_saving_takes_less_than_a_hundredth_of_the_time(clock, cost_s):
    found = saves(clock, Pace(), 20_000, 1.5, lambda _: cost_s)
    assert len(found) * cost_s < clock.now / 100
    assert len(found) * max(GAP * cost_s, 1.5) > clock.now / 2, "and not much less often than that"


def test_pace_follows_what_a_save_takes_now(clock):
    found = saves(clock, Pace(), 500, 1.0, lambda number: 1.0 if number == 2 else 0.05)
    gaps = np.diff(found)
    assert gaps[1] > 100 and max(*gaps[2:], gaps[0]) < 7


def test_period_that_is_given_is_kept(clock):
    assert len(saves(clock, Pace(0.0), 7, 1.0, lambda _: 50.0)) == 7
    assert len(np.unique(saves(clock, Pace(10.0), 60, 1.0, lambda _: 0.0))) == 6
    assert not saves(clock, Pace(float("inf")), 10**4, 1.0, lambda _: 0.0)


def made(path: Path, capsys, args=SEEDED, *more: str, status: int = 0) -> dict:
    """Run the command in this process; returns its JSON object, with what it said beside."""
    found = run(["generate", *args, "-o", str(path), "--json", *more])
    said = capsys.readouterr()
    assert found == status, said.err
    return json.loads(said.out) | {"said": said.err}


@pytest.fixture(scope="module")
def frames(tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed") / "x.mp4"
    assert run(["generate", *SEEDED, "-o", str(path), "-qq"]) == 0
    return decoded(path)


@pytest.fixture
def undecoded(tmp_path, monkeypatch, capsys):
    """The latents of a run that was stopped while it decoded."""

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(execution, "write_video", stop)
        error = made(tmp_path / "x.mp4", capsys, status=130)["error"]
    assert "the same command with --seed 3 goes on with them" in error["hint"]
    assert os.listdir(tmp_path) == [Path(error["details"]["latents"]).name]
    return Path(error["details"]["latents"])


def never(*_, **__):
    raise AssertionError("it is done already")


def test_latents_of_a_stopped_run_are_decoded_without_another_step(
    undecoded, frames, monkeypatch, capsys
):
    monkeypatch.setattr(Pipeline, "denoise", never)
    monkeypatch.setattr(Pipeline, "embed", never)
    path = undecoded.with_name("x.mp4")
    answer = made(path, capsys)
    assert f"all steps are done: decoding {undecoded}" in answer["said"]
    assert answer["data"]["calls"] == {}
    assert np.array_equal(decoded(path), frames)
    assert os.listdir(path.parent) == ["x.mp4"]


def test_latents_that_are_not_of_this_run_are_refused_and_kept(undecoded, capsys):
    good, header = load_file(undecoded), header_of(undecoded)
    changed = json.loads(header["request"]) | {"steps": 9, "prompt": "x" * 1000}
    cases = {
        "steps differs (9 there, 3 here)": (good, header | {"request": json.dumps(changed)}),
        "svgen's version differs (": (good, header | {"svgen": "0.0.1"}),
        "does not say svgen.latents/1": (good, header | {"schema": "svgen.state/1"}),
        "latents is F32[2]": ({"latents": np.zeros(2, np.float32)}, header),
        "NaN": ({"latents": good["latents"] * np.float32("nan")}, header),
    }
    for words, (tensors, metadata) in cases.items():
        save_file(tensors, undecoded, metadata)
        error = made(undecoded.with_name("x.mp4"), capsys, status=2)["error"]
        assert error["code"] == "E_STATE" and words in error["why"], error
        assert len(error["why"]) < 500 and f"delete {undecoded}" in error["hint"]
        assert undecoded.exists()


def test_drawn_seed_is_taken_over_from_the_unfinished_run(undecoded, frames, capsys):
    path = undecoded.with_name("x.mp4")
    dry = made(path, capsys, ARGS, "--dry-run")["data"]
    assert (dry["seed"], dry["origin"]["seed"]) == (3, "unfinished run")
    for more in (("--keep-latents",), ("--steps", "4"), ("--auto-number",)):
        assert made(path, capsys, ARGS, "--dry-run", *more)["data"]["origin"]["seed"] == "drawn"
    other = undecoded.with_name("y.mp4")
    assert made(other, capsys, ARGS, "--dry-run")["data"]["origin"]["seed"] == "drawn"
    answer = made(path, capsys, ARGS)
    assert f"going on with seed 3, which an unfinished run has drawn: {undecoded}" in answer["said"]
    assert np.array_equal(decoded(path), frames)


def test_name_with_the_drawn_seed_is_found_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(execution, "write_video", lambda *_, **__: os.kill(os.getpid(), 2))
    seeds = [made(tmp_path / "{seed}", capsys, ARGS, status=130) for _ in range(2)]
    assert len({one["error"]["details"]["latents"] for one in seeds}) == 1


def test_two_unfinished_runs_are_named(undecoded, monkeypatch, capsys):
    path = undecoded.with_name("x.mp4")
    with monkeypatch.context() as patch:
        patch.setattr(execution, "write_video", lambda *_, **__: os.kill(os.getpid(), 2))
        made(path, capsys, (*ARGS, "--seed", "5"), status=130)
    answer = made(path, capsys, ARGS, "--dry-run")
    assert answer["data"]["seed"] not in (3, 5)
    assert "--seed goes on with one: " in answer["said"]


def test_signal_during_the_last_step_is_heard(tmp_path, monkeypatch, frames, capsys):
    denoise = Pipeline.denoise

    def signalled(self, *given):
        for step in denoise(self, *given):
            if int(step.state.step) == STEPS:
                os.kill(os.getpid(), signal.SIGINT)
            yield step

    path = tmp_path / "x.mp4"
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "denoise", signalled)
        patch.setattr(Pipeline, "decode", never)
        answer = made(path, capsys, status=130)
    assert os.listdir(tmp_path) == [Path(answer["error"]["details"]["latents"]).name]
    made(path, capsys)
    assert np.array_equal(decoded(path), frames)


def test_clock_that_jumps_does_no_harm(tmp_path, monkeypatch, frames, capsys):
    """Wall time runs to and fro, and files seem to be of other centuries."""
    path, calls = tmp_path / "x.mp4", []

    def jumping() -> float:
        calls.append(1)
        return (-1) ** len(calls) * 1e9 + 2e9

    monkeypatch.setattr(time, "time", jumping)
    with monkeypatch.context() as patch:
        patch.setattr(execution, "write_video", lambda *_, **__: os.kill(os.getpid(), 2))
        kept = Path(made(path, capsys, status=130)["error"]["details"]["latents"])
    for seconds in (-(10**9), 4 * 10**9):
        os.utime(kept, (seconds, seconds))
        lock_path(path).write_text("{}")
        os.utime(lock_path(path), (seconds, seconds))
        assert (
            "all steps are done"
            in made(path, capsys, SEEDED, "--overwrite", "--keep-latents")["said"]
        )
    assert np.array_equal(decoded(path), frames)


def test_video_of_a_run_that_was_killed_late_is_swept_up_after(undecoded, frames, capsys):
    path, kept = undecoded.with_name("x.mp4"), undecoded.read_bytes()
    made(path, capsys)
    assert made(path, capsys, status=2)["error"]["code"] == "E_OUTPUT_EXISTS"
    for name in (undecoded, path.with_name(".x.lock"), path.with_name(".x.partial.mp4")):
        name.write_bytes(kept)
    other = made(path, capsys, (*ARGS, "--seed", "4"), status=2)
    assert other["error"]["code"] == "E_OUTPUT_EXISTS" and undecoded.exists()
    made(path, capsys, SEEDED, "--dry-run")
    assert undecoded.exists()
    assert made(path, capsys)["data"]["skipped"]
    assert os.listdir(path.parent) == ["x.mp4"]
    assert np.array_equal(decoded(path), frames)


def test_batch_goes_on_and_sweeps_up_too(undecoded, frames, tmp_path_factory, monkeypatch, capsys):
    path, kept = undecoded.with_name("x.mp4"), undecoded.read_bytes()
    monkeypatch.chdir(path.parent)
    batch = tmp_path_factory.mktemp("prompts") / "one.jsonl"
    batch.write_text(json.dumps({"prompt": ARGS[0], "seed": 3, "output": path.name}))
    flags = ("--prompts", str(batch), *ARGS[1:], "--json")
    monkeypatch.setattr(Pipeline, "denoise", never)
    assert run(["generate", *flags]) == 0
    assert np.array_equal(decoded(path), frames)
    for name in (undecoded, lock_path(path)):
        name.write_bytes(kept)
    assert run(["generate", *flags]) == 0
    assert os.listdir(path.parent) == ["x.mp4"]


def test_output_that_another_run_makes_is_refused_before_loading(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Pipeline, "_load", never)
    path, batch = tmp_path / "x.mp4", tmp_path / "one.jsonl"
    monkeypatch.chdir(tmp_path)
    batch.write_text(json.dumps({"prompt": ARGS[0], "output": path.name}))
    with sole_run(path):
        error = made(path, capsys, status=6)["error"]
        assert (error["code"], error["details"]["pid"]) == ("E_HELD", os.getpid())
        assert run(["generate", "--prompts", str(batch), *ARGS[1:], "--json"]) == 6
        assert json.loads(capsys.readouterr().out)["error"]["code"] == "E_HELD"
    assert os.listdir(tmp_path) == ["one.jsonl"]
