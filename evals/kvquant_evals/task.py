"""What an evaluation task is, and how tasks are found: one file in tasks/, with its TASK."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers import Cache

from kvquant_evals.error import EvalError
from kvquant_evals.model import Source, Subject
from kvquant_evals.settings import Settings


@dataclass(frozen=True)
class Item:
    """A piece of a task's work that is done in one go and stored once it is done.

    name: unique in its task, and fit to be a file's name. tokens: about how many a cache's turn at it takes through the
    model, to foretell how long it lasts. about: what the task has to know to do it; plain values.
    """

    name: str
    tokens: int
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """What a cache gave for an item.

    values: plain values for the report. series: a number per token or step, kept with the item and left out of the
    report. evidence: for the turns of other caches at the same item, and gone after them.
    """

    values: dict[str, Any]
    series: dict[str, list[float]] = field(default_factory=dict)
    evidence: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class Turn:
    """One cache's turn at an item.

    new_cache: makes an empty cache of that kind. full: what full precision found for the same item, None in its own
    turn. advance: to be told how many tokens went through the model.
    """

    subject: Subject
    text: str
    settings: Settings
    item: Item
    new_cache: Callable[[], Cache]
    full: Finding | None
    advance: Callable[[int], None]


@dataclass(frozen=True)
class Column:
    """A column of the table.

    score: the score's name; spec: its format; full: whether full precision has one too; is_relative: whether its change
    against full precision is shown; is_cost: whether it tells what a cache costs. Costs come last.
    """

    title: str
    score: str
    spec: str
    full: bool = True
    is_relative: bool = False
    is_cost: bool = False


class Task(Protocol):
    """Something that is measured on every cache."""

    @property
    def name(self) -> str: ...

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names for the command line."""

    def check(self, source: Source, text: str, settings: Settings) -> None:
        """Raises EvalError if the task cannot be done with these."""

    def items(self, source: Source, text: str, settings: Settings) -> list[Item]:
        """The work, always the same for the same arguments."""

    def measure(self, turn: Turn) -> Finding: ...

    def scores(self, found: Sequence[Finding], settings: Settings) -> dict[str, float]:
        """What a cache's findings come to. Scores of different tasks have different names."""

    def columns(self, settings: Settings) -> list[Column]: ...

    def fault(self, scores: dict[str, float]) -> str | None:
        """Why a cache with such scores is broken rather than coarse; None if it is not."""


def discover() -> list[Task]:
    """All tasks, perplexity first. Raises ImportError naming the file if one lacks its TASK, or two share a name."""
    from kvquant_evals import tasks

    found: dict[str, Task] = {}
    for module_name in _modules(tasks.__path__):
        module = importlib.import_module(f"{tasks.__name__}.{module_name}")
        task: Task | None = getattr(module, "TASK", None)
        if task is None:
            raise ImportError(f"{module.__file__} defines no TASK")
        for name in (task.name, *task.aliases):
            if name in found:
                raise ImportError(f"{module.__file__} defines a second task named {name!r}")
            found[name] = task
    return sorted(dict.fromkeys(found.values()), key=lambda task: (task.name != "perplexity", task.name))


def find(names: str, include_path: str | None = None) -> list[Task]:
    """The tasks of these names, separated by commas; `all` stands for all of ours. Other names are those of lm-eval.

    include_path: a folder with more tasks of lm-eval. Raises EvalError for a name that is neither.
    """
    known = {name: task for task in discover() for name in (task.name, *task.aliases)}
    found: list[Task] = []
    for name in (name.strip() for name in names.split(",")):
        if name == "all":
            found += discover()
        else:
            found.append(known[name] if name in known else _of_lm_eval(name, include_path))
    return list(dict.fromkeys(found))


def _of_lm_eval(name: str, include_path: str | None) -> Task:
    unknown = f"task {name!r} is unknown; known are {', '.join(task.name for task in discover())}"
    try:
        from kvquant_evals.lm_harness import catalog, task
    except ImportError as error:
        raise EvalError(f"{unknown}; for those of lm-eval: pip install 'kvquant-cache[eval]' ({error})") from error
    if not catalog.is_known(name, include_path):
        raise EvalError(f"{unknown}, and those of lm-eval, which are listed by: lm-eval ls tasks")
    return task.LmEvalTask(name, include_path)


def listing() -> str:
    """What each task measures, for people."""
    lines = []
    for task in discover():
        names = ", ".join((task.name, *task.aliases))
        about = (sys.modules[type(task).__module__].__doc__ or "").strip().partition("\n")[0]
        lines.append(f"{names}: {about}")
    return "\n".join([*lines, "and those of lm-eval, which are listed by: lm-eval ls tasks"])


def _modules(path: Any) -> Iterator[str]:
    """Modules of a folder, without those that are parts of a task: their names begin with an underscore."""
    return (info.name for info in pkgutil.iter_modules(path) if not info.name.startswith("_"))
