"""Prompts and file names that nobody expects: each works, or is refused in three parts before
anything is loaded.
"""

import io
import json
import os
import re
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from svgen.cli import run
from svgen.cli.lines import read_line
from svgen.cli.planning import open_pipeline
from svgen.errors import FileError, UsageError
from svgen.partial import check_output
from tests.helpers import ROOT

TINY = str(ROOT / "tests/golden/tiny")
SMALL = ("--model", TINY, "--res", "48x32", "--frames", "5", "--steps", "1", "--seed", "1")
STEERING = re.compile(r"[^\n\t -~\xa0-\U0010ffff]|[\u202a-\u202e\u2066-\u2069]")
KINDS = {"E_READ": 6, "E_WRITE": 6}  # exit codes; all others: 2


@cache
def _opened(model, dtype, mesh):
    return open_pipeline(model, dtype, mesh=mesh)


def opened(model, dtype, stage=None, *, mesh="auto"):
    """What `open_pipeline` returns, made once for all tests."""
    return _opened(model, dtype, mesh)


@pytest.fixture
def planned(tmp_path, monkeypatch, capsys):
    """Plan a run of words in a folder of its own; returns (exit code, JSON object, what people are
    shown).
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("svgen.cli.planning.open_pipeline", opened)
    monkeypatch.setattr("svgen.cli.batch.open_pipeline", opened)

    def call(*args, stdin=b""):
        found = []
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(errors="backslashreplace")  # as the program does
        for form in (("--json",), ()):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            found.append(run(["generate", *SMALL, "--dry-run", *form, *args]))
            found.append(capsys.readouterr())
        assert found[0] == found[2], found[3]
        shown = found[3].out + found[3].err
        assert "Traceback" not in shown
        assert not STEERING.search(shown)
        return found[0], json.loads(found[1].out), shown

    return call


def as_from_a_shell(data):
    """An argument as Python gets it: bytes that are no UTF-8 become lone surrogates."""
    return os.fsdecode(data)


def refused(answer, code):
    """Whether an answer is this error, said in three parts."""
    status, body, shown = answer
    error = body["error"]
    assert error and error["code"] == code
    assert status == KINDS.get(code, 2)
    assert error["message"] and error["why"] and error["hint"]
    assert [line.split(":")[0].strip() for line in shown.splitlines()[:3]] == [
        f"error[{code}]",
        "why",
        "try",
    ]
    return True


# Prompts.


WORDS = {
    "control characters": "a \x1b[31mred\x07 ball\x9b\r\n",
    "right to left": "كرة حمراء \u202eabc\u202c",
    "emoji": "🐉🏳️‍🌈 👨‍👩‍👧",
    "combining": "e\u0301" * 50 + "\u200d\ufeff",
    "not UTF-8": as_from_a_shell(b"caf\xe9 \xff ball"),
    "half of a pair": "a \ud83d ball",
    "quotes": "\"';`$(rm -rf x) {seed} %s \\",
    "flag after --": "--overwrite",
    "spaces": "  a\u3000 \xa0cat  ",
}


@pytest.mark.parametrize("name", WORDS)
@pytest.mark.parametrize("output", ["x.mp4", "{slug}.mp4"])
def test_prompt_of_any_characters_works(planned, name, output):
    status, body, _ = planned("-o", output, "--", WORDS[name])
    assert status == 0, body
    assert body["data"]["request"]["prompt"] == WORDS[name]
    path = body["data"]["output"]
    assert path.endswith(".mp4") and "/" not in path and path.isprintable()


@pytest.mark.parametrize(
    ("prompt", "stdin", "code"),
    [
        ("", b"", "E_PROMPT_EMPTY"),
        (" \t\r\n\u3000", b"", "E_PROMPT_EMPTY"),
        ("\x00", b"", "E_PROMPT_EMPTY"),
        ("\x1b\x07", b"", "E_PROMPT_EMPTY"),
        ("word " * 20_000, b"", "E_PROMPT_LONG"),
        ("x" * 100_000, b"", "E_PROMPT_LONG"),
        ("-", b"", "E_PROMPT_EMPTY"),
        ("-", b"\x00\x00", "E_PROMPT_EMPTY"),
        ("-", b"caf\xe9", "E_USAGE"),
        ("-", b"x" * (2 << 20), "E_PROMPT_LONG"),
        ("@", b"", "E_READ"),
        ("@nowhere.txt", b"", "E_READ"),
        ("@a\x00b", b"", "E_READ"),
        ("@/dev/zero", b"", "E_READ"),
        ("@/", b"", "E_READ"),
        ("@" + "x" * 300, b"", "E_READ"),
    ],
)
def test_prompt_that_says_nothing_or_too_much_is_refused(planned, prompt, stdin, code):
    assert refused(planned("-o", "x.mp4", prompt, stdin=stdin), code)


def test_zero_bytes_in_files_and_standard_input_are_cleaned_away(planned, tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"a red\x00 ball")
    for args, stdin in ((("@prompt.txt",), b""), (("-",), b"a red\x00 ball")):
        status, body, _ = planned(*args, "-o", "x.mp4", stdin=stdin)
        assert (status, body["data"]["request"]["prompt"]) == (0, "a red\x00 ball")
    (tmp_path / "all.jsonl").write_text('{"prompt": "a red\\u0000 ball"}\n')
    assert planned("--prompts", "all.jsonl")[0] == 0
    (tmp_path / "all.jsonl").write_bytes(b'{"prompt": "a red\x00 ball"}\n')
    assert refused(planned("--prompts", "all.jsonl"), "E_PROMPTS")


# Names.


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("a*b?.mp4", "a*b?.mp4"),
        ("a:b.mp4", "a:b.mp4"),
        ('"it\'s".mp4', '"it\'s".mp4'),
        ("dots...", "dots....mp4"),
        ("-x.mp4", "-x.mp4"),
        ("猫🐉.mp4", "猫🐉.mp4"),
        ("x" * 236 + ".mp4", "x" * 236 + ".mp4"),
        (as_from_a_shell(b"caf\xe9.mp4"), "caf\udce9.mp4"),
        ("{{seed}}.mp4", "{seed}.mp4"),
    ],
)
def test_name_that_the_disk_takes_is_kept_as_it_was_typed(planned, spec, name):
    status, body, _ = planned("a", f"--output={spec}")
    assert (status, body["data"]["output"]) == (0, name)


@pytest.mark.parametrize(
    ("spec", "code"),
    [
        ("x" * 300, "E_OUTPUT_NAME"),
        ("猫" * 100 + ".mp4", "E_OUTPUT_NAME"),
        ("new\nline.mp4", "E_OUTPUT_NAME"),
        ("bell\x07.mp4", "E_OUTPUT_NAME"),
        ("a\x00b.mp4", "E_OUTPUT_NAME"),
        ("", "E_OUTPUT_NAME"),
        (" ", "E_OUTPUT_NAME"),
        ("x.avi", "E_OUTPUT_NAME"),
        ("{seed", "E_OUTPUT_NAME"),
        ("{prompt}.mp4", "E_OUTPUT_NAME"),
        ("{seed.__class__}.mp4", "E_OUTPUT_NAME"),
        ("missing/x.mp4", "E_WRITE"),
        ("file/x.mp4", "E_WRITE"),
        ("/proc/x.mp4", "E_WRITE"),
        ("{slug}/../x.mp4", "E_WRITE"),
        ("loop/x.mp4", "E_WRITE"),
    ],
)
def test_name_that_cannot_be_is_refused(planned, tmp_path, spec, code):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    assert refused(planned("a", f"--output={spec}"), code)


def test_folder_that_may_not_be_written_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        own = os.geteuid()
        os.seteuid(own or 65534)  # root may write anywhere
        try:
            with pytest.raises(FileError, match="Permission denied") as caught:
                check_output(Path(folder, "x.mp4"), overwrite=False)
        finally:
            os.seteuid(own)
    assert (caught.value.code, caught.value.exit_code) == ("E_WRITE", 6)
    assert caught.value.why and caught.value.hint


def test_fields_of_a_template_lead_nowhere_else(planned):
    prompt = "../../etc/passwd /x \\..\\y ~root C:z"
    status, body, _ = planned(prompt, "-o", "{slug}-{model}-{preset}.mp4")
    assert (status, body["data"]["output"]) == (0, "etc-passwd-x-y-root-c-z-tiny-none.mp4")


# Files of prompts: anybody's.


@pytest.mark.parametrize(
    "values",
    [
        *({"output": one} for one in ("../x.mp4", "/tmp/x.mp4", "a/../../x.mp4", "~/x.mp4", "-")),
        *({"output": one} for one in ("..\\x.mp4", "C:\\x.mp4", "\\\\host\\x.mp4", "{slug}/../x")),
        *({"model": one} for one in ("/models/x", "../x", "~/x")),
        *({"preset": one} for one in ("/etc/passwd", "../x.toml", "/dev/zero")),
        *({"prompt": one} for one in ("@/etc/passwd", "@x", "-", "x" * (2 << 20))),
    ],
    ids=lambda values: str(values)[:40],
)
def test_line_that_leads_elsewhere_is_refused(values):
    with pytest.raises(UsageError) as caught:
        read_line(json.dumps({"prompt": "a", **values}))
    assert caught.value.code == "E_PROMPTS"
    assert caught.value.why and caught.value.hint


@pytest.mark.parametrize(
    "values",
    [
        *({"output": one} for one in ("videos/{seed:03d}.mp4", "a..b.mp4")),
        *({"model": one} for one in ("./mine", "organisation/name@1")),
        *({"preset": "sets/mine.toml"}, {"prompt": " @home"}),
    ],
)
def test_line_that_stays_inside_is_read(values):
    assert values.items() <= read_line(json.dumps({"prompt": "a", **values})).items()
