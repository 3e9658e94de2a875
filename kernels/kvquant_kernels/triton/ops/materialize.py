"""Materializing: pages back to 16-bit states in the model's basis, for chunks too long to attend page by page."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvquant.codec import StateCodec
from kvquant_kernels.triton import constants, launch
from kvquant_kernels.triton.attend import basis_on
from kvquant_kernels.triton.layout import PartLayout, code_name
from kvquant_kernels.triton.ops import tiles

MAX_TOKENS, MAX_CHANNELS = 64, 128  # of a program: so many that they fit into its registers


def materialize(records: Tensor, part: PartLayout, codec: StateCodec, dtype: torch.dtype) -> Tensor:
    """The states [pages, H, page_size, D] of records int32 [pages, H, words of a head], rotated back."""
    (heads, size, dim), channels, fmt = part.shape, part.channels, part.fmt
    out = torch.empty(records.shape[0], heads, size, dim, dtype=dtype, device=records.device)
    code = constants.CODES[code_name(fmt)]
    tokens = min(part.tokens, MAX_TOKENS if dim <= MAX_CHANNELS or part.is_key else MAX_TOKENS // 2)
    block_d = min(max(16, launch.power_of_two(dim)), MAX_CHANNELS)
    with launch.device_of(records):
        _materialize_kernel[(records.shape[0], heads, size // tokens * -(-dim // block_d))](
            records,
            basis_on(channels, codec.rotated, records.device),
            out,
            *records.stride()[:2],
            *out.stride()[:2],
            channels.basis_factor(codec.rotated),
            HEAD_DIM=dim,
            BLOCK_D=block_d,
            CODE=code_name(fmt),
            IS_KEY=part.is_key,
            PER_CHANNEL=part.is_per_channel,
            BLOCKS=part.blocks_per_word,
            BLOCK=part.tokens,
            TOKENS=tokens,
            PAGE_SIZE=size,
            PARTS=channels.num_parts,
            WIDTH=channels.width,
            GROUPS=channels.num_groups,
            MIDDLE=fmt.grid.half_width if code.base else 0.0,
            FACTOR=code.scale,
            CODES=part.first,
            SCALES=part.scales,
            USE_ASM=records.is_cuda and torch.version.hip is None,
            enable_fp_fusion=True,
            **_options(tokens * block_d, launch.target_of(records.device)),
        )
    return out


def _options(elements: int, target: str) -> dict[str, int]:
    """So many warps that the states of a program fit into registers; AMD's warps are twice as wide.

    NVIDIA's compiler would spill a few registers to have fewer of them, and no more programs run for it.
    """
    num_warps = max(8, elements // 1024)
    return {"num_warps": num_warps // 2} if target.startswith("gfx") else {"num_warps": num_warps, "maxnreg": 255}


@triton.jit
def _materialize_kernel(
    records_ptr,
    basis_ptr,
    out_ptr,
    stride_rp,
    stride_rh,
    stride_op,
    stride_oh,
    basis_factor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CODE: tl.constexpr,
    IS_KEY: tl.constexpr,
    PER_CHANNEL: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    MIDDLE: tl.constexpr,
    FACTOR: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    USE_ASM: tl.constexpr,
):
    """grid: (pages, H, PAGE_SIZE / TOKENS * chunks of BLOCK_D channels)

    One program restores some channels of TOKENS tokens of the keys, or the values, of one page and head. The tokens are
    in one block.
    """
    page = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    NUM_CHUNKS: tl.constexpr = (HEAD_DIM + BLOCK_D - 1) // BLOCK_D
    block = tl.program_id(2) // NUM_CHUNKS // (BLOCK // TOKENS)
    first = tl.program_id(2) // NUM_CHUNKS % (BLOCK // TOKENS) * TOKENS  # of the block
    record_ptr = records_ptr + page * stride_rp + head * stride_rh
    PER_GROUP: tl.constexpr = PARTS // GROUPS
    ROWS: tl.constexpr = TOKENS if IS_KEY else WIDTH
    COLS: tl.constexpr = (WIDTH if IS_KEY else TOKENS) // 2
    STRIDE: tl.constexpr = (WIDTH if IS_KEY else BLOCK) // 2
    tile_ptr = record_ptr + CODES + block // BLOCKS * (PARTS // 2 * BLOCK * WIDTH // 2)
    tile_ptr += first * STRIDE if IS_KEY else first // 2
    offs_words = tl.arange(0, ROWS)[:, None] * STRIDE + tl.arange(0, COLS)[None, :]
    offs_t = tl.arange(0, TOKENS)
    offs_d = tl.program_id(2) % NUM_CHUNKS * BLOCK_D + tl.arange(0, BLOCK_D)
    is_channel = offs_d < HEAD_DIM
    out = tl.zeros([TOKENS, BLOCK_D], tl.float32)
    for g in tl.static_range(GROUPS):
        partial = tl.zeros([TOKENS, BLOCK_D], tl.float32)
        base = tl.zeros([BLOCK_D], tl.float32)
        for j in tl.static_range(PER_GROUP):
            offs_p = (g * PER_GROUP + j) * WIDTH + tl.arange(0, WIDTH)
            basis_offs = offs_p[:, None] * HEAD_DIM + offs_d[None, :]
            basis = tl.load(basis_ptr + basis_offs, mask=is_channel[None, :], other=0).to(
                tl.float32
            )  # [WIDTH, BLOCK_D]
            if PER_CHANNEL:
                scale, zero = tiles.load_scales(record_ptr + SCALES + offs_p)
                base += tl.sum(basis * zero[:, None], 0)
                basis = basis * scale[:, None]
            else:
                base += tl.sum(basis, 0)
            shifted = tl.load(tile_ptr + (g * PER_GROUP + j) // 2 * (BLOCK * WIDTH // 2) + offs_words)
            if BLOCKS > 1:
                shifted = shifted >> (block % BLOCKS * (16 // BLOCKS))
            numbers = tiles.field(shifted, (g * PER_GROUP + j) % 2, 0, CODE, USE_ASM, ROWS, COLS * 2).to(tl.float32)
            numbers -= tiles.offset(CODE, g * PER_GROUP + j, 0, MIDDLE)
            numbers *= 1.0 / tiles.part_unit(CODE, g * PER_GROUP + j)
            if not IS_KEY:
                numbers = tl.trans(numbers)
            # Numbers, signs and float16 scales are exact in float16, and so are their products in float32.
            partial = tl.dot(numbers.to(tl.float16), basis.to(tl.float16), partial)
        if PER_CHANNEL:
            out += partial * FACTOR + base[None, :]
        else:
            scale, zero = tiles.load_scales(record_ptr + SCALES + g * PAGE_SIZE + block * BLOCK + first + offs_t)
            out += partial * (scale * FACTOR)[:, None] + zero[:, None] * base[None, :]
    out = out * basis_factor
    at = page * stride_op + head * stride_oh + (block * BLOCK + first + offs_t)[:, None] * HEAD_DIM + offs_d[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=is_channel[None, :])
