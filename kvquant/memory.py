"""What a cache costs in memory, by part."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from math import prod

from kvquant.snapshot import KV, Snapshot


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that the layers of a cache hold, by part, and what they would be at full precision.

    codes, scales: sealed pages; scales include zero points and alignment. A page that rows or caches share counts once.
    exact: sinks, tail and a chunk that is not settled yet. page_tables: int32 per page and row.
    unquantized: layers that transformers keeps as they are (sliding windows, recurrent states).
    reserved: room already allocated for pages and tail but not used; not part of `total`.
    elements: numbers held by quantized layers, without left padding and without what has left a sliding window.
    full_precision: bytes that DynamicCache would hold for the same tokens, left padding included.
    """

    codes: int = 0
    scales: int = 0
    exact: int = 0
    page_tables: int = 0
    unquantized: int = 0
    reserved: int = 0
    elements: int = 0
    full_precision: int = 0

    @property
    def total(self) -> int:
        return self.codes + self.scales + self.exact + self.page_tables + self.unquantized

    @property
    def effective_bits(self) -> float:
        """Bits per number in the quantized layers, everything included; nan while they hold none."""
        packed = self.total - self.unquantized
        return 8 * packed / self.elements if self.elements else float("nan")

    @property
    def ratio(self) -> float:
        """Bytes of the whole cache relative to full precision; nan while it holds nothing."""
        return self.total / self.full_precision if self.full_precision else float("nan")

    def __add__(self, other: MemoryReport) -> MemoryReport:
        return MemoryReport(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


def total(reports: Iterable[MemoryReport]) -> MemoryReport:
    return sum(reports, MemoryReport())


def layer_memory(states: Snapshot, tail_room: int) -> MemoryReport:
    """The memory of one quantized layer whose tail has room for `tail_room` more tokens."""
    per_token = _token_bytes(states.chunk)
    num_rows = len(states.rows)
    exact_tokens = num_rows * (states.tail_length + states.chunk.num_tokens)
    exact_tokens += 0 if states.sinks is None else num_rows * states.sinks.num_tokens
    stored_tokens = sum(states.kv_len - max(row.start, states.hidden) for row in states.rows)
    pages = len({page for row in states.rows for page in row.pages})
    report = MemoryReport(
        exact=exact_tokens * per_token,
        reserved=num_rows * tail_room * per_token,
        elements=stored_tokens * _token_elements(states.chunk),
        full_precision=num_rows * states.visible_len * per_token,
    )
    if states.pool is None:
        return report
    layout = states.layout
    free = len(states.pool.free_slots)
    return report + MemoryReport(
        codes=pages * layout.code_bytes,
        scales=pages * (layout.page_bytes - layout.code_bytes),
        page_tables=4 * num_rows * max(len(row.pages) for row in states.rows),
        reserved=free * layout.page_bytes,
    )


def _token_elements(states: KV) -> int:
    return sum(prod((part.shape[1], part.shape[3])) for part in states)


def _token_bytes(states: KV) -> int:
    return sum(prod((part.shape[1], part.shape[3])) * part.element_size() for part in states)
