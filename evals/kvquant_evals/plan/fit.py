"""What fits into the memory that is left: the longest context at a batch, and the largest batch at a context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvquant_evals.plan.size import Storage, Workload

MOST = 2**40  # tokens or rows; what has not ended by then does not grow


@dataclass(frozen=True)
class Budget:
    """Bytes of a GPU's memory, and those that the cache cannot have."""

    memory: int
    weights: int
    reserve: int

    @property
    def left(self) -> int:
        return self.memory - self.weights - self.reserve


def largest_context(storage: Storage, workload: Workload, budget: int) -> int | None:
    """The most tokens of a row such that a cache fits at that length and at every shorter one.

    None if it would fit at any length; 0 if not even a single token does.
    """

    def fits(tokens: int) -> bool:
        return storage.memory(workload._replace(tokens=tokens)).total <= budget

    # Between two lengths at which pages are sealed it only grows, and it is the larger the more pages there are.
    pages = _last(lambda pages: fits(storage.last_length(pages)), first=0)
    if pages is None:
        return None
    start = storage.last_length(pages) if pages >= 0 else 0
    more = _last(lambda more: fits(start + more), first=1, stop=storage.last_length(pages + 1) - start)
    return None if more is None else start + more


def largest_batch(storage: Storage, workload: Workload, budget: int) -> int | None:
    """The most rows that fit all the way to that many tokens; None if any number would, 0 if not even one does."""
    return _last(lambda batch: storage.peak(workload._replace(batch=batch)) <= budget, first=1)


def _last(holds: Callable[[int], bool], first: int, stop: int = MOST) -> int | None:
    """The last number from `first` on, and below `stop`, up to which `holds`; first - 1 if it does not hold there.

    None if it still holds at MOST. Expects a predicate that, once false, stays so.
    """
    good, step = first - 1, 1
    while good + step < stop and holds(good + step):
        good, step = good + step, 2 * step
    if good + step >= MOST:
        return None
    bad = min(stop, good + step)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if holds(middle) else (good, middle)
    return good
