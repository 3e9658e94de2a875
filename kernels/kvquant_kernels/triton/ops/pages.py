"""Attention to packed pages: scores from key codes, a running softmax, sums of value codes.

Source: KIVI (Liu et al., 2024) for folding scales into queries and attention weights; Milakov and Gimelshein (2018) for
the running softmax.
"""

import triton
import triton.language as tl

from kvquant_kernels.triton.ops import tiles


@triton.jit
def attend_pages(
    q,
    basis_ptr,
    head_ptr,
    slots_ptr,
    first,
    last,
    first_page_column,
    first_visible,
    mask_row_ptr,
    mask_stride,
    partial_row_ptr,
    weight_row_ptr,
    is_row,
    page_words,
    page_scale,
    softcap,
    BLOCK_R: tl.constexpr,
    BLOCK_DK: tl.constexpr,
    HEAD_DIM_K: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_CODES: tl.constexpr,
    V_SCALES: tl.constexpr,
    K_CODE: tl.constexpr,
    K_PER_CHANNEL: tl.constexpr,
    K_PARTS: tl.constexpr,
    K_WIDTH: tl.constexpr,
    K_GROUPS: tl.constexpr,
    K_OFFSET: tl.constexpr,
    K_FACTOR: tl.constexpr,
    V_CODE: tl.constexpr,
    V_PER_CHANNEL: tl.constexpr,
    V_PARTS: tl.constexpr,
    V_WIDTH: tl.constexpr,
    V_GROUPS: tl.constexpr,
    V_OFFSET: tl.constexpr,
    V_BOOST: tl.constexpr,
    V_FACTOR: tl.constexpr,
    MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    USE_ASM: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention to pages first..last-1 of one row and head; stores its partial output, in positions, with m and l."""
    BLOCK: tl.constexpr = PAGE_SIZE // NUM_BLOCKS
    K_BLOCKS: tl.constexpr = 2 if K_CODE == "int4" else (4 if K_CODE == "int2" else 1)
    V_BLOCKS: tl.constexpr = 2 if V_CODE == "int4" else (4 if V_CODE == "int2" else 1)
    factors = _query_factors(q, basis_ptr, page_scale, BLOCK_DK, HEAD_DIM_K, K_PARTS, K_WIDTH)
    offs_t = tl.arange(0, BLOCK)
    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_R], tl.float32)
    acc = ()
    for i in tl.static_range(V_PARTS):
        acc = acc + (tl.zeros([V_WIDTH, BLOCK_R], tl.float32),)
    for page in tl.range(first, last, num_stages=STAGES):
        slot = tl.load(slots_ptr + page).to(tl.int64)
        record_ptr = head_ptr + slot * page_words
        words = tiles.load_words(record_ptr, NUM_BLOCKS // K_BLOCKS * (K_PARTS // 2), BLOCK, K_WIDTH // 2)
        if K_PER_CHANNEL:
            scores = _scores_per_channel(
                words, record_ptr + K_SCALES, factors, NUM_BLOCKS, K_BLOCKS, K_CODE, K_PARTS, K_WIDTH, K_OFFSET,
                K_FACTOR, USE_ASM, BLOCK, BLOCK_R,
            )  # fmt: skip
        else:
            scores = _scores_per_token(
                words, record_ptr + K_SCALES, factors, NUM_BLOCKS, K_BLOCKS, K_CODE, K_PARTS, K_WIDTH, K_GROUPS,
                K_OFFSET, K_FACTOR, USE_ASM, BLOCK, BLOCK_R, PAGE_SIZE,
            )  # fmt: skip
        masked = ()
        for t in tl.static_range(NUM_BLOCKS):
            s = scores[t]
            if HAS_SOFTCAP:
                s = tiles.softcap_scores(s, softcap)
            if HAS_WINDOW or MASK != "none":
                columns = first_page_column + page * PAGE_SIZE + t * BLOCK + offs_t
                s = tiles.masked_scores(s, columns, columns >= first_visible, mask_row_ptr, mask_stride, MASK)
            masked = masked + (s,)
        top = masked[0]
        for t in tl.static_range(1, NUM_BLOCKS):
            top = tl.maximum(top, masked[t])
        m_new = tl.maximum(m, tl.max(top, 0))
        shift = tiles.shift_of(m_new)
        keep = tl.exp2(m - shift)
        weights = ()
        for t in tl.static_range(NUM_BLOCKS):
            weights = weights + (tl.exp2(masked[t] - shift[None, :]),)
        total = weights[0]
        for t in tl.static_range(1, NUM_BLOCKS):
            total += weights[t]
        l = l * keep + tl.sum(total, 0)
        m = m_new
        words = tiles.load_words(record_ptr + V_CODES, NUM_BLOCKS // V_BLOCKS * (V_PARTS // 2), V_WIDTH, BLOCK // 2)
        if V_PER_CHANNEL:
            acc = _sums_per_channel(
                words, record_ptr + V_SCALES, weights, acc, keep, NUM_BLOCKS, V_BLOCKS, V_CODE, V_PARTS, V_WIDTH,
                V_OFFSET, V_BOOST, USE_ASM, BLOCK, BLOCK_R,
            )  # fmt: skip
        else:
            acc = _sums_per_token(
                words, record_ptr + V_SCALES, weights, acc, keep, NUM_BLOCKS, V_BLOCKS, V_CODE, V_PARTS, V_WIDTH,
                V_GROUPS, V_OFFSET, V_BOOST, USE_ASM, BLOCK, PAGE_SIZE,
            )  # fmt: skip
    for i in tl.static_range(V_PARTS):
        at = partial_row_ptr[None, :] + (i * V_WIDTH + tl.arange(0, V_WIDTH))[:, None]
        tl.store(at, acc[i] * V_FACTOR, mask=is_row[None, :])
    tl.store(weight_row_ptr, m, mask=is_row)
    tl.store(weight_row_ptr + 1, l, mask=is_row)


@triton.jit
def _query_factors(
    q, basis_ptr, page_scale, BLOCK_DK: tl.constexpr, HEAD_DIM_K: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr
):
    """Queries [BLOCK_DK, R] in the positions and the basis of the pages, times page_scale: parts float32 [WIDTH, R]."""
    offs_d = tl.arange(0, BLOCK_DK)
    factors = ()
    for i in tl.static_range(PARTS):
        offs = (i * WIDTH + tl.arange(0, WIDTH))[:, None] * HEAD_DIM_K + offs_d[None, :]
        basis = tl.load(basis_ptr + offs, mask=(offs_d < HEAD_DIM_K)[None, :], other=0)
        # Entries are 0, 1 or -1: every product is exact.
        factors = factors + (tl.dot(basis.to(q.dtype), q) * page_scale,)
    return factors


@triton.jit
def _operand(x, CODE: tl.constexpr):
    """x in the dtype in which codes are multiplied."""
    return x.to(tl.bfloat16 if CODE == "int4" or CODE == "int2" else tl.float16)


@triton.jit
def _scores_per_channel(
    words, scales_ptr, factors, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr, CODE: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, OFFSET: tl.constexpr, FACTOR: tl.constexpr, USE_ASM: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK, R] of each block of tokens, for keys with a scale per channel, which goes into the query.

    What codes have too much, OFFSET, leaves by sums over the rounded products of query and scale.
    """
    scaled = ()
    bias = tl.zeros([WIDTH, BLOCK_R], tl.float32)
    for i in tl.static_range(PARTS):
        scale, zero = tiles.load_scales(scales_ptr + i * WIDTH + tl.arange(0, WIDTH))
        x = _operand(factors[i] * scale[:, None], CODE)
        if OFFSET != 0.0:
            bias += factors[i] * zero[:, None] - OFFSET * x.to(tl.float32)
        scaled = scaled + (x,)
    if OFFSET != 0.0:
        shift = tl.sum(bias, 0) * FACTOR
    scores = ()
    for t in tl.static_range(NUM_BLOCKS):
        s = tl.zeros([BLOCK, BLOCK_R], tl.float32)
        for i in tl.static_range(PARTS):
            w = words[t // BLOCKS * (PARTS // 2) + i // 2]
            k = tiles.field(w, t % BLOCKS * 2 + i % 2, CODE, USE_ASM, BLOCK, WIDTH)
            s = tl.dot(k, scaled[i], s)
        if FACTOR != 1.0:
            s = s * FACTOR
        if OFFSET != 0.0:
            s = s + shift[None, :]
        scores = scores + (s,)
    return scores


@triton.jit
def _scores_per_token(
    words, scales_ptr, factors, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr, CODE: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, OFFSET: tl.constexpr, FACTOR: tl.constexpr, USE_ASM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK, R] of each block of tokens, for keys with a scale per token and group of channels."""
    # Parts that fill a group; the last parts of all may be padding.
    PER_GROUP: tl.constexpr = PARTS // GROUPS
    rounded = ()
    for i in tl.static_range(PARTS):
        rounded = rounded + (_operand(factors[i], CODE),)
    scores = ()
    for t in tl.static_range(NUM_BLOCKS):
        s = tl.zeros([BLOCK, BLOCK_R], tl.float32)
        for g in tl.static_range(GROUPS):
            dot = tl.zeros([BLOCK, BLOCK_R], tl.float32)
            if OFFSET != 0.0:
                rounded_sum = tl.zeros([WIDTH, BLOCK_R], tl.float32)
                exact_sum = tl.zeros([WIDTH, BLOCK_R], tl.float32)
            for j in tl.static_range(PER_GROUP):
                w = words[t // BLOCKS * (PARTS // 2) + (g * PER_GROUP + j) // 2]
                k = tiles.field(w, t % BLOCKS * 2 + (g * PER_GROUP + j) % 2, CODE, USE_ASM, BLOCK, WIDTH)
                dot = tl.dot(k, rounded[g * PER_GROUP + j], dot)
                if OFFSET != 0.0:
                    rounded_sum += rounded[g * PER_GROUP + j].to(tl.float32)
                    exact_sum += factors[g * PER_GROUP + j]
            scale, zero = tiles.load_scales(scales_ptr + g * PAGE_SIZE + t * BLOCK + tl.arange(0, BLOCK))
            if OFFSET != 0.0:
                dot = dot - (OFFSET * tl.sum(rounded_sum, 0))[None, :]
                s += zero[:, None] * tl.sum(exact_sum, 0)[None, :]
            s += scale[:, None] * dot
        if FACTOR != 1.0:
            s = s * FACTOR
        scores = scores + (s,)
    return scores


@triton.jit
def _sums_per_token(
    words, scales_ptr, weights, acc, keep, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr, CODE: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, OFFSET: tl.constexpr, BOOST: tl.constexpr,
    USE_ASM: tl.constexpr, BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """acc * keep plus the sums of a page's values, with a scale per token and group, which goes into the weights."""
    PER_GROUP: tl.constexpr = PARTS // GROUPS
    sums = ()
    for g in tl.static_range(GROUPS):
        scaled = ()
        bias = tl.zeros_like(weights[0])
        for t in tl.static_range(NUM_BLOCKS):
            scale, zero = tiles.load_scales(scales_ptr + g * PAGE_SIZE + t * BLOCK + tl.arange(0, BLOCK))
            if BOOST != 1.0:
                scale *= BOOST
            x = _operand(weights[t] * scale[:, None], CODE)
            if OFFSET != 0.0:
                if BOOST != 1.0:
                    zero *= BOOST
                bias += weights[t] * zero[:, None] - OFFSET * x.to(tl.float32)
            scaled = scaled + (x,)
        if OFFSET != 0.0:
            shift = tl.sum(bias, 0)
        for j in tl.static_range(PER_GROUP):
            a = acc[g * PER_GROUP + j] * keep[None, :]
            if OFFSET != 0.0:
                a += shift[None, :]
            for t in tl.static_range(NUM_BLOCKS):
                w = words[t // BLOCKS * (PARTS // 2) + (g * PER_GROUP + j) // 2]
                v = tiles.field(w, t % BLOCKS * 2 + (g * PER_GROUP + j) % 2, CODE, USE_ASM, WIDTH, BLOCK)
                a = tl.dot(v, scaled[t], a)
            sums = sums + (a,)
    for i in tl.static_range(GROUPS * PER_GROUP, PARTS):
        sums = sums + (acc[i],)  # padding
    return sums


@triton.jit
def _sums_per_channel(
    words, scales_ptr, weights, acc, keep, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr, CODE: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, OFFSET: tl.constexpr, BOOST: tl.constexpr, USE_ASM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """acc * keep plus the sums of a page's values with a scale per channel, which are scaled afterwards."""
    rounded = ()
    rounded_sum = tl.zeros_like(weights[0])
    exact_sum = tl.zeros_like(weights[0])
    for t in tl.static_range(NUM_BLOCKS):
        x = _operand(weights[t] * BOOST, CODE)
        if OFFSET != 0.0:
            rounded_sum += x.to(tl.float32)
            exact_sum += weights[t] * BOOST
        rounded = rounded + (x,)
    if OFFSET != 0.0:
        shift = OFFSET * tl.sum(rounded_sum, 0)
        total = tl.sum(exact_sum, 0)
    sums = ()
    for i in tl.static_range(PARTS):
        scale, zero = tiles.load_scales(scales_ptr + i * WIDTH + tl.arange(0, WIDTH))
        a = tl.zeros([WIDTH, BLOCK_R], tl.float32)
        for t in tl.static_range(NUM_BLOCKS):
            w = words[t // BLOCKS * (PARTS // 2) + i // 2]
            v = tiles.field(w, t % BLOCKS * 2 + i % 2, CODE, USE_ASM, WIDTH, BLOCK)
            a = tl.dot(v, rounded[t], a)
        kept = acc[i] * keep[None, :]
        if OFFSET != 0.0:
            a = a - shift[None, :]
            kept += zero[:, None] * total[None, :]
        sums = sums + (kept + scale[:, None] * a,)
    return sums
