"""How long decoding takes on this machine: attention alone, and a model's whole step, at several context lengths.

Contenders take turns within each round, so that what else the machine does hits all alike. Times are medians in ms.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache, DynamicCache

from kvquant import QuantCache
from kvquant.compat import CACHE_ARGUMENT
from kvquant_evals.model import Subject
from kvquant_evals.runner import versions

# A median whose middle half of rounds spreads wider than this share of it is marked as noisy.
NOISY = 0.15


@dataclass(frozen=True)
class Shape:
    """One layer's attention while decoding one token: query heads, KV heads, head_dim. The default is Llama-3-8B's."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128


@dataclass(frozen=True)
class Timing:
    """Median milliseconds of one contender, and how wide the middle half of its rounds spreads relative to that."""

    kind: str
    contender: str
    context: int
    threads: int
    milliseconds: float
    spread: float
    rounds: int

    @property
    def is_noisy(self) -> bool:
        return self.spread > NOISY


def time_attention(
    shape: Shape, contexts: Sequence[int], bits: Sequence[Any], threads: Sequence[int], rounds: int
) -> list[Timing]:
    """Attention of one token over bfloat16 states: torch's forms, and packed caches as a model's sdpa calls them."""
    timings = []
    for context in contexts:
        contenders = _torch_forms(shape, context)
        contenders |= {f"kvquant {b}": _packed_attention(shape, context, b) for b in bits}
        for count in threads:
            timings += _race("attention", contenders, context, count, rounds)
    return timings


def time_decoding(
    subject: Subject, contexts: Sequence[int], bits: Sequence[Any], threads: Sequence[int], rounds: int
) -> list[Timing]:
    """A model's decoding step over caches that are filled with random states of the context's length."""
    kind = f"decoding, {str(subject.model.dtype).removeprefix('torch.')}"
    timings = []
    for context in contexts:
        caches: dict[str, Cache] = {"DynamicCache": DynamicCache()}
        caches |= {f"kvquant {b}": QuantCache(bits=b) for b in bits}
        contenders = {label: _decoding(subject, cache, context) for label, cache in caches.items()}
        for count in threads:
            timings += _race(kind, contenders, context, count, rounds)
    return timings


def report(timings: Sequence[Timing], shape: Shape, model: str) -> dict[str, Any]:
    """All that is needed to read and repeat the timings, for JSON."""
    machine = {"processor": _processor(), "cores": os.cpu_count(), "system": platform.system()}
    rows = [asdict(timing) | {"is_noisy": timing.is_noisy} for timing in timings]
    return {"versions": versions(), "machine": machine, "shape": asdict(shape), "model": model, "timings": rows}


def _race(kind: str, contenders: dict[str, Callable[[], Any]], context: int, threads: int, rounds: int) -> list[Timing]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    seconds: dict[str, list[float]] = {label: [] for label in contenders}
    with torch.inference_mode():
        for round_index in range(rounds + 1):
            for label, run in contenders.items():
                begin = time.perf_counter()
                run()
                if round_index:  # the first round warms up
                    seconds[label].append(time.perf_counter() - begin)
    torch.set_num_threads(before)
    return [_timing(kind, label, context, threads, times) for label, times in seconds.items()]


def _timing(kind: str, label: str, context: int, threads: int, seconds: list[float]) -> Timing:
    low, median, high = torch.tensor(seconds).quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    return Timing(kind, label, context, threads, 1e3 * median, (high - low) / median, len(seconds))


def _torch_forms(shape: Shape, context: int) -> dict[str, Callable[[], Tensor]]:
    groups = shape.num_heads // shape.num_kv_heads
    key, value = (torch.randn(1, shape.num_kv_heads, context, shape.head_dim).bfloat16() for _ in range(2))
    query = torch.randn(1, shape.num_heads, 1, shape.head_dim).bfloat16()
    packed = query.view(1, shape.num_kv_heads, groups, shape.head_dim)

    def by_matmul() -> Tensor:
        scores = (packed @ key.transpose(-1, -2)).float() * shape.head_dim**-0.5
        weights: Tensor = scores.softmax(dim=-1).bfloat16()
        return weights @ value

    return {
        "sdpa bf16, enable_gqa": lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True),
        "sdpa bf16, packed heads": lambda: F.scaled_dot_product_attention(packed, key, value),
        "matmul, softmax, matmul bf16": by_matmul,
    }


def _packed_attention(shape: Shape, context: int, bits: Any) -> Callable[[], Tensor]:
    cache = QuantCache(bits=bits, clip=False)  # how ranges were found does not matter for time
    states = torch.randn(1, shape.num_kv_heads, context, shape.head_dim).bfloat16()
    query = torch.randn(1, shape.num_heads, 1, shape.head_dim).bfloat16()
    cache.update(states, states, 0)
    cache.memory()  # packs what is due
    new = states[:, :, :1]

    def run() -> Tensor:
        key, value = cache.update(new, new, 0)
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return run


def _decoding(subject: Subject, cache: Cache, context: int) -> Callable[[], Any]:
    model, config = subject.model, subject.source.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        states = torch.randn(1, heads, context, dim, dtype=model.dtype)
        cache.update(states, states, layer)
    token = torch.zeros(1, 1, dtype=torch.long)
    return lambda: model(token, **{CACHE_ARGUMENT: cache}, use_cache=True)


def _processor() -> str:
    """The processor's name and the vector instructions that matter here."""
    capability = torch.backends.cpu.get_cpu_capability()
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text().split("\n") if listing.exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    flags = next((line for line in lines if line.startswith("flags")), "")
    return f"{name}, {capability}{' with VNNI' if 'avx512_vnni' in flags else ''}"
