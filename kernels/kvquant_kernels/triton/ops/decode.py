"""Decode attention: split-KV programs read packed pages, sinks, tail and chunk; another kernel combines their results.

Source: Flash-Decoding (Dao et al., 2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvquant_kernels.triton import launch
from kvquant_kernels.triton.attend import Operands, basis_on
from kvquant_kernels.triton.ops.combine import combine
from kvquant_kernels.triton.ops.exact import attend_exact
from kvquant_kernels.triton.ops.pages import attend_pages


def decode(operands: Operands, out_dtype: torch.dtype) -> Tensor:
    """The attention output [B, Hq, Q, Dv]."""
    batch, num_q_heads, q_len, _ = operands.query.shape
    out = operands.query.new_empty(batch, num_q_heads, q_len, operands.layout.parts[1].shape.head_dim, dtype=out_dtype)
    if out.numel():
        with launch.device_of(out):
            combine(operands, *_partial_results(operands), out)
    return out


def _partial_results(operands: Operands) -> tuple[Tensor, Tensor]:
    """Sums of weighted values, float32 [B, Hq, Q, splits + NUM_EXACT, partial_dim], and [..., 2] of the weights: the
    largest score, in base 2, that was taken from all, and their sum."""
    query, layout, device = operands.query, operands.layout, operands.query.device
    batch, num_q_heads, q_len, _ = query.shape
    page = layout.constants
    chosen = launch.choose(launch.target_of(device), max(page["HEAD_DIM_K"], page["HEAD_DIM_V"]))
    block_r = chosen.block_r(operands.num_rows)
    programs = layout.num_heads * -(-operands.num_rows // block_r)
    splits = chosen.num_splits(batch * programs, operands.tables.slots.shape[1], launch.processors(device))
    parts = splits + launch.NUM_EXACT
    partial = query.new_empty(batch, num_q_heads, q_len, parts, page["PARTIAL_DIM"], dtype=torch.float32)
    weights = query.new_empty(batch, num_q_heads, q_len, parts, 2, dtype=torch.float32)
    mask, mask_strides = _mask_and_strides(operands)
    key = layout.parts[0]
    _decode_kernel[(parts, programs, batch)](
        query,
        basis_on(key.channels, operands.rotated[0], device),
        operands.pool,
        operands.tables.slots,
        operands.tables.rows,
        operands.lengths,
        *operands.sinks,
        *operands.tail,
        *operands.chunk,
        mask,
        partial,
        weights,
        *query.stride()[:3],
        operands.tables.slots.stride(0),
        *mask_strides,
        operands.tail[0].shape[2],
        operands.pool.shape[1],
        operands.score_scale,
        operands.page_scale,
        operands.softcap or 0.0,
        q_len,
        num_q_heads // layout.num_heads,
        **page,
        **call_constants(operands, chosen, block_r),
        enable_fp_fusion=True,
        **chosen.options,
    )
    return partial, weights


def call_constants(operands: Operands, chosen: launch.Launch, block_r: int) -> dict[str, object]:
    """The constants of the decode kernel that follow from the call and the device."""
    mask = operands.mask
    return {
        "NUM_EXACT": launch.NUM_EXACT,
        "BLOCK_R": block_r,
        "BLOCK_T": chosen.exact_tokens,
        "NUM_SINKS": operands.num_sinks,
        "MASK": "none" if mask is None else "bool" if mask.dtype == torch.uint8 else "float",
        "MASK_IS_SHARED": mask is None or mask.shape[1:3] == (1, 1),
        "HAS_WINDOW": operands.has_window,
        "HAS_SOFTCAP": operands.softcap is not None,
        "USE_ASM": operands.query.is_cuda and torch.version.hip is None,
        "STAGES": chosen.num_stages,
    }


def _mask_and_strides(operands: Operands) -> tuple[Tensor, list[int]]:
    """The mask, or any tensor in its place; its strides, 0 where it has one row for all."""
    mask = operands.mask
    if mask is None:
        return operands.query, [0, 0, 0, 0]
    strides = [step if size > 1 else 0 for size, step in zip(mask.shape[:3], mask.stride()[:3], strict=True)]
    return mask, [*strides, mask.stride(3)]


@triton.jit
def _decode_kernel(
    q_ptr,
    basis_ptr,
    pool_ptr,
    slots_ptr,
    rows_ptr,
    lengths_ptr,
    sink_k_ptr,
    sink_v_ptr,
    tail_k_ptr,
    tail_v_ptr,
    chunk_k_ptr,
    chunk_v_ptr,
    mask_ptr,
    partial_ptr,
    weights_ptr,
    stride_qb,
    stride_qh,
    stride_qq,
    stride_slots,
    stride_mb,
    stride_mh,
    stride_mq,
    stride_mt,
    tail_room,
    page_words,
    scale,
    page_scale,
    softcap,
    q_len,
    num_rep,
    NUM_EXACT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_SINKS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    HEAD_WORDS: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_CODES: tl.constexpr,
    V_SCALES: tl.constexpr,
    K_CODE: tl.constexpr,
    K_PER_CHANNEL: tl.constexpr,
    K_PARTS: tl.constexpr,
    K_WIDTH: tl.constexpr,
    K_GROUPS: tl.constexpr,
    K_MIDDLE: tl.constexpr,
    K_FACTOR: tl.constexpr,
    V_CODE: tl.constexpr,
    V_PER_CHANNEL: tl.constexpr,
    V_PARTS: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_GROUPS: tl.constexpr,
    V_MIDDLE: tl.constexpr,
    V_FACTOR: tl.constexpr,
    PARTIAL_DIM: tl.constexpr,
    MASK: tl.constexpr,
    MASK_IS_SHARED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    USE_ASM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """grid: (splits of the pages + NUM_EXACT, Hkv * tiles of BLOCK_R query rows, B)

    One program attends to a share of a row's pages, or of its exact tokens, for some query rows of one KV head.
    Bytes read per token: its packed keys and values with their scales, once for all BLOCK_R query rows.
    """
    pid_split = tl.program_id(0)
    num_splits = tl.num_programs(0) - NUM_EXACT
    b = tl.program_id(2).to(tl.int64)
    num_rows = num_rep * q_len
    num_tiles = tl.cdiv(num_rows, BLOCK_R)
    num_heads = tl.num_programs(1) // num_tiles
    head = (tl.program_id(1) // num_tiles).to(tl.int64)
    first_row = (tl.program_id(1) % num_tiles) * BLOCK_R
    row = first_row + tl.arange(0, BLOCK_R)
    is_row = row < num_rows
    q_head = head * num_rep + row // q_len
    q_row_ptr = q_ptr + b * stride_qb + (q_head * stride_qh + (row % q_len) * stride_qq)
    # Rows beyond the last read the mask of the last.
    mask_row = tl.minimum(row, num_rows - 1)
    mask_row_ptr = mask_ptr + b * stride_mb
    if not MASK_IS_SHARED:
        mask_row_ptr += (head * num_rep + mask_row // q_len) * stride_mh + (mask_row % q_len) * stride_mq

    start = tl.load(rows_ptr + 2 * b)
    num_pages = tl.load(rows_ptr + 2 * b + 1)
    settled = tl.load(lengths_ptr)
    tail_length = tl.load(lengths_ptr + 1)
    first_visible = tl.load(lengths_ptr + 2)
    mask_row_ptr -= first_visible.to(tl.int64) * stride_mt  # masks begin there
    first_page_column = start + NUM_SINKS
    # Results are [B, Hkv, num_rows, splits + NUM_EXACT]; where that of the first row is.
    first_at = ((b * num_heads + head) * num_rows + first_row) * (num_splits + NUM_EXACT) + pid_split

    if pid_split < num_splits:
        first = tl.maximum(first_visible - first_page_column, 0) // PAGE_SIZE if HAS_WINDOW else 0
        share = tl.cdiv(num_pages - first, num_splits)
        first += pid_split * share
        attend_pages(
            q_row_ptr,
            basis_ptr,
            pool_ptr + head * HEAD_WORDS,
            slots_ptr + b * stride_slots,
            first,
            tl.minimum(first + share, num_pages),
            first_page_column,
            first_visible,
            mask_row_ptr,
            stride_mt,
            partial_ptr,
            weights_ptr,
            first_at,
            num_splits + NUM_EXACT,
            num_rows - first_row,
            page_words,
            page_scale,
            softcap,
            BLOCK_R,
            BLOCK_DK,
            HEAD_DIM_K,
            PAGE_SIZE,
            NUM_BLOCKS,
            K_SCALES,
            V_CODES,
            V_SCALES,
            K_CODE,
            K_PER_CHANNEL,
            K_PARTS,
            K_WIDTH,
            K_GROUPS,
            K_MIDDLE,
            K_FACTOR,
            V_CODE,
            V_PER_CHANNEL,
            V_PARTS,
            V_WIDTH,
            V_GROUPS,
            V_MIDDLE,
            V_FACTOR,
            PARTIAL_DIM,
            MASK,
            MASK_IS_SHARED,
            HAS_WINDOW,
            HAS_SOFTCAP,
            USE_ASM,
            STAGES,
        )
    else:
        part = pid_split - num_splits
        has_pages = num_pages > 0
        tail_first = start + tl.where(has_pages, NUM_SINKS + num_pages * PAGE_SIZE, 0)
        tail_share = tl.cdiv(tl.cdiv(settled - tail_first, BLOCK_T), NUM_EXACT) * BLOCK_T
        is_last = part == NUM_EXACT - 1
        place = b * num_heads + head
        offs_d = tl.arange(0, BLOCK_DK)
        is_channel = offs_d < HEAD_DIM_K
        q = tl.load(q_row_ptr[None, :] + offs_d[:, None], mask=is_channel[:, None] & is_row[None, :], other=0.0)
        m = tl.full([BLOCK_R], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_R], tl.float32)
        acc = tl.zeros([BLOCK_DV, BLOCK_R], tl.float32)
        for segment in tl.static_range(3):
            # Token i of a segment is in column `column + i` and lies at token `offset + i` of its tensor.
            if segment == 0:
                k_ptr, v_ptr, tokens = sink_k_ptr, sink_v_ptr, NUM_SINKS
                begin, end, column, offset = 0, tl.where(is_last & has_pages, NUM_SINKS, 0), start, 0
            elif segment == 1:
                k_ptr, v_ptr, tokens = tail_k_ptr, tail_v_ptr, tail_room
                begin, column, offset = part * tail_share, tail_first, tail_first - (settled - tail_length)
                end = tl.minimum(begin + tail_share, settled - tail_first)
            else:
                k_ptr, v_ptr, tokens = chunk_k_ptr, chunk_v_ptr, tl.load(lengths_ptr + 3)
                begin, end, column, offset = 0, tl.where(is_last, tokens, 0), settled, 0
            m, l, acc = attend_exact(
                m,
                l,
                acc,
                q,
                k_ptr + place * tokens * HEAD_DIM_K,
                v_ptr + place * tokens * HEAD_DIM_V,
                begin,
                end,
                column,
                offset,
                first_visible,
                mask_row_ptr,
                stride_mt,
                scale,
                softcap,
                BLOCK_T,
                BLOCK_DK,
                BLOCK_DV,
                HEAD_DIM_K,
                HEAD_DIM_V,
                MASK,
                MASK_IS_SHARED,
                HAS_WINDOW,
                HAS_SOFTCAP,
            )
        offs_v = tl.arange(0, BLOCK_DV)
        at = first_at + tl.arange(0, BLOCK_R) * (num_splits + NUM_EXACT)
        tl.store(
            partial_ptr + (at * PARTIAL_DIM)[None, :] + offs_v[:, None],
            acc,
            mask=is_row[None, :] & (offs_v < HEAD_DIM_V)[:, None],
        )
        tl.store(weights_ptr + 2 * at, m, mask=is_row)
        tl.store(weights_ptr + 2 * at + 1, l, mask=is_row)
