"""A report that `kvquant eval` has written, read again; it may come from another machine or be unfinished."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvquant_evals.error import EvalError
from kvquant_evals.results import IDENTITY, REPORT

_NEEDED = ("model", "settings", "versions", "machine", "tasks", "columns", "is_complete", "rows")
_NEEDED_SETTINGS = ("tokens", "segments", "chunk", "seed")
_NEEDED_IN_ROWS = ("label", "scores", "items")
_RUN = ("dtype", "device", "attention", "text")  # of a folder's identity, what the report itself does not tell


@dataclass(frozen=True)
class SavedRow:
    """All that was found about one cache. scores: without those that are no numbers."""

    label: str
    scores: dict[str, float]
    items: dict[str, list[dict[str, Any]]]
    failures: dict[str, str]
    faults: dict[str, str]
    is_full: bool
    is_peer: bool
    is_untested: bool

    @property
    def is_ours(self) -> bool:
        return not (self.is_full or self.is_peer)

    @property
    def is_sound(self) -> bool:
        """Whether its scores may be held against those of others."""
        return not (self.faults or self.is_untested)

    def score(self, name: str) -> float | None:
        """A score if there is one and it is a finite number."""
        value = self.scores.get(name)
        return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Saved:
    """A report. plain: as it was written; run: dtype, device, attention and text, as far as they are known."""

    path: Path
    plain: dict[str, Any]
    rows: list[SavedRow]
    run: dict[str, str]

    @property
    def full(self) -> SavedRow:
        return self.rows[0]

    @property
    def model(self) -> str:
        return str(self.plain["model"])

    @property
    def is_complete(self) -> bool:
        return bool(self.plain["is_complete"])


def load(argument: str, given: str) -> Saved:
    """What is in a file, or in the folder of an evaluation. Raises EvalError, naming `argument`, if it is no report."""
    path = Path(given) / REPORT if Path(given).is_dir() else Path(given)
    plain = _read(argument, path)
    lacking = _lacking(plain)
    if lacking:
        raise EvalError(
            f"{argument} {str(path)!r} is no report of this version of kvquant eval: it has no {lacking}; "
            "give a file of --json or a folder of --out"
        )
    if not plain["rows"]:
        raise EvalError(
            f"{argument} {str(path)!r} has no rows: nothing was finished for all caches yet; go on with kvquant eval"
        )
    identity = path.with_name(IDENTITY)
    run = _read(argument, identity) if path.name == REPORT and identity.exists() else {}
    return Saved(path, plain, _rows(plain["rows"]), _known_of_run(run, plain))


def _known_of_run(run: dict[str, Any], plain: dict[str, Any]) -> dict[str, str]:
    return {name: str(source[name]) for name in _RUN for source in (plain, run) if isinstance(source.get(name), str)}


def _read(argument: str, path: Path) -> dict[str, Any]:
    try:
        plain = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise EvalError(f"{argument} {str(path)!r} cannot be read: {error}") from error
    if not isinstance(plain, dict):
        raise EvalError(f"{argument} {str(path)!r} is no report of kvquant eval: it holds no object")
    return plain


def _lacking(plain: dict[str, Any]) -> str | None:
    """The first thing that a report must have and this one has not."""
    for name in _NEEDED:
        if name not in plain:
            return name
    for name in _NEEDED_SETTINGS:
        if name not in plain["settings"]:
            return f"settings.{name}"
    for row in plain["rows"]:
        for name in _NEEDED_IN_ROWS:
            if name not in row:
                return f"rows.{name}"
    return None


def _rows(rows: list[dict[str, Any]]) -> list[SavedRow]:
    return [
        SavedRow(
            label=str(row["label"]),
            scores={name: float(x) for name, x in row["scores"].items() if isinstance(x, int | float)},
            items=row["items"],
            failures=row.get("failures", {}),
            faults=row.get("faults", {}),
            is_full=index == 0,
            is_peer=bool(row.get("is_peer")),
            is_untested=bool(row.get("is_untested")),
        )
        for index, row in enumerate(rows)
    ]
