"""NaN and infinity are found where they begin: each stage, each branch, on one chip and on two."""

import json
import math
import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from svgen.cli import run
from svgen.cli.execution import make_video
from svgen.cli.output import Console
from svgen.errors import NumericalError
from svgen.numerics import bad_branch
from svgen.pipeline import Pipeline
from svgen.resume import latents_path, load_latents, load_state
from tests.cli.test_execution import REQUEST, TINY

FILES = {
    "text_encoder": "model.safetensors",
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
}
PLANTED = {  # part -> tensor
    "text_encoder": "encoder.block.1.layer.1.DenseReluDense.wo.weight",
    "transformer": "blocks.1.ffn.net.2.bias",
    "vae": "decoder.conv_out.bias",
}
MESHES = ("1x1", "2x1", "1x2")


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Make a copy of the small checkpoint with a value planted in one tensor of a part."""

    def make(part, value):
        folder = tmp_path_factory.mktemp("planted") / "model"
        shutil.copytree(TINY, folder)
        file = folder / part / FILES[part]
        tensors = load_file(file)
        tensors[PLANTED[part]].reshape(-1)[0] = value
        save_file(tensors, file, {"format": "pt"})
        return folder

    return make


def failure(folder, target, *, mesh="auto", text=None):
    with pytest.raises(NumericalError) as caught:
        console, pipeline = Console("generate", verbosity=-2), Pipeline(folder, mesh=mesh)
        make_video(console, pipeline, REQUEST, target, keep_latents=False, text=text)
    return caught.value


def test_nan_in_the_text_encoder_is_found_before_a_step(planted, tmp_path):
    error = failure(planted("text_encoder", np.nan), tmp_path / "x.mp4")
    assert (error.exit_code, error.code) == (8, "E_NAN")
    assert error.details == {"stage": "text encoder", "branch": "both"}
    assert "text encoder" in error.why and "models verify" in error.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mesh", ["1x1", "2x1"])
def test_nan_in_the_transformer_is_found_after_the_first_step(planted, texts, tmp_path, mesh):
    folder = planted("transformer", np.nan)
    error = failure(folder, tmp_path / "x.mp4", mesh=mesh, text=texts[None])
    assert error.details == {"stage": "transformer", "branch": "both", "step": 1, "steps": 2}
    assert list(tmp_path.iterdir()) == [], "there is no good state before the first step"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_the_vae_spoils_keeps_the_latents(planted, texts, tmp_path, value):
    error = failure(planted("vae", value), tmp_path / "x.mp4", text=texts[None])
    (kept,) = tmp_path.iterdir()
    assert error.details.pop("command").endswith("--seed 1")
    assert error.details == {"stage": "vae", "frame": 1, "latents": str(kept)}
    assert f"svgen decode {kept}" in error.hint
    assert np.isfinite(load_latents(kept)[0]).all()


@pytest.fixture(scope="module")
def texts():
    """Embedded prompts of which none, the first, the second or both overflow."""
    text = np.asarray(Pipeline(TINY).embed(REQUEST))
    rows = {None: [], "prompt": [0], "negative": [1], "both": [0, 1]}
    return {
        name: jnp.asarray(text).at[jnp.asarray(bad, jnp.int32)].set(jnp.float32(3e38))
        for name, bad in rows.items()
    }


def test_video_that_is_black_is_a_warning_in_the_result(tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    file = folder / "vae" / FILES["vae"]
    tensors = load_file(file)
    tensors["decoder.conv_out.weight"][:], tensors["decoder.conv_out.bias"][:] = 0, -9
    save_file(tensors, file, {"format": "pt"})
    flags = ("--model", str(folder), "--res", "32x32", "--frames", "1", "--steps", "1", "--json")
    assert run(["generate", "a red ball", "-o", str(tmp_path / "x.mp4"), *flags]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert warning.startswith("every frame is black")


@pytest.fixture(scope="module", params=MESHES)
def pipeline(request):
    """A pipeline on one chip, on two with a branch each, and on two with half the tokens each."""
    found = Pipeline(TINY, mesh=request.param)
    with found.keeping():
        yield found


@pytest.mark.parametrize("branch", ["prompt", "negative", "both"])
def test_branch_that_overflows_is_named(pipeline, texts, branch):
    with pytest.raises(NumericalError) as caught:
        list(pipeline.denoise(REQUEST, texts[branch]))
    assert caught.value.details["branch"] == branch
    assert caught.value.details["stage"] == "transformer"


def test_state_before_a_bad_step_is_kept_and_the_run_goes_on_from_it(
    pipeline, texts, tmp_path, monkeypatch
):
    target = tmp_path / "x.mp4"
    good = [
        {name: np.array(value) for name, value in step.state._asdict().items()}
        for step in pipeline.denoise(REQUEST, texts[None])
    ]
    weights_of = pipeline._ready
    spoilt = {"after": 1}

    def ready(*arguments):
        """The second step of a run meets a text that overflows."""
        weights, step, state, fixed, mesh = weights_of(*arguments)
        bad = weights_of(arguments[0], texts["negative"])[3]

        def maybe(weights, state, *fixed):
            late = int(state.step) >= spoilt["after"]
            return step(weights, state, *(bad if late else fixed))

        return weights, maybe, state, fixed, mesh

    monkeypatch.setattr(pipeline, "_ready", ready)
    console = Console("generate", verbosity=-2)
    with pytest.raises(NumericalError) as caught:
        make_video(console, pipeline, REQUEST, target, keep_latents=False, text=texts[None])
    error = caught.value
    (kept,) = tmp_path.iterdir()
    assert error.details.pop("command").endswith("--seed 1")
    assert error.details == {
        "stage": "transformer", "branch": "negative", "step": 2, "steps": 2, "state": str(kept)
    }  # fmt: skip
    assert f"after step 1 are kept in {kept}" in error.hint
    found = load_state(kept, REQUEST, pipeline.latents_shape(REQUEST))
    assert all(np.array_equal(found[name], value) for name, value in good[0].items())

    spoilt["after"] = 99
    make_video(console, pipeline, REQUEST, target, keep_latents=True, text=texts[None])
    assert np.array_equal(load_latents(latents_path(target, REQUEST))[0], good[1]["latents"])


def test_solver_is_named_where_only_its_sums_overflow(pipeline, texts):
    request = replace(REQUEST, guidance=math.inf)
    with pytest.raises(NumericalError) as caught:
        list(pipeline.denoise(request, texts[None]))
    assert caught.value.details == {"stage": "solver", "branch": None, "step": 1, "steps": 2}
    assert "--guidance" in caught.value.hint


def test_branches_have_names():
    assert [bad_branch(one) for one in ([True], [False], [True, False], [False, False])] == [
        None, "prompt", "negative", "both"
    ]  # fmt: skip
