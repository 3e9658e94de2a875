"""Which bits suit a workload, by what fits: one line with the reason."""

from __future__ import annotations

from typing import NamedTuple

from kvquant_evals.plan.option import AnyBits, Option, Plan, label_of


class Suited(NamedTuple):
    """What suits a kind of workload: bits in the order of preference, and why none below these."""

    bits: tuple[AnyBits, ...]
    reason: str


WORKLOADS = {
    "agents": Suited(
        (8, (8, 4), 4), "many requests begin with the same tokens, whose packed pages are kept once for all of them"
    ),
    "retrieval": Suited(
        (None, 8, (8, 4), 4), "finding several facts in a long document is what degrades first below 4-bit keys"
    ),
    "chat": Suited((4, (4, 2)), "answers hardly change at 4 bits, and 2-bit values cost less than 2-bit keys"),
}


def advise(plan: Plan, workload: str) -> str:
    """The advice for a kind of workload, in one line."""
    suited = WORKLOADS[workload]
    options = [found for bits in suited.bits if (found := plan.option(bits)) is not None]
    if plan.budget is None:
        return f"{workload}: {_labels(suited.bits)}, the first that fits, since {suited.reason}"
    if plan.budget.left <= 0:
        return f"{workload}: nothing fits, since weights and reserve take all of the memory"
    chosen = next((option for option in options if option.fits), None)
    if chosen is None:
        return f"{workload}: {_least(options[-1], plan)}, since {suited.reason}"
    hint = " (give --shared-prefix to count it so)" if workload == "agents" and not plan.workload.shared else ""
    return f"{workload}: {chosen.label} fits and suits, since {suited.reason}{hint}{_beside_full(plan, chosen)}"


def _least(option: Option, plan: Plan) -> str:
    tokens, batch, _ = plan.workload
    return (
        f"nothing that suits fits {tokens:,} tokens at batch {batch}; {option.label} fits up to "
        f"{_number(option.context)} tokens at that batch, or batch {_number(option.batch)} at that context"
    )


def _beside_full(plan: Plan, chosen: Option) -> str:
    full = plan.option(None)
    if full is None or full is chosen:
        return ""
    if not full.fits:
        return "; full precision does not fit"
    return f"; it fits batch {_number(chosen.batch)} at that context, full precision {_number(full.batch)}"


def _labels(bits: tuple[AnyBits, ...]) -> str:
    return " or ".join(map(label_of, bits))


def _number(count: int | None) -> str:
    return "any" if count is None else f"{count:,}"
