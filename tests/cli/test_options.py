"""Shared flags, value types, environment variables, and complaints about the command line."""

import click
import pytest

from svgen.cli import COMMANDS, run, version_line
from svgen.cli.options import DURATION, RESOLUTION, spell_bare
from svgen.errors import UsageError
from tests.cli.test_output import finished
from tests.helpers import json_of, run_svgen


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("480p", (832, 480)),
        ("720P", (1280, 720)),
        ("1080p", (1920, 1080)),
        ("1440p", (2560, 1440)),
        ("640x384", (640, 384)),
        ("640X384", (640, 384)),
        ("7x9", (7, 9)),
    ],
)
def test_resolution_reads_names_and_sizes(text, size):
    assert RESOLUTION.convert(text, None, None) == size


@pytest.mark.parametrize(
    "text", ["", "720", "4k", "x", "0x16", "16x", "1280x720x3", "-16x16", "1e3x5"]
)
def test_resolution_refuses_the_rest_with_one_that_works(text):
    with pytest.raises(UsageError) as caught:
        RESOLUTION.convert(text, None, None)
    assert caught.value.code == "E_SIZE"
    for hint in caught.value.hint.split(" or "):
        assert RESOLUTION.convert(hint.removeprefix("--res "), None, None)


@pytest.mark.parametrize(
    ("text", "seconds"), [("5s", 5.0), ("5", 5.0), ("2.5s", 2.5), (".5", 0.5), ("5 S", 5.0)]
)
def test_duration_reads_seconds(text, seconds):
    assert DURATION.convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "s", "0", "-1", "nan", "inf", "1e3", "5m", "5ss", "1.2.3"])
def test_duration_refuses_the_rest(text):
    with pytest.raises(UsageError) as caught:
        DURATION.convert(text, None, None)
    assert caught.value.code == "E_VALUE"


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        (["--json", "a cat"], ["--json=object", "a cat"]),
        (["--sweep"], ["--sweep=auto"]),
        (["--sweep", "a cat"], ["--sweep=auto", "a cat"]),
        (["--sweep", "-o", "x"], ["--sweep=auto", "-o", "x"]),
        (["--sweep", "0.1,0.2", "a"], ["--sweep", "0.1,0.2", "a"]),
        (["--sweep", ""], ["--sweep", ""]),
        (["--", "--sweep", "--json"], ["--", "--sweep", "--json"]),
        ([], []),
    ],
)
def test_flag_without_its_value_takes_no_prompt_for_it(typed, read):
    assert spell_bare(typed) == read


def test_flag_wins_over_environment_over_default():
    def device(*flags, env=None):
        return json_of(finished("nothing", "--json", *flags, env=env))["data"]["values"]["device"]

    assert device() == "auto"
    assert device(env={"SVGEN_DEVICE": "cpu"}) == "cpu"
    assert device("--device", "gpu", env={"SVGEN_DEVICE": "cpu"}) == "gpu"


def test_environment_sets_output_flags():
    done = finished("nothing", env={"SVGEN_JSON": "1", "SVGEN_QUIET": "1"})
    assert json_of(done)["ok"]
    assert done.stderr == ""


def test_bad_environment_value_names_the_flag():
    done = finished("nothing", env={"SVGEN_STEPS": "many"})
    assert done.returncode == 2
    assert "--steps" in done.stderr


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["genrate"], "svgen has no command 'genrate'", "svgen generate"),
        (["gen"], "svgen has no command 'gen'", "svgen generate"),
        (["presets", "shw"], "svgen presets has no command 'shw'", "svgen presets show"),
        (["zzz"], "svgen has no command 'zzz'", "svgen --help"),
        (["presets", "list", "--jsn"], "No such option '--jsn'", "--json"),
        (["presets", "show"], "Missing argument 'NAME|FILE'", "svgen presets show --help"),
        (["presets", "list", "x"], "Got unexpected extra argument", "svgen presets list --help"),
    ],
)
def test_usage_error_has_three_lines_and_a_way_out(args, message, hint, capsys):
    assert run(args) == 2
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert shown.out == ""
    assert lines[0].startswith(f"error[E_USAGE]: {message}")
    assert [line[:7] for line in lines[1:]] == ["  why: ", "  try: "]
    assert hint in lines[2]


@pytest.mark.parametrize(
    ("args", "command"),
    [
        (["presets", "list", "x", "--json"], "presets list"),
        (["presets", "shw", "--json"], "presets"),
        (["genrate", "--json"], ""),
        (["--json"], ""),
    ],
)
def test_usage_error_is_json_where_json_is_asked_for(args, command):
    done = run_svgen(*args)
    body = json_of(done)
    assert done.returncode == 2
    assert (body["ok"], body["command"], body["error"]["code"]) == (False, command, "E_USAGE")


def test_json_after_two_dashes_is_no_flag(capsys):
    assert run(["presets", "show", "--", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_group_without_a_command_shows_its_help(capsys):
    for args in ([], ["presets"]):
        assert run(args) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("Usage: svgen")


def test_help_lists_every_command_and_fits_a_screen(capsys):
    assert run(["-h"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, text in COMMANDS.items():
        assert any(line.split() == [name, *text.split()] for line in lines)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80


def test_help_of_a_group_cuts_no_sentence(capsys):
    assert run(["models", "-h"]) == 0
    shown = capsys.readouterr().out
    assert "..." not in shown.partition("Commands:")[2]


def test_version_names_svgen_first(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == version_line() + "\n"
    assert version_line().startswith("svgen 0.")
    assert "(jax " in version_line()


def test_version_variable_of_the_environment_is_not_the_flag(monkeypatch, capsys):
    monkeypatch.setenv("SVGEN_VERSION", "0.1.0")
    monkeypatch.setenv("SVGEN_HELP", "x")
    assert run(["presets", "list"]) == 0
    assert capsys.readouterr().out.startswith("name ")


def test_each_command_file_holds_a_click_command():
    from svgen.cli import cli

    for name in ("presets", "doctor"):
        assert isinstance(cli.get_command(click.Context(cli), name), click.Command)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), -1.0, 0.0, 1e300])
def test_duration_of_a_file_is_held_to_what_a_flag_may_say(value):
    with pytest.raises(UsageError) as caught:
        DURATION.convert(value, None, None)
    assert caught.value.code == "E_VALUE"
