"""Attention of one new token over cached states, without a model around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvquant import QuantCache
from kvquant_evals.bench.race import Contender, Effort, Timing, label_of, race

KIND = "attention"


@dataclass(frozen=True)
class Shape:
    """One layer's attention while decoding one token: query heads, KV heads, head_dim. The default is Llama-3-8B's."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128


def time_attention(
    shape: Shape, contexts: Sequence[int], bits: Sequence[Any], threads: Sequence[int], effort: Effort
) -> list[Timing]:
    """Attention of one token over bfloat16 states: torch's forms, and packed caches as a model's sdpa calls them."""
    timings = []
    for context in contexts:
        contenders = torch_forms(shape, context)
        contenders |= {label_of(b): _packed(shape, context, b) for b in bits}
        for count in threads:
            timings += race(KIND, contenders, context, count, effort)
    return timings


def torch_forms(shape: Shape, context: int) -> dict[str, Contender]:
    """What stock transformers calls, and faster ways to write the same with torch."""
    groups = shape.num_heads // shape.num_kv_heads
    key, value = (torch.randn(1, shape.num_kv_heads, context, shape.head_dim).bfloat16() for _ in range(2))
    query = torch.randn(1, shape.num_heads, 1, shape.head_dim).bfloat16()
    packed = query.view(1, shape.num_kv_heads, groups, shape.head_dim)

    def by_matmul() -> Tensor:
        scores = (packed @ key.transpose(-1, -2)).float() * shape.head_dim**-0.5
        weights: Tensor = scores.softmax(dim=-1).bfloat16()
        return weights @ value

    forms: dict[str, Callable[[], Tensor]] = {
        "sdpa bf16, enable_gqa": lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True),
        "sdpa bf16, packed heads": lambda: F.scaled_dot_product_attention(packed, key, value),
        "matmul, softmax, matmul bf16": by_matmul,
    }
    return {label: Contender(form, key.nbytes + value.nbytes) for label, form in forms.items()}


def _packed(shape: Shape, context: int, bits: Any) -> Contender:
    cache = QuantCache(bits=bits, clip=False)  # how ranges were found does not matter for time
    states = torch.randn(1, shape.num_kv_heads, context, shape.head_dim).bfloat16()
    query = torch.randn(1, shape.num_heads, 1, shape.head_dim).bfloat16()
    cache.update(states, states, 0)
    new = states[:, :, :1]

    def run() -> Tensor:
        key, value = cache.update(new, new, 0)
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return Contender(run, cache.memory().total)
