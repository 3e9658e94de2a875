"""generate(), recorded: the calls it made to the model and to the cache, so that they can be made again on another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache, PreTrainedModel

from kvquant import QuantCache

KV = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Forward:
    """A call of the model, with all its arguments but the cache."""

    arguments: dict[str, Any]
    cache_name: str
    logits: Tensor

    def repeat(self, model: PreTrainedModel, cache: Cache) -> list[Tensor]:
        return [model(**self.arguments, **{self.cache_name: cache}).logits]


@dataclass(frozen=True)
class Change:
    """A call of a method that changes the cache."""

    method: str
    arguments: tuple[Any, ...]

    def repeat(self, model: PreTrainedModel, cache: Cache) -> list[Tensor]:
        getattr(cache, self.method)(*self.arguments)
        return []


@dataclass(frozen=True)
class Trace:
    """What a run did, in order, and the keys and values that it gave our caches."""

    events: list[Forward | Change] = field(default_factory=list)
    states: list[KV] = field(default_factory=list)

    @property
    def logits(self) -> list[Tensor]:
        return [event.logits for event in self.events if isinstance(event, Forward)]

    @property
    def changes(self) -> list[Change]:
        return [event for event in self.events if isinstance(event, Change)]

    @torch.no_grad()
    def repeat(self, model: PreTrainedModel, cache: Cache) -> list[Tensor]:
        """The logits of the same calls with `cache`, which must be empty."""
        return [logits for event in self.events for logits in event.repeat(model, cache)]


_CHANGES = ("crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices", "activate_past_recording")


@contextmanager
def recording(model: PreTrainedModel, cache: Cache) -> Iterator[Trace]:
    """The trace of what happens to `model` and `cache` meanwhile."""
    trace = Trace()

    def after_forward(module: Any, args: tuple[Any, ...], arguments: dict[str, Any], output: Any) -> None:
        assert not args
        (name,) = (name for name, value in arguments.items() if value is cache)
        others = {key: value for key, value in arguments.items() if key != name}
        trace.events.append(Forward(others, name, output.logits))

    with pytest.MonkeyPatch.context() as patch, ExitStack() as hooks:
        hooks.callback(model.register_forward_hook(after_forward, with_kwargs=True).remove)
        for part in parts(cache):
            if isinstance(part, QuantCache):
                patch.setattr(part, "update", _recording_update(part, trace))
        for method in _CHANGES:
            if hasattr(cache, method):  # the last came with transformers 5.14
                patch.setattr(cache, method, _recording_change(cache, method, trace))
        yield trace


def parts(cache: Cache) -> list[Cache]:
    """The caches that hold layers: the two of an encoder-decoder cache, or the cache itself."""
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def _recording_update(cache: Cache, trace: Trace) -> Any:
    update = cache.update

    def recorded(key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> KV:
        trace.states.append((key, value))
        return update(key, value, *args, **kwargs)

    return recorded


def _recording_change(cache: Cache, method: str, trace: Trace) -> Any:
    change = getattr(cache, method)

    def recorded(*args: Any) -> None:
        trace.events.append(Change(method, args))
        change(*args)

    return recorded
