"""The checks of `svgen doctor`, on folders that play machines, and the command itself."""

import http.server
import os
import sys
import threading

import pytest

from svgen.cli import checks
from svgen.cli.checks import (
    OK,
    PROBLEM,
    WARNING,
    Finding,
    available_memory,
    devices,
    ffmpeg,
    folders,
    hosts,
    hub,
    memory,
    misfits,
    run_briefly,
    tpu,
    versions,
)
from svgen.cli.doctor import examine, lines_of
from svgen.cli.output import Console
from svgen.errors import MachineError
from tests.helpers import json_of, run_svgen


@pytest.fixture
def machine(tmp_path):
    for folder in ("dev", "proc", "tmp", "sys/fs/cgroup"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path


def hold(machine, pid=77):
    (machine / f"proc/{pid}/fd").mkdir(parents=True)
    (machine / f"proc/{pid}/fd/3").symlink_to("/dev/accel0")


def levels(findings):
    return [finding.level for finding in findings]


def test_missing_tpu_is_a_warning(machine):
    (finding,) = tpu(machine)
    assert (finding.level, finding.check) == (WARNING, "tpu")
    assert "--device cpu" in finding.fix


def test_tpu_in_use_is_a_problem_that_names_the_process(machine):
    (machine / "dev/accel0").touch()
    hold(machine)
    chips, holder = tpu(machine)
    assert (chips.level, chips.text) == (OK, "1 chip(s): /dev/accel0")
    assert (holder.level, holder.fix) == (PROBLEM, "wait for it, or end it: kill 77")


def test_jax_is_not_started_while_another_process_holds_the_tpu(machine):
    hold(machine)
    (finding,) = devices(machine)
    assert (finding.level, finding.check) == (WARNING, "jax")
    assert "not started" in finding.text


def test_lock_file_is_named_and_left_alone(machine):
    lock = machine / "tmp/libtpu_lockfile"
    lock.touch()
    finding = tpu(machine)[-1]
    assert (finding.level, finding.check) == (OK, "lock")
    assert f"user id {os.getuid()}" in finding.text
    assert lock.exists()


def test_lock_file_of_another_user_is_a_warning(machine, monkeypatch):
    (machine / "tmp/libtpu_lockfile").touch()
    monkeypatch.setattr(checks.os, "getuid", lambda: 12345)
    monkeypatch.setattr(checks.os, "access", lambda *_: False)
    finding = tpu(machine)[-1]
    assert (finding.level, finding.check) == (WARNING, "lock")
    assert "sudo rm /tmp/libtpu_lockfile" in finding.fix
    hold(machine)
    assert tpu(machine)[-1].level == OK


def test_one_worker_of_several_is_a_warning(monkeypatch):
    assert hosts() == []
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    assert hosts() == []
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "10.0.0.1,10.0.0.2")
    monkeypatch.setenv("TPU_WORKER_ID", "1")
    assert hosts()[0].text == "this is worker 1 of 2"
    assert levels(devices()) == [WARNING]


def test_jax_is_seen_in_a_process_of_its_own():
    (finding,) = devices()
    assert finding.level == OK
    assert finding.text.startswith("JAX sees 8 x cpu")


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("import signal; signal.pause()", "did not start within"),
        ("raise RuntimeError('no chip')", "RuntimeError: no chip"),
        ("print('{')", "no reason given"),
        ("", "no reason given"),
    ],
)
def test_jax_that_does_not_start_is_a_problem(monkeypatch, code, text):
    monkeypatch.setattr(checks, "PROBE", code)
    monkeypatch.setattr(checks, "PROBE_S", 0.5 if "pause" in code else 60.0)
    (finding,) = devices()
    assert finding.level == PROBLEM
    assert text in finding.text


@pytest.mark.parametrize(("used", "level"), [(1, OK), (20, WARNING)])
def test_free_memory_of_the_chips_is_that_of_the_fullest(used, level):
    gib = 2**30
    seen = {
        "platform": "tpu",
        "kind": "TPU v6 lite",
        "count": 2,
        "memory": [[32 * gib, 0], [32 * gib, used * gib]],
    }
    first, second = checks._seen(seen, "x")
    assert first.text == "JAX sees 2 x TPU v6 lite: x"
    assert (second.level, second.check) == (level, "hbm")
    assert second.text.startswith(f"{32 - used}.0 of 32.0 GiB free")


def test_chosen_device_that_is_missing_is_a_problem(monkeypatch):
    def refuse(*_):
        raise MachineError("E_LIBRARY", "no libtpu", hint="install it")

    monkeypatch.setattr(checks, "choose", refuse)
    (finding,) = devices()
    assert (finding.level, finding.text, finding.fix) == (PROBLEM, "no libtpu", "install it")


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("max", "1", 4096), (str(3 * 2**20), str(2**20), 2 * 2**20), ("1", "5", 0)],
)
def test_memory_respects_the_limit_of_a_container(machine, limit, used, expected):
    (machine / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   4096 kB\n")
    (machine / "sys/fs/cgroup/memory.max").write_text(limit + "\n")
    (machine / "sys/fs/cgroup/memory.current").write_text(used + "\n")
    assert available_memory(machine) == (expected * 1024 if limit == "max" else expected)
    assert levels(memory(machine)) == [WARNING]


def test_memory_is_not_guessed_where_the_system_says_nothing(machine):
    assert available_memory(machine) is None
    assert memory(machine) == []


def test_requirements_that_are_not_met_are_named(monkeypatch):
    assert misfits("svgen-of-nobody") == []
    lines = ["click>=99", "nothing-like-it>=1", "numpy", 'zzz; extra == "x"']
    monkeypatch.setattr(checks, "requires", lambda name: lines)
    first, second = misfits("svgen-tpu")
    assert first.startswith("click ")
    assert first.endswith("svgen-tpu needs >=99")
    assert second.startswith("nothing-like-it is not installed")
    assert levels(versions()).count(PROBLEM) == 4


def test_folders_are_ready_in_an_empty_home(home):
    found = folders()
    assert [finding.check for finding in found] == ["disk", "models", "cache", "state"]
    assert levels(found[1:]) == [OK, OK, OK]
    assert not (home / "cache").exists()


def test_cache_that_others_can_write_is_a_warning(home):
    folder = home / "cache/svgen/compile"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    finding = folders()[2]
    assert (finding.level, finding.fix) == (WARNING, f"chmod go-w {folder}")


def test_folder_that_cannot_be_written_is_a_problem(home):
    (home / "state").write_text("a file")
    finding = folders()[3]
    assert (finding.level, finding.check) == (PROBLEM, "state")


def test_offline_asks_nothing(monkeypatch):
    monkeypatch.setattr("svgen.hub.cache.is_offline", lambda: True)
    monkeypatch.setattr(checks, "run_briefly", None)
    (finding,) = hub()
    assert finding.level == OK
    assert finding.text.startswith("offline")


@pytest.fixture
def server():
    """A server on loopback that answers HEAD with 404, and counts."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.command)
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_):
            pass

    asked = []
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"127.0.0.1:{found.server_port}", asked
        found.shutdown()
        thread.join()


def test_hub_that_answers_is_fine_and_its_password_is_not_shown(server, monkeypatch):
    address, asked = server
    monkeypatch.setenv("HF_ENDPOINT", f"http://{address}")
    assert hub() == [Finding(level=OK, check="hub", text=f"http://{address} answers")]
    assert asked == ["HEAD"]


def test_hub_that_is_away_is_a_warning(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://user:secret@127.0.0.1:1")
    (finding,) = hub()
    assert finding.level == WARNING
    assert "cannot be reached" in finding.text
    assert "secret" not in finding.text


def test_hub_address_that_is_none_is_a_problem(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc/passwd")
    assert levels(hub()) == [PROBLEM]


def test_ffmpeg_works():
    (finding,) = ffmpeg()
    assert finding.level == OK
    assert finding.text.endswith("with libx264")


@pytest.mark.parametrize("program", ["/nowhere/ffmpeg", "/bin/true", "/bin/false"])
def test_ffmpeg_that_does_not_work_is_a_problem(monkeypatch, program):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", program)
    assert levels(ffmpeg()) == [PROBLEM]


def test_command_that_does_not_end_is_killed():
    code = "import signal; print('x', flush=True); signal.pause()"
    assert run_briefly([sys.executable, "-c", code], 0.2, dict(os.environ)) == (None, "", "")


def test_check_that_fails_is_a_finding(monkeypatch):
    def broken(root):
        raise KeyError("x")

    monkeypatch.setattr("svgen.cli.doctor.CHECKS", (broken,))
    (finding,) = examine(Console("doctor"))
    assert (finding.level, finding.check) == (WARNING, "broken")
    assert "KeyError" in finding.text


def test_finding_fits_eighty_columns():
    finding = Finding(level=PROBLEM, check="versions", text="word " * 40, fix="do " * 60)
    lines = lines_of(finding, Console("doctor", color=False))
    assert len(lines) > 4
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("problem  versions   word")


def test_command_reports_each_check_and_changes_nothing(home):
    environment = {"HF_HUB_OFFLINE": "1"}
    done = run_svgen("doctor", env=environment)
    assert done.returncode == 0, done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    body = json_of(run_svgen("doctor", "--json", env=environment))
    assert (body["schema"], body["ok"]) == ("svgen.doctor/1", True)
    checked = {finding["check"] for finding in body["data"]["findings"]}
    assert {"versions", "tpu", "jax", "disk", "models", "cache", "state", "hub"} <= checked
    assert list(home.iterdir()) == []


def test_command_exits_with_three_for_a_problem():
    environment = {"HF_HUB_OFFLINE": "1", "IMAGEIO_FFMPEG_EXE": "/bin/false"}
    done = run_svgen("doctor", "--json", env=environment)
    body = json_of(done)
    assert done.returncode == 3
    assert (body["ok"], body["error"]["code"]) == (False, "E_DOCTOR")
    assert body["data"]["counts"]["problem"] == 1
