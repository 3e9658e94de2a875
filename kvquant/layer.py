"""The layers of QuantCache: transformers' contract for a layer of a cache, and only that."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvquant import compat
from kvquant.config import QuantConfig
from kvquant.memory import MemoryReport, layer_memory
from kvquant.states import LayerStates
from kvquant.transport import LazyStates, lazy_pair


class QuantLayer(DynamicLayer):
    """One full-attention layer's keys and values, packed."""

    sliding_window: int | None = None

    def __init__(self, quant: QuantConfig) -> None:
        self.quant = quant
        self.is_initialized = False
        self._states: LayerStates | None = None
        self._leaves_device = False

    def resume(self, states: LayerStates) -> None:
        """Goes on from these states."""
        like = states.snapshot().chunk.key
        self._states, self.device, self.dtype, self.is_initialized = states, like.device, like.dtype, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device, self.dtype = key_states.device, key_states.dtype
        quant = self.quant.for_latents() if _are_latents(key_states, value_states) else self.quant
        self._states = LayerStates(quant, key_states, value_states, self.sliding_window)
        self.is_initialized = True

    @property
    def stored_as(self) -> QuantConfig:
        """How its states are stored, or will be; of latents the RoPE part may be known to stay exact only then."""
        return self.quant if self._states is None else self._states.config

    @property
    def states(self) -> LayerStates:
        if self._states is None:
            raise ValueError("this layer has seen no tokens yet")
        return self._states

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Adds keys [B, Hkv, t, Dk] and values [B, Hkv, t, Dv]; returns all of them as lazy tensors."""
        if self._states is None:
            self.lazy_initialization(key_states, value_states)
        states = self.states
        return lazy_pair(states, states.append(key_states, value_states, compat.position_ids(kwargs)))

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
        return self._held(0)

    @keys.setter
    def keys(self, keys: Tensor | None) -> None:
        raise AttributeError("keys of a QuantLayer are packed and cannot be assigned; use update()")

    @property
    def values(self) -> LazyStates | None:
        return self._held(1)

    @values.setter
    def values(self, values: Tensor | None) -> None:
        raise AttributeError("values of a QuantLayer are packed and cannot be assigned; use update()")

    def _held(self, part: int) -> LazyStates | None:
        # Cross-attention, which updates only once, reads its states here from then on: they need not stay exact.
        self.settle()
        return None if self._states is None else LazyStates(self._states, self._states.snapshot(), part)

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


def packed(layer: Any, quant: QuantConfig | None) -> Any:
    """Our layer in the place of one of transformers', or that one itself."""
    ours = None if quant is None else counterpart(layer, quant)
    if ours is None:
        return layer
    if layer.keys is not None:  # DynamicCache's constructor can be given states
        ours.update(layer.keys, layer.values)
        ours.settle()
    return ours


def counterpart(layer: Any, quant: QuantConfig) -> QuantLayer | None:
    # By exact type: subclasses keep states of their own kind, which are not ours to pack.
    if type(layer) is DynamicLayer:
        return QuantLayer(quant)
    if type(layer) is DynamicSlidingWindowLayer and quant.packs_window(layer.sliding_window):
        return QuantSlidingLayer(quant, layer.sliding_window)
    return None


def rows_held(layer: Any) -> int:
    """The rows of a layer that holds keys; 0 for others."""
    if isinstance(layer, QuantLayer):
        return layer.states.batch_size if layer.is_initialized else 0
    keys = getattr(layer, "keys", None)
    return 0 if keys is None or keys.dim() < 4 else int(keys.shape[0])
