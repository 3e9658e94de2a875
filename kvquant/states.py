"""One layer's states over time: append, crop, reorder, select. Everything that changes what a layer holds is here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy

import torch
from torch import Tensor

from kvquant.config import QuantConfig
from kvquant.layout import append_by_torch
from kvquant.padding import padding_of
from kvquant.pages import Page, PagePool, pool_for
from kvquant.snapshot import KV, RUN_PAGES, Row, RowGroup, Rows, Snapshot, group_rows, tail_start
from kvquant.tail import Tail, empty_like
from kvquant.window import Window, forget_passed


class LayerStates:
    """The keys and values of one layer.

    New tokens first wait as the chunk, exactly as given, so that the attention of their own step reads them exactly;
    `settle` then moves them into the tail and seals the pages that are due. A page is due when the tail holds
    `residual_length` tokens beyond it. All changes replace values instead of writing to them, so that snapshots stay
    true and copies share them.
    """

    def __init__(self, config: QuantConfig, key: Tensor, value: Tensor, window: int | None = None) -> None:
        """Empty states for keys [B, Hkv, *, Dk] and values [B, Hkv, *, Dv], with their dtypes and device.

        `window`, if given, is the number of tokens that a query attends to, itself included: pages that have left it
        are forgotten, unless `keep_past` is set, which keeps them until the next crop.

        Raises ValueError if a format's group size does not fit their head_dim.
        """
        for fmt, part in zip((config.key, config.value), (key, value), strict=True):
            fmt.resolve_group_size(config.page_size, part.shape[-1])
        self.config = config
        self.keep_past = False
        self._window = Window(window)
        self._last_snapshot: Snapshot | None = None
        self._set_rows((Row(0, ()),) * key.shape[0])
        self._settled = 0
        self._sinks: KV | None = None
        self._pool: PagePool | None = None
        self._no_chunk = self._chunk = KV(empty_like(key, 0), empty_like(value, 0))
        self._tail = Tail.copy_of(self._chunk, config)
        self._chunk_positions: Tensor | None = None
        self._last_kind: object = None  # shapes and dtypes that were found to fit

    @staticmethod
    def of(held: Snapshot) -> LayerStates:
        """States that go on from a snapshot without a chunk: what `snapshot` is to states, the other way round."""
        states = LayerStates(held.config, *held.chunk)
        states._window = held.window
        states._set_rows(held.rows)
        states._settled, states._sinks, states._pool = held.settled, held.sinks, held.pool
        states._tail = Tail.copy_of(held.tail, held.config)
        return states

    @property
    def num_seen(self) -> int:
        """Tokens seen, left padding included."""
        return self._window.forgotten + self._settled + self._chunk.num_tokens

    def snapshot(self) -> Snapshot:
        """What is held now; the same object until something changes."""
        if self._last_snapshot is None:
            held = self._rows, self._sinks, self._pool, self._tail.buffers, self._tail.length, self._chunk
            self._last_snapshot = Snapshot(self.config, self._settled, *held, self._window)
        return self._last_snapshot

    def append(self, key: Tensor, value: Tensor, positions: Tensor | None = None) -> Snapshot:
        """Takes a chunk of keys [B, Hkv, t, Dk] and values [B, Hkv, t, Dv].

        `positions` [B, t], if given, are position ids: where no mask tells otherwise, the padding that they show at the
        left of a row is not stored. Raises ValueError if the chunk's batch, heads or dtype differ from what is held.
        """
        self._check_like_chunk(key, value)
        self.return_to(key.device)
        self.settle()
        self._last_snapshot = None
        self._chunk, self._chunk_positions = KV(key, value), positions
        return self.snapshot()

    def settle(self, chunk: KV | None = None, starts: Sequence[int] | None = None) -> None:
        """Moves the chunk into tail and pages. Does nothing if `chunk` is given and no longer the one waiting.

        `starts` [B], if given, are the columns of the rows' first real tokens, for rows that hold no token yet.
        """
        if self._chunk.num_tokens == 0 or (chunk is not None and chunk is not self._chunk):
            return
        self._last_snapshot, before = None, self._rows
        if starts is None:
            starts = self._starts_from_positions()
        if starts is not None and self.is_open:
            self._open_rows(starts)
        append = append_by_torch if self._pool is None else self._pool.layout.append
        self._tail = self._tail.extended(self._chunk, self.config, append)
        self._settled += self._chunk.num_tokens
        self._chunk, self._chunk_positions = self._no_chunk, None
        if self._settled >= self._due_at:
            self._seal_what_is_due()
        if self._rows is not before or self._tail.room == 0:
            self._trim_tail()

    @property
    def is_open(self) -> bool:
        """Whether some row holds no token yet, so that the chunk decides where it starts."""
        return self._rows.latest_start == self._settled

    def _seal_what_is_due(self) -> None:
        if not self.keep_past:
            self._forget_passed()
        for group in group_rows(self._rows):
            self._seal_due(group)

    def crop(self, num_tokens: int) -> None:
        """Forgets the last `num_tokens` tokens.

        A cut through a page re-opens it: its remaining tokens return to the tail as the values they already represent.
        """
        self.settle()
        length = max(0, self._settled - num_tokens)
        if not self._window.reaches_back_to(length):
            raise RuntimeError(f"cannot crop {num_tokens} tokens: those that the window would show again are forgotten")
        before, self._last_snapshot = self.snapshot(), None
        self._set_rows(_cropped(row, length, self.config) for row in self._rows)
        self._settled = length
        if not any(row.pages for row in self._rows):
            self._sinks = None
        first = self._tail_first()
        kept = KV(before.columns(0, first, length), before.columns(1, first, length))
        self._tail = Tail.copy_of(kept, self.config)
        self.forget_passed()

    def forget_passed(self) -> None:
        """Lets go of the pages that have left the window, also of those that were kept until now."""
        self.settle()
        self._last_snapshot = None
        self._forget_passed()
        self._trim_tail()

    def select(self, rows: Tensor | Sequence[int]) -> None:
        """Makes row i what row rows[i] was; rows may repeat and be left out. No page is copied."""
        self.settle()
        self._last_snapshot = None
        self._last_kind = None
        order = rows.tolist() if isinstance(rows, Tensor) else list(rows)
        self._set_rows(self._rows[i] for i in order)
        self._sinks = None if self._sinks is None else self._sinks.rows(order)
        self._tail = Tail.copy_of(self._tail.states.rows(order), self.config)
        self._no_chunk = self._chunk = self._chunk.rows(order)

    @property
    def batch_size(self) -> int:
        return len(self._rows)

    @property
    def tail_room(self) -> int:
        """Tokens that fit into the tail before its buffers must grow."""
        return self._tail.room

    def __deepcopy__(self, memo: dict[int, object]) -> LayerStates:
        """States that share everything with these until one of them grows."""
        return copy(self)

    def move(self, device: torch.device) -> None:
        """Moves everything to a device; pages that other states share with these go along."""
        self.settle()
        self._last_snapshot = None
        self._sinks = None if self._sinks is None else self._sinks.to(device)
        self._no_chunk = self._chunk = self._chunk.to(device)
        self._tail = Tail(self._tail.buffers.to(device), self._tail.length)
        if self._pool is not None:
            self._pool.move(device)

    def return_to(self, device: torch.device) -> None:
        """Moves back what was offloaded, here or by others that share the pages."""
        held = self._tail.buffers.key if self._pool is None else self._pool.records
        if device != held.device or device != self._no_chunk.key.device:
            self.move(device)

    def _check_like_chunk(self, key: Tensor, value: Tensor) -> None:
        kind = key.shape, value.shape, key.dtype, value.dtype
        if kind == self._last_kind:
            return
        for name, new, held in (("key", key, self._no_chunk.key), ("value", value, self._no_chunk.value)):
            batch, heads, _, dim = held.shape
            if new.dtype != held.dtype or new.shape != (batch, heads, new.shape[-2], dim):
                raise ValueError(
                    f"{name}_states of shape {tuple(new.shape)} and {new.dtype} do not continue a cache of "
                    f"[{batch}, {heads}, *, {dim}] and {held.dtype}"
                )
        if key.shape[-2] != value.shape[-2]:
            raise ValueError(
                f"key_states have {key.shape[-2]} tokens and value_states {value.shape[-2]}; give equally many"
            )
        self._last_kind = kind

    def _set_rows(self, rows: Iterable[Row]) -> None:
        config, self._rows = self.config, Rows(rows)
        needed = config.residual_length + config.page_size  # beyond the sinks
        firsts = (
            tail_start(config, group) + (0 if group.num_pages else config.sinks) for group in group_rows(self._rows)
        )
        self._due_at = min(firsts, default=0) + needed  # the number of columns at which a page is to be sealed

    def _open_rows(self, starts: Sequence[int]) -> None:
        """Sets where rows without a token start, within the chunk."""
        first, last = self._settled, self._settled + self._chunk.num_tokens
        self._set_rows(
            Row(min(max(start, first), last), ()) if row.start == first else row
            for row, start in zip(self._rows, starts, strict=True)
        )

    def _starts_from_positions(self) -> Sequence[int] | None:
        """Where rows start by the chunk's position ids; None if these do not look like those of a padded batch."""
        positions = self._chunk_positions
        if positions is None or positions.dim() != 2 or positions.shape[0] != self.batch_size or self.batch_size == 1:
            return None
        rows = positions.tolist()
        if not any(row == list(range(row[0], row[0] + len(row))) for row in rows):
            return None
        self._reopen_padding(rows)
        return [self._settled + padding_of(row) for row in rows]

    def _reopen_padding(self, positions: list[list[int]]) -> None:
        """A row's only token was padding after all if the next one is at position 0 as well."""
        first = self._settled
        self._set_rows(
            Row(first, ()) if row.start == first - 1 and ids[0] == 0 else row
            for row, ids in zip(self._rows, positions, strict=True)
        )

    def _forget_passed(self) -> None:
        if self._window.hidden(self._settled):
            self._window, rows, self._settled = forget_passed(self._window, self._rows, self._settled, self.config)
            self._set_rows(rows)

    def _seal_due(self, group: RowGroup) -> None:
        """Seals the pages of a group that have `residual_length` younger tokens."""
        config, first = self.config, tail_start(self.config, group)
        sinks = 0 if group.num_pages else config.sinks
        due = (self._settled - first - sinks - config.residual_length) // config.page_size
        if due <= 0:
            return
        tail = self._tail.states.rows(group.rows)
        offset = first - (self._settled - tail.num_tokens)
        if not group.num_pages:
            self._set_sinks(group, tail.tokens(offset, offset + sinks))
        new_pages = self._seal(tail.tokens(offset + sinks, offset + sinks + due * config.page_size))
        grown = {i: table + tuple(pages) for i, table, pages in zip(group.rows, group.tables, new_pages, strict=True)}
        self._set_rows(row._replace(pages=grown.get(i, row.pages)) for i, row in enumerate(self._rows))

    def _set_sinks(self, group: RowGroup, sinks: KV) -> None:
        held = self._sinks or KV(*(part.new_zeros(self.batch_size, *part.shape[1:]) for part in sinks))
        index = torch.tensor(group.rows, device=sinks.key.device)
        self._sinks = KV(*(part.index_copy(0, index, new) for part, new in zip(held, sinks, strict=True)))

    def _seal(self, states: KV) -> list[list[Page]]:
        """The new pages of each row of states [rows, Hkv, n * page_size, D], in runs that bound the scratch memory."""
        pages: list[list[Page]] = [[] for _ in range(states.key.shape[0])]
        run = RUN_PAGES * self.config.page_size
        for first in range(0, states.num_tokens, run):
            key, value = (_to_pages(part, self.config.page_size) for part in states.tokens(first, first + run))
            codecs = [self.config.codec(part) for part in (0, 1)]
            records = self._layout_pool().layout.seal(key.flatten(0, 1), value.flatten(0, 1), codecs)
            written = self._layout_pool().write(records)
            per_row = key.shape[1]
            for i, row in enumerate(pages):
                row.extend(written[i * per_row : (i + 1) * per_row])
        return pages

    def _layout_pool(self) -> PagePool:
        if self._pool is None:
            room = self._window.most_pages(self.batch_size, self.config)
            self._pool = pool_for(self.config, *self._chunk, room)
        return self._pool

    def _trim_tail(self) -> None:
        self._tail = self._tail.last(self._settled - self._tail_first(), self.config)

    def _tail_first(self) -> int:
        """The first column that some row keeps in its tail."""
        firsts = (tail_start(self.config, group) for group in group_rows(self._rows))
        return min(firsts, default=self._settled)


def _cropped(row: Row, length: int, config: QuantConfig) -> Row:
    """The row up to column `length`, with the pages that end there or before."""
    whole_pages = max(0, (length - row.start - config.sinks) // config.page_size)
    return Row(min(row.start, length), row.pages[:whole_pages])


def _to_pages(states: Tensor, page_size: int) -> Tensor:
    """[rows, H, n * page_size, D] -> [rows, n, H, page_size, D]"""
    pages: Tensor = states.unflatten(2, (-1, page_size))
    return pages.transpose(1, 2)
