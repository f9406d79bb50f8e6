"""`svgen models`: list, fetch, verify and remove models; `fetch` gets one for other commands."""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import click

from svgen import hub
from svgen.catalog import CATALOG, CatalogEntry, entry_of
from svgen.cli.options import Group, with_console
from svgen.cli.output import Console
from svgen.cli.progress import Bar
from svgen.errors import UsageError
from svgen.hub.source import DEMO_NAME, is_bundled

ASK_FROM_BYTES = 10**9
REFRESH_S = 0.1
REPOSITORY_WIDTH = 32


class Meter:
    """Shows the progress that `hub` reports as a bar. A context manager."""

    def __init__(self, console: Console, label: str):
        self.console, self.label = console, label
        self.base = 0  # bytes that were there before
        self._bars, self._bar, self._shown_s = ExitStack(), None, 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self._bars.close()

    def restart(self, label: str, base: int) -> None:
        """Begin another bar."""
        self._bars.close()
        self.label, self.base, self._bar = label, base, None

    def __call__(self, done: int, total: int, name: str) -> None:
        """Show this state, unless the last one was shown only just now."""
        if self._bar is None:
            bar = self.console.bar(total - self.base, self.label, "B")
            self._bar = self._bars.enter_context(bar)
        bar: Bar = self._bar
        now = time.monotonic()
        if done < total and now - self._shown_s < REFRESH_S:
            return
        self._shown_s = now
        bar.note(Path(name).name)
        bar.update(max(done - self.base, 0) - bar.done)


def size_text(count: int) -> str:
    """Write a number of bytes for people, in decimal multiples."""
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def fetch(console: Console, model: str, *, offline: bool = False, yes: bool = False) -> Path:
    """The folder of a model, after fetching what is not on disk: sizes, a question, a bar."""
    return _metered(console, yes, hub.locate, model=model, offline=offline)


def _metered(console: Console, yes: bool, action: Callable[..., Path], **options: Any) -> Path:
    with Meter(console, "check") as meter:

        def announce(plan: hub.Plan) -> None:
            _announce(console, plan, yes)
            meter.restart("download", plan.total_bytes - plan.fetch_bytes)

        return action(progress=meter, on_plan=announce, **options)


def _announce(console: Console, plan: hub.Plan, yes: bool) -> None:
    """Say what will be fetched, and ask a person about much of it."""
    if not plan.missing:
        console.note(f"{plan.source.name}: all {len(plan.files)} files are there")
        return
    name, free = plan.source.name, size_text(plan.free_bytes)
    fetch = size_text(plan.fetch_bytes)
    console.note(
        f"{name}: {len(plan.missing)} of {len(plan.files)} files to fetch, {fetch}; "
        f"{free} free in {hub.cache_folder()}"
    )
    plan.check_space()
    ask = plan.fetch_bytes > ASK_FROM_BYTES and not yes
    if ask and sys.stdin is not None and sys.stdin.isatty():
        confirm(f"Fetch {fetch}?", "a download of this size is confirmed first")


def confirm(question: str, why: str) -> None:
    """Ask a person; raise UsageError unless the answer is yes."""
    if not click.confirm(question, err=True):
        raise UsageError("E_USAGE", "stopped: the answer was no", why=why, hint="--yes answers it")


def _row(name: str, entry: CatalogEntry | None, here: hub.Installed | None) -> dict[str, Any]:
    commits = here.commits if here else ()
    complete = entry.revision in commits if entry else bool(commits)
    return {
        "name": name,
        "repository": entry.repository if entry else name,
        "revision": entry.revision if entry else None,
        "parameters": entry.parameters if entry else None,
        "download_bytes": entry.download_bytes if entry else None,
        "licence": entry.licence if entry else None,
        "on_disk": "yes" if complete else "part" if here else "no",
        "disk_bytes": here.disk_bytes if here else 0,
        "commits": list(commits),
    }


def _line(row: dict[str, Any]) -> str:
    repository = row["repository"]
    if len(repository) > REPOSITORY_WIDTH:
        repository = repository[: REPOSITORY_WIDTH - 3] + "..."
    known = row["parameters"] is not None
    return "  ".join(
        (
            f"{row['name'] if known else '-':<11}",
            f"{repository:<{REPOSITORY_WIDTH}}",
            f"{row['parameters'] / 1e9:.1f}B".rjust(5) if known else f"{'-':>5}",
            size_text(row["download_bytes"] if known else row["disk_bytes"]).rjust(8),
            f"{row['licence'] or '-':<10}",
            row["on_disk"],
        )
    ).rstrip()


offline_option = click.option("--offline", is_flag=True, help="Open no connection.")
yes_option = click.option("-y", "--yes", is_flag=True, help="Ask nothing.")
model_argument = click.argument("model", metavar="MODEL")


@click.group(cls=Group)
def command() -> None:
    """List, fetch, verify and remove models.

    MODEL is a name from `svgen models list`, or organisation/repository[@revision] on the Hub.
    Files lie in the Hub's own cache, shared with other programs: HF_HOME moves it.

    \b
    Examples:
      svgen models list
      svgen models pull wan2.1-1.3b
      svgen models verify wan2.1-1.3b
    """


@command.command("list")
@with_console
def list_command(console: Console) -> None:
    """List the known models and those on disk. Opens no connection."""
    here = {one.repository.lower(): one for one in hub.installed()}
    rows = [
        _row(name, entry, here.pop(entry.repository.lower(), None))
        for name, entry in CATALOG.items()
    ]
    rows += [_row(one.repository, None, one) for one in here.values()]
    head = (
        f"{'name':<11}  {'repository':<{REPOSITORY_WIDTH - 1}}  params      size  licence     disk"
    )
    if is_bundled(DEMO_NAME):
        console.note(f"--model {DEMO_NAME}, of moving shapes alone, is in the package")
    console.result({"models": rows, "cache": hub.cache_folder()}, [head, *map(_line, rows)])


@command.command("pull")
@model_argument
@click.option("--repair", is_flag=True, help="Check files that are there; fetch broken ones again.")
@yes_option
@offline_option
@with_console
def pull_command(console: Console, model: str, repair: bool, yes: bool, offline: bool) -> None:
    """Fetch what is missing of a model, and print its folder. An ended download is continued.

    Only the files that svgen reads are fetched, at the revision that svgen knows. Transfers are
    plain HTTPS; HF_HUB_DOWNLOAD_TIMEOUT is the number of seconds without a byte that ends one.
    """
    before = hub.parse_repository(model)
    folder = _metered(console, yes, hub.pull, model=model, offline=offline, repair=repair)
    data = {"model": model, "repository": before.repository, "commit": folder.name}
    console.result(data | {"folder": folder}, [str(folder)])


@command.command("verify")
@model_argument
@offline_option
@with_console
def verify_command(console: Console, model: str, offline: bool) -> None:
    """Check every file of a model: there, of the right size, of the right hash.

    The Hub says what is right; with --offline the cache does, which names each file by its hash.
    """
    with Meter(console, "verify") as meter:
        checks = hub.verify(model, offline=offline, progress=meter)
    lines = [f"{'bad ' if check.problem else 'ok  '}  {check.path}" for check in checks]
    data = {"model": model, "files": [check.as_json() for check in checks]}
    console.result(data, lines, error=hub.bad_files(model, checks))


@command.command("rm")
@model_argument
@yes_option
@with_console
def rm_command(console: Console, model: str, yes: bool) -> None:
    """Delete a model's files, of every revision, from the cache; print the bytes freed."""
    source, sizes = hub.parse_repository(model), {one.repository: one for one in hub.installed()}
    here = sizes.get(source.repository)
    if here and not yes and sys.stdin is not None and sys.stdin.isatty():
        entry = entry_of(source.repository)
        again = f"; it is fetched again with svgen models pull {entry.name}" if entry else ""
        confirm(f"Delete {size_text(here.disk_bytes)} of {source.repository}{again}?", "")
    freed = hub.remove(model)
    data = {"model": model, "repository": source.repository, "freed_bytes": freed}
    console.result(data, [f"{source.repository}: {size_text(freed)} freed"])
