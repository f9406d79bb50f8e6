"""Pulls as processes of their own, killed, starved of disk and run side by side, against a Hub on
loopback that breaks off; and `generate`, which pulls first.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from svgen.catalog import CATALOG
from tests.full_disk import Disk, empty, fill, limited, names
from tests.helpers import ROOT, json_of
from tests.hub_server import ALWAYS, Fault, HubServer, Repository, bad_in, wan_files

pytestmark = pytest.mark.faults
NAME = "wan2.1-1.3b"
ENTRY = CATALOG[NAME]
SHARD = "transformer/diffusion_pytorch_model-00001-of-00002.safetensors"
TINY = "someone/tiny"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
KILLS = int(os.environ.get("SVGEN_TEST_KILLS", "10"))


@pytest.fixture
def server():
    tiny = ROOT / "tests/golden/tiny"
    files = {
        str(path.relative_to(tiny)): path.read_bytes() for path in tiny.rglob("*") if path.is_file()
    }
    repositories = {
        ENTRY.repository: Repository(wan_files(), commit=ENTRY.revision),
        TINY: Repository(files),
    }
    with HubServer(repositories) as running:
        yield running


@pytest.fixture
def start(server, home):
    """Start svgen as a process that takes the server for the Hub."""

    def start(*args, before=(), **env):
        here = {"HF_ENDPOINT": server.url, "HF_HUB_DOWNLOAD_TIMEOUT": "1", "XLA_FLAGS": ""}
        return subprocess.Popen(
            [*before, sys.executable, "-m", "svgen", *map(str, args)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **here, **env},
            cwd=home,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def finished(process):
    out, err = process.communicate(timeout=120)
    assert "Traceback" not in err and "Exception ignored" not in err, err
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_pull_killed_at_random_moments_goes_on(server, start, home):
    repository, cache = server.repositories[ENTRY.repository], home / "huggingface/hub"
    total = sum(map(len, repository.files.values()))
    draw, kept, killed = random.Random(11), [], 0
    for _ in range(KILLS):
        server.faults[:] = [Fault(path, "drip", times=ALWAYS) for path in repository.files]
        until = server.bytes_served + draw.randrange(total // 6)
        process = start("models", "pull", NAME)
        while process.poll() is None and server.bytes_served < until:
            time.sleep(0.001)
        for _ in range(draw.randrange(200)):
            os.sched_yield()
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        process.communicate()
        assert bad_in(cache, repository) == []
        kept.append(sum(path.stat().st_size for path in cache.glob("*/blobs/*")))
    assert kept == sorted(kept), "nothing that came is lost"
    done = finished(start("models", "pull", NAME))
    assert done.returncode == 0, done.stderr
    assert bad_in(cache, repository) == []
    assert finished(start("models", "verify", NAME, "--offline")).returncode == 0
    print(f"\npull: {killed} of {KILLS} killed, {kept} bytes kept of {total}")


def test_two_pulls_at_once_both_end_well(server, start, home):
    repository = server.repositories[ENTRY.repository]
    server.faults[:] = [Fault(path, "drop", after=20_000) for path in (SHARD, SHARD)]
    both = [start("models", "pull", NAME) for _ in "12"]
    for done in map(finished, both):
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip().endswith(ENTRY.revision)
    assert bad_in(home / "huggingface/hub", repository) == []


def test_disk_that_runs_full_keeps_what_came(server, start, tmp_path):
    part = f"hub/*/blobs/{digest(server)}.incomplete"
    with Disk(tmp_path / "disk") as disk:
        server.faults[:] = [Fault(SHARD, "stall", after=30_000)]
        process = start("models", "pull", NAME, "--json", HF_HOME=str(disk.folder))
        assert server.stalled.wait(60)
        until(lambda: sum(one.stat().st_size for one in disk.folder.glob(part)) >= 20_000)
        fill(disk.folder)
        error = json_of(done := finished(process))["error"]
        assert (done.returncode, error["code"]) == (6, "E_DISK_FULL"), done.stderr
        assert str(disk.folder) in error["message"] and "HF_HOME" in error["hint"]
        (kept,) = disk.folder.glob(part)
        size = kept.stat().st_size
        assert size >= 20_000 and bad_in(disk.folder / "hub", repository_of(server)) == []
        empty(disk.folder)
        server.requests.clear()
        assert finished(start("models", "pull", NAME, HF_HOME=str(disk.folder))).returncode == 0
        assert f"bytes={size}-" in {one.range for one in server.requests}
        assert bad_in(disk.folder / "hub", repository_of(server)) == []
        assert names(disk.folder) == ["hub"]


def test_file_that_may_be_no_larger_keeps_what_came(server, start, home):
    done = finished(start("models", "pull", NAME, "--json", before=limited(40_000)))
    assert (done.returncode, json_of(done)["error"]["code"]) == (6, "E_DISK_FULL"), done.stderr
    assert bad_in(home / "huggingface/hub", repository_of(server)) == []
    server.requests.clear()
    assert finished(start("models", "pull", NAME)).returncode == 0
    assert "bytes=40000-" in {one.range for one in server.requests}
    assert bad_in(home / "huggingface/hub", repository_of(server)) == []


def test_cache_that_cannot_be_written_is_named(start, tmp_path):
    with Disk(tmp_path / "disk") as disk:
        disk.remount("ro")
        done = finished(start("models", "pull", NAME, "--json", HF_HOME=str(disk.folder)))
        error = json_of(done)["error"]
        assert (done.returncode, error["code"]) == (6, "E_WRITE"), done.stderr
        assert str(disk.folder) in error["message"] and "Read-only" in error["message"]


def repository_of(server):
    return server.repositories[ENTRY.repository]


def digest(server):
    return repository_of(server).digest(SHARD)


@pytest.mark.parametrize(
    ("faults", "status", "named"),
    [
        ([Fault(WEIGHTS, "drop", after=9_000), Fault("vae/config.json", "flip")], 0, ""),
        ([Fault(WEIGHTS, "flip", times=ALWAYS)], 5, WEIGHTS),
        ([Fault(WEIGHTS, "status", status=404)], 5, WEIGHTS),
        ([Fault(WEIGHTS, "status", status=403)], 4, TINY),
        ([Fault("api", "answer", body=b"{")], 5, "the list of files"),
    ],
    ids=["mended", "wrong-bytes", "gone", "refused", "no-list"],
)
def test_generate_pulls_as_pull_does(server, start, home, faults, status, named):
    server.faults[:] = faults
    size = ("--res", "32x32", "--frames", "1", "--steps", "2", "--seed", "3")
    video = Path(home, "x.mp4")
    args = ("generate", "a red ball", "--model", TINY, *size, "--device", "cpu", "-o", video)
    done = finished(start(*args, "--json"))
    assert done.returncode == status, done.stderr
    assert video.exists() is (status == 0)
    assert status == 0 or named in json_of(done)["error"]["message"]
    assert bad_in(home / "huggingface/hub", server.repositories[TINY]) == []
    assert status or json_of(done)["data"]["on_disk"] is False
