"""Number formats: what a code stands for, and which numbers share a scale. No tensor is grouped or packed here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Granularity = Literal["per_channel", "per_token"]


@dataclass(frozen=True)
class Clip:
    """A search, group by group, for the part of its range that the grid should cover.

    Of the fractions `ratios` of a group's range, the one with the least sum of |error| ** norm is taken. A norm of 2 is
    the usual least squares; 4 weighs the few tokens that clipping hurts most, and is better at 2 and 3 bits.
    Source: the range search of GPTQ (Frantar et al., 2023), whose implementation takes the norm 2.4.
    """

    ratios: tuple[float, ...] = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5, 0.45, 0.4)
    norm: float = 4.0

    def __post_init__(self) -> None:
        if not self.ratios or not all(ratio > 0 for ratio in self.ratios):
            raise ValueError(f"ratios={self.ratios} of a Clip must be fractions above 0, one at least")
        if not self.norm > 0:
            raise ValueError(f"norm={self.norm} of a Clip must be above 0")


class Grid(Protocol):
    """The set of values a code can take, before a group's scale and zero point are applied."""

    @property
    def bits(self) -> int: ...

    @property
    def is_exact(self) -> bool: ...

    @property
    def half_width(self) -> float: ...

    def encode(self, x: Tensor, zero_point: Tensor, scale: Tensor) -> Tensor: ...

    def decode(self, codes: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class IntegerGrid:
    """The integers 0..top, decoded as distances from their middle: -top/2 .. top/2."""

    bits: int
    top: int
    is_exact: bool = False

    @property
    def half_width(self) -> float:
        return self.top / 2

    def encode(self, x: Tensor, zero_point: Tensor, scale: Tensor) -> Tensor:
        """Codes uint8 of the nearest level; halves round up, values beyond the ends take the end."""
        base = zero_point - (self.half_width + 0.5) * scale
        steps = x.sub(base).div_(scale).clamp_(0.0, self.top + 0.5)
        return steps.to(torch.uint8)  # truncation: `base` lies half a step below the first level

    def decode(self, codes: Tensor) -> Tensor:
        return codes.to(torch.float32).sub_(self.half_width)


@dataclass(frozen=True)
class FloatGrid:
    """An 8-bit floating point type, stored as its bytes."""

    dtype: torch.dtype
    bits: int = 8
    is_exact: bool = False

    @property
    def half_width(self) -> float:
        return torch.finfo(self.dtype).max

    def encode(self, x: Tensor, zero_point: Tensor, scale: Tensor) -> Tensor:
        """Codes uint8. Clamped first: a cast beyond the range saturates or gives NaN, depending on torch's version."""
        steps = x.sub(zero_point).div_(scale).clamp_(-self.half_width, self.half_width)
        return steps.to(self.dtype).view(torch.uint8)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.view(self.dtype).to(torch.float32)


@dataclass(frozen=True)
class IdentityGrid:
    """Every value of the tensor's own dtype. It has neither scale nor zero point: its codes are the numbers."""

    bits: int = 16
    is_exact: bool = True

    @property
    def half_width(self) -> float:
        return float("inf")

    def encode(self, x: Tensor, zero_point: Tensor, scale: Tensor) -> Tensor:
        return x

    def decode(self, codes: Tensor) -> Tensor:
        return codes


@dataclass(frozen=True)
class QuantFormat:
    """A number format for keys or values.

    A value x is stored as a code of `grid` with x ~ zero_point + scale * grid.decode(code), scale and zero point being
    float16 and shared by a group: `group_size` consecutive tokens of one channel (`per_channel`) or `group_size`
    consecutive channels of one token (`per_token`). `symmetric` formats have no zero point. `clip` searches for the
    range of each group; None takes the whole range.
    """

    name: str
    grid: Grid
    granularity: Granularity
    symmetric: bool = False
    group_size: int | None = None
    clip: Clip | None = None

    def __post_init__(self) -> None:
        if self.group_size is not None and type(self.group_size) is not int:
            raise TypeError(f"group_size={self.group_size!r} of format {self.name} must be an int, or None")
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size={self.group_size} of format {self.name} must be at least 1, or None")

    @property
    def bits(self) -> int:
        return self.grid.bits

    @property
    def is_exact(self) -> bool:
        return self.grid.is_exact

    @property
    def group_dim(self) -> int:
        """The dimension of [..., T, D] along which numbers share a scale."""
        return -2 if self.granularity == "per_channel" else -1

    def resolve_group_size(self, tokens: int, channels: int) -> int:
        """The group size for a tensor [..., tokens, channels].

        By default all tokens (`per_channel`), or the largest divisor of `channels` not above 64 (`per_token`).
        Raises ValueError if an explicit group size does not divide the dimension it groups.
        """
        extent = tokens if self.granularity == "per_channel" else channels
        if self.group_size is None:
            return max(extent, 1) if self.granularity == "per_channel" else largest_divisor(channels, at_most=64)
        if extent % self.group_size:
            noun = "tokens" if self.granularity == "per_channel" else "channels"
            raise ValueError(
                f"group_size={self.group_size} of format {self.name} does not divide {extent} {noun}; "
                f"use a divisor of {extent}, or group_size=None to choose one"
            )
        return self.group_size

    def clipped(self, enabled: bool = True) -> QuantFormat:
        """This format with, or without, the clipping search."""
        return replace(self, clip=Clip() if enabled else None)

    def to_dict(self) -> dict[str, Any]:
        clip = None if self.clip is None else {"ratios": list(self.clip.ratios), "norm": self.clip.norm}
        return {"name": self.name, "group_size": self.group_size, "clip": clip}

    @staticmethod
    def from_dict(fields: dict[str, Any]) -> QuantFormat:
        """The format that `to_dict` described. Raises ValueError for a name that is none of FORMATS."""
        known = {fmt.name: fmt for fmt in FORMATS}
        if fields["name"] not in known:
            raise ValueError(f"format name={fields['name']!r} is unknown; known are {', '.join(sorted(known))}")
        clip = fields["clip"] and Clip(tuple(fields["clip"]["ratios"]), fields["clip"]["norm"])
        return replace(known[fields["name"]], group_size=fields["group_size"], clip=clip)


def largest_divisor(n: int, at_most: int) -> int:
    """The largest divisor of n >= 0 that is not above `at_most`."""
    return next(d for d in range(min(max(n, 1), at_most), 0, -1) if n % d == 0)


def integer_format(bits: int, granularity: Granularity, symmetric: bool = False) -> QuantFormat:
    """An integer format of 8, 4, 3, 2 or 1 bits. Symmetric ones leave one code unused, so that zero is a level.

    Raises ValueError for other numbers of bits, and for symmetric codes of one bit.
    """
    if bits not in (8, 4, 3, 2) and (bits != 1 or symmetric):
        raise ValueError(f"bits={bits} is not supported; use 8, 4, 3, 2, or 1 if not symmetric")
    top = 2**bits - (2 if symmetric else 1)
    name = f"int{bits}_{granularity}" + ("_symmetric" if symmetric else "")
    return QuantFormat(name, IntegerGrid(bits, top), granularity, symmetric)


INT8_PER_CHANNEL = integer_format(8, "per_channel")
INT8_PER_TOKEN = integer_format(8, "per_token")
INT4_PER_CHANNEL = integer_format(4, "per_channel")
INT4_PER_TOKEN = integer_format(4, "per_token")
INT3_PER_CHANNEL = integer_format(3, "per_channel")
INT3_PER_TOKEN = integer_format(3, "per_token")
INT2_PER_CHANNEL = integer_format(2, "per_channel")
INT2_PER_TOKEN = integer_format(2, "per_token")

INT8_PER_CHANNEL_SYMMETRIC = integer_format(8, "per_channel", symmetric=True)
INT8_PER_TOKEN_SYMMETRIC = integer_format(8, "per_token", symmetric=True)
INT4_PER_CHANNEL_SYMMETRIC = integer_format(4, "per_channel", symmetric=True)
INT4_PER_TOKEN_SYMMETRIC = integer_format(4, "per_token", symmetric=True)
INT3_PER_CHANNEL_SYMMETRIC = integer_format(3, "per_channel", symmetric=True)
INT3_PER_TOKEN_SYMMETRIC = integer_format(3, "per_token", symmetric=True)
INT2_PER_CHANNEL_SYMMETRIC = integer_format(2, "per_channel", symmetric=True)
INT2_PER_TOKEN_SYMMETRIC = integer_format(2, "per_token", symmetric=True)

FP8_E4M3_PER_CHANNEL = QuantFormat(
    "fp8_e4m3_per_channel", FloatGrid(torch.float8_e4m3fn), "per_channel", symmetric=True
)
FP8_E4M3_PER_TOKEN = QuantFormat("fp8_e4m3_per_token", FloatGrid(torch.float8_e4m3fn), "per_token", symmetric=True)
FP8_E5M2_PER_CHANNEL = QuantFormat("fp8_e5m2_per_channel", FloatGrid(torch.float8_e5m2), "per_channel", symmetric=True)
FP8_E5M2_PER_TOKEN = QuantFormat("fp8_e5m2_per_token", FloatGrid(torch.float8_e5m2), "per_token", symmetric=True)

IDENTITY = QuantFormat("identity", IdentityGrid(), "per_token")

FORMATS: tuple[QuantFormat, ...] = tuple(value for value in list(globals().values()) if isinstance(value, QuantFormat))
