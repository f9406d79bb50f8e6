"""`svgen doctor`: check this machine, and say how to mend what is wrong. It changes nothing."""

import textwrap

import click

from svgen.cli.checks import CHECKS, OK, PROBLEM, WARNING, Finding
from svgen.cli.device import ROOT
from svgen.cli.options import with_console
from svgen.cli.output import Console
from svgen.errors import MachineError

COLUMNS = 80
INDENT = 20
COLORS = {OK: "green", WARNING: "yellow", PROBLEM: "red"}


def examine(console: Console) -> list[Finding]:
    """Run every check; one that fails by itself is a finding too."""
    found: list[Finding] = []
    for check in CHECKS:
        name = check.__name__
        try:
            with console.stage(f"check {name}"):
                found += check(ROOT)
        except Exception as error:
            text = f"this check failed: {type(error).__name__}: {error}"
            found.append(Finding(level=WARNING, check=name, text=text, fix="please report it"))
    return found


def lines_of(finding: Finding, console: Console) -> list[str]:
    """Lay a finding out in 80 columns: level, what was looked at, and what to do."""
    texts = textwrap.wrap(finding.text, COLUMNS - INDENT) or [""]
    if finding.fix:
        texts += textwrap.wrap(f"fix: {finding.fix}", COLUMNS - INDENT, subsequent_indent="     ")
    level = console.paint(f"{finding.level:<9}", COLORS[finding.level])
    first = f"{level}{finding.check:<{INDENT - 9}}{texts[0]}"
    return [first, *(" " * INDENT + text for text in texts[1:])]


@click.command()
@with_console
def command(console: Console) -> None:
    """Check this machine: versions, TPU, memory, disk, network, ffmpeg.

    Changes nothing. Exit code 3 if there is a problem; a warning is none.
    """
    found = examine(console)
    counts = {level: sum(one.level == level for one in found) for level in COLORS}
    data = {"findings": [one.as_json() for one in found], "counts": counts}
    lines = [line for one in found for line in lines_of(one, console)]
    error = None
    if counts[PROBLEM]:
        names = ", ".join(dict.fromkeys(one.check for one in found if one.level == PROBLEM))
        message = f"{counts[PROBLEM]} problem(s) found"
        error = MachineError("E_DOCTOR", message, why=names, hint="follow the fixes in the report")
    console.result(data, lines, error=error)
