"""Decoding with a whole model over filled caches: tokens per second and memory, ours against transformers' own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from gpu.greedy import tiny_model
from gpu.plan import Plan
from gpu.timing import Times
from gpu.work import Unit, made
from kvquant.cache import cache_memory
from kvquant.compat import CACHE_ARGUMENT
from kvquant_evals.bench.decoding import RANDOM_MODEL, STOCK, cache_labels, new_cache, random_model

NO_CACHE = "no cache, one token"
PEERS = ("QuantizedCache quanto 4", "QuantizedCache hqq 4", "QuantizedCache hqq 8", "QuantizedCache fp8")
LEAST = 10.0  # seconds without which no size is begun
SLOWEST = 8.0  # seconds of turns after which a contender takes no more


@dataclass
class Contender:
    """A model with a cache that is filled, or none; bytes are of the device's memory, or None on a CPU."""

    step: Callable[[], Any]
    cache_bytes: int
    held_bytes: int | None = None
    peak_bytes: int | None = None
    seconds: list[float] = field(default_factory=list)


def units(plan: Plan, device: torch.device, is_tiny: bool, deadline: float) -> list[Unit]:
    """A unit per batch and context. The model is made once, when it is first needed."""
    held: list[PreTrainedModel] = []

    def model() -> PreTrainedModel:
        if not held:
            held.append(tiny_model(device) if is_tiny else _random_model(device))
        return held[0]

    return [
        Unit(f"{batch} x {context:,} tokens", partial(measure, plan, model, batch, context, deadline), seconds=LEAST)
        for batch, context in plan.decode_sizes
    ]


def _random_model(device: torch.device) -> PreTrainedModel:
    """The model with random weights, made on the device, which is much faster than on a CPU."""
    with torch.device(device):
        model = random_model()
    return model.to(device)


def measure(
    plan: Plan, make_model: Callable[[], PreTrainedModel], batch: int, context: int, deadline: float
) -> dict[str, Any]:
    """Greedy decoding over caches that are filled with random states; all caches take turns."""
    model, why_not = make_model(), dict[str, str]()
    labels = cache_labels(plan.bits, peers=True, grouped=False)
    why_not |= {label: "its package is not installed" for label in PEERS if label not in labels}
    makers = {label: partial(_contender, label, model, batch, context) for label in (NO_CACHE, *labels)}
    with torch.inference_mode():
        contenders = made(makers, why_not)
        _take_turns(contenders, plan, deadline)
    rows = [_row(label, contender, batch, plan.decode_steps) for label, contender in contenders.items()]
    _compare(rows)
    name = RANDOM_MODEL if model.config.num_hidden_layers > 2 else "tiny"
    shape = {"model": name, "parameters": model.num_parameters(), "dtype": str(model.dtype)}
    return shape | {"batch": batch, "context": context, "rows": rows, "unsupported": why_not}


def _contender(label: str, model: PreTrainedModel, batch: int, context: int) -> Contender:
    before = _allocated(model.device)
    cache = None if label == NO_CACHE else new_cache(label, model)
    if cache is not None:
        _fill(cache, model, batch, context)
    step = _step(model, cache, batch)
    step()
    _reset_peak(model.device)
    held = _allocated(model.device)
    step()
    contender = Contender(step, 0 if cache is None else cache_memory(cache).total)
    if held is not None and before is not None:
        contender.held_bytes, contender.peak_bytes = held - before, torch.cuda.max_memory_allocated() - before
    return contender


def _fill(cache: Cache, model: PreTrainedModel, batch: int, context: int) -> None:
    """Gives every layer random states of `context` tokens."""
    config = model.config
    size = batch, config.num_key_value_heads, context, config.head_dim
    for layer in range(config.num_hidden_layers):
        states = torch.randn(size, dtype=model.dtype, device=model.device)
        cache.update(states, states, layer)


def _step(model: PreTrainedModel, cache: Cache | None, batch: int) -> Callable[[], Any]:
    """Decodes a token per row: what it chose becomes its next input."""
    token = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
    options = {"use_cache": False} if cache is None else {CACHE_ARGUMENT: cache, "use_cache": True}

    def step() -> None:
        out: Any = model(token, **options, logits_to_keep=1)
        token.copy_(out.logits.argmax(-1))

    return step


def _take_turns(contenders: dict[str, Contender], plan: Plan, deadline: float) -> None:
    """All have one turn at least, and as many as there is time for."""
    for i in range(plan.decode_rounds):
        for contender in contenders.values() if i == 0 or time.time() + LEAST / 2 < deadline else ():
            if sum(contender.seconds) < SLOWEST:
                contender.seconds.append(_seconds(contender.step, plan.decode_steps))


def _seconds(step: Callable[[], Any], steps: int) -> float:
    _synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    _synchronize()
    return time.perf_counter() - begin


def _row(label: str, contender: Contender, batch: int, steps: int) -> dict[str, Any]:
    """A contender's times, by turn; the tokens per second are those of all turns, whatever was sealed in them."""
    turns = Times([1e6 * seconds / steps for seconds in contender.seconds]).to_dict()
    return {
        "contender": label,
        "tokens_per_second": batch * steps * len(contender.seconds) / sum(contender.seconds),
        "step_microseconds": turns["microseconds"],
        "spread": turns["spread"],
        "turns": len(contender.seconds),
        "steps_of_a_turn": steps,
        "cache_bytes": contender.cache_bytes,
        "held_bytes": contender.held_bytes,
        "peak_bytes": contender.peak_bytes,
    }


def _compare(rows: list[dict[str, Any]]) -> None:
    """Adds how many times as fast as DynamicCache each is, and its share of that one's memory."""
    stock = next((row for row in rows if row["contender"] == STOCK), None)
    if stock is None:
        return
    for row in rows:
        row["ratio_over_dynamic"] = row["tokens_per_second"] / stock["tokens_per_second"]
        row["share_of_dynamic_bytes"] = row["cache_bytes"] / stock["cache_bytes"]


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated() if device.type == "cuda" else None


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
