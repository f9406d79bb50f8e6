"""What several tests use: real runs of the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def run_svgen(
    *args: str,
    env: dict[str, str] | None = None,
    stdin: str = "",
    cwd: Path | None = None,
    timeout_s: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run `python -m svgen ARGS` as a process of its own, and wait for it."""
    return subprocess.run(
        [sys.executable, "-m", "svgen", *args],
        input=stdin,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "1", **(env or {})},
        cwd=cwd,
        capture_output=True,
        encoding="utf-8",
        timeout=timeout_s,
        check=False,
    )


def json_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Read the one JSON object that a run printed; fail if stdout holds anything else."""
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout + done.stderr
    return json.loads(lines[0])
