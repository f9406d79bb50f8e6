"""What runs around the programs: memory is freed between the networks, waits are explained."""

import gc
import time
import weakref

import jax
import numpy as np
import pytest

from svgen.cli.execution import COMPILING, explained_wait, make_video, stages_of
from svgen.cli.output import Console
from svgen.config import Request
from svgen.errors import FileError
from svgen.pipeline import Pipeline
from tests.helpers import ROOT

TINY = ROOT / "tests/golden/tiny"
LATENTS = np.zeros((1, 1, 4, 4, 8), np.float32)
REQUEST = Request(
    prompt="a red ball",
    model=str(TINY),
    width_px=32,
    height_px=32,
    frames=1,
    fps=16.0,
    steps=2,
    guidance=3.0,
    shift=5.0,
    seed=1,
)


class Recorded(Pipeline):
    """Keeps weak references to all weights, and counts those alive when the next are loaded."""

    def __init__(self, folder):
        super().__init__(folder)
        self.weights, self.alive = {}, {}

    def _load(self, part, mesh=None):
        self.alive[part] = self.count()
        graph, weights = super()._load(part, mesh)
        self.weights[part] = [weakref.ref(leaf) for leaf in jax.tree.leaves(weights)]
        return graph, weights

    def count(self):
        gc.collect()
        return {
            part: sum(leaf() is not None for leaf in leaves)
            for part, leaves in self.weights.items()
        }


def test_each_network_is_freed_before_the_next_is_loaded(tmp_path):
    pipeline = Recorded(TINY)
    console = Console("generate", verbosity=-2)
    make_video(console, pipeline, REQUEST, tmp_path / "x.mp4", keep_latents=False)
    assert all(len(leaves) > 5 for leaves in pipeline.weights.values())
    assert pipeline.alive == {
        "text_encoder": {},
        "transformer": {"text_encoder": 0},
        "vae": {"text_encoder": 0, "transformer": 0},
    }
    assert pipeline.count() == {"text_encoder": 0, "transformer": 0, "vae": 0}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("RESOURCE_EXHAUSTED: 9 GB"), "E_MEMORY"),
        (KeyboardInterrupt(), "E_INTERRUPTED"),
        (FileError("E_ENCODE", "ffmpeg failed", hint="h"), "E_ENCODE"),
    ],
)
def test_whatever_ends_decoding_keeps_the_latents_and_says_so(tmp_path, monkeypatch, error, code):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("svgen.cli.execution.write_video", fail)
    monkeypatch.setattr("svgen.cli.execution.denoise", lambda *_, **__: (LATENTS, {}))
    folder = tmp_path / "a folder"
    folder.mkdir()
    with pytest.raises(Exception) as caught:
        console = Console("generate", verbosity=-2)
        make_video(console, Pipeline(TINY), REQUEST, folder / "x.mp4", keep_latents=False)
    (kept,) = folder.iterdir()
    assert (caught.value.code, caught.value.details["latents"]) == (code, str(kept))
    assert f"svgen decode '{kept}'" in caught.value.hint


def test_long_wait_is_explained_and_a_short_one_is_not(monkeypatch, capsys):
    monkeypatch.setattr("svgen.cli.execution.PATIENCE_S", 0.05)
    console = Console("generate")
    with explained_wait(console, "short"):
        pass
    with explained_wait(console, "long"):
        time.sleep(0.3)
    assert capsys.readouterr().err == "long\n"


def test_stage_that_takes_long_is_named(monkeypatch, capsys):
    monkeypatch.setattr("svgen.cli.execution.PATIENCE_S", 0.05)
    for verbosity in (0, 1):
        stage = stages_of(Console("generate", verbosity=verbosity))
        for name in ("load transformer", "compile the step"):
            with stage(name):
                time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["load transformer ...", COMPILING]
    assert [line.partition(":")[0] for line in lines[2:]] == [
        "load transformer ...",
        "load transformer",
        "compile the step ...",
        COMPILING,
        "compile the step",
    ]


def test_time_left_counts_from_the_first_step_on(monkeypatch, capsys):
    console = Console("generate")
    with console.bar(2, "denoise") as bar:
        with console.stage("load"):
            time.sleep(1.2)
        bar.update()
    assert capsys.readouterr().err == "denoise:  50%  1/2  0:00 spent, 0:00 left\n"
