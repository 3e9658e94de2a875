"""Combination of partial attention results. Source: Flash-Decoding (Dao et al., 2023)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvquant_kernels.triton import constants, launch
from kvquant_kernels.triton.attend import Operands, basis_on
from kvquant_kernels.triton.ops import tiles

BLOCK_P = 16  # positions at a time; every layout has a multiple


def combine(operands: Operands, partial: Tensor, weights: Tensor, out: Tensor) -> None:
    """Writes the output [B, Hq, Q, Dv] of partial sums [B, Hq, Q, parts, partial_dim] and their weights [..., 2]."""
    batch, num_q_heads, q_len, parts, _ = partial.shape
    value = operands.layout.parts[1]
    _combine_kernel[(batch * num_q_heads * q_len,)](
        partial,
        weights,
        out if operands.sink_logits is None else operands.sink_logits,
        basis_on(value.channels, operands.rotated[1], out.device),
        out,
        parts - launch.NUM_EXACT,
        value.channels.basis_factor(operands.rotated[1]),
        q_len,
        num_q_heads,
        NUM_EXACT=launch.NUM_EXACT,
        BLOCK_S=launch.power_of_two(parts),
        BLOCK_P=BLOCK_P,
        BLOCK_DV=max(16, launch.power_of_two(value.shape.head_dim)),
        HEAD_DIM_V=value.shape.head_dim,
        POSITIONS=value.channels.padded,
        PARTIAL_DIM=constants.partial_dim(operands.layout),
        HAS_SINK_LOGITS=operands.sink_logits is not None,
        enable_fp_fusion=True,
    )


@triton.jit
def _combine_kernel(
    partial_ptr,
    weights_ptr,
    sink_logits_ptr,
    basis_ptr,
    out_ptr,
    num_splits,
    basis_factor,
    q_len,
    num_q_heads,
    NUM_EXACT: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    POSITIONS: tl.constexpr,
    PARTIAL_DIM: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
):
    """grid: (B * Hq * q_len,)

    One program weighs the partial results of one query, takes those of pages back to the model's basis, and adds them.
    """
    row = tl.program_id(0).to(tl.int64)
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, BLOCK_DV)
    is_channel = offs_d < HEAD_DIM_V
    num_partial = num_splits + NUM_EXACT
    # A maximum and a sum apart, not one logarithm, which would lose the sum beside the maximum of a row that is masked
    # with the least finite number throughout.
    weight_ptr = weights_ptr + 2 * row * num_partial + 2 * offs_s
    maximum = tl.load(weight_ptr, mask=offs_s < num_partial, other=float("-inf"))
    sums = tl.load(weight_ptr + 1, mask=offs_s < num_partial, other=0.0)
    top = tl.max(maximum, 0)
    if HAS_SINK_LOGITS:
        sink = tl.load(sink_logits_ptr + row // q_len % num_q_heads).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    shift = tiles.shift_of(top)
    factors = tl.exp2(maximum - shift)
    total = tl.sum(factors * sums, 0)
    if HAS_SINK_LOGITS:
        total += tl.exp2(sink - shift)
    row_ptr = partial_ptr + row * num_partial * PARTIAL_DIM
    out = tl.zeros([BLOCK_DV], tl.float32)
    for i in tl.static_range(NUM_EXACT):
        part = num_splits + i
        factor = tl.exp2(tl.load(weights_ptr + 2 * (row * num_partial + part)) - shift)
        out += factor * tl.load(row_ptr + part * PARTIAL_DIM + offs_d, mask=is_channel, other=0.0)
    is_split = offs_s < num_splits
    for p in range(0, POSITIONS, BLOCK_P):
        offs_p = p + tl.arange(0, BLOCK_P)
        packed = tl.load(row_ptr + offs_s[:, None] * PARTIAL_DIM + offs_p[None, :], mask=is_split[:, None], other=0.0)
        joined = tl.sum(packed * factors[:, None], 0) * basis_factor
        basis = tl.load(basis_ptr + offs_p[:, None] * HEAD_DIM_V + offs_d[None, :], mask=is_channel[None, :], other=0)
        out += tl.sum(basis.to(tl.float32) * joined[:, None], 0)
    out = out / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * HEAD_DIM_V + offs_d, out.to(out_ptr.dtype.element_ty), mask=is_channel)
