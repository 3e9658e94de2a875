"""Other launch parameters of decode attention than those in launch.json: what a table of them should hold."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gpu import packed, timing
from gpu.plan import Plan, Shape
from gpu.work import Unit, made
from kvquant_evals.bench.race import label_of
from kvquant_kernels.triton import launch
from kvquant_kernels.triton.attend import Operands
from kvquant_kernels.triton.ops.decode import decode


def units(plan: Plan, device: torch.device) -> list[Unit]:
    """A unit per format and size, at the first shape."""
    return [
        Unit(f"{label_of(bits)}, {batch} x {context:,} tokens", partial(measure, plan, bits, batch, context, device))
        for (batch, context), bits in itertools.product(plan.launch_sizes, plan.bits)
    ]


def measure(plan: Plan, bits: Any, batch: int, context: int, device: torch.device) -> dict[str, Any]:
    """Times of one format's decode kernel under each launch; the first is that of the table."""
    shape, why_not = plan.shapes[0], dict[str, str]()
    held = packed.operands(shape, bits, batch, context, device)
    launches = {str(i): found for i, found in enumerate(candidates(plan, shape))}
    makers = {label: partial(_captured, held, found, device) for label, found in launches.items()}
    times = timing.race(made(makers, why_not), device, plan.rounds, plan.milliseconds / 2)
    rows = [asdict(launches[label]) | found.to_dict() for label, found in times.items()]
    best = min(rows, key=lambda row: row["microseconds"], default=None)
    cell = {"shape": shape._asdict(), "batch": batch, "context": context, "bits": label_of(bits)}
    failed = {str(launches[label]): reason for label, reason in why_not.items()}
    return cell | {"rounds": plan.rounds, "rows": rows, "best": best, "unsupported": failed}


def candidates(plan: Plan, shape: Shape) -> Iterator[launch.Launch]:
    """The launch of the table, and variations of it."""
    table = launch.choose("sm_90", shape.head_dim)
    yield table
    for warps, stages, programs in itertools.product(plan.launch_warps, plan.launch_stages, plan.launch_programs):
        found = replace(table, num_warps=warps, num_stages=stages, programs_per_processor=programs)
        if found != table:
            yield found


def _captured(held: Operands, chosen: launch.Launch, device: torch.device) -> timing.Run:
    """A graph of the kernels under one launch; on a CPU, which has no graphs, what launches them."""

    def run() -> Tensor:
        with mock.patch.object(launch, "choose", return_value=chosen):
            return decode(held, packed.DTYPE)

    return timing.captured(run, device)
