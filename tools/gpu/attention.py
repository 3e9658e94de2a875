"""Times of one decoding step's attention: ours on packed pages against others on bfloat16 states, cell by cell."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gpu import timing
from gpu.contenders import Bf16States, Contender, packed_makers
from gpu.plan import Plan, Shape
from gpu.work import Unit, made
from kvquant.testing import relative_errors

BF16_BYTES = 4  # of a number of a key and one of a value
PACKED_BYTES = 2.3  # the same of the widest packed format, with its scales
MOST_MEMORY = 0.8  # of what is free
SECONDS = 7.0  # without which no cell is begun


def units(plan: Plan, device: torch.device, copy: Callable[[], float]) -> list[tuple[int, Unit]]:
    """A unit per shape, batch and context, with its cached tokens, fewest first; `copy` gives bytes per second."""
    sizes = itertools.product(plan.shapes, plan.batches, plan.contexts)
    cells = [(batch * context, shape, batch, context) for shape, batch, context in sizes]
    found = []
    for tokens, shape, batch, context in sorted(cells, key=lambda cell: cell[0]):
        name = f"{shape.name}, {batch} x {context:,} tokens"
        found.append((tokens, Unit(name, partial(measure, plan, shape, batch, context, device, copy), SECONDS)))
    return found


def measure(
    plan: Plan, shape: Shape, batch: int, context: int, device: torch.device, copy: Callable[[], float]
) -> dict[str, Any]:
    """Times of all contenders at one size, with what they read and how far they are from the definition.

    Raises RuntimeError if the states do not fit into the device's memory.
    """
    _check_memory(shape, batch * context, len(plan.bits), device)
    states, why_not = Bf16States(shape, batch, context, device), dict[str, str]()
    makers = states.makers(plan.milliseconds) | packed_makers(shape, plan.bits, batch, context, device)
    contenders = made({label: partial(_tried, make) for label, make in makers.items()}, why_not)
    is_small = (batch, context) == (min(plan.batches), min(plan.contexts))
    rows = [_row(label, contender, is_small) for label, contender in contenders.items()]
    for mode, runs in _modes(contenders, device, why_not).items():
        times = timing.race(runs, device, plan.rounds, plan.milliseconds)
        for row in rows:
            if row["contender"] in times:
                row[mode] = times[row["contender"]].to_dict()
    _compare(rows, copy())
    cell = {"shape": shape._asdict(), "batch": batch, "context": context, "rounds": plan.rounds}
    return cell | {"rows": rows, "unsupported": why_not}


def _check_memory(shape: Shape, tokens: int, num_formats: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    numbers = tokens * shape.num_kv_heads * shape.head_dim
    needed = numbers * (2 * BF16_BYTES + PACKED_BYTES * num_formats)  # bf16 twice: a contender may copy the states
    free = torch.cuda.mem_get_info(device)[0]
    if needed > MOST_MEMORY * free:
        raise RuntimeError(f"needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")


def _tried(make: Callable[[], Contender]) -> Contender:
    """The contender, after a first run."""
    contender = make()
    contender.run()
    return contender


def _row(label: str, contender: Contender, is_small: bool) -> dict[str, Any]:
    """What is known of a contender without a clock. Errors are in units of the definition's root mean square."""
    out = contender.run()
    row = {"contender": label, "is_packed": contender.is_packed, "bytes": contender.num_bytes, "note": contender.note}
    row["is_finite"] = bool(out.isfinite().all().item())
    if is_small:
        row["relative_error"] = relative_errors(out, contender.definition()).rms
    return row


def _modes(
    contenders: dict[str, Contender], device: torch.device, why_not: dict[str, str]
) -> dict[str, dict[str, timing.Run]]:
    """What is timed: launches from Python, and replays of a CUDA graph."""
    runs = {label: contender.run for label, contender in contenders.items()}
    failed: dict[str, str] = {}
    makers = {label: partial(timing.captured, run, device) for label, run in runs.items()}
    graphs = made(makers, failed)
    why_not.update({f"{label}, as a graph": reason for label, reason in failed.items()})
    return {"graph": graphs, "launched": runs}


def _compare(rows: list[dict[str, Any]], copy: float) -> None:
    """Adds to every time the bytes per second, their share of a copy's, and the ratio over the best in bfloat16."""
    for mode in ("graph", "launched"):
        timed = [row for row in rows if mode in row]
        best = min((row[mode]["microseconds"] for row in timed if not row["is_packed"]), default=None)
        for row in timed:
            found = row[mode]
            per_second = row["bytes"] / (1e-6 * found["microseconds"])
            found |= {"bytes_per_second": per_second, "share_of_copy": per_second / copy}
            if best is not None:
                found["ratio_over_bf16"] = best / found["microseconds"]
