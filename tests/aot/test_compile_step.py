"""The step of the 1.3B model at 480p compiles for a TPU v6e, dense and sparse; it fits 32 GB."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.aot
SCRIPT = Path(__file__).with_name("compile_step.py")
HBM_GIB = 31.25  # of one v6e chip
WEIGHTS_GIB = 2.65  # 1,418,996,800 parameters in bfloat16


@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize(("schedule", "kernels"), [("dense", 11), ("aggressive", 15)])
def test_step_compiles_for_v6e(schedule, kernels):
    """Two kernels a route (bounded and online softmax), the gauge that decides between them, and
    eight that norm, split and join heads: queries, keys, values and outputs, of both attentions.
    """
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "wan2.1-1.3b", "480p", "v6e:2x2x1", schedule],
        capture_output=True,
        encoding="utf-8",
        env={**os.environ, "XLA_FLAGS": ""},
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["kernels"] == kernels
    assert WEIGHTS_GIB < found["arguments_gib"] < WEIGHTS_GIB + 0.2
    assert found["arguments_gib"] + found["temporaries_gib"] < HBM_GIB
