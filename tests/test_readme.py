"""README says only what is there: commands, flags, files, exit codes."""

import re

import click
import pytest
from click.testing import CliRunner

from svgen.cli import COMMANDS, cli
from svgen.errors import CODES
from tests.helpers import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.M | re.S)


def flags_of(name: str) -> set[str]:
    command = cli.get_command(click.Context(cli), name)
    commands = command.commands.values() if isinstance(command, click.Group) else [command]
    return {flag for one in commands for option in one.params for flag in option.opts}


def test_first_two_blocks_are_the_commands_that_ci_runs():
    assert [kind for kind, _ in BLOCKS[:2]] == ["sh", "sh"]
    assert "svgen generate" in BLOCKS[0][1]
    assert "-m pytest" in BLOCKS[1][1]
    assert all(block.count("\n") == 1 for _, block in BLOCKS[:2]), "one line each"


def test_every_command_shown_exists_with_its_flags():
    shown = re.findall(r"svgen ([a-z-]+)((?: [^`\n|]*)?)", README)
    assert len(shown) > 10
    for name, rest in shown:
        if name in COMMANDS:
            flags = set(re.findall(r"(?<!\S)(--[a-z-]+)", rest))
            assert flags <= flags_of(name) | {"--help-all", "--help"}, (name, rest)


def test_every_command_is_in_readme():
    assert all(f"`svgen {name}" in README for name in COMMANDS)


def test_flags_in_the_table_exist():
    flags = set(re.findall(r"`(--[a-z-]+)", README))
    known = set().union(*map(flags_of, COMMANDS)) | {"--help-all"}
    assert flags <= known


def test_files_in_the_tree_exist():
    tree = next(block for _, block in BLOCKS if block.startswith("svgen/\n"))
    names = re.findall(r"^(?:  )?(\S+)  ", tree, flags=re.M)
    assert len(names) > 15
    for name in names:
        assert (ROOT / "svgen" / name).exists() or (ROOT / name).exists(), name


@pytest.mark.parametrize("code", sorted({kind.exit_code for kind, _ in CODES.values()}))
def test_exit_codes_are_in_readme(code):
    assert re.search(rf"^\| (\d+, )*{code}(, \d+)* \|", README, flags=re.M)


def test_error_transcript_is_what_the_command_prints():
    block = next(block for _, block in BLOCKS if "error[E_SIZE]" in block)
    command, _, expected = block.partition("\n")
    arguments = re.findall(r'"[^"]*"|\S+', command.removeprefix("$ svgen "))
    from svgen.cli import run

    with CliRunner().isolation() as streams:
        code = run([argument.strip('"') for argument in arguments])
        said = streams[1].getvalue().decode()
    assert code == 2
    assert said == expected
