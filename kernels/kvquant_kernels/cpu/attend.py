"""Decode attention over sinks, pages and tail in one native call.

Bytes read per token and KV head: the packed keys and values with their scales, once for up to 16 query rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvquant.attention import AttentionCall
from kvquant.config import QuantConfig
from kvquant.formats import FloatGrid
from kvquant.layout import PageLayout, PagePart
from kvquant.snapshot import KV, RowGroup, Snapshot
from kvquant_kernels.cpu import layout, library

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_LEAST_MASK = torch.finfo(torch.float32).min / 2
_FLOAT_CODES = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}


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
        if key.dtype not in _DTYPES or key.dtype != value.dtype:
            return f"keys are {key.dtype} and values {value.dtype}, not both float32, bfloat16 or float16"
        if key.shape.num_heads != value.shape.num_heads:
            return f"keys have {key.shape.num_heads} heads and values {value.shape.num_heads}"
        reason = layout.unsupported(key, is_key=True) or layout.unsupported(value, is_key=False)
        return reason or layout.CpuLayout(key, value)

    def unsupported(self, states: Snapshot, call: AttentionCall) -> str | None:
        """Why this kernel cannot take a call; None if it can."""
        if not isinstance(states.layout, layout.CpuLayout):
            return "pages have another layout"
        if call.is_causal:
            return "causality without a mask over a history"
        return None

    def describe(self) -> str:
        native = library.load()
        assert isinstance(native, library.Library)
        return f"native library, instruction set {native.variants[native.best]}, {torch.get_num_threads()} threads"

    def run(self, states: Snapshot, call: AttentionCall, variant: int | None = None) -> Tensor:
        """The attention output float32 [B, Hq, Q, Dv], by the best variant for this machine unless told otherwise."""
        native = library.load()
        assert isinstance(native, library.Library)
        arguments = _Arguments(states, call)
        arguments.structure.exact = states.config.precision == "exact"
        native.attend(arguments.structure, variant)
        return arguments.out


class _Arguments:
    """The C view of a call, and the tensors that it points into."""

    def __init__(self, states: Snapshot, call: AttentionCall) -> None:
        self._keep: list[Tensor] = []
        batch, num_heads, q_len, dim = call.query.shape
        heads, value_dim = states.chunk.key.shape[1], states.chunk.value.shape[-1]
        rows = num_heads // heads * q_len
        scale = dim**-0.5 if call.scale is None else call.scale
        self.out = torch.empty(batch, num_heads, q_len, value_dim)
        s = self.structure = library.Attend(batch=batch, heads=heads, rows=rows, page_size=states.config.page_size)
        s.query, s.out = self._pointer(call.query.to(torch.float32) * scale), self._pointer(self.out)
        s.dtype, s.num_threads = _DTYPES[states.chunk.key.dtype], torch.get_num_threads()
        s.softcap = call.softcap or 0.0
        self._set_pages(states)
        self._set_segments(states)
        self._set_mask(call, heads, rows)

    def _pointer(self, x: Tensor) -> int:
        x = x.contiguous()
        self._keep.append(x)
        return x.data_ptr()

    def _indices(self, values: list[int]) -> int:
        return self._pointer(torch.tensor(values, dtype=torch.int32))

    def _set_pages(self, states: Snapshot) -> None:
        s, cpu_layout = self.structure, states.layout
        assert isinstance(cpu_layout, layout.CpuLayout)
        assert states.pool is not None
        longest = max(len(row.pages) for row in states.rows)
        padded = [[page.index for page in row.pages] + [0] * (longest - len(row.pages)) for row in states.rows]
        s.pool, s.page_bytes = self._pointer(states.pool.records), cpu_layout.page_bytes
        s.table, s.table_stride = self._indices([slot for row in padded for slot in row]), longest
        s.num_pages = self._indices([len(row.pages) for row in states.rows])
        s.page_column = self._indices([row.start + states.config.sinks for row in states.rows])
        s.key, s.value = (_part(part, states.config, i) for i, part in enumerate(cpu_layout.parts))

    def _set_segments(self, states: Snapshot) -> None:
        """Sinks, tail and chunk, each with what part of it every row has."""
        tail_first = states.settled - states.tail.num_tokens
        starts = [states.tail_start(RowGroup((i,), row.start, (row.pages,))) for i, row in enumerate(states.rows)]
        batch = range(len(states.rows))
        tail = [start - tail_first for start in starts]
        self._add_segment(states.tail, tail, [states.settled - start for start in starts], starts)
        self._add_segment(
            states.chunk, [0] * len(batch), [states.chunk.num_tokens] * len(batch), [states.settled] * len(batch)
        )
        if states.sinks is not None:
            counts = [states.config.sinks if row.pages else 0 for row in states.rows]
            self._add_segment(states.sinks, [0] * len(batch), counts, [row.start for row in states.rows])

    def _add_segment(self, states: KV, first: list[int], count: list[int], column: list[int]) -> None:
        if not any(count):
            return
        segment = self.structure.segment[self.structure.num_segments]
        self.structure.num_segments += 1
        for name, part in zip(("key", "value"), states, strict=True):
            dense = part if part.stride(-1) == 1 else part.contiguous()
            self._keep.append(dense)
            setattr(segment, name, dense.data_ptr())
            getattr(segment, f"{name}_stride")[:] = dense.stride()[:3]
        segment.first, segment.count, segment.column = (self._indices(x) for x in (first, count, column))

    def _set_mask(self, call: AttentionCall, heads: int, rows: int) -> None:
        s = self.structure
        if call.sink_logits is not None:
            logits = call.sink_logits.to(torch.float32).view(heads, -1, 1)
            s.sink_logits = self._pointer(logits.expand(-1, -1, call.query.shape[2]))
        if call.mask is None:
            return
        mask = call.mask[(None,) * (4 - call.mask.dim())]
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        else:  # finite also after the change to base 2
            mask = mask.clamp_min(_LEAST_MASK).to(torch.float32).masked_fill(mask == -torch.inf, -torch.inf)
        q_len = call.query.shape[2]
        per_head = mask.expand(-1, -1, q_len, -1)
        if per_head.shape[1] > 1:
            per_head = per_head.unflatten(1, (heads, -1)).flatten(2, 3)  # [B, Hkv, n_rep * Q, KV]
        else:
            per_head = per_head.repeat(1, 1, rows // q_len, 1)
        s.mask = self._pointer(per_head)
        size = per_head.shape
        s.mask_stride[:] = [
            size[1] * size[2] * size[3] if size[0] > 1 else 0,
            size[2] * size[3] if size[1] > 1 else 0,
            size[3],
        ]


def _part(part: layout.PartLayout, config: QuantConfig, index: int) -> library.Part:
    grid = part.fmt.grid
    code = _FLOAT_CODES[grid.dtype] if isinstance(grid, FloatGrid) else 0
    return library.Part(
        first=part.first,
        head_stride=part.head_stride,
        scales=part.scales,
        zeros=part.zeros,
        code=code,
        bits=part.fmt.bits,
        per_channel=part.fmt.granularity == "per_channel",
        group=part.group,
        dim=part.shape.head_dim,
        rotated=config.codec(index).rotated,
        middle=0.0 if code else grid.half_width,
    )


KERNEL = CpuAttention()
