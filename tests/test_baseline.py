"""Saved timings: files that are not, and what two runs say of each other."""

import copy
import json
from pathlib import Path

import pytest

from svgen.baseline import MAX_BYTES, check_comparable, compare, read, save, verdict
from svgen.errors import UsageError

ROW = {"median_ms": 10.0, "least_ms": 9.0, "most_ms": 12.0, "n": 5, "compile_s": 1.5}
RECORD = {
    "schema": "svgen.bench/1",
    **dict.fromkeys(("device", "chip", "mesh", "model", "weights", "dtype"), "x"),
    "dense_kernel": "reference",
    "measured_at": "2026-12-01T12:00:00+00:00",
    **dict.fromkeys(("chips", "width_px", "height_px", "frames", "tokens", "steps"), 5),
    "branches": 2,
    "versions": {"jax": "0.10.2"},
    "schedules": {"aggressive": 0.3},
    "rows": {"step_dense": ROW},
}


def changed(*path, value):
    record = copy.deepcopy(RECORD)
    *parents, last = path
    place = record
    for name in parents:
        place = place[name]
    place[last] = value
    return record


def test_a_record_comes_back_as_it_was_saved(tmp_path):
    path = tmp_path / "a.json"
    save(path, {**RECORD, "more": [1]}, overwrite=False)
    assert read(path) == RECORD
    assert [item.name for item in tmp_path.iterdir()] == ["a.json"]


def test_the_object_of_json_is_read_too(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"schema": "svgen.bench/1", "ok": True, "data": RECORD}))
    assert read(path) == RECORD


def test_a_file_is_not_replaced_unless_asked(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("mine")
    with pytest.raises(UsageError) as caught:
        save(path, RECORD, overwrite=False)
    assert (caught.value.code, path.read_text()) == ("E_OUTPUT_EXISTS", "mine")
    save(path, RECORD, overwrite=True)
    assert read(path) == RECORD


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        b"{}",
        b"[" * 100_000,
        b'{"schema": "svgen.bench/1"}',
        b" " * (MAX_BYTES + 1),
        b'{"data": {"schema": "svgen.plan/1"}}',
        *(
            json.dumps(record).encode()
            for record in (
                changed("schema", value="svgen.bench/2"),
                changed("chip", value="x" * 1000),
                changed("frames", value=0),
                changed("frames", value=5.5),
                changed("steps", value=True),
                changed("versions", value={"jax": 1}),
                changed("schedules", value=[]),
                changed("rows", value={}),
                changed("rows", value={f"r{n}": ROW for n in range(300)}),
                changed("rows", "a/b\x1b[31m", value=ROW),
                changed("rows", "step_dense", value=5),
                changed("rows", "step_dense", "n", value="5"),
                changed("rows", "step_dense", "median_ms", value=-1.0),
                changed("rows", "step_dense", "median_ms", value=float("nan")),
                changed("rows", "step_dense", "median_ms", value=13.0),
                changed("rows", "step_dense", "most_ms", value=10**400),
            )
        ),
    ],
)
def test_other_files_are_refused(content, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read(path)
    assert caught.value.code == "E_BENCH"
    assert caught.value.why and len(caught.value.why) <= 500


@pytest.mark.parametrize("name", ["missing.json", ".", "a\0b"])
def test_what_cannot_be_read_is_refused(name, tmp_path):
    with pytest.raises(UsageError) as caught:
        read(tmp_path / name)
    assert caught.value.code == "E_BENCH"


@pytest.mark.parametrize("field", ["device", "chip", "model", "frames", "branches"])
def test_runs_of_different_things_are_not_compared(field):
    other = 3 if isinstance(RECORD[field], int) else "y"
    with pytest.raises(UsageError) as caught:
        check_comparable(changed(field, value=other), RECORD, Path("old.json"))
    assert caught.value.details == {"fields": [field]}
    assert field in caught.value.message


def test_what_else_differs_is_said():
    assert check_comparable(RECORD, RECORD, Path("old.json")) == []
    ours = changed("versions", value={"jax": "0.12.0"}) | {"mesh": "2x4"}
    assert check_comparable(ours, RECORD, Path("old.json")) == [
        "mesh: x there, 2x4 here",
        "versions: jax 0.10.2 there, jax 0.12.0 here",
    ]


def row(median, least, most):
    return {"median_ms": median, "least_ms": least, "most_ms": most, "n": 3}


@pytest.mark.parametrize(
    ("ours", "found"),
    [
        (row(10.0, 9.0, 12.0), "same"),
        (row(12.5, 12.0, 13.0), "slower"),
        (row(12.5, 9.5, 13.0), "same"),  # above their spread, but theirs is within ours
        (row(8.5, 8.0, 9.9), "faster"),
        (row(8.5, 8.0, 10.5), "same"),
        (row(11.9, 11.0, 13.0), "same"),
    ],
)
def test_only_what_lies_outside_of_both_spreads_is_flagged(ours, found):
    assert verdict(ours, ROW) == found


def test_rows_that_both_have_are_compared():
    ours = {**RECORD, "rows": {"step_dense": row(15.0, 14.0, 16.0), "embed": ROW}}
    assert compare(ours, RECORD) == {
        "step_dense": {"ratio": 1.5, "ours_ms": 15.0, "theirs_ms": 10.0, "verdict": "slower"}
    }
