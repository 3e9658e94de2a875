"""The table of an evaluation, as plain text and as Markdown, from a report's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def header(settings: dict[str, Any]) -> list[str]:
    contexts = [f"needles @{context}" for context in settings["contexts"]]
    return ["cache", "perplexity", "change", "KL mean", "KL p99", "top-1", *contexts, "bytes/token", "bits"]


def cells(rows: Sequence[dict[str, Any]], settings: dict[str, Any]) -> list[list[str]]:
    """One line of text cells per row; changes are relative to the first row, full precision."""
    return [_cells(row, rows[0], settings) for row in rows]


def _cells(row: dict[str, Any], full: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    scores = row["scores"]
    change = scores["perplexity"] / full["scores"]["perplexity"] - 1
    is_full = row is full
    return [
        row["label"],
        f"{scores['perplexity']:.4f}",
        "" if is_full else f"{change:+.2%}",
        "" if is_full else f"{scores['kl_mean']:.5f}",
        "" if is_full else f"{scores['kl_p99']:.5f}",
        "" if is_full else f"{scores['top1']:.2%}",
        *(f"{scores[f'retrieval_{context}']:.2f}" for context in settings["contexts"]),
        f"{scores['bytes_per_token']:,.0f}",
        f"{scores['effective_bits']:.2f}",
    ]


def plain(report: dict[str, Any]) -> str:
    """The table of a report in aligned columns."""
    return aligned([header(report["settings"]), *cells(report["rows"], report["settings"])])


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
    return markdown_table([header(report["settings"]), *cells(report["rows"], report["settings"])])


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first line is the header."""
    rule = ["---"] + ["---:"] * (len(lines[0]) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def caption(report: dict[str, Any]) -> str:
    """What was measured on what, in one line."""
    settings, versions = report["settings"], report["versions"]
    scored = int(report["rows"][0]["scores"]["scored_tokens"])
    questions = int(report["rows"][0]["scores"]["questions"])
    return (
        f"{report['model']}, {settings['tokens']} tokens in chunks of {settings['chunk']} ({scored} scored), "
        f"{questions} needle questions, seed {settings['seed']}; kvquant {versions['kvquant']}, "
        f"transformers {versions['transformers']}, torch {versions['torch']}, {report['machine']['threads']} threads"
    )
