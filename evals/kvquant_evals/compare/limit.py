"""What is compared, and how much worse it may be."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Amount:
    """A number, or a share of another one."""

    value: float
    is_share: bool = False

    def of(self, base: float) -> float:
        return self.value * base if self.is_share else self.value

    def __str__(self) -> str:
        return f"{100 * self.value:g}%" if self.is_share else f"{self.value:g}"


def parse_amount(text: str) -> Amount:
    """As on a command line: 0.003 or 1%. Raises ArgumentTypeError for anything else."""
    is_share = text.endswith("%")
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number as 0.003 nor a share as 1%")
    return Amount(value / 100 if is_share else value, is_share)


def parse_increase(text: str) -> Amount:
    """An amount that is not negative, for what says in its name which way is worse."""
    amount = parse_amount(text)
    if amount.value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is negative; give by how much it may get worse, as in 2% or 0.02")
    return amount


@dataclass(frozen=True)
class Measure:
    """A score, or one for each context and batch, whose getting worse matters.

    name: in options; spec: of its values; limit: what its limit means, None if it has none. allowed: by how much it may
    be worse than before unless told otherwise; None for any. is_cost: whether more is worse. from_full: whether its
    limit is for the difference to full precision. in_full: whether it says something about full precision itself.
    rounding: what differs without a cause.
    """

    name: str
    score: str
    spec: str
    limit: str | None
    allowed: Amount | None
    is_cost: bool = True
    from_full: bool = False
    in_full: bool = True
    rounding: float = 0.0

    @property
    def limit_flag(self) -> str:
        return f"--{'max' if self.is_cost else 'min'}-{self.name}"

    @property
    def change_flag(self) -> str:
        return f"--max-{self.name}-{'increase' if self.is_cost else 'decrease'}"

    def includes(self, score: str) -> bool:
        return re.fullmatch(rf"{self.score}(_\d+)*", score) is not None

    def worsening(self, before: float, after: float) -> float:
        """How much worse a score is than it was; negative if it is better."""
        return after - before if self.is_cost else before - after


_TENTH, _HUNDREDTH = Amount(0.1, is_share=True), Amount(0.01, is_share=True)
# Logits near 20 have steps of 2e-6 in float32, and so have logarithms of probabilities.
_ROUNDING = 1e-6

MEASURES = (
    Measure("kl", "kl_mean", ".6f", "the most mean KL, in nats", _TENTH, in_full=False, rounding=_ROUNDING),
    Measure("perplexity", "perplexity", ".4f", "the most that it exceeds full precision's by", _HUNDREDTH,
            from_full=True),
    Measure("top1", "top1", ".2%", "the least share of tokens with full precision's first choice", Amount(0.01),
            is_cost=False, in_full=False),
    Measure("retrieval", "retrieval", ".3f", "the least difference to full precision's, as -0.02", Amount(0.02),
            is_cost=False, from_full=True),
    Measure("generate", "generate_agreement", ".1%", "the least share of generated tokens that are full precision's",
            None, is_cost=False, in_full=False),
    Measure("attention", "attention_error", ".3%", "the most relative error of attention", _TENTH, in_full=False,
            rounding=_ROUNDING),
    Measure("bytes", "bytes_per_token", ",.0f", None, _HUNDREDTH),
    Measure("memory", "memory_bytes", ",.0f", None, _HUNDREDTH),
    Measure("speed", "speed_ratio", ".2f", "the least speed of decoding relative to full precision's, as 0.9", None,
            is_cost=False, in_full=False),
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What B has to keep, by the measure's name. limits: for scores; allowed: for how much worse they are than A's."""

    limits: Mapping[str, Amount]
    allowed: Mapping[str, Amount]
