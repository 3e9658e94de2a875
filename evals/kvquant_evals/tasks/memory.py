"""Memory: what a cache of real text takes by part, and what is allocated at most while it is filled and decoded from.

Peaks are over what was allocated before there was a cache. On a GPU torch's allocator tells them; on a CPU the tensors
that are alive at once are counted. What a process takes in all is for `kvquant bench --memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvquant import MemoryReport
from kvquant_evals.error import EvalError
from kvquant_evals.model import Source
from kvquant_evals.peers.simulated_cache import memory_of
from kvquant_evals.settings import Settings
from kvquant_evals.task import Column, Finding, Item, Task, Turn
from kvquant_evals.tasks._allocation import meter
from kvquant_evals.tasks._reading import WARM, Reader, check_length, divergences, lost_text, rows_of_text

STEPS = 32  # tokens that are decoded behind each context
PARTS = ("codes", "scales", "exact", "page_tables", "unquantized")  # of MemoryReport; they add up to its total


@dataclass(frozen=True)
class Filling:
    """What a cache took on its way. before: an earlier length than the context, and its bytes then.

    memory: at the context. held: bytes allocated after decoding, as `source` counts them. logits: of decoding, [STEPS,
    1, vocabulary].
    """

    before: tuple[int, int]
    memory: MemoryReport
    prefill_peak: int | None
    decode_peak: int | None
    held: int | None
    source: str | None
    logits: Tensor


class Memory:
    name = "memory"
    aliases = ()

    def check(self, source: Source, text: str, settings: Settings) -> None:
        if settings.chunk < 1:
            raise EvalError(f"chunk={settings.chunk} must be at least 1")
        for context in settings.contexts:
            if context < 2:
                raise EvalError(f"context={context} must be at least 2")
            check_length(source, text, context, STEPS, "decoding")

    def items(self, source: Source, text: str, settings: Settings) -> list[Item]:
        return [
            Item(str(context), context + STEPS + min(context, WARM), {"context": context})
            for context in settings.contexts
        ]

    def measure(self, turn: Turn) -> Finding:
        context = turn.item.about["context"]
        ids = rows_of_text(turn, context + STEPS + 1)
        with torch.no_grad():
            filling = _fill(turn, ids)
        full = filling.logits if turn.full is None else turn.full.evidence
        divergence = divergences(full, filling.logits, ids[:, context + 1 :].T)
        values = {
            "context": context,
            **_bytes(turn, filling.memory),
            "held": filling.held,
            "prefill_peak": filling.prefill_peak,
            "decode_peak": filling.decode_peak,
            "peak_source": filling.source,
            "steps": STEPS,
            "kl": sum(divergence) / STEPS,
            **_reach(turn, filling),
        }
        return Finding(values, {"kl": divergence}, evidence=filling.logits)

    def scores(self, found: Sequence[Finding], settings: Settings) -> dict[str, float]:
        scores = {"memory_kl": sum(finding.values["kl"] for finding in found) / len(found)}
        for values in (finding.values for finding in found):
            context = values["context"]
            scores[f"memory_bytes_{context}"] = values["bytes"]
            scores[f"memory_mb_{context}"] = values["bytes"] / 1e6
            scores[f"memory_bits_{context}"] = values["bits"]
            for peak in ("prefill_peak", "decode_peak"):
                if values[peak] is not None:
                    scores[f"memory_{peak}_{context}"] = values[peak]
        last = max((finding.values for finding in found), key=lambda values: values["context"])
        if last["prefill_peak"] is not None:
            scores["memory_peak_mb"] = max(last["prefill_peak"], last["decode_peak"]) / 1e6
        return scores | ({} if last["longest"] is None else {"memory_longest": last["longest"]})

    def columns(self, settings: Settings) -> list[Column]:
        longest = max(settings.contexts)
        columns = [
            Column(f"cache MB @{longest}", f"memory_mb_{longest}", ",.1f", is_cost=True),
            Column("peak MB", "memory_peak_mb", ",.1f", is_cost=True),
        ]
        fitting = Column("longest", "memory_longest", ",.0f", is_cost=True)
        return columns if settings.budget is None else [*columns, fitting]

    def fault(self, scores: dict[str, float]) -> str | None:
        return lost_text(scores["memory_kl"])


def longest(before: tuple[int, int], now: tuple[int, int], budget: int, most: int | None) -> tuple[int | None, str]:
    """The longest context whose cache fits into `budget`, by a line through two lengths and bytes, and what ends it.

    At both lengths as many tokens should wait to be packed; where more of them wait, a cache takes that much more than
    on the line. The model ends at `most` tokens, if it says so. None if there is no end.
    """
    (tokens, size), growth, distance = now, now[1] - before[1], now[0] - before[0]
    if growth > 0:
        fitting = max(0, tokens + (budget - size) * distance // growth)
        return (fitting, "budget") if most is None or fitting < most else (most, "model")
    return (most, "model") if size <= budget else (0, "budget")


def _fill(turn: Turn, ids: Tensor) -> Filling:
    """Reads all but the last of ids [1, T]: the context, then STEPS tokens one by one."""
    context, model, chunk = turn.item.about["context"], turn.subject.model, turn.settings.chunk
    sample = Reader.of(model, turn.new_cache()).warm_up(ids[:, : context + 1], chunk)
    turn.advance(min(context, WARM))
    logits = torch.empty(STEPS, *sample.shape, dtype=sample.dtype)
    counted, start, memory = meter(model.device), _earlier(context), []
    with counted.watching():
        cache = turn.new_cache()
        reader = Reader.of(model, cache)
        for part in (ids[:, :start], ids[:, start:context]):
            _read(turn, reader, part)
            memory.append(memory_of(cache))
        prefill_peak = counted.take_peak()
        for i in range(STEPS):
            logits[i] = reader.read(ids[:, context + i : context + i + 1])
            turn.advance(1)
        decode_peak = counted.take_peak()
    before, now = memory
    return Filling((start, before.total), now, prefill_peak, decode_peak, counted.held(), counted.source, logits)


def _read(turn: Turn, reader: Reader, ids: Tensor) -> None:
    """Reads ids [1, T] in chunks, the last token by itself: then no chunk waits that the bytes would count as exact."""
    for part in (*ids[:, :-1].split(turn.settings.chunk, dim=1), ids[:, -1:]):
        if part.shape[1]:
            reader.read(part)
            turn.advance(part.shape[1])


def _earlier(context: int) -> int:
    """A length that lies before `context` by a power of two, at least a quarter of it.

    Whatever the size of pages, if that is one as well, as many tokens then wait to be packed at both lengths.
    """
    return context - (1 << (context // 2).bit_length() - 1)


def _bytes(turn: Turn, memory: MemoryReport) -> dict[str, Any]:
    """What a cache of the item's context takes; its bits per number, of the layers that are quantized if it says so."""
    total, own = memory.total, 8.0 * turn.subject.model.dtype.itemsize
    if memory.elements:
        bits = memory.effective_bits
    else:  # then its numbers are those that full precision holds
        bits = own if turn.full is None else own * total / turn.full.values["bytes"]
    return {
        "bytes": total,
        "parts": {name: part for name, part in asdict(memory).items() if name in PARTS},
        "reserved": memory.reserved,
        "bytes_per_token": total / turn.item.about["context"],
        "bits": bits,
    }


def _reach(turn: Turn, filling: Filling) -> dict[str, Any]:
    """The longest context within the budget, if there is one."""
    now, budget = (turn.item.about["context"], filling.memory.total), turn.settings.budget
    if budget is None:
        return {"longest": None, "longest_limit": None}
    reach, limit = longest(filling.before, now, budget, turn.subject.source.max_length)
    return {"longest": reach, "longest_limit": limit}


TASK: Task = Memory()
