"""Running an evaluation: full precision once, then every cache through every task."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from transformers import Cache, DynamicCache

from kvquant import QuantCache, QuantConfig, __version__
from kvquant_evals.model import Source, Subject
from kvquant_evals.task import Bar, Outcome, Run, Settings, Task, discover

FULL_PRECISION = "full precision"

# Mean KL in nats beyond which a cache is broken rather than coarse: at one nat the text is no longer the model's.
BROKEN_KL = 1.0

# What caches of others raise when a task asks for something that they cannot do.
_PEER_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, AssertionError)


@dataclass(frozen=True)
class Contender:
    """A kind of cache under evaluation.

    quant: its configuration, if it is a QuantCache. is_peer: whether a task that it cannot do leaves a gap in its row,
    instead of ending the run.
    """

    label: str
    new_cache: Callable[[], Cache]
    quant: QuantConfig | None = None
    is_peer: bool = False

    @staticmethod
    def quantized(label: str, quant: QuantConfig, subject: Subject) -> Contender:
        return Contender(label, partial(QuantCache, quant=quant, config=subject.model.config), quant)


@dataclass(frozen=True)
class Row:
    """All that was found about one cache. failures: why there are no scores of a task, by its name."""

    label: str
    quant: dict[str, Any] | None
    scores: dict[str, float]
    items: dict[str, list[dict[str, Any]]]
    failures: dict[str, str] = field(default_factory=dict)
    is_peer: bool = False

    @property
    def is_broken(self) -> bool:
        """Whether the cache fails the evaluation's sanity check: its mean KL is beyond BROKEN_KL, or not a number."""
        return not self.scores.get("kl_mean", 0.0) <= BROKEN_KL

    @property
    def is_untested(self) -> bool:
        """Whether a quantized cache never held a packed page, so that its scores say nothing about it."""
        return self.quant is not None and self.scores.get("packed_bytes") == 0


@dataclass
class Report:
    """Finished rows, with what is needed to repeat them. `is_complete` is False after an interruption."""

    model: str
    settings: Settings
    rows: list[Row] = field(default_factory=list)
    is_complete: bool = False

    @property
    def broken(self) -> list[Row]:
        """Our rows that fail the sanity check. How bad those of peers are is what they are there to show."""
        return [row for row in self.rows if row.is_broken and not row.is_peer]

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "settings": asdict(self.settings),
            "versions": versions(),
            "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
            "is_complete": self.is_complete,
            "rows": [asdict(row) | {"is_broken": row.is_broken} for row in self.rows],
        }


@dataclass(frozen=True)
class _Turn:
    """A contender with what its tasks have given so far."""

    contender: Contender
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def take(self, task: Task, run: Run) -> None:
        try:
            self.outcomes[task.name] = task.run(run)
        except _PEER_ERRORS as error:
            if not self.contender.is_peer:
                raise
            first_line = str(error).strip().partition("\n")[0]
            self.failures[task.name] = f"{type(error).__name__}: {first_line}"

    def row(self, full: dict[str, float]) -> Row:
        """The finished row; `full` are the scores of full precision."""
        contender, outcomes = self.contender, self.outcomes
        scores = {name: score for outcome in outcomes.values() for name, score in outcome.scores.items()}
        if contender.is_peer and contender.quant is None:
            scores |= _bits_by_bytes(scores, full)
        items = {name: outcome.items for name, outcome in outcomes.items()}
        quant = contender.quant.to_dict() if contender.quant else None
        return Row(contender.label, quant, scores, items, self.failures, contender.is_peer)


def check(source: Source, text: str, settings: Settings) -> None:
    """Raises EvalError if a task cannot be done with the model, text and settings. Needs no weights."""
    for task in discover():
        task.check(source, text, settings)


def evaluate(
    subject: Subject,
    text: str,
    settings: Settings,
    contenders: Sequence[Contender],
    open_bar: Callable[[str, int, str], AbstractContextManager[Bar]],
    report: Report,
) -> None:
    """Adds a row to `report` for full precision and for each contender, as each is finished."""
    tasks = discover()
    full = Contender(FULL_PRECISION, partial(DynamicCache, config=subject.model.config))
    baselines: dict[str, Outcome] = {}
    for contender in (full, *contenders):
        turn = _Turn(contender)
        for task in tasks:
            baseline = baselines.get(task.name)
            turn.take(task, Run(subject, text, settings, contender.label, contender.new_cache, open_bar, baseline))
        baselines = baselines or turn.outcomes
        report.rows.append(turn.row(report.rows[0].scores if report.rows else {}))
    report.is_complete = True


def versions() -> dict[str, str]:
    return {
        "kvquant": __version__,
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _bits_by_bytes(scores: dict[str, float], full: dict[str, float]) -> dict[str, float]:
    """The bits per number of a cache that does not count its numbers: they are as many as full precision holds."""
    if "bytes_per_token" not in scores:
        return {}
    return {"effective_bits": full["effective_bits"] * scores["bytes_per_token"] / full["bytes_per_token"]}
