"""A report as one HTML file: no script, and nothing that lies elsewhere. All that it shows is escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from kvquant_evals import table
from kvquant_evals.report.meaning import meaning, setting
from kvquant_evals.report.rank import SizeClass, best_cells, classes
from kvquant_evals.report.saved import Saved, SavedRow
from kvquant_evals.report.style import CSS

# Even markup that slipped through could load or run nothing.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Drawing:
    """A plot as PNG files for light and dark screens."""

    title: str
    about: str
    light: bytes
    dark: bytes


def html(saved: Saved, drawings: Sequence[Drawing], left_out: Sequence[str]) -> str:
    """The whole page. left_out: which plots there are not, and why."""
    title = f"KV caches of {escape(saved.model)}"
    body = [
        _heading(saved, title),
        _cards(saved),
        _section("All caches", _table(saved)),
        _troubles(saved),
        _section("Plots", _figures(drawings), _list("soft", (f"Left out: {reason}" for reason in left_out))),
        _section("How it was measured", *_measured(saved)),
        _section("What the columns mean", _columns(saved)),
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{CSS}</style>\n</head>\n<body>\n{''.join(body)}</body>\n</html>\n"
    )


def _heading(saved: Saved, title: str) -> str:
    alarm = "The evaluation is not finished: all scores are of the items that every cache has done so far."
    unfinished = "" if saved.is_complete else f'<p class="alarm">{alarm}</p>\n'
    return (
        f'<header>\n<p class="kind">kvquant evaluation</p>\n<h1>{title}</h1>\n'
        f'<p class="soft">{escape(table.caption(saved.plain))}</p>\n'
        f"{unfinished}</header>\n"
    )


def _cards(saved: Saved) -> str:
    found = [(group, leader) for group in classes(saved) if (leader := group.leader())]
    cards = "".join(_card(saved, group, leader) for group, leader in found)
    return f'<div class="cards">\n{cards}</div>\n' if cards else ""


def _card(saved: Saved, group: SizeClass, row: SavedRow) -> str:
    """The row of a class that is nearest to full precision, with what it costs."""
    facts = [f"mean KL {row.scores['kl_mean']:.2g}"]
    bits, size, full = row.score("effective_bits"), row.score("bytes_per_token"), saved.full.score("bytes_per_token")
    facts += [f"{bits:.1f} bits"] if bits else []
    facts += [f"{size / full:.0%} of the memory"] if size and full else []
    return (
        f'<div class="card"><span class="soft">Lowest KL, {escape(group.title)}</span>'
        f'<b class="{_kind(row)}"><span class="dot"></span>{escape(row.label)}</b>'
        f'<span class="soft figure">{escape(", ".join(facts))}</span></div>\n'
    )


def _table(saved: Saved) -> str:
    cells = {line[0]: line for line in table.cells(saved.plain)}
    best = best_cells(saved)
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in table.header(saved.plain))
    lines = [_row(saved.full, cells, best)]
    for group in classes(saved):
        lines.append(f'<tr class="class"><th scope="rowgroup" colspan="{len(cells[saved.full.label])}">')
        lines.append(f"{escape(group.title)}</th></tr>\n")
        lines += [_row(row, cells, best) for row in group.rows]
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{"".join(lines)}</tbody>\n</table>'
        "</div>\n"
        '<p class="soft">Bold: the best of those of about the same size. A circle is a cache of kvquant, an orange '
        "square somebody else's. An empty cell is what a cache could not do, or what full precision is the measure of. "
        "The best perplexity is the nearest to full precision's."
        "</p>\n"
    )


def _row(row: SavedRow, cells: dict[str, list[str]], best: set[tuple[str, int]]) -> str:
    marks = [text for text, is_so in (("broken", row.faults), ("packed nothing", row.is_untested)) if is_so]
    shown = "".join(f'<span class="mark">{mark}</span>' for mark in marks)
    values = "".join(
        f"<td{' class=best' if (row.label, number) in best else ''}>{escape(cell)}</td>"
        for number, cell in enumerate(cells[row.label][1:], start=1)
    )
    label = f'<th scope="row" class="{_kind(row)}"><span class="dot"></span>{escape(row.label)}{shown}</th>'
    return f"<tr>{label}{values}</tr>\n"


def _kind(row: SavedRow) -> str:
    return "full" if row.is_full else "peer" if row.is_peer else "ours"


def _figures(drawings: Sequence[Drawing]) -> str:
    return f'<div class="plots">\n{"".join(map(_figure, drawings))}</div>\n'


def _figure(drawing: Drawing) -> str:
    light, dark = (f"data:image/png;base64,{base64.b64encode(x).decode()}" for x in (drawing.light, drawing.dark))
    title, about = escape(drawing.title), escape(drawing.about)
    return (
        f"<figure>\n<figcaption><h3>{title}</h3><p>{about}</p></figcaption>\n<picture>"
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="Plot: {title}. {about}"></picture>\n</figure>\n'
    )


def _troubles(saved: Saved) -> str:
    """What caches could not do, and which of them are broken; nothing if all went well."""
    lines = [f"{row.label} has no {task}: {why}" for row in saved.rows for task, why in row.failures.items()]
    faults = {row.label: "; ".join(f"{task}: {why}" for task, why in row.faults.items()) for row in saved.rows}
    lines += [f"{label} is broken, says {why}" for label, why in faults.items() if why]
    lines += [f"{row.label} packed nothing in so few tokens" for row in saved.rows if row.is_untested]
    return _section("What went wrong", _list("", lines)) if lines else ""


def _measured(saved: Saved) -> Iterable[str]:
    yield (
        "<p>Every cache gets the same tokens, documents and questions. Text goes through the model in chunks behind "
        "one growing cache: in a single pass, a prompt's own attention would read exact keys and values, and any cache "
        "at all would score as full precision.</p>\n"
    )
    plain = saved.plain
    settings = [(setting(name), _shown(value)) for name, value in plain["settings"].items()]
    others = [("model", saved.model), *_known(saved.run), ("tasks", _shown(plain["tasks"]))]
    others += [*plain["machine"].items(), *plain["versions"].items()]
    yield f'<div class="pair">{_definitions(settings)}{_definitions(others)}</div>\n'


def _known(run: dict[str, str]) -> list[tuple[str, str]]:
    """Of the text there is only a checksum, of which the beginning will do."""
    return [("SHA-256 of the text", value[:16]) if name == "text" else (name, value) for name, value in run.items()]


def _columns(saved: Saved) -> str:
    found = {column["title"]: (column, meaning(column["score"])) for column in saved.plain["columns"]}
    return _definitions(
        (title, "Change against full precision." if column["is_relative"] else about or f"The score {column['score']}.")
        for title, (column, about) in found.items()
    )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def _section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{''.join(parts)}</section>\n"


def _definitions(pairs: Iterable[tuple[str, Any]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(str(a))}</dt><dd>{escape(str(b))}</dd>' for a, b in pairs)}</dl>\n"


def _list(kind: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>\n' if items else ""
