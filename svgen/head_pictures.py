"""Pictures of a profile: which way heads ran, and where some of them look.

Colours are of Okabe and Ito's palette, which colour-blind people tell apart.
"""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from svgen.attention.masks import DENSE, ROUTES
from svgen.profile_heads import BRANCHES, Profile, Seen

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"dense": "#555555", "spatial": "#0072B2", "temporal": "#D55E00"}
UNROUTED = "#E4E4E4"  # dense by schedule
PALEST = 0.15  # share of its colour that a cell of margin 0 keeps
SCALES = (0.1, 0.2, 0.5, 1.0)  # margins that are given the full colour
MOST_PANELS = 6
MOST_LINED = 16  # cells in a row that leave room for lines between them
DOTS_PER_INCH = 110


def _rgb(color: str) -> np.ndarray:
    """Red, green and blue of `#RRGGBB`, from 0 to 1."""
    return np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255


def margin_scale(found: Profile) -> float:
    """The margin that gets the full colour: nearly all of those that were measured lie below."""
    margins = found.margins[found.sampled]
    high = float(np.quantile(margins, 0.95)) if margins.size else 0.0
    return next((scale for scale in SCALES if scale >= high), SCALES[-1])


def cell_colors(found: Profile, step: int, branch: int, scale: float) -> np.ndarray:
    """Colour every head of a step by its route, the paler the smaller its margin: float64
    [L, A, 3]. Layers that are dense by schedule are grey.
    """
    routes = found.routes[step, :, branch]
    depth = np.minimum(found.margins[step, :, branch] / scale, 1)
    depth = np.where(routes == DENSE, 1, PALEST + (1 - PALEST) * depth)[..., None]
    full = np.stack([_rgb(COLORS[name]) for name in ROUTES])[routes]
    cells = 1 - depth * (1 - full)
    return np.where(found.sampled[step][:, None, None], cells, _rgb(UNROUTED))


def shown_steps(found: Profile) -> list[int]:
    """At most `MOST_PANELS` of the routed steps, spread evenly, with the first and the last."""
    steps = found.routed_steps
    places = np.linspace(0, len(steps) - 1, min(MOST_PANELS, len(steps))).round().astype(int)
    return steps[places].tolist()


def routes_picture(found: Profile, title: str = "") -> "Figure":
    """Draw layers x heads, a panel per step and branch, and the share of each route over steps."""
    from matplotlib.figure import Figure

    steps, branches, scale = shown_steps(found), found.routes.shape[2], margin_scale(found)
    figure = Figure(figsize=(9.5, 2.1 + 2.3 * branches), dpi=DOTS_PER_INCH, layout="constrained")
    figure.suptitle(title, fontsize=10)
    upper, lower = figure.subfigures(2, 1, height_ratios=(2.3 * branches, 1.9))
    panels = upper.subplots(branches, len(steps), squeeze=False, sharex=True, sharey=True)
    for branch, row in enumerate(panels):
        for step, axes in zip(steps, row, strict=True):
            _draw_cells(axes, cell_colors(found, step, branch, scale))
            if branch == 0:
                axes.set_title(f"step {step + 1}", fontsize=9)
            if branch == branches - 1:
                axes.set_xlabel("head", fontsize=8)
        named = f"{BRANCHES[branch]}\n" if branches > 1 else ""
        row[0].set_ylabel(f"{named}layer", fontsize=8)
    below = lower.subplots(1, 2, width_ratios=(3.4, 1))
    _draw_shares(below[0], found.shares())
    _draw_key(below[1], scale)
    return figure


def _draw_cells(axes: "Axes", colors: np.ndarray) -> None:
    layers, heads = colors.shape[:2]
    axes.imshow(colors, aspect="auto", interpolation="nearest")
    axes.set_xticks(_ticks(heads))
    axes.set_yticks(_ticks(layers))
    axes.tick_params(labelsize=7)
    axes.set_xticks(np.arange(heads + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(layers + 1) - 0.5, minor=True)
    if max(layers, heads) <= MOST_LINED:
        axes.grid(which="minor", color="white", linewidth=0.6)
    axes.tick_params(which="minor", length=0)


def _ticks(count: int) -> range:
    """Numbers to write beside an axis: all of a few, else about eight."""
    return range(0, count, max(1, -(-count // 8)))


def _draw_shares(axes: "Axes", shares: np.ndarray) -> None:
    """Stack the share of each route, a bar per step."""
    steps = np.arange(1, len(shares) + 1)
    names = ("dense: over the budget", "spatial", "temporal", "dense by schedule")
    colors = (*(COLORS[name] for name in ROUTES), UNROUTED)
    base = np.zeros(len(shares))
    for kind in (1, 2, 0, 3):
        if shares[:, kind].any():
            axes.bar(steps, shares[:, kind] * 100, 0.9, base, color=colors[kind], label=names[kind])
            base += shares[:, kind] * 100
    axes.set_xlim(0.4, len(shares) + 0.6)
    axes.set_ylim(0, 100)
    axes.set_xlabel("step", fontsize=8)
    axes.set_ylabel("share of heads, %", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(fontsize=7, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)


def _draw_key(axes: "Axes", scale: float) -> None:
    """Say what colours mean: a strip for each route, from no margin to a full one."""
    depth = np.linspace(PALEST, 1, 64)[None, :, None]
    names = ("spatial", "temporal")
    strips = np.concatenate([1 - depth * (1 - _rgb(COLORS[name])) for name in names])
    axes.imshow(strips, aspect="auto", extent=(0, scale, 1.5, -0.5))
    axes.set_yticks((0, 1), names, fontsize=7)
    more = "≥ " if scale < 1 else ""
    axes.set_xticks((0, scale / 2, scale), ("0", f"{scale / 2:g}", f"{more}{scale:g}"))
    axes.set_xlabel("margin of the better mask", fontsize=8)
    axes.tick_params(labelsize=7)


def views_picture(found: Profile, seen: Sequence[Seen], title: str = "") -> "Figure":
    """Draw where some heads look in the last step: a row for each, its attention in both orders of
    tokens, and by distance on the frame and along time.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 0.6 + 2.35 * len(seen)), dpi=DOTS_PER_INCH, layout="constrained")
    figure.suptitle(title, fontsize=10)
    rows = figure.subplots(len(seen), 4, squeeze=False, width_ratios=(1.25, 1.25, 1, 1))
    for one, axes in zip(seen, rows, strict=True):
        _draw_maps(axes[:2], one)
        axes[0].set_title(_named(found, one), fontsize=9, loc="left")
        frames, tokens_on_frame = even_shares(one.grid)
        color = COLORS[ROUTES[found.routes[-1, one.layer, 0, one.head]]]
        _draw_distances(axes[2], one.view.on_frame, tokens_on_frame, color)
        _draw_distances(axes[3], one.view.along_time, frames, color)
        axes[2].set_xlabel("distance on the frame, tokens", fontsize=8)
        axes[3].set_xlabel("distance in time, latent frames", fontsize=8)
    rows[0][3].legend(fontsize=7, frameon=False)
    return figure


def _named(found: Profile, one: Seen) -> str:
    """Which head a row shows, how it ran, and its errors."""
    name = f"layer {one.layer}, head {one.head}: "
    if not found.sampled[-1, one.layer]:
        return f"{name}dense by schedule"
    spatial, temporal = found.errors[-1, one.layer, 0, one.head]
    route = ROUTES[found.routes[-1, one.layer, 0, one.head]]
    return f"{name}{route} (error spatial {spatial:.2f}, temporal {temporal:.2f})"


def _draw_maps(axes: Sequence["Axes"], one: Seen) -> None:
    """Draw the attention of sampled queries in both orders, as a multiple of even attention."""
    frames, positions = one.grid[0], one.grid[1] * one.grid[2]
    maps = [array * array.shape[1] for array in (one.view.frame_major, one.view.position_major)]
    highest = max(float(np.quantile(maps, 0.995)), 1.0)
    for panel, array, most, unit in zip(
        axes, maps, (frames, positions), ("frame", "position"), strict=True
    ):
        options: dict[str, Any] = {"cmap": "viridis", "vmin": 0, "vmax": highest}
        image = panel.imshow(array, aspect="auto", extent=(0, most, most, 0), **options)
        panel.set_xlabel(f"keys, {unit} after {unit}", fontsize=8)
        panel.set_ylabel(f"queries, by {unit}", fontsize=8)
        panel.tick_params(labelsize=7)
    bar = axes[1].figure.colorbar(image, ax=axes[1], fraction=0.06, pad=0.02)
    bar.set_label("times even attention", fontsize=7)
    bar.ax.tick_params(labelsize=7)


def even_shares(grid: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """What `View.along_time` and `View.on_frame` hold for attention that is spread evenly."""
    frames, down, right = (_apart(side) for side in grid)
    ring = np.hypot(np.arange(grid[1])[:, None], np.arange(grid[2])).round().astype(int)
    return frames, np.bincount(ring.reshape(-1), np.outer(down, right).reshape(-1))


def _apart(side: int) -> np.ndarray:
    """The share of all pairs of `side` places in a row that are 0, 1, 2, ... apart."""
    pairs = 2.0 * (side - np.arange(side))
    pairs[0] = side
    return pairs / side**2


def _draw_distances(axes: "Axes", shares: np.ndarray, even: np.ndarray, color: str) -> None:
    """Draw the share of attention at each distance, beside what even attention would have."""
    distances = np.arange(len(shares))
    axes.bar(distances, shares * 100, 0.85, color=color, label="this head")
    axes.plot(distances, even * 100, "o--", ms=2.5, lw=1, color="black", label="even attention")
    axes.set_ylabel("share of attention, %", fontsize=8)
    axes.set_ylim(0)
    axes.tick_params(labelsize=7)
    axes.xaxis.get_major_locator().set_params(integer=True)


def as_png(figure: "Figure") -> bytes:
    """The bytes of a figure's PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
