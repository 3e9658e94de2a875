"""What an evaluation has found so far: in memory, and in a folder if it is to go on after an interruption."""

from __future__ import annotations

import json
import os
import platform
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvquant_evals.error import EvalError
from kvquant_evals.task import Finding, Item, Task

IDENTITY = "run.json"
REPORT = "report.json"


@dataclass(frozen=True)
class Record:
    """What one cache gave for one item, or why it gave nothing."""

    task: str
    item: str
    label: str
    values: dict[str, Any] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)
    failure: str | None = None

    @property
    def finding(self) -> Finding:
        return Finding(self.values, self.series)

    @property
    def path(self) -> Path:
        """Where it lies in the folder. A label may hold anything, so its file's name also has its checksum."""
        plain = re.sub(r"[^a-z0-9.]+", "-", self.label.lower()).strip("-.")
        return Path(
            "items", self.task.replace("/", "-"), self.item, f"{plain}-{zlib.crc32(self.label.encode()):08x}.json"
        )


class Results:
    """Records by task, item and label. With a folder, each is written there as soon as it is there.

    Raises EvalError if the folder cannot be used.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._records: dict[tuple[str, str, str], Record] = {}
        self.read()

    def read(self) -> None:
        """Takes all records in the folder, also those of other processes."""
        if self.folder is None:
            return
        with _usable(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(self.folder.glob("items/*/*/*.json")):
                record = Record(**json.loads(path.read_text()))
                self._records[record.task, record.item, record.label] = record

    def identify(self, identity: dict[str, Any]) -> None:
        """Says what the records are of. Raises EvalError if those in the folder are of something else."""
        if self.folder is None:
            return
        path = self.folder / IDENTITY
        with _usable(self.folder):
            if not path.exists():
                _write(path, identity)
            found = _flat(json.loads(path.read_text()))
        _check_same(_flat(json.loads(json.dumps(identity))), found, self.folder)

    def find(self, task: Task, item: Item, label: str) -> Record | None:
        return self._records.get((task.name, item.name, label))

    def of(self, task: Task, items: Sequence[Item], label: str) -> list[Record]:
        """The records of items that all are done."""
        return [self._records[task.name, item.name, label] for item in items]

    def add(self, record: Record) -> None:
        # Through JSON in any case, so that scores are the same with and without a folder.
        record = Record(**json.loads(json.dumps(vars(record))))
        self._records[record.task, record.item, record.label] = record
        if self.folder is not None:
            with _usable(self.folder):
                _write(self.folder / record.path, vars(record))

    def write_report(self, report: dict[str, Any]) -> None:
        if self.folder is not None:
            with _usable(self.folder):
                _write(self.folder / REPORT, report, indent=1)


@contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """Raises EvalError for what goes wrong with the folder's files."""
    try:
        yield
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise EvalError(f"out {str(folder)!r} cannot be used: {error}") from error


def _check_same(ours: dict[str, Any], theirs: dict[str, Any], folder: Path) -> None:
    """Raises EvalError naming the first thing in which two identities differ."""
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            raise EvalError(
                f"out {str(folder)!r} holds an evaluation with {name} {theirs.get(name)!r}, and this one has "
                f"{ours.get(name)!r}; give another folder, or the same options as there"
            )


def _flat(plain: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{name}.{inner}" if inner else name: value
        for name, part in plain.items()
        for inner, value in (part.items() if isinstance(part, dict) else [("", part)])
    }


def _write(path: Path, plain: dict[str, Any], indent: int | None = None) -> None:
    """The whole file or nothing, also if the process ends meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{platform.node()}.{os.getpid()}")
    unfinished.write_text(json.dumps(plain, indent=indent) + "\n")
    unfinished.replace(path)
