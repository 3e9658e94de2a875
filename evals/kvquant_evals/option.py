"""Options that several verbs share: how they are read, and how the files that they name are written."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvquant.config import Bits, parse_bits
from kvquant_evals.error import EvalError

BitsOption = Bits | tuple[Bits, Bits]


def parse_bits_option(text: str) -> BitsOption:
    """Bits as on a command line: 4, fp8 or 8,4. Raises ArgumentTypeError for anything else."""
    try:
        return parse_bits(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_count(text: str) -> int:
    """A positive whole number. Raises ArgumentTypeError for anything else."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def check_writable(argument: str, path: str | None) -> None:
    """Raises EvalError if a file could not be written in the end. Leaves an existing one as it is."""
    if path is None:
        return
    try:
        with Path(path).open("a"):
            pass
    except OSError as error:
        raise EvalError(f"{argument} {path!r} cannot be written: {error}") from error


def write_json(path: str | None, report: dict[str, Any]) -> None:
    """Raises EvalError if the file cannot be written."""
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise EvalError(f"json {path!r} cannot be written: {error}") from error
