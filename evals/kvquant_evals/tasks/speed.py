"""Speed: how fast a cache is prefilled and decoded from, beside full precision in alternating steps.

A ratio is of medians over steps that took turns: what else the machine did hit both alike. Prefill is of the whole
context at once, as generate() does it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import DynamicCache

from kvquant_evals.bench.race import Timing, timing
from kvquant_evals.error import EvalError
from kvquant_evals.model import Source
from kvquant_evals.settings import Settings
from kvquant_evals.task import Column, Finding, Item, Task, Turn
from kvquant_evals.tasks._reading import WARM, Reader, check_length, divergences, lost_text, rows_of_text

STEPS = 24  # decoding steps that are timed
UNTIMED = 2  # and those before them: in the first, what the prompt left to do is done
OWN, ALONE, FULL = "own", "forward without a cache", "beside it"

T = TypeVar("T")
_logger = logging.getLogger("kvquant")


@dataclass(frozen=True)
class Decoding:
    """Timings by what took turns, and the cache's logits [UNTIMED + STEPS, B, vocabulary]."""

    timings: dict[str, Timing]
    slowest: float
    logits: Tensor


class Speed:
    name = "speed"
    aliases = ()

    def check(self, source: Source, text: str, settings: Settings) -> None:
        for batch in settings.batches:
            if batch < 1:
                raise EvalError(f"batch={batch} must be at least 1")
        for context in settings.contexts:
            if context < 2:
                raise EvalError(f"context={context} must be at least 2")
            check_length(source, text, context, UNTIMED + STEPS, "decoding")

    def items(self, source: Source, text: str, settings: Settings) -> list[Item]:
        return [
            Item(f"{context}-{batch}", 2 * batch * (context + STEPS), {"context": context, "batch": batch})
            for context in settings.contexts
            for batch in settings.batches
        ]

    def measure(self, turn: Turn) -> Finding:
        context, batch = turn.item.about["context"], turn.item.about["batch"]
        ids = rows_of_text(turn, context + UNTIMED + STEPS + 1, batch)
        with torch.inference_mode():
            own, seconds = _prefilled(turn, turn.new_cache, ids[:, :context])
            full = None if turn.full is None else _beside(turn, ids[:, :context])
            decoding = _decode(turn, own, full, ids[:, context:-1])
        evidence = decoding.logits if turn.full is None else turn.full.evidence
        divergence = divergences(evidence, decoding.logits, ids[:, context + 1 :].T)
        values = {
            "context": context,
            "batch": batch,
            "prefill_tokens_per_second": batch * context / seconds,
            "first_token_ms": 1e3 * seconds,
            **_pace(turn, decoding),
            "kl": sum(divergence) / len(divergence),
        }
        return Finding(values, {"kl": divergence}, evidence=decoding.logits)

    def scores(self, found: Sequence[Finding], settings: Settings) -> dict[str, float]:
        scores = {"speed_kl": sum(finding.values["kl"] for finding in found) / len(found)}
        for values in (finding.values for finding in found):
            item = f"{values['context']}_{values['batch']}"
            scores[f"speed_prefill_{item}"] = values["prefill_tokens_per_second"]
            scores[f"speed_first_token_{item}"] = values["first_token_ms"]
            scores[f"speed_decode_{item}"] = values["decode_tokens_per_second"]
            scores[f"speed_step_{item}"] = values["step_ms"]
            scores[f"speed_ratio_{item}"] = values["ratio"]
        return scores

    def columns(self, settings: Settings) -> list[Column]:
        longest = max(settings.contexts)
        item = f"{longest}_{settings.batches[0]}"
        return [
            Column(f"prefill tok/s @{longest}", f"speed_prefill_{item}", ",.0f", is_cost=True),
            Column(f"decode tok/s @{longest}", f"speed_decode_{item}", ",.1f", is_cost=True),
            Column(f"decode ratio @{longest}", f"speed_ratio_{item}", ".2f", is_cost=True),
        ]

    def fault(self, scores: dict[str, float]) -> str | None:
        return lost_text(scores["speed_kl"])


def _prefilled(turn: Turn, new_cache: Callable[[], Any], ids: Tensor) -> tuple[Reader, float]:
    """A reader behind the tokens [B, context], and the seconds to the token after them, once the machine is warm."""
    model = turn.subject.model
    Reader.of(model, new_cache()).warm_up(ids, WARM)
    reader = Reader.of(model, new_cache())
    seconds, _ = _timed(model.device, lambda: reader.read(ids).argmax(dim=-1))
    turn.advance(ids.numel())
    return reader, seconds


def _beside(turn: Turn, ids: Tensor) -> Reader | None:
    """Full precision behind the same tokens; None if it does not fit into memory beside the cache."""
    try:
        return _prefilled(turn, lambda: DynamicCache(config=turn.subject.model.config), ids)[0]
    except torch.OutOfMemoryError:
        name = turn.item.name
        _logger.warning("speed %s: full precision does not fit beside the cache; they do not take turns", name)
        return None


def _decode(turn: Turn, own: Reader, full: Reader | None, ids: Tensor) -> Decoding:
    """Reads ids [B, UNTIMED + STEPS] token by token, with all that is timed in turns."""
    readers = {OWN: own, ALONE: Reader.of(turn.subject.model, None)} | ({} if full is None else {FULL: full})
    seconds: dict[str, list[float]] = {label: [] for label in readers}
    logits = []
    for i, token in enumerate(ids.split(1, dim=1)):
        for label in list(readers)[:: -1 if i % 2 else 1]:  # both caches as often right behind the model alone
            took, found = _timed(turn.subject.model.device, partial(readers[label].read, token))
            seconds[label].append(took)
            if label == OWN:
                logits.append(found.cpu())
        turn.advance(token.shape[0] * (len(readers) - 1))
    return Decoding(_timings(turn, seconds), 1e3 * max(seconds[OWN][UNTIMED:]), torch.stack(logits))


def _timings(turn: Turn, seconds: dict[str, list[float]]) -> dict[str, Timing]:
    context, threads = turn.item.about["context"], torch.get_num_threads()
    return {label: timing(turn.item.name, label, context, threads, found[UNTIMED:]) for label, found in seconds.items()}


def _pace(turn: Turn, decoding: Decoding) -> dict[str, Any]:
    """Milliseconds per step and what follows from them. ratio: how many times as fast as full precision."""
    own, alone, full = decoding.timings[OWN], decoding.timings[ALONE], decoding.timings.get(FULL)
    full_ms = _full_step_ms(turn, decoding)
    return {
        "decode_tokens_per_second": 1e3 * turn.item.about["batch"] / own.milliseconds,
        "step_ms": own.milliseconds,
        "slowest_step_ms": decoding.slowest,
        "full_step_ms": full_ms,
        "ratio": full_ms / own.milliseconds,
        "takes_turns": full is not None,
        "parts": {
            "forward_without_cache": alone.milliseconds,
            "attention_and_cache": own.milliseconds - alone.milliseconds,
        },
        "spread": own.spread,
        "full_spread": None if full is None else full.spread,
        "is_noisy": own.is_noisy or (full is not None and full.is_noisy),
        "steps": own.rounds,
    }


def _full_step_ms(turn: Turn, decoding: Decoding) -> float:
    """That of full precision beside the cache, or else in its own turn."""
    if FULL in decoding.timings:
        return decoding.timings[FULL].milliseconds
    alone: float = decoding.timings[OWN].milliseconds if turn.full is None else turn.full.values["step_ms"]
    return alone


def _timed(device: torch.device, run: Callable[[], T]) -> tuple[float, T]:
    """Seconds until what is run is done, also on the device, and what it gives."""
    _wait(device)
    begin = time.perf_counter()
    found = run()
    _wait(device)
    return time.perf_counter() - begin, found


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


TASK: Task = Speed()
