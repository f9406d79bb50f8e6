"""`svgen cache`: what svgen keeps on disk for later runs, how large it is, and how it goes away."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from svgen import hub
from svgen.cli.device import cache_folder
from svgen.cli.endings import state_folder
from svgen.cli.models import confirm, size_text, yes_option
from svgen.cli.options import Group, with_console
from svgen.cli.output import Console
from svgen.errors import FileError

JAX_FOLDER = "JAX_COMPILATION_CACHE_DIR"


def folders() -> dict[str, Path]:
    """What can be made again, or is not needed: name -> folder."""
    return {"compiled programs": cache_folder() / "compile", "logs": state_folder()}


def files_of(name: str, folder: Path) -> list[Path]:
    """The files of one kind. Links are files here, and are not followed."""
    if name == "logs":
        return sorted(path for path in folder.glob("error-*.log") if path.is_file())
    return [
        Path(base, file)
        for base, inner, names in os.walk(folder)
        for file in sorted(names + [one for one in inner if os.path.islink(Path(base, one))])
    ]


def bytes_of(paths: list[Path]) -> int:
    """What files take on the disk; one that is gone meanwhile takes nothing."""
    return sum(_size(path) for path in paths)


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.lstat().st_size
    return 0


def _rows() -> list[dict[str, Any]]:
    rows = []
    for name, folder in folders().items():
        paths = files_of(name, folder)
        row = {"name": name, "files": len(paths), "bytes": bytes_of(paths), "folder": str(folder)}
        rows.append({**row, "cleared": True})
    return rows


def _model_rows() -> Iterator[dict[str, Any]]:
    for one in hub.installed():
        folder = hub.cache_folder()
        row = {"name": one.repository, "bytes": one.disk_bytes, "folder": str(folder)}
        yield {**row, "cleared": False}


def _line(row: dict[str, Any]) -> str:
    return f"{size_text(row['bytes']):>9}  {row['name']:<34}  {row['folder']}"


def _say_foreign(console: Console) -> None:
    """Name a folder that the user has set for JAX: it is the user's own."""
    if os.environ.get(JAX_FOLDER):
        console.note(f"{JAX_FOLDER} is set: what lies there is not counted and not cleared")


@click.group(cls=Group)
def command() -> None:
    """Show and clear what svgen keeps on disk for later runs.

    Compiled programs are made again when a run needs them, logs of defects are for reports. Models
    are shown, but only `svgen models rm` deletes them. States and latents lie beside their videos.

    \b
    Examples:
      svgen cache size
      svgen cache clear --yes
    """


@command.command("size")
@with_console
def size_command(console: Console) -> None:
    """Say what compiled programs, logs and models take on the disk."""
    rows = [*_rows(), *_model_rows()]
    _say_foreign(console)
    total = sum(row["bytes"] for row in rows)
    lines = [*map(_line, rows), f"{size_text(total):>9}  in all"]
    console.result({"items": rows, "bytes": total}, lines)


@command.command("clear")
@yes_option
@with_console
def clear_command(console: Console, yes: bool) -> None:
    """Delete compiled programs and logs; print the bytes freed. Models and latents stay."""
    rows = _rows()
    _say_foreign(console)
    found = sum(row["bytes"] for row in rows)
    if found and not yes and sys.stdin is not None and sys.stdin.isatty():
        confirm(f"Delete {size_text(found)} of compiled programs and logs?", "")
    freed = {row["name"]: _clear(row["name"], Path(row["folder"])) for row in rows}
    total = sum(freed.values())
    items = [{"name": name, "freed_bytes": count} for name, count in freed.items()]
    console.result({"items": items, "freed_bytes": total}, [f"{size_text(total)} freed"])


def _clear(name: str, folder: Path) -> int:
    """Delete the files of one kind; returns their bytes. Raises FileError for one that stays."""
    paths = files_of(name, folder)
    count = bytes_of(paths)
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            hint = f"see who owns {path.parent}"
            raise FileError(
                "E_WRITE", f"{path} cannot be deleted: {error.strerror}", hint=hint
            ) from error
    if name != "logs":
        for inner in [one for one in folder.glob("*") if one.is_dir() and not one.is_symlink()]:
            shutil.rmtree(inner, ignore_errors=True)  # folders without files
    return count
