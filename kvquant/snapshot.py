"""What one layer holds at one moment, as an immutable value: rows, and how to read their states back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvquant.codec import Quantized
from kvquant.config import QuantConfig
from kvquant.layout import PageLayout
from kvquant.pages import Page, PagePool
from kvquant.window import FULL_ATTENTION, Window


class KV(NamedTuple):
    """Keys and values of the same tokens: [B, Hkv, T, Dk] and [B, Hkv, T, Dv]."""

    key: Tensor
    value: Tensor

    @property
    def num_tokens(self) -> int:
        return self.key.shape[-2]

    def tokens(self, first: int, last: int) -> KV:
        """Tokens first..last-1, as views."""
        count = min(last, self.num_tokens) - first
        return KV(self.key.narrow(-2, first, count), self.value.narrow(-2, first, count))

    def to(self, device: torch.device) -> KV:
        return KV(self.key.to(device), self.value.to(device))

    def rows(self, rows: Sequence[int]) -> KV:
        """The given rows of the batch: a copy, unless they are all rows in order."""
        if list(rows) == list(range(self.key.shape[0])):
            return self
        return KV(self.key[list(rows)], self.value[list(rows)])


class Row(NamedTuple):
    """One row of the batch. Columns are token positions of the padded batch, as attention masks count them.

    start: the column of its first stored token; those before it are left padding.
    pages: its page table. A row without pages has no sinks yet: all its tokens are in the tail.
    """

    start: int
    pages: tuple[Page, ...]


class Rows(tuple[Row, ...]):
    """The rows of a batch, in the form that kernels read; a value, whose tables are made once."""

    def __reduce__(self) -> tuple[type[Rows], tuple[tuple[Row, ...]]]:
        return Rows, (tuple(self),)

    @cached_property
    def derived(self) -> dict[object, object]:
        """What kernels have derived from these rows and keep with them, by keys of their own."""
        return {}

    @cached_property
    def latest_start(self) -> int:
        """The start of the row that starts last; -1 without rows."""
        return max((row.start for row in self), default=-1)

    @cached_property
    def have_pages(self) -> bool:
        """Whether some row has a page."""
        return any(row.pages for row in self)

    @cached_property
    def starts(self) -> Tensor:
        """int32 [B]"""
        return torch.tensor([row.start for row in self], dtype=torch.int32)

    @cached_property
    def num_pages(self) -> Tensor:
        """int32 [B]"""
        return torch.tensor([len(row.pages) for row in self], dtype=torch.int32)

    @cached_property
    def slots(self) -> Tensor:
        """int32 [B, most pages of a row]: the page tables as slots of the pool, filled up with slot 0."""
        longest = max(len(row.pages) for row in self)
        slots = [[page.index for page in row.pages] + [0] * (longest - len(row.pages)) for row in self]
        return torch.tensor(slots, dtype=torch.int32)


class RowGroup(NamedTuple):
    """Rows with the same columns of sinks, pages and tail, which can be computed on together."""

    rows: tuple[int, ...]
    start: int
    tables: tuple[tuple[Page, ...], ...]

    @property
    def num_pages(self) -> int:
        return len(self.tables[0])

    def pages(self, first: int, last: int) -> list[Page]:
        """Pages first..last-1 of every row, row by row."""
        return [page for table in self.tables for page in table[first:last]]


def group_rows(rows: Sequence[Row]) -> list[RowGroup]:
    members: dict[tuple[int, int], list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault((row.start, len(row.pages)), []).append(i)
    return [RowGroup(tuple(ids), start, tuple(rows[i].pages for i in ids)) for (start, _), ids in members.items()]


class Segment(NamedTuple):
    """Exact states of consecutive columns of a group."""

    first: int
    states: KV


# Not frozen, which would set each field by a call: every step of every layer makes a snapshot. Nothing may change one.
@dataclass(init=False, eq=False)
class Snapshot:
    """One layer's states: sinks | pages | tail of every row, and the chunk that arrived last, still as it was given.

    settled: columns 0..settled-1 are in sinks, pages and tail (or padding); the chunk's follow.
    sinks: [B, Hkv, S, D], valid for rows that have pages; None while no row has.
    tail: the columns up to `settled`; a row's own part begins at `tail_start` of its group. They are the first
    tail_length tokens of buffers with room for more.
    window: what attention does not see any more of a layer with a sliding window.

    Derived, since every step asks for them several times:
    kv_len: the columns held, hidden ones included.
    hidden: leading columns that have left the window. Attention sees those that follow, `visible_len` columns.
    is_exact: whether reading gives back the very numbers that were stored.
    """

    config: QuantConfig
    settled: int
    rows: Rows
    sinks: KV | None
    pool: PagePool | None
    tail_buffers: KV
    tail_length: int
    chunk: KV
    window: Window = FULL_ATTENTION
    kv_len: int = field(init=False)
    hidden: int = field(init=False)
    visible_len: int = field(init=False)
    is_exact: bool = field(init=False)

    def __init__(
        self,
        config: QuantConfig,
        settled: int,
        rows: Rows,
        sinks: KV | None,
        pool: PagePool | None,
        tail_buffers: KV,
        tail_length: int,
        chunk: KV,
        window: Window = FULL_ATTENTION,
    ) -> None:
        self.config, self.settled, self.rows, self.sinks, self.pool = config, settled, rows, sinks, pool
        self.tail_buffers, self.tail_length, self.chunk, self.window = tail_buffers, tail_length, chunk, window
        self.kv_len = settled + chunk.key.shape[-2]
        self.hidden = window.hidden(settled)
        self.visible_len = self.kv_len - self.hidden
        self.is_exact = not rows.have_pages or config.is_exact

    @staticmethod
    def of(key: Tensor, value: Tensor) -> Snapshot:
        """States that are plain tensors: keys [B, Hkv, T, Dk] and values [B, Hkv, T, Dv], all exact."""
        chunk = KV(key, value)
        return Snapshot(QuantConfig(), 0, Rows((Row(0, ()),) * key.shape[0]), None, None, chunk, 0, chunk)

    @property
    def tail(self) -> KV:
        return self.tail_buffers.tokens(0, self.tail_length)

    @property
    def layout(self) -> PageLayout:
        assert self.pool is not None
        return self.pool.layout

    def groups(self) -> list[RowGroup]:
        return group_rows(self.rows)

    def tail_start(self, group: RowGroup) -> int:
        return tail_start(self.config, group)

    def exact_segments(self, group: RowGroup) -> list[Segment]:
        """Sinks, tail and chunk of a group, without empty ones."""
        first_tail, tail_first = self.tail_start(group), self.settled - self.tail_length
        segments = [
            Segment(first_tail, self.tail_buffers.tokens(first_tail - tail_first, self.tail_length).rows(group.rows)),
            Segment(self.settled, self.chunk.rows(group.rows)),
        ]
        if group.num_pages:
            assert self.sinks is not None
            segments.insert(0, Segment(group.start, self.sinks.rows(group.rows)))
        return [segment for segment in segments if segment.states.num_tokens]

    def quantized_pages(self, group: RowGroup, first: int, last: int) -> list[Quantized]:
        """Keys and values of pages first..last-1 of a group: codes [rows * pages, Hkv, page_size, D], row by row."""
        assert self.pool is not None
        records = self.pool.read(group.pages(first, last))
        return [self.layout.unpack(records, part) for part in (0, 1)]

    def columns(self, part: int, first: int | None = None, last: int | None = None) -> Tensor:
        """Keys (part 0) or values (part 1) of columns first..last-1 in the model's basis and dtype; padding is zero.

        [B, Hkv, last - first, D]; all that attention sees by default.
        """
        first = self.hidden if first is None else first
        last = self.kv_len if last is None else last
        if first >= self.settled:
            # Contiguous, as DynamicCache's are: matrix products of other strides differ in their last bits.
            return self.chunk[part][..., first - self.settled : last - self.settled, :].contiguous()
        like = self.chunk[part]
        out = like.new_empty(*like.shape[:2], last - first, like.shape[-1])
        for group in self.groups():
            window = _Window(out, group.rows, first, last)
            window.fill_zero(0, group.start)
            for segment in self.exact_segments(group):
                window.write(segment.first, segment.states[part])
            self._write_pages(window, group, part)
        return out

    def _write_pages(self, window: _Window, group: RowGroup, part: int) -> None:
        size, first_column = self.config.page_size, group.start + self.config.sinks
        first = max(0, (window.first - first_column) // size)
        last = min(group.num_pages, -(-(window.last - first_column) // size))
        for run in range(first, last, RUN_PAGES):
            stop = min(run + RUN_PAGES, last)
            assert self.pool is not None
            records = self.pool.read(group.pages(run, stop))
            states = self.layout.restore(records, part, self.config.codec(part), self.chunk[part].dtype)
            window.write(first_column + run * size, _by_row(states, len(group.rows)))


def _by_row(states: Tensor, num_rows: int) -> Tensor:
    """[rows * pages, H, page_size, D] -> [rows, H, pages * page_size, D]"""
    by_row: Tensor = states.unflatten(0, (num_rows, -1))
    return by_row.transpose(1, 2).flatten(2, 3)


# Pages dequantized at a time: bounds the scratch memory of reading, whatever the length of the cache.
RUN_PAGES = 32


def tail_start(config: QuantConfig, group: RowGroup) -> int:
    """The first column of a group's tail."""
    return group.start + (config.sinks + group.num_pages * config.page_size if group.num_pages else 0)


class _Window:
    """Columns first..last-1 of some rows of an output [B, Hkv, last - first, D]."""

    def __init__(self, out: Tensor, rows: tuple[int, ...], first: int, last: int) -> None:
        self._out, self._rows = out, list(rows)
        self.first, self.last = first, last

    def write(self, column: int, states: Tensor) -> None:
        """Writes states [rows, Hkv, t, D] of columns column..column+t-1, as far as they lie in the window."""
        a, b = max(column, self.first), min(column + states.shape[-2], self.last)
        if a < b:
            self._assign(a, b, states[..., a - column : b - column, :].to(self._out.dtype))

    def fill_zero(self, column: int, stop: int) -> None:
        a, b = max(column, self.first), min(stop, self.last)
        if a < b:
            self._assign(a, b, 0.0)

    def _assign(self, a: int, b: int, states: Tensor | float) -> None:
        target = slice(a - self.first, b - self.first)
        if len(self._rows) == self._out.shape[0]:
            self._out[:, :, target] = states
        else:
            self._out[self._rows, :, target] = states
