"""What all plots share: colours for light and dark pages, axes, and PNG files."""

from __future__ import annotations

import io
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvquant_evals.report.saved import SavedRow

DPI = 160


@dataclass(frozen=True)
class Ink:
    """The colours of a plot. ours, peer and full: of caches, which differ in lightness as well as in hue.

    Source: Okabe and Ito, "Color universal design", 2008.
    """

    paper: str
    text: str
    faint: str
    ours: str
    peer: str
    full: str

    def of(self, row: SavedRow) -> str:
        return self.full if row.is_full else self.peer if row.is_peer else self.ours


LIGHT = Ink(paper="#ffffff", text="#222834", faint="#d9dde4", ours="#0072b2", peer="#d55e00", full="#222834")
DARK = Ink(paper="#171b22", text="#e4e8ee", faint="#394150", ours="#56b4e9", peer="#e69f00", full="#e4e8ee")


def new_figure(width: float, height: float, ink: Ink) -> Figure:
    """An empty figure of a size in inches."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor=ink.paper)
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes, ink: Ink, title: str = "", grid: bool = True) -> None:
    """Gives axes the colours of the page, with lines only where they help to read off a value."""
    axes.set_facecolor(ink.paper)
    axes.tick_params(which="both", colors=ink.text, labelsize=8, length=3, width=0.6)
    axes.tick_params(which="minor", length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(ink.text)
    axes.spines[["left", "bottom"]].set_linewidth(0.6)
    axes.xaxis.label.set(color=ink.text, size=9)
    axes.yaxis.label.set(color=ink.text, size=9)
    axes.set_title(title, color=ink.text, size=9, loc="left")
    if grid:
        axes.grid(which="major", color=ink.faint, linewidth=0.6)
    axes.set_axisbelow(True)


def png(figure: Figure) -> bytes:
    """The figure as a file, the same for the same figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi="figure", metadata={"Software": None})
    return buffer.getvalue()
