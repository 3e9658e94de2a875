"""Where the error arises: that of attention's output by layer and head."""

from __future__ import annotations

import math
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kvquant_evals.report.ink import Ink, dress
from kvquant_evals.report.plot import Plot, chosen, new_panels, rest, shortened
from kvquant_evals.report.saved import Saved, SavedRow

_MAP = "viridis"


@dataclass(frozen=True)
class HeadErrors:
    """Relative errors of a cache: errors[layer][head], NaN for a head that a layer has not."""

    row: SavedRow
    layers: list[int]
    errors: list[list[float]]


def head_errors(row: SavedRow) -> HeadErrors | None:
    """Means over items; None if a cache has no errors above zero."""
    found: dict[int, list[list[float]]] = {}
    for item in row.items.get("attention", []):
        for layer in item.get("layers", []):
            found.setdefault(layer["layer"], []).append(layer["output"])
    means = {layer: [sum(x) / len(x) for x in zip(*lists, strict=True)] for layer, lists in sorted(found.items())}
    if not any(error > 0 for line in means.values() for error in line):
        return None
    width = max(map(len, means.values()))
    padded = [line + [math.nan] * (width - len(line)) for line in means.values()]
    return HeadErrors(row, list(means), padded)


def _draw(saved: Saved, ink: Ink) -> Figure | None:
    every = [found for row in saved.rows if (found := head_errors(row))]
    if not every:
        return None
    rows = [found.row for found in every]
    kept = chosen(rows)
    shown = [found for found in every if found.row in kept]
    figure, panels = new_panels(len(shown), 2.3, ink, ("head", "layer"), rest(rows, kept))
    values = [error for found in shown for line in found.errors for error in line if error > 0]
    scale = LogNorm(min(values), max(max(values), 1.01 * min(values)))
    for axes, found in zip(panels, shown, strict=True):
        _draw_errors(axes, found, scale, ink)
    bar = figure.colorbar(ScalarMappable(scale, _MAP), ax=panels, shrink=0.9, pad=0.01, aspect=40)
    bar.outline.set_visible(False)
    bar.ax.tick_params(which="both", colors=ink.text, labelsize=7)
    bar.set_label("relative error of the output", color=ink.text, size=8)
    return figure


def _draw_errors(axes: Axes, found: HeadErrors, scale: LogNorm, ink: Ink) -> None:
    dress(axes, ink, grid=False)
    axes.set_title(shortened(found.row.label), color=ink.of(found.row), size=8, loc="left")
    axes.imshow(found.errors, cmap=_MAP, norm=scale, aspect="auto", interpolation="nearest")
    every_nth = max(1, len(found.layers) // 8)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_yticks(range(0, len(found.layers), every_nth), [str(layer) for layer in found.layers[::every_nth]])


PLOT = Plot(
    name="attention",
    title="Error of attention, by layer and head",
    about="How far each head's output is from full precision's, relative to its size; on one scale for all caches.",
    needs="the items of attention",
    draw=_draw,
)
