"""Compiles the whole attention call, all routes and both softmaxes, for a TPU that is not there.

    echo '{"chip": "v6e", "frames": 21, "positions": 3600}' | python tests/aot/compile_attention.py

Prints how much memory it takes and which operations move tokens about: transposes, copies, gathers,
pads and the like of arrays as large as q.
"""

import json
import math
import os
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from svgen.cycles import HOST, compile_for

OPERATION = re.compile(r"= \(?\w+\[([\d,]+)\]\S* (\S+?)\(")
FREE = {"bitcast", "parameter", "custom-call", "get-tuple-element"}


def moves(text: str, elements: int) -> list[str]:
    """Find the operations on arrays of so many elements or more, but those that cost nothing."""
    found = []
    for line in text.splitlines():
        match = OPERATION.search(line)
        if not match or match[2] in FREE:
            continue
        if math.prod(map(int, match[1].split(","))) >= elements:
            found.append(line.strip()[:200])
    return found


def main() -> None:
    """Compile the cases on stdin."""
    os.environ.update(HOST)
    import jax
    import jax.numpy as jnp

    from svgen.attention import masks
    from svgen.kernels import splash, tuning

    for line in sys.stdin:
        case = json.loads(line)
        frames, positions, heads = case["frames"], case["positions"], case.get("heads", 10)
        sizes, blocks = tuning.choose(case["chip"], frames, positions)
        tables = masks.tables(frames, positions, 0.35, sizes)
        x = jax.ShapeDtypeStruct((heads, frames * positions, 128), jnp.bfloat16)

        def attend(q, k, v, routes, tables=tables, blocks=blocks):
            return splash.attention(q, k, v, routes, tables, blocks=blocks)[0]

        start = time.perf_counter()
        routes = jax.ShapeDtypeStruct((heads,), jnp.int32)
        compiled = compile_for(case["chip"], attend, (x, x, x, routes))
        text = compiled.as_text()
        found = {
            "kernels": text.count('custom_call_target="tpu_custom_call"'),
            "moves": moves(text, math.prod(x.shape) // heads),
            "temporaries": compiled.memory_analysis().temp_size_in_bytes,
            "compile_s": round(time.perf_counter() - start, 1),
        }
        print(json.dumps({**case, **found}), flush=True)


if __name__ == "__main__":
    main()
