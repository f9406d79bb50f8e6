"""A token of the Hub is written nowhere: not by what works, not by what fails, not by a crash."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from svgen.catalog import CATALOG
from tests.helpers import ROOT, run_svgen
from tests.hub_server import Fault, HubServer, Repository, wan_files

pytestmark = pytest.mark.faults

TOKEN = "hf_" + "aSecretThatNobodyMaySee" + "0123456789A"
NAME = "wan2.1-1.3b"
ENTRY = CATALOG[NAME]
TINY = str(ROOT / "tests/golden/tiny")
SMALL = ("--model", TINY, "--res", "32x32", "--frames", "5", "--steps", "1", "--seed", "1")
CRASH = """
import svgen.cli.execution
from svgen.cli import main

def fail(*_, **__):
    raise RuntimeError("a defect")

svgen.cli.execution.write_video = fail
main()
"""


@pytest.fixture
def server():
    """A Hub whose model only the token may read."""
    repository = Repository(wan_files(), commit=ENTRY.revision, token=TOKEN, gated=True)
    with HubServer({ENTRY.repository: repository}) as running:
        yield running


@pytest.fixture
def kept(home, server):
    """Run svgen with the token set; keeps all that it prints. `kept.written` is all of that, and
    every file below the home.
    """
    said = []

    def call(*args, **env):
        values = {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "XLA_FLAGS": "", **env}
        done = run_svgen(*args, env=values, cwd=home)
        said.append(done.stdout + done.stderr)
        return done

    def written():
        files = [path for path in Path(home).rglob("*") if path.is_file()]
        names = "\n".join(map(str, files)).encode()
        return b"\n".join([names, *(path.read_bytes() for path in files), *map(str.encode, said)])

    call.written = written
    return call


def test_token_is_in_nothing_that_commands_print_or_write(kept, server):
    assert kept("models", "pull", NAME, "-vv", "--json=events").returncode == 0
    assert {request.token for request in server.requests if "/api/" in request.path} == {TOKEN}
    assert kept("models", "verify", NAME).returncode == 0
    assert kept("doctor", "--json").returncode in (0, 3)
    done = kept("generate", "a", *SMALL, "-o", "x.mp4", "-vv", "--json=events", "--keep-latents")
    assert done.returncode == 0, done.stderr
    written = kept.written()
    assert len(written) > 100_000
    assert TOKEN.encode() not in written


@pytest.mark.parametrize("name", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "file"])
def test_token_is_in_no_error(kept, server, home, name):
    wrong = TOKEN.replace("Secret", "SecreT")
    env = {"HF_TOKEN": "", name: wrong}
    if name == "file":
        (home / "huggingface").mkdir()
        (home / "huggingface/token").write_text(wrong)
        env = {"HF_TOKEN": ""}
    assert kept("models", "pull", NAME, "-vv", **env).returncode == 4
    server.faults.append(Fault("api", "answer", times=100))  # as in a hotel
    assert kept("models", "pull", NAME, "--json", "-vv", **env).returncode == 5
    gone = "http://127.0.0.1:9"
    assert kept("models", "pull", NAME, "-vv", HF_ENDPOINT=gone, **env).returncode == 5
    inside = server.url.replace("//", f"//user:{wrong}@")
    assert kept("models", "pull", NAME, "-vv", HF_ENDPOINT=inside, **env).returncode in (4, 5)
    assert kept("models", "pull", wrong, **env).returncode == 2
    (home / "huggingface/token").unlink(missing_ok=True)
    assert wrong.encode() not in kept.written()


def test_token_is_in_no_traceback(kept, home):
    script = home / "crash.py"
    script.write_text(CRASH)
    done = subprocess.run(
        [sys.executable, str(script), "generate", "a", *SMALL, "-o", "x.mp4", "-vv", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_TOKEN": TOKEN, "XLA_FLAGS": ""},
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert list(home.rglob("error-*.log"))
    assert TOKEN.encode() not in kept.written()
    assert TOKEN not in done.stdout + done.stderr
