"""What a plot is. One file per plot in plots/, with its PLOT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvquant_evals.report.ink import Ink, new_figure
from kvquant_evals.report.saved import Saved, SavedRow

MOST_PANELS = 12
_IN_A_LINE = 4


@dataclass(frozen=True)
class Plot:
    """A plot of a report.

    name: of its file; about: how to read it; needs: what it shows, to say what a report lacks. draw: the figure, or
    None if the report does not hold what it shows.
    """

    name: str
    title: str
    about: str
    needs: str
    draw: Callable[[Saved, Ink], Figure | None]


def chosen(rows: Sequence[SavedRow], most: int = MOST_PANELS) -> list[SavedRow]:
    """As many rows as there is room for: full precision and ours before peers, all in the order of the report."""
    kept = sorted(range(len(rows)), key=lambda i: rows[i].is_peer)[:most]
    return [rows[i] for i in sorted(kept)]


def rest(rows: Sequence[SavedRow], kept: Sequence[SavedRow]) -> str:
    """Says how many rows are not shown; empty if all are."""
    count = len(rows) - len(kept)
    return f"not shown for want of room: {count} more" if count else ""


def shortened(label: str, most: int = 26) -> str:
    """A label as the title of a panel."""
    return label if len(label) <= most else f"{label[: most - 1]}…"


def new_panels(count: int, height: float, ink: Ink, names: tuple[str, str], note: str) -> tuple[Figure, list[Axes]]:
    """A figure of equal panels, each `height` inches high. names: of the axes that all share, x and y."""
    columns = min(_IN_A_LINE, count)
    lines = -(-count // columns)
    figure = new_figure(8.4, 0.7 + height * lines, ink)
    panels = list(figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flat)
    for axes in panels[count:]:
        axes.set_visible(False)
    figure.supxlabel(names[0], color=ink.text, size=9)
    figure.supylabel(names[1], color=ink.text, size=9)
    if note:
        figure.suptitle(note, color=ink.text, size=8, ha="right", x=0.99)
    return figure, panels[:count]
