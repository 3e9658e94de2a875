"""The tail of the divergence: the tokens at which a cache is far worse than on average."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure

from kvquant_evals.report.ink import Ink, dress, new_figure
from kvquant_evals.report.plot import Plot
from kvquant_evals.report.saved import Saved, SavedRow

QUANTILES = {"kl_median": "median", "kl_mean": "mean", "kl_p99": "99 %", "kl_p999": "99.9 %"}
_MARKERS = {"kl_median": "|", "kl_mean": "o", "kl_p99": "D", "kl_p999": ">"}
_SIZES = {"kl_median": 70, "kl_mean": 18, "kl_p99": 18, "kl_p999": 26}


@dataclass(frozen=True)
class Tail:
    """KL in nats of a cache: its mean, and all of QUANTILES that are above zero, by score."""

    row: SavedRow
    mean: float
    quantiles: dict[str, float]


def tails(saved: Saved) -> list[Tail]:
    """From the best mean to the worst."""
    found = []
    for row in saved.rows[1:]:
        mean = row.score("kl_mean")
        quantiles = {name: value for name in QUANTILES if (value := row.score(name)) is not None and value > 0}
        if mean is not None and len(quantiles) > 2:
            found.append(Tail(row, mean, quantiles))
    return sorted(found, key=lambda tail: tail.mean)


def _draw(saved: Saved, ink: Ink) -> Figure | None:
    found = tails(saved)
    if not found:
        return None
    figure = new_figure(8.4, 1.1 + 0.24 * len(found), ink)
    axes = figure.subplots()
    dress(axes, ink)
    axes.set(xscale="log", xlabel="KL to full precision, nats", ylim=(len(found) - 0.4, -0.6))
    for i, tail in enumerate(found):
        color, values = ink.of(tail.row), list(tail.quantiles.values())
        axes.plot([min(values), max(values)], [i, i], color=color, linewidth=1, alpha=0.55)
        for name, value in tail.quantiles.items():
            axes.scatter([value], [i], marker=_MARKERS[name], s=_SIZES[name], color=color, zorder=3)
    axes.set_yticks(range(len(found)), [tail.row.label for tail in found])
    for text, tail in zip(axes.get_yticklabels(), found, strict=True):
        text.set_color(ink.of(tail.row))
    axes.grid(visible=False, axis="y")
    keys = [
        axes.scatter([], [], marker=_MARKERS[name], s=_SIZES[name], color=ink.text, label=about)
        for name, about in QUANTILES.items()
    ]
    axes.legend(
        handles=keys, ncols=len(keys), frameon=False, labelcolor=ink.text, fontsize=8, loc="lower left",
        bbox_to_anchor=(0, 1), borderaxespad=0.2,
    )  # fmt: skip
    return figure


PLOT = Plot(
    name="tail",
    title="The worst tokens",
    about="A mean hides rare failures. Each line goes from the median token to the one in a thousand; caches are in "
    "the order of their mean.",
    needs="kl_median, kl_p99 and kl_p999",
    draw=_draw,
)
