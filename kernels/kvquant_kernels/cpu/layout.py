"""The page layout of the CPU kernels: words of 16 tokens (keys) or 16 channels (values) side by side.

That is the order in which vector registers unpack and multiply them, without sums across a register.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvquant.codec import Quantized, StateCodec
from kvquant.formats import FloatGrid, IntegerGrid, QuantFormat
from kvquant.layout import PageLayout, PagePart, StateShape
from kvquant_kernels.cpu import library
from kvquant_kernels.cpu import records as native

WORD_LANES = 16
ALIGNMENT = 64  # bytes; a cache line


@dataclass(frozen=True)
class PartLayout:
    """Keys or values of one head: codes, then scales, then zero points, all in one stretch of the record.

    first: bytes from the start of the record to head 0.
    """

    fmt: QuantFormat
    shape: StateShape
    first: int
    is_key: bool

    @property
    def fields(self) -> int:
        """Codes in a byte."""
        return 8 // self.fmt.bits

    @property
    def code_bytes(self) -> int:
        return self.shape.page_size * self.shape.head_dim // self.fields

    @property
    def group(self) -> int:
        return self.fmt.resolve_group_size(self.shape.page_size, self.shape.head_dim)

    @property
    def block(self) -> int:
        """Channels of values that are multiplied with the same weights: those of a group, or all."""
        return self.shape.head_dim if self.fmt.granularity == "per_channel" else self.group

    @property
    def num_scales(self) -> int:
        per_token = self.shape.page_size * (self.shape.head_dim // self.group)
        return self.shape.head_dim if self.fmt.granularity == "per_channel" else per_token

    @property
    def scales(self) -> int:
        """Bytes from the start of a head's part to its scales."""
        return self.code_bytes

    @property
    def zeros(self) -> int:
        """Bytes from the start of a head's part to its zero points; -1 if there are none."""
        return -1 if self.fmt.symmetric else self.scales + 2 * self.num_scales

    @property
    def scale_bytes(self) -> int:
        return (1 if self.fmt.symmetric else 2) * 2 * self.num_scales

    @property
    def head_stride(self) -> int:
        # The last load of value codes may reach this far beyond them, even on the last page of a pool.
        reach = 4 * (WORD_LANES - 1)
        return -(-(self.code_bytes + max(self.scale_bytes, reach)) // ALIGNMENT) * ALIGNMENT

    @property
    def last(self) -> int:
        return self.first + self.shape.num_heads * self.head_stride

    @cached_property
    def structure(self) -> library.Part:
        """What native code has to know of this part."""
        grid = self.fmt.grid
        code = library.FLOAT_CODES[grid.dtype] if isinstance(grid, FloatGrid) else 0
        return library.Part(
            first=self.first,
            head_stride=self.head_stride,
            scales=self.scales,
            zeros=self.zeros,
            code=code,
            bits=self.fmt.bits,
            per_channel=self.fmt.granularity == "per_channel",
            group=self.group,
            dim=self.shape.head_dim,
            middle=0.0 if code else grid.half_width,
        )

    def write(self, q: Quantized, records: Tensor) -> None:
        heads = self._heads(records)
        heads[..., : self.code_bytes] = self._to_words(q.codes)
        assert q.scale is not None
        self._write_scales(heads, self.scales, q.scale)
        if q.zero_point is not None:
            self._write_scales(heads, self.zeros, q.zero_point)

    def read(self, records: Tensor) -> Quantized:
        heads = self._heads(records)
        codes = self._from_words(heads[..., : self.code_bytes])
        zero_point = None if self.fmt.symmetric else self._read_scales(heads, self.zeros)
        return Quantized(codes, self._read_scales(heads, self.scales), zero_point, self.fmt)

    def _heads(self, records: Tensor) -> Tensor:
        """[pages, H, head_stride], a view."""
        heads: Tensor = records[:, self.first : self.last].unflatten(1, (self.shape.num_heads, self.head_stride))
        return heads

    def _to_words(self, codes: Tensor) -> Tensor:
        """Codes [pages, H, page_size, D] -> bytes [pages, H, code_bytes]."""
        if self.is_key:  # token = (block, field, lane), channel = (word, byte)
            split = codes.unflatten(2, (-1, self.fields, WORD_LANES)).unflatten(5, (-1, 4))
            by_field: Tensor = split.permute(3, 0, 1, 2, 5, 4, 6)  # [field, pages, H, block, word, lane, byte]
        else:  # token = (row, byte), channel = (block, field, word)
            split = codes.unflatten(2, (-1, 4)).unflatten(4, (-1, self.fields, self.block // self.fields))
            by_field = split.permute(5, 0, 1, 2, 4, 6, 3)  # [field, pages, H, row, block, word, byte]
        packed = by_field[0].clone(memory_format=torch.contiguous_format)
        for i in range(1, self.fields):
            packed |= by_field[i] << (i * self.fmt.bits)
        return packed.flatten(2) if self.is_key else self._to_columns(packed).flatten(2)

    def _to_columns(self, words: Tensor) -> Tensor:
        """[pages, H, row, block, word, byte] -> [pages, H, block, bytes of its columns], columns of up to 16 words."""
        columns = words.transpose(2, 3).split(WORD_LANES, dim=4)  # each [pages, H, block, row, word, byte]
        return torch.cat([column.flatten(3) for column in columns], dim=3)

    def _from_columns(self, blocks: Tensor) -> Tensor:
        """The inverse of `_to_columns`."""
        words, rows = self.block // self.fields, self.shape.page_size // 4
        widths = [min(WORD_LANES, words - first) for first in range(0, words, WORD_LANES)]
        columns = blocks.split([4 * rows * width for width in widths], dim=3)
        restored = [column.unflatten(3, (rows, -1, 4)) for column in columns]
        by_block: Tensor = torch.cat(restored, dim=4)
        return by_block.transpose(2, 3)

    def _from_words(self, packed: Tensor) -> Tensor:
        """The inverse of `_to_words`."""
        bits, (_, size, dim) = self.fmt.bits, self.shape
        if self.is_key:
            words = packed.unflatten(2, (size // (self.fields * WORD_LANES), dim // 4, WORD_LANES, 4))
        else:
            words = self._from_columns(packed.unflatten(2, (dim // self.block, -1)))
        by_field = torch.stack([(words >> (i * bits)) & (2**bits - 1) for i in range(self.fields)])
        if self.is_key:
            codes: Tensor = by_field.permute(1, 2, 3, 0, 5, 4, 6)  # [pages, H, block, field, lane, word, byte]
        else:
            codes = by_field.permute(1, 2, 3, 6, 4, 0, 5)  # [pages, H, row, byte, block, field, word]
        return codes.reshape(*packed.shape[:2], size, dim)

    def _write_scales(self, heads: Tensor, first: int, scales: Tensor) -> None:
        if self.fmt.granularity == "per_token":
            scales = scales.transpose(2, 3)  # [pages, H, D / group, page_size]
        heads[..., first : first + 2 * self.num_scales] = scales.contiguous().view(torch.uint8).flatten(2)

    def _read_scales(self, heads: Tensor, first: int) -> Tensor:
        flat = heads[..., first : first + 2 * self.num_scales].view(torch.float16)
        if self.fmt.granularity == "per_channel":
            return flat.unsqueeze(2)
        by_group: Tensor = flat.unflatten(2, (-1, self.shape.page_size))
        return by_group.transpose(2, 3).contiguous()


class CpuLayout(PageLayout):
    """All heads' keys, then all heads' values; each head's part starts on a cache line."""

    def __init__(self, key: PagePart, value: PagePart) -> None:
        key_part = PartLayout(key.fmt, key.shape, first=0, is_key=True)
        self.parts = key_part, PartLayout(value.fmt, value.shape, first=key_part.last, is_key=False)

    @cached_property
    def page_bytes(self) -> int:
        return self.parts[1].last

    @property
    def code_bytes(self) -> int:
        return sum(part.shape.num_heads * part.code_bytes for part in self.parts)

    @property
    def scale_bytes(self) -> int:
        return sum(part.shape.num_heads * part.scale_bytes for part in self.parts)

    def pack(self, key: Quantized, value: Quantized) -> Tensor:
        """Records uint8 [pages, page_bytes] of codes [pages, H, page_size, D]."""
        records = torch.zeros(key.codes.shape[0], self.page_bytes, dtype=torch.uint8)
        for part, quantized in zip(self.parts, (key, value), strict=True):
            part.write(quantized, records)
        return records

    def unpack(self, records: Tensor, part: int) -> Quantized:
        """The keys (part 0) or values (part 1) of records uint8 [pages, page_bytes]."""
        return self.parts[part].read(records)

    def append(self, states: Sequence[Tensor], buffers: Sequence[Tensor], first: int) -> None:
        if not native.append(states, buffers, first):
            super().append(states, buffers, first)

    def seal(self, key: Tensor, value: Tensor, codecs: Sequence[StateCodec]) -> Tensor:
        if not all(native.can_seal(part, codec) for part, codec in zip((key, value), codecs, strict=True)):
            return super().seal(key, value, codecs)
        records = torch.zeros(key.shape[0], self.page_bytes, dtype=torch.uint8)
        for part, states, codec in zip(self.parts, (key, value), codecs, strict=True):
            native.seal(states, records, part, codec)
        return records

    def restore(self, records: Tensor, part: int, codec: StateCodec, dtype: torch.dtype) -> Tensor:
        if not native.can_restore(dtype):
            return super().restore(records, part, codec, dtype)
        return native.restore(records, self.parts[part], codec, dtype)


def can_decode(fmt: QuantFormat) -> bool:
    """Whether the library knows what the format's codes stand for. A type derived from ours may decode anything."""
    if type(fmt.grid) is FloatGrid:
        return fmt.grid.dtype in library.FLOAT_CODES
    return type(fmt.grid) is IntegerGrid


def unsupported(part: PagePart, is_key: bool) -> str | None:
    """Why keys, or values, of this format and shape cannot have this layout; None if they can."""
    fmt, (_, size, dim), _ = part
    if fmt.is_exact or fmt.bits not in (8, 4, 2):
        return f"format {fmt.name} is not one of 8, 4 or 2 bits"
    if not can_decode(fmt):
        return f"format {fmt.name} has levels of its own"
    fields = 8 // fmt.bits
    if size % (WORD_LANES * fields if is_key else 4):
        return f"page_size={size} is not a multiple of {WORD_LANES * fields}"
    if dim % 4 or dim % fields or dim > 512:
        return f"head_dim={dim} is not a multiple of 4 up to 512"
    group, multiple = fmt.resolve_group_size(size, dim), 4 if is_key else fields
    if fmt.granularity == "per_token" and group % multiple:
        return f"group_size={group} is not a multiple of {multiple}"
    return None
