"""Units of work before a deadline: what one of them raises is noted, and the next one begins."""

from __future__ import annotations

import gc
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from triton.errors import TritonError

from gpu.results import Results

Made = TypeVar("Made")

FAILURES: tuple[type[Exception], ...] = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TritonError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Unit:
    """One thing to measure: its name, what gives its result in plain numbers and strings, its least time in seconds."""

    name: str
    run: Callable[[], dict[str, Any]]
    seconds: float = 3.0


class DeviceLostError(Exception):
    """The device answers no more in this process."""


def run_units(units: Iterable[Unit], part: str, results: Results, deadline: float) -> None:
    """Runs what is not done yet and can be done before the deadline, a time.time().

    Raises DeviceLostError after a failure that the device does not recover from.
    """
    section = results.section(part)
    _give_up_running(section)
    for unit in units:
        if unit.name in section["results"] or unit.name in section["failed"]:
            continue
        if time.time() + unit.seconds > deadline:
            section["skipped"][unit.name] = "no time left"
            continue
        section["running"] = unit.name
        results.write()
        begin = time.time()
        _run(unit, section)
        section["running"] = None
        results.write()
        sys.stdout.write(f"{part}: {unit.name}: {time.time() - begin:.1f} s\n")
        sys.stdout.flush()
        free_memory()
    results.write()


def _give_up_running(section: dict[str, Any]) -> None:
    """Notes the unit in which an earlier process ended as failed."""
    if section["running"] is not None:
        section["failed"][section["running"]] = "the process ended"
        section["running"] = None


def _run(unit: Unit, section: dict[str, Any]) -> None:
    begin = time.time()
    with Heard() as heard:
        try:
            found = unit.run()
        except FAILURES:
            section["failed"][unit.name] = traceback.format_exc(limit=-6)
            return
    said = {"kvquant_said": heard.messages} if heard.messages else {}
    section["results"][unit.name] = {"seconds": round(time.time() - begin, 2), **found, **said}


def free_memory() -> None:
    """Returns what is unused to the device. Raises DeviceLostError if it does not answer."""
    gc.collect()
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            raise DeviceLostError(str(error)) from error


def made(makers: Mapping[str, Callable[[], Made]], why_not: dict[str, str]) -> dict[str, Made]:
    """What can be made, by label; of the rest, the reason goes into why_not."""
    found: dict[str, Made] = {}
    for label, make in makers.items():
        _make(label, make, found, why_not)
    return found


def _make(label: str, make: Callable[[], Made], found: dict[str, Made], why_not: dict[str, str]) -> None:
    try:
        found[label] = make()
    except FAILURES as error:
        why_not[label] = first_line(error)


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    lines = str(error).strip().split("\n")
    return f"{type(error).__name__}: {lines[0]}"


class Heard(logging.Handler):
    """What kvquant logs in the meantime: among it, why a kernel was not used."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> Heard:
        logging.getLogger("kvquant").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("kvquant").removeHandler(self)
