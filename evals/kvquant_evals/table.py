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
    scores = dict(row["scores"])
    if row is full:
        scores = {name: score for name, score in scores.items() if name not in ("kl_mean", "kl_p99", "top1")}
    elif "perplexity" in scores:
        scores["change"] = scores["perplexity"] / full["scores"]["perplexity"] - 1
    formats = {
        "perplexity": ".4f",
        "change": "+.2%",
        "kl_mean": ".5f",
        "kl_p99": ".5f",
        "top1": ".2%",
        **{f"retrieval_{context}": ".2f" for context in settings["contexts"]},
        "bytes_per_token": ",.0f",
        "effective_bits": ".2f",
    }
    # What a peer's cache could not do has no score.
    return [row["label"], *(format(scores[name], spec) if name in scores else "" for name, spec in formats.items())]


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
