"""lm-eval's tasks by name, loaded with their data."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from datasets.exceptions import DatasetsError
from jinja2.exceptions import TemplateError
from lm_eval.tasks import TaskManager

from kvquant_evals.error import EvalError

# What comes of a dataset that is not there, not reachable or not as the task expects it, or of a package it needs.
_LOAD_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    RuntimeError,
    DatasetsError,
    TemplateError,
)


def is_known(name: str, folder: str | None = None) -> bool:
    """Whether lm-eval has a task, a group or a tag of this name. folder: where to look for it first."""
    return _manager_of(name, folder) is not None


@cache
def load(name: str, folder: str | None, shots: int | None) -> dict[str, Any]:
    """lm-eval's task of this name, or those of this group or tag, by their names.

    shots: examples before each document, None for what the task says. Raises EvalError if something cannot be loaded.
    """
    manager = _manager_of(name, folder)
    assert manager is not None
    try:
        tasks: dict[str, Any] = manager.load([name])["tasks"]
    except _LOAD_ERRORS as error:
        first_line = str(error).strip().partition("\n")[0]
        raise EvalError(f"task {name!r} of lm-eval cannot be loaded: {type(error).__name__}: {first_line}") from error
    for task in tasks.values():
        _set_shots(task, shots)
    return tasks


def _set_shots(task: Any, shots: int | None) -> None:
    """As lm-eval's own --num_fewshot, which leaves tasks alone that say 0."""
    own = task.get_config("num_fewshot")
    if own != 0:
        task.set_config(key="num_fewshot", value=(own or 0) if shots is None else shots)


def _manager_of(name: str, folder: str | None) -> TaskManager | None:
    """Where a task of this name is described. That of lm-eval's own tasks takes seconds to make."""
    for place in dict.fromkeys((folder, None)):
        manager = _manager(place)
        if name in manager.all_tasks:
            return manager
    return None


@cache
def _manager(folder: str | None) -> TaskManager:
    """The tasks in a folder, or lm-eval's own."""
    # It tells of each name that two of its files share, and of each metric that a task leaves to the defaults.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return TaskManager(include_path=folder, include_defaults=folder is None)
