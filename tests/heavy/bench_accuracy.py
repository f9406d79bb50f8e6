"""Holds `svgen bench` against an outside stopwatch, in turn, and prints ratios of the two.

    python tests/heavy/bench_accuracy.py [--rounds 5]        about a minute a round on two cores

The stopwatch is this process, which reads the clock when a line of `svgen generate
--prompts ... --json=events` arrives. Of the videos of one batch the first warms up; networks and
programs stay, so what is left of the others is denoising, from the end of the video before, and
decoding, from the saved latents to the last frame.

`bench` leaves the encoder out, which works while frames are decoded: hidden where there is a TPU,
on the same cores where there is none. So decoding is clocked twice: "decode" without an encoder,
the same call of the pipeline in a loop that drops the frames, and "encode", as a run has it. What
the two differ by is the MP4's. "run" has the first.

Each span from event to event has a median over the videos, and a least time; both are added up, and
held against the medians and the least times of `bench`. On a machine that others load, only the
least times say much.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
SVGEN = (sys.executable, "-m", "svgen")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
PROMPT = "a red ball moving to the right on a white background"
VIDEOS = 6
PARTS = ("denoise", "decode", "encode", "run")
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
        denoise = data["steps"] * s["step_dense"]
        decode = s["decode_first"] + chunks * s["decode_next"]
        found[kind] = _parts(denoise, decode, decode, denoise + decode + s["embed"])
    return found


def _parts(*seconds: float) -> dict[str, float]:
    return dict(zip(PARTS, seconds, strict=True))


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
    videos, decoded = _split(stamped)[1:], decoding()[1:]
    found = {}
    for kind, choose in KINDS.items():
        denoise, encode = (_sum([one[part] for one in videos], choose) for part in videos[0])
        decode = _sum(decoded, choose)
        found[kind] = _parts(denoise, decode, encode, denoise + decode)
    return found


def _sum(videos: list[Spans], choose: Callable[[Spans], float]) -> float:
    """Of each span one over all videos, added up."""
    return sum(map(choose, zip(*videos, strict=True)))


def decoding() -> list[Spans]:
    """Seconds to each chunk of frames of a video of the demo, decoded and dropped, a few times."""
    command = [sys.executable, __file__, "--decode"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def decode() -> list[Spans]:
    """What `decoding` starts a process for."""
    import numpy as np

    from svgen.config import Request
    from svgen.pipeline import Pipeline

    folder = ROOT / "svgen/demo/snapshot"
    values = json.loads((folder / "svgen.json").read_text())
    width, height = values["size_px"]
    kept = {name: values[name] for name in ("steps", "guidance", "shift", "frames", "fps")}
    request = Request(
        prompt=PROMPT, model=str(folder), width_px=width, height_px=height, seed=0, **kept
    )
    pipeline, found = Pipeline(folder), []
    latents = np.array(pipeline.start(request).latents)
    with pipeline.keeping():
        for _ in range(VIDEOS):
            clock = [time.perf_counter()]
            clock += [time.perf_counter() for _ in pipeline.decode(latents, request)]
            found.append([after - before for before, after in itertools.pairwise(clock)])
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
@click.option("--decode", "only_decode", is_flag=True, hidden=True)
def main(rounds: int, only_decode: bool) -> None:
    """Print each round, then the median ratio of each part and its spread."""
    if only_decode:
        print(json.dumps(decode()))
        return
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
