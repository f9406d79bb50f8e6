"""`svgen decode`: latents become an MP4, and what keeps them from it is told before decoding."""

import json
import os
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from svgen.cli import run
from svgen.config import Request
from svgen.recipe import read_recipe
from svgen.resume import save_latents
from tests.helpers import ROOT
from tests.mp4 import read_mp4

TINY = str(ROOT / "tests/golden/tiny")
SHAPE = (1, 2, 4, 6, 8)  # of 5 frames of 48x32


def request(**changes):
    values = {"prompt": "a café", "model": TINY, "width_px": 48, "height_px": 32, "frames": 5}
    values |= {"fps": 12.5, "steps": 2, "guidance": 4.0, "shift": 5.0, "seed": 3}
    return Request(**values | changes)


@pytest.fixture
def latents(tmp_path):
    """Save latents of a request; returns their path."""

    def save(array=None, **changes):
        if array is None:
            array = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
        path = tmp_path / "x.latents.safetensors"
        save_latents(path, array, request(**changes))
        return str(path)

    return save


@pytest.fixture
def decoded_by(capsys, tmp_path, monkeypatch):
    """Run the command with --json; returns (exit code, the object)."""
    monkeypatch.chdir(tmp_path)

    def call(*args):
        code = run(["decode", *args, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


def problems_of(body):
    error = body["error"]
    return error["details"].get("problems", [error])


def test_latents_become_a_video_with_their_recipe(latents, decoded_by, tmp_path):
    code, body = decoded_by(latents(), "--model", TINY)
    output = tmp_path / f"svgen-3-{request().fingerprint[:8]}.mp4"
    video = read_mp4(output)
    assert (code, body["schema"], body["warnings"]) == (0, "svgen.decode/1", [])
    assert (body["data"]["output"], body["data"]["frames"]) == (output.name, 5)
    assert (video.width_px, video.height_px, video.frames, float(video.fps)) == (48, 32, 5, 12.5)
    assert read_recipe(output)["request"] == request().as_json()


def test_video_of_one_colour_is_a_warning_and_metadata_can_be_left_out(
    latents, decoded_by, tmp_path
):
    shutil.copytree(TINY, tmp_path / "grey")
    file = tmp_path / "grey" / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    for name in ("decoder.conv_out.weight", "decoder.conv_out.bias"):
        tensors[name] = np.zeros_like(tensors[name])
    save_file(tensors, file)
    code, body = decoded_by(latents(), "--model", "grey", "-o", "x.mp4", "--no-metadata")
    assert code == 0
    assert [text for text in body["warnings"] if "one colour" in text]
    assert read_mp4(tmp_path / "x.mp4").comment is None


@pytest.mark.parametrize("model", ["/gone/tiny", TINY])
def test_latents_may_name_no_folder_there_or_not(latents, decoded_by, model):
    code, body = decoded_by(latents(model=model))
    assert (code, body["error"]["code"]) == (2, "E_MODEL")
    assert f"{model!r}, which is a folder" in body["error"]["message"]
    assert body["error"]["hint"].startswith("--model")


def test_model_that_is_not_on_disk_needs_the_network(latents, decoded_by):
    code, body = decoded_by(latents(model="wan2.1-1.3b"), "--offline")
    assert (code, body["error"]["code"]) == (5, "E_OFFLINE")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"width_px": 64}, "E_LATENTS"),
        ({"frames": 9}, "E_LATENTS"),
        ({"width_px": 47}, "E_SIZE"),
        ({"frames": 6}, "E_FRAMES"),
        ({"fps": 0.5}, "E_VALUE"),
        ({"fps": 1e6}, "E_VALUE"),
    ],
)
def test_request_that_does_not_fit_is_an_error(latents, decoded_by, changes, code):
    status, body = decoded_by(latents(**changes), "--model", TINY)
    assert (status, [one["code"] for one in problems_of(body)]) == (2, [code])


def test_latents_that_are_not_finite_are_an_error(latents, decoded_by):
    array = np.zeros(SHAPE, np.float32)
    array[0, 1, 2, 3, 4] = np.inf
    code, body = decoded_by(latents(array), "--model", TINY)
    assert (code, body["error"]["code"]) == (2, "E_LATENTS")


def test_memory_that_cannot_suffice_is_told_before_loading(latents, decoded_by, monkeypatch):
    monkeypatch.setenv("SVGEN_MEMORY_GIB", "0.0001")
    code, body = decoded_by(latents(), "--model", str(TINY))
    assert (code, body["error"]["code"]) == (7, "E_MEMORY")


def test_every_problem_is_reported_at_once(latents, decoded_by, tmp_path):
    shutil.copytree(TINY, tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "vae" / "diffusion_pytorch_model.safetensors", 9000)
    (tmp_path / "x.mp4").touch()
    code, body = decoded_by(latents(), "--model", "cut", "-o", "x.mp4")
    found = [one["code"] for one in problems_of(body)]
    assert (code, found) == (2, ["E_OUTPUT_EXISTS", "E_CHECKPOINT"])
    code, body = decoded_by(latents(), "--model", "cut", "-o", "y.mp4")
    assert (code, "vae" in body["error"]["message"]) == (5, True)


@pytest.mark.parametrize("name", ["nothing.safetensors", TINY, __file__])
def test_file_without_latents_is_an_error(decoded_by, name):
    code, body = decoded_by(name)
    assert (code, body["error"]["code"]) == (2, "E_LATENTS")
