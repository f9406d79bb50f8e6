"""The demo's latents: blocks as the VAE's chunks, axes of the greatest variance, unit deviation."""

import numpy as np
import pytest

from svgen.demo import scenes
from svgen.demo.basis import Basis, blocks


@pytest.fixture(scope="module")
def clips() -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.stack([scenes.render(scenes.sample(rng)) for _ in range(24)])


def test_first_block_is_the_first_frame_four_times(clips):
    cut = blocks(clips[0])
    assert cut.shape == (9, 16, 16, 768)
    block = cut[:, 2, 5].reshape(9, 4, 8, 8, 3)
    wanted = clips[0, :, 16:24, 40:48].astype(np.float32) / 127.5 - 1
    assert np.array_equal(block[0], np.repeat(wanted[:1], 4, axis=0))
    assert np.array_equal(block[3], wanted[9:13])
    assert np.array_equal(block[8], wanted[29:33])


def test_latents_have_unit_deviation_and_do_not_correlate(clips):
    basis = Basis.fit(clips, 6)
    z = np.stack([basis.latents(clip) for clip in clips]).reshape(-1, 6)
    assert z.mean(0) == pytest.approx(np.zeros(6), abs=1e-3)
    assert z.T @ z / len(z) == pytest.approx(np.eye(6), abs=5e-3)


def test_latents_are_the_best_that_so_few_numbers_allow(clips):
    """What is left of clips drawn by the inverse is the variance of the axes left out."""
    rows = np.concatenate([blocks(clip).reshape(-1, 768) for clip in clips]).astype(np.float64)
    variance = np.linalg.eigvalsh(np.cov(rows.T, bias=True))
    basis = Basis.fit(clips, 8)
    z = np.concatenate([basis.latents(clip).reshape(-1, 8) for clip in clips])
    drawn = z @ (basis.axes / np.square(basis.axes).sum(0)).T + basis.mean
    left = np.square(drawn - rows).sum(1).mean()
    assert left == pytest.approx(variance[:-8].sum(), rel=1e-2)


def test_basis_is_kept(clips, tmp_path):
    basis = Basis.fit(clips[:4], 3)
    basis.save(tmp_path / "basis.npz")
    loaded = Basis.load(tmp_path / "basis.npz")
    assert np.array_equal(loaded.latents(clips[5]), basis.latents(clips[5]))
