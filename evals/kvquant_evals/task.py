"""What an evaluation task is, and how tasks are found: one file in tasks/, with its TASK."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers import Cache

from kvquant_evals.model import Source, Subject


@dataclass(frozen=True)
class Settings:
    """What is measured.

    tokens: length of the text for perplexity; chunk: tokens per forward; skip: leading tokens that are not scored.
    needles: facts per document; contexts: document lengths in tokens; documents: documents per length.
    """

    tokens: int = 4096
    chunk: int = 128
    skip: int = 256
    offset: int = 20_000
    needles: int = 6
    contexts: tuple[int, ...] = (512, 1024)
    documents: int = 3
    seed: int = 0


class Bar(Protocol):
    def update(self, count: int) -> Any: ...


@dataclass(frozen=True)
class Run:
    """One cache's turn at a task.

    label: the cache's name in the table; new_cache: makes an empty cache of that kind; open_bar: a progress bar for
    (title, total, unit); baseline: what the task gave for full precision, None during that turn itself.
    """

    subject: Subject
    text: str
    settings: Settings
    label: str
    new_cache: Callable[[], Cache]
    open_bar: Callable[[str, int, str], AbstractContextManager[Bar]]
    baseline: Outcome | None = None


@dataclass(frozen=True)
class Outcome:
    """What a task found: scores for the table, one dict per item for the JSON, and evidence for later turns only."""

    scores: dict[str, float]
    items: list[dict[str, Any]]
    evidence: Any = field(default=None, repr=False)


class Task(Protocol):
    @property
    def name(self) -> str: ...

    def check(self, source: Source, text: str, settings: Settings) -> None:
        """Raises EvalError if the task cannot be done with these."""

    def run(self, run: Run) -> Outcome: ...


def discover() -> list[Task]:
    """All tasks, by name. Raises ImportError naming the file if one lacks its TASK, or two share a name."""
    from kvquant_evals import tasks

    found: dict[str, Task] = {}
    for module_name in _modules(tasks.__path__):
        module = importlib.import_module(f"{tasks.__name__}.{module_name}")
        task: Task | None = getattr(module, "TASK", None)
        if task is None:
            raise ImportError(f"{module.__file__} defines no TASK")
        if task.name in found:
            raise ImportError(f"{module.__file__} defines a second task named {task.name!r}")
        found[task.name] = task
    return [found[name] for name in sorted(found, reverse=True)]


def _modules(path: Any) -> Iterator[str]:
    return (info.name for info in pkgutil.iter_modules(path))
