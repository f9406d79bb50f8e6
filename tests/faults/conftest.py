"""What tests of faults share."""

from typing import NamedTuple

import numpy as np
import pytest

from tests.followed import FRAMES, Run, is_event, steps_done
from tests.videos import decoded

TRIGGERS = {  # stage -> the event after which it begins, and one that ends it
    "load": (is_event("start"), steps_done(1)),
    "denoise": (steps_done(1), is_event("saved", kind="latents")),
    "decode": (is_event("stage", name="load vae"), is_event("step", name="decode", done=FRAMES)),
    "encode": (is_event("step", name="decode", done=FRAMES), is_event("saved", kind="video")),
}


class Undisturbed(NamedTuple):
    """What a run makes that nobody disturbs, and how long its stages take."""

    frames: np.ndarray
    seconds: dict[str, float]


@pytest.fixture(scope="session")
def env(tmp_path_factory):
    """A home whose compilation cache the real runs share."""
    home = tmp_path_factory.mktemp("home")
    names = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "TMPDIR")
    return dict.fromkeys(names, str(home)) | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


@pytest.fixture(scope="session")
def undisturbed(env, tmp_path_factory):
    """Run twice: the first run compiles."""
    for _ in range(2):
        folder = tmp_path_factory.mktemp("made") / "out"
        folder.mkdir()
        run = Run(folder, env)
        assert run.end() == 0, run.said
        assert [one.name for one in folder.iterdir()] == ["x.mp4"]
    seconds = {name: run.when(last) - run.when(first) for name, (first, last) in TRIGGERS.items()}
    return Undisturbed(decoded(folder / "x.mp4"), seconds)
