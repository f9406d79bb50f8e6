"""A `svgen` whose disk runs full when it opens, links or renames a certain file.

    python -m tests.faults.filling PATTERN COUNT HOW FOLDER ARGS...

At the COUNT-th of these events with a path that matches PATTERN, FOLDER's disk is filled: HOW is
the number of pages left, or `names`. A state is saved after every step.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

from svgen.cli import main
from tests.full_disk import fill, take_names

EVENTS = ("open", "os.link", "os.rename")


def save_every_step() -> None:
    if find_spec("svgen.cli.saving"):
        from svgen.cli import saving

        saving.GAP = 0
    else:
        from svgen.cli import execution

        execution.SAVE_EVERY_S = 0.0


def watch(pattern: str, count: int, how: str, folder: Path) -> None:
    """Fill the disk when the time has come."""
    left = count

    def hook(event: str, args: tuple) -> None:
        nonlocal left
        if event not in EVENTS or not any(re.search(pattern, str(one)) for one in args[:2]):
            return
        left -= 1
        if left == 0:
            take_names(folder) if how == "names" else fill(folder, pages=int(how))

    sys.addaudithook(hook)


if __name__ == "__main__":
    pattern, count, how, folder = sys.argv[1:5]
    save_every_step()
    watch(pattern, int(count), how, Path(folder))
    sys.argv[1:] = sys.argv[5:]
    main()
