"""`svgen generate` on the small checkpoint: real processes for what only they show, else in-process
plans.
"""

import json
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from svgen.cli import run
from svgen.recipe import read_recipe
from svgen.resume import load_latents
from tests.helpers import ROOT, json_of, run_svgen
from tests.mp4 import read_mp4
from tests.videos import decoded, write

TINY = "tests/golden/tiny"
WEIGHTS = "diffusion_pytorch_model.safetensors"
SMALL = ("--model", TINY, "--res", "32x32", "--frames", "5", "--steps", "2")
PROMPT = "a red ball"
FILE_LIMIT = 2500  # bytes: the latents of SMALL fit, its MP4 does not
LIMITED = f"""
import resource
from svgen.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({FILE_LIMIT}, {FILE_LIMIT}))
main()
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory, env):
    """One run with a drawn seed: (process, JSON, MP4)."""
    path = tmp_path_factory.mktemp("made") / "first.mp4"
    flags = ("-o", str(path), "--json", "--keep-latents")
    done = run_svgen("generate", *SMALL, *flags, PROMPT, env=env, cwd=ROOT)
    return done, json_of(done), path


@pytest.fixture
def said(capsys):
    """Run in this process with --json; returns (exit code, the object)."""

    def call(*args):
        code = run([*args, "--json"])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1, lines
        return code, json.loads(lines[0])

    return call


@pytest.fixture
def planned(said, tmp_path):
    """Plan a run of the small checkpoint; returns (exit code, the object)."""

    def call(*args, prompt=PROMPT):
        prompts = () if prompt is None else (prompt,)
        output = () if "-o" in args else ("-o", str(tmp_path / "x.mp4"))
        model = () if "--model" in args else ("--model", TINY)
        return said("generate", *prompts, *model, *output, *args, "--dry-run")

    return call


def start(*args, env, program=("-m", "svgen")):
    return subprocess.Popen(
        [sys.executable, *program, *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def problems_of(body):
    error = body["error"]
    return error["details"].get("problems", [error])


def codes_of(body):
    return [problem["code"] for problem in problems_of(body)]


def checkpoint(folder):
    shutil.copytree(ROOT / TINY, folder / "model")
    return folder / "model"


# Whole runs.


def test_run_makes_an_mp4_as_asked(made):
    done, body, path = made
    video = read_mp4(path)
    assert done.returncode == 0
    assert (video.width_px, video.height_px, video.frames, video.fps) == (32, 32, 5, 16)
    assert (body["schema"], body["ok"], body["error"]) == ("svgen.generate/1", True, None)
    data = body["data"]
    assert (data["output"], data["bytes"]) == (str(path), path.stat().st_size)
    assert (data["width_px"], data["height_px"], data["frames"], data["fps"]) == (32, 32, 5, 16)
    assert {"load transformer", "denoise", "decode and encode"} <= set(data["timings"])
    assert body["warnings"] == []


def test_seed_is_drawn_printed_and_stored(made):
    done, body, path = made
    seed = body["data"]["seed"]
    assert body["data"]["origin"]["seed"] == "drawn"
    assert f"seed {seed}" in done.stderr
    request = read_recipe(path)["request"]
    assert request == body["data"]["request"]
    assert (request["seed"], request["prompt"], request["steps"]) == (seed, PROMPT, 2)
    assert load_latents(next(path.parent.glob("*.safetensors")))[1].as_json() == request


def test_progress_off_a_terminal_is_plain_lines_of_80_columns(made):
    lines = made[0].stderr.splitlines()
    assert any(line.startswith("denoise: 100%  2/2") for line in lines)
    assert any(line.startswith("decode: 100%  5/5") for line in lines)
    assert max(map(len, lines)) <= 80
    assert not any(mark in made[0].stderr for mark in "\r\x1b")


def test_recipe_repeats_bit_for_bit_to_stdout_and_quietly(made, env, tmp_path):
    path = made[2]
    args = ["generate", "--from", str(path), "--model", TINY, "-q", "-o", "-"]
    process = subprocess.run(
        [sys.executable, "-m", "svgen", *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    again = tmp_path / "again.mp4"
    again.write_bytes(process.stdout)
    assert (process.returncode, process.stderr) == (0, b"")
    assert np.array_equal(decoded(again), decoded(path))
    assert read_recipe(again) == read_recipe(path)
    left = [item.name for item in (ROOT / env["TMPDIR"]).glob("svgen-*")]
    assert left == []


SPARSE = """
schema = 1
width = 32
height = 32
schedule = "mine"
[sparsity]
band_share = 0.3
dense_steps = 0.5
dense_layers = 1
"""


def test_sparse_schedule_reaches_the_heads_and_the_recipe(env, tmp_path):
    preset = tmp_path / "mine.toml"
    preset.write_text(SPARSE)
    flags = ("--model", TINY, "--frames", "5", "--steps", "2", "--seed", "3", "--json")
    runs = {}
    for name, more in (("sparse", ("--preset", str(preset))), ("dense", ("--res", "32x32"))):
        runs[name] = tmp_path / f"{name}.mp4"
        done = run_svgen(
            "generate", PROMPT, *flags, *more, "-o", str(runs[name]), env=env, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr
        runs[f"{name} calls"] = json_of(done)["data"]["calls"]
    assert runs["dense calls"] == {"dense": 48, "spatial": 0, "temporal": 0}
    sparse = runs["sparse calls"]  # 2 steps x 2 branches x 3 layers x 4 heads; 1 x 2 x 2 x 4 sparse
    assert sparse["dense"] == 32
    assert sparse["spatial"] + sparse["temporal"] == 16
    request = read_recipe(runs["sparse"])["request"]
    assert (request["schedule"], request["preset"]) == ("mine", "mine")
    assert request["sparsity"] == {
        "band_share": 0.3,
        "dense_steps": 1,
        "dense_layers": 1,
        "rows": 64,
        "budget": None,
    }
    again = tmp_path / "again.mp4"
    source = ("--from", str(runs["sparse"]), "--model", TINY)
    run_svgen("generate", *source, "-o", str(again), env=env, cwd=ROOT)
    frames = {
        name: decoded(path)
        for name, path in (("again", again), *runs.items())
        if "calls" not in name
    }
    assert np.array_equal(frames["again"], frames["sparse"])
    assert not np.array_equal(frames["sparse"], frames["dense"])


def test_flags_override_a_recipe_and_another_seed_is_another_video(made, env, tmp_path):
    _, body, path = made
    output = tmp_path / "other.mp4"
    flags = ("--from", str(path), "--model", TINY, "--seed", "5", "--json=events")
    done = run_svgen("generate", *flags, "-o", str(output), env=env, cwd=ROOT)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [line["event"] for line in lines]
    assert (kinds[0], kinds[-1], set(kinds)) == (
        "start",
        "result",
        {"start", "stage", "step", "saved", "result"},
    )
    steps = [(line["done"], line["total"]) for line in lines if line.get("name") == "denoise"]
    assert steps == [(1, 2), (2, 2)]
    assert [line["kind"] for line in lines if line["event"] == "saved"] == ["latents", "video"]
    result = lines[-1]
    assert (result["schema"], result["ok"], result["data"]["seed"]) == ("svgen.generate/1", True, 5)
    assert result["data"]["request"] == {**body["data"]["request"], "seed": 5}
    assert not np.array_equal(decoded(output), decoded(path))
    assert list(tmp_path.iterdir()) == [output]  # latents are deleted when the MP4 is whole


def test_full_disk_keeps_the_latents_and_decode_makes_the_video(made, env, tmp_path):
    _, body, path = made
    output = tmp_path / "x.mp4"
    flags = ("--seed", str(body["data"]["seed"]), "-o", str(output), "--json")
    process = start("generate", PROMPT, *SMALL, *flags, env=env, program=("-c", LIMITED))
    stdout, stderr = process.communicate(timeout=300)
    failed = json.loads(stdout)
    assert path.stat().st_size > FILE_LIMIT
    assert (process.returncode, failed["error"]["code"]) == (6, "E_DISK_FULL"), stderr
    kept = failed["error"]["details"]["latents"]
    assert [str(item) for item in tmp_path.iterdir()] == [kept]
    again = f"svgen decode {kept} -o NAME.mp4 --model ./tests/golden/tiny"
    assert f"{again}; the same command" in failed["error"]["hint"]  # what it says works

    model = ("--model", "./tests/golden/tiny")
    done = run_svgen("decode", kept, "-o", str(output), *model, "--json", env=env, cwd=ROOT)
    assert (done.returncode, json_of(done)["schema"]) == (0, "svgen.decode/1")
    assert np.array_equal(decoded(output), decoded(path))
    assert read_recipe(output) == read_recipe(path)


def test_ctrl_c_while_denoising_leaves_the_state(env, tmp_path):
    flags = ("--res", "32x32", "--frames", "5", "--steps", "1000", "-o", str(tmp_path / "x.mp4"))
    process = start("generate", PROMPT, "--model", TINY, *flags, "--json", env=env)
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith("denoise:  10%"):
            process.send_signal(signal.SIGINT)
            break
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 130, "".join(seen) + stderr
    assert json.loads(stdout)["error"]["code"] == "E_INTERRUPTED"
    assert "Traceback" not in stderr
    assert [str(one) for one in tmp_path.iterdir()] == [
        json.loads(stdout)["error"]["details"]["state"]
    ]


def test_nan_in_the_weights_is_found_after_the_first_step(env, tmp_path):
    model = checkpoint(tmp_path)
    file = model / "transformer" / WEIGHTS
    tensors = load_file(file)
    tensors["blocks.1.ffn.net.2.bias"][3] = np.nan
    save_file(tensors, file, {"format": "pt"})
    flags = ("--res", "32x32", "--frames", "5", "--steps", "2", "-o", str(tmp_path / "x.mp4"))
    done = run_svgen("generate", PROMPT, "--model", str(model), *flags, env=env)
    assert done.returncode == 8
    assert "error[E_NAN]: the latents after step 1 of 2 hold NaN" in done.stderr
    assert [item.name for item in tmp_path.iterdir()] == ["model"]


# What is checked before anything is loaded.


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_dry_run_loads_no_weights_and_writes_nothing(planned, tmp_path, monkeypatch):
    def fail(*_):
        raise AssertionError("weights are loaded")

    monkeypatch.setattr("svgen.pipeline.load_module", fail)
    code, body = planned("--res", "32x32", "--frames", "9")
    data = body["data"]
    assert (code, data["dry_run"], data["tokens"], data["on_disk"]) == (0, True, 12, True)
    assert list(tmp_path.iterdir()) == []


def test_every_problem_is_reported_at_once_with_values_that_work(planned, tmp_path):
    output = tmp_path / "there.mp4"
    output.write_bytes(b"mine")
    flags = ("--res", "1000x560", "--frames", "80", "--preset", "480p-dens", "--steps", "0")
    code, body = planned(*flags, "-o", str(output), prompt=" ")
    expected = ["E_FRAMES", "E_OUTPUT_EXISTS", "E_PRESET", "E_PROMPT_EMPTY", "E_SIZE", "E_VALUE"]
    assert (code, sorted(codes_of(body))) == (2, expected)
    found = {problem["code"]: problem for problem in problems_of(body)}
    assert all(problem["why"] and problem["hint"] for problem in found.values())
    assert "1000x560" in found["E_SIZE"]["message"]
    assert found["E_SIZE"]["hint"] == "--res 992x560 or --res 1008x560"
    assert found["E_FRAMES"]["hint"] == "--frames 77 or --frames 81"
    assert "--preset 480p-dense" in found["E_PRESET"]["hint"]
    assert found["E_VALUE"]["hint"] == "--steps 1"
    assert output.read_bytes() == b"mine"
    size = ("--res", "992x560", "--frames", "77", "--steps", "1", "--preset", "480p-dense")
    assert planned(*size)[0] == 0


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--frames", "x"], "E_USAGE"),
        (["--res", "4k"], "E_SIZE"),
        (["--fps", "nan"], "E_VALUE"),
        (["--fps", "inf", "--duration", "5"], "E_VALUE"),
        (["--guidance", "0.5"], "E_VALUE"),
        (["--seed", "-1"], "E_VALUE"),
        (["--seed", "9" * 30], "E_VALUE"),
        (["--shift", "0"], "E_VALUE"),
        (["--duration", "999999", "--fps", "1"], "E_FRAMES"),
        (["--frames", "5", "--duration", "1s"], "E_USAGE"),
        (["--overwrite", "--auto-number"], "E_USAGE"),
        (["--model", "wan2.1-1.4b"], "E_MODEL"),
        (["--model", "nobody"], "E_MODEL"),
        (["--from", __file__], "E_RECIPE"),
        (["-o", "x.avi"], "E_OUTPUT_NAME"),
        (["-o", "{sed}.mp4"], "E_OUTPUT_NAME"),
        (["-o", "-"], "E_OUTPUT_NAME"),
        (["--device", "quantum"], "E_USAGE"),
        (["extra"], "E_USAGE"),
    ],
)
def test_bad_flag_is_one_json_object_and_exit_code_2(planned, flags, code):
    status, body = planned(*flags)
    assert (status, body["ok"], body["data"], codes_of(body)) == (2, False, None, [code])
    assert body["schema"] == "svgen.generate/1"


def test_unknown_form_of_json_is_an_error(capsys):
    assert run(["generate", "x", "--json=xml"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "E_USAGE"


def test_json_does_not_take_the_prompt_for_its_value(capsys, tmp_path):
    output = str(tmp_path / "x.mp4")
    args = ["--model", TINY, "-o", output, "--dry-run", "--json", "a cat"]
    assert run(["generate", *args]) == 0
    assert json.loads(capsys.readouterr().out)["data"]["request"]["prompt"] == "a cat"


def test_no_tpu_is_told_together_with_wrong_flags(said, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    flags = ("--model", "wan2.1-14b", "--res", "1000x560", "--frames", "80")
    code, body = said("generate", "x", *flags)
    assert (code, codes_of(body)) == (2, ["E_SIZE", "E_FRAMES", "E_NO_TPU"])


def test_auto_without_a_tpu_is_the_model_in_the_package(said, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    code, body = said("generate", "x", "--dry-run")
    assert (code, body["data"]["model"], body["data"]["origin"]["model"]) == (0, "demo", "device")
    assert (body["data"]["width_px"], body["data"]["frames"]) == (128, 33)


@pytest.mark.parametrize("model", ["wan2.1-14b", "wan2.1-1.3b", "some/repository"])
def test_model_of_the_hub_needs_a_tpu_or_a_word_and_a_dry_run_does_not(said, monkeypatch, model):
    monkeypatch.delenv("JAX_PLATFORMS")
    code, body = said("generate", "x", "--model", model)
    assert (code, codes_of(body)) == (3, ["E_NO_TPU"])
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    code, body = said("generate", "x", "--model", model, "--dry-run")
    assert (code, body["data"]["on_disk"]) == (0, False)
    assert "no TPU" in body["warnings"][0]


def test_device_asked_for_and_missing_is_exit_code_3(planned):
    code, body = planned("--device", "tpu")
    assert (code, codes_of(body)) == (3, ["E_NO_TPU"])


def test_warnings_of_the_device_are_shown(planned, monkeypatch):
    from svgen.cli import planning
    from svgen.cli.device import Device

    device = Device(platform="cpu", kind="cpu", count=1, reason="", warnings=("no cache",))
    monkeypatch.setattr(planning, "prepare_jax", lambda *_, **__: device)
    assert "no cache" in planned()[1]["warnings"]


def test_recipe_keeps_its_type_and_asks_for_a_folder_again(planned, said, tmp_path):
    request = {"prompt": "p", "model": f"./{TINY}", "width_px": 64, "height_px": 48, "frames": 9}
    request |= {"fps": 16.0, "steps": 3, "guidance": 2.0, "shift": 4.0, "seed": 1}
    request |= {"dtype": "bfloat16"}
    old = tmp_path / "old.mp4"
    write(old, recipe={"svgen": "0.1.0", "request": request})
    code, body = planned("--from", str(old), prompt=None)
    assert (code, body["data"]["request"] | request) == (0, body["data"]["request"])
    assert body["data"]["origin"]["dtype"] == "recipe"
    code, body = said("generate", "--from", str(old), "--frames", "8", "--dry-run")
    assert (code, sorted(codes_of(body))) == (2, ["E_FRAMES", "E_RECIPE"])
    assert "add --model" in body["error"]["hint"] + problems_of(body)[1]["hint"]


# Prompts.


def test_prompt_comes_from_a_file_or_standard_input(planned, tmp_path, monkeypatch):
    text = "ein roter Ball 🔴 “quoted”\nsecond line"
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert planned(prompt=f"@{file}")[1]["data"]["request"]["prompt"] == text
    with file.open() as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert planned(prompt="-")[1]["data"]["request"]["prompt"] == text


@pytest.mark.parametrize(
    ("data", "code", "status"),
    [
        (None, "E_READ", 6),
        (b"", "E_PROMPT_EMPTY", 2),
        (b" \n", "E_PROMPT_EMPTY", 2),
        (b"caf\xe9", "E_USAGE", 2),
        (b"a " * (1 << 20), "E_PROMPT_LONG", 2),
    ],
)
def test_bad_prompt_file_is_named(planned, tmp_path, data, code, status):
    file = tmp_path / "prompt.txt"
    if data is not None:
        file.write_bytes(data)
    found = planned(prompt=f"@{file}")
    assert (found[0], codes_of(found[1])) == (status, [code])


def test_closed_standard_input_and_zero_bytes_are_errors(planned, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert codes_of(planned(prompt="-")[1]) == ["E_READ"]
    assert codes_of(planned(prompt="@a\0b")[1]) == ["E_READ"]


def test_missing_prompt_is_an_error(planned):
    assert codes_of(planned(prompt=None)[1]) == ["E_PROMPT_EMPTY"]
    assert codes_of(planned(prompt="\x00\x01")[1]) == ["E_PROMPT_EMPTY"]


def test_long_prompts_are_both_named_and_may_be_cut(planned):
    flags = ("--negative", "z " * 700)
    code, body = planned(*flags, prompt="q w " * 400)
    assert (code, codes_of(body)) == (2, ["E_PROMPT_LONG", "E_PROMPT_LONG"])
    assert "these words would be cut" in body["error"]["message"]
    code, body = planned(*flags, "--truncate", prompt="q w " * 400)
    assert (code, body["data"]["request"]["truncate"]) == (0, True)


def test_prompt_that_is_not_utf8_passes(planned, tmp_path):
    code, body = planned("-o", str(tmp_path / "{slug}.mp4"), prompt="caf\udce9 \ud83d")
    assert (code, body["data"]["output"]) == (0, str(tmp_path / "caf.mp4"))


# Outputs.


def test_existing_output_is_kept_replaced_skipped_or_numbered(planned, said, tmp_path):
    output = tmp_path / "x.mp4"
    output.write_bytes(b"mine")
    code, body = planned()
    assert (code, codes_of(body)) == (2, ["E_OUTPUT_EXISTS"])
    assert planned("--overwrite")[1]["data"]["output"] == str(output)
    numbered = planned("--auto-number")[1]["data"]["output"]
    assert numbered == str(tmp_path / "x-1.mp4")
    code, body = said("generate", "x", *SMALL, "-o", str(output), "--skip-existing")
    assert (code, body["data"]["skipped"], output.read_bytes()) == (0, True, b"mine")


@pytest.mark.parametrize("name", ["nowhere/x.mp4", "file/x.mp4", "/proc/x.mp4"])
def test_output_that_cannot_be_written_is_exit_code_6(planned, tmp_path, name):
    (tmp_path / "file").touch()
    code, body = planned("-o", str(tmp_path / name))
    assert (code, codes_of(body)) == (6, ["E_WRITE"])


def test_full_temporary_folder_is_found_before_a_video_for_stdout(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert run(["generate", PROMPT, *SMALL, "-o", "-"]) == 6
    assert "error[E_WRITE]" in capsys.readouterr().err


def test_stdout_that_is_a_terminal_gets_no_video(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert run(["generate", PROMPT, *SMALL, "-o", "-"]) == 2
    assert "error[E_OUTPUT_NAME]: -o - would write the MP4 to the terminal" in (
        capsys.readouterr().err
    )


# Checkpoints.


def rewrite(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def shard(folder, stale=False):
    """Split the transformer in two, with an index; a stale one looks in the wrong shard."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    mapping = {name: file for file, part in halves.items() for name in part}
    if stale:
        mapping[names[0]] = "b.safetensors"
    text = json.dumps({"weight_map": mapping})
    (folder / f"{WEIGHTS}.index.json").write_text(text)
    (folder / WEIGHTS).unlink()


BREAKS = {
    "missing": lambda model: (model / "vae" / WEIGHTS).unlink(),
    "truncated": lambda model: os.truncate(model / "transformer" / WEIGHTS, 50_000),
    "corrupt": lambda model: (model / "vae" / WEIGHTS).write_bytes(b"\xff" * 5000),
    "empty": lambda model: (model / "vae" / WEIGHTS).write_bytes(b""),
    "shape": lambda model: rewrite(
        model / "transformer" / WEIGHTS,
        lambda tensors: tensors.update({"proj_out.bias": np.zeros(7, np.float32)}),
    ),
    "extra": lambda model: rewrite(
        model / "transformer" / WEIGHTS,
        lambda tensors: tensors.update({"lora.weight": np.zeros(7, np.float32)}),
    ),
    "absent": lambda model: rewrite(
        model / "vae" / WEIGHTS, lambda tensors: tensors.pop("decoder.conv_out.bias")
    ),
    "stale": lambda model: shard(model / "transformer", stale=True),
    "shard": lambda model: (
        shard(model / "transformer"),
        (model / "transformer" / "b.safetensors").unlink(),
    ),
    "tokenizer": lambda model: (model / "tokenizer" / "tokenizer.json").unlink(),
    "broken tokenizer": lambda model: (model / "tokenizer" / "tokenizer.json").write_text("{"),
    "config": lambda model: (model / "transformer" / "config.json").write_text("[]"),
    "odd config": lambda model: (model / "vae" / "config.json").write_text('{"base_dim": -1}'),
}


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("missing", f"vae/{WEIGHTS}"),
        ("truncated", f"transformer/{WEIGHTS}"),
        ("corrupt", f"vae/{WEIGHTS}"),
        ("empty", f"vae/{WEIGHTS}"),
        ("shape", "proj_out.bias"),
        ("extra", "lora.weight"),
        ("absent", "decoder.conv_out.bias"),
        ("stale", "index.json is stale"),
        ("shard", "b.safetensors"),
        ("tokenizer", "tokenizer/tokenizer.json"),
        ("broken tokenizer", "tokenizer/tokenizer.json"),
        ("config", "transformer/config.json"),
        ("odd config", "base_dim"),
    ],
)
def test_broken_checkpoint_is_exit_code_5_and_named_before_loading(planned, tmp_path, kind, named):
    model = checkpoint(tmp_path)
    BREAKS[kind](model)
    code, body = planned("--model", str(model), "--res", "32x32")
    assert (code, set(codes_of(body))) == (5, {"E_CHECKPOINT"})
    texts = [problem["message"] + problem["why"] for problem in problems_of(body)]
    assert any(named in text for text in texts), texts


def test_broken_parts_are_all_named_behind_wrong_flags(planned, tmp_path):
    model = checkpoint(tmp_path)
    for kind in ("truncated", "corrupt"):
        BREAKS[kind](model)
    code, body = planned("--model", str(model), "--frames", "6")
    assert (code, codes_of(body)) == (2, ["E_FRAMES", "E_CHECKPOINT", "E_CHECKPOINT"])


def test_sharded_checkpoint_passes(planned, tmp_path):
    model = checkpoint(tmp_path)
    shard(model / "transformer")
    assert planned("--model", str(model))[0] == 0


# Help.


def test_help_fits_a_screen_and_starts_with_examples(capsys):
    assert run(["generate", "-h"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines.index("  Examples:") < lines.index("Options:")
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 80
    assert not any("--dtype" in line for line in lines)


def test_help_all_shows_every_flag(capsys):
    from svgen.cli.generate import command

    assert run(["generate", "--help-all"]) == 0
    shown = capsys.readouterr().out
    assert all(max(one.opts, key=len) in shown for one in command.params if one.opts[0][0] == "-")
    assert run(["generate", "-h"]) == 0
    assert "--dtype" not in capsys.readouterr().out
