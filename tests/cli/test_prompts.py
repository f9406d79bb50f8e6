"""Files of prompts."""

import pytest

from svgen.cli.prompts import read_prompts
from svgen.errors import FileError, UsageError


def test_lines_are_prompts_without_blank_ones(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes('\ufeffa red ball \r\n\n  {"prompt": 1}\n'.encode())
    assert read_prompts(path) == ["a red ball", '{"prompt": 1}']


def test_objects_are_read_by_their_prompt(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a cat", "kind": 3}\n\n{"prompt": "two\u2028lines"}\n', "utf-8")
    assert read_prompts(path) == ["a cat", "two\u2028lines"]


def test_every_bad_line_is_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": }\n[1]\n{"prompt": " "}\n{"text": "a"}\n')
    with pytest.raises(UsageError) as caught:
        read_prompts(path)
    problems = caught.value.problems
    assert {one.code for one in problems} == {"E_PROMPTS"}
    assert [one.message.split(":")[0].split()[-4:] for one in problems] == [
        ["2", "is", "not", "JSON"],
        ["3", "has", "no", "prompt"],
        ["4", "has", "no", "prompt"],
        ["5", "has", "no", "prompt"],
    ]


@pytest.mark.parametrize(
    ("data", "says"), [(b"\n \n", "holds no prompt"), (b"\xff\xfe", "is not UTF-8")]
)
def test_file_without_text_is_an_error(tmp_path, data, says):
    path = tmp_path / "prompts.txt"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=says) as caught:
        read_prompts(path)
    assert caught.value.code == "E_PROMPTS"


def test_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileError) as caught:
        read_prompts(tmp_path / "no.txt")
    assert caught.value.code == "E_READ"
