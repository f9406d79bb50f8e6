"""Operations against hand counts, and peaks by the names that JAX gives."""

import pytest

from svgen.config import TransformerSpec
from svgen.flops import attention_flops, peak_of, stage_flops, step_flops
from svgen.grid import WAN21, grid_of
from svgen.shapes import SPECS

SPEC = TransformerSpec(
    heads=1, head_dim=6, layers=2, mlp_width=10, in_channels=3, out_channels=3, text_width=8
)


def test_a_step_is_its_products():
    """Six products C x C and two C x M a token and layer, two over L text rows, two C x C a text
    row, and patches in and out.
    """
    video, text = 6 * 36 + 2 * 60 + 2 * 6 * 5, 2 * 36
    layers = 2 * (7 * video + 5 * text)
    ends = 7 * 6 * 4 * (3 + 3)
    assert step_flops(SPEC, tokens=7, text_rows=5, branches=2) == 2 * 2 * (layers + ends)


def test_attention_is_two_products_a_pair():
    assert attention_flops(10, 6) == 2 * 2 * 10 * 6


def test_a_longer_video_takes_more():
    specs = SPECS["wan2.1-1.3b"]
    short, long = (stage_flops(specs, grid_of(832, 480, n, WAN21), 128, 2) for n in (5, 81))
    assert long["attention"] == pytest.approx(10.5**2 * short["attention"])  # 21 latent frames to 2
    assert long["step"] > 10.5 * short["step"]
    assert long["decode"] == short["decode"]  # of one latent frame


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v6 lite", 918e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA L40S", None),  # no L4
        ("cpu", None),
    ],
)
def test_peaks_of_chips(kind, peak):
    assert peak_of(kind) == peak
