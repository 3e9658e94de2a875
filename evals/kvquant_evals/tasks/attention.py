"""Relative error of attention in each layer and head: of its output and of its probabilities, from exact queries.

Keys, values and the last queries of a context are those of one pass in full precision. A cache is given the keys and
values and is read by the queries, so that no layer sees the errors of those below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache

from kvquant_evals.error import EvalError
from kvquant_evals.model import Source
from kvquant_evals.settings import Settings
from kvquant_evals.task import Column, Finding, Item, Task, Turn
from kvquant_evals.tasks._capture import LayerCall, capture
from kvquant_evals.tasks._prompt import check_prompts, encode_prompt, prompt_items

# The mean error of outputs beyond which a cache is broken rather than coarse. In 768 and 1,024 tokens SmolLM2 has 0.10
# with 2 bits, 0.41 with swapped pages, 0.5 to 0.7 without its sinks and 3.5 with one bit.
BROKEN_ERROR = 0.25
QUERIES = 64  # of the last chunk, the last ones
QUERIES_AT_ONCE = 8  # as few as kernels for packed states take; for more, states are dequantized first


class Attention:
    name = "attention"
    aliases = ()

    def check(self, source: Source, text: str, settings: Settings) -> None:
        context = settings.contexts[-1]
        if settings.chunk < 1:
            raise EvalError(f"chunk={settings.chunk} must be at least 1")
        if context <= settings.chunk:
            raise EvalError(
                f"context={context} must exceed chunk={settings.chunk}, which attends to its own exact states"
            )
        check_prompts(source, text, settings, context)

    def items(self, source: Source, text: str, settings: Settings) -> list[Item]:
        return prompt_items(source, text, settings, settings.contexts[-1], settings.contexts[-1])

    def measure(self, turn: Turn) -> Finding:
        bounds = chunk_bounds(turn.settings.contexts[-1], turn.settings.chunk)
        with torch.inference_mode():
            if turn.full is None:
                calls = _calls(turn, bounds)
                layers = [compare(call, *call.read) for call in calls]
            else:
                calls, cache = turn.full.evidence, turn.new_cache()
                layers = [compare(call, *_fill(cache, call, bounds)) for call in calls]
                turn.advance(bounds[-1])
        return Finding({"first": turn.item.about["first"], "layers": layers}, evidence=calls)

    def scores(self, found: Sequence[Finding], settings: Settings) -> dict[str, float]:
        layers = [layer for finding in found for layer in finding.values["layers"]]
        output, score = ([error for layer in layers for error in layer[name]] for name in ("output", "score"))
        return {
            "attention_error": sum(output) / len(output),
            "attention_error_max": torch.tensor(output, dtype=torch.float64).max().item(),  # NaN if one is
            "attention_score_error": sum(score) / len(score),
        }

    def columns(self, settings: Settings) -> list[Column]:
        return [
            Column("attention error", "attention_error", ".2%", full=False),
            Column("worst head", "attention_error_max", ".2%", full=False),
        ]

    def fault(self, scores: dict[str, float]) -> str | None:
        error = scores["attention_error"]
        return None if error <= BROKEN_ERROR else f"mean error of attention {error:.0%}"


def chunk_bounds(context: int, chunk: int) -> list[int]:
    """Where chunks begin, and the end: the last one is whole, so that there are queries enough."""
    return [*dict.fromkeys([0, *range(context % chunk, context, chunk)]), context]


def compare(call: LayerCall, keys: Tensor, values: Tensor) -> dict[str, Any]:
    """The relative errors of a layer's heads, in the L2 norm over its queries: of outputs and of probabilities."""
    exact, found = _Reading.of(call, *call.read), _Reading.of(call, keys, values)
    squares = torch.zeros(2, 2, call.query.shape[1], device=call.query.device)
    for first in range(0, call.query.shape[2], QUERIES_AT_ONCE):
        queries = slice(first, first + QUERIES_AT_ONCE)
        squares[0] += _squares(exact.output(queries), found.output(queries))
        squares[1] += _squares(exact.probabilities(queries), found.probabilities(queries))
    output, score = _relative(squares)
    return {"layer": call.layer, "output": output.tolist(), "score": score.tolist()}


@dataclass(frozen=True)
class _Reading:
    """Attention of a call's queries on some keys and values, which are those of one layer.

    keys, values: a KV head for every query head. wide_keys: float32 [1, Hkv, D, columns].
    """

    call: LayerCall
    keys: Tensor
    values: Tensor
    wide_keys: Tensor

    @staticmethod
    def of(call: LayerCall, keys: Tensor, values: Tensor) -> _Reading:
        # Contiguous, since matrix products of other strides differ in their last bits.
        wide_keys = keys.to(torch.float32).contiguous().transpose(2, 3)
        repeats = call.query.shape[1] // keys.shape[1]
        if repeats > 1:
            keys, values = (states.repeat_interleave(repeats, dim=1) for states in (keys, values))
        return _Reading(call, keys, values, wide_keys)

    def output(self, queries: slice) -> Tensor:
        """[1, Hq, q, Dv], as the cache's own kernels have it if it has any."""
        query, mask = self._asked(queries)
        return F.scaled_dot_product_attention(query, self.keys, self.values, mask, scale=self.call.scale)

    def probabilities(self, queries: slice) -> Tensor:
        """float32 [1, Hq, q, columns]"""
        query, mask = self._asked(queries)
        scale = query.shape[-1] ** -0.5 if self.call.scale is None else self.call.scale
        grouped = query.to(torch.float32).unflatten(1, (self.wide_keys.shape[1], -1))  # [1, Hkv, n_rep, q, D]
        scores = (grouped.flatten(2, 3) @ self.wide_keys * scale).unflatten(2, grouped.shape[2:4]).flatten(1, 2)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        probabilities: Tensor = scores.softmax(dim=-1)
        return probabilities

    def _asked(self, queries: slice) -> tuple[Tensor, Tensor | None]:
        mask = self.call.mask
        if mask is not None and mask.shape[-2] > 1:
            mask = mask[..., queries, :]
        return self.call.query[:, :, queries], mask


def _calls(turn: Turn, bounds: Sequence[int]) -> list[LayerCall]:
    settings, subject = turn.settings, turn.subject
    ids = encode_prompt(subject.source, turn.text, settings, settings.contexts[-1], turn.item.about["first"])
    calls = capture(subject, ids.to(subject.model.device), bounds, QUERIES, turn.advance)
    if not calls:
        raise EvalError(_why_nothing(subject.model.config._attn_implementation))
    return calls


def _why_nothing(implementation: str | None) -> str:
    if implementation != "sdpa":
        return f"attention needs a model that uses sdpa, and this one uses {implementation!r}: --attn sdpa"
    return "leave out attention: in this model sdpa never reads what its cache returns, as where that holds latents"


def _fill(cache: Cache, call: LayerCall, bounds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What a layer of `cache` returns once it was given everything, chunk by chunk."""
    for first, last in pairwise(bounds):
        key, value = (states[:, :, first:last] for states in call.given)
        keys, values = cache.update(key, value, call.layer)
    columns = call.read[0].shape[2]
    if keys.shape[2] > columns:  # a cache that goes on to show what has left a sliding window
        keys, values = keys[:, :, -columns:], values[:, :, -columns:]
    return keys, values


def _squares(exact: Tensor, found: Tensor) -> Tensor:
    """Sums of squares per head, [2, Hq]: of the difference, and of what is exact."""
    parts = (found.to(torch.float32) - exact.to(torch.float32), exact.to(torch.float32))
    return torch.stack([part.square().sum(dim=(0, 2, 3)) for part in parts])


def _relative(squares: Tensor) -> Tensor:
    """Errors [kinds, Hq] from sums of squares [kinds, 2, Hq]; 0 where neither is more than nothing."""
    return (squares[:, 0] / squares[:, 1].clamp_min(torch.finfo(torch.float32).tiny)).sqrt()


TASK: Task = Attention()
