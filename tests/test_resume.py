"""Latents on disk: whole or not there, and nothing but svgen's own files is read."""

import dataclasses
import errno
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from svgen import resume
from svgen.config import Request
from svgen.errors import FileError, UsageError
from svgen.resume import (
    SCHEMA,
    latents_path,
    load_latents,
    request_from_json,
    save_latents,
)
from tests.helpers import ROOT

REQUEST = Request(
    prompt="a cat",
    model="wan2.1-1.3b",
    width_px=64,
    height_px=48,
    frames=9,
    fps=16.0,
    steps=4,
    guidance=5.0,
    shift=5.0,
    seed=7,
)
LATENTS = np.random.default_rng(0).standard_normal((1, 3, 6, 8, 16), np.float32)
NAME = "cat.latents.safetensors"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"prompt": "\u732b \U0001f408 \u00e9 e\u0301 \"'\\ \n\t\x00", "negative": "\u6a21\u7cca"},
        {"prompt": "\ud800 half of a pair"},
        {"revision": "abc", "preset": "480p", "truncate": True, "item": 3},
        {"seed": 2**63 - 1, "fps": 23.976, "shift": 1e-2},
        {"prompt": "x" * 1_000_000},
    ],
    ids=["plain", "unicode", "surrogate", "optional", "numbers", "long"],
)
def test_latents_and_request_come_back_as_they_were(tmp_path, changes):
    request = dataclasses.replace(REQUEST, **changes)
    save_latents(tmp_path / NAME, LATENTS, request)
    latents, read = load_latents(tmp_path / NAME)
    assert latents.dtype == np.float32
    np.testing.assert_array_equal(latents, LATENTS)
    assert read == request and read.fingerprint == request.fingerprint
    assert os.listdir(tmp_path) == [NAME]


def test_file_is_plain_safetensors_that_says_what_it_is(tmp_path):
    save_latents(tmp_path / NAME, LATENTS, REQUEST)
    with safe_open(tmp_path / NAME, framework="np") as file:
        metadata = file.metadata()
        assert (list(file.keys()), metadata["schema"]) == (["latents"], "svgen.latents/1")
    assert json.loads(metadata["request"]) == REQUEST.as_json()


def test_strided_latents_are_saved_in_order(tmp_path):
    strided = np.moveaxis(LATENTS, 1, 3).copy()
    save_latents(tmp_path / NAME, np.moveaxis(strided, 3, 1), REQUEST)
    np.testing.assert_array_equal(load_latents(tmp_path / NAME)[0], LATENTS)


def test_nan_in_latents_is_kept(tmp_path):
    poisoned = LATENTS.copy()
    poisoned[0, 0, 0, 0, 0] = np.nan
    save_latents(tmp_path / NAME, poisoned, REQUEST)
    np.testing.assert_array_equal(load_latents(tmp_path / NAME)[0], poisoned)


def test_path_lies_beside_the_video_and_belongs_to_one_request():
    video = Path("out") / "my.cat.mp4"
    path = latents_path(video, REQUEST)
    assert path == Path("out") / f"my.cat-{REQUEST.fingerprint[:8]}.latents.safetensors"
    assert latents_path(video, dataclasses.replace(REQUEST, seed=8)) != path


# Whole or not at all


def test_saving_again_replaces_the_file(tmp_path):
    save_latents(tmp_path / NAME, LATENTS, REQUEST)
    save_latents(tmp_path / NAME, -LATENTS, REQUEST)
    np.testing.assert_array_equal(load_latents(tmp_path / NAME)[0], -LATENTS)
    assert os.listdir(tmp_path) == [NAME]


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), FileError, "E_DISK_FULL"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), FileError, "E_DISK_FULL"),
        (OSError(errno.EACCES, "Permission denied"), FileError, "E_WRITE"),
        (OSError(errno.EIO, "Input/output error"), FileError, "E_WRITE"),
        (OSError("no number"), FileError, "E_WRITE"),
    ],
)
@pytest.mark.parametrize("where", ["replace", "fsync"])
def test_failure_leaves_the_old_file_and_no_partial_one(
    tmp_path, monkeypatch, where, error, kind, code
):
    save_latents(tmp_path / NAME, LATENTS, REQUEST)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(os, where, fail)
    with pytest.raises(kind) as caught:
        save_latents(tmp_path / NAME, -LATENTS, REQUEST)
    assert (caught.value.code, caught.value.exit_code) == (code, 6)
    assert str(tmp_path / NAME) in caught.value.message
    monkeypatch.undo()
    assert os.listdir(tmp_path) == [NAME]
    np.testing.assert_array_equal(load_latents(tmp_path / NAME)[0], LATENTS)


def test_interrupt_leaves_no_partial_file(tmp_path, monkeypatch):
    def interrupt(*_: object) -> None:
        assert len(os.listdir(tmp_path)) == 1  # it is there while it is written
        raise KeyboardInterrupt

    monkeypatch.setattr(resume, "sync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_latents(tmp_path / NAME, LATENTS, REQUEST)
    assert os.listdir(tmp_path) == []


FULL_DISK = """
import resource, sys
from pathlib import Path

from svgen.errors import SvgenError
from svgen.resume import save_latents
from tests.test_resume import LATENTS, REQUEST

resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    save_latents(Path(sys.argv[1]), LATENTS, REQUEST)
except SvgenError as error:
    print(error.code, error.exit_code)
"""


def test_disk_that_fills_while_writing_leaves_nothing(tmp_path):
    assert LATENTS.nbytes > 4096
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / NAME)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "E_DISK_FULL 6\n"
    assert os.listdir(tmp_path) == []


def test_folder_that_is_not_there_is_a_file_error(tmp_path):
    with pytest.raises(FileError) as caught:
        save_latents(tmp_path / "gone" / NAME, LATENTS, REQUEST)
    assert caught.value.code == "E_WRITE" and "No such file" in caught.value.message


# Files that are not ours


def refused(path: Path, *texts: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load_latents(path)
    error = caught.value
    assert (error.code, error.exit_code) == ("E_LATENTS", 2)
    assert str(path) in error.message and error.why and "\n" not in error.message + error.why
    for text in texts:
        assert text in error.why
    return error


def write(path: Path, **changes: object) -> Path:
    """Write a file like ours, but for the changes; metadata of None is left out."""
    tensors = {"latents": changes.pop("latents", LATENTS)} | changes.pop("tensors", {})
    metadata = {"schema": SCHEMA, "svgen": "0", "request": json.dumps(REQUEST.as_json())} | changes
    save_file(tensors, path, {name: text for name, text in metadata.items() if text is not None})
    return path


def test_file_like_ours_is_read(tmp_path):
    assert load_latents(write(tmp_path / NAME))[1] == REQUEST


def test_missing_file_and_folder_are_refused(tmp_path):
    refused(tmp_path / NAME, "No such file")
    refused(tmp_path)


def test_foreign_safetensors_are_refused(tmp_path):
    weights = ROOT / "tests" / "golden" / "tiny" / "vae" / "diffusion_pytorch_model.safetensors"
    refused(weights, SCHEMA)
    save_file({"latents": LATENTS}, tmp_path / NAME)
    refused(tmp_path / NAME, SCHEMA)
    refused(write(tmp_path / NAME, schema="svgen.latents/2"), SCHEMA)
    refused(write(tmp_path / NAME, schema=None), SCHEMA)


@pytest.mark.parametrize("kept", [0, 7, 8, 100, 1000, -1])
def test_truncated_file_is_refused(tmp_path, kept):
    path = write(tmp_path / NAME)
    path.write_bytes(path.read_bytes()[:kept])
    refused(path)


def test_other_bytes_are_refused(tmp_path):
    path = tmp_path / NAME
    for data in (b"\0" * 64, b"not a tensor at all" * 9, struct.pack("<Q", 2**62) + b"{}" * 9):
        path.write_bytes(data)
        refused(path)


@pytest.mark.parametrize(
    "latents",
    [
        LATENTS[0],
        LATENTS[None],
        np.concatenate([LATENTS, LATENTS]),
        LATENTS[:0],
        LATENTS.astype(np.float16),
        LATENTS.astype(np.float64),
        LATENTS.astype(np.int32),
        np.ones((), np.float32),
    ],
    ids=["rank4", "rank6", "two", "none", "float16", "float64", "int32", "scalar"],
)
def test_latents_of_another_shape_or_type_are_refused(tmp_path, latents):
    refused(write(tmp_path / NAME, latents=latents), "latents are")


def test_latents_in_a_type_that_numpy_lacks_are_refused(tmp_path):
    header = {
        "__metadata__": {"schema": SCHEMA, "request": json.dumps(REQUEST.as_json())},
        "latents": {"dtype": "F8_E4M3", "shape": [1, 1, 1, 1, 4], "data_offsets": [0, 4]},
    }
    text = json.dumps(header).encode()
    (tmp_path / NAME).write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
    refused(tmp_path / NAME, "F8_E4M3")


def test_other_tensors_are_refused(tmp_path):
    refused(write(tmp_path / NAME, tensors={"more": LATENTS}), "one tensor")
    metadata = {"schema": SCHEMA, "request": json.dumps(REQUEST.as_json())}
    save_file({"x": LATENTS}, tmp_path / NAME, metadata)
    refused(tmp_path / NAME, "one tensor")


@pytest.mark.parametrize(
    "request_text",
    [None, "", "{", "null", "[]", '"text"', "{}", "[" * 100_000, "9" * 10_000, '{"prompt": "x"}'],
)
def test_request_that_is_none_is_refused(tmp_path, request_text):
    refused(write(tmp_path / NAME, request=request_text), "request")


BAD_VALUES = [
    *[("prompt", value) for value in (None, 3, ["a"], {"a": 1}, True)],
    *[("negative", None), ("model", 1), ("revision", 5), ("preset", False), ("dtype", None)],
    *[("width_px", value) for value in (0, -16, "64", 64.0, None, True, 10**30)],
    *[("frames", 0), ("steps", 0), ("steps", -1), ("steps", False), ("height_px", -1)],
    *[("seed", value) for value in (-1, 2**63, 1.0, "7", None, True)],
    *[("item", -1), ("item", 2**64), ("truncate", 1), ("truncate", "no"), ("schedule", None)],
    *[("fps", value) for value in ("16", None, True, float("nan"), float("inf"), 10**400)],
    *[("guidance", float("-inf")), ("shift", float("nan")), ("shift", [5.0])],
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_request_with_a_bad_value_is_refused_by_name(tmp_path, name, value):
    text = json.dumps(REQUEST.as_json() | {name: value})
    why = refused(write(tmp_path / NAME, request=text), name).why
    assert len(why) < 300


def test_request_with_an_unknown_field_is_refused_by_name(tmp_path):
    text = json.dumps(REQUEST.as_json() | {"colour": "red"})
    refused(write(tmp_path / NAME, request=text), "unknown field 'colour'")
    text = json.dumps(REQUEST.as_json() | {"a\nb" * 1000: "red"})
    assert len(refused(write(tmp_path / NAME, request=text), r"a\nb").why) < 300


def test_request_without_a_field_is_refused_or_takes_its_default():
    values = REQUEST.as_json()
    for item in dataclasses.fields(Request):
        rest = {name: value for name, value in values.items() if name != item.name}
        if item.default is dataclasses.MISSING:
            with pytest.raises(ValueError, match=item.name):
                request_from_json(rest)
        else:
            assert request_from_json(rest) == REQUEST


def test_whole_numbers_may_stand_for_floats():
    request = request_from_json(REQUEST.as_json() | {"fps": 16, "guidance": 5})
    assert request == REQUEST and isinstance(request.fps, float)
    assert request.fingerprint == REQUEST.fingerprint
