"""The score of a demo model: right videos score, wrong ones do not."""

import numpy as np
import pytest

from svgen.demo import scenes
from svgen.demo.evaluate import contact_sheet, score


@pytest.fixture(scope="module")
def world() -> tuple[list[scenes.Scene], list[np.ndarray]]:
    rng = np.random.default_rng(5)
    asked = [scenes.sample(rng) for _ in range(24)]
    return asked, [scenes.render(scene) for scene in asked]


def test_right_videos_score(world):
    asked, made = world
    assert score(asked, made) == dict.fromkeys(("color", "motion", "background", "all three"), 1.0)


def test_videos_of_other_prompts_score_near_chance(world):
    asked, made = world
    shares = score(asked, made[1:] + made[:1])
    assert shares["all three"] == 0
    assert max(shares.values()) < 0.5


def test_contact_sheet_is_a_picture(world, tmp_path):
    from matplotlib import image

    contact_sheet(world[1][:3], tmp_path / "sheet.png")
    assert image.imread(tmp_path / "sheet.png").shape[:2] == (3 * 130, 5 * 130)
