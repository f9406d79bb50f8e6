"""Feeds broken files to what svgen's commands call, in one process; `test_fuzz` runs it as a child.

    python -m tests.faults.fuzz_worker ARENA SEED FIRST LAST

Input number i of a seed is always the same. Before each one its number goes to ARENA/current, so
that the parent knows which one a process died of; counts and defects go to ARENA/found.jsonl.
"""

import faulthandler
import json
import os
import random
import resource
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.faults.fuzz_targets import Target, check_problem, targets

# Times as many inputs for what takes a hundredth of the time.
CHEAP = int(os.environ.get("SVGEN_FUZZ_CHEAP", "4"))
HANG_S = 60  # of the clock, on a machine that may be busy; then the process ends
MOST_CPU_S = 5
MOST_BYTES = 1 << 30
INSIDE, CANARY = "inside", "canary.safetensors"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink", "os.truncate")


class Leaks:
    """Notes what Python opens or changes outside of the folder, while it is watched."""

    def __init__(self, allowed: tuple[Path, ...], forbidden: tuple[str, ...]):
        self.allowed = tuple(map(str, allowed))
        self.forbidden = forbidden
        self.found: list[str] = []
        self.watched = False
        sys.addaudithook(self.hear)

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        """Take one event of the interpreter."""
        if not self.watched or (event != "open" and event not in CHANGES):
            return
        path = args[0]
        if isinstance(path, int) or path is None:
            return
        path = os.path.realpath(os.fsdecode(path)) if b"\0" not in os.fsencode(path) else ""
        changes = event != "open" or bool((args[2] or 0) & WRITES)
        if path in self.forbidden or (changes and path and not path.startswith(self.allowed)):
            self.found.append(f"{event} {path}")


def told(error: Any) -> tuple[str, str]:
    """What becomes of an input that svgen refuses."""
    try:
        for one in error.problems:
            check_problem(one.code, one.message, one.why, one.hint)
    except AssertionError:
        return "defect", traceback.format_exc()
    return error.code, ""


class Worker:
    """One process of the harness."""

    def __init__(self, arena: Path, seed: int):
        self.arena, self.seed = arena, seed
        inside = arena / INSIDE
        shutil.rmtree(inside, ignore_errors=True)
        inside.mkdir()
        (inside / "sampled").mkdir()
        os.chdir(inside)
        self.targets = targets()
        dear = [name for name, target in self.targets.items() if target.plans]
        cheap = [name for name in self.targets if name not in dear]
        self.names = [*dear, *cheap * CHEAP]
        canary = str(arena / CANARY)
        self.leaks = Leaks((inside, arena / "home"), (canary, "/etc/passwd"))
        self.log = (arena / "found.jsonl").open("a")

    def warm(self) -> None:
        """Take every whole file once: they must work; then limit the memory to a GB in all."""
        for target in self.targets.values():
            outcome = self.judge(target, target.whole)
            assert outcome[0] == "works", outcome
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        data = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) << 10
        limit = data + MOST_BYTES - min(used, MOST_BYTES // 2)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def judge(self, target: Target, data: bytes) -> tuple[str, str]:
        """What becomes of one input: a word for the table, and for a defect its description."""
        from svgen.errors import SvgenError

        path = Path(target.path)
        kept = path.read_bytes() if path.exists() else None
        path.write_bytes(data)
        self.leaks.found, self.leaks.watched = [], True
        try:
            outcome = target.run(), ""
        except SvgenError as error:
            outcome = told(error)
        except BaseException:
            outcome = "defect", traceback.format_exc()
        finally:
            self.leaks.watched = False
            path.write_bytes(target.whole) if kept is not None else path.unlink()
        return ("defect", str(self.leaks.found)) if self.leaks.found else outcome

    def run(self, first: int, last: int) -> None:
        """Try the inputs of some numbers."""
        for number in range(first, last):
            (self.arena / "current").write_text(str(number))
            name = self.names[number % len(self.names)]
            rng = random.Random(f"{self.seed}:{number}")
            data = self.targets[name].mutate(rng, self.targets[name].whole)
            faulthandler.dump_traceback_later(HANG_S, exit=True)
            started = time.process_time()
            outcome, what = self.judge(self.targets[name], data)
            spent = time.process_time() - started
            faulthandler.cancel_dump_traceback_later()
            if spent > MOST_CPU_S:
                outcome, what = "defect", f"{spent:.1f} s of CPU time, {outcome}: {what}"
            if outcome == "defect":
                (self.arena / f"defect-{number}").write_bytes(data)
            row = {"number": number, "target": name, "outcome": outcome, "what": what}
            self.log.write(json.dumps({**row, "cpu_s": round(spent, 3)}) + "\n")
            self.log.flush()
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        self.log.write(json.dumps({"peak_bytes": used}) + "\n")
        self.log.close()


if __name__ == "__main__":
    arena, seed, first, last = Path(sys.argv[1]), *map(int, sys.argv[2:])
    worker = Worker(arena, seed)
    worker.warm()
    worker.run(first, last)
