"""How attention reads a cache's packed states, observed while tiny models generate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from families import (
    ATTENTIONS,
    PADDING,
    SMALL_PAGES,
    WAYS,
    generate,
    new_cache,
    prompt,
    rows_of,
    tiny_config,
    tiny_model,
)
from family_table import FAMILIES
from replay import parts
from transformers import Cache

from kvquant import QuantCache, QuantLayer, interface, transport
from kvquant.snapshot import Snapshot
from kvquant.transport import LazyStates

KINDS = {
    "DynamicLayer": "full attention",
    "QuantLayer": "full attention",
    "DynamicSlidingWindowLayer": "sliding window",
    "LinearAttentionLayer": "recurrent state",
    "LinearAttentionAndFullAttentionLayer": "recurrent state with attention",
    "DummyLayer": "shared with another layer",
}


def observe(name: str) -> dict[str, Any]:
    """What a family's layers are, how each attention reads those that are packed, and what transformers refuses."""
    family, kinds = FAMILIES[name], (set(), set())
    reading, pads_stored = {}, []
    for attention in ATTENTIONS:
        if family.limit(attention) is None:
            cache, ways = _run(name, attention)
            layers = [(part, layer) for part in range(len(parts(cache))) for layer in parts(cache)[part].layers]
            for part, layer in layers:
                kinds[isinstance(layer, QuantLayer)].add(_kind(name, part, layer))
            packed = [layer for _, layer in layers if isinstance(layer, QuantLayer)]
            reading[attention] = " and ".join(sorted(ways)) or "not packed"
            if packed and all(row.start == 0 for layer in packed for row in layer.states.snapshot().rows):
                pads_stored.append(attention)
    return {
        "family": name,
        "packed": sorted(kinds[True]),
        "not_packed": sorted(kinds[False]),
        "reading": reading,
        "stores_padding": pads_stored,
        "limits": [limit._asdict() for limit in family.limits],
    }


def _run(name: str, attention: str) -> tuple[Cache, set[str]]:
    """The cache of a padded greedy run, and the ways in which packed states were read there and in other runs."""
    model, ways = tiny_model(name, attention), set()
    for way, options in WAYS.items():
        if FAMILIES[name].limit(way) is None:
            for padding in (0, PADDING):
                cache = new_cache(name, partial(QuantCache, bits=4, **SMALL_PAGES, **FAMILIES[name].options))
                with readings() as seen:
                    generate(model, prompt(model, rows_of(way), padding), cache, **options)
                ways |= seen
    return cache, ways


def _kind(name: str, part: int, layer: Any) -> str:
    if part == 1:
        return "cross-attention"
    rank = getattr(tiny_config(name), "kv_lora_rank", None)
    if isinstance(layer, QuantLayer) and layer.keys.shape[-1] == rank:
        return "latents"
    return KINDS[type(layer).__name__]


@contextmanager
def readings() -> Iterator[set[str]]:
    """How packed states are read meanwhile: "fused" (as they are) or "materialized" (dequantized first).

    Prompts do not count: all their states are exact.
    """
    seen: set[str] = set()
    materialize = LazyStates.materialize

    def materializing(lazy: LazyStates) -> Any:
        if not lazy._snapshot.is_exact:
            seen.add("materialized")
        return materialize(lazy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LazyStates, "materialize", materializing)
        for module in (transport, interface):
            patch.setattr(module, "attend", _noting(module.attend, seen))
        yield seen


def _noting(attend: Any, seen: set[str]) -> Any:
    def noting(states: Snapshot, call: Any) -> Any:
        if not states.is_exact:
            seen.add("fused")
        return attend(states, call)

    return noting
