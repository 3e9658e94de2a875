"""Device-side pieces that kernels share: unpacking of words, scales, and one step of the running softmax.

A code stands in a 16-bit float without any arithmetic: its bits are the low end of the significand of a power of two,
128 in bfloat16 (2 and 4 bits) or 1024 in float16 (8 bits), so that the float is that power plus the code. FP8 codes are
the high bits of a float16, of 2^-8 times their value in the case of e4m3, whose exponent is one bit shorter.
"""

import triton
import triton.language as tl


@triton.jit
def field(
    words, INDEX: tl.constexpr, CODE: tl.constexpr, USE_ASM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Field INDEX of words int32 [ROWS, COLS / 2] as operands [ROWS, COLS]: floats that stand for codes."""
    if CODE == "int4" or CODE == "int2":
        pairs = _masked_or(words >> (INDEX * (4 if CODE == "int4" else 2)), CODE, USE_ASM)
        low = pairs.to(tl.uint16).to(tl.bfloat16, bitcast=True)
        high = (pairs >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        if CODE == "int8":
            pairs = _masked_or(words >> (8 * INDEX), CODE, USE_ASM)
        else:
            pairs = _float8_bits(words << (8 - 8 * INDEX), CODE)
        low = pairs.to(tl.uint16).to(tl.float16, bitcast=True)
        high = (pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.reshape(tl.join(low, high), (ROWS, COLS))


@triton.jit
def _masked_or(words, CODE: tl.constexpr, USE_ASM: tl.constexpr):
    """The low bits of both halves of each word, in the significand of a power of two."""
    MASK: tl.constexpr = 0x000F000F if CODE == "int4" else (0x00030003 if CODE == "int2" else 0x00FF00FF)
    POWER: tl.constexpr = 0x64006400 if CODE == "int8" else 0x43004300
    if USE_ASM:
        # One instruction on NVIDIA; two constants make the compiler emit two.
        if CODE == "int4":
            ASM: tl.constexpr = "lop3.b32 $0, $1, 0x000f000f, 0x43004300, 0xea;"
        elif CODE == "int2":
            ASM: tl.constexpr = "lop3.b32 $0, $1, 0x00030003, 0x43004300, 0xea;"
        else:
            ASM: tl.constexpr = "lop3.b32 $0, $1, 0x00ff00ff, 0x64006400, 0xea;"
        return tl.inline_asm_elementwise(ASM, "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return (words & MASK) | POWER


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
def softcap_scores(scores, softcap):
    """c * tanh(score / c), of scores that are multiplied by log2(e) before and after."""
    # tanh(x) = 1 - 2 / (1 + exp(2x)), which is right at both infinities; libdevice's cannot be interpreted.
    LOG2E: tl.constexpr = 1.4426950408889634
    doubled = 2.0 / softcap  # exp(2x) = exp2(2 * score * log2(e) / c)
    return (1.0 - 2.0 / (1.0 + tl.exp2(scores * doubled))) * (softcap * LOG2E)


@triton.jit
def masked_scores(scores, columns, is_token, mask_row_ptr, mask_stride, MASK: tl.constexpr):
    """Scores [T, R] of columns [T] with the mask applied, and -inf where is_token [T] does not hold.

    MASK: "none", "bool" or "float"; mask_row_ptr [R] points at the mask's column 0.
    """
    if MASK != "none":
        at = mask_row_ptr[None, :] + (columns * mask_stride)[:, None]
        loaded = tl.load(at, mask=is_token[:, None], other=0)
        if MASK == "bool":
            scores = tl.where(loaded != 0, scores, float("-inf"))
        else:
            # The least finite numbers stay finite when they are added to a score in base 2.
            bias = loaded.to(tl.float32)
            scores = tl.where(bias == float("-inf"), bias, scores + tl.maximum(bias, -1.7e38) * 1.4426950408889634)
    return tl.where(is_token[:, None], scores, float("-inf"))


@triton.jit
def shift_of(maximum):
    """What is taken from scores before exp2: their maximum, or 0 while all are masked."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)
