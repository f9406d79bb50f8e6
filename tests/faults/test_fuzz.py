"""Broken files of every kind: each works or ends with a documented code, soon, in little memory.

SVGEN_FUZZ_INPUTS sets how many (3,000 unless it says otherwise), SVGEN_FUZZ_SEED which ones.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.fuzz_targets import TINY
from tests.faults.fuzz_worker import CANARY, CHEAP, INSIDE, MOST_BYTES
from tests.helpers import ROOT

pytestmark = pytest.mark.faults

INPUTS = int(os.environ.get("SVGEN_FUZZ_INPUTS", "3000"))
SEED = int(os.environ.get("SVGEN_FUZZ_SEED", "1"))
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
