"""What attention reads in each layer of a model: states, queries and mask of one pass, without touching the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PreTrainedConfig

from kvquant.compat import CACHE_ARGUMENT
from kvquant_evals.model import Subject


@dataclass(frozen=True)
class LayerCall:
    """The last queries of a context in one layer, and what they attend to.

    given: all tokens' keys and values [1, Hkv, T, D], as a cache is given them.
    read: those that attention reads; in a layer with a sliding window they are not all.
    query: [1, Hq, Q, D]; mask: None or broadcastable to [1, Hq, Q, columns that are read].
    """

    layer: int
    given: tuple[Tensor, Tensor]
    read: tuple[Tensor, Tensor]
    query: Tensor
    mask: Tensor | None
    scale: float | None


def capture(
    subject: Subject, ids: Tensor, bounds: Sequence[int], queries: int, advance: Callable[[int], None]
) -> list[LayerCall]:
    """The layers in which F.scaled_dot_product_attention reads what a cache returns, in order.

    ids: int64 [1, T]. bounds: where the chunks of the pass begin, and T. queries: how many of the last chunk are kept.
    """
    cache = _RecordingCache(subject.model.config)
    calls = _RecordedCalls(cache, queries)
    for first, last in pairwise(bounds):
        with calls:
            subject.model(ids[:, first:last], **{CACHE_ARGUMENT: cache}, use_cache=True)
        advance(last - first)
    return [
        LayerCall(layer, cache.given(layer), cache.returned[layer], *call)
        for layer, call in sorted(calls.found.items())
    ]


class _RecordingCache(DynamicCache):
    """A DynamicCache that remembers what it was given in each layer, and what it returned.

    latest: the layer that was updated last, until attention has read it.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self.latest: int | None = None
        self.returned: dict[int, tuple[Tensor, Tensor]] = {}
        self._given: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        parts = self._given.setdefault(layer_idx, [])
        if keys.shape[2] == sum(part[0].shape[2] for part in parts) + key_states.shape[2]:
            parts[:] = [(keys, values)]  # what the layer keeps anyway takes no memory of its own
        else:
            # Copies, since new states may be a view of a product that holds the queries as well.
            parts.append((key_states.clone(), value_states.clone()))
        self.latest, self.returned[layer_idx] = layer_idx, (keys, values)
        return keys, values

    def given(self, layer: int) -> tuple[Tensor, Tensor]:
        """All that a layer was given, [1, Hkv, T, D]."""
        keys, values = zip(*self._given[layer], strict=True)
        return (keys[0], values[0]) if len(keys) == 1 else (torch.cat(keys, dim=2), torch.cat(values, dim=2))


class _RecordedCalls(TorchFunctionMode):
    """While active, takes down how a model calls F.scaled_dot_product_attention on what the cache has just returned.

    found: by layer, the last queries, their mask and the scale of the latest call.
    """

    def __init__(self, cache: _RecordingCache, queries: int) -> None:
        super().__init__()
        self._cache, self._queries = cache, queries
        self.found: dict[int, tuple[Tensor, Tensor | None, float | None]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._take(*args, **kwargs)
        return func(*args, **kwargs)

    def _take(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        layer, self._cache.latest = self._cache.latest, None
        if layer is None or not all(map(_is_repeated, (key, value), self._cache.returned[layer])):
            return
        if is_causal:
            attn_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None and attn_mask.shape[-2] > 1:
            attn_mask = attn_mask[..., -self._queries :, :]
        self.found[layer] = query[:, :, -self._queries :].clone(), attn_mask, scale


def _is_repeated(read: Tensor, returned: Tensor) -> bool:
    """Whether attention reads what the cache returned, each KV head once or for several query heads in a row.

    Not so where it reads what a model makes of that: keys of latents, or heads in another order.
    """
    repeats = read.shape[1] // returned.shape[1]
    if read.shape != (returned.shape[0], returned.shape[1] * repeats, *returned.shape[2:]):
        return False
    last = returned[:, :, -1].repeat_interleave(repeats, dim=1)  # one token tells, and costs little
    return torch.allclose(read[:, :, -1], last, rtol=0, atol=0, equal_nan=True)
