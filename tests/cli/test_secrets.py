"""Tokens are taken out of what is printed, whoever wrote it."""

import logging

import pytest

from svgen.cli import run
from svgen.cli.secrets import hide, hide_in_log

TOKEN = "hf_" + "aB3" * 12


def test_what_looks_like_a_token_is_hidden():
    assert hide(f"https://user:{TOKEN}@host and {TOKEN}") == "https://user:hf_***@host and hf_***"
    assert hide("hf_hub and hf_short") == "hf_hub and hf_short"


def test_token_of_the_environment_is_hidden_whatever_it_looks_like(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "my own secret")
    assert hide("says my own secret aloud") == "says hf_*** aloud"
    monkeypatch.setenv("HF_TOKEN", "a")
    assert hide("a cat") == "a cat"


def test_log_of_a_library_is_rewritten():
    record = logging.LogRecord("httpx", 20, "", 0, "GET %s", (TOKEN,), None)
    assert hide_in_log(record)
    assert record.getMessage() == "GET hf_***"


@pytest.mark.parametrize("form", [(), ("--json",), ("-vv",)])
def test_token_given_as_a_name_is_not_repeated(capsys, form):
    assert run(["models", "pull", TOKEN, *form]) == 2
    shown = capsys.readouterr()
    assert TOKEN not in shown.out + shown.err
    assert "unknown model 'hf_***'" in shown.out + shown.err
