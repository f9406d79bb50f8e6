"""Two processes make a video, one of them is killed, and a single one finishes it."""

import re
import signal

import numpy as np
import pytest

from tests.cli.test_hosts import ARGS, port, start
from tests.helpers import ROOT, run_svgen
from tests.videos import decoded

pytestmark = pytest.mark.faults

__all__ = ["port"]
STEPS, KILLED_AT = 200, 40
MORE = ("--steps", str(STEPS), "--seed", "3")
ALONE = (*ARGS[:-2], *MORE)  # without the mesh


@pytest.mark.parametrize("victim", [0, 1])
def test_one_process_goes_on_alone(env, port, tmp_path, capsys, victim):
    paths = [tmp_path / name / "x.mp4" for name in ("first", "second", "alone")]
    for path in paths:
        path.parent.mkdir()
    team = [start(index, port, path, env, *MORE) for index, path in enumerate(paths[:2])]
    for line in team[0].stderr:
        if line.startswith(f"denoise:  {100 * KILLED_AT // STEPS}%"):
            break
    team[victim].send_signal(signal.SIGKILL)
    said = [one.communicate(timeout=120)[1] for one in team]
    assert team[1 - victim].returncode == 3, said[1 - victim]
    step = int(re.search(r"goes on after step (\d+)", said[1 - victim])[1])
    survivor = paths[1 - victim]
    again = run_svgen("generate", *ALONE, "-o", str(survivor), env=env, cwd=ROOT)
    assert again.returncode == 0, again.stderr
    assert f"going on after step {step} of {STEPS}" in again.stderr
    assert [path.name for path in survivor.parent.iterdir()] == ["x.mp4"]
    whole = run_svgen("generate", *ALONE, "-o", str(paths[2]), env=env, cwd=ROOT)
    assert whole.returncode == 0, whole.stderr
    difference = np.abs(decoded(paths[2]).astype(int) - decoded(survivor))
    with capsys.disabled():
        print(
            f"\nprocess {victim} of 2 killed, one went on after step {step} of {STEPS}: frames "
            f"differ by {difference.mean():.4f} levels of 255, at most {difference.max()}"
        )
    assert difference.mean() < 0.1 and difference.max() <= 16
