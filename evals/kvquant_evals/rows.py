"""What was found about each cache, in rows that can be compared: all caches on the same items."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from transformers import Cache, DynamicCache

from kvquant import QuantCache, QuantConfig, __version__
from kvquant_evals.model import Subject
from kvquant_evals.results import Record, Results
from kvquant_evals.settings import Settings
from kvquant_evals.task import Item, Task

FULL_PRECISION = "full precision"


@dataclass(frozen=True)
class Contender:
    """A kind of cache under evaluation.

    quant: its configuration, if it is a QuantCache. is_peer: whether what it cannot do leaves a gap in its row, instead
    of ending the run.
    """

    label: str
    new_cache: Callable[[], Cache]
    quant: QuantConfig | None = None
    is_peer: bool = False

    @staticmethod
    def quantized(label: str, quant: QuantConfig, subject: Subject) -> Contender:
        return Contender(label, partial(QuantCache, quant=quant, config=subject.model.config), quant)

    @staticmethod
    def full_precision(subject: Subject) -> Contender:
        return Contender(FULL_PRECISION, partial(DynamicCache, config=subject.model.config))


@dataclass(frozen=True)
class Row:
    """All that was found about one cache.

    items: values by task. failures: why there are no scores of a task, by its name. faults: by task, why the cache is
    broken rather than coarse.
    """

    label: str
    quant: dict[str, Any] | None
    scores: dict[str, float]
    items: dict[str, list[dict[str, Any]]]
    failures: dict[str, str] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)
    is_peer: bool = False

    @property
    def is_untested(self) -> bool:
        """Whether a quantized cache never held a packed page, so that its scores say nothing about it.

        Perplexity, memory and tasks of lm-eval can tell.
        """
        told = [score for name, score in self.scores.items() if name.endswith(("packed_bytes", "_packed"))]
        told += [item["parts"]["codes"] for item in self.items.get("memory", [])]
        return self.quant is not None and bool(told) and not any(told)


@dataclass(frozen=True)
class Origin:
    """What was evaluated on what. device: its type; attention: transformers' name of it; text: its SHA-256."""

    model: str
    dtype: str
    device: str
    attention: str | None
    text: str

    @staticmethod
    def of(subject: Subject, text: str) -> Origin:
        model, digest = subject.model, hashlib.sha256(text.encode()).hexdigest()
        attention = model.config._attn_implementation
        return Origin(subject.source.name, str(model.dtype), model.device.type, attention, digest)


@dataclass(frozen=True)
class Report:
    """Finished rows, with what is needed to repeat them. `is_complete` is False if something is still to be done."""

    origin: Origin
    settings: Settings
    tasks: list[Task]
    rows: list[Row]
    is_complete: bool

    @property
    def broken(self) -> list[Row]:
        """Our rows that fail a task's sanity check. How bad those of peers are is what they are there to show."""
        return [row for row in self.rows if row.faults and not row.is_peer]

    def to_dict(self) -> dict[str, Any]:
        columns = [column for task in self.tasks for column in task.columns(self.settings)]
        return {
            **asdict(self.origin),
            "settings": asdict(self.settings),
            "versions": versions(),
            "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
            "tasks": [task.name for task in self.tasks],
            "columns": [asdict(column) for column in sorted(columns, key=lambda column: column.is_cost)],
            "is_complete": self.is_complete,
            "rows": [asdict(row) | {"is_untested": row.is_untested} for row in self.rows],
        }


def report(
    origin: Origin,
    settings: Settings,
    jobs: Sequence[tuple[Task, Item]],
    contenders: Sequence[Contender],
    results: Results,
) -> Report:
    """A row per contender, of the items that all of them have done; no rows before there is one."""
    done = [job for job in jobs if all(results.find(*job, contender.label) for contender in contenders)]
    tasks = list(dict.fromkeys(task for task, _ in done))
    rows: list[Row] = []
    for contender in contenders if done else ():
        found = {
            task: results.of(task, [item for owner, item in done if owner is task], contender.label) for task in tasks
        }
        rows.append(_row(contender, found, settings, rows[0].scores if rows else {}))
    return Report(origin, settings, tasks, rows, is_complete=len(done) == len(jobs))


def versions() -> dict[str, str]:
    return {
        "kvquant": __version__,
        "transformers": transformers.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def _row(contender: Contender, records: dict[Task, list[Record]], settings: Settings, full: dict[str, float]) -> Row:
    """`full` are the scores of full precision; empty for its own row."""
    scores: dict[str, float] = {}
    failures: dict[str, str] = {}
    faults: dict[str, str] = {}
    for task, found in records.items():
        failure = next((record.failure for record in found if record.failure), None)
        if failure:
            failures[task.name] = failure
            continue
        own = task.scores([record.finding for record in found], settings)
        fault = task.fault(own) if full else None
        faults |= {task.name: fault} if fault else {}
        scores |= own
    if contender.is_peer and contender.quant is None and not scores.get("packed_bytes"):
        scores |= _bits_by_bytes(scores, full)
    items = {task.name: [record.values for record in found if not record.failure] for task, found in records.items()}
    quant = contender.quant.to_dict() if contender.quant else None
    return Row(contender.label, quant, scores, items, failures, faults, contender.is_peer)


def _bits_by_bytes(scores: dict[str, float], full: dict[str, float]) -> dict[str, float]:
    """The bits per number of a cache that does not count its numbers: they are as many as full precision holds."""
    if "bytes_per_token" not in scores:
        return {}
    return {"effective_bits": full["effective_bits"] * scores["bytes_per_token"] / full["bytes_per_token"]}
