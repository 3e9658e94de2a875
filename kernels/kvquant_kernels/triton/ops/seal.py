"""Sealing: rotation, scales, rounding and packing of pages in one kernel, to the very numbers of the codec.

Every operation rounds as the codec's does, in its order; so no fused multiply-add, and quotients that are correctly
rounded.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvquant.codec import StateCodec, shrink_factors
from kvquant.formats import IntegerGrid, QuantFormat
from kvquant.rotation import block_size
from kvquant_kernels.triton import launch
from kvquant_kernels.triton.layout import PartLayout, code_name

# What one program holds in registers: a page of one head, or some tokens of it where no scale depends on the others.
_MAX_ELEMENTS = 128 * 128
_ELEMENTS = 4096
_ELEMENTS_PER_WARP = 1024
_MAX_CLIPPED_DIM = 128
_NORMS = (2.0, 4.0)  # those that need no power function, whose rounding is nobody's promise


def can_seal(part: PartLayout, codec: StateCodec) -> bool:
    """Whether a program can hold what it needs at once, in sizes that are powers of two, without padding."""
    dim, clip = part.shape.head_dim, codec.fmt.clip
    is_tile = dim & (dim - 1) == 0 and part.channels.padded == dim and _rows(part) * dim <= _MAX_ELEMENTS
    return is_tile and (clip is None or (clip.norm in _NORMS and dim <= _MAX_CLIPPED_DIM))


def _rows(part: PartLayout) -> int:
    """Tokens of a page that one program seals. They share words, which hold two tokens of each block at least."""
    size = part.shape.page_size
    return size if part.is_per_channel else min(size, max(2 * part.num_blocks, _ELEMENTS // part.shape.head_dim))


@cache
def _factors(fmt: QuantFormat, device: torch.device) -> Tensor:
    """What clipping tries, float32, for the kernel; some number where there is no clipping."""
    return torch.tensor(shrink_factors(fmt) if fmt.clip else [0.0], dtype=torch.float32, device=device)


def seal(states: Tensor, records: Tensor, part: PartLayout, codec: StateCodec) -> None:
    """Writes states [pages, H, page_size, D] into their part of records int32 [pages, H, words of a head]."""
    fmt, (_, size, dim) = codec.fmt, part.shape
    states = states if states.stride(-1) == 1 else states.contiguous()
    pages, heads = states.shape[:2]
    rows = _rows(part)
    rotated = block_size(dim) if codec.rotated else 1
    grid = fmt.grid
    with launch.device_of(records):
        _seal_kernel[(pages, heads, size // rows)](
            states,
            records,
            _factors(fmt, states.device),
            *states.stride()[:3],
            *records.stride()[:2],
            rotated**-0.5,
            len(shrink_factors(fmt)) if fmt.clip else 0,
            grid.half_width,
            PAGE_SIZE=size,
            ROWS=rows,
            HEAD_DIM=dim,
            ROTATED=rotated,
            CODE=code_name(fmt),
            BITS=fmt.bits,
            TOP=grid.top if isinstance(grid, IntegerGrid) else 0,
            IS_KEY=part.is_key,
            PER_CHANNEL=part.is_per_channel,
            SYMMETRIC=fmt.symmetric,
            GROUP=size if part.is_per_channel else part.channels.group,
            NORM=int(fmt.clip.norm) if fmt.clip else 0,
            BLOCKS=part.blocks_per_word,
            BLOCK=part.tokens,
            SUB=rows // part.num_blocks,
            WIDTH=part.channels.width,
            CODES=part.first,
            SCALES=part.scales,
            num_warps=max(1, rows * dim // _ELEMENTS_PER_WARP),
            enable_fp_fusion=False,
        )


@triton.jit
def _seal_kernel(
    states_ptr,
    records_ptr,
    factors_ptr,
    stride_sp,
    stride_sh,
    stride_st,
    stride_rp,
    stride_rh,
    rotation_factor,
    num_factors,
    half_width,
    PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTATED: tl.constexpr,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
    TOP: tl.constexpr,
    IS_KEY: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    GROUP: tl.constexpr,
    NORM: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SUB: tl.constexpr,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
):
    """grid: (pages, H, PAGE_SIZE / ROWS)

    One program seals ROWS tokens of the keys, or the values, of one page and head: SUB neighbours of each block.
    Bytes read: the states, once.
    """
    page = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, ROWS)
    first = tl.program_id(2) * SUB  # of a block
    offs_t = row // SUB * BLOCK + first + row % SUB
    offs_d = tl.arange(0, HEAD_DIM)
    states_ptr += page * stride_sp + head * stride_sh
    x = tl.load(states_ptr + offs_t[:, None] * stride_st + offs_d[None, :]).to(tl.float32)
    if ROTATED > 1:
        x = _rotated(x, ROWS, HEAD_DIM, ROTATED) * rotation_factor
    # Groups side by side: [groups, GROUP], or [GROUP, groups] where a group is a channel.
    if not PER_CHANNEL:
        x = tl.reshape(x, (ROWS * HEAD_DIM // GROUP, GROUP))
    DIM: tl.constexpr = 0 if PER_CHANNEL else 1
    low, high = tl.min(x, DIM), tl.max(x, DIM)
    is_bad = tl.max((tl.abs(x) < float("inf")).to(tl.int32) ^ 1, DIM) > 0
    scale, zero = _fit(low, high, half_width, SYMMETRIC)
    is_bad = is_bad | ~((tl.abs(scale) < float("inf")) & (tl.abs(zero) < float("inf")))
    if NORM:
        best = tl.full(low.shape, float("inf"), tl.float32)
        scale, zero = tl.zeros_like(low), tl.zeros_like(low)
        for i in range(num_factors):
            factor = tl.load(factors_ptr + i)
            if SYMMETRIC:
                tried_scale, tried_zero = _fit(low * factor, high * factor, half_width, SYMMETRIC)
            else:
                cut = (high - low) * factor
                tried_scale, tried_zero = _fit(low + cut, high - cut, half_width, SYMMETRIC)
            codes = _encoded(x, tried_scale, tried_zero, half_width, CODE, TOP, DIM)
            numbers = codes.to(tl.float32) - half_width
            error = numbers * _along(tried_scale, DIM) + _along(tried_zero, DIM) - x
            error = error * error
            if NORM == 4:
                error = error * error
            error = _sum_by_halves(error, GROUP, ROWS * HEAD_DIM // GROUP, DIM)
            is_better = error < best
            scale = tl.where(is_better, tried_scale, scale)
            zero = tl.where(is_better, tried_zero, zero)
            best = tl.where(is_better, error, best)
    scale = tl.where(is_bad, float("nan"), scale)
    codes = _encoded(x, scale, zero, half_width, CODE, TOP, DIM)
    zero = tl.where(is_bad, float("nan"), zero)
    codes = tl.reshape(codes, (ROWS, HEAD_DIM))
    record_ptr = records_ptr + page * stride_rp + head * stride_rh
    if IS_KEY:
        _store_keys(record_ptr + CODES, codes, first, ROWS, HEAD_DIM, BITS, BLOCKS, BLOCK, SUB, WIDTH)
    else:
        _store_values(record_ptr + CODES, codes, first, ROWS, HEAD_DIM, BITS, BLOCKS, BLOCK, SUB, WIDTH)
    words = _half_bits(scale) | (0 if SYMMETRIC else _half_bits(zero) << 16)
    if PER_CHANNEL:
        tl.store(record_ptr + SCALES + offs_d, words)
    else:
        index = tl.arange(0, ROWS * HEAD_DIM // GROUP)  # token by token
        GROUPS: tl.constexpr = HEAD_DIM // GROUP
        token = index // GROUPS // SUB * BLOCK + first + index // GROUPS % SUB
        tl.store(record_ptr + SCALES + index % GROUPS * PAGE_SIZE + token, words)


@triton.jit
def _rotated(x, ROWS: tl.constexpr, COLS: tl.constexpr, SIZE: tl.constexpr):
    """x [ROWS, COLS] after butterflies of distance 1, 2, 4, ... within blocks of SIZE columns."""
    DISTANCES: tl.constexpr = (
        8 if SIZE == 256 else (7 if SIZE == 128 else (6 if SIZE == 64 else (5 if SIZE == 32 else 4)))
    )
    for i in tl.static_range(DISTANCES):
        pairs = tl.permute(tl.reshape(x, (ROWS, COLS // (2 << i), 2, 1 << i)), (0, 1, 3, 2))
        first, second = tl.split(pairs)
        pairs = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
        x = tl.reshape(pairs, (ROWS, COLS))
    return x


@triton.jit
def _along(x, DIM: tl.constexpr):
    """One number per group, to be combined with the numbers of the groups."""
    return x[None, :] if DIM == 0 else x[:, None]


@triton.jit
def _fit(low, high, half_width, SYMMETRIC: tl.constexpr):
    """Scale and zero point, which float16 holds exactly, of a grid that covers [low, high]: the codec's `_fit`."""
    if SYMMETRIC:
        zero = tl.zeros_like(low)
    else:
        zero = (low * 0.5 + high * 0.5).to(tl.float16).to(tl.float32)
    scale = tl.div_rn(tl.maximum(high - zero, zero - low), tl.zeros_like(low) + half_width)
    nearest = scale.to(tl.float16)
    is_below = nearest.to(tl.float32) < scale
    bits = nearest.to(tl.int16, bitcast=True) + is_below.to(tl.int16)
    return bits.to(tl.float16, bitcast=True).to(tl.float32), zero


@triton.jit
def _encoded(x, scale, zero, half_width, CODE: tl.constexpr, TOP: tl.constexpr, DIM: tl.constexpr):
    """The codes int32 of x; those of a group without a scale mean nothing."""
    divisor = tl.where(scale == 0.0, 1.0, scale)
    if CODE == "e4m3" or CODE == "e5m2":
        steps = tl.div_rn(x - _along(zero, DIM), tl.broadcast_to(_along(divisor, DIM), x.shape))
        return _float8(tl.minimum(tl.maximum(steps, -half_width), half_width), CODE)
    else:
        base = zero - (half_width + 0.5) * divisor
        steps = tl.div_rn(x - _along(base, DIM), tl.broadcast_to(_along(divisor, DIM), x.shape))
        return tl.minimum(tl.maximum(steps, 0.0), TOP + 0.5).to(tl.int32)


@triton.jit
def _float8(x, CODE: tl.constexpr):
    """The FP8 bits of x, rounded to nearest even, by integer arithmetic: not every GPU has a cast."""
    MANTISSA: tl.constexpr = 3 if CODE == "e4m3" else 2
    BIAS: tl.constexpr = 7 if CODE == "e4m3" else 15
    CUT: tl.constexpr = 23 - MANTISSA
    LEAST_NORMAL: tl.constexpr = 2.0**-6 if CODE == "e4m3" else 2.0**-14
    # A float32 whose last bit is worth the step between subnormal FP8 numbers.
    ALIGNER: tl.constexpr = 2.0**14 if CODE == "e4m3" else 2.0**7
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + ((1 << (CUT - 1)) - 1) + ((bits >> CUT) & 1)) >> CUT) - ((127 - BIAS) << MANTISSA)
    aligned = (magnitude + ALIGNER).to(tl.int32, bitcast=True)
    subnormal = aligned - (tl.zeros_like(magnitude) + ALIGNER).to(tl.int32, bitcast=True)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(magnitude < LEAST_NORMAL, subnormal, normal) | sign


@triton.jit
def _sum_by_halves(x, GROUP: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr):
    """The sum over dimension DIM of GROUP numbers: the second half is added to the first, again and again."""
    STEPS: tl.constexpr = 9 if GROUP == 512 else (8 if GROUP == 256 else (7 if GROUP == 128 else (
        6 if GROUP == 64 else (5 if GROUP == 32 else 4))))  # fmt: skip
    for i in tl.static_range(STEPS):
        if DIM == 0:
            x = tl.sum(tl.reshape(x, (2, GROUP >> (i + 1), GROUPS)), 0)  # of two numbers, in whatever order
        else:
            first, second = tl.split(tl.permute(tl.reshape(x, (GROUPS, 2, GROUP >> (i + 1))), (0, 2, 1)))
            x = first + second
    return tl.reshape(x, (GROUPS,))


@triton.jit
def _half_bits(x):
    """The float16 bits of x in the low half of an int32."""
    return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _store_keys(
    ptr, codes, first, ROWS: tl.constexpr, COLS: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, SUB: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Codes of tokens first..first+SUB-1 of each block, [ROWS, channels], as tiles of words.

    A word holds two neighbouring channels of two parts and BLOCKS blocks.
    """
    TILES: tl.constexpr = ROWS // (BLOCKS * SUB)
    PAIRS: tl.constexpr = COLS // (2 * WIDTH)
    t, d = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    words = codes << ((t // SUB % BLOCKS * 2 + d // WIDTH % 2) * BITS + d % 2 * 16)
    words = tl.sum(tl.reshape(words, (ROWS, COLS // 2, 2)), 2)
    words = tl.sum(tl.reshape(words, (ROWS * PAIRS, 2, WIDTH // 2)), 1)
    words = tl.sum(tl.reshape(words, (TILES, BLOCKS, SUB * PAIRS * WIDTH // 2)), 1)
    tile = tl.arange(0, TILES)[:, None]
    index = tl.arange(0, SUB * PAIRS * WIDTH // 2)[None, :]
    token, pair, word = first + index // (PAIRS * WIDTH // 2), index // (WIDTH // 2) % PAIRS, index % (WIDTH // 2)
    tl.store(ptr + ((tile * PAIRS + pair) * BLOCK + token) * (WIDTH // 2) + word, words)


@triton.jit
def _store_values(
    ptr, codes, first, ROWS: tl.constexpr, COLS: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, SUB: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The same transposed: a word holds two neighbouring tokens instead of channels."""
    TILES: tl.constexpr = ROWS // (BLOCKS * SUB)
    PAIRS: tl.constexpr = COLS // (2 * WIDTH)
    t, d = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    words = codes << ((t // SUB % BLOCKS * 2 + d // WIDTH % 2) * BITS + t % 2 * 16)
    words = tl.sum(tl.reshape(words, (ROWS // 2, 2, COLS)), 1)
    words = tl.sum(tl.reshape(words, (TILES, BLOCKS, SUB // 2 * COLS)), 1)
    words = tl.sum(tl.reshape(words, (TILES * (SUB // 2) * PAIRS, 2, WIDTH)), 1)
    index = tl.arange(0, TILES * (SUB // 2) * PAIRS)[:, None]
    tile, token, pair = index // (SUB // 2 * PAIRS), first // 2 + index // PAIRS % (SUB // 2), index % PAIRS
    channel = tl.arange(0, WIDTH)[None, :]
    tl.store(ptr + ((tile * PAIRS + pair) * WIDTH + channel) * (BLOCK // 2) + token, words)
