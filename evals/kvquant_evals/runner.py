"""Running an evaluation: item by item, full precision first and then every other cache."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from kvquant_evals.error import EvalError
from kvquant_evals.model import Source, Subject
from kvquant_evals.results import Record, Results
from kvquant_evals.rows import Contender, Origin, Report, report, versions
from kvquant_evals.settings import Settings
from kvquant_evals.task import Finding, Item, Task, Turn

Job = tuple[Task, Item]

# What caches of others raise when a task asks for something that they cannot do.
_PEER_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, AssertionError)


@dataclass(frozen=True)
class Evaluation:
    """What is evaluated on what. contenders: full precision first."""

    subject: Subject
    text: str
    settings: Settings
    contenders: Sequence[Contender]

    def run(self, jobs: Sequence[Job], results: Results, advance: Callable[[str, int], None]) -> None:
        """Does what of the jobs is not in `results` yet. advance: is told what goes on, and tokens done of it."""
        for task, item in jobs:
            bout = _Bout(self, task, item, advance)
            for contender in self.missing(task, item, results):
                results.add(bout.take(contender))

    @property
    def origin(self) -> Origin:
        return Origin.of(self.subject, self.text)

    def identity(self) -> dict[str, Any]:
        """What results have to have in common to be put into one report."""
        weights = fingerprint(self.subject.model)
        return {**asdict(self.origin), "weights": weights, "settings": asdict(self.settings), "versions": versions()}

    def report(self, jobs: Sequence[Job], results: Results) -> Report:
        """A row per cache, of what all of them have done."""
        return report(self.origin, self.settings, jobs, self.contenders, results)

    def missing(self, task: Task, item: Item, results: Results) -> list[Contender]:
        """The caches that have not done an item yet."""
        return [contender for contender in self.contenders if results.find(task, item, contender.label) is None]

    def tokens(self, jobs: Sequence[Job], results: Results) -> int:
        """About how many tokens are still to go through the model."""
        total = 0
        for task, item in jobs:
            missing = self.missing(task, item, results)
            again = bool(missing) and self.contenders[0] not in missing
            total += item.tokens * (len(missing) + again)
        return total


@dataclass
class _Bout:
    """The turns of all caches at one item. full: what full precision found, once that was needed."""

    evaluation: Evaluation
    task: Task
    item: Item
    advance: Callable[[str, int], None]
    full: Finding | None = None

    def take(self, contender: Contender) -> Record:
        """What the contender gives, or why it gives nothing: the model or a peer cannot do it."""
        record = partial(Record, self.task.name, self.item.name, contender.label)
        first, *_ = self.evaluation.contenders
        try:
            # Also after an interruption: what full precision found is needed as evidence, if not as a result.
            self.full = self.full or self._measure(first)
        except EvalError as error:
            return record(failure=str(error))
        try:
            found = self.full if contender is first else self._measure(contender)
        except EvalError as error:
            return record(failure=str(error))
        except _PEER_ERRORS as error:
            if not contender.is_peer:
                raise
            return record(failure=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        return record(found.values, found.series)

    def _measure(self, contender: Contender) -> Finding:
        title = f"{contender.label}: {self.task.name} {self.item.name}"
        self.advance(title, 0)
        evaluation, tell = self.evaluation, partial(self.advance, title)
        subject, text, settings = evaluation.subject, evaluation.text, evaluation.settings
        return self.task.measure(Turn(subject, text, settings, self.item, contender.new_cache, self.full, tell))


def plan(tasks: Sequence[Task], source: Source, text: str, settings: Settings) -> list[Job]:
    """All items of all tasks. Raises EvalError if one cannot be done. Needs no weights."""
    for task in tasks:
        task.check(source, text, settings)
    return [(task, item) for task in tasks for item in task.items(source, text, settings)]


def fingerprint(model: PreTrainedModel) -> int:
    """A checksum of a few numbers of each parameter, which tells other weights of the same name."""
    found = 0
    for weight in model.parameters():
        some = weight.detach().flatten()[:: max(1, weight.numel() // 16)][:16]
        found = zlib.crc32(some.to("cpu", torch.float32).numpy().tobytes(), found)
    return found


def tokens_per_second(subject: Subject, text: str, chunk: int) -> float:
    """The speed of forward passes without a cache, the second of two."""
    ids = subject.encode(text)[:, :chunk]
    seconds = 0.0
    for _ in range(2):
        begin = time.perf_counter()
        with torch.inference_mode():
            subject.model(ids, use_cache=False).logits.sum().item()
        seconds = time.perf_counter() - begin
    return ids.shape[1] / seconds
