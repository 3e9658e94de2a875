"""Device-side pieces that kernels share: unpacking of words, scales, and one step of the running softmax.

A code stands in a float16 without any arithmetic: its bits go into the significand of 1024, so that the float is 1024
plus a power of two, its unit, times the code. FP8 codes are the high bits of a float16, of 2^-8 times their value in
the case of e4m3, whose exponent is one bit shorter. Source of the former: Kim et al., "Who Says Elephants Can't Run",
2022; here codes below the low ones of a byte stay where they are, so that a word is shifted once at most.
"""

import math

import triton
import triton.language as tl

from kvquant_kernels.triton.constants import CODES


@triton.constexpr_function
def blocks_of(code):
    """Blocks of tokens that share a word."""
    return 8 // CODES[code].bits


@triton.constexpr_function
def part_unit(code, part):
    """The factor of a part of the channels in the unit of its codes."""
    return CODES[code].part_units[part % 2]


@triton.constexpr_function
def block_unit(code, block):
    """The factor of a block of tokens in the unit of its codes."""
    return CODES[code].block_units[block % len(CODES[code].block_units)]


@triton.constexpr_function
def log_boost(code):
    """The base-2 logarithm of what weights are multiplied by."""
    return math.log2(CODES[code].value_boost)


@triton.constexpr_function
def offset(code, part, block, middle):
    """What the float of a code has more than its unit times the distance of the code from the middle of the grid."""
    return CODES[code].base + part_unit(code, part) * block_unit(code, block) * middle if CODES[code].base else 0.0


@triton.constexpr_function
def center(code, part, block, middle):
    """What `field` takes from the floats of codes whose middle is to be 0. Of a middle between two codes, the upper."""
    return CODES[code].base + part_unit(code, part) * block_unit(code, block) * math.ceil(middle)


@triton.constexpr_function
def above_middle(middle):
    """How far the code that `field` makes 0 is above the middle of the grid."""
    return math.ceil(middle) - middle


@triton.constexpr_function
def _center_asm(code, part, block, middle):
    taken = 0x6400 + center(code, part, block, middle) - 1024  # as a float16, whose last bit is worth 1 there
    return f"{{ .reg .b32 c; mov.b32 c, {int(taken) * 0x00010001:#010x}; sub.f16x2 $0, $1, c; }}"


@triton.constexpr_function
def _shift(code, part, block):
    """Bits that a word is shifted by: a byte, for the codes in the high bytes of both halves."""
    return (2 * block + part) * CODES[code].bits // 8 * 8


@triton.constexpr_function
def _mask(code, part, block):
    """The bits of the codes in both halves of a shifted word."""
    return (2 ** CODES[code].bits - 1 << (2 * block + part) * CODES[code].bits % 8) * 0x00010001


@triton.constexpr_function
def _or_asm(code, part, block):
    """One instruction on NVIDIA, where two constants make the compiler emit two."""
    return f"lop3.b32 $0, $1, {_mask(code, part, block):#010x}, 0x64006400, 0xea;"


@triton.constexpr_function
def _byte_asm(part):
    """The same for bytes, high ones included, which then need no shift."""
    return f"prmt.b32 $0, $1, 0x64646464, {0x4240 + 0x0101 * part:#06x};"


@triton.jit
def field(
    words, PART: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr, USE_ASM: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, CENTER_ON: tl.constexpr = 0.0,
):  # fmt: skip
    """Codes of one part and block in words int32 [ROWS, COLS / 2], as operands float16 [ROWS, COLS].

    CENTER_ON: the middle of the grid, which is taken from the codes then; 0 leaves them as they are.
    """
    if CODE == "e4m3" or CODE == "e5m2":
        pairs = _float8_bits(words << (8 - 8 * PART), CODE)
    elif USE_ASM and CODE == "int8" and PART == 1:
        pairs = tl.inline_asm_elementwise(_byte_asm(PART), "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    else:
        shifted = words >> _shift(CODE, PART, BLOCK)
        if USE_ASM:
            pairs = tl.inline_asm_elementwise(
                _or_asm(CODE, PART, BLOCK), "=r,r", [shifted], dtype=tl.int32, is_pure=True, pack=1
            )
        else:
            pairs = (shifted & _mask(CODE, PART, BLOCK)) | 0x64006400
    if CENTER_ON != 0.0 and USE_ASM:
        ASM: tl.constexpr = _center_asm(CODE, PART, BLOCK, CENTER_ON)
        pairs = tl.inline_asm_elementwise(ASM, "=r,r", [pairs], dtype=tl.int32, is_pure=True, pack=1)
    low = pairs.to(tl.uint16).to(tl.float16, bitcast=True)
    high = (pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    numbers = tl.reshape(tl.join(low, high), (ROWS, COLS))
    if CENTER_ON != 0.0 and not USE_ASM:
        numbers = (numbers.to(tl.float32) - center(CODE, PART, BLOCK, CENTER_ON)).to(tl.float16)  # exact
    return numbers


@triton.jit
def _float8_bits(words, CODE: tl.constexpr):
    """float16 bits of the codes in the high bytes of both halves."""
    HIGH_BYTES: tl.constexpr = -16711936  # 0xFF00FF00
    SIGNS: tl.constexpr = -2147450880  # 0x80008000
    if CODE == "e5m2":
        return words & HIGH_BYTES
    else:
        return (words & SIGNS) | ((words >> 1) & 0x3F803F80)


@triton.jit
def load_words(ptr, TILES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """TILES tiles int32 [ROWS, COLS] that lie one behind the other."""
    offsets = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    words = ()
    for i in tl.static_range(TILES):
        words = words + (tl.load(ptr + i * ROWS * COLS + offsets),)
    return words


@triton.jit
def load_scales(ptr):
    """Scales and zero points, float32, of words that hold both as float16."""
    words = tl.load(ptr)
    scale = words.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    zero = (words >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale, zero


@triton.jit
def column_sums(x, ROWS: tl.constexpr):
    """Sums over the rows of an operand [ROWS, R], float32, the same in every row of [16, R].

    A product with ones: fewer instructions than to widen and add. `any_row` makes one row of it.
    """
    return tl.dot(tl.full([16, ROWS], 1.0, x.dtype), x)


@triton.jit
def partly_summed(x, ROWS: tl.constexpr, COLS: tl.constexpr, LANES: tl.constexpr):
    """[LANES, COLS], which adds up to the sums over the rows of x [ROWS, COLS]. LANES: 16, or 1 for all in one.

    On NVIDIA with two warps a thread holds rows that are 8 or 32 apart: for 16 lanes, threads exchange nothing.
    """
    if LANES == 1:
        return tl.sum(x, 0)[None, :]
    elif ROWS >= 32:
        by_lane = tl.sum(tl.sum(tl.reshape(x, (ROWS // 32, 2, 2, 8, COLS)), 2), 0)
        return tl.reshape(by_lane, (LANES, COLS))
    else:
        return x


@triton.jit
def any_row(x):
    """[R], of [16, R] whose rows are the same."""
    return tl.max(x, 0)


@triton.jit
def softcap_scores(scores, softcap):
    """c * tanh(score / c), of scores in base 2 that are multiplied by 2 / c already."""
    # tanh(x) = 1 - 2 / (1 + exp(2x)), which is right at both infinities; libdevice's cannot be interpreted. The
    # quotient is the square of a root, since quotients take several instructions.
    top = softcap * 1.4426950408889634
    root = tl.rsqrt(1.0 + tl.exp2(scores))
    return top - (2.0 * top) * (root * root)


@triton.jit
def masked_scores(
    scores, columns, is_token, mask_row_ptr, mask_stride, MASK: tl.constexpr, IS_SHARED: tl.constexpr
):  # fmt: skip
    """Scores [T, R] of columns [T] with the mask applied, and -inf where is_token [T] does not hold.

    MASK: "none", "bool" or "float". mask_row_ptr points at the mask's column 0: [R], or one for all if IS_SHARED.
    """
    if MASK != "none":
        if IS_SHARED:
            loaded = tl.load(mask_row_ptr + columns * mask_stride, mask=is_token, other=0)[:, None]
        else:
            at = mask_row_ptr[None, :] + (columns * mask_stride)[:, None]
            loaded = tl.load(at, mask=is_token[:, None], other=0)
        if MASK == "bool":
            is_token = (loaded != 0) & is_token[:, None]
        else:
            # The least finite numbers stay finite when they are added to a score in base 2.
            bias = loaded.to(tl.float32)
            scores += tl.maximum(bias, -1.7e38) * 1.4426950408889634
            is_token = (bias != float("-inf")) & is_token[:, None]
        return tl.where(is_token, scores, float("-inf"))
    else:
        return tl.where(is_token[:, None], scores, float("-inf"))


@triton.jit
def shift_of(maximum):
    """What is taken from scores before exp2: their maximum, or 0 while all are masked."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)
