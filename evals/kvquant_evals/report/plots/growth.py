"""What grows or falls with the context: the memory that a cache holds, and the speed of decoding behind it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvquant_evals.report.ink import Ink, dress, new_figure
from kvquant_evals.report.label import SIZE, spread
from kvquant_evals.report.plot import Plot, chosen, rest
from kvquant_evals.report.saved import Saved, SavedRow

MOST_LINES = 14
_MOST_BATCHES = 3


@dataclass(frozen=True)
class Curve:
    """A cache's values by context. noisy: contexts whose value is not to be relied on."""

    row: SavedRow
    values: dict[int, float]
    noisy: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Quantity:
    """What an axis shows. task and field: where it lies in a report; unit: what it is divided by for the axis."""

    task: str
    field: str
    title: str
    unit: float = 1.0


MEMORY = Quantity("memory", "bytes", "cache, MB", 1e6)
SPEED = Quantity("speed", "decode_tokens_per_second", "decoded tokens per second")


def curves(saved: Saved, quantity: Quantity, batch: int | None = None) -> list[Curve]:
    """One per row that has any, of the items of a batch if one is given; what was measured again is averaged."""
    found = []
    for row in saved.rows:
        values: dict[int, list[float]] = defaultdict(list)
        items = [item for item in row.items.get(quantity.task, []) if _belongs(item, quantity, batch)]
        for item in items:
            values[item["context"]].append(item[quantity.field] / quantity.unit)
        noisy = frozenset(item["context"] for item in items if item.get("is_noisy"))
        if values:
            found.append(Curve(row, {context: sum(x) / len(x) for context, x in sorted(values.items())}, noisy))
    return found


def batches(saved: Saved, quantity: Quantity) -> list[int | None]:
    """Those that were measured, the smallest first; one None if items do not tell."""
    found = {item.get("batch") for row in saved.rows for item in row.items.get(quantity.task, [])}
    return sorted(found, key=lambda batch: batch or 0)


def _belongs(item: dict[str, Any], quantity: Quantity, batch: int | None) -> bool:
    return isinstance(item.get(quantity.field), int | float) and item.get("batch") == batch


def _draw(quantity: Quantity, saved: Saved, ink: Ink) -> Figure | None:
    panels = {batch: curves(saved, quantity, batch) for batch in batches(saved, quantity)[:_MOST_BATCHES]}
    panels = {batch: found for batch, found in panels.items() if found}
    if not panels:
        return None
    has_lines = any(len(curve.values) > 1 for found in panels.values() for curve in found)
    most = max(len(found) for found in panels.values())
    height = 4.2 if has_lines else 1.0 + 0.26 * most
    figure = new_figure(8.4, height * len(panels) if len(panels) > 1 else height, ink)
    for axes, (batch, found) in zip(figure.subplots(len(panels), squeeze=False).flat, panels.items(), strict=True):
        kept = chosen([curve.row for curve in found], MOST_LINES)
        draw: Callable[[Axes, list[Curve], Quantity, Ink], None] = _draw_lines if has_lines else _draw_bars
        notes = [f"batch {batch}" if len(panels) > 1 else "", rest([curve.row for curve in found], kept)]
        dress(axes, ink, title="; ".join(filter(None, notes)))
        draw(axes, [curve for curve in found if curve.row in kept], quantity, ink)
    return figure


def _draw_lines(axes: Axes, found: list[Curve], quantity: Quantity, ink: Ink) -> None:
    contexts = sorted({context for curve in found for context in curve.values})
    for curve in found:
        color, style = ink.of(curve.row), "--" if curve.row.is_peer else "-"
        width = 1.0 if curve.row.is_peer else 1.7
        axes.plot(list(curve.values), list(curve.values.values()), style, color=color, linewidth=width)
        for context, value in curve.values.items():
            face = ink.paper if context in curve.noisy else color
            axes.scatter([context], [value], s=16, facecolor=face, edgecolor=color, zorder=3)
    axes.set(xscale="log", yscale="log", xlabel="tokens in the cache", ylabel=quantity.title)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    _label_ends(axes, found, ink)


def _label_ends(axes: Axes, found: list[Curve], ink: Ink) -> None:
    """Names each line at its end, right of the axes, where names may be moved apart."""
    ends = [(max(curve.values), curve.values[max(curve.values)]) for curve in found]
    low, high = axes.get_ylim()
    heights = axes.transAxes.inverted().transform(axes.transData.transform(ends))[:, 1].tolist()
    gap = 0.045
    for curve, (x, y), height in zip(found, ends, spread(heights, gap, 0.0, 1.0), strict=True):
        axes.annotate(
            f"{curve.row.label}  {_three_digits(y)}", (x, y), xytext=(1.03, height), textcoords="axes fraction",
            size=SIZE, color=ink.of(curve.row), va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": ink.of(curve.row), "linewidth": 0.5, "alpha": 0.5, "shrinkB": 3,
                        "relpos": (0, 0.5)},
        )  # fmt: skip
    axes.set_ylim(low, high)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _draw_bars(axes: Axes, found: list[Curve], quantity: Quantity, ink: Ink) -> None:
    """For a single context: one bar per cache."""
    values = [next(iter(curve.values.values())) for curve in found]
    context = next(iter(found[0].values))
    bars = axes.barh(range(len(found)), values, height=0.62, color=[ink.of(curve.row) for curve in found])
    names = [
        f"{_three_digits(value)}{' (noisy)' if curve.noisy else ''}" for curve, value in zip(found, values, strict=True)
    ]
    axes.bar_label(bars, names, padding=4, color=ink.text, size=SIZE)
    axes.set(
        ylim=(len(found) - 0.4, -0.6), xlabel=f"{quantity.title}, {context:,} tokens", xlim=(0, 1.12 * max(values))
    )
    axes.set_yticks(range(len(found)), [curve.row.label for curve in found])
    axes.grid(visible=False, axis="y")


MEMORY_PLOT = Plot(
    name="memory",
    title="Memory against context",
    about="All that a cache holds at that length; the number is that of the longest.",
    needs="the items of memory",
    draw=partial(_draw, MEMORY),
)
SPEED_PLOT = Plot(
    name="speed",
    title="Decoding speed against context",
    about="Tokens per second behind that many cached tokens; the number is that of the longest. Hollow points were "
    "noisy.",
    needs="the items of speed",
    draw=partial(_draw, SPEED),
)
