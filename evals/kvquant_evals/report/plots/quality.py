"""Quality against size: mean KL divergence over effective bits, ours and others'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvquant_evals.report.ink import Ink, dress, new_figure
from kvquant_evals.report.label import Label, place
from kvquant_evals.report.plot import Plot
from kvquant_evals.report.saved import Saved


@dataclass(frozen=True)
class Point:
    """A cache of `bits` effective bits, and its mean KL in nats with the bounds that are 95 % sure."""

    label: str
    bits: float
    kl: float
    low: float
    high: float
    is_peer: bool


def points(saved: Saved) -> list[Point]:
    """Those of all rows that have both. Without a divergence at all there is no place on a logarithmic axis."""
    found = []
    for row in saved.rows[1:]:
        bits, kl = row.score("effective_bits"), row.score("kl_mean")
        if bits is None or kl is None or kl <= 0:
            continue
        low, high = row.score("kl_mean_low"), row.score("kl_mean_high")
        bounds = (kl, kl) if low is None or high is None or low <= 0 else (low, high)
        found.append(Point(row.label, bits, kl, *bounds, row.is_peer))
    return found


def frontier(found: Sequence[Point]) -> list[Point]:
    """Those that no other is at least as good as in both ways, from the fewest bits to the most."""
    kept: list[Point] = []
    for point in sorted(found, key=lambda point: (point.bits, point.kl)):
        if not kept or point.kl < kept[-1].kl:
            kept.append(point)
    return kept


def _draw(saved: Saved, ink: Ink) -> Figure | None:
    found = points(saved)
    if not found:
        return None
    figure = new_figure(8.4, 5.4 if len(found) > 8 else 4.4, ink)
    axes = figure.subplots()
    dress(axes, ink)
    axes.set(yscale="log", xlabel="effective bits per number", ylabel="mean KL to full precision, nats per token")
    axes.margins(x=0.12, y=0.12)
    ours = [point for point in found if not point.is_peer]
    _draw_points(axes, ours, ink.ours, "o", 34, "kvquant")
    _draw_points(axes, [point for point in found if point.is_peer], ink.peer, "s", 16, "other caches")
    line = frontier(ours)
    axes.plot([point.bits for point in line], [point.kl for point in line], color=ink.ours, linewidth=1.6, zorder=2)
    axes.legend(
        frameon=False, labelcolor=ink.text, fontsize=8, ncols=2, loc="lower left", bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
    )  # fmt: skip
    labels = [
        Label(point.bits, point.kl, point.label, ink.peer if point.is_peer else ink.ours)
        for point in sorted(found, key=lambda point: point.is_peer)
    ]
    place(figure, axes, labels, _between(line))
    return figure


def _draw_points(axes: Axes, found: list[Point], color: str, marker: str, size: int, name: str) -> None:
    if not found:
        return
    bits, kl = [point.bits for point in found], [point.kl for point in found]
    bounds = [[point.kl - point.low for point in found], [point.high - point.kl for point in found]]
    axes.errorbar(bits, kl, yerr=bounds, fmt="none", ecolor=color, elinewidth=0.8, alpha=0.6)
    axes.scatter(bits, kl, s=size, color=color, marker=marker, label=name, zorder=3)


def _between(line: Sequence[Point]) -> list[tuple[float, float]]:
    """Points on a line that is straight on a logarithmic axis, for labels to keep off."""
    steps = [i / 24 for i in range(1, 24)]
    return [
        (a.bits + (b.bits - a.bits) * step, a.kl * (b.kl / a.kl) ** step) for a, b in pairwise(line) for step in steps
    ]


PLOT = Plot(
    name="quality",
    title="Quality against size",
    about="Lower and further left is better. Bars are the 95 % interval of the mean over draws of blocks of text; the "
    "line joins our caches that none of ours beats in both ways.",
    needs="kl_mean and effective_bits",
    draw=_draw,
)
