"""Retrieval by place: how many facts are found, by length of the document and by depth in it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from kvquant_evals.report.ink import Ink, dress
from kvquant_evals.report.plot import Plot, chosen, new_panels, rest, shortened
from kvquant_evals.report.saved import Saved, SavedRow

DEPTHS = 5  # parts of a document: with a few facts in each, a cell still stands for several questions
_MAP = LinearSegmentedColormap.from_list("share", ["#5b1a00", "#d55e00", "#f4d58d", "#8cc5e3", "#0072b2"])


@dataclass(frozen=True)
class Grid:
    """Shares that a cache finds: cells[depth][context], depth from the beginning; None where nothing was asked for."""

    row: SavedRow
    contexts: list[int]
    cells: list[list[float | None]]

    @property
    def mean(self) -> float:
        """Over the cells, so that no place counts more because more was asked there."""
        found = [cell for line in self.cells for cell in line if cell is not None]
        return sum(found) / len(found)


def grid(row: SavedRow) -> Grid | None:
    """None if no answer of a cache has a depth."""
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for answer in answers(row):
        if answer.get("depth") is not None:
            depth = min(int(answer["depth"] * DEPTHS), DEPTHS - 1)
            found[depth, answer["context"]].append(float(answer.get("score", answer.get("correct", 0.0))))
    contexts = sorted({context for _, context in found})
    cells = [
        [_mean(found[depth, context]) if (depth, context) in found else None for context in contexts]
        for depth in range(DEPTHS)
    ]
    return Grid(row, contexts, cells) if found else None


def answers(row: SavedRow) -> list[dict[str, Any]]:
    return [answer for item in row.items.get("needles", []) for answer in item.get("answers", [])]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _draw(saved: Saved, ink: Ink) -> Figure | None:
    every = [found for row in saved.rows if (found := grid(row))]
    if not every:
        return None
    rows = [found.row for found in every]
    kept = chosen(rows)
    grids = [found for found in every if found.row in kept]
    names = ("tokens in the document", "depth of the fact")
    figure, panels = new_panels(len(grids), 1.75, ink, names, rest(rows, kept))
    for axes, found in zip(panels, grids, strict=True):
        _draw_grid(axes, found, ink)
    return figure


def _draw_grid(axes: Axes, found: Grid, ink: Ink) -> None:
    dress(axes, ink, grid=False)
    axes.spines[:].set_visible(False)
    axes.set_title(f"{shortened(found.row.label)}  {found.mean:.0%}", color=ink.of(found.row), size=8, loc="left")
    shown = [[float("nan") if cell is None else cell for cell in line] for line in found.cells]
    axes.imshow(shown, cmap=_MAP, vmin=0, vmax=1, aspect="auto")
    for depth, line in enumerate(found.cells):
        for place, cell in enumerate(line):
            if cell is None:
                axes.text(place, depth, "-", color=ink.text, size=7, ha="center", va="center")
            elif len(line) <= 8:
                color = "#ffffff" if cell < 0.35 or cell > 0.9 else "#222834"
                axes.text(place, depth, f"{cell:.0%}", color=color, size=7, ha="center", va="center")
    axes.set_xticks(range(len(found.contexts)), [_thousands(context) for context in found.contexts])
    axes.set_yticks([i - 0.5 for i in range(DEPTHS + 1)], [f"{i / DEPTHS:.0%}" for i in range(DEPTHS + 1)])
    axes.tick_params(length=0, labelsize=7)


def _thousands(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:,}"


PLOT = Plot(
    name="retrieval",
    title="Facts found, by length and depth",
    about="The share of facts found where they lie at that depth of a document of that length; above each panel the "
    "mean of its cells. What full precision does not find either is the model's limit, not the cache's.",
    needs="answers of needles with their depth",
    draw=_draw,
)
