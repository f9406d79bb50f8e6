"""`svgen models` as its users run it: processes of their own against a Hub on loopback."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from svgen.catalog import CATALOG
from tests.helpers import ROOT, json_of, run_svgen
from tests.hub_server import Fault, HubServer, Repository, flipped, wan_files

NAME = "wan2.1-1.3b"
ENTRY = CATALOG[NAME]
SHARD = "transformer/diffusion_pytorch_model-00001-of-00002.safetensors"
TOKEN = "hf_a_secret_token"


@pytest.fixture
def server():
    """A Hub that has the small Wan model."""
    with HubServer({ENTRY.repository: Repository(wan_files(), commit=ENTRY.revision)}) as running:
        yield running


@pytest.fixture
def models(server, home):
    """Run `svgen models ARGS` with a home and a Hub of its own."""

    def run(*args, **env):
        return run_svgen(
            "models", *args, env={"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, **env}, cwd=home
        )

    run.folder = home / "huggingface" / "hub" / ("models--" + ENTRY.repository.replace("/", "--"))
    return run


def test_pull_list_verify_remove(models):
    pulled = models("pull", NAME)
    assert pulled.returncode == 0, pulled.stderr
    folder = Path(pulled.stdout.strip())
    assert folder.name == ENTRY.revision and (folder / SHARD).is_file()
    assert "16 of 16 files to fetch, " in pulled.stderr and " free in " in pulled.stderr
    assert "100%" in pulled.stderr

    listed = models("list", "--json")
    rows = {row["name"]: row for row in json_of(listed)["data"]["models"]}
    assert rows[NAME]["on_disk"] == "yes" and rows[NAME]["disk_bytes"] > 300_000
    assert rows["wan2.1-14b"]["on_disk"] == "no"

    again = models("pull", NAME, "--json")
    assert json_of(again)["data"] == {
        "model": NAME,
        "repository": ENTRY.repository,
        "commit": ENTRY.revision,
        "folder": str(folder),
    }

    verified = models("verify", NAME)
    assert verified.returncode == 0
    assert verified.stdout.count("ok  ") == 16

    removed = models("rm", NAME)
    assert removed.returncode == 0 and "freed" in removed.stdout
    assert not models.folder.exists()
    gone = models("rm", NAME)
    assert gone.returncode == 2 and "error[E_MODEL]" in gone.stderr


def test_list_fits_eighty_columns_and_opens_no_connection(models, server):
    listed = models("list")
    lines = listed.stdout.splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= 80
    assert "28.9 GB" in lines[1] and "Apache-2.0" in lines[1] and lines[1].endswith("no")
    assert server.requests == []
    assert "--model demo, of moving shapes alone, is in the package" in listed.stderr


def test_verify_names_the_command_that_mends_and_it_does(models):
    folder = Path(models("pull", NAME).stdout.strip())
    blob = (folder / SHARD).resolve()
    blob.write_bytes(flipped(blob.read_bytes()))
    for flags in ((), ("--offline",)):
        bad = models("verify", NAME, *flags, "--json")
        assert bad.returncode == 5
        answer = json_of(bad)
        assert answer["error"]["code"] == "E_CHECKPOINT"
        assert [file["path"] for file in answer["data"]["files"] if file["problem"]] == [SHARD]
    spoken = models("verify", NAME)
    assert f"bad   {SHARD}" in spoken.stdout
    command = spoken.stderr.split("try: ")[1].split("\n")[0].split()
    assert command == ["svgen", "models", "pull", NAME, "--repair"]
    assert models(*command[2:]).returncode == 0
    assert models("verify", NAME).returncode == 0


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_pull_that_was_killed_is_continued(models, server, home, end):
    server.faults.append(Fault(SHARD, "stall", after=40_000))
    digest = server.repositories[ENTRY.repository].digest(SHARD)
    partial = models.folder / "blobs" / f"{digest}.incomplete"
    environment = {"HF_ENDPOINT": server.url, "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "svgen", "models", "pull", NAME],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert server.stalled.wait(60)
            while process.poll() is None and partial.stat().st_size == 0:
                pass
            process.send_signal(end)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    if end != signal.SIGKILL:
        assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[end], err
        assert "error[E_INTERRUPTED]" in err and out == ""
    kept = partial.stat().st_size
    assert 0 < kept <= 40_000
    server.requests.clear()
    assert models("pull", NAME).returncode == 0
    ranges = {r.range for r in server.requests if r.path.endswith(SHARD)}
    assert ranges == {f"bytes={kept}-"}
    assert models("verify", NAME, "--offline").returncode == 0


def test_offline_with_the_hub_down(models, server):
    missing = models("pull", NAME, "--offline", "--json")
    assert missing.returncode == 5 and json_of(missing)["error"]["code"] == "E_OFFLINE"
    assert server.requests == []
    models("pull", NAME)
    down = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    for args in (("pull", NAME, "--offline"), ("verify", NAME, "--offline"), ("list",)):
        assert models(*args, **down).returncode == 0
    assert models("verify", NAME, HF_HUB_OFFLINE="1", **down).returncode == 0


def test_refused_access_never_shows_the_token(models, server):
    server.repositories[ENTRY.repository].token = "hf_another"
    for flags in ((), ("--json",), ("-vv",)):
        refused = models("pull", NAME, *flags, SVGEN_DEBUG="1")
        assert refused.returncode == 4
        assert "E_AUTH" in refused.stdout + refused.stderr
        assert TOKEN not in refused.stdout + refused.stderr
    assert any(request.token == TOKEN for request in server.requests)


def test_an_unknown_model_gets_three_lines(models):
    wrong = models("pull", "wan2.1-1.3")
    assert wrong.returncode == 2
    lines = wrong.stderr.splitlines()
    assert lines[0].startswith("error[E_MODEL]: ") and lines[1].startswith("  why: ")
    assert lines[2] == f"  try: did you mean {NAME}?"


def test_a_person_is_asked_before_a_large_download(models, server, home, monkeypatch):
    answers = {"n\n": 2, "y\n": 0}
    code = (
        "import sys; from svgen.cli import models, run; models.ASK_FROM_BYTES = 1000; "
        f"sys.exit(run(['models', 'pull', '{NAME}']))"
    )
    for answer, status in answers.items():
        leader, follower = pty.openpty()
        os.write(leader, answer.encode())
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=follower,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": server.url},
            cwd=home,
            timeout=60,
            check=False,
        )
        os.close(leader)
        os.close(follower)
        assert done.returncode == status, done.stderr
        assert "Fetch 4" in done.stderr
        assert any(path.endswith(SHARD) for path in server.files_got()) == (status == 0)
