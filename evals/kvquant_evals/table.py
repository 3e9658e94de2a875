"""The table of an evaluation, as plain text and as Markdown, from a report as it is in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def header(report: dict[str, Any]) -> list[str]:
    return ["cache", *(column["title"] for column in report["columns"])]


def cells(report: dict[str, Any]) -> list[list[str]]:
    """One line of text cells per row. The first row is full precision."""
    rows = report["rows"]
    return [
        [row["label"], *(_cell(row["scores"], rows[0]["scores"], column) for column in report["columns"])]
        for row in rows
    ]


def _cell(scores: dict[str, float], full: dict[str, float], column: dict[str, Any]) -> str:
    """Empty where there is no score: what a peer's cache could not do, and what full precision is the measure of."""
    name = column["score"]
    if name not in scores or (scores is full and not column["full"]):
        return ""
    score = scores[name] / full[name] - 1 if column["is_relative"] else scores[name]
    return format(score, column["spec"])


def plain(report: dict[str, Any]) -> str:
    """The table of a report in aligned columns."""
    return aligned([header(report), *cells(report)])


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first to the left, the others to the right."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def markdown(report: dict[str, Any]) -> str:
    return markdown_table([header(report), *cells(report)])


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first line is the header."""
    rule = ["---"] + ["---:"] * (len(lines[0]) - 1)
    return "\n".join(f"| {' | '.join(map(_escaped, line))} |" for line in (lines[0], rule, *lines[1:]))


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def caption(report: dict[str, Any]) -> str:
    """What was measured on what, in one line."""
    settings, found, full = report["settings"], report["versions"], report["rows"][0]
    parts = []
    if "scored_tokens" in full["scores"]:
        count = f"{settings['segments']} times " if settings["segments"] > 1 else ""
        scored = int(full["scores"]["scored_tokens"])
        parts.append(f"{count}{settings['tokens']} tokens in chunks of {settings['chunk']} ({scored} scored)")
    if "questions" in full["scores"]:
        parts.append(f"{int(full['scores']['questions'])} needle questions")
    return (
        f"{', '.join([report['model'], *parts])}, seed {settings['seed']}; kvquant {found['kvquant']}, "
        f"transformers {found['transformers']}, torch {found['torch']}, {report['machine']['threads']} threads"
    )
