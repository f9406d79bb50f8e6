"""The real Hub client against a Hub on loopback: what is fetched, resumed, found broken, mended."""

import errno
import json
import shutil
import socket
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from svgen import hub
from svgen.catalog import CATALOG
from svgen.errors import (
    AccessError,
    DownloadError,
    FileError,
    MachineError,
    SvgenError,
    UsageError,
)
from svgen.hub.download import Patience
from tests.hub_server import (
    COMMIT,
    Fault,
    HubServer,
    Repository,
    flipped,
    point_client_to,
    safetensors_file,
    wan_files,
)

NAME = "wan2.1-1.3b"
ENTRY = CATALOG[NAME]
OTHER = "someone/tiny-wan"
SHARD = "transformer/diffusion_pytorch_model-00001-of-00002.safetensors"
INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"
SIDE_FILES = {
    "README.md",
    ".gitattributes",
    "assets/video.mp4",
    "tokenizer/spiece.model",
    "transformer/diffusion_pytorch_model.bin",
    "transformer/stray.safetensors",
}
NO_WAIT = Patience(attempts=2, wait_s=0)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, as HF_HOME would set it before the client is imported."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    return folder


@pytest.fixture
def server(cache, monkeypatch):
    """A Hub that has the small Wan model at its pinned revision, and a repository of someone."""
    repositories = {
        ENTRY.repository: Repository(wan_files(), commit=ENTRY.revision),
        OTHER: Repository(wan_files(8), names=("main", "v1.0")),
    }
    with HubServer(repositories) as running:
        point_client_to(monkeypatch, running.url)
        yield running
        huggingface_hub.close_session()


@pytest.fixture
def no_sockets(monkeypatch):
    """Any attempt to reach anything fails the test."""

    def refuse(*_):
        raise AssertionError("a socket was opened")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def pull(name=NAME, **options):
    return hub.pull(name, patience=NO_WAIT, **options)


def verify(name=NAME, **options):
    return hub.verify(name, patience=NO_WAIT, **options)


def problems(checks):
    return {check.path: check.problem for check in checks if check.problem}


def overwrite(path: Path, data: bytes) -> None:
    """Damage a file behind its link."""
    path.resolve().write_bytes(data)


def error_of(kind, code, action) -> SvgenError:
    with pytest.raises(kind) as caught:
        action()
    assert caught.value.code == code
    return caught.value


def test_pull_fetches_the_needed_files_and_no_others(server):
    folder = pull()
    here = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    files = server.repositories[ENTRY.repository].files
    assert here == set(files) - SIDE_FILES
    assert len(here) == 16
    for path in here:
        assert (folder / path).read_bytes() == files[path]
    assert not SIDE_FILES & set(server.files_got())


def test_pull_asks_for_the_pinned_revision(server):
    assert pull().name == ENTRY.revision
    hubs = [r.path for r in server.requests if r.port == server.ports[0]]
    assert hubs and all(ENTRY.revision in path for path in hubs)


def test_pull_again_fetches_nothing(server):
    pull()
    before = len(server.files_got())
    assert hub.plan(NAME).missing == ()
    pull()
    assert len(server.files_got()) == before


def test_the_client_itself_finds_what_was_pulled(server):
    folder = pull()
    path = huggingface_hub.hf_hub_download(ENTRY.repository, SHARD, revision=ENTRY.revision)
    assert Path(path) == folder / SHARD
    whole = huggingface_hub.snapshot_download(
        ENTRY.repository, revision=ENTRY.revision, local_files_only=True
    )
    assert Path(whole) == folder


def test_what_the_client_pulled_is_found(server):
    huggingface_hub.snapshot_download(
        ENTRY.repository, revision=ENTRY.revision, tqdm_class=None, max_workers=2
    )
    before = len(server.files_got())
    assert hub.find(NAME) == hub.locate(NAME)
    assert not problems(verify())
    assert len(server.files_got()) == before


@pytest.mark.parametrize("revision", ["", "@v1.0", f"@{COMMIT}"])
def test_a_repository_is_resolved_to_a_commit_and_found_again(server, revision):
    name = OTHER + revision
    folder = pull(name)
    assert folder.name == COMMIT
    assert hub.locate(name, offline=True) == folder


def test_progress_is_one_total_that_ends_full(server):
    seen = []
    pull(progress=lambda done, total, name: seen.append((done, total, name)))
    totals = {total for _, total, _ in seen}
    files = server.repositories[ENTRY.repository].files
    assert totals == {sum(len(data) for path, data in files.items() if path not in SIDE_FILES)}
    dones = [done for done, _, _ in seen]
    assert dones == sorted(dones) and dones[-1] == totals.pop()


def test_a_broken_connection_is_resumed_where_it_broke(server):
    server.faults.append(Fault(SHARD, "drop", after=30_000))
    pull()
    ranges = [r.range for r in server.requests if r.path.endswith(SHARD) and r.range]
    assert ranges and set(ranges) == {"bytes=30000-"}
    total = sum(
        len(data)
        for path, data in server.repositories[ENTRY.repository].files.items()
        if path not in SIDE_FILES
    )
    assert server.bytes_served < 1.2 * total
    assert not problems(verify())


def test_an_ended_run_is_resumed_by_the_next(server):
    server.faults.append(Fault(SHARD, "drop", after=30_000))
    server.faults.append(Fault(SHARD, "status", status=503, times=9))
    error = error_of(DownloadError, "E_NETWORK", pull)
    assert SHARD in error.message
    assert f"svgen models pull {NAME}" in error.hint
    assert hub.find(NAME) is None
    server.faults.clear()
    server.requests.clear()
    seen = []
    pull(progress=lambda done, *_: seen.append(done))
    ranges = {r.range for r in server.requests if r.path.endswith(SHARD)}
    assert ranges == {"bytes=30000-"}
    assert seen[0] >= 30_000
    assert not problems(verify())


def test_a_server_without_ranges_sends_all_again(server):
    server.faults += [Fault(SHARD, "drop", after=30_000), Fault(SHARD, "noranges")]
    seen = []
    pull(progress=lambda done, *_: seen.append(done))
    assert not problems(verify())
    assert seen[-1] == max(seen)


def test_a_partial_file_longer_than_the_file_is_dropped(server, cache):
    files = server.repositories[ENTRY.repository]
    blobs = cache / ("models--" + ENTRY.repository.replace("/", "--")) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{files.digest(SHARD)}.incomplete").write_bytes(b"x" * 1_000_000)
    pull()
    assert not problems(verify())


def test_a_partial_file_of_something_else_is_fetched_anew(server, cache):
    files = server.repositories[ENTRY.repository]
    blobs = cache / ("models--" + ENTRY.repository.replace("/", "--")) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{files.digest(SHARD)}.incomplete").write_bytes(b"x" * 1_000)
    pull()
    assert not problems(verify())


def test_a_short_answer_is_continued(server):
    server.faults.append(Fault(SHARD, "short", after=1_000))
    pull()
    assert not problems(verify())


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_hub_is_asked_again(server, status):
    server.faults += [Fault("api", "status", status=status), Fault(SHARD, "status", status=status)]
    pull()
    assert not problems(verify())


def test_bits_flipped_on_the_way_are_fetched_again(server):
    server.faults.append(Fault(SHARD, "flip"))
    pull()
    assert not problems(verify())


def test_bits_that_always_flip_never_get_into_the_cache(server):
    server.faults.append(Fault(SHARD, "flip", times=9))
    error = error_of(DownloadError, "E_CHECKPOINT", pull)
    assert SHARD in error.message
    assert hub.find(NAME) is None


def test_a_hub_that_is_down_is_named_with_the_way_to_continue(cache, monkeypatch):
    with HubServer({}) as stopped:
        pass
    point_client_to(monkeypatch, stopped.url)
    error = error_of(DownloadError, "E_NETWORK", pull)
    assert stopped.url in error.why
    assert error.hint.endswith(f"svgen models pull {NAME}")


def test_an_answer_that_is_not_the_hubs_is_a_network_error(server):
    server.faults.append(Fault("api", "answer"))
    error_of(DownloadError, "E_NETWORK", pull)


@pytest.mark.parametrize("at", [0, 5_000, -1])
def test_verify_finds_a_flipped_bit_and_repair_mends_it(server, at):
    folder = pull()
    data = (folder / SHARD).read_bytes()
    overwrite(folder / SHARD, flipped(data, at % len(data)))
    for offline in (False, True):
        checks = verify(offline=offline)
        assert problems(checks) == {SHARD: "hash"}
        error = hub.bad_files(NAME, checks)
        assert (error.code, error.exit_code) == ("E_CHECKPOINT", 5)
        assert SHARD in error.message
        assert error.hint == f"svgen models pull {NAME} --repair"
    before = len(server.files_got())
    assert pull(repair=True) == folder
    assert server.files_got()[before:] and set(server.files_got()[before:]) == {SHARD}
    assert not problems(verify())
    assert (folder / SHARD).read_bytes() == data


def test_verify_finds_a_truncated_file_and_repair_mends_it(server):
    folder = pull()
    data = (folder / SHARD).read_bytes()
    overwrite(folder / SHARD, data[:-100])
    (check,) = [check for check in verify() if check.problem]
    assert (check.path, check.problem) == (SHARD, "size")
    assert (check.expected_bytes, check.actual_bytes) == (len(data), len(data) - 100)
    assert problems(verify(offline=True)) == {SHARD: "hash"}
    pull(repair=True)
    assert not problems(verify())


def test_verify_finds_a_deleted_file_and_a_plain_pull_brings_it(server):
    folder = pull()
    (folder / SHARD).resolve().unlink()
    assert problems(verify()) == problems(verify(offline=True)) == {SHARD: "missing"}
    pull()
    assert not problems(verify())


def test_a_broken_index_is_found_and_mended(server):
    folder = pull()
    data = (folder / INDEX).read_bytes()
    overwrite(folder / INDEX, b"{" + b" " * (len(data) - 1))
    assert problems(verify()) == {INDEX: "hash"}
    error = error_of(DownloadError, "E_CHECKPOINT", lambda: verify(offline=True))
    assert INDEX in error.message and "--repair" in error.hint
    pull(repair=True)
    assert not problems(verify())


def test_offline_works_from_the_cache_and_opens_no_socket(server, request):
    folder = pull()
    server.__exit__()
    server.servers.clear()
    server.threads.clear()
    request.getfixturevalue("no_sockets")
    assert hub.locate(NAME, offline=True) == folder
    assert hub.locate(NAME) == folder  # all is there: nobody needs to be asked
    assert hub.pull(NAME, offline=True) == folder
    assert not problems(verify(offline=True))
    assert [one.name for one in hub.installed()] == [NAME]


def test_offline_names_what_is_missing_and_opens_no_socket(server, request):
    folder = pull()
    (folder / SHARD).unlink()
    request.getfixturevalue("no_sockets")
    error = error_of(DownloadError, "E_OFFLINE", lambda: hub.locate(NAME, offline=True))
    assert SHARD in error.message and error.details["files"] == [SHARD]
    assert error.exit_code == 5


@pytest.mark.parametrize("action", [hub.locate, hub.pull, hub.verify])
def test_hf_hub_offline_forbids_the_network(cache, monkeypatch, no_sockets, action):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = error_of(DownloadError, "E_OFFLINE", lambda: action(NAME))
    assert "model_index.json" in error.details["files"]


def test_a_full_disk_is_found_before_anything_is_fetched(server, cache, monkeypatch):
    total = hub.plan(NAME).fetch_bytes
    free = int(total * 1.05) - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 0, free))
    server.requests.clear()
    error = error_of(FileError, "E_DISK_FULL", pull)
    assert f"{total:,}" in error.message and f"{free:,}" in error.message
    assert "HF_HOME" in error.hint
    assert error.details == {"needed_bytes": total, "free_bytes": free}
    assert not any(path.endswith(".safetensors") for path in server.files_got())
    assert not cache.exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 0, free + 2))
    pull()


def test_the_space_needed_is_what_is_still_to_come(server):
    folder = pull()
    size = (folder / SHARD).stat().st_size
    (folder / SHARD).resolve().unlink()
    found = hub.plan(NAME)
    assert (found.fetch_bytes, [file.path for file in found.missing]) == (size, [SHARD])


@pytest.mark.parametrize(("gated", "token"), [(False, None), (True, None), (True, "hf_wrong")])
def test_refused_access_says_what_to_do_and_never_the_token(server, monkeypatch, gated, token):
    repository = server.repositories[ENTRY.repository]
    repository.token, repository.gated = "hf_right", gated
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    error = error_of(AccessError, "E_AUTH", pull)
    assert f"{server.url}/{ENTRY.repository}" in error.hint
    assert "hf auth login" in error.hint
    assert "hf_wrong" not in json.dumps(error.as_json())
    assert error.exit_code == 4


def test_the_token_goes_to_the_hub_and_not_to_its_storage(server, monkeypatch):
    server.repositories[ENTRY.repository].token = "hf_right"
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    pull()
    tokens = {(r.port == server.ports[0], r.token) for r in server.requests}
    assert tokens == {(True, "hf_right"), (False, None)}


def test_a_password_in_the_endpoint_is_not_shown(cache, monkeypatch):
    with HubServer({}) as stopped:
        pass
    point_client_to(monkeypatch, stopped.url.replace("//", "//me:secret@"))
    error = error_of(DownloadError, "E_NETWORK", pull)
    assert "secret" not in json.dumps(error.as_json())


@pytest.mark.parametrize("token", [None, "hf_right"])
def test_a_repository_that_is_not_there(server, monkeypatch, token):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
        error_of(UsageError, "E_MODEL", lambda: pull("someone/nothing"))
    else:  # the Hub does not tell strangers whether it exists
        error_of(AccessError, "E_AUTH", lambda: pull("someone/nothing"))


def test_a_revision_that_is_not_there(server):
    error = error_of(UsageError, "E_MODEL", lambda: pull(f"{OTHER}@v9"))
    assert "v9" in error.message


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("wan2.1-1.3", "did you mean wan2.1-1.3b?"),
        ("WAN-14B", "did you mean wan2.1-14b?"),
        ("zzz", "known models: wan2.1-1.3b, wan2.1-14b"),
        ("a/b/c", "known models"),
        ("./nothing", "known models"),
        ("a--b/c", "known models"),
        ("../x", "known models"),
        ("x" * 5000, "known models"),
        ("", "known models"),
        ("~nobody-here/x", "known models"),
        ("a\0b", "known models"),
    ],
)
def test_an_unknown_name_gets_a_suggestion_and_asks_nobody(cache, no_sockets, name, suggestion):
    for action in (hub.locate, hub.pull, hub.verify, hub.remove, hub.find):
        error = error_of(UsageError, "E_MODEL", lambda action=action: action(name))
        assert suggestion in error.hint


@pytest.mark.parametrize("revision", ["", "../../x", "/etc", "a b", "-x", "a//b"])
def test_a_revision_that_could_leave_the_cache_is_refused(cache, no_sockets, revision):
    error_of(UsageError, "E_MODEL", lambda: hub.pull(f"{OTHER}@{revision}"))


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"t": "../x.safetensors"}},
        {"weight_map": {"t": "/etc/x.safetensors"}},
        {"weight_map": {"t": "x.bin"}},
        {"weight_map": {"t": 1}},
        {"weight_map": {}},
        {"weight_map": []},
        [],
    ],
)
def test_an_index_that_names_no_shard_beside_it_is_refused(server, cache, index):
    server.repositories[OTHER].files[INDEX] = json.dumps(index).encode()
    error = error_of(DownloadError, "E_CHECKPOINT", lambda: pull(OTHER))
    assert INDEX in error.message
    assert not cache.exists()


def test_a_shard_that_the_repository_lacks_is_named(server):
    del server.repositories[OTHER].files[SHARD]
    error = error_of(DownloadError, "E_CHECKPOINT", lambda: pull(OTHER))
    assert SHARD in error.message


@pytest.mark.parametrize(
    "change",
    [
        {"_class_name": "FluxPipeline"},
        {"_class_name": "WanPipeline", "transformer_2": ["diffusers", "Wan"]},
    ],
)
def test_another_kind_of_model_is_refused_before_its_weights(server, change):
    server.repositories[OTHER].files["model_index.json"] = json.dumps(change).encode()
    error_of(UsageError, "E_MODEL", lambda: pull(OTHER))
    assert set(server.files_got()) == {"model_index.json"}


def test_weights_in_one_file_need_no_index(server):
    files = server.repositories[OTHER].files
    for path in [path for path in files if "-of-" in path or path.endswith("index.json")]:
        del files[path]
    files["transformer/diffusion_pytorch_model.safetensors"] = safetensors_file(1, 500)
    files["text_encoder/model.safetensors"] = safetensors_file(2, 500)
    files["model_index.json"] = b'{"_class_name": "WanPipeline", "transformer_2": [null, null]}'
    pull(OTHER)
    assert not problems(verify(OTHER))


@pytest.fixture
def plain(tmp_path):
    """A checkpoint folder as save_pretrained writes it."""
    folder = tmp_path / "checkpoint"
    for path, data in wan_files(8).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


def test_a_folder_is_used_as_it_is(cache, plain, no_sockets, monkeypatch):
    assert hub.locate(str(plain)) == plain
    assert not problems(hub.verify(str(plain)))
    monkeypatch.chdir(plain.parent)
    assert hub.locate("checkpoint") == Path("checkpoint")


def test_a_folder_that_lacks_a_shard_is_named(cache, plain, no_sockets):
    (plain / SHARD).unlink()
    error = error_of(DownloadError, "E_CHECKPOINT", lambda: hub.locate(str(plain)))
    assert SHARD in error.message


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_file_of_a_folder_is_found_by_its_header(cache, plain, no_sockets, keep):
    data = (plain / SHARD).read_bytes()
    (plain / SHARD).write_bytes(data[:keep])
    checks = hub.verify(str(plain))
    assert list(problems(checks)) == [SHARD]
    assert SHARD in hub.bad_files(str(plain), checks).message


def test_folders_are_never_removed_or_pulled(cache, plain, no_sockets):
    for action in (hub.remove, hub.pull):
        error_of(UsageError, "E_MODEL", lambda action=action: action(str(plain)))
    assert hub.find(str(plain)) == plain


def test_a_folder_in_the_way_does_not_hide_a_known_model(cache, tmp_path, monkeypatch):
    (tmp_path / NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub.parse(NAME).repository == ENTRY.repository


def test_a_folder_without_a_model_is_not_taken_for_a_repository(
    cache, tmp_path, monkeypatch, no_sockets
):
    (tmp_path / "some" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    error = error_of(UsageError, "E_MODEL", lambda: hub.locate("some/folder"))
    assert "model_index.json" in error.why


def test_verify_of_what_is_not_on_disk_says_how_to_get_it(cache, no_sockets):
    error = error_of(UsageError, "E_MODEL", lambda: hub.verify(NAME))
    assert f"svgen models pull {NAME}" in error.hint


def test_auto_is_a_wan_model_on_a_tpu_and_the_demo_elsewhere(monkeypatch, plain):
    monkeypatch.setattr(hub.source, "DEMO", plain.parent / "nothing")
    assert hub.resolve_auto("tpu") == "wan2.1-14b"
    error = error_of(MachineError, "E_NO_TPU", lambda: hub.resolve_auto("cpu"))
    assert "--device cpu --model" in error.hint
    monkeypatch.setattr(hub.source, "DEMO", plain)
    assert hub.resolve_auto("cpu") == "demo"
    assert hub.locate("demo") == plain


def test_remove_frees_one_repository_and_leaves_the_others(server, cache):
    server.repositories[OTHER].commit = ENTRY.revision  # a copy shares its commit
    pull()
    other = pull(OTHER)
    sizes = {one.name: one.disk_bytes for one in hub.installed()}
    assert set(sizes) == {NAME, OTHER}
    assert hub.remove(NAME) == sizes[NAME] > 300_000
    assert [one.name for one in hub.installed()] == [OTHER]
    assert not problems(verify(OTHER)) and other.is_dir()
    error_of(UsageError, "E_MODEL", lambda: hub.remove(NAME))


def test_an_unfinished_download_is_listed_and_can_be_removed(server, cache):
    server.faults.append(Fault(SHARD, "drop", after=30_000))
    server.faults.append(Fault(SHARD, "status", status=500, times=9))
    error_of(DownloadError, "E_NETWORK", pull)
    (found,) = hub.installed()
    assert found.commits == () and found.disk_bytes >= 30_000
    assert hub.remove(NAME) == found.disk_bytes
    assert hub.installed() == []


def test_other_models_in_the_cache_are_left_out_of_the_list(server, cache):
    server.repositories["someone/else"] = Repository({"config.json": b"{}"})
    huggingface_hub.hf_hub_download("someone/else", "config.json")
    assert hub.installed() == []


def test_two_pulls_at_once_fetch_each_file_once(server):
    threads = [threading.Thread(target=pull) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    weights = [path for path in server.files_got() if path.endswith(".safetensors")]
    assert len(weights) == 2 * len(set(weights))  # the redirect, then the storage
    assert not problems(verify())


def test_a_cache_without_links_works_too(server, monkeypatch):
    def refuse(*_):
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    folder = pull()
    assert not any(path.is_symlink() for path in folder.rglob("*"))
    assert hub.plan(NAME).missing == ()
    assert not problems(verify())


def test_importing_the_package_loads_no_client():
    code = "import sys, svgen.hub; print([m for m in sys.modules if m.startswith('hugging')])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_a_disk_that_fills_up_on_the_way_keeps_what_came(server, monkeypatch):
    def full(self, chunk):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("svgen.hub.download._Partial.write", full)
        error = error_of(FileError, "E_DISK_FULL", pull)
    assert "HF_HOME" in error.hint and error.exit_code == 6
    pull()
    assert not problems(verify())


def test_a_cache_that_cannot_be_written_is_named(server, cache):
    cache.write_text("a file where a folder should be")
    error = error_of(FileError, "E_WRITE", pull)
    assert str(cache) in error.message and "HF_HOME" in error.hint


@pytest.mark.parametrize(
    "endpoint", ["", "hub.example", "ftp://hub.example", "http://[::1", "http://a b"]
)
def test_an_endpoint_that_is_no_address(cache, monkeypatch, no_sockets, endpoint):
    point_client_to(monkeypatch, endpoint)
    error = error_of(UsageError, "E_VALUE", pull)
    assert "HF_ENDPOINT" in error.message
