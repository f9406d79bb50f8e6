"""Holds `svgen bench` against an outside stopwatch, in turn, and prints ratios of the two.

    python tests/heavy/bench_accuracy.py [--rounds 5]        about a minute a round on two cores

The stopwatch is this process, which reads the clock when a line of `svgen generate
--prompts ... --json=events` arrives. Of the videos of one batch the first warms up; networks and
programs stay, so what is left of the others is what `bench` adds up: denoising from the end of the
video before, decoding from the saved latents to the last frame. The encoder works meanwhile, on
the same cores where there is no other device; `bench` leaves it out.

Each span from event to event has a median over the videos, and a least time; both are added up, and
held against the medians and the least times of `bench`. On a machine that others load, only the
least times say much.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
SVGEN = (sys.executable, "-m", "svgen")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
PROMPT = "a red ball moving to the right on a white background"
VIDEOS = 6
PARTS = ("denoise", "decode", "run")
KINDS = {"median": statistics.median, "least": min}
Spans = list[float]  # seconds from event to event, of one part of one video


def benched() -> dict[str, dict[str, float]]:
    """Seconds of each part that the rows of `bench` add up to, by kind."""
    stages = (f"--only={stage}" for stage in ("embed", "step", "decode"))
    command = [*SVGEN, "bench", *stages, "--budget", "20", "--json", "--quiet"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    data = json.loads(done.stdout)["data"]
    rows, chunks = data["rows"], (data["frames"] - 1) // 4
    found = {}
    for kind in KINDS:
        s = {name: row[f"{kind}_ms"] / 1e3 for name, row in rows.items()}
        parts = data["steps"] * s["step_dense"], s["decode_first"] + chunks * s["decode_next"]
        found[kind] = dict(zip(PARTS, (*parts, sum(parts) + s["embed"]), strict=True))
    return found


def stopped() -> dict[str, dict[str, float]]:
    """The same of a batch, by the stopwatch."""
    with tempfile.TemporaryDirectory() as folder:
        batch = Path(folder, "batch.jsonl")
        lines = [
            json.dumps({"prompt": PROMPT, "output": f"{index}.mp4"}) for index in range(VIDEOS)
        ]
        batch.write_text("\n".join(lines))
        command = [*SVGEN, "generate", "--prompts", str(batch), "--json=events", "--quiet"]
        with subprocess.Popen(
            command, env=ENVIRONMENT, cwd=folder, stdout=subprocess.PIPE, text=True
        ) as run:
            stamped = [(time.perf_counter(), json.loads(line)) for line in run.stdout]
    assert run.returncode == 0
    videos = _split(stamped)[1:]
    found = {}
    for kind, choose in KINDS.items():
        parts = [
            sum(map(choose, zip(*(one[part] for one in videos), strict=True))) for part in PARTS[:2]
        ]
        found[kind] = dict(zip(PARTS, (*parts, sum(parts)), strict=True))
    return found


def _split(stamped: list[tuple[float, dict]]) -> list[dict[str, Spans]]:
    """The spans of each video, from its events and when they came."""
    found, before = [], 0.0
    spans: dict[str, Spans] = {"denoise": [], "decode": []}
    for at, event in stamped:
        if event["event"] == "step":
            spans[event["name"]].append(at - before)
        if event["event"] in ("step", "item") or event.get("kind") == "latents":
            before = at
        if event["event"] == "item":
            found.append(spans)
            spans = {"denoise": [], "decode": []}
    return found


@click.command()
@click.option("--rounds", default=5)
def main(rounds: int) -> None:
    """Print each round, then the median ratio of each part and its spread."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        bench, outside = benched(), stopped()
        for kind in KINDS:
            for part in PARTS:
                ours, theirs = bench[kind][part], outside[kind][part]
                ratios.setdefault((kind, part), []).append(ours / theirs)
                print(f"{kind:<8}{part:<9}bench {ours:7.3f} s   stopwatch {theirs:7.3f} s")
        sys.stdout.flush()
    for (kind, part), found in ratios.items():
        spread = f"{min(found):.2f} to {max(found):.2f}"
        print(f"{kind:<8}{part:<9}bench to stopwatch {statistics.median(found):.2f}, {spread}")


if __name__ == "__main__":
    main()
