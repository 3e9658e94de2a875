"""The file of results, which is written anew with each of them. Imports nothing that takes long."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


class Results:
    """A JSON file. Every change is written at once, so that nothing done is lost with a process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.data: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def section(self, part: str) -> dict[str, Any]:
        """What is known of a part: results, failures and skipped units by name, the one that is running, and deaths."""
        empty: dict[str, Any] = {"results": {}, "failed": {}, "skipped": {}, "running": None, "deaths": []}
        found: dict[str, Any] = self.data.setdefault("parts", {}).setdefault(part, empty)
        return found

    def write(self) -> None:
        write_json(self.path, self.data)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes a file that is never seen half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps(_plain(data), indent=1, allow_nan=False) + "\n")
    draft.replace(path)


def _plain(value: Any) -> Any:
    """The value with numbers that JSON has not, NaN and the infinities, as strings."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
