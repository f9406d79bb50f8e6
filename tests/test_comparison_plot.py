"""The plot of a comparison: what it shows, and where it cannot be drawn."""

import sys

import pytest
from matplotlib.figure import Figure

from svgen.comparison_plot import MEASURES, _draw_measure, check_library, draw
from svgen.errors import MachineError


def row(name, kind, kept, psnr, ssim=0.9):
    return {
        "name": name,
        "kind": kind,
        "kept_pairs": kept,
        "psnr_db": {"mean": psnr, "worst": psnr - 5},
        "ssim": {"mean": ssim, "worst": ssim - 0.1},
    }


ROWS = [
    row("dense", "dense", 1.0, 100.0, 1.0),
    row("floor", "floor", 1.0, 96.25, 1.0),
    row("aggressive", "preset", 0.5, 26.0),
    row("share 0.4", "sweep", 0.6, 30.0),
    row("share 0.1", "sweep", 0.2, 20.0),
]


def test_plot_is_a_png():
    assert draw(ROWS, "title").startswith(b"\x89PNG")


def test_sweep_is_a_line_in_order_and_presets_are_marked():
    axes = Figure().subplots()
    _draw_measure(axes, ROWS, "psnr_db")
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["sweep of the band share"].get_xydata().tolist() == [[20, 20], [60, 30]]
    assert lines["aggressive"].get_xydata().tolist() == [[50, 26]]
    assert "floor 96.2 dB (above)" in lines
    assert axes.get_ylim()[1] < 35  # the floor does not flatten what is to be seen


def test_presets_alone_and_measures_without_sweep_are_drawn():
    for measure, _ in MEASURES:
        axes = Figure().subplots()
        _draw_measure(axes, ROWS[:3], measure)
        assert "aggressive" in [line.get_label() for line in axes.lines]


def test_missing_matplotlib_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MachineError) as caught:
        check_library()
    assert (caught.value.code, caught.value.hint) == ("E_LIBRARY", "pip install matplotlib")
