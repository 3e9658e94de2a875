"""Attention to packed pages: scores from key codes, a running softmax, sums of value codes.

Source: KIVI (Liu et al., 2024) for folding scales into queries and attention weights; Milakov and Gimelshein (2018) for
the running softmax.
"""

import triton
import triton.language as tl

from kvquant_kernels.triton.ops import tiles


@triton.jit
def attend_pages(
    q_row_ptr,
    basis_ptr,
    head_ptr,
    slots_ptr,
    first,
    last,
    first_page_column,
    first_visible,
    mask_row_ptr,
    mask_stride,
    partial_ptr,
    weights_ptr,
    first_at,
    num_parts,
    num_rows,
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
    """Attention to pages first..last-1 of one row and head; stores its partial output, in positions, with m and l.

    num_rows: of the query rows, those that exist. Results of query row r are the (first_at + r * num_parts)-th.
    """
    BLOCK: tl.constexpr = PAGE_SIZE // NUM_BLOCKS
    LOG_BOOST: tl.constexpr = tiles.log_boost(V_CODE)
    K_BLOCKS: tl.constexpr = tiles.blocks_of(K_CODE)
    V_BLOCKS: tl.constexpr = tiles.blocks_of(V_CODE)
    factors = _query_factors(
        q_row_ptr, num_rows, basis_ptr, page_scale, K_CODE, BLOCK_DK, HEAD_DIM_K, K_PARTS, K_WIDTH, BLOCK_R
    )
    offs_t = tl.arange(0, BLOCK)
    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    # Sums over tokens are completed after the last page, if there are registers for what is incomplete until then.
    LANES: tl.constexpr = 16 if BLOCK_R * V_PARTS * V_WIDTH <= 1024 else 1
    l = tl.zeros([LANES, BLOCK_R], tl.float32)
    acc = ()
    for i in tl.static_range(V_PARTS):
        acc = acc + (tl.zeros([V_WIDTH, BLOCK_R], tl.float32),)
    zeros = ()  # what zero points of groups add to values
    if not V_PER_CHANNEL and V_MIDDLE != 0.0:
        for g in tl.static_range(V_GROUPS):
            zeros = zeros + (tl.zeros([LANES, BLOCK_R], tl.float32),)
    # A page's slot is loaded while the page before is attended to: otherwise its words would be late.
    slot = tl.load(slots_ptr + tl.minimum(first, last - 1), mask=first < last, other=0)
    for page in tl.range(first, last, num_stages=STAGES):
        record_ptr = head_ptr + slot.to(tl.int64) * page_words
        slot = tl.load(slots_ptr + tl.minimum(page + 1, last - 1))
        words = tiles.load_words(record_ptr, NUM_BLOCKS // K_BLOCKS * (K_PARTS // 2), BLOCK, K_WIDTH // 2)
        if K_PER_CHANNEL:
            scores = _scores_per_channel(
                words, record_ptr + K_SCALES, factors, NUM_BLOCKS, K_CODE, K_PARTS, K_WIDTH, K_MIDDLE,
                K_FACTOR, USE_ASM, BLOCK, BLOCK_R,
            )  # fmt: skip
        else:
            scores = _scores_per_token(
                words, record_ptr + K_SCALES, factors, NUM_BLOCKS, K_CODE, K_PARTS, K_WIDTH, K_GROUPS,
                K_MIDDLE, K_FACTOR, USE_ASM, BLOCK, BLOCK_R, PAGE_SIZE,
            )  # fmt: skip
        masked = ()
        for t in tl.static_range(NUM_BLOCKS):
            s = scores[t]
            if HAS_SOFTCAP:
                s = tiles.softcap_scores(s, softcap)
            if HAS_WINDOW or MASK != "none":
                columns = first_page_column + page * PAGE_SIZE + t * BLOCK + offs_t
                s = tiles.masked_scores(
                    s, columns, columns >= first_visible, mask_row_ptr, mask_stride, MASK, MASK_IS_SHARED
                )
            masked = masked + (s,)
        top = masked[0]
        for t in tl.static_range(1, NUM_BLOCKS):
            top = tl.maximum(top, masked[t])
        m_new = tl.maximum(m, tl.max(top, 0) - LOG_BOOST)
        shift = tiles.shift_of(m_new)
        keep = tl.exp2(m - shift)
        weights = ()
        for t in tl.static_range(NUM_BLOCKS):
            weights = weights + (tl.exp2(masked[t] - shift[None, :]),)
        total = weights[0]
        for t in tl.static_range(1, NUM_BLOCKS):
            total += weights[t]
        l = l * keep[None, :] + tiles.partly_summed(total, BLOCK, BLOCK_R, LANES)
        m = m_new
        words = tiles.load_words(record_ptr + V_CODES, NUM_BLOCKS // V_BLOCKS * (V_PARTS // 2), V_WIDTH, BLOCK // 2)
        if V_PER_CHANNEL:
            acc = _sums_per_channel(
                words, record_ptr + V_SCALES, weights, acc, keep, NUM_BLOCKS, V_CODE, V_PARTS, V_WIDTH,
                V_MIDDLE, USE_ASM, BLOCK, BLOCK_R,
            )  # fmt: skip
        else:
            acc, zeros = _sums_per_token(
                words, record_ptr + V_SCALES, weights, acc, zeros, keep, NUM_BLOCKS, V_CODE, V_PARTS, V_WIDTH, V_GROUPS,
                V_MIDDLE, USE_ASM, BLOCK, BLOCK_R, PAGE_SIZE, LANES,
            )  # fmt: skip
    if not V_PER_CHANNEL and V_MIDDLE != 0.0:
        acc = _with_zeros(acc, zeros, V_CODE, V_PARTS, V_GROUPS)
    row = tl.arange(0, BLOCK_R)  # again, and what follows from it: not to be kept in registers beside the loop
    is_row = row < num_rows
    at = first_at + row * num_parts
    for i in tl.static_range(V_PARTS):
        offs = (at * PARTIAL_DIM)[None, :] + (i * V_WIDTH + tl.arange(0, V_WIDTH))[:, None]
        tl.store(partial_ptr + offs, acc[i] * (V_FACTOR / tiles.part_unit(V_CODE, i)), mask=is_row[None, :])
    tl.store(weights_ptr + 2 * at, m, mask=is_row)
    tl.store(weights_ptr + 2 * at + 1, tl.sum(l, 0), mask=is_row)


@triton.jit
def _query_factors(
    q_row_ptr, num_rows, basis_ptr, page_scale, CODE: tl.constexpr, BLOCK_DK: tl.constexpr, HEAD_DIM_K: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Queries of rows [R] in the positions and the basis of the pages, as parts float32 [WIDTH, R].

    They are multiplied by page_scale, and divided by the unit of the part's codes.
    """
    is_row = tl.arange(0, BLOCK_R) < num_rows
    CHUNK: tl.constexpr = min(32, BLOCK_DK)  # of channels: few enough for a tile of the basis to fit beside the rest
    factors = ()
    for i in tl.static_range(PARTS):
        factor = tl.zeros([WIDTH, BLOCK_R], tl.float32)
        for d in range(0, HEAD_DIM_K, CHUNK):
            offs_d = d + tl.arange(0, CHUNK)
            is_channel = offs_d < HEAD_DIM_K
            q = tl.load(q_row_ptr[None, :] + offs_d[:, None], mask=is_channel[:, None] & is_row[None, :], other=0.0)
            offs = (i * WIDTH + tl.arange(0, WIDTH))[:, None] * HEAD_DIM_K + offs_d[None, :]
            basis = tl.load(basis_ptr + offs, mask=is_channel[None, :], other=0)
            factor = tl.dot(basis.to(q.dtype), q, factor)  # entries are 0, 1 or -1: every product is exact
        factors = factors + (factor * (page_scale * (1.0 / tiles.part_unit(CODE, i))),)
    return factors


@triton.jit
def _scores_per_channel(
    words, scales_ptr, factors, NUM_BLOCKS: tl.constexpr, CODE: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    MIDDLE: tl.constexpr, FACTOR: tl.constexpr, USE_ASM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK, R] of each block of tokens, for keys with a scale per channel, which goes into the query.

    What the floats of codes have too much leaves by sums over the rounded products of query and scale.
    """
    BLOCKS: tl.constexpr = tiles.blocks_of(CODE)
    scaled, sums = (), ()
    bias = tl.zeros([WIDTH, BLOCK_R], tl.float32)
    for i in tl.static_range(PARTS):
        scale, zero = tiles.load_scales(scales_ptr + i * WIDTH + tl.arange(0, WIDTH))
        x = (factors[i] * scale[:, None]).to(tl.float16)
        scaled = scaled + (x,)
        if MIDDLE != 0.0:
            zero *= tiles.part_unit(CODE, i)
            bias += factors[i] * zero[:, None]
            sums = sums + (tiles.column_sums(x, WIDTH),)
    if MIDDLE != 0.0:
        total = tl.sum(bias, 0)
    scores = ()
    for t in tl.static_range(NUM_BLOCKS):
        s = tl.zeros([BLOCK, BLOCK_R], tl.float32)
        for i in tl.static_range(PARTS):
            w = words[t // BLOCKS * (PARTS // 2) + i // 2]
            s = tl.dot(tiles.field(w, i % 2, t % BLOCKS, CODE, USE_ASM, BLOCK, WIDTH), scaled[i], s)
        if FACTOR != tiles.block_unit(CODE, t):
            s = s * (FACTOR / tiles.block_unit(CODE, t))
        if MIDDLE != 0.0:
            excess = tiles.offset(CODE, 0, t, MIDDLE) / tiles.block_unit(CODE, t) * sums[0]
            for i in tl.static_range(1, PARTS):
                excess += tiles.offset(CODE, i, t, MIDDLE) / tiles.block_unit(CODE, t) * sums[i]
            s = s + ((total - tiles.any_row(excess)) * FACTOR)[None, :]
        scores = scores + (s,)
    return scores


@triton.jit
def _scores_per_token(
    words, scales_ptr, factors, NUM_BLOCKS: tl.constexpr, CODE: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
    GROUPS: tl.constexpr, MIDDLE: tl.constexpr, FACTOR: tl.constexpr, USE_ASM: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Scores [BLOCK, R] of each block of tokens, for keys with a scale per token and group of channels."""
    BLOCKS: tl.constexpr = tiles.blocks_of(CODE)
    PER_GROUP: tl.constexpr = PARTS // GROUPS  # one part of all may be left over, which is padding
    rounded = ()
    for i in tl.static_range(PARTS):
        rounded = rounded + (factors[i].to(tl.float16),)
    scores = ()
    for t in tl.static_range(NUM_BLOCKS):
        s = tl.zeros([BLOCK, BLOCK_R], tl.float32)
        for g in tl.static_range(GROUPS):
            dot = tl.zeros([BLOCK, BLOCK_R], tl.float32)
            for i in tl.static_range(g * PER_GROUP, (g + 1) * PER_GROUP):
                w = words[t // BLOCKS * (PARTS // 2) + i // 2]
                dot = tl.dot(tiles.field(w, i % 2, t % BLOCKS, CODE, USE_ASM, BLOCK, WIDTH), rounded[i], dot)
            scale, zero = tiles.load_scales(scales_ptr + g * PAGE_SIZE + t * BLOCK + tl.arange(0, BLOCK))
            if MIDDLE != 0.0:
                excess = tl.zeros([WIDTH, BLOCK_R], tl.float32)
                total = tl.zeros([WIDTH, BLOCK_R], tl.float32)
                for i in tl.static_range(g * PER_GROUP, (g + 1) * PER_GROUP):
                    excess += tiles.offset(CODE, i, t, MIDDLE) * rounded[i].to(tl.float32)
                    total += tiles.part_unit(CODE, i) * factors[i]
                dot = dot - tl.sum(excess, 0)[None, :]
                s += zero[:, None] * tl.sum(total, 0)[None, :]
            s += scale[:, None] * (dot * (1.0 / tiles.block_unit(CODE, t)))
        if FACTOR != 1.0:
            s = s * FACTOR
        scores = scores + (s,)
    return scores


@triton.jit
def _sums_per_token(
    words, scales_ptr, weights, acc, zeros, keep, NUM_BLOCKS: tl.constexpr, CODE: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, MIDDLE: tl.constexpr, USE_ASM: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr, PAGE_SIZE: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """acc * keep plus the sums of a page's values, with a scale per token and group, which goes into the weights.

    Sums are in the units of their parts. Codes are centered here: flat weights add up to much more than the values
    that they weigh, whose signs differ, and what codes have too much would drown these. What zero points add is
    collected in `zeros` of each group [LANES, R].
    """
    BLOCKS: tl.constexpr = tiles.blocks_of(CODE)
    PER_GROUP: tl.constexpr = PARTS // GROUPS
    sums, new_zeros = (), ()
    for g in tl.static_range(GROUPS):
        scaled = ()
        if MIDDLE != 0.0:
            z = tl.zeros_like(weights[0])
        for t in tl.static_range(NUM_BLOCKS):
            scale, zero = tiles.load_scales(scales_ptr + g * PAGE_SIZE + t * BLOCK + tl.arange(0, BLOCK))
            if MIDDLE != 0.0:
                zero += tiles.above_middle(MIDDLE) * scale
                z += weights[t] * zero[:, None]
            if tiles.block_unit(CODE, t) != 1:
                scale *= 1.0 / tiles.block_unit(CODE, t)
            scaled = scaled + ((weights[t] * scale[:, None]).to(tl.float16),)
        if MIDDLE != 0.0:
            new_zeros = new_zeros + (zeros[g] * keep[None, :] + tiles.partly_summed(z, BLOCK, BLOCK_R, LANES),)
        for i in tl.static_range(g * PER_GROUP, (g + 1) * PER_GROUP):
            # Products of one page at a time: over many, what tensor cores cut off would add up.
            a = tl.zeros([WIDTH, BLOCK_R], tl.float32)
            for t in tl.static_range(NUM_BLOCKS):
                w = words[t // BLOCKS * (PARTS // 2) + i // 2]
                a = tl.dot(tiles.field(w, i % 2, t % BLOCKS, CODE, USE_ASM, WIDTH, BLOCK, MIDDLE), scaled[t], a)
            sums = sums + (acc[i] * keep[None, :] + a,)
    for i in tl.static_range(GROUPS * PER_GROUP, PARTS):
        sums = sums + (acc[i],)  # padding
    return sums, new_zeros


@triton.jit
def _with_zeros(acc, zeros, CODE: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr):
    """acc with what `_sums_per_token` has collected in `zeros`."""
    PER_GROUP: tl.constexpr = PARTS // GROUPS
    sums = ()
    for g in tl.static_range(GROUPS):
        zero = tl.sum(zeros[g], 0)
        for i in tl.static_range(g * PER_GROUP, (g + 1) * PER_GROUP):
            sums = sums + (acc[i] + (zero * tiles.part_unit(CODE, i))[None, :],)
    for i in tl.static_range(GROUPS * PER_GROUP, PARTS):
        sums = sums + (acc[i],)  # padding
    return sums


@triton.jit
def _sums_per_channel(
    words, scales_ptr, weights, acc, keep, NUM_BLOCKS: tl.constexpr, CODE: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, MIDDLE: tl.constexpr, USE_ASM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """acc * keep plus the sums of a page's values with a scale per channel, which are scaled afterwards.

    Sums are in the units of their parts.
    """
    BLOCKS: tl.constexpr = tiles.blocks_of(CODE)
    rounded = ()
    total = tl.zeros_like(weights[0])
    for t in tl.static_range(NUM_BLOCKS):
        rounded = rounded + ((weights[t] * (1.0 / tiles.block_unit(CODE, t))).to(tl.float16),)
        total += weights[t]
    sums = ()
    for i in tl.static_range(PARTS):
        scale, zero = tiles.load_scales(scales_ptr + i * WIDTH + tl.arange(0, WIDTH))
        a = tl.zeros([WIDTH, BLOCK_R], tl.float32)
        for t in tl.static_range(NUM_BLOCKS):
            w = words[t // BLOCKS * (PARTS // 2) + i // 2]
            a = tl.dot(tiles.field(w, i % 2, t % BLOCKS, CODE, USE_ASM, WIDTH, BLOCK, MIDDLE), rounded[t], a)
        kept = acc[i] * keep[None, :]
        if MIDDLE != 0.0:
            zero = (zero + tiles.above_middle(MIDDLE) * scale) * tiles.part_unit(CODE, i)
            kept += zero[:, None] * tl.sum(total, 0)[None, :]
        sums = sums + (kept + scale[:, None] * a,)
    return sums
