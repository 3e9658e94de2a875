"""Decode attention over bfloat16 states in contiguous memory: what the packed kernel would be without packing.

The same structure: split-KV programs, tokens by heads tiles, softmax in base 2, partial results in float32, a second
kernel that combines them. Source: Flash-Decoding (Dao et al., 2023).
"""

# ruff: noqa: E741, N803  # the words of kernels

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvquant_kernels.triton import launch

MOST_SPLITS = 128


@dataclass(frozen=True)
class Tiling:
    """Tokens of a tile, warps and stages of a program, and programs that a multiprocessor is to have."""

    block_t: int
    num_warps: int
    num_stages: int
    programs: int


TILINGS = (Tiling(64, 4, 3, 2), Tiling(64, 4, 2, 3), Tiling(128, 4, 2, 1), Tiling(32, 2, 4, 5))


def decode_bf16(
    query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float, tiling: Tiling, dtype: torch.dtype
) -> Tensor:
    """Attention [B, Hq, 1, D] of query [B, Hq, 1, D] over the first lengths [B] of states [B, Hkv, T, D]."""
    batch, num_q_heads, _, dim = query.shape
    heads, tokens = key.shape[1:3]
    splits = num_splits(batch * heads, tokens, tiling, query.device)
    partial = query.new_empty(batch, num_q_heads, splits, dim, dtype=torch.float32)
    lse = query.new_empty(batch, num_q_heads, splits, dtype=torch.float32)
    out = query.new_empty(query.shape, dtype=dtype)
    _partial_kernel[(splits, heads, batch)](
        query, key, value, lengths, partial, lse, tokens, scale * 1.4426950408889634, num_q_heads // heads,
        BLOCK_R=max(8, launch.power_of_two(num_q_heads // heads)), BLOCK_T=tiling.block_t, HEAD_DIM=dim,
        STAGES=tiling.num_stages, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    _combine_kernel[(batch * num_q_heads,)](
        partial, lse, out, splits, BLOCK_S=launch.power_of_two(splits), HEAD_DIM=dim
    )
    return out


def num_splits(programs: int, tokens: int, tiling: Tiling, device: torch.device) -> int:
    """Programs that share a row, each with two tiles at least, where there are `programs` with one each."""
    wanted = -(-launch.processors(device) * tiling.programs // programs)
    return max(1, min(wanted, tokens // (2 * tiling.block_t), MOST_SPLITS))


@triton.jit
def _partial_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    partial_ptr,
    lse_ptr,
    room,
    scale,
    num_rep,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """grid: (splits, Hkv, B). One program attends to a share of a row's tokens for the query heads of one KV head."""
    split, splits = tl.program_id(0), tl.num_programs(0)
    place = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    offs_r, offs_d, offs_t = tl.arange(0, BLOCK_R), tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_T)
    is_row = offs_r < num_rep
    row = place * num_rep + offs_r
    q = tl.load(q_ptr + (row * HEAD_DIM)[None, :] + offs_d[:, None], mask=is_row[None, :], other=0.0)  # [D, R]
    length = tl.load(lengths_ptr + tl.program_id(2))
    tile_offs = offs_t[:, None] * HEAD_DIM + offs_d[None, :]
    k_ptr += place * room * HEAD_DIM
    v_ptr += place * room * HEAD_DIM
    full = length // BLOCK_T
    share = tl.cdiv(full, splits)
    first = split * share
    last = tl.minimum(first + share, full)
    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([HEAD_DIM, BLOCK_R], tl.float32)
    for block in tl.range(first, last, num_stages=STAGES):
        at = block * (BLOCK_T * HEAD_DIM) + tile_offs
        m, l, acc = _step(m, l, acc, tl.dot(tl.load(k_ptr + at), q) * scale, tl.load(v_ptr + at))
    if split == splits - 1:
        # What fills no tile. A loop of at most one turn, since variables keep their types in loops.
        for t in range(full * BLOCK_T, length, BLOCK_T):
            is_token = (t + offs_t < length)[:, None]
            at = t * HEAD_DIM + tile_offs
            s = tl.dot(tl.load(k_ptr + at, mask=is_token, other=0.0), q) * scale
            v = tl.load(v_ptr + at, mask=is_token, other=0.0)
            m, l, acc = _step(m, l, acc, tl.where(is_token, s, float("-inf")), v)
    inverse = tl.where(l == 0.0, 0.0, 1.0 / l)
    at = row * splits + split
    tl.store(partial_ptr + (at * HEAD_DIM)[None, :] + offs_d[:, None], acc * inverse[None, :], mask=is_row[None, :])
    tl.store(lse_ptr + at, tl.where(l == 0.0, float("-inf"), m + tl.log2(l)), mask=is_row)


@triton.jit
def _step(m, l, acc, s, v):
    """The running softmax m, l [R], acc [D, R] after scores s [T, R], one of them finite, of values v [T, D]."""
    m_new = tl.maximum(m, tl.max(s, 0))
    p = tl.exp2(s - m_new[None, :])
    keep = tl.exp2(m - m_new)
    acc = tl.dot(tl.trans(v), p.to(v.dtype), acc * keep[None, :])
    return m_new, l * keep + tl.sum(p, 0), acc


@triton.jit
def _combine_kernel(partial_ptr, lse_ptr, out_ptr, splits, BLOCK_S: tl.constexpr, HEAD_DIM: tl.constexpr):
    """grid: (B * Hq,). One program weighs and adds the partial results of one query head."""
    row = tl.program_id(0).to(tl.int64)
    offs_s, offs_d = tl.arange(0, BLOCK_S), tl.arange(0, HEAD_DIM)
    is_split = offs_s < splits
    lse = tl.load(lse_ptr + row * splits + offs_s, mask=is_split, other=float("-inf"))
    weights = tl.exp2(lse - tl.max(lse, 0))
    at = (row * splits + offs_s)[:, None] * HEAD_DIM + offs_d[None, :]
    partial = tl.load(partial_ptr + at, mask=is_split[:, None], other=0.0)
    out = tl.sum(partial * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out_ptr + row * HEAD_DIM + offs_d, out.to(out_ptr.dtype.element_ty))
