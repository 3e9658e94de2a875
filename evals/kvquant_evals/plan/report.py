"""A plan as text and as plain numbers for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvquant_evals import table
from kvquant_evals.plan.option import Option, Plan
from kvquant_evals.plan.quantity import format_bytes
from kvquant_evals.plan.size import Term

_HEADER = ("bits", "cache", "codes", "scales", "exact", "page tables", "unquantized", "bytes/token", "bits/number")
_FITTING = ("fits", "largest context", "largest batch")


def printed(plan: Plan, advice: str | None = None) -> str:
    """The size equation, the table, what fits and the advice."""
    header = _HEADER + (() if plan.budget is None else _FITTING)
    rows = [header, *(_cells(option, plan) for option in plan.options)]
    parts = [_caption(plan), _equation(plan), table.aligned(rows), _left(plan), _ending(plan, advice)]
    return "\n\n".join(part for part in parts if part)


def to_dict(plan: Plan, advice: str | None = None) -> dict[str, Any]:
    """Everything that was found, in bytes and tokens, for JSON."""
    architecture, budget = plan.architecture, plan.budget
    return {
        "model": plan.name,
        "dtype": str(architecture.dtype).removeprefix("torch."),
        "weights": {"parameters": architecture.num_weights, "bytes": architecture.weight_bytes},
        "device": plan.device_type,
        "workload": plan.workload._asdict(),
        "budget": None if budget is None else {**asdict(budget), "left": budget.left},
        "equation": [_term(term) for term in plan.terms],
        "options": [_option(option, plan) for option in plan.options],
        "notes": list(plan.notes),
        "advice": advice,
    }


def _caption(plan: Plan) -> str:
    architecture, (tokens, batch, shared) = plan.architecture, plan.workload
    dtype = str(architecture.dtype).removeprefix("torch.")
    sharing = f", of which the first {shared:,} are shared" if shared else ""
    return (
        f"{plan.name}: {len(architecture.layers)} layers, {architecture.num_weights:,} parameters, {dtype}; "
        f"{tokens:,} tokens x batch {batch}{sharing}; pages as on {plan.device_type}"
    )


def _equation(plan: Plan) -> str:
    """The terms with all their factors, and their sum."""
    lines = ["Size at full precision:"]
    lines += [f"  {term.kind}: {term} = {format_bytes(term.size)}" for term in plan.terms]
    whole = sum(term.size for term in plan.terms)
    lines.append(f"  all: {whole:,} bytes = {format_bytes(whole)}, {_per_token(whole, plan):,.0f} bytes per token")
    return "\n".join(lines)


def _per_token(size: int, plan: Plan) -> float:
    return size / (plan.workload.tokens * plan.workload.batch)


def _cells(option: Option, plan: Plan) -> list[str]:
    memory = option.memory
    parts = (memory.total, memory.codes, memory.scales, memory.exact, memory.page_tables, memory.unquantized)
    cells = [option.label, *map(format_bytes, parts), f"{_per_token(memory.total, plan):,.0f}"]
    cells.append(f"{memory.effective_bits:.2f}" if memory.elements else "")
    if plan.budget is not None:
        cells += ["yes" if option.fits else "no", _most(option.context), _most(option.batch)]
    return cells


def _most(count: int | None) -> str:
    return "any" if count is None else f"{count:,}"


def _left(plan: Plan) -> str:
    """How much memory is left for the cache."""
    budget = plan.budget
    if budget is None:
        return ""
    weights, reserve, whole = map(format_bytes, (budget.weights, budget.reserve, budget.memory))
    if budget.left <= 0:
        return f"Nothing is left for the cache: weights of {weights} and a reserve of {reserve} take all of {whole}."
    return f"Left for the cache: {whole} - weights {weights} - reserve {reserve} = {format_bytes(budget.left)}."


def _ending(plan: Plan, advice: str | None) -> str:
    limit = plan.architecture.max_length
    lines = [f"Note: {note}." for note in plan.notes]
    if limit is not None and plan.workload.tokens > limit:
        lines.append(f"Note: the model was made for contexts of up to {limit:,} tokens.")
    return "\n".join(lines + ([] if advice is None else [f"Advice: {advice}."]))


def _term(term: Term) -> dict[str, Any]:
    heads = {name: part and part._asdict() for name, part in (("key", term.key), ("value", term.value))}
    return {**term._asdict(), **heads, "size": term.size}


def _option(option: Option, plan: Plan) -> dict[str, Any]:
    memory = option.memory
    return {
        "bits": list(option.bits) if isinstance(option.bits, tuple) else option.bits,
        "label": option.label,
        "memory": {**asdict(memory), "total": memory.total},
        "peak": option.peak,
        "bytes_per_token": _per_token(memory.total, plan),
        "effective_bits": memory.effective_bits if memory.elements else None,
        "fits": option.fits,
        "largest_context": option.context,
        "largest_batch": option.batch,
    }
