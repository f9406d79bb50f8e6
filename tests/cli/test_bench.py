"""`svgen bench`: one real run of the small checkpoint, and what is refused before anything runs."""

import json
from contextlib import nullcontext

import pytest

from svgen import baseline
from svgen.cli import bench as module
from svgen.cli import run
from svgen.cli.timings import table
from svgen.cli.trial import MADE_UP, plan_trial
from tests.helpers import ROOT, run_svgen

TINY = "tests/golden/tiny"
SMALL = ("--model", TINY, "--res", "32x32", "--frames", "5", "--steps", "5", "--budget", "5")
ROUTES = ("spatial", "temporal")


@pytest.fixture(scope="module")
def made(tmp_path_factory, env):
    """One run, saved and traced: (process, record, folder)."""
    folder = tmp_path_factory.mktemp("bench")
    files = ("--save", str(folder / "a.json"), "--profile", str(folder / "trace"))
    done = run_svgen("bench", *SMALL, *files, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done, json.loads(done.stdout.splitlines()[-1]), folder


@pytest.fixture
def said(capsys):
    """Run in this process with --json; returns (exit code, the object)."""

    def call(*args):
        code = run([*args, "--json"])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1, lines
        return code, json.loads(lines[0])

    return call


def test_every_stage_has_its_rows(made):
    _, record, _ = made
    attention = [
        f"attention_{name}_{route}" for name in ("conservative", "aggressive") for route in ROUTES
    ]
    steps, decode = ["step_dense", "step_aggressive"], ["decode_first", "decode_next"]
    assert list(record["rows"]) == ["embed", "attention_dense", *attention, *steps, *decode]
    for row in record["rows"].values():
        assert 3 <= row["n"] <= 20 and row["compile_s"] > 0
        assert 0 < row["least_ms"] <= row["median_ms"] <= row["most_ms"]
        assert "utilisation" not in row  # there is no peak of a CPU
    assert list(record["ratios"]) == [*attention, "step_aggressive"]
    calls = record["rows"]["step_aggressive"]["calls"]  # 2 branches x 3 layers x 4 heads
    assert record["rows"]["step_dense"]["calls"] == {"dense": 24, "spatial": 0, "temporal": 0}
    assert sum(calls.values()) == 24 and calls["spatial"] + calls["temporal"] > 0


def test_a_run_is_the_sum_of_its_parts(made):
    _, record, _ = made
    ms = {name: row["median_ms"] for name, row in record["rows"].items()}
    others = ms["embed"] + ms["decode_first"] + ms["decode_next"]
    assert record["run_s"]["dense"] == pytest.approx((5 * ms["step_dense"] + others) / 1e3)
    dense = 2  # of five steps, 30 % rounded up
    steps = dense * ms["step_dense"] + (5 - dense) * ms["step_aggressive"]
    assert record["run_s"]["aggressive"] == pytest.approx((steps + others) / 1e3)


def test_record_says_what_was_timed_and_on_what(made):
    _, record, _ = made
    assert (record["device"], record["mesh"], record["chips"]) == ("cpu", "1x1", 1)
    assert (record["width_px"], record["frames"], record["branches"]) == (32, 5, 2)
    assert (record["weights"], record["dense_kernel"]) == ("checkpoint", "reference")
    assert {"svgen", "jax", "jaxlib", "python"} <= set(record["versions"])


def test_table_is_on_stderr_in_80_columns_and_json_alone_on_stdout(made):
    done, record, _ = made
    assert len(done.stdout.splitlines()) == 1
    assert all(line in done.stderr for line in table(record))
    assert max(map(len, done.stderr.splitlines())) <= 80


def test_saved_file_is_the_result_and_the_trace_is_there(made):
    _, record, folder = made
    assert json.loads((folder / "a.json").read_text()) == record
    assert list((folder / "trace").rglob("*.xplane.pb"))


def test_a_saved_run_is_compared_with_another(made, said, tmp_path):
    _, record, folder = made
    record = json.loads(json.dumps(record))
    record["rows"]["embed"] |= {"least_ms": 1e6, "median_ms": 2e6, "most_ms": 3e6}
    record["mesh"] = "1x2"
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(record))
    code, body = said("bench", "--read", str(slow), "--against", str(folder / "a.json"))
    rows = body["data"]["against"]["rows"]
    assert code == 0 and rows["embed"]["verdict"] == "slower"
    assert {row["verdict"] for name, row in rows.items() if name != "embed"} == {"same"}
    assert body["warnings"] == ["compared with another mesh: 1x1 there, 1x2 here"]


def test_another_size_is_refused_before_anything_is_timed(made, said, monkeypatch):
    _, _, folder = made
    monkeypatch.setattr("svgen.bench.measure", None)
    flags = ("--model", TINY, "--res", "32x32", "--frames", "9", "--device", "cpu")
    code, body = said("bench", *flags, "--against", str(folder / "a.json"))
    assert (code, body["error"]["code"]) == (2, "E_BENCH")
    assert body["error"]["details"] == {"fields": ["frames"]}


def test_predicted_rows_are_labelled(made, said, monkeypatch):
    _, _, folder = made
    asked = []
    plan = {
        **dict.fromkeys(("denoise_s", "denoise_dense_s", "speedup"), 1.0),
        **{"label": "predicted", "tpu": "v6e-8", "chips": 8, "mesh": "2x4"},
        "step_s": {"dense": 2.0, "sparse": 1.0},
        "attention": {"tokens": 9, "dense_ms": 4.0, "sparse_ms": 3.0, "splash_ms": 5.0},
    }
    monkeypatch.setattr("svgen.cli.plan.plan_apart", lambda options: asked.append(options) or plan)
    flags = ("--read", str(folder / "a.json"), "--tpu", "v6e-8", "--res", "720p")
    code, body = said("bench", *flags)
    predicted = body["data"]["predicted"]
    assert code == 0 and asked[0]["model"] == "wan2.1-14b" and asked[0]["res"] == "1280x720"
    assert (predicted["label"], predicted["rows_ms"]["step_dense"]) == ("predicted", 2000.0)
    lines = table(body["data"])
    assert any(line.startswith("predicted step dense") for line in lines)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--against", "missing.json"), "E_BENCH"),
        (("--save", "no/such/folder/a.json"), "E_WRITE"),
        (("--save", "README.md"), "E_OUTPUT_EXISTS"),
        (("--profile", "README.md"), "E_OUTPUT_NAME"),
        (("--profile", "trace", "--only", "embed"), "E_USAGE"),
        (("--tpu", "v6e-7"), "E_TPU_NAME"),
        (("--model", "nobody/nothing", "--device", "cpu"), "E_MODEL"),
        (("--model", "wan2.1-14b"), "E_NO_TPU"),
        (("--model", TINY, "--res", "33x32"), "E_SIZE"),
        (("--model", TINY, "--preset", "agressive"), "E_PRESET"),
        (("--model", TINY, "--mesh", "3x3"), "E_MESH"),
        (("--budget", "0"), "E_USAGE"),
    ],
)
def test_bad_flags_are_found_before_anything_is_loaded(flags, code, said, monkeypatch):
    monkeypatch.setattr("svgen.pipeline.load_module", None)
    if code == "E_NO_TPU":
        monkeypatch.delenv("JAX_PLATFORMS")
    status, body = said("bench", *flags)
    assert body["error"]["code"] == code
    assert status in (2, 3, 6)


def test_defaults_keep_under_two_minutes():
    assert module.BUDGET_S < 120
    assert baseline.SCHEMA == "svgen.bench/1"


def test_a_model_that_is_not_on_disk_is_planned_by_its_sizes():
    flags = {"model": "wan2.1-1.3b", "device": "cpu", "dtype": "auto", "mesh": "auto"}
    size = {"res": (832, 480), "frames": None, "steps": None, "preset": "aggressive"}
    planned = plan_trial(
        {**flags, **size, "budget": 100.0, "against": "x", "only": ()}, nullcontext
    )
    assert planned.weights == MADE_UP and any("not on disk" in note for note in planned.notes)
    request = planned.request
    assert (request.frames, request.steps, request.schedule) == (81, 50, "aggressive")
    assert request.sparsity.budget is None  # it would keep heads of such weights dense
    assert list(planned.schedules) == ["conservative", "aggressive"]
