"""A `svgen` with one more command, `probe WHAT`, which does on demand what commands can do."""

import signal
import sys
import types
import warnings
from pathlib import Path

import click

import svgen.cli
from svgen.cli.options import DURATION, RESOLUTION, device_option, with_console
from svgen.cli.output import Console
from svgen.errors import InternalError, MachineError, UsageError, raise_all


@click.command()
@click.argument("what")
@click.option("--res", type=RESOLUTION)
@click.option("--duration", type=DURATION)
@click.option("--steps", type=int)
@device_option
@with_console
def command(console: Console, what: str, **values: object) -> None:
    """Do something."""
    console.note("a note")
    console.detail("a detail")
    console.warn("a warning")
    ACTS[what](console)
    console.result({"values": values, "path": Path("a/b")}, ["first line", *["line"] * 20_000])


def work(console: Console) -> None:
    with console.stage("work"), console.bar(40, "steps") as bar:
        for _ in range(40):
            bar.note("dense")
            bar.update()
            console.note("aside")


def raise_(error: BaseException) -> None:
    raise error


def two_problems(console: Console) -> None:
    first = UsageError("E_SIZE", "first", why="one", hint="a")
    raise_all([first, UsageError("E_FRAMES", "second", why="two", hint="b")])


def result_and_failure(console: Console) -> None:
    error = InternalError("E_PARTIAL", "1 of 2 failed", why="a", hint="b")
    console.result({"done": 1}, ["one.mp4"], error=error)
    raise click.exceptions.Exit(console.exit_code)


def wait(console: Console) -> None:
    console.note("ready")
    signal.pause()


def stubborn(console: Console) -> None:
    try:
        wait(console)
    except KeyboardInterrupt:
        wait(console)


def noise(console: Console) -> None:
    warnings.warn_explicit("noise of a library", UserWarning, "x.py", 1, module="jax._src.x")
    warnings.warn_explicit("a warning of ours", UserWarning, "x.py", 1, module="svgen.x")


ACTS = {
    "nothing": lambda console: None,
    "work": work,
    "crash": lambda console: raise_(ValueError("boom\nand more")),
    "busy": lambda console: raise_(
        MachineError("E_TPU_BUSY", "busy\x1b[2J\nnow", why="w", hint="h")
    ),
    "memory": lambda console: raise_(MemoryError()),
    "accelerator-memory": lambda console: raise_(RuntimeError("RESOURCE_EXHAUSTED: 9 GB")),
    "disk": lambda console: raise_(OSError(28, "No space left on device", "x.mp4")),
    "pipe": lambda console: raise_(BrokenPipeError()),
    "two": two_problems,
    "partial": result_and_failure,
    "wait": wait,
    "stubborn": stubborn,
    "noise": noise,
}

if __name__ == "__main__":
    module = types.ModuleType("svgen.cli.probe")
    module.command = command
    sys.modules["svgen.cli.probe"] = module
    svgen.cli.COMMANDS["probe"] = "Do something."
    svgen.cli.main()
