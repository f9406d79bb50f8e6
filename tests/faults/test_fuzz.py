"""Broken files of every kind: each works or ends with a documented code, soon, in little memory.

SVGEN_FUZZ_INPUTS sets how many (3,000 unless it says otherwise), SVGEN_FUZZ_SEED which ones.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from svgen.errors import CODES
from tests.faults.fuzz_targets import TINY, targets
from tests.faults.fuzz_worker import CANARY, CHEAP, INSIDE, MOST_BYTES
from tests.helpers import ROOT, json_of, run_svgen

pytestmark = pytest.mark.faults

INPUTS = int(os.environ.get("SVGEN_FUZZ_INPUTS", "3000"))
SEED = int(os.environ.get("SVGEN_FUZZ_SEED", "1"))
ROUNDS = int(os.environ.get("SVGEN_FUZZ_ROUNDS", "1"))  # of the commands, each a process
PART = 4000  # inputs that one process takes


def work(arena, first, last):
    """Run the worker until it ends; returns its exit code and what it said last."""
    home = arena / "home"
    home.mkdir(exist_ok=True)
    names = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "TMPDIR")
    env = {**os.environ, **dict.fromkeys(names, str(home)), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    env["SVGEN_FUZZ_CHEAP"] = str(CHEAP)  # the home of a test has no SVGEN_*
    command = [sys.executable, "-m", "tests.faults.fuzz_worker", str(arena), str(SEED)]
    done = subprocess.run(
        [*command, str(first), str(last)],
        env={**env, "PYTHONPATH": str(ROOT), "RUST_BACKTRACE": "0"},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    return done.returncode, done.stderr[-2000:]


def fuzz(arena, inputs):
    """Try all inputs; returns the rows of the log. A process that dies is a defect of its input."""
    shutil.copy(TINY / "transformer/diffusion_pytorch_model.safetensors", arena / CANARY)
    log, deaths, first = arena / "found.jsonl", [], 0
    while first < inputs:
        last = min(inputs, first + PART)
        (arena / "current").write_text("none")
        code, said = work(arena, first, last)
        reached = (arena / "current").read_text()
        assert reached != "none", said  # it did not even take the whole files
        if code == 0:
            first = last
        else:
            what = f"the process ended with {code}: {said}"
            row = {"number": int(reached), "target": "?", "outcome": "defect", "what": what}
            deaths.append(row)
            first = int(reached) + 1
    return [*map(json.loads, log.read_text().splitlines()), *deaths]


def test_no_broken_file_is_a_traceback_a_hang_or_a_flood(tmp_path):
    rows = fuzz(tmp_path, INPUTS)
    peaks = [row["peak_bytes"] for row in rows if "peak_bytes" in row]
    rows = [row for row in rows if "number" in row]
    for target in dict.fromkeys(row["target"] for row in rows):
        of_it = Counter(row["outcome"] for row in rows if row["target"] == target)
        text = ", ".join(f"{count} {outcome}" for outcome, count in of_it.most_common())
        print(f"{target:<20} {sum(of_it.values()):>6}: {text}")
    slowest = max(row.get("cpu_s", 0) for row in rows)
    print(f"{len(rows)} inputs; slowest {slowest} s, peak {max(peaks) / 1e6:.0f} MB")
    defects = [row for row in rows if row["outcome"] == "defect"]
    for row in defects[:20]:
        print(f"--- input {row['number']} ({row['target']}):\n{row['what'][-1500:]}")
    assert len(rows) == INPUTS
    assert not defects
    assert max(peaks) < MOST_BYTES
    strays = {path.name for path in Path(tmp_path).iterdir()}
    assert strays == {"home", INSIDE, CANARY, "current", "found.jsonl"}


MODEL = ("--res", "48x32", "--frames", "5", "--steps", "1", "-o", "x.mp4", "--overwrite")
COMMANDS = {  # what a user runs on a file of each kind
    "weights transformer": ("generate", "a", "--model", "./broken", *MODEL),
    "weights shard": ("generate", "a", "--model", "./sharded", *MODEL),
    "index": ("models", "verify", "./indexed"),
    "config vae": ("generate", "a", "--model", "./broken", *MODEL),
    "tokenizer": ("generate", "a", "--model", "./broken", *MODEL),
    "sampling": ("generate", "a", "--model", "./sampled", "--dry-run"),
    "preset": ("presets", "check", "mine.toml"),
    "prompts": ("generate", "--prompts", "prompts.jsonl", "--model", "./whole", *MODEL),
    "recipe": ("generate", "--from", "old.mp4", "--model", "./whole", "--dry-run"),
    "latents": ("decode", "x.latents.safetensors", "--model", "./whole", "-o", "y.mp4"),
    "settings": ("generate", "a", "--model", "./whole", "--dry-run"),
    "bench": ("bench", "--against", "bench.json", "--model", "./whole"),
}


@pytest.fixture
def whole(tmp_path, monkeypatch):
    """Every kind of file, whole, in the current folder; returns them by name."""
    import svgen.cli.planning as planning

    monkeypatch.setattr(planning, "open_pipeline", planning.open_pipeline)  # kept for others
    monkeypatch.chdir(tmp_path)
    found = targets()
    shutil.copytree("whole", "sampled")
    return found


def test_commands_on_broken_files_end_as_documented(whole, tmp_path, home):
    codes = {kind.exit_code for kind, _ in CODES.values()} - {1} | {0}
    env = {"XLA_FLAGS": "", "RUST_BACKTRACE": "0"}
    ends = Counter()
    for number, (name, args) in enumerate(list(COMMANDS.items()) * ROUNDS):
        target = whole[name]
        data = target.mutate(random.Random(f"{SEED}:command:{number}"), target.whole)
        Path(target.path).write_bytes(data)
        done = run_svgen(*args, "--json", env=env, cwd=tmp_path, timeout_s=120)
        Path(target.path).write_bytes(target.whole)
        body = json_of(done)
        assert done.returncode in codes, (number, name, done.stdout[:2000])
        assert (body["error"] is None) == (done.returncode == 0)
        assert "Traceback" not in done.stderr
        if name == "settings":
            Path(target.path).unlink()  # it would speak for all others
        ends[body["error"]["code"] if body["error"] else "works"] += 1
    print(f"{sum(ends.values())} commands: {dict(ends)}")
