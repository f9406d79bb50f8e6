"""The plot of a comparison: quality against the pairs of tokens that a run kept."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from svgen.errors import MachineError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which the colour-blind tell apart; and a shape for each of the presets.
SWEEP_COLOR, FLOOR_COLOR = "#0072B2", "#555555"
PRESET_STYLES = (
    ("#D55E00", "s"),
    ("#009E73", "D"),
    ("#CC79A7", "^"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
    ("#000000", "X"),
)
SIZE_IN, DPI = (8.0, 4.2), 150
MEASURES = (("psnr_db", "PSNR against dense (dB)"), ("ssim", "SSIM against dense"))
Row = Mapping[str, Any]  # one of `comparison.report`


def check_library() -> None:
    """Raise MachineError (E_LIBRARY) unless plots can be made here."""
    try:
        from matplotlib.figure import Figure  # noqa: F401
    except ImportError as error:
        raise MachineError(
            "E_LIBRARY",
            "matplotlib is not installed",
            why="the plot is drawn with it",
            hint="pip install matplotlib",
        ) from error


def draw(rows: Sequence[Row], title: str) -> bytes:
    """Draw the rows of a report as a PNG: means as marks, down to the worst video as thin lines."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_IN, dpi=DPI, layout="constrained")
    for axes, (measure, label) in zip(figure.subplots(1, 2), MEASURES, strict=True):
        _draw_measure(axes, rows, measure)
        axes.set_xlabel("kept pairs of the run (%)")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title, fontsize="medium")
    found = io.BytesIO()
    figure.savefig(found, format="png")
    return found.getvalue()


def _draw_measure(axes: "Axes", rows: Sequence[Row], measure: str) -> None:
    """Draw one measure of every schedule; the floor is a number in the legend, far above."""
    swept = [row for row in rows if row["kind"] == "sweep" and not _is_floor(row)]
    _draw(axes, swept, measure, ("sweep of the band share", SWEEP_COLOR, "o-"), size=5)
    presets = [row for row in rows if row["kind"] == "preset"]
    for index, row in enumerate(presets):
        color, marker = PRESET_STYLES[index % len(PRESET_STYLES)]
        _draw(axes, [row], measure, (row["name"], color, marker), size=9)
    floor = next(row for row in rows if row["kind"] == "floor")[measure]
    text = f"floor {floor['mean']:.1f} dB" if measure == "psnr_db" else "floor"
    drawn = [row[measure]["mean"] for row in (*swept, *presets)]
    if measure == "psnr_db" and drawn and floor["mean"] > max(drawn) + 20:
        axes.plot([], [], color=FLOOR_COLOR, linestyle="--", label=f"{text} (above)")
    else:
        axes.axhline(floor["mean"], color=FLOOR_COLOR, linestyle="--", label=text)


def _is_floor(row: Row) -> bool:
    """Whether every pair was kept: as near to dense as rounding allows, whatever the schedule."""
    return row["kept_pairs"] == 1


def _draw(
    axes: "Axes",
    rows: Sequence[Row],
    measure: str,
    style: tuple[str, str, str],  # label, colour, format
    *,
    size: float,
) -> None:
    if not rows:
        return
    label, color, form = style
    rows = sorted(rows, key=lambda row: row["kept_pairs"])
    kept = [100 * row["kept_pairs"] for row in rows]
    mean = [row[measure]["mean"] for row in rows]
    worst = [row[measure]["worst"] for row in rows]
    axes.plot(kept, mean, form, color=color, markersize=size, label=label)
    axes.vlines(kept, worst, mean, color=color, linewidth=1)
    axes.plot(kept, worst, "_", color=color, markersize=size)
