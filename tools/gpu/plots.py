"""Plots of a file of results. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpu.report import MODE, OURS, Found, caption, cells, results_of


def draw_ratios(data: Found, path: Path) -> None:
    """How many times as fast as the best bfloat16 contender each format is, against cached tokens."""
    _draw_cells(data, path, "times as fast as the best bf16", _ratio, only_packed=True)


def draw_shares(data: Found, path: Path) -> None:
    """The share of a copy's bandwidth at which each contender reads its states, against cached tokens."""
    _draw_cells(data, path, "bytes read, share of a copy's bandwidth", _share, only_packed=False)


def _ratio(row: Found) -> float | None:
    found: float | None = row[MODE].get("ratio_over_bf16")
    return found


def _share(row: Found) -> float | None:
    found: float = row[MODE]["share_of_copy"]
    return found


def _draw_cells(data: Found, path: Path, what: str, number: Callable[[Found], float | None], only_packed: bool) -> None:
    """A panel per shape and batch; the rows of all panels have one scale."""
    found = cells(data)
    shapes = list(dict.fromkeys(cell["shape"]["name"] for cell in found))
    batches = sorted({cell["batch"] for cell in found})
    figure = Figure(figsize=(4.6 * len(batches), 3.8 * len(shapes)), layout="constrained")
    grid = figure.subplots(len(shapes), len(batches), squeeze=False, sharey=True)
    for i, shape in enumerate(shapes):
        for j, batch in enumerate(batches):
            of_panel = [cell for cell in found if (cell["shape"]["name"], cell["batch"]) == (shape, batch)]
            for label, points in _lines(of_panel, number, only_packed).items():
                _plot(grid[i][j], label, points)
            grid[i][j].axhline(1.0, color="black", linewidth=0.8)
            _label(grid[i][j], of_panel, f"{shape}, batch {batch}", what if j == 0 else "")
    _finish(figure, data, path)


def _lines(
    found: list[Found], number: Callable[[Found], float | None], only_packed: bool
) -> dict[str, list[tuple[int, float]]]:
    """Points (context, number) by contender."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for cell in sorted(found, key=lambda cell: cell["context"]):
        for row in cell["rows"]:
            value = number(row) if MODE in row and (row["is_packed"] or not only_packed) else None
            if value is not None:
                lines.setdefault(row["contender"], []).append((cell["context"], value))
    return lines


def draw_decoding(data: Found, path: Path) -> None:
    """Tokens per second, and the size of the caches, against cached tokens; a column per batch."""
    found = sorted(results_of(data, "decoding").values(), key=lambda unit: unit["context"])
    batches = sorted({unit["batch"] for unit in found})
    figure = Figure(figsize=(5.6 * len(batches), 7.6), layout="constrained")
    grid = figure.subplots(2, len(batches), squeeze=False)
    for j, batch in enumerate(batches):
        units = [unit for unit in found if unit["batch"] == batch]
        title = f"{units[0]['model']}, batch {batch}"
        _draw_series(grid[0][j], units, title, "tokens per second", lambda row: row["tokens_per_second"])
        _draw_series(grid[1][j], units, title, "MB of the cache", lambda row: row["cache_bytes"] / 1e6 or None)
    _finish(figure, data, path)


def _draw_series(
    axes: Axes, units: list[Found], title: str, what: str, number: Callable[[Found], float | None]
) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for unit in units:
        for row in unit["rows"]:
            if (value := number(row)) is not None:
                lines.setdefault(row["contender"], []).append((unit["context"], value))
    for label, points in lines.items():
        _plot(axes, label, points)
    _label(axes, units, title, what)
    axes.set_ylim(bottom=0)


def _plot(axes: Axes, label: str, points: list[tuple[int, float]]) -> None:
    line, width = ("-", 2) if label.startswith(OURS) else ("--", 1)
    axes.plot(*zip(*points, strict=True), line, marker="o", label=label, linewidth=width)


def _label(axes: Axes, found: list[Found], title: str, y: str) -> None:
    """The frame of a panel that shows what was found at some contexts."""
    contexts = sorted({unit["context"] for unit in found})
    axes.set(title=title, xlabel="cached tokens per row", ylabel=y, xscale="log")
    axes.set_xticks(contexts, [f"{tokens:,}" for tokens in contexts])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


def _finish(figure: Any, data: Found, path: Path) -> None:
    figure.suptitle(caption(data), fontsize=8)
    figure.savefig(path, dpi=110)
