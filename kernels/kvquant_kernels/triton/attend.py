"""Decode attention over sinks, pages, tail and chunk on a GPU: what is supported, and the launch of the kernels."""

from __future__ import annotations

import importlib.util
import math
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvquant.attention import AttentionCall
from kvquant.layout import PageLayout, PagePart
from kvquant.snapshot import Rows, Snapshot
from kvquant_kernels.triton import constants, layout
from kvquant_kernels.triton.layout import TritonLayout

DTYPES = (torch.bfloat16, torch.float16)


class TritonAttention:
    """Split-KV attention by Triton: products in 16 bits, sums and softmax in float32."""

    name = "triton attention"
    device_type = "cuda"

    def missing(self) -> str | None:
        """Why this kernel cannot run on this machine; None if it can."""
        return _missing()

    def page_layout(self, key: PagePart, value: PagePart) -> PageLayout | str:
        """The layout that pages must have for this kernel, or why it cannot take them."""
        if key.dtype not in DTYPES or key.dtype != value.dtype:
            return f"keys are {key.dtype} and values {value.dtype}, not both bfloat16 or float16"
        if key.shape.num_heads != value.shape.num_heads:
            return f"keys have {key.shape.num_heads} heads and values {value.shape.num_heads}"
        return layout.unsupported(key) or layout.unsupported(value) or TritonLayout(key, value)

    def unsupported(self, states: Snapshot, call: AttentionCall) -> str | None:
        """Why this kernel cannot take a call; None if it can."""
        if not isinstance(states.layout, TritonLayout):
            return "pages have another layout"
        if call.is_causal:
            return "causality without a mask over a history"
        if call.query.dtype != states.chunk.key.dtype:
            return f"queries are {call.query.dtype}, keys and values {states.chunk.key.dtype}"
        if states.config.precision == "exact":
            return "precision='exact' asks for products in float32"
        return None

    def describe(self) -> str:
        names = (torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return f"triton {importlib.import_module('triton').__version__} on {', '.join(names)}"

    def run(self, states: Snapshot, call: AttentionCall, out_dtype: torch.dtype | None = None) -> Tensor:
        """The attention output [B, Hq, Q, Dv], in the query's dtype unless told otherwise."""
        from kvquant_kernels.triton.ops.decode import decode

        return decode(Operands.of(states, call), out_dtype or call.query.dtype)


@cache
def _missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install 'kvquant-cache[triton]'"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    return None


class RowTables(NamedTuple):
    """The rows of a batch on a device.

    rows: int32 [B, 2], the first column and the number of pages of each; slots: int32 [B, most pages of a row].
    """

    rows: Tensor
    slots: Tensor

    @staticmethod
    def of(rows: Rows, device: torch.device) -> RowTables:
        """Made once for the same rows."""
        held = rows.derived.get((RowTables, device))
        if isinstance(held, RowTables):
            return held
        table = torch.stack((rows.starts, rows.num_pages), dim=1)
        new = RowTables(table.to(device), rows.slots.to(device))
        rows.derived[RowTables, device] = new
        return new


class Operands(NamedTuple):
    """All that the kernels read.

    query: [B, Hq, Q, D], of any strides but in the last dimension.
    pool: int32 [capacity, words of a page].
    lengths: int32 [4], on the device, so that a captured graph reads what they are when it is replayed: columns in
    sinks, pages and tail; tokens in the tail's buffers; the first visible column; tokens of the chunk.
    sinks, tail, chunk: keys and values [B, Hkv, tokens, D], contiguous.
    mask: None, uint8 or floating point [B or 1, Hq or 1, Q or 1, visible columns].
    """

    layout: TritonLayout
    query: Tensor
    pool: Tensor
    tables: RowTables
    lengths: Tensor
    sinks: tuple[Tensor, Tensor]
    tail: tuple[Tensor, Tensor]
    chunk: tuple[Tensor, Tensor]
    num_sinks: int
    rotated: tuple[bool, bool]
    scale: float
    mask: Tensor | None = None
    has_window: bool = False
    softcap: float | None = None
    sink_logits: Tensor | None = None

    @staticmethod
    def of(states: Snapshot, call: AttentionCall) -> Operands:
        assert isinstance(states.layout, TritonLayout)
        assert states.pool is not None
        config, device = states.config, call.query.device
        tail, chunk = (_contiguous(part) for part in (states.tail_buffers, states.chunk))
        numbers = states.settled, states.tail_length, states.hidden, states.chunk.num_tokens
        return Operands(
            layout=states.layout,
            query=call.query if call.query.stride(-1) == 1 else call.query.contiguous(),
            pool=states.pool.records.view(torch.int32),
            tables=RowTables.of(states.rows, device),
            lengths=_on_device(numbers, device),
            sinks=chunk if states.sinks is None else _contiguous(states.sinks),
            tail=tail,
            chunk=chunk,
            num_sinks=config.sinks,
            rotated=(config.codec(0).rotated, config.codec(1).rotated),
            scale=call.query.shape[-1] ** -0.5 if call.scale is None else call.scale,
            mask=_mask(call.mask),
            has_window=states.hidden > 0,
            softcap=call.softcap,
            sink_logits=None if call.sink_logits is None else call.sink_logits.contiguous(),
        )

    @property
    def num_rows(self) -> int:
        """Query rows that share a KV head."""
        return self.query.shape[1] // self.layout.num_heads * self.query.shape[2]

    @property
    def score_scale(self) -> float:
        """Of products of exact keys, into scores in base 2; if there is a softcap c, into 2 / c of them."""
        return self.scale * math.log2(math.e) * (1.0 if self.softcap is None else 2.0 / self.softcap)

    @property
    def page_scale(self) -> float:
        """Of products of the query with the rotation's signs, before they meet the scales of keys."""
        key = self.layout.parts[0]
        return self.score_scale * key.channels.basis_factor(self.rotated[0]) * constants.key_boost(key)


@cache
def basis_on(channels: layout.Channels, rotated: bool, device: torch.device) -> Tensor:
    """int8 [positions, head_dim]"""
    return channels.basis(rotated).to(device)


# The layers of a model have the same lengths in the same step.
@lru_cache(maxsize=16)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _contiguous(states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return states[0].contiguous(), states[1].contiguous()


def _mask(mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.dtype == torch.bool:
        return mask.view(torch.uint8)
    if mask.dtype != torch.float64:
        return mask
    narrow = mask.clamp_min(torch.finfo(torch.float32).min).to(torch.float32)  # what is finite stays so
    return narrow.masked_fill(mask == -torch.inf, -torch.inf)


KERNEL = TritonAttention()
