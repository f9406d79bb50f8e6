"""The kinds of files that `fuzz_worker` breaks, and what svgen's commands do with each."""

import io
import json
import random
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tests.faults import mutations
from tests.faults.mutations import Mutate
from tests.helpers import ROOT

TINY = ROOT / "tests/golden/tiny"
SIZE = ("--res", "48x32", "--frames", "5", "--steps", "2")


@dataclass(frozen=True, kw_only=True)
class Target:
    """One kind of file: a whole one, how it is broken, where it lies and what reads it. `run`
    returns a word, or raises SvgenError.
    """

    whole: bytes
    mutate: Mutate
    path: str
    run: Callable[[], str]
    plans: bool = False  # a whole run: it takes longer


MOST_LETTERS = 2000  # of a part of a message


def check_problem(code: str, *texts: str) -> None:
    """A problem has a documented code, a message, and fits on a screen."""
    from svgen import errors

    assert code in errors.CODES, code
    assert texts[0], "no message"
    assert max(map(len, texts)) < MOST_LETTERS, f"{max(map(len, texts))} letters: {texts[0][:200]}"


def command(*args: str) -> str:
    """Run a command line in this process; raises AssertionError for a defect."""
    from svgen import errors
    from svgen.cli import run

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run([*args, "--json"])
    lines = out.getvalue().splitlines()
    assert len(lines) == 1, f"{len(lines)} lines of JSON"
    error = json.loads(lines[0])["error"]
    if error is None:
        assert code == 0
        return "works"
    for one in (error, *error["details"].get("problems", [])):
        check_problem(one["code"], one["message"], one["why"], one["hint"])
    if error["code"] in ("E_INTERNAL", "E_MEMORY"):
        log = error["details"].get("log")
        raise AssertionError(Path(log).read_text() if log else json.dumps(error))
    assert code == errors.CODES[error["code"]][0].exit_code
    return error["code"]


def targets() -> dict[str, Target]:
    """Every kind of file. The folder that is current becomes the arena's inside."""
    import svgen.cli.planning as planning

    made_once = cache(planning.open_pipeline)  # of a model that nobody breaks here

    def opened(model: str, dtype: str, stage: Any = None, *, mesh: str = "auto") -> Any:
        return made_once(model, dtype, mesh=mesh)

    planning.open_pipeline = opened
    for name in ("whole", "broken", "sharded", "indexed"):
        shutil.copytree(TINY, name)
    for name in ("sharded", "indexed"):
        _shard(Path(name) / "transformer")
    made = {f"weights {part}": _weights(part) for part in ("text_encoder", "transformer", "vae")}
    made["weights shard"] = _shard_target()
    made["index"] = _index()
    configs = ("text_encoder", "transformer", "vae")
    made |= {f"config {part}": _small(f"{part}/config.json", open_model) for part in configs}
    made["model_index"] = _small("model_index.json", open_model)
    made["tokenizer"] = _small("tokenizer/tokenizer.json", encode, _tokenizer())
    made["tokenizer_config"] = _small("tokenizer/tokenizer_config.json", encode)
    return made | _inputs()


def _weights(part: str) -> Target:
    stem = "model" if part == "text_encoder" else "diffusion_pytorch_model"
    path = f"{part}/{stem}.safetensors"
    return Target(
        whole=(TINY / path).read_bytes(),
        mutate=mutations.break_safetensors,
        path=f"broken/{path}",
        run=lambda: load("broken", part),
    )


def _shard(folder: Path) -> None:
    """Two files and an index in place of one file."""
    from safetensors.numpy import load_file, save_file

    single = folder / "diffusion_pytorch_model.safetensors"
    tensors, mapping = load_file(single), {}
    names = sorted(tensors)
    for number, half in enumerate((names[::2], names[1::2])):
        file = f"part-{number}.safetensors"
        save_file({name: tensors[name] for name in half}, folder / file)
        mapping |= dict.fromkeys(half, file)
    single.unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": mapping}
    (folder / f"{single.name}.index.json").write_text(json.dumps(index))


def _shard_target() -> Target:
    path = "sharded/transformer/part-1.safetensors"
    return Target(
        whole=Path(path).read_bytes(),
        mutate=mutations.break_safetensors,
        path=path,
        run=lambda: load("sharded", "transformer"),
    )


def _index() -> Target:
    path = "indexed/transformer/diffusion_pytorch_model.safetensors.index.json"

    def run() -> str:
        from svgen.hub import locate

        assert locate("./indexed")
        return load("indexed", "transformer")

    return Target(whole=Path(path).read_bytes(), mutate=mutations.break_json, path=path, run=run)


def _tokenizer() -> bytes:
    """The small tokenizer with every kind of part."""
    content = json.loads((TINY / "tokenizer/tokenizer.json").read_text())
    replace = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}
    parts = [{"type": "NFKC"}, {"type": "Strip", "strip_left": False, "strip_right": True}]
    content["normalizer"] = {"type": "Sequence", "normalizers": [*parts, replace]}
    content["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [{"type": "WhitespaceSplit"}, content["pre_tokenizer"]],
    }
    return json.dumps(content).encode()


def _small(path: str, run: Callable[[], str], whole: bytes = b"") -> Target:
    return Target(
        plans=run is open_model,
        whole=whole or (TINY / path).read_bytes(),
        mutate=mutations.break_json,
        path=f"broken/{path}",
        run=run,
    )


@cache
def _opened(folder: str) -> Any:
    from svgen.pipeline import Pipeline

    return Pipeline(Path(folder))


def load(folder: str, part: str) -> str:
    """Check a part of a checkpoint, and load its weights."""
    pipeline = _opened("whole")
    pipeline.folder = Path(folder)
    pipeline.check_files(part)
    pipeline._load(part)
    return "works"


def open_model() -> str:
    """Plan a run with a checkpoint as `generate` does, up to its weights' headers."""
    from svgen.catalog import read_sampling
    from svgen.hub import locate
    from svgen.pipeline import Pipeline

    pipeline = Pipeline(locate("./broken"))
    read_sampling(pipeline.folder)
    assert pipeline.parameters > 0
    pipeline.check_files()
    return "works"


def encode() -> str:
    """Read a tokenizer and encode prompts that find its weak places."""
    from svgen.tokenizer import Tokenizer

    made = Tokenizer.load(Path("broken"), vocabulary=64)
    for prompt in ("a red ball", "a" * 5000, "\U0001f409 \ue000 <unk> </s> " * 20, "猫"):
        found = made.encode(prompt, truncate=True, allow_empty=True)
        assert 0 < found.length <= 512
        assert 0 <= found.ids.min() <= found.ids.max() < 64
    return "works"


def _request(**changes: Any) -> Any:
    from svgen.config import Request, SparsitySchedule

    values = {"prompt": "a café", "model": "demo", "width_px": 48, "height_px": 32, "frames": 5}
    values |= {"fps": 12.5, "steps": 2, "guidance": 4.0, "shift": 5.0, "seed": 3}
    values |= {"schedule": "mine", "sparsity": SparsitySchedule(band_share=0.3, dense_steps=1)}
    return Request(**values | changes)


def _inputs() -> dict[str, Target]:
    """What is given to a run beside its model."""
    import numpy as np

    from svgen import resume
    from svgen.presets import presets_folder

    request, zeros = _request(), np.zeros((1, 2, 4, 6, 8), np.float32)
    resume.save_latents(Path("whole.latents.safetensors"), zeros, request)
    state = {name: zeros for name in resume.STATE} | {"step": np.int32(1)}
    resume.save_state(Path("whole.state.safetensors"), state, request)
    recipe = json.dumps({"svgen": "0.1", "request": request.as_json()})
    lines = ({"prompt": "a", "seed": 3, "output": "a.mp4"}, {"prompt": "b", "res": "64x48"})
    preset = (presets_folder() / "720p-aggressive.toml").read_bytes()
    settings = b'[generate]\nsteps = 3\nres = "48x32"\nfps = 12\nduration = "1s"\noffline = true\n'
    model = ("--model", "./whole", "--dry-run")
    return {
        "sampling": Target(
            whole=b'{"steps": 8, "size_px": [48, 32], "trained_px": [[48, 32]], "negative": "x"}',
            mutate=mutations.break_json,
            path="sampled/svgen.json",
            run=sampling,
        ),
        "preset": Target(
            whole=preset,
            mutate=mutations.break_toml,
            path="mine.toml",
            plans=True,
            run=lambda: command("generate", "a", *model, "--frames", "5", "--preset", "mine.toml"),
        ),
        "prompts": Target(
            whole="\n".join(map(json.dumps, lines)).encode(),
            mutate=mutations.break_lines,
            path="prompts.jsonl",
            plans=True,
            run=lambda: command("generate", "--prompts", "prompts.jsonl", *model, *SIZE),
        ),
        "recipe": Target(
            whole=mutations.mp4_of(recipe.encode()),
            mutate=mutations.break_mp4,
            path="old.mp4",
            plans=True,
            run=lambda: command("generate", "--from", "old.mp4", *model),
        ),
        "latents": Target(
            whole=Path("whole.latents.safetensors").read_bytes(),
            mutate=_break_saved,
            path="x.latents.safetensors",
            run=latents,
        ),
        "state": Target(
            whole=Path("whole.state.safetensors").read_bytes(),
            mutate=_break_saved,
            path="x.state.safetensors",
            run=lambda: state_of(request),
        ),
        "settings": Target(
            whole=settings,
            mutate=mutations.break_toml,
            path="svgen.toml",
            plans=True,
            run=lambda: command("generate", "a", *model),
        ),
        "bench": Target(
            whole=json.dumps(_record()).encode(),
            mutate=mutations.break_json,
            path="bench.json",
            run=compare,
        ),
    }


def _break_saved(rng: random.Random, data: bytes) -> bytes:
    """Break a saved file, or the request in its header."""
    if rng.random() < 0.5:
        return mutations.break_safetensors(rng, data)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    request = mutations.break_json(rng, header["__metadata__"]["request"].encode())
    header["__metadata__"]["request"] = request.decode("utf-8", "replace")
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def sampling() -> str:
    """Read a checkpoint's default values, and resolve a request with them."""
    from svgen.catalog import read_sampling
    from svgen.cli.resolve import resolve
    from svgen.errors import raise_all

    found = read_sampling(Path("sampled"))
    resolved = resolve({"prompt": "a"}, model="./sampled", dtype="float32", sampling=found)
    raise_all(resolved.problems)
    return "works"


def latents() -> str:
    """Read latents and hold them against a model, as `decode` does before it decodes."""
    from svgen.cli.decode import _check, _model
    from svgen.cli.naming import output_path
    from svgen.resume import load_latents

    array, request = load_latents(Path("x.latents.safetensors"))
    _model({"model": ""}, request)
    _check(array, request, _opened("whole"))
    from datetime import date

    output_path(None, request, today=date.today())
    return "works"


def state_of(request: Any) -> str:
    """Read the state of a run."""
    from svgen.resume import load_state

    found = load_state(Path("x.state.safetensors"), request, (1, 2, 4, 6, 8))
    assert found is not None
    return "works"


def _record() -> dict[str, Any]:
    from svgen import baseline

    row = {"median_ms": 2.0, "least_ms": 1.0, "most_ms": 3.0, "n": 5, "compile_s": 1.0}
    texts, counts = dict.fromkeys(baseline.TEXTS, "x"), dict.fromkeys(baseline.COUNTS, 2)
    tables = {"versions": {"jax": "1"}, "schedules": {"mine": 0.3}, "rows": {"embed": row}}
    return {"schema": baseline.SCHEMA, **texts, **counts, **tables}


def compare() -> str:
    """Read saved timings and compare with them."""
    from svgen import baseline

    theirs, ours = baseline.read(Path("bench.json")), _record()
    baseline.check_comparable(ours, theirs, Path("bench.json"))
    json.dumps(baseline.compare(ours, theirs), allow_nan=False)
    return "works"
