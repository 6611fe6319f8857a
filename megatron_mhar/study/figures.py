"""Pictures of runs, as PNG: loss curves and learned routing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from megatron_mhar.errors import UserError
from megatron_mhar.run_files import RoutingMap
from megatron_mhar.study.compare import TRAIN_LOSS, VALID_LOSS, Run

_DPI = 200
_PANELS_A_ROW = 4
_MAX_LABELS = 30  # names along an axis; of more, every second, third, ... is written
_MAX_MARKERS = 60
_WEIGHT_TICKS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
_UNREAD = "0.88"  # grey: neither colour map holds it
# Okabe and Ito's colours, told apart by colour-blind readers too; the first run is the black reference.
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def loss_curves(runs: Sequence[Run], path: Path) -> None:
    """Training and validation loss of ``runs`` over steps; with several runs also the difference to the first.

    The loss axis is cut so that the steep first tenth of the steps does not press the rest together.

    Args:
        runs: at least one, in the order of the legend.
        path: PNG to write.

    Raises:
        UserError: no run has logged a finite loss, or ``path`` cannot be written.
    """
    reference = dict(runs[0].metrics.get(VALID_LOSS, ()))
    against = [
        (run, [(step, value - reference[step]) for step, value in run.metrics.get(VALID_LOSS, ()) if step in reference])
        for run in runs
    ]
    with_difference = sum(bool(points) for _, points in against) > 1
    figure = Figure(figsize=(9.0 if with_difference else 5.5, 3.6), layout="constrained")
    axes = figure.subplots(1, 1 + with_difference, squeeze=False, width_ratios=[1.25, 1][: 1 + with_difference])[0]

    for run, colour in zip(runs, _colours(len(runs)), strict=True):
        train_steps, train = run.curve(TRAIN_LOSS)
        steps, valid = run.curve(VALID_LOSS)
        axes[0].plot(train_steps, train, color=colour, alpha=0.35, linewidth=0.8)
        axes[0].plot(
            steps, valid, color=colour, linewidth=1.4, label=run.label,
            marker="o" if len(steps) <= _MAX_MARKERS else None, markersize=3.5,
        )  # fmt: skip
    axes[0].set_ylim(*_loss_limits(runs))
    axes[0].set_ylabel("loss (nats a token)")
    axes[0].set_title("validation (strong) and training (faint)", fontsize=9)
    axes[0].legend(frameon=False, fontsize=8)

    if with_difference:
        for (_, points), colour in zip(against, _colours(len(runs)), strict=True):
            axes[1].plot(
                [step for step, _ in points], [value for _, value in points], color=colour, linewidth=1.4,
                marker="o" if 0 < len(points) <= _MAX_MARKERS else None, markersize=3.5,
            )  # fmt: skip
        axes[1].set_ylabel("difference in validation loss")
        axes[1].set_title(f"against {runs[0].label}; below 0 is better", fontsize=9)
    for panel in axes:
        panel.set_xlabel("step")
        panel.set_xlim(0, 1.02 * max(run.summary.steps for run in runs))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=[1, 2, 2.5, 5, 10]))
        panel.tick_params(labelsize=8)
        panel.grid(color="0.92")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def routing_map(run: Run, path: Path) -> None:
    """Mean depth weight of each source (column) at each site (row), a panel a head, one colour scale.

    The scale is a square root, so that small weights among many sources can be told from none. Sources that a site
    does not read are grey.

    Args:
        run: a run with routing.
        path: PNG to write.

    Raises:
        UserError: the run has no routing, or ``path`` cannot be written.
    """
    routing = _routing(run)
    weights = np.where(routing.reads[:, None, :], routing.weights, np.nan)
    # A site with one source has no choice: its weight of 1 would take the scale from all others.
    choice = routing.reads.sum(axis=1) > 1
    top = float(np.nanmax(weights[choice])) if choice.any() else 1.0
    _heat_maps(
        run, weights, path, title="mean depth weight (square-root scale)", colour_map="viridis",
        norm=PowerNorm(0.5, vmin=0.0, vmax=top if top > 0 else 1.0),
        extend="max" if np.nanmax(weights) > top else "neither", ticks=[tick for tick in _WEIGHT_TICKS if tick <= top],
    )  # fmt: skip


def routing_deviation(run: Run, path: Path) -> None:
    """What the heads have of their own: mean depth weight of each head minus the mean over heads.

    Args:
        run: a run with routing and more than one head.
        path: PNG to write.

    Raises:
        UserError: the run has no routing or a single head, or ``path`` cannot be written.
    """
    routing = _routing(run)
    if routing.weights.shape[1] == 1:
        raise UserError(f"{run.directory}: one routing head, so there is no consensus of heads to deviate from")
    deviation = routing.weights - routing.weights.mean(axis=1, keepdims=True)
    deviation = np.where(routing.reads[:, None, :], deviation, np.nan)
    # A few sites with few sources deviate most: the largest hundredth is drawn in the end colours.
    bound = float(max(np.nanquantile(np.abs(deviation), 0.99), 1e-12))
    _heat_maps(
        run, deviation, path, title="mean depth weight minus the mean over heads", colour_map="RdBu_r",
        norm=Normalize(-bound, bound), extend="both",
    )  # fmt: skip


def _routing(run: Run) -> RoutingMap:
    if run.routing is None:
        raise UserError(f"{run.directory}: no routing.npz: method {run.summary.method} does not route")
    if not run.routing.reads.any():
        raise UserError(f"{run.directory}: routing.npz names no site that reads a source")
    if not run.routing.finite:
        raise UserError(f"{run.directory}: routing.npz has weights that are not finite: the run diverged")
    return run.routing


def _colours(count: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(count)]


def _loss_limits(runs: Sequence[Run]) -> tuple[float, float]:
    """Limits of the loss axis: everything after the first tenth of the steps."""
    curves = [run.curve(metric) for run in runs for metric in (TRAIN_LOSS, VALID_LOSS)]
    finite = [(steps[np.isfinite(values)], values[np.isfinite(values)]) for steps, values in curves]
    steps = np.concatenate([steps for steps, _ in finite])
    values = np.concatenate([values for _, values in finite])
    if len(values) == 0:
        raise UserError(f"{', '.join(run.label for run in runs)}: no finite loss was logged, so there is no curve")
    later = values[steps >= steps.max() / 10]
    margin = 0.04 * (later.max() - later.min()) or 0.1
    return float(later.min() - margin), float(later.max() + margin)


def _heat_maps(
    run: Run, values: NDArray[np.floating], path: Path, *, title: str, colour_map: str, norm: Normalize, extend: str,
    ticks: Sequence[float] | None = None,
) -> None:  # fmt: skip
    """A panel a head of ``values`` ``[sites, heads, sources]``; NaN is drawn as not read."""
    routing = _routing(run)
    sites, heads, sources = values.shape
    rows = math.ceil(heads / _PANELS_A_ROW)
    columns = math.ceil(heads / rows)
    # Cells are square where that fits a page; names need room once a row and once a column of panels.
    width = min(4.2 if heads == 1 else 2.6, max(1.1, 0.13 * sources))
    height = min(4.2 if heads == 1 else 2.6, max(1.1, 0.13 * sites))
    figure = Figure(figsize=(columns * width + 1.9, rows * height + 1.5), layout="compressed")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    cells = np.ma.masked_invalid(values)
    for head, axes in enumerate(panels.flat):
        if head >= heads:
            axes.set_visible(False)
            continue
        axes.set_facecolor(_UNREAD)
        image = axes.imshow(
            cells[:, head], cmap=colour_map, norm=norm, interpolation="nearest",
            aspect=height / sites * sources / width,
        )  # fmt: skip
        axes.set_title(f"head {head}", fontsize=8, pad=3)
        _name(axes, routing.site_names, routing.source_names)
        axes.tick_params(labelleft=head % columns == 0, labelbottom=head + columns >= heads)
    figure.supxlabel("source", fontsize=9)
    figure.supylabel("site", fontsize=9)
    heading = f"{run.label}: {run.summary.method}, {heads} head{'s' * (heads > 1)}, step {run.summary.steps}"
    figure.suptitle(f"{heading}; grey: not read", fontsize=9)
    bar = figure.colorbar(
        image, ax=panels, shrink=min(1.0, 2.6 / (rows * height)), pad=0.015, fraction=0.05, aspect=25, extend=extend,
        ticks=ticks,
    )  # fmt: skip
    bar.set_label(title, fontsize=8)
    bar.ax.yaxis.set_major_formatter("{x:g}")
    bar.ax.tick_params(labelsize=7)
    _save(figure, path)


def _name(axes: Axes, sites: Sequence[str], sources: Sequence[str]) -> None:
    """Write the names of rows and columns, thinned out where there are many."""
    for names, axis, rotation in ((sites, axes.yaxis, 0), (sources, axes.xaxis, 90)):
        # An even stride names sublayers of one kind; odd ones would alternate.
        stride = 1 if len(names) <= _MAX_LABELS else 2 * math.ceil(len(names) / _MAX_LABELS / 2)
        places = range(0, len(names), stride)
        axis.set_ticks(list(places), [names[place] for place in places], rotation=rotation, fontsize=6)
    axes.tick_params(length=2, pad=1.5)


def _save(figure: Figure, path: Path) -> None:
    """Write ``figure``; a failed write leaves what was at ``path``."""
    FigureCanvasAgg(figure)  # no window, whatever back end the user's matplotlibrc names
    unfinished = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            figure.savefig(unfinished, format="png", dpi=_DPI)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path}: the picture cannot be written: {error.strerror or error}") from error
