"""A Hub that breaks off, lies and never ends, on loopback: a pull ends well where it can, else with
one documented error that names the file. Never is there a bad file in the cache.
"""

import json
import random
import threading

import huggingface_hub
import pytest
from huggingface_hub import constants

from svgen import hub
from svgen.catalog import CATALOG
from svgen.errors import DownloadError, SvgenError
from svgen.hub.download import Patience
from svgen.hub.snapshot import MAX_JSON_BYTES
from tests.hub_server import (
    ALWAYS,
    Fault,
    HubServer,
    Repository,
    bad_in,
    point_client_to,
    wan_files,
)

NAME = "wan2.1-1.3b"
ENTRY = CATALOG[NAME]
SHARD = "transformer/diffusion_pytorch_model-00001-of-00002.safetensors"
INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"
CONFIG = "vae/config.json"
LISTING = "the list of files"
NO_WAIT = Patience(attempts=3, wait_s=0)


class Bench:
    """One Hub, and an empty cache before each test."""

    def __init__(self, server: HubServer, cache):
        self.server, self.cache = server, cache
        self.repository = server.repositories[ENTRY.repository]

    def pull(self, *faults: Fault) -> SvgenError | None:
        """Pull with these faults only; returns the error, once the cache was looked through."""
        self.server.faults[:] = faults
        error = None
        try:
            hub.pull(NAME, patience=NO_WAIT)
        except SvgenError as found:
            error = found
        assert bad_in(self.cache, self.repository) == []
        assert (hub.find(NAME) is None) == (error is not None)
        return error

    def kept(self, path: str) -> int:
        """How many bytes of an unfinished file wait to be gone on from."""
        digest = self.repository.digest(path)
        (partial,) = self.cache.glob(f"*/blobs/{digest}.incomplete")
        return partial.stat().st_size


@pytest.fixture(scope="module")
def running():
    with HubServer({}) as server:
        yield server


@pytest.fixture
def bench(running, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    running.repositories[ENTRY.repository] = Repository(wan_files(), commit=ENTRY.revision)
    running.requests.clear()
    running.bytes_served = 0
    point_client_to(monkeypatch, running.url)
    yield Bench(running, tmp_path / "hub")
    huggingface_hub.close_session()


@pytest.mark.parametrize(
    "faults",
    [
        [Fault(SHARD, "drip")],
        [Fault(SHARD, "more")],
        [Fault(SHARD, "redirect")],
        [Fault(SHARD, "redirect", location="file:///etc/passwd")],
        [Fault(SHARD, "redirect", location="http://127.0.0.1:9/x")],
        [Fault(SHARD, "status", status=429, retry_after="")],
        [Fault(SHARD, "status", status=429, retry_after="Wed, 21 Oct 2026 07:28:00 GMT")],
        [Fault(SHARD, "status", status=502), Fault(SHARD, "status", status=504)],
        [Fault(SHARD, "drop", after=9), Fault(SHARD, "unsatisfied")],
        [Fault(SHARD, "flip"), Fault(SHARD, "drop", after=9), Fault(SHARD, "noranges")],
        [Fault(SHARD, "drop", after=9), Fault(SHARD, "shifted")],
        [Fault(SHARD, "stall", after=1000)],
        [Fault(SHARD, "gzip")],
        [Fault(CONFIG, "drop", after=3), Fault(CONFIG, "flip")],
        [Fault(INDEX, "flip")],
        [Fault(INDEX, "drop", after=5), Fault(INDEX, "status", status=503)],
        [Fault("model_index.json", "short", after=5)],
        [Fault("api", "drop", after=100), Fault("api", "status", status=500)],
        [Fault("api", "drip")],
        [Fault("api", "redirect", location="file:///etc/passwd"), Fault("api", "redirect")],
        [Fault("api", "stall", after=10)],
    ],
    ids=lambda faults: "-".join(f"{one.path[-9:]}:{one.kind}" for one in faults),
)
def test_what_passes_is_waited_out(bench, faults):
    assert bench.pull(*faults) is None
    assert all(fault.times == 0 for fault in faults)


def test_connections_that_break_at_random_bytes_are_gone_on_from(bench):
    draw, paths = random.Random(7), sorted(wan_files())
    sizes = {path: len(bench.repository.files[path]) for path in paths}
    faults = [
        Fault(
            path,
            draw.choice(["drop", "short"]),
            after=draw.randrange(sizes[path] // 3, sizes[path]),
        )
        for path in [SHARD] * 9 + paths
    ]
    assert bench.pull(*faults) is None


@pytest.mark.parametrize(
    ("fault", "code", "named"),
    [
        (Fault(SHARD, "status", status=429, retry_after="", times=ALWAYS), "E_NETWORK", SHARD),
        (Fault(SHARD, "status", status=500, times=ALWAYS), "E_NETWORK", SHARD),
        (Fault(SHARD, "status", status=404, times=ALWAYS), "E_NETWORK", SHARD),
        (Fault(SHARD, "redirect", times=ALWAYS), "E_NETWORK", SHARD),
        (Fault(SHARD, "redirect", location="file:///x", times=ALWAYS), "E_NETWORK", SHARD),
        (Fault(SHARD, "drop", after=0, times=ALWAYS), "E_NETWORK", SHARD),
        (Fault(SHARD, "more", times=1), None, ""),
        (Fault(SHARD, "flip", times=ALWAYS), "E_CHECKPOINT", SHARD),
        (Fault(CONFIG, "flip", times=ALWAYS), "E_CHECKPOINT", CONFIG),
        (Fault(INDEX, "flip", times=ALWAYS), "E_CHECKPOINT", INDEX),
        (Fault(INDEX, "short", after=5, times=ALWAYS), "E_NETWORK", INDEX),
        (Fault(SHARD, "status", status=401, times=ALWAYS), "E_AUTH", ENTRY.repository),
        (Fault(SHARD, "status", status=403, times=ALWAYS), "E_AUTH", ENTRY.repository),
        (Fault("api", "status", status=403, times=ALWAYS), "E_AUTH", ENTRY.repository),
        (Fault("api", "status", status=503, times=ALWAYS), "E_NETWORK", LISTING),
        (Fault("api", "redirect", times=ALWAYS), "E_NETWORK", LISTING),
        (Fault("api", "answer", body=b"[1]", times=ALWAYS), "E_NETWORK", LISTING),
        (Fault("api", "answer", body=b"[" * 90_000, times=ALWAYS), "E_NETWORK", LISTING),
        (Fault("api", "answer", body=b'{"sha": "c0', times=ALWAYS), "E_NETWORK", LISTING),
        (
            Fault("api", "answer", body=b'{"sha": 1, "siblings": 2}', times=ALWAYS),
            "E_NETWORK",
            LISTING,
        ),
        (Fault("api", "answer", body=b"\xff\xfe\x00", times=ALWAYS), "E_NETWORK", LISTING),
    ],
    ids=lambda value: f"{value.path[-9:]}:{value.kind}" if isinstance(value, Fault) else "",
)
def test_what_stays_is_an_error_that_names_the_file(bench, fault, code, named):
    error = bench.pull(fault)
    assert (error and error.code) == code
    if error:
        assert error.exit_code == {"E_AUTH": 4}.get(code, 5)
        assert named in error.message and error.hint
        assert bench.pull() is None, "the same command goes on"


@pytest.mark.parametrize("second", ["noranges", "unsatisfied"])
def test_breaking_at_the_same_byte_for_ever_is_given_up(bench, second):
    """Each answer brings 30,000 bytes, but never one that was not there before."""

    def faults():
        for _ in range(50):
            yield Fault(SHARD, "drop", after=30_000)
            yield Fault(SHARD, second)

    if second == "noranges":
        error = bench.pull(Fault(SHARD, "noranges", after=30_000, times=ALWAYS))
    else:
        error = bench.pull(*faults())
    assert error.code == "E_NETWORK" and SHARD in error.message
    assert sum(request.path.endswith(SHARD) for request in bench.server.requests) < 30
    assert bench.pull() is None


def test_what_came_is_kept_when_the_rest_never_comes(bench):
    faults = [Fault(SHARD, "drop", after=30_000), Fault(SHARD, "stall", after=0, times=ALWAYS)]
    assert bench.pull(*faults).code == "E_NETWORK"
    assert bench.kept(SHARD) == 30_000
    bench.server.requests.clear()
    assert bench.pull() is None
    ranges = {one.range for one in bench.server.requests if one.path.endswith(SHARD)}
    assert ranges == {"bytes=30000-"}


@pytest.mark.parametrize("path", ["api", "model_index.json", INDEX])
def test_an_answer_without_an_end_is_left(bench, path):
    error = bench.pull(Fault(path, "flood", times=ALWAYS))
    assert error.exit_code == 5
    assert bench.server.bytes_served < 8 * MAX_JSON_BYTES


def listed(**values):
    """Change what the Hub's list says of the shard."""

    def alter(answer):
        for item in answer["siblings"]:
            if item["rfilename"] == SHARD:
                item |= values
        return answer

    return alter


def strangers(answer):
    """Add files that lie elsewhere, each with the right digest of something."""
    item = next(item for item in answer["siblings"] if item["rfilename"] == SHARD)
    names = ("../x", "/etc/x", "a/../../x", "..", "", "transformer/../../../x.safetensors")
    return answer | {"siblings": [*answer["siblings"], *(item | {"rfilename": n} for n in names)]}


def another_commit(answer):
    return answer | {"sha": "f" * 40}


@pytest.mark.parametrize(
    ("alter", "code"),
    [
        (strangers, None),
        (another_commit, "E_NETWORK"),
        (lambda answer: answer | {"siblings": None}, "E_NETWORK"),
        (lambda answer: answer | {"siblings": [1]}, "E_NETWORK"),
        (lambda answer: answer | {"sha": "../../x"}, "E_NETWORK"),
        (lambda answer: answer | {"siblings": []}, "E_CHECKPOINT"),
        (listed(size=-1), "E_CHECKPOINT"),
        (listed(size=None), "E_CHECKPOINT"),
        (listed(size="7"), "E_CHECKPOINT"),
        (listed(size=True), "E_CHECKPOINT"),
        (listed(size=10**18), "E_CHECKPOINT"),
        (listed(lfs={"sha256": "../../../../x"}), "E_CHECKPOINT"),
        (listed(lfs={"sha256": "A" * 64}), "E_CHECKPOINT"),
        (listed(lfs={"sha256": "0" * 64}), "E_CHECKPOINT"),
        (listed(lfs={"sha256": 7}), "E_NETWORK"),
        (listed(size=10), "E_CHECKPOINT"),
        (listed(size=0), "E_CHECKPOINT"),
        (listed(size=100_000), "E_NETWORK"),
        (listed(size=2**49), "E_DISK_FULL"),
    ],
)
def test_a_list_that_lies_puts_nothing_into_the_cache(bench, alter, code, tmp_path):
    bench.repository.altered = alter
    error = bench.pull()
    assert (error and error.code) == code
    assert code in (None, "E_DISK_FULL") or error.exit_code == 5
    assert {path.name for path in tmp_path.iterdir()} <= {"hub"}
    assert all(path.is_relative_to(bench.cache) for path in tmp_path.rglob("x*"))


def test_a_token_follows_no_redirect_to_another_host(bench, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    with HubServer(bench.server.repositories) as other:
        for path in ("api", SHARD):
            bench.pull(Fault(path, "redirect", location=f"{other.url}/x", times=ALWAYS))
        assert {request.token for request in other.requests} == {None}


def test_two_pulls_at_once_through_broken_connections_both_end_well(bench):
    errors = []
    faults = [Fault(path, "drop", after=1 + len(path)) for path in sorted(wan_files()) * 2]
    threads = [threading.Thread(target=lambda: errors.append(bench.pull(*faults))) for _ in "12"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [None, None]


def test_a_bad_file_is_named_in_json_too(bench):
    error = bench.pull(Fault(SHARD, "flip", times=ALWAYS))
    assert isinstance(error, DownloadError)
    assert json.loads(json.dumps(error.as_json()))["details"]["files"] == [SHARD]
