"""A cache of the values that a published layout gives back, which counts the bytes that the layout would take.

It keeps those values in the model's dtype: what comes out of attention is that of the layout, its memory and speed are
not. No layout is defined here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from kvquant import MemoryReport, cache_memory


class TileCodec(Protocol):
    """What a layout stores of keys, or of values."""

    @property
    def tile(self) -> int:
        """Tokens that are sealed together, once and for good; 1 where every token is sealed by itself."""

    def stored(self, x: Tensor) -> Tensor:
        """The values that the codes of a tile x [B, H, t, D] stand for, both float32.

        Where `tile` is 1, x may be any number of tokens, none of which depends on another.
        """

    def size(self, num_heads: int, head_dim: int) -> MemoryReport:
        """The bytes of a tile of one row: its codes, and as scales all else that is stored of it."""


@dataclass(frozen=True)
class Plan:
    """A layout. sinks: leading tokens that stay exact. key_window, value_window: most recent ones that do.

    Tokens beyond these stay exact until they fill a tile.
    """

    key: TileCodec
    value: TileCodec
    sinks: int = 0
    key_window: int = 0
    value_window: int = 0

    def part(self, index: int) -> tuple[TileCodec, int]:
        """Codec and window of keys (0) or values (1)."""
        return ((self.key, self.key_window), (self.value, self.value_window))[index]

    def sealed(self, index: int, num_tokens: int) -> int:
        """How many tokens after the sinks are sealed once there are `num_tokens`."""
        codec, window = self.part(index)
        return max(0, num_tokens - self.sinks - window) // codec.tile * codec.tile


class SimulatedLayer(DynamicLayer):
    """One full-attention layer whose older tokens have the values that a layout stores."""

    is_croppable = False

    def __init__(self, plan: Plan) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers gives it no types
        self.plan = plan

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        if key_states.shape[1] == value_states.shape[1] == 1 and value_states.shape[-1] < key_states.shape[-1]:
            raise NotImplementedError("latent states (MLA) are not keys and values of heads, for which this layout is")
        super().lazy_initialization(key_states, value_states)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Adds keys [B, Hkv, t, Dk] and values [B, Hkv, t, Dv]. What they complete is sealed for later calls only."""
        seen = self.get_seq_length()
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.keys, self.values = self._sealed(0, keys, seen), self._sealed(1, values, seen)
        return keys, values

    def _sealed(self, index: int, states: Tensor, seen: int) -> Tensor:
        """The states [B, H, T, D] with what is due since there were `seen` tokens replaced by what is stored of it."""
        codec = self.plan.part(index)[0]
        begin, end = (self.plan.sinks + self.plan.sealed(index, length) for length in (seen, states.shape[2]))
        if begin == end:
            return states
        # Tile by tile and contiguous, so that no sum depends on what is sealed at the same time.
        step = codec.tile if codec.tile > 1 else end - begin
        tiles = [tile.to(torch.float32).contiguous() for tile in states[:, :, begin:end].split(step, dim=2)]
        stored = [codec.stored(tile).to(states.dtype) for tile in tiles]
        return torch.cat([states[:, :, :begin], *stored, states[:, :, end:]], dim=2)

    def crop(self, tokens_to_remove: int) -> None:
        raise NotImplementedError(f"crop({tokens_to_remove}): what was sealed cannot be taken apart; use a copy")

    def memory(self) -> MemoryReport:
        """The bytes that the layout would take for what this layer has seen."""
        if self.keys is None or self.values is None:
            return MemoryReport()
        return self._part_memory(0, self.keys) + self._part_memory(1, self.values)

    def _part_memory(self, index: int, states: Tensor) -> MemoryReport:
        rows, num_heads, num_tokens, head_dim = states.shape
        codec, sealed = self.plan.part(index)[0], self.plan.sealed(index, num_tokens)
        size, tiles = codec.size(num_heads, head_dim), rows * sealed // codec.tile
        per_token = rows * num_heads * head_dim
        return MemoryReport(
            codes=tiles * size.codes,
            scales=tiles * size.scales,
            exact=(num_tokens - sealed) * per_token * states.element_size(),
            elements=num_tokens * per_token,
            full_precision=num_tokens * per_token * states.element_size(),
        )


class SimulatedCache(DynamicCache):
    """A cache of a model with this configuration, whose full-attention layers are simulated; others stay exact."""

    def __init__(self, plan: Plan, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        # By exact type: subclasses keep states of their own kind.
        self.layers = [SimulatedLayer(plan) if type(layer) is DynamicLayer else layer for layer in self.layers]

    def memory(self) -> MemoryReport:
        """The bytes that this cache would take in the layout that it simulates."""
        simulated = [layer for layer in self.layers if isinstance(layer, SimulatedLayer)]
        others = cache_memory(Cache(layers=[layer for layer in self.layers if not isinstance(layer, SimulatedLayer)]))
        return sum((layer.memory() for layer in simulated), others)


def memory_of(cache: Cache) -> MemoryReport:
    """The bytes that a cache holds, or would hold if it were what it simulates."""
    return cache.memory() if isinstance(cache, SimulatedCache) else cache_memory(cache)
