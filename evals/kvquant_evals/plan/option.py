"""The bits one can choose from, and what each of them takes and lets fit: the rows of a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvquant import MemoryReport, QuantConfig
from kvquant.config import Bits
from kvquant.pages import GROWTH
from kvquant_evals.plan.architecture import Architecture
from kvquant_evals.plan.fit import Budget, largest_batch, largest_context
from kvquant_evals.plan.size import Storage, Term, Workload, equation

AnyBits = Bits | tuple[Bits, Bits] | None  # None is DynamicCache, full precision

CHOICES: tuple[AnyBits, ...] = (None, 16, 8, "fp8", (8, 4), 4, (4, 2), 3, 2)


@dataclass(frozen=True)
class Option:
    """One way to store a cache, and what it costs.

    peak: the most bytes on the way to that many tokens.
    context, batch: the most that fit into the memory left, None if any number does; both None without a budget.
    """

    bits: AnyBits
    memory: MemoryReport
    peak: int
    fits: bool | None
    context: int | None
    batch: int | None

    @property
    def label(self) -> str:
        return label_of(self.bits)


@dataclass(frozen=True)
class Plan:
    """What a model's cache takes in every way that it can be stored, in the order of CHOICES."""

    name: str
    architecture: Architecture
    workload: Workload
    device_type: str
    budget: Budget | None
    terms: tuple[Term, ...]
    options: tuple[Option, ...]
    notes: tuple[str, ...]

    def option(self, bits: AnyBits) -> Option | None:
        """The row of these bits, if they were asked for."""
        return next((option for option in self.options if option.bits == bits), None)


def make_plan(
    name: str,
    architecture: Architecture,
    workload: Workload,
    device_type: str = "cuda",
    budget: Budget | None = None,
    choices: Iterable[AnyBits] = CHOICES,
    **quant: Any,
) -> Plan:
    """The plan for a model and workload; `quant` are fields of QuantConfig, as of QuantCache."""
    configs = {bits: None if bits is None else QuantConfig.preset(bits, **quant) for bits in choices}
    storages = {bits: Storage.of(architecture, config, device_type) for bits, config in configs.items()}
    options = tuple(_option(bits, storage, workload, budget) for bits, storage in storages.items())
    terms = tuple(equation(architecture, workload))
    notes = (*architecture.notes, *_about_pools(workload, budget))
    return Plan(name, architecture, workload, device_type, budget, terms, options, notes)


def label_of(bits: AnyBits) -> str:
    """The bits as one types them on a command line."""
    if bits is None:
        return "full precision"
    return ",".join(map(str, bits)) if isinstance(bits, tuple) else str(bits)


def _about_pools(workload: Workload, budget: Budget | None) -> list[str]:
    if budget is None:
        return []
    return [
        f"not counted: room that pools of pages grow by, up to {GROWTH - 1:.1%}; with max_length={workload.tokens} "
        "QuantCache allocates just what the pages need"
    ]


def _option(bits: AnyBits, storage: Storage, workload: Workload, budget: Budget | None) -> Option:
    memory, peak = storage.memory(workload), storage.peak(workload)
    if budget is None:
        return Option(bits, memory, peak, None, None, None)
    left = budget.left
    fitting = largest_context(storage, workload, left), largest_batch(storage, workload, left)
    return Option(bits, memory, peak, peak <= left, *fitting)
