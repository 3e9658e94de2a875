"""The page layout of the Triton kernels: tiles of 32-bit words, whose fields are operands of matrix products.

A field is what one shift and one mask take out of all words of a tile: codes of a block of tokens times a part of the
channels. Values lie transposed, so that the tokens of a channel are next to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvquant.codec import Quantized, StateCodec
from kvquant.formats import FloatGrid, IntegerGrid, QuantFormat
from kvquant.kernel import is_switched_off
from kvquant.layout import PageLayout, PagePart, StateShape
from kvquant.rotation import block_size

WORD_BYTES = 4
MAX_BLOCK = 128  # tokens of a block
MIN_BLOCK = 16  # tokens or channels; the least that a matrix product sums over
PARTS_PER_WORD = 2  # parts of the channels that share a word


@dataclass(frozen=True)
class Channels:
    """Channels in parts of `width` positions. No part holds channels of two groups; what is left over is padding."""

    head_dim: int
    group: int  # consecutive channels that share a scale
    width: int

    @staticmethod
    def of(head_dim: int, group: int) -> Channels:
        """The widest parts among those that pad the least."""
        return min((Channels(head_dim, group, width) for width in (64, 32, 16)), key=lambda found: found.padded)

    @property
    def parts_per_group(self) -> int:
        return -(-self.group // self.width)

    @property
    def num_groups(self) -> int:
        return self.head_dim // self.group

    @property
    def num_parts(self) -> int:
        used = self.num_groups * self.parts_per_group
        return -(-used // PARTS_PER_WORD) * PARTS_PER_WORD

    @property
    def padded(self) -> int:
        """The number of positions."""
        return self.num_parts * self.width

    @cached_property
    def positions(self) -> Tensor:
        """int64 [head_dim]: where each channel lies."""
        channel = torch.arange(self.head_dim)
        return channel // self.group * (self.parts_per_group * self.width) + channel % self.group

    def basis(self, rotated: bool) -> Tensor:
        """int8 [padded, head_dim]: what takes channels to positions, and by its transpose back again.

        Of rotated states the Hadamard matrix without its factor, so that all entries are 0, 1 or -1.
        """
        n = block_size(self.head_dim) if rotated else 1
        block = torch.ones(1, 1, dtype=torch.int8)
        while block.shape[0] < n:
            block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
        basis = torch.zeros(self.padded, self.head_dim, dtype=torch.int8)
        basis[self.positions] = torch.block_diag(*[block] * (self.head_dim // n))
        return basis

    def basis_factor(self, rotated: bool) -> float:
        """What makes the rotation of `basis` orthogonal."""
        return float(block_size(self.head_dim) ** -0.5) if rotated else 1.0


@dataclass(frozen=True)
class PartLayout:
    """Keys or values of one head: words of codes, then words of scales.

    num_blocks: blocks that the tokens of a page are split into; the same for keys and values.
    first: words from the start of a head's record.
    """

    fmt: QuantFormat
    shape: StateShape
    is_key: bool
    num_blocks: int
    first: int

    @property
    def blocks_per_word(self) -> int:
        return blocks_per_word(self.fmt)

    @property
    def tokens(self) -> int:
        """Of a block."""
        return self.shape.page_size // self.num_blocks

    @property
    def is_per_channel(self) -> bool:
        return self.fmt.granularity == "per_channel"

    @cached_property
    def channels(self) -> Channels:
        dim = self.shape.head_dim
        return Channels.of(dim, dim if self.is_per_channel else self.fmt.resolve_group_size(0, dim))

    @property
    def code_words(self) -> int:
        return self.shape.page_size * self.channels.padded * self.fmt.bits // (8 * WORD_BYTES)

    @property
    def scale_words(self) -> int:
        """Each holds a float16 scale in its low and a float16 zero point in its high half."""
        return self.channels.padded if self.is_per_channel else self.channels.num_groups * self.shape.page_size

    @property
    def scales(self) -> int:
        """Words from the start of a head's record to the scales."""
        return self.first + self.code_words

    @property
    def last(self) -> int:
        return self.scales + self.scale_words

    def write(self, q: Quantized, records: Tensor) -> None:
        """Into records int32 [pages, H, words of a head]."""
        assert q.scale is not None
        records[..., self.first : self.scales] = self._to_words(q.codes)
        zero = torch.zeros_like(q.scale) if q.zero_point is None else q.zero_point
        pairs = torch.stack((q.scale, zero), dim=-1).view(torch.int32).squeeze(-1)
        records[..., self.scales : self.last] = self._order_scales(pairs).flatten(2)

    def read(self, records: Tensor) -> Quantized:
        codes = self._from_words(records[..., self.first : self.scales])
        words = records[..., self.scales : self.last]
        if self.is_per_channel:
            pairs = words[..., self._positions(words.device)].unsqueeze(2)
        else:
            pairs = words.unflatten(2, (-1, self.shape.page_size)).transpose(2, 3)
        scale, zero = pairs.contiguous().unsqueeze(-1).view(torch.float16).unbind(-1)
        return Quantized(codes, scale.contiguous(), None if self.fmt.symmetric else zero.contiguous(), self.fmt)

    def _order_scales(self, pairs: Tensor) -> Tensor:
        """[pages, H, 1, D] -> [pages, H, positions], or [pages, H, tokens, groups] -> [pages, H, groups, tokens]."""
        return self._padded(pairs.squeeze(2)) if self.is_per_channel else pairs.transpose(2, 3)

    def _padded(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., positions]"""
        out = x.new_zeros(*x.shape[:-1], self.channels.padded)
        out[..., self._positions(x.device)] = x
        return out

    def _positions(self, device: torch.device) -> Tensor:
        return self.channels.positions.to(device)

    @property
    def _split(self) -> tuple[int, ...]:
        """Tokens as (tile, block of a word, token or (pair, half)), channels as (tile, part of a word, position)."""
        channels, per_word = self.channels, self.blocks_per_word
        tokens = (self.num_blocks // per_word, per_word)
        parts = (channels.num_parts // PARTS_PER_WORD, PARTS_PER_WORD)
        if self.is_key:
            return (*tokens, self.tokens, *parts, channels.width // 2, 2)
        return (*tokens, self.tokens // 2, 2, *parts, channels.width)

    @property
    def _order(self) -> tuple[int, ...]:
        """Of the dimensions of `_split`, behind pages and heads: block and part of a word, half | tiles, row, word."""
        inner = (1, 4, 6, 0, 3, 2, 5) if self.is_key else (1, 5, 3, 0, 4, 6, 2)
        return tuple(2 + i for i in inner)

    def _to_words(self, codes: Tensor) -> Tensor:
        """Codes [pages, H, page_size, D] -> int32 [pages, H, code_words]"""
        split = self._padded(codes).reshape(*codes.shape[:2], *self._split).to(torch.int32)
        by_field = split.permute(0, 1, *self._order)  # [pages, H, block, part, half, tile, tile, row, word]
        words = torch.zeros_like(by_field[:, :, 0, 0, 0], memory_format=torch.contiguous_format)
        for block in range(self.blocks_per_word):
            for part in range(PARTS_PER_WORD):
                for half in range(2):
                    words |= by_field[:, :, block, part, half] << self._shift(block, part, half)
        return words.flatten(2)

    def _from_words(self, words: Tensor) -> Tensor:
        """The inverse of `_to_words`."""
        sizes = [self._split[i - 2] for i in self._order]
        tiles = words.reshape(*words.shape[:2], *sizes[3:])
        out = torch.empty(*words.shape[:2], *sizes, dtype=torch.uint8, device=words.device)
        for block in range(sizes[0]):
            for part in range(PARTS_PER_WORD):
                for half in range(2):
                    field = tiles >> self._shift(block, part, half) & (2**self.fmt.bits - 1)
                    out[:, :, block, part, half] = field.to(torch.uint8)
        inverse = [self._order.index(i) + 2 for i in range(2, 2 + len(self._order))]
        padded = out.permute(0, 1, *inverse).reshape(*words.shape[:2], self.shape.page_size, -1)
        return padded[..., self._positions(words.device)].contiguous()

    def _shift(self, block: int, part: int, half: int) -> int:
        return (block * PARTS_PER_WORD + part) * self.fmt.bits + 16 * half


class TritonLayout(PageLayout):
    """One record per head: key codes | key scales | value codes | value scales, each 16-byte aligned."""

    def __init__(self, key: PagePart, value: PagePart) -> None:
        size = key.shape.page_size
        num_blocks = max(blocks_per_word(key.fmt), blocks_per_word(value.fmt), size // MAX_BLOCK)
        key_part = PartLayout(key.fmt, key.shape, True, num_blocks, first=0)
        self.parts = key_part, PartLayout(value.fmt, value.shape, False, num_blocks, first=key_part.last)

    @property
    def num_heads(self) -> int:
        return self.parts[0].shape.num_heads

    @property
    def head_words(self) -> int:
        return self.parts[1].last

    @cached_property
    def constants(self) -> dict[str, Any]:
        """What compiled kernels are specialized for."""
        from kvquant_kernels.triton.constants import page_constants  # which builds on this module

        return page_constants(self)

    @cached_property
    def page_bytes(self) -> int:
        return WORD_BYTES * self.num_heads * self.head_words

    @property
    def code_bytes(self) -> int:
        return WORD_BYTES * self.num_heads * sum(part.code_words for part in self.parts)

    @property
    def scale_bytes(self) -> int:
        return WORD_BYTES * self.num_heads * sum(part.scale_words for part in self.parts)

    def pack(self, key: Quantized, value: Quantized) -> Tensor:
        """Records uint8 [pages, page_bytes] of codes [pages, H, page_size, D]."""
        heads = self._empty(key.codes)
        for part, quantized in zip(self.parts, (key, value), strict=True):
            part.write(quantized, heads)
        return heads.flatten(1).view(torch.uint8)

    def unpack(self, records: Tensor, part: int) -> Quantized:
        """The keys (part 0) or values (part 1) of records uint8 [pages, page_bytes]."""
        return self.parts[part].read(self._heads(records))

    def seal(self, key: Tensor, value: Tensor, codecs: Sequence[StateCodec]) -> Tensor:
        if not has_kernels(key):
            return super().seal(key, value, codecs)
        from kvquant_kernels.triton.ops.seal import can_seal, seal

        heads = self._empty(key)
        for part, states, codec in zip(self.parts, (key, value), codecs, strict=True):
            if can_seal(part, codec):
                seal(states, heads, part, codec)
            else:
                part.write(codec.encode(states), heads)
        return heads.flatten(1).view(torch.uint8)

    def restore(self, records: Tensor, part: int, codec: StateCodec, dtype: torch.dtype) -> Tensor:
        if not has_kernels(records):
            return super().restore(records, part, codec, dtype)
        from kvquant_kernels.triton.ops.materialize import materialize

        return materialize(self._heads(records), self.parts[part], codec, dtype)

    def _empty(self, states: Tensor) -> Tensor:
        """Room for the records of states [pages, ...]: int32 [pages, H, words of a head]."""
        return torch.empty(states.shape[0], self.num_heads, self.head_words, dtype=torch.int32, device=states.device)

    def _heads(self, records: Tensor) -> Tensor:
        heads: Tensor = records.view(torch.int32).unflatten(1, (self.num_heads, self.head_words))
        return heads


def has_kernels(states: Tensor) -> bool:
    """Whether kernels seal and restore such states. Pages have this layout only where triton is installed."""
    return states.is_cuda and not is_switched_off()


def blocks_per_word(fmt: QuantFormat) -> int:
    """Blocks of tokens that share a word."""
    return 16 // fmt.bits // PARTS_PER_WORD


_FLOAT_NAMES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def can_decode(fmt: QuantFormat) -> bool:
    """Whether the kernels know what the format's codes stand for. A type derived from ours may decode anything."""
    if type(fmt.grid) is FloatGrid:
        return fmt.grid.dtype in _FLOAT_NAMES
    return type(fmt.grid) is IntegerGrid


def code_name(fmt: QuantFormat) -> str:
    """What the kernels call the codes of a format that they can decode: int8, int4, int2, e4m3 or e5m2."""
    return _FLOAT_NAMES[fmt.grid.dtype] if isinstance(fmt.grid, FloatGrid) else f"int{fmt.bits}"


def unsupported(part: PagePart) -> str | None:
    """Why keys, or values, of this format and shape cannot have this layout; None if they can."""
    fmt, (_, size, dim), _ = part
    if fmt.is_exact or fmt.bits not in (8, 4, 2):
        return f"format {fmt.name} is not one of 8, 4 or 2 bits"
    if not can_decode(fmt):
        return f"format {fmt.name} has levels of its own"
    least = MIN_BLOCK * max(blocks_per_word(fmt), 4)  # whatever the other part's format is
    if size & (size - 1) or not least <= size <= 4 * MAX_BLOCK:
        return f"page_size={size} is not a power of two from {least} to {4 * MAX_BLOCK}"
    if dim > 256:
        return f"head_dim={dim} is more than 256"
    group = dim if fmt.granularity == "per_channel" else fmt.resolve_group_size(size, dim)
    if group < MIN_BLOCK:
        return f"groups of {group} channels are less than {MIN_BLOCK}"
    return None
