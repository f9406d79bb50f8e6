"""Files that lie: what is no plain file is not waited for, what is endless is not read, and no
header is believed beyond the file.
"""

import ast
import io
import json
import os
import shutil
import signal
import socket
import tracemalloc
from pathlib import Path

import pytest

from svgen import baseline
from svgen.catalog import read_sampling
from svgen.checkpoint import _headers, read_json
from svgen.cli.prompts import read_prompts
from svgen.cli.resolve import read_prompt
from svgen.cli.settings import read_file
from svgen.config import Request
from svgen.errors import SvgenError
from svgen.hub import snapshot
from svgen.presets import read_preset
from svgen.recipe import read_recipe
from svgen.resume import load_latents, load_state
from svgen.tokenizer import Tokenizer
from svgen.untrusted import MAX_HEADER_BYTES, check_safetensors, open_plain, read_start
from tests.helpers import ROOT

MOST_BYTES = 80 << 20  # what a reader may take of a file of 10 GB: twice the longest limit
SPARSE = 10 << 30
REQUEST = Request(
    prompt="a",
    model="demo",
    width_px=64,
    height_px=48,
    frames=9,
    fps=16.0,
    steps=4,
    guidance=5.0,
    shift=5.0,
    seed=7,
)


def in_folder(read, name):
    """A reader that is given a folder and finds the file in it."""

    def reader(path):
        folder = path.parent / "folder"
        target = folder / name
        target.parent.mkdir(parents=True)
        target.symlink_to(path)
        return read(folder)

    return reader


READERS = {
    "preset": read_preset,
    "prompts": read_prompts,
    "prompt": lambda path: read_prompt(f"@{path}", io.StringIO()),
    "settings": read_file,
    "bench": baseline.read,
    "recipe": read_recipe,
    "latents": load_latents,
    "state": lambda path: load_state(path, REQUEST, (1, 3, 6, 8, 16)),
    "json": read_json,
    "model index": snapshot.read_bounded,
    "weights": _headers,
    "tokenizer": in_folder(Tokenizer.load, "tokenizer/tokenizer.json"),
    "sampling": in_folder(read_sampling, "svgen.json"),
}


@pytest.fixture
def alarm():
    """A reader that waits is interrupted, and fails."""

    def fail(*_):
        raise AssertionError("it waits")

    former = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


def refused(read, path):
    """Whether a reader refuses a file; the Hub's bounded one leaves that to who parses it."""
    try:
        data = read(path)
    except SvgenError:
        return True
    return isinstance(data, bytes) and len(data) > snapshot.MAX_JSON_BYTES


def socket_at(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


STRANGE = {
    "pipe": os.mkfifo,
    "zeros": lambda path: path.symlink_to("/dev/zero"),
    "link to a pipe": lambda path: (os.mkfifo(f"{path}.pipe"), path.symlink_to(f"{path}.pipe")),
    "socket": socket_at,
    "link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused_without_waiting(tmp_path, monkeypatch, alarm, name, kind):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    path = tmp_path / "x.toml"
    STRANGE[kind](Path("x.toml") if kind == "socket" else path)
    assert refused(READERS[name], path)


@pytest.mark.parametrize("name", READERS)
def test_ten_gigabytes_are_refused_and_not_read(tmp_path, name):
    path = tmp_path / "x.toml"
    path.touch()
    os.truncate(path, SPARSE)
    tracemalloc.start()
    try:
        assert refused(READERS[name], path)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("claimed", [100, MAX_HEADER_BYTES + 1, 1 << 40, (1 << 64) - 1])
@pytest.mark.parametrize("name", ["latents", "state", "weights"])
def test_header_that_claims_more_than_the_file_holds_takes_no_memory(tmp_path, name, claimed):
    path = tmp_path / "x.safetensors"
    path.write_bytes(claimed.to_bytes(8, "little") + b"{}" + bytes(50))
    tracemalloc.start()
    try:
        assert refused(READERS[name], path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_header_of_any_length_is_not_parsed(tmp_path):
    """A hundred megabytes of it, which the library allows, would take ten times the memory."""
    path, length = tmp_path / "x.safetensors", MAX_HEADER_BYTES + 8
    path.write_bytes(length.to_bytes(8, "little") + b"{}".ljust(length))
    with pytest.raises(OSError, match=f"{length} bytes, more than {MAX_HEADER_BYTES}"):
        check_safetensors(path)
    path.write_bytes(MAX_HEADER_BYTES.to_bytes(8, "little") + b"{}".ljust(MAX_HEADER_BYTES))
    check_safetensors(path)


def test_latents_of_ten_gigabytes_are_refused_by_their_header(tmp_path):
    path, count = tmp_path / "x.safetensors", SPARSE // 4
    tensor = f'{{"dtype":"F32","shape":[1,1,1,1,{count}],"data_offsets":[0,{SPARSE}]}}'
    header = f'{{"__metadata__":{{"schema":"svgen.latents/1"}},"latents":{tensor}}}'.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + SPARSE)
    with pytest.raises(SvgenError, match="holds no latents") as caught:
        load_latents(path)
    assert "more than" in caught.value.why


@pytest.mark.parametrize("name", ["latents", "state"])
def test_complaint_of_the_library_is_cut(tmp_path, name):
    """It quotes what it found, here a type of a hundred thousand letters."""
    path = tmp_path / "x.safetensors"
    tensor = f'{{"dtype":"{"x" * 100_000}","shape":[1],"data_offsets":[0,4]}}'
    header = f'{{"a":{tensor}}}'.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(SvgenError) as caught:
        READERS[name](path)
    assert len(caught.value.why) <= 500


def test_plain_files_are_read_through_links_and_up_to_a_length(tmp_path):
    path, link = tmp_path / "x", tmp_path / "link"
    path.write_bytes(b"0123456789")
    link.symlink_to(path)
    assert read_start(link, 4) == b"0123"
    with open_plain(link) as file:
        assert file.read() == b"0123456789"
        assert os.get_inheritable(file.fileno()) is False


def test_file_that_is_exchanged_for_a_pipe_is_not_read(tmp_path, monkeypatch, alarm):
    path = tmp_path / "x"
    os.mkfifo(path)
    monkeypatch.setattr("svgen.untrusted.check_plain", lambda path: None)
    with pytest.raises(OSError, match="a pipe"):
        open_plain(path)


# What could run code or lead elsewhere.


FORBIDDEN = {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve", "cloudpickle", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "compile_command", "torch.load"}


def suspicious(source):
    """Imports and calls in a module that run what a file says."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [one.name for one in node.names if one.name.split(".")[0] in FORBIDDEN]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if (node.module or "").split(".")[0] in FORBIDDEN else []
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found += [node.arg] if not _is_false(node.value) else []
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found += [name] if name in FORBIDDEN_CALLS else []
            loads = name in ("np.load", "numpy.load", "jnp.load")
            if loads and not any(one.arg == "allow_pickle" for one in node.keywords):
                found.append(name)
    return found


def _is_false(value):
    return isinstance(value, ast.Constant) and value.value is False


def test_nothing_in_the_package_unpickles_or_evaluates():
    found = {
        str(path.relative_to(ROOT)): names
        for path in (ROOT / "svgen").rglob("*.py")
        if (names := suspicious(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    ["import pickle", "np.load(x)", "f(allow_pickle=True)", "eval(x)", "from dill import x"],
)
def test_what_would_unpickle_is_seen(source):
    assert suspicious(source)


@pytest.mark.parametrize(
    "file",
    [
        *("../x.safetensors", "/x.safetensors", "a/x.safetensors", "..", "\\x.safetensors", ""),
        *("x.bin", ".x.safetensors", "x\x00.safetensors", "x" * 300 + ".safetensors"),
        *(3, None, ["x"]),
    ],
)
def test_index_names_files_beside_itself_alone(tmp_path, file):
    shutil.copytree(ROOT / "tests/golden/tiny", tmp_path / "model")
    index = tmp_path / "model/vae/diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(SvgenError, match="names the file") as caught:
        snapshot.missing_in(tmp_path / "model")
    assert caught.value.code == "E_CHECKPOINT"
    assert len(caught.value.message) < 500
