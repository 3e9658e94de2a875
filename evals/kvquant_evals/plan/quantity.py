"""Numbers of tokens and bytes as people write them: 128k, 80GB, 40GiB, 10%."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

from kvquant_evals.error import EvalError

_THOUSANDS = {"": 1, "k": 2**10, "m": 2**20}  # of tokens: a context of 128k is 131,072
_BYTES = {f"{power}B": 1000**i for i, power in enumerate(("", "K", "M", "G", "T"))} | {
    f"{power}iB": 1024**i for i, power in enumerate(("K", "M", "G", "T"), start=1)
}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z%]*)", re.ASCII)


def parse_tokens(argument: str, text: str) -> int:
    """A number of tokens: 131072, 128k or 1M, where k is 1,024. Raises EvalError for anything else."""
    number, unit = _split(text)
    tokens = number * _THOUSANDS.get(unit.lower(), 0)
    if tokens < 1 or tokens.denominator != 1:
        raise EvalError(f"{argument} {text!r} is not a number of tokens; write 131072, 128k or 1M, for example")
    return int(tokens)


def parse_count(argument: str, text: str) -> int:
    """A positive whole number. Raises EvalError for anything else."""
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise EvalError(f"{argument} {text!r} is not a positive whole number")
    return int(text)


def parse_whole(argument: str, text: str) -> int:
    """A whole number that is not negative. Raises EvalError for anything else."""
    return 0 if text == "0" else parse_count(argument, text)


def parse_bytes(argument: str, text: str) -> int:
    """A number of bytes with its unit: 80GB is 80 * 1000**3, 40GiB is 40 * 1024**3. Raises EvalError otherwise."""
    number, unit = _split(text)
    if unit not in _BYTES or number <= 0:
        raise EvalError(f"{argument} {text!r} is not a size; write 80GB (decimal) or 40GiB (binary), for example")
    return int(number * _BYTES[unit])


def parse_share(argument: str, text: str, whole: int) -> int:
    """Bytes, as a size or as a percentage of `whole`. Raises EvalError for anything else."""
    number, unit = _split(text)
    if unit == "%" and 0 <= number <= 100:
        return int(whole * number / 100)
    if unit not in _BYTES:
        raise EvalError(f"{argument} {text!r} is neither a percentage nor a size; write 10% or 8GB, for example")
    return int(number * _BYTES[unit])


def format_bytes(size: int) -> str:
    """A size in the binary unit that suits it: 40.00 GiB."""
    power = max(0, min(4, (size.bit_length() - 1) // 10))
    if power == 0:
        return f"{size} B"
    return f"{size / 1024**power:,.2f} {'KMGT'[power - 1]}iB"


def _split(text: str) -> tuple[Fraction, str]:
    found = _NUMBER.fullmatch(text.strip())
    return (Fraction(Decimal(found[1])), found[2]) if found else (Fraction(0), "?")
