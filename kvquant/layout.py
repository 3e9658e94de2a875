"""Where a page's bits lie in memory: packing of codes, and the plain record that every device can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvquant.codec import Quantized, StateCodec
from kvquant.formats import QuantFormat

ALIGNMENT = 16  # bytes; the widest load of the devices we target


class PageLayout(Protocol):
    """The bytes of one page: the keys and values of `page_size` tokens of one layer.

    A layout that can do so faster may seal and restore pages, and append tokens that wait for one, in its own way, to
    the same numbers.
    """

    @property
    def page_bytes(self) -> int: ...

    @property
    def code_bytes(self) -> int: ...

    @property
    def scale_bytes(self) -> int: ...

    def pack(self, key: Quantized, value: Quantized) -> Tensor: ...

    def unpack(self, records: Tensor, part: int) -> Quantized: ...

    def seal(self, key: Tensor, value: Tensor, codecs: Sequence[StateCodec]) -> Tensor:
        """Records uint8 [pages, page_bytes] of states [pages, H, page_size, D] in the model's basis."""
        return self.pack(codecs[0].encode(key), codecs[1].encode(value))

    def append(self, states: Sequence[Tensor], buffers: Sequence[Tensor], first: int) -> None:
        """Copies keys and values [B, H, t, D] into buffers [B, H, T, D], from token `first` on, without gradients."""
        append_by_torch(states, buffers, first)

    def restore(self, records: Tensor, part: int, codec: StateCodec, dtype: torch.dtype) -> Tensor:
        """Keys (part 0) or values (part 1) of records in the model's basis: [pages, H, page_size, D] of `dtype`."""
        return codec.restore(codec.decode(self.unpack(records, part))).to(dtype)


def append_by_torch(states: Sequence[Tensor], buffers: Sequence[Tensor], first: int) -> None:
    """PageLayout.append for every device and dtype."""
    for part, buffer in zip(states, buffers, strict=True):
        buffer.narrow(-2, first, part.shape[-2]).copy_(part.detach())


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [..., N], each below 2**bits -> bytes uint8 [..., N * bits / 8]. N must be a multiple of 8.

    8 bits: as they are. 4 bits: byte i holds code i in its low and code i + N/2 in its high half. 2 bits: byte i holds
    codes i, i + N/4, i + N/2, i + 3N/4 from its low end. 3 bits: the plane of the two low bits, then the plane of the
    high bits, both packed in the same way; 1 bit likewise.

    Raises ValueError for other numbers of bits, or an N that is not a multiple of 8.
    """
    if codes.shape[-1] % 8:
        raise ValueError(f"codes must come in multiples of 8, got {codes.shape[-1]}")
    if bits == 3:
        return torch.cat((pack(codes & 3, 2), pack(codes >> 2, 1)), dim=-1)
    per_byte = _codes_per_byte(bits)
    if per_byte == 1:
        return codes
    parts = codes.unflatten(-1, (per_byte, codes.shape[-1] // per_byte))
    packed: Tensor = parts[..., 0, :].clone()
    for i in range(1, per_byte):
        packed |= parts[..., i, :] << (i * bits)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Bytes uint8 [..., N * bits / 8] -> codes uint8 [..., N]: the inverse of `pack`."""
    if bits == 3:
        low, high = packed.split([packed.shape[-1] // 3 * 2, packed.shape[-1] // 3], dim=-1)
        return unpack(low, 2) | (unpack(high, 1) << 2)
    per_byte = _codes_per_byte(bits)
    if per_byte == 1:
        return packed
    mask = 2**bits - 1
    return torch.cat([(packed >> (i * bits)) & mask for i in range(per_byte)], dim=-1)


def _codes_per_byte(bits: int) -> int:
    if bits not in (1, 2, 4, 8):
        raise ValueError(f"bits={bits} cannot be packed; use 1, 2, 3, 4 or 8")
    return 8 // bits


class StateShape(NamedTuple):
    """One page of keys, or of values, of one layer."""

    num_heads: int
    page_size: int
    head_dim: int


class PagePart(NamedTuple):
    """The keys, or the values, of a page: how they are quantized, and the dtype that exact formats keep."""

    fmt: QuantFormat
    shape: StateShape
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class _Section:
    """The codes, scales and zero points of a page's keys, or of its values, in their part of the record."""

    fmt: QuantFormat
    shape: StateShape
    dtype: torch.dtype
    first: int

    @property
    def scale_shape(self) -> tuple[int, int, int]:
        h, t, d = self.shape
        g = self.fmt.resolve_group_size(t, d)
        return (h, t // g, d) if self.fmt.granularity == "per_channel" else (h, t, d // g)

    @property
    def code_bytes(self) -> int:
        bits = 8 * self.dtype.itemsize if self.fmt.is_exact else self.fmt.bits
        return prod(self.shape) * bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales, and again of the zero points."""
        return 0 if self.fmt.is_exact else 2 * prod(self.scale_shape)

    @property
    def num_scales(self) -> int:
        return 0 if self.fmt.is_exact else 1 if self.fmt.symmetric else 2

    @property
    def last(self) -> int:
        return self.first + _aligned(self.code_bytes) + self.num_scales * _aligned(self.scale_bytes)

    def write(self, q: Quantized, records: Tensor) -> None:
        if self.fmt.is_exact:
            _bytes_at(records, self.first, self.code_bytes).copy_(q.codes.contiguous().view(torch.uint8).flatten(1))
            return
        _bytes_at(records, self.first, self.code_bytes).copy_(pack(q.codes.flatten(1), self.fmt.bits))
        for i, scales in enumerate(s for s in (q.scale, q.zero_point) if s is not None):
            self._scales_at(records, i).copy_(scales.contiguous().view(torch.uint8).flatten(1))

    def read(self, records: Tensor) -> Quantized:
        raw = _bytes_at(records, self.first, self.code_bytes)
        if self.fmt.is_exact:
            return Quantized(raw.view(self.dtype).unflatten(1, self.shape), None, None, self.fmt)
        codes = unpack(raw, self.fmt.bits).reshape(-1, *self.shape)
        scales = [
            self._scales_at(records, i).view(torch.float16).unflatten(1, self.scale_shape)
            for i in range(self.num_scales)
        ]
        return Quantized(codes, scales[0], None if self.fmt.symmetric else scales[1], self.fmt)

    def _scales_at(self, records: Tensor, i: int) -> Tensor:
        first = self.first + _aligned(self.code_bytes) + i * _aligned(self.scale_bytes)
        return _bytes_at(records, first, self.scale_bytes)


class PlainLayout(PageLayout):
    """Key codes | key scales | key zero points | value codes | value scales | value zero points, 16-byte aligned.

    Codes are packed over a whole page in the order [head, token, channel].
    """

    def __init__(self, key: PagePart, value: PagePart) -> None:
        key_section = _Section(*key, first=0)
        self._sections = key_section, _Section(*value, first=key_section.last)

    @property
    def page_bytes(self) -> int:
        return self._sections[1].last

    @property
    def code_bytes(self) -> int:
        return sum(section.code_bytes for section in self._sections)

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales and zero points."""
        return sum(part.num_scales * part.scale_bytes for part in self._sections)

    def pack(self, key: Quantized, value: Quantized) -> Tensor:
        """Records uint8 [pages, page_bytes] of codes [pages, H, page_size, D]."""
        records = torch.zeros(key.codes.shape[0], self.page_bytes, dtype=torch.uint8, device=key.codes.device)
        for section, quantized in zip(self._sections, (key, value), strict=True):
            section.write(quantized, records)
        return records

    def unpack(self, records: Tensor, part: int) -> Quantized:
        """The keys (part 0) or values (part 1) of records uint8 [pages, page_bytes]: codes [pages, H, page_size, D]."""
        return self._sections[part].read(records)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _bytes_at(records: Tensor, first: int, count: int) -> Tensor:
    return records[:, first : first + count]
