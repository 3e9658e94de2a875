"""One layer as a file holds it: a plain description, and tensors. The file itself is storage.py's.

The tensors of a packed layer are

    starts, num_pages  int32 [B]                   the first column and the number of pages of each row
    page_table         int32 [sum of num_pages]    the rows' pages, one row after the other
    pages              uint8 [pages, page_bytes]   records of PlainLayout, each page once
    tail.*, sinks.*    [B, Hkv, tokens, D]         exact states, .key and .value; sinks where there are any

and of a layer that is not packed, states.key and states.value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvquant import compat
from kvquant.config import QuantConfig
from kvquant.description import DTYPES, Stored, config_of, count, field, plain_config
from kvquant.layer import QuantLayer, QuantSlidingLayer
from kvquant.layout import PageLayout, PlainLayout
from kvquant.pages import Page, PagePool, page_parts, pool_for
from kvquant.snapshot import KV, RUN_PAGES, Row, Rows, Snapshot
from kvquant.states import LayerStates
from kvquant.tail import empty_like
from kvquant.window import FULL_ATTENTION, Window

L = TypeVar("L", bound=DynamicLayer)
P = TypeVar("P", bound=QuantLayer)


def store(layer: Any) -> Stored:
    """What a file holds of a layer. Raises NotImplementedError for layers, dtypes and formats that it cannot hold."""
    kind = _KINDS.get(type(layer))
    if kind is None:
        known = ", ".join(cls.__name__ for cls in _KINDS)
        raise NotImplementedError(f"it is a {title(layer)}, which is none of {known}")
    stored = kind.store(layer)
    return Stored({"kind": kind.name, **stored.plain}, stored.tensors)


def restore(stored: Stored, device: torch.device) -> Any:
    """The layer that `store` described. Raises ValueError for anything that `store` does not write."""
    name = field(stored.plain, "kind", str)
    kinds = {kind.name: kind for kind in _KINDS.values()}
    if name not in kinds:
        raise ValueError(f"its kind {name!r} is none of {', '.join(kinds)}")
    layer = kinds[name].restore(stored, device)
    refuse_rest(stored.tensors)
    return layer


def title(layer: Any) -> str:
    """What kind of layer it is, packed or not, for messages and comparison."""
    if type(layer) not in _WINDOWS:
        return type(layer).__name__
    return f"layer with a window of {layer.sliding_window} tokens" if _WINDOWS[type(layer)] else "full-attention layer"


def refuse_rest(tensors: dict[str, Tensor]) -> None:
    if tensors:
        raise ValueError(f"tensors {', '.join(sorted(tensors))} belong to nothing")


def _store_packed(layer: QuantLayer) -> Stored:
    layer.settle()
    plain = {"quant": plain_config(layer.stored_as), "is_initialized": layer.is_initialized}
    if not layer.is_initialized:
        return Stored(plain, {})
    held = layer.states.snapshot()
    number = {page: i for i, page in enumerate(dict.fromkeys(page for row in held.rows for page in row.pages))}
    table = torch.tensor([number[page] for row in held.rows for page in row.pages], dtype=torch.int32)
    tensors = {"starts": held.rows.starts, "num_pages": held.rows.num_pages, "page_table": table}
    tensors |= _states("tail", held.tail) | ({} if held.sinks is None else _states("sinks", held.sinks))
    if number:
        tensors["pages"] = _plain_records(held, list(number))
    return Stored(plain | {"tokens": held.settled, **_shapes(held.tail)}, tensors)


def _restore_packed(stored: Stored, device: torch.device) -> QuantLayer:
    return _resumed(QuantLayer(config_of(stored.plain)), stored, FULL_ATTENTION, device)


def _store_packed_sliding(layer: QuantSlidingLayer) -> Stored:
    stored = _store_packed(layer)
    window = layer.states.snapshot().window if layer.is_initialized else Window(layer.sliding_window)
    return Stored(stored.plain | {"window": window._asdict(), "records_past": layer.record_past}, stored.tensors)


def _restore_packed_sliding(stored: Stored, device: torch.device) -> QuantSlidingLayer:
    plain = field(stored.plain, "window", dict)
    window = Window(*(count(plain, name) for name in Window._fields))
    layer = QuantSlidingLayer(config_of(stored.plain), count(plain, "size"))
    layer.record_past = field(stored.plain, "records_past", bool)
    return _resumed(layer, stored, window, device)


def _resumed(layer: P, stored: Stored, window: Window, device: torch.device) -> P:
    """The layer with the stored states, if there are any."""
    config = layer.quant
    if not field(stored.plain, "is_initialized", bool):
        return layer
    tokens = count(stored.plain, "tokens")
    starts = stored.take("starts", torch.int32, None).tolist()
    counts = stored.take("num_pages", torch.int32, len(starts)).tolist()
    tail = stored.take_states("tail", len(starts), None, device)
    _check_rows(starts, counts, tokens, tail.num_tokens, config)
    if not window.reaches_back_to(tokens):
        raise ValueError(f"{window} in its description shows columns that are not held, at {tokens} tokens")
    chunk = KV(*(empty_like(part, 0) for part in tail))
    room = window.most_pages(len(starts), config)
    pool, pages = _restored_pages(stored, sum(counts), config, chunk, room)
    rows = Rows(Row(start, tuple(islice(pages, n))) for start, n in zip(starts, counts, strict=True))
    has_sinks = rows.have_pages or "sinks.key" in stored.tensors
    sinks = stored.take_states("sinks", len(rows), config.sinks, device) if has_sinks else None
    layer.resume(LayerStates.of(Snapshot(config, tokens, rows, sinks, pool, tail, tail.num_tokens, chunk, window)))
    return layer


def _check_rows(starts: list[int], counts: list[int], tokens: int, tail: int, config: QuantConfig) -> None:
    """Raises ValueError unless rows with so many pages, and a tail, are what is left of `tokens` columns."""
    ends = [start + (config.sinks + n * config.page_size if n else 0) for start, n in zip(starts, counts, strict=True)]
    for start, n, end in zip(starts, counts, ends, strict=True):
        if min(start, n) < 0 or end > tokens:
            raise ValueError(f"a row that starts at column {start} and has {n} pages does not fit {tokens} tokens")
    if not tokens - min(ends, default=tokens) <= tail <= tokens:
        raise ValueError(f"a tail of {tail} tokens does not fit rows whose pages end at {ends} of {tokens} tokens")


def _plain_records(held: Snapshot, pages: Sequence[Page]) -> Tensor:
    """Records of PlainLayout, uint8 [pages, page_bytes], on the CPU."""
    assert held.pool is not None
    plain = PlainLayout(*page_parts(held.config, *held.chunk))
    records = torch.empty(len(pages), plain.page_bytes, dtype=torch.uint8)
    for first in range(0, len(pages), RUN_PAGES):  # bounds the scratch memory
        run = held.pool.read(pages[first : first + RUN_PAGES])
        records[first : first + RUN_PAGES] = _converted(run, held.layout, plain)
    return records


def _restored_pages(
    stored: Stored, num_entries: int, config: QuantConfig, like: KV, room: int
) -> tuple[PagePool | None, Iterator[Page]]:
    """A pool with the pages and room for `room`, and the pages in the order of the page table."""
    table = stored.take("page_table", torch.int32, num_entries).tolist()
    if not table:
        return None, iter(())
    plain = PlainLayout(*page_parts(config, *like))
    records = stored.take("pages", torch.uint8, None, plain.page_bytes)
    if min(table) < 0 or max(table) >= len(records) or len(set(table)) < len(records):
        raise ValueError(f"its page table does not name each of {len(records)} pages, and no other")
    pool = pool_for(config, *like, max(room, len(records)))
    pages: list[Page] = []
    for run in records.split(RUN_PAGES):
        # A copy, since a view into the file need not be aligned.
        pages += pool.write(_converted(run.to(like.key.device, copy=True), plain, pool.layout))
    return pool, (pages[i] for i in table)


def _converted(records: Tensor, source: PageLayout, target: PageLayout) -> Tensor:
    """The same codes and scales in the records of another layout."""
    return target.pack(source.unpack(records, 0), source.unpack(records, 1))


def _store_exact(layer: DynamicLayer) -> Stored:
    tokens = layer.get_seq_length()
    if not tokens:
        return Stored({"tokens": 0}, {})
    assert layer.keys is not None
    assert layer.values is not None
    states = KV(layer.keys, layer.values)
    return Stored({"tokens": tokens, **_shapes(states)}, _states("states", states))


def _restore_exact(stored: Stored, device: torch.device) -> DynamicLayer:
    tokens = count(stored.plain, "tokens")
    return _filled(DynamicLayer(), stored.take_states("states", None, tokens, device) if tokens else None)


def _store_sliding(layer: DynamicSlidingWindowLayer) -> Stored:
    stored = _store_exact(layer)
    own = {"sliding_window": layer.sliding_window, "records_past": getattr(layer, "record_past", False)}
    return Stored(stored.plain | own, stored.tensors)


def _restore_sliding(stored: Stored, device: torch.device) -> DynamicSlidingWindowLayer:
    tokens = count(stored.plain, "tokens")
    layer = DynamicSlidingWindowLayer(sliding_window=count(stored.plain, "sliding_window"))
    states = stored.take_states("states", None, None, device) if tokens else None
    if states is not None and states.num_tokens > tokens:
        raise ValueError(f"it holds {states.num_tokens} of {tokens} tokens")
    layer.record_past = field(stored.plain, "records_past", bool)
    layer.cumulative_length = tokens
    return _filled(layer, states)


def _filled(layer: L, states: KV | None) -> L:
    if states is not None:
        layer.lazy_initialization(*states)
        layer.keys, layer.values = states
    return layer


def _states(name: str, states: KV) -> dict[str, Tensor]:
    """Copies on the CPU, which share no memory: safetensors would refuse those that do."""
    return {
        f"{name}.{part}": x.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for part, x in states._asdict().items()
    }


def _shapes(states: KV) -> dict[str, Any]:
    names = {dtype: name for name, dtype in DTYPES.items()}
    for part in states:
        if part.dtype not in names:
            raise NotImplementedError(f"its states are {part.dtype}, which is none of {', '.join(DTYPES)}")
    return {
        part: {"heads": x.shape[1], "head_dim": x.shape[3], "dtype": names[x.dtype]}
        for part, x in states._asdict().items()
    }


class _Kind(NamedTuple):
    """How the layers of one class are stored."""

    name: str
    store: Callable[[Any], Stored]
    restore: Callable[[Stored, torch.device], Any]


_KINDS: dict[type, _Kind] = {
    QuantLayer: _Kind("packed", _store_packed, _restore_packed),
    QuantSlidingLayer: _Kind("packed_sliding", _store_packed_sliding, _restore_packed_sliding),
    DynamicLayer: _Kind("exact", _store_exact, _restore_exact),
    DynamicSlidingWindowLayer: _Kind("sliding", _store_sliding, _restore_sliding),
    **{
        cls: _Kind("empty", lambda _: Stored({}, {}), lambda *_: compat.EMPTY_LAYERS[0]())
        for cls in compat.EMPTY_LAYERS
    },
}

# Of the layers that compute attention over all that they hold: whether it has a window.
_WINDOWS: dict[type, bool] = {
    QuantLayer: False,
    DynamicLayer: False,
    QuantSlidingLayer: True,
    DynamicSlidingWindowLayer: True,
}
