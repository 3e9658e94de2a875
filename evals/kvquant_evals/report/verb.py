"""`kvquant report`: its arguments, and what it does with them. Loads what draws only when it runs."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kvquant_evals.error import EvalError

if TYPE_CHECKING:
    from kvquant_evals.report.page import Drawing
    from kvquant_evals.report.plot import Plot
    from kvquant_evals.report.saved import Saved

SUMMARY = "A saved evaluation as a page with plots that opens anywhere, and its table in Markdown."
EXIT_USAGE = 2
PAGE = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("report", metavar="DIR|FILE", help="what `kvquant eval` wrote to --out or --json")
    about = f"where to write {PAGE} and the plots (default: beside the report)"
    parser.add_argument("--out", metavar="DIR", help=about)


def run(options: argparse.Namespace) -> int:
    """Writes the page and prints the table. Returns the exit code: 0, or 2 after one line on standard error."""
    try:
        _write(options)
    except EvalError as error:
        sys.stderr.write(f"kvquant report: {error}\n")
        return EXIT_USAGE
    return 0


def _write(options: argparse.Namespace) -> None:
    from kvquant_evals import table
    from kvquant_evals.report.saved import load

    saved = load("report", options.report)
    if find_spec("matplotlib") is None:
        raise EvalError("plots need matplotlib: pip install 'kvquant-cache[eval]'")
    folder = saved.path.parent if options.out is None else Path(options.out)
    _make(folder)
    left_out = _write_page(saved, folder)
    sys.stdout.write(f"{table.markdown(saved.plain)}\n\n{table.caption(saved.plain)}\n")
    sys.stderr.write(f"kvquant report: wrote {folder / PAGE}\n")
    for reason in left_out:
        sys.stderr.write(f"kvquant report: left out {reason}\n")


def _write_page(saved: Saved, folder: Path) -> list[str]:
    """Which plots are left out, and why. Raises EvalError if the folder cannot be written."""
    from kvquant_evals.report.page import html
    from kvquant_evals.report.plots.catalog import PLOTS

    drawn = {plot: _draw(plot, saved) for plot in PLOTS}
    left_out = [f"{plot.title}: the report lacks {plot.needs}" for plot in PLOTS if drawn[plot] is None]
    files = {f"{plot.name}.png": drawing.light for plot, drawing in drawn.items() if drawing}
    files[PAGE] = html(saved, [drawing for drawing in drawn.values() if drawing], left_out).encode()
    try:
        for name, content in files.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise EvalError(f"out {str(folder)!r} cannot be written: {error}") from error
    return left_out


def _make(folder: Path) -> None:
    """Raises EvalError if the folder cannot be there, before anything is drawn."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvalError(f"out {str(folder)!r} cannot be made: {error}") from error


def _draw(plot: Plot, saved: Saved) -> Drawing | None:
    from kvquant_evals.report.ink import DARK, LIGHT, png
    from kvquant_evals.report.page import Drawing

    light, dark = plot.draw(saved, LIGHT), plot.draw(saved, DARK)
    if light is None or dark is None:
        return None
    return Drawing(plot.title, plot.about, png(light), png(dark))
