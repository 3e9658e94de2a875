"""What compiled kernels know of a layout: the constants that they are specialized for."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvquant_kernels.triton.launch import power_of_two
from kvquant_kernels.triton.layout import PartLayout, TritonLayout, code_name


class Code(NamedTuple):
    """How a code stands in a float16 operand: as base + unit * code for integers, as value / scale for FP8.

    The unit is the product of one for the part of the channels and one for the block of tokens (cyclic), which follow
    from where the code lies in its byte. key_boost, value_boost: powers of two that keep the products of queries or
    weights with scales clear of float16's subnormal numbers.
    """

    bits: int
    base: float = 0.0
    scale: float = 1.0
    part_units: tuple[int, int] = (1, 1)
    block_units: tuple[int, ...] = (1,)
    key_boost: float = 1.0
    value_boost: float = 1.0


# With these boosts, values must span some 2e5 before the product of a weight and a scale leaves float16.
CODES = {
    "int8": Code(8, base=1024.0, key_boost=2.0**6, value_boost=2.0**6),
    "int4": Code(4, base=1024.0, part_units=(1, 16), key_boost=2.0**2, value_boost=2.0**2),
    "int2": Code(2, base=1024.0, part_units=(1, 4), block_units=(1, 16)),
    "e4m3": Code(8, scale=2.0**8, key_boost=2.0**6, value_boost=2.0**6),
    "e5m2": Code(8, key_boost=2.0**14, value_boost=2.0**6),
}


def page_constants(layout: TritonLayout) -> dict[str, Any]:
    """The constants of the decode kernel that follow from the layout alone."""
    key, value = layout.parts
    return {
        "HEAD_DIM_K": key.shape.head_dim,
        "HEAD_DIM_V": value.shape.head_dim,
        "BLOCK_DK": max(16, power_of_two(key.shape.head_dim)),
        "BLOCK_DV": max(16, power_of_two(value.shape.head_dim)),
        "PAGE_SIZE": key.shape.page_size,
        "NUM_BLOCKS": key.num_blocks,
        "HEAD_WORDS": layout.head_words,
        "K_SCALES": key.scales,
        "V_CODES": value.first,
        "V_SCALES": value.scales,
        "PARTIAL_DIM": partial_dim(layout),
        "K_FACTOR": CODES[code_name(key.fmt)].scale / key_boost(key),
        "V_FACTOR": CODES[code_name(value.fmt)].scale,
        **_part_constants("K", key),
        **_part_constants("V", value),
    }


def partial_dim(layout: TritonLayout) -> int:
    """Numbers of a partial result: values in positions (pages), or channels (exact tokens)."""
    return max(layout.parts[1].channels.padded, layout.parts[1].shape.head_dim)


def key_boost(key: PartLayout) -> float:
    """What queries are multiplied by beforehand. Scales per token do not go into them."""
    return CODES[code_name(key.fmt)].key_boost if key.is_per_channel else 1.0


def _part_constants(prefix: str, part: PartLayout) -> dict[str, Any]:
    return {
        f"{prefix}_CODE": code_name(part.fmt),
        f"{prefix}_PER_CHANNEL": part.is_per_channel,
        f"{prefix}_PARTS": part.channels.num_parts,
        f"{prefix}_WIDTH": part.channels.width,
        f"{prefix}_GROUPS": part.channels.num_groups,
        f"{prefix}_MIDDLE": part.fmt.grid.half_width if CODES[code_name(part.fmt)].base else 0.0,
    }
