"""Attention to exact tokens: sinks, tail and chunk."""

import triton
import triton.language as tl

from kvquant_kernels.triton.ops import tiles


@triton.jit
def attend_exact(
    m,
    l,
    acc,
    q,
    k_ptr,
    v_ptr,
    begin,
    end,
    column,
    offset,
    first_visible,
    mask_row_ptr,
    mask_stride,
    scale,
    softcap,
    BLOCK_T: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HEAD_DIM_K: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    MASK: tl.constexpr,
    MASK_IS_SHARED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """The running softmax m, l [R], acc [BLOCK_DV, R] after tokens begin..end-1 of one segment [tokens, D]."""
    offs_t = tl.arange(0, BLOCK_T)
    offs_k = tl.arange(0, BLOCK_DK)
    offs_v = tl.arange(0, BLOCK_DV)
    for t in range(begin, end, BLOCK_T):
        is_token = t + offs_t < end
        at = (offset + t + offs_t)[:, None]
        k = tl.load(
            k_ptr + at * HEAD_DIM_K + offs_k[None, :],
            mask=is_token[:, None] & (offs_k < HEAD_DIM_K)[None, :],
            other=0.0,
        )
        v = tl.load(
            v_ptr + at * HEAD_DIM_V + offs_v[None, :],
            mask=is_token[:, None] & (offs_v < HEAD_DIM_V)[None, :],
            other=0.0,
        )
        s = tl.dot(k, q) * scale
        if HAS_SOFTCAP:
            s = tiles.softcap_scores(s, softcap)
        columns = column + t + offs_t
        if HAS_WINDOW:
            is_token = is_token & (columns >= first_visible)
        s = tiles.masked_scores(s, columns, is_token, mask_row_ptr, mask_stride, MASK, MASK_IS_SHARED)
        m_new = tl.maximum(m, tl.max(s, 0))
        shift = tiles.shift_of(m_new)
        p = tl.exp2(s - shift[None, :])
        keep = tl.exp2(m - shift)
        l = l * keep + tl.sum(p, 0)
        m = m_new
        # In two summands, so that weights are not rounded to 16 bits: these tokens are few and often weigh most.
        high = p.to(v.dtype)
        low = (p - high.to(tl.float32)).to(v.dtype)
        v = tl.trans(v)
        acc = tl.dot(v, high, acc * keep[None, :])
        acc = tl.dot(v, low, acc)
    return m, l, acc
