"""A model's whole decoding step over a filled cache: DynamicCache, transformers' QuantizedCache, and ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Cache, DynamicCache, LlamaConfig, PreTrainedModel, QuantizedCache

from kvquant import QuantCache
from kvquant.cache import cache_memory
from kvquant.compat import CACHE_ARGUMENT, register_attention
from kvquant.config import parse_bits
from kvquant_evals.bench.race import OURS, Contender, Effort, Timing, label_of, race

RANDOM_MODEL = "random-1b"
STOCK, PACKED_HEADS = "DynamicCache", "DynamicCache, packed heads"

# transformers' own quantized caches: backend, the package it needs, and its options.
_PEERS: dict[str, tuple[str, str | None, dict[str, int]]] = {
    "QuantizedCache quanto 4": ("quanto", "optimum.quanto", {"nbits": 4}),
    "QuantizedCache hqq 4": ("hqq", "hqq", {"nbits": 4}),
    "QuantizedCache hqq 8": ("hqq", "hqq", {"nbits": 8}),
    "QuantizedCache fp8": ("fp8", None, {}),
}


def random_model() -> PreTrainedModel:
    """A llama of Llama-3.2-1B's shape with random weights in bfloat16."""
    config = LlamaConfig(
        vocab_size=128_256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=131_072, tie_word_embeddings=True,
    )  # fmt: skip
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return model


def kind_of(name: str, model: PreTrainedModel) -> str:
    return f"decoding, {name.split('/')[-1]}, {str(model.dtype).removeprefix('torch.')}"


def time_decoding(
    name: str,
    model: PreTrainedModel,
    contexts: Sequence[int],
    caches: Sequence[str],
    threads: Sequence[int],
    effort: Effort,
) -> list[Timing]:
    """A model's decoding step over caches that are filled with random states of the context's length."""
    timings = []
    for context in contexts:
        contenders = {label: _contender(label, model, context) for label in caches}
        contenders = {"no cache, one token": Contender(_step(model, None), 0)} | contenders
        for count in threads:
            timings += race(kind_of(name, model), contenders, context, count, effort)
    return timings


def cache_labels(bits: Sequence[Any], peers: bool, grouped: bool = True) -> list[str]:
    """The caches to compare: ours at `bits`, DynamicCache, and the quantized ones whose packages are installed."""
    installed = [label for label, (_, package, _) in _PEERS.items() if package is None or _is_installed(package)]
    stock = [STOCK, PACKED_HEADS] if grouped else [STOCK]
    return [*stock, *(installed if peers else []), *(label_of(b) for b in bits)]


def new_cache(label: str, model: PreTrainedModel) -> Cache:
    """The empty cache that a label of `cache_labels` names."""
    if label.startswith(OURS):
        return QuantCache(bits=parse_bits(label.removeprefix(OURS)), config=model.config)
    if label in _PEERS:
        backend, _, options = _PEERS[label]
        return QuantizedCache(backend, model.config, **options)
    return DynamicCache(config=model.config)


def fill(cache: Cache, model: PreTrainedModel, context: int) -> None:
    """Gives every layer random states of `context` tokens."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        states = torch.randn(1, heads, context, dim, dtype=model.dtype)
        cache.update(states, states, layer)


def _contender(label: str, model: PreTrainedModel, context: int) -> Contender:
    cache = new_cache(label, model)
    fill(cache, model, context)
    step = _step(model, cache)
    run = _with_packed_heads(model, step) if label == PACKED_HEADS else step
    return Contender(run, cache_memory(cache).total)


def _step(model: PreTrainedModel, cache: Cache | None) -> Callable[[], Any]:
    token = torch.zeros(1, 1, dtype=torch.long)
    if cache is None:
        return lambda: model(token, use_cache=False)
    return lambda: model(token, **{CACHE_ARGUMENT: cache}, use_cache=True)


def _with_packed_heads(model: PreTrainedModel, step: Callable[[], Any]) -> Callable[[], Any]:
    """The step with the query heads of a KV head side by side, which torch's CPU kernel handles much faster."""
    register_attention("kvquant_bench_packed_heads", _packed_heads)

    def run() -> Any:
        config, before = model.config, model.config._attn_implementation
        config._attn_implementation = "kvquant_bench_packed_heads"
        try:
            return step()
        finally:
            config._attn_implementation = before

    return run


def _packed_heads(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    packed = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
    out = F.scaled_dot_product_attention(packed, key, value, scale=scaling)
    return out.reshape(query.shape[0], 1, query.shape[1], -1), None


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False
