"""Timing of several ways to do the same thing, which take turns, so that what else the machine does hits all alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

# A median whose middle half of rounds spreads wider than this share of it is marked as noisy.
NOISY = 0.15
FEWEST_ROUNDS = 3

OURS = "kvquant "  # what the labels of our contenders begin with


def label_of(bits: Any) -> str:
    """The label of a QuantCache: its bits as one types them on a command line."""
    return OURS + (",".join(map(str, bits)) if isinstance(bits, tuple) else str(bits))


@dataclass(frozen=True)
class Contender:
    """What is called once per round, and the bytes that its cache holds."""

    run: Callable[[], Any]
    cache_bytes: int


@dataclass(frozen=True)
class Timing:
    """Median milliseconds of one contender, and how wide the middle half of its rounds spreads relative to that."""

    kind: str
    contender: str
    context: int
    threads: int
    milliseconds: float
    spread: float
    rounds: int
    cache_bytes: int

    @property
    def is_noisy(self) -> bool:
        return self.spread > NOISY


@dataclass(frozen=True)
class Effort:
    """rounds: how often each contender runs, less if that takes longer than `seconds`, but FEWEST_ROUNDS at least."""

    rounds: int = 15
    seconds: float = 5.0


def race(kind: str, contenders: Mapping[str, Contender], context: int, threads: int, effort: Effort) -> list[Timing]:
    """Runs all contenders in turns, after one round of each that does not count."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            seconds = _seconds_of_rounds(contenders, effort)
    finally:
        torch.set_num_threads(before)
    return [timing(kind, label, context, threads, seconds[label], c.cache_bytes) for label, c in contenders.items()]


def _seconds_of_rounds(contenders: Mapping[str, Contender], effort: Effort) -> dict[str, list[float]]:
    """Every round has an order of its own: a contender finds in the processor's caches what those before left there."""
    seconds: dict[str, list[float]] = {label: [] for label in contenders}
    for contender in contenders.values():
        contender.run()
    for order in islice(random_orders(list(contenders)), effort.rounds):
        for label in order:
            if len(seconds[label]) < FEWEST_ROUNDS or sum(seconds[label]) < effort.seconds:
                seconds[label].append(_seconds(contenders[label].run))
    return seconds


def random_orders(labels: Sequence[str]) -> Iterator[list[str]]:
    """Without end, and the same ones each time.

    Orders that only balance which label comes right before which (Williams, 1949) let the same two labels come second
    before another one in all rounds, and what these read is still, or no longer, in a large processor cache.
    """
    chance = random.Random(0)
    while True:
        yield chance.sample(labels, len(labels))


def timing(kind: str, label: str, context: int, threads: int, seconds: list[float], cache_bytes: int = 0) -> Timing:
    low, median, high = torch.tensor(seconds).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    return Timing(kind, label, context, threads, 1e3 * median, (high - low) / median, len(seconds), cache_bytes)


def _seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin
