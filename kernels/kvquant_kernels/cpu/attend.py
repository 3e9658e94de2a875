"""Decode attention over sinks, pages and tail in one native call.

Bytes read per token and KV head: the packed keys and values with their scales, once for up to 16 query rows.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from kvquant.attention import AttentionCall, with_hidden
from kvquant.config import QuantConfig
from kvquant.layout import PageLayout, PagePart
from kvquant.snapshot import KV, Snapshot
from kvquant_kernels.cpu import layout, library
from kvquant_kernels.cpu.layout import CpuLayout
from kvquant_kernels.cpu.records import dense, remember

_LEAST_MASK = torch.finfo(torch.float32).min / 2


class CpuAttention:
    """Attention by the native library: in float32, or in integers where the processor and the precision allow."""

    name = "cpu attention"
    device_type = "cpu"

    def missing(self) -> str | None:
        """Why this kernel cannot run on this machine; None if it can."""
        found = library.load()
        return found.reason if isinstance(found, library.Missing) else None

    def page_layout(self, key: PagePart, value: PagePart) -> PageLayout | str:
        """The layout that pages must have for this kernel, or why it cannot take them."""
        if key.dtype not in library.DTYPES or key.dtype != value.dtype:
            return f"keys are {key.dtype} and values {value.dtype}, not both float32, bfloat16 or float16"
        if key.shape.num_heads != value.shape.num_heads:
            return f"keys have {key.shape.num_heads} heads and values {value.shape.num_heads}"
        reason = layout.unsupported(key, is_key=True) or layout.unsupported(value, is_key=False)
        return reason or CpuLayout(key, value)

    def unsupported(self, states: Snapshot, call: AttentionCall) -> str | None:
        """Why this kernel cannot take a call; None if it can."""
        if not isinstance(states.layout, CpuLayout):
            return "pages have another layout"
        if call.is_causal:
            return "causality without a mask over a history"
        if call.query.dtype not in library.DTYPES:
            return f"queries are {call.query.dtype}, not float32, bfloat16 or float16"
        return None

    def describe(self) -> str:
        native = library.load()
        assert isinstance(native, library.Library)
        return f"native library, instruction set {native.variants[native.best]}, {torch.get_num_threads()} threads"

    def run(self, states: Snapshot, call: AttentionCall, variant: int | None = None) -> Tensor:
        """The attention output [B, Hq, Q, Dv] in the query's dtype, by the best variant here unless told otherwise."""
        native = library.load()
        assert isinstance(native, library.Library)
        arguments = _Arguments(states, with_hidden(call, states) if states.hidden else call)
        native.attend(arguments.structure, variant)
        remember(arguments.structure, states, arguments.chunk)
        return arguments.out


class _Standing(NamedTuple):
    """The part of a call that is the same until pages are sealed or the tail moves: kept with the page tables."""

    config: QuantConfig
    sinks: KV | None
    tail: ReferenceType[Tensor]  # of its keys' buffer
    records: ReferenceType[Tensor]  # of the pool, which may grow into others
    structure: library.Attend

    @staticmethod
    def of(states: Snapshot, records: Tensor) -> _Standing:
        held = states.rows.derived.get(_Standing)
        if isinstance(held, _Standing) and held.fits(states, records):
            return held
        tail = ref(states.tail_buffers.key)
        new = _Standing(states.config, states.sinks, tail, ref(records), _standing_structure(states, records))
        states.rows.derived[_Standing] = new
        return new

    def fits(self, states: Snapshot, records: Tensor) -> bool:
        same_tail = self.tail() is states.tail_buffers.key
        return same_tail and self.records() is records and self.sinks is states.sinks and self.config is states.config


def _standing_structure(states: Snapshot, records: Tensor) -> library.Attend:
    cpu_layout, rows, config, key = states.layout, states.rows, states.config, states.chunk.key
    assert isinstance(cpu_layout, CpuLayout)
    s = library.Attend(batch=key.shape[0], heads=key.shape[1], dtype=library.DTYPES[key.dtype])
    s.page_size, s.exact = config.page_size, config.precision == "exact"
    s.pool, s.page_bytes = records.data_ptr(), cpu_layout.page_bytes
    s.table, s.table_stride = rows.slots.data_ptr(), rows.slots.shape[1]
    s.start, s.num_pages = rows.starts.data_ptr(), rows.num_pages.data_ptr()
    s.key, s.value = (part.structure for part in cpu_layout.parts)
    s.key_rotated, s.value_rotated = (config.codec(part).rotated for part in (0, 1))
    library.place_segment(s, library.Attend.tail.offset, *states.tail_buffers)
    if states.sinks is not None:
        library.place_segment(s, library.Attend.sinks.offset, *states.sinks)
    return s


class _Arguments:
    """The C view of a call, and the tensors that it points into."""

    def __init__(self, states: Snapshot, call: AttentionCall) -> None:
        assert states.pool is not None
        records, query = states.pool.records, dense(call.query)
        key, value = states.chunk
        self.chunk = key, value = dense(key), dense(value)
        batch, num_heads, q_len, dim = query.shape
        self.out = query.new_empty(batch, num_heads, q_len, value.shape[-1])
        mask, mask_strides = (None, (0, 0, 0)) if call.mask is None else _additive(call.mask)
        logits = None if call.sink_logits is None else call.sink_logits.to(torch.float32).contiguous()
        self.structure = library.Attend.from_buffer_copy(_Standing.of(states, records).structure)
        library.CALL.pack_into(
            self.structure,
            0,
            query.data_ptr(),
            self.out.data_ptr(),
            0 if mask is None else mask.data_ptr(),
            0 if logits is None else logits.data_ptr(),
            *query.stride()[:3],
            *mask_strides,
            *library.segment(key, value, key.shape[-2]),
            states.tail_length,
            num_heads // self.structure.heads,
            q_len,
            states.settled,
            library.DTYPES[query.dtype],
            torch.get_num_threads(),
            dim**-0.5 if call.scale is None else call.scale,
            call.softcap or 0.0,
        )
        # The records: another cache that shares the pool may let it grow meanwhile.
        self._keep = states.rows, states.sinks, records, query, states.tail_buffers, mask, logits


def _additive(mask: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What a mask adds to scores, float32 and dense in its last dimension, and its strides: 0 where it is broadcast."""
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype == torch.bool:
        added = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device).masked_fill_(~mask, -torch.inf)
    else:
        # In float32 at least, which holds the bound; finite also after the change to base 2.
        wide = mask.to(torch.promote_types(mask.dtype, torch.float32))
        added = wide.clamp_min(_LEAST_MASK).to(torch.float32).masked_fill(mask == -torch.inf, -torch.inf)
    added = dense(added)
    strides = zip(added.shape[:3], added.stride()[:3], strict=True)
    return added, tuple(stride if size > 1 else 0 for size, stride in strides)


KERNEL = CpuAttention()
