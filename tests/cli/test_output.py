"""Streams, levels, colours, shapes of errors and exit codes, in real processes."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from svgen import __version__
from svgen.cli.output import Console, color_wanted, printable
from svgen.cli.progress import PlainBar
from svgen.errors import CODES, UsageError
from tests.helpers import ROOT, json_of, run_svgen

PROBE = [sys.executable, str(Path(__file__).with_name("probe.py"))]


def probe(*args, env=None, **streams):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.Popen(
        [*PROBE, "probe", *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
        text=True,
        **streams,
    )


def finished(*args, **options):
    process = probe(*args, **options)
    stdout, stderr = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def on_terminal(*args, env=None):
    """Run with a terminal as stderr; return what it shows."""
    master, slave = pty.openpty()
    process = probe(*args, env=env, stderr=slave, stdout=subprocess.DEVNULL)
    os.close(slave)
    shown = b""
    try:
        while chunk := os.read(master, 65536):
            shown += chunk
    except OSError:  # the terminal's other end is closed
        pass
    process.wait(timeout=120)
    os.close(master)
    return shown.decode()


def test_stdout_holds_the_result_and_stderr_the_rest():
    done = finished("nothing")
    assert done.returncode == 0
    assert done.stdout.splitlines()[:2] == ["first line", "line"]
    assert done.stderr == "a note\nwarning: a warning\n"


@pytest.mark.parametrize(
    ("flag", "shown"),
    [
        ("-v", ["a note", "a detail", "warning: a warning"]),
        ("-q", []),
        ("-qq", []),
    ],
)
def test_level_decides_what_stderr_shows(flag, shown):
    done = finished("nothing", flag)
    assert done.stderr.splitlines() == shown
    assert done.stdout.startswith("first line\n")


def test_errors_are_shown_by_quiet_and_not_by_silent():
    assert finished("busy", "-q").stderr.startswith("error[E_TPU_BUSY]")
    silent = finished("busy", "-qq")
    assert (silent.stderr, silent.returncode) == ("", 3)


def test_json_is_one_object_with_warnings():
    body = json_of(finished("nothing", "--json", "--res", "720p"))
    assert list(body) == ["schema", "ok", "command", "version", "data", "warnings", "error"]
    assert (body["schema"], body["ok"], body["command"]) == ("svgen.probe/1", True, "probe")
    assert (body["version"], body["warnings"], body["error"]) == (__version__, ["a warning"], None)
    assert body["data"]["values"]["res"] == [1280, 720]
    assert body["data"]["path"] == "a/b"


def test_error_has_three_lines_and_no_control_characters():
    done = finished("busy", "-q")
    lines = ["error[E_TPU_BUSY]: busy\\x1b[2J now", "  why: w", "  try: h"]
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines() == lines


@pytest.mark.parametrize(
    ("what", "exit_code", "code"),
    [
        ("crash", 1, "E_INTERNAL"),
        ("pipe", 1, "E_INTERNAL"),
        ("busy", 3, "E_TPU_BUSY"),
        ("disk", 6, "E_DISK_FULL"),
        ("memory", 7, "E_MEMORY"),
        ("accelerator-memory", 7, "E_MEMORY"),
        ("two", 2, "E_SIZE"),
    ],
)
def test_failure_has_its_exit_code_and_json(what, exit_code, code):
    done = finished(what, "--json")
    body = json_of(done)
    assert done.returncode == exit_code
    assert (body["ok"], body["data"], body["error"]["code"]) == (False, None, code)
    assert body["warnings"] == ["a warning"]
    assert "Traceback" not in done.stderr
    assert f"error[{code}]: " in done.stderr


def test_every_problem_is_shown():
    done = finished("two", "--json", "-q")
    assert [line for line in done.stderr.splitlines() if line.startswith("error")] == [
        "error[E_SIZE]: first",
        "error[E_FRAMES]: second",
    ]
    problems = json_of(done)["error"]["details"]["problems"]
    assert [problem["code"] for problem in problems] == ["E_SIZE", "E_FRAMES"]


def test_result_stands_beside_a_failure():
    done = finished("partial", "-q")
    assert (done.returncode, done.stdout) == (1, "one.mp4\n")
    assert done.stderr.startswith("error[E_PARTIAL]")


def test_unexpected_error_leaves_its_traceback_in_a_log(home):
    done = finished("crash", "-q")
    (log,) = (home / "state/svgen").glob("error-*.log")
    assert done.stderr.splitlines()[0] == "error[E_INTERNAL]: ValueError: boom"
    assert str(log) in done.stderr.splitlines()[1]
    assert "Traceback" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("flags", "env"), [(["-vv"], {}), ([], {"SVGEN_DEBUG": "1"})])
def test_unexpected_error_shows_its_traceback_when_asked(flags, env):
    assert "Traceback" in finished("crash", *flags, env=env).stderr
    assert "Traceback" not in finished("busy", *flags, env=env).stderr


def test_unwritable_log_is_not_named(home):
    (home / "state").write_text("a file")
    done = finished("crash", "-q")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 3)
    assert "-vv" in done.stderr


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_reader_that_leaves_ends_the_run_quietly(flags):
    reader, writer = os.pipe()
    os.close(reader)
    done = finished("nothing", "-q", *flags, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_for_a_reader_that_leaves_ends_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    done = finished("--help", stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_full_disk_under_stdout_is_an_error(flags):
    with open("/dev/full", "w") as full:
        done = finished("nothing", "-q", *flags, stdout=full)
    assert done.returncode == 6
    assert done.stderr.startswith("error[E_WRITE]")
    assert len(done.stderr.splitlines()) == 3


@pytest.mark.parametrize(
    ("number", "exit_code", "word"),
    [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")],
)
def test_signal_ends_the_run_with_its_code(number, exit_code, word):
    process = probe("wait", "--json")
    assert "ready\n" in iter(process.stderr.readline, "")
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == exit_code
    assert stderr == f"error[E_INTERRUPTED]: stopped by {word}\n"
    assert json.loads(stdout)["error"]["code"] == "E_INTERRUPTED"


def test_progress_is_a_line_per_tenth_off_a_terminal():
    done = finished("work")
    lines = [line for line in done.stderr.splitlines() if line.startswith("steps: ")]
    assert len(lines) == 10
    assert lines[4].startswith("steps:  50%  20/40  ")
    assert lines[4].endswith("  dense")
    assert "\r" not in done.stderr
    assert "\x1b" not in done.stderr


def test_progress_is_silent_when_quiet():
    assert finished("work", "-q").stderr == ""


def test_time_left_is_that_of_the_present_pace(monkeypatch):
    """Two dense steps of 10 s, then sparse ones of 4 s."""
    now, said = [100.0], []
    monkeypatch.setattr("svgen.cli.progress.time.monotonic", lambda: now[0])
    bar = PlainBar(10, "denoise", "step", say=said.append)
    for seconds in (10, 10, 4, 4):
        now[0] += seconds
        bar.update()
        if bar.done == 2:
            bar.restart()
    assert said[1].endswith("2/10  0:20 spent, 1:20 left")
    assert said[2].endswith("3/10  0:24 spent, 0:28 left")
    assert said[3].endswith("4/10  0:28 spent, 0:24 left")


def test_progress_is_a_bar_with_time_left_on_a_terminal():
    shown = on_terminal("work")
    assert "40/40" in shown
    assert "step/s" in shown
    assert "<" in shown
    assert shown.count("aside\r\n") == 40
    assert "\x1b[33mwarning:\x1b[0m" in shown


def test_stage_is_timed_when_verbose():
    lines = finished("work", "-v").stderr.splitlines()
    assert "work ..." in lines
    assert any(line.startswith("work: ") and line.endswith(" s") for line in lines)


@pytest.mark.parametrize(
    ("flags", "env", "colored"),
    [
        ([], {}, True),
        (["--no-color"], {}, False),
        (["--no-color"], {"FORCE_COLOR": "1"}, False),
        ([], {"NO_COLOR": "1"}, False),
        ([], {"NO_COLOR": ""}, True),
        ([], {"TERM": "dumb"}, False),
    ],
)
def test_color_on_a_terminal(flags, env, colored):
    assert ("\x1b[31;1merror" in on_terminal("busy", *flags, env=env)) is colored


def test_color_off_a_terminal_only_by_force():
    assert "\x1b" not in finished("busy").stderr
    assert "\x1b" in finished("busy", env={"FORCE_COLOR": "1"}).stderr


def test_flag_wins_over_every_color_variable(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert color_wanted(None, True)
    assert not color_wanted(None)


def test_library_warnings_are_hidden_and_ours_are_not():
    shown = finished("noise").stderr
    assert "noise of a library" not in shown
    assert "a warning of ours" in shown
    assert "noise of a library" in finished("noise", "-vv").stderr


def test_printable_keeps_text_and_escapes_controls():
    assert printable("猫 é\n\tx\x1b[0m\x9b") == "猫 é\n\tx\\x1b[0m\\x9b"
    assert printable("مرحبا \u202egnp.exe\u2066 \r") == "مرحبا \\u202egnp.exe\\u2066 \\r"


def test_text_that_the_terminal_cannot_show_is_escaped():
    done = run_svgen("presets", "show", "猫", env={"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 2
    assert "\\u732b" in done.stderr


def test_json_refuses_what_is_no_json(capsys):
    console = Console("probe", json=True)
    console.result({"loss": float("nan")})
    with pytest.raises(ValueError, match="JSON compliant"):
        console.finish()
    assert capsys.readouterr().out == ""


def test_fail_replaces_success_in_the_one_object(capsys):
    console = Console("models pull", json=True, verbosity=-2)
    console.result({"a": 1})
    console.fail(UsageError("E_VALUE", "late"))
    console.finish()
    body = json.loads(capsys.readouterr().out)
    assert (body["schema"], body["ok"], body["data"]) == ("svgen.models.pull/1", False, {"a": 1})
    assert console.exit_code == 2


def test_every_code_has_a_kind_with_a_documented_exit_code():
    assert {kind.exit_code for kind, _ in CODES.values()} <= {1, 2, 3, 4, 5, 6, 7, 8, 130}
    for code, (kind, meaning) in CODES.items():
        assert kind(code, "text").as_json()["code"] == code
        assert meaning


def test_second_ctrl_c_ends_the_process_at_once():
    process = probe("stubborn")
    for _ in range(2):
        assert "ready\n" in iter(process.stderr.readline, "")
        process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == -signal.SIGINT
    process.communicate()


def test_json_of_the_environment_may_be_events():
    lines = finished("nothing", env={"SVGEN_JSON": "events"}).stdout.splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["start", "result"]
    assert finished("nothing", env={"SVGEN_JSON": "no"}).stdout.startswith("first line\n")
