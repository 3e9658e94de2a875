"""QuantCache: transformers' contract for a cache, and only that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from os import PathLike
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from kvquant import compat
from kvquant.config import Bits, QuantConfig
from kvquant.hybrid import HybridCache
from kvquant.layer import QuantLayer, counterpart, packed, rows_held
from kvquant.layer_policy import LayerPolicy
from kvquant.memory import MemoryReport, total
from kvquant.migration import FormerNames, refuse_foreign
from kvquant.summary import CacheSummary, LayerKind


class QuantCache(HybridCache, FormerNames):  # type: ignore[misc]  # the last serves only what the first lacks
    """A KV cache that stores full-attention layers packed and is used like DynamicCache.

    >>> model.generate(**inputs, cache=QuantCache(bits=4))

    bits: 8, 4, 3, 2, "fp8", 16 (full precision through the same machinery), or a pair (key, value) of these.
    config: the model's configuration. With it, linear and other layers are what transformers makes them and stay
    unquantized, and so do those with sliding windows, unless `quantize_sliding=True` and the window is longer than what
    stays exact anyway. Without it, every layer is taken to be full attention.
    quant: a QuantConfig, instead of `bits` and the options below.
    skip_layers: indices of layers that stay in full precision; with `config`, -1 is the last one.
    layer_bits: other bits for single layers, by index, as in {-1: 8}.
    offloading, offload_only_non_sliding: as of DynamicCache: layers wait in CPU memory for their turn.
    options: sinks, residual_length, page_size, rotation, max_length, precision, quantize_sliding and quantize_rope (see
    QuantConfig), and clip (see QuantConfig.preset).

    Raises ValueError or TypeError for arguments out of range, or if both `bits` and `quant` are given.
    """

    def __init__(
        self,
        bits: Bits | tuple[Bits, Bits] | None = None,
        *,
        config: PreTrainedConfig | None = None,
        quant: QuantConfig | None = None,
        skip_layers: Iterable[int] = (),
        layer_bits: Mapping[int, Bits | tuple[Bits, Bits]] | None = None,
        offloading: bool = False,
        offload_only_non_sliding: bool = False,
        **options: Any,
    ) -> None:
        quant = _resolve(bits, quant, options)
        if config is not None and not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be a model's configuration (model.config), got {config!r}")
        super().__init__(config=config, offloading=offloading, offload_only_non_sliding=offload_only_non_sliding)
        quantizable = None if config is None else [counterpart(layer, quant) is not None for layer in self.layers]
        self._pack(
            LayerPolicy.resolve(
                quant,
                skip_layers,
                {} if layer_bits is None else layer_bits,
                clip=options.get("clip"),
                quantizable=quantizable,
            )
        )

    def _pack(self, policy: LayerPolicy) -> None:
        """Makes the layers ours that DynamicCache's constructor has made."""
        self.quant, self.layer_policy = policy.quant, policy
        self.layers = [packed(layer, policy.of(i)) for i, layer in enumerate(self.layers)]
        self._open_layer: int | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        last, self._open_layer = self._open_layer, layer_idx
        if last is not None and last != layer_idx:
            self._settle(last)
        if last is None or layer_idx <= last:  # a step begins
            self._fit_batch(layer_idx, key_states.shape[0])
        if layer_idx >= len(self.layers) and self.layer_class_to_replicate is not None:
            self._add_layers(layer_idx + 1)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def _add_layers(self, count: int) -> None:
        # Not by transformers, which does not say the index of the layer it makes.
        new = range(len(self.layers), count)
        self.layers += [packed(DynamicLayer(), self.layer_policy.of(i)) for i in new]

    def _fit_batch(self, layer_idx: int, num_rows: int) -> None:
        """Repeats every row of a cache that was filled before generate() multiplied the batch."""
        held = rows_held(self.layers[layer_idx]) if layer_idx < len(self.layers) else 0
        if held and num_rows != held and num_rows % held == 0:
            self.batch_repeat_interleave(num_rows // held)

    def _settle(self, layer_idx: int) -> None:
        # An attention that is not ours to see has by now read the previous layer's chunk; it need not stay exact.
        layer = self.layers[layer_idx]
        if isinstance(layer, QuantLayer):
            layer.settle()

    @property
    def is_compileable(self) -> bool:
        # Of linear layers alone it would be, and generate() would compile the model; it asks DynamicCache by its type.
        return False

    def memory(self) -> MemoryReport:
        """The bytes this cache holds, by part; see MemoryReport."""
        return cache_memory(self)

    def summary(self) -> CacheSummary:
        """How many layers of which kind this cache has, and how each is stored; see CacheSummary."""
        added = None if self.layer_class_to_replicate is None else _layer_kind(QuantLayer(self.quant))
        return CacheSummary.of(map(_layer_kind, self.layers), added)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes all states to a safetensors file, packed as they are; a file that is there is replaced at the end.

        Raises NotImplementedError for layers of a kind that cannot be saved (linear attention).
        """
        from kvquant import storage  # which builds on this module

        storage.save(self, path)

    @staticmethod
    def load(
        path: str | PathLike[str],
        config: PreTrainedConfig | None = None,
        device: torch.device | str | None = None,
    ) -> QuantCache:
        """The cache that `save` wrote, on `device` (the CPU by default), to go on from.

        With the model's `config`, the cache must fit it. Raises ValueError, naming the file and what is wrong, for one
        that does not, or that is damaged, of another kind or of a newer version.
        """
        from kvquant import storage

        return storage.load(path, config, device)


def take_over(cache: DynamicCache, template: QuantCache) -> None:
    """Makes `cache`, whatever it was constructed with, a QuantCache with the options of `template`."""
    cache.__class__ = QuantCache
    cast(QuantCache, cache)._pack(template.layer_policy)


def cache_memory(cache: Cache | EncoderDecoderCache) -> MemoryReport:
    """The bytes that any of transformers' caches holds; layers other than ours count as unquantized."""
    if isinstance(cache, EncoderDecoderCache):
        return cache_memory(cache.self_attention_cache) + cache_memory(cache.cross_attention_cache)
    return total(layer.memory() if isinstance(layer, QuantLayer) else _plain_memory(layer) for layer in cache.layers)


def _resolve(bits: Bits | tuple[Bits, Bits] | None, quant: QuantConfig | None, options: dict[str, Any]) -> QuantConfig:
    refuse_foreign(options)
    if quant is None:
        if bits is None:
            raise ValueError("bits is missing; pass bits=4, for example, or quant=QuantConfig(...)")
        known = {field.name for field in fields(QuantConfig)} - {"key", "value"} | {"clip"}
        if not options.keys() <= known:
            unknown = ", ".join(sorted(options.keys() - known))
            raise TypeError(f"unknown options {unknown}; known are {', '.join(sorted(known))}")
        return QuantConfig.preset(bits, **options)
    if not isinstance(quant, QuantConfig):
        raise TypeError(f"quant must be a QuantConfig, got {quant!r}")
    if bits is not None or options:
        given = ", ".join((["bits"] if bits is not None else []) + sorted(options))
        raise ValueError(f"quant already says everything: do not pass {given} beside it, use dataclasses.replace on it")
    return quant


def _layer_kind(layer: Any) -> LayerKind:
    if not isinstance(layer, QuantLayer):
        return LayerKind(compat.layer_kind(layer), None)
    return LayerKind("sliding-window" if layer.is_sliding else "full attention", layer.stored_as)


def _plain_memory(layer: Any) -> MemoryReport:
    size = sum(held.numel() * held.element_size() for held in _tensors(vars(layer)) if held.dim() > 0)
    return MemoryReport(unquantized=size, full_precision=size)


def _tensors(held: Any) -> list[Tensor]:
    """All tensors in nested dicts, lists and tuples; of those that are made of others, these."""
    found = []
    for leaf in pytree.tree_leaves(held):
        if is_traceable_wrapper_subclass(leaf):
            found += _tensors([getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]])
        elif isinstance(leaf, Tensor):
            found.append(leaf)
    return found
