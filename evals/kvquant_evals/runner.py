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
from kvquant_evals.task import Bar, Outcome, Run, Settings, discover

FULL_PRECISION = "full precision"

# Mean KL in nats beyond which a cache is broken rather than coarse: at one nat the text is no longer the model's.
BROKEN_KL = 1.0


@dataclass(frozen=True)
class Contender:
    """A kind of cache under evaluation."""

    label: str
    new_cache: Callable[[], Cache]
    quant: QuantConfig | None = None

    @staticmethod
    def quantized(label: str, quant: QuantConfig, subject: Subject) -> Contender:
        return Contender(label, partial(QuantCache, quant=quant, config=subject.model.config), quant)


@dataclass(frozen=True)
class Row:
    """All that was found about one cache."""

    label: str
    quant: dict[str, Any] | None
    scores: dict[str, float]
    items: dict[str, list[dict[str, Any]]]

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
        return [row for row in self.rows if row.is_broken]

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "settings": asdict(self.settings),
            "versions": versions(),
            "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
            "is_complete": self.is_complete,
            "rows": [asdict(row) | {"is_broken": row.is_broken} for row in self.rows],
        }


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
        outcomes: dict[str, Outcome] = {}
        for task in tasks:
            baseline = baselines.get(task.name)
            run = Run(subject, text, settings, contender.label, contender.new_cache, open_bar, baseline)
            outcomes[task.name] = task.run(run)
        baselines = baselines or outcomes
        report.rows.append(_row(contender, outcomes))
    report.is_complete = True


def versions() -> dict[str, str]:
    return {
        "kvquant": __version__,
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _row(contender: Contender, outcomes: dict[str, Outcome]) -> Row:
    scores = {name: score for outcome in outcomes.values() for name, score in outcome.scores.items()}
    items = {name: outcome.items for name, outcome in outcomes.items()}
    return Row(contender.label, contender.quant.to_dict() if contender.quant else None, scores, items)
