"""QuantCache and its layer: transformers' cache contract, and only that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvquant import compat
from kvquant.config import Bits, QuantConfig
from kvquant.hybrid import HybridCache
from kvquant.layer_policy import LayerPolicy
from kvquant.memory import MemoryReport, layer_memory, total
from kvquant.migration import FormerNames, refuse_foreign
from kvquant.states import LayerStates
from kvquant.summary import CacheSummary, LayerKind
from kvquant.transport import LazyStates, lazy_pair


class QuantLayer(DynamicLayer):
    """One full-attention layer's keys and values, packed."""

    sliding_window: int | None = None

    def __init__(self, quant: QuantConfig) -> None:
        self.quant = quant
        self.is_initialized = False
        self._states: LayerStates | None = None
        self._leaves_device = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device, self.dtype = key_states.device, key_states.dtype
        quant = self.quant.for_latents() if _are_latents(key_states, value_states) else self.quant
        self._states = LayerStates(quant, key_states, value_states, self.sliding_window)
        self.is_initialized = True

    @property
    def states(self) -> LayerStates:
        if self._states is None:
            raise ValueError("this layer has seen no tokens yet")
        return self._states

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Adds keys [B, Hkv, t, Dk] and values [B, Hkv, t, Dv]; returns all of them as lazy tensors."""
        if self._states is None:
            self.lazy_initialization(key_states, value_states)
        snapshot = self.states.append(key_states, value_states, compat.position_ids(kwargs))
        return lazy_pair(self.states, snapshot)

    def settle(self) -> None:
        """Packs what is due. Called when the layer's attention is over; calling it again changes nothing."""
        if self._states is not None:
            self._states.settle()
            if self._leaves_device:
                self._states.move(torch.device("cpu"))
        self._leaves_device = False

    @property
    def keys(self) -> LazyStates | None:
        """All keys [B, Hkv, T, Dk], lazy; None before the first token. Attention on keys and values is fused."""
        return None if self._states is None else LazyStates(self._states, self._states.snapshot(), 0)

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        raise AttributeError("keys of a QuantLayer are packed and cannot be assigned; use update()")

    @property
    def values(self) -> LazyStates | None:
        return None if self._states is None else LazyStates(self._states, self._states.snapshot(), 1)

    @values.setter
    def values(self, values: Tensor | None) -> None:
        raise AttributeError("values of a QuantLayer are packed and cannot be assigned; use update()")

    def get_seq_length(self) -> int:
        return 0 if self._states is None else self._states.num_seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.13

    def reset(self) -> None:
        self._states = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens: `tokens_to_remove` is minus their number, as in transformers."""
        count = compat.tokens_to_crop(tokens_to_remove, self.get_seq_length())
        if count and self._states is not None:
            self._states.crop(count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._states is not None:
            self._states.select(torch.arange(self._states.batch_size)[torch.as_tensor(indices).cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._states is not None:
            self._states.select(torch.arange(self._states.batch_size).repeat_interleave(repeats))

    def offload(self) -> None:
        """Moves everything to CPU memory, once the attention that is to read it there is over."""
        self._leaves_device = True

    def prefetch(self) -> None:
        """Moves everything back to the layer's device."""
        self._leaves_device = False
        if self._states is not None:
            self._states.return_to(self.device)

    def memory(self) -> MemoryReport:
        self.settle()
        return MemoryReport() if self._states is None else layer_memory(self._states.snapshot(), self._states.tail_room)


class QuantSlidingLayer(QuantLayer):
    """One sliding-window layer's keys and values, packed. Pages that have left the window are forgotten."""

    is_sliding = True

    def __init__(self, quant: QuantConfig, sliding_window: int) -> None:
        super().__init__(quant)
        self.sliding_window: int = sliding_window
        self.record_past = False
        self._sliding_window_tensor = torch.tensor(sliding_window)  # what iterating over a DynamicCache gives

    def activate_past_recording(self) -> None:
        """Keeps what leaves the window until the next crop."""
        self.record_past = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As of any layer; of the tokens before the new ones, the last sliding_window - 1 are returned."""
        if self._states is None:
            self.lazy_initialization(key_states, value_states)
        self.states.keep_past = self.record_past
        return super().update(key_states, value_states, *args, **kwargs)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = self.get_seq_length()
        offset = max(0, seen - self.sliding_window + 1)
        return seen - offset + query_length, offset

    def get_max_length(self) -> int:
        return self.sliding_window

    get_max_cache_shape = get_max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens, and then what has left the window. Raises RuntimeError if that was not kept."""
        seen = self.get_seq_length()
        if seen >= self.sliding_window and not self.record_past and compat.tokens_to_crop(tokens_to_remove, seen):
            raise RuntimeError(
                f"crop({tokens_to_remove}) of a full sliding window of {self.sliding_window} tokens would show again "
                "what has left it; call activate_past_recording() on the cache before the tokens come that you may crop"
            )
        super().crop(tokens_to_remove)
        if self._states is not None:
            self._states.forget_passed()


def _are_latents(key: Tensor, value: Tensor) -> bool:
    """Whether keys are latents and values the RoPE part of the keys (MLA, since transformers 5.15)."""
    return key.shape[1] == value.shape[1] == 1 and value.shape[-1] < key.shape[-1]


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
        quantizable = None if config is None else [_counterpart(layer, quant) is not None for layer in self.layers]
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
        self.layers = [_packed(layer, policy.of(i)) for i, layer in enumerate(self.layers)]
        self._open_layer: int | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        last, self._open_layer = self._open_layer, layer_idx
        if last is not None and last != layer_idx:
            self._settle(last)
        if last is None or layer_idx <= last:  # a step begins
            self._fit_batch(layer_idx, key_states.shape[0])
        if self.layer_class_to_replicate is not None:  # made here, since transformers does not say which one it makes
            new = range(len(self.layers), layer_idx + 1)
            self.layers += [_packed(DynamicLayer(), self.layer_policy.of(i)) for i in new]
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def _fit_batch(self, layer_idx: int, num_rows: int) -> None:
        """Repeats every row of a cache that was filled before generate() multiplied the batch."""
        held = _num_rows(self.layers[layer_idx]) if layer_idx < len(self.layers) else 0
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
        known = {"sinks", "residual_length", "page_size", "rotation", "clip", "max_length", "precision"}
        known |= {"quantize_sliding", "quantize_rope"}
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


def _packed(layer: Any, quant: QuantConfig | None) -> Any:
    """Our layer in the place of one of transformers', or that one itself."""
    ours = None if quant is None else _counterpart(layer, quant)
    if ours is None:
        return layer
    if layer.keys is not None:  # DynamicCache's constructor can be given states
        ours.update(layer.keys, layer.values)
        ours.settle()
    return ours


def _counterpart(layer: Any, quant: QuantConfig) -> QuantLayer | None:
    # By exact type: subclasses keep states of their own kind, which are not ours to pack.
    if type(layer) is DynamicLayer:
        return QuantLayer(quant)
    if type(layer) is DynamicSlidingWindowLayer and quant.packs_window(layer.sliding_window):
        return QuantSlidingLayer(quant, layer.sliding_window)
    return None


def _num_rows(layer: Any) -> int:
    """The rows of a layer that holds keys; 0 for others."""
    keys = getattr(layer, "keys", None)
    return 0 if keys is None or keys.dim() < 4 else int(keys.shape[0])


def _layer_kind(layer: Any) -> LayerKind:
    if not isinstance(layer, QuantLayer):
        return LayerKind(compat.layer_kind(layer), None)
    return LayerKind("sliding-window" if layer.is_sliding else "full attention", layer.quant)


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
