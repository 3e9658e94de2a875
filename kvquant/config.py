"""QuantConfig: which formats, and what stays exact. Presets for `bits=`, validation, and dicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from kvquant import formats
from kvquant.codec import StateCodec
from kvquant.formats import QuantFormat

Bits = int | str

# Keys are grouped per channel and values per token, after KIVI (Liu et al., 2024, section 3). FP8 carries its own
# exponent, so that one scale per token serves both.
_PRESETS: dict[Bits, tuple[QuantFormat, QuantFormat]] = {
    16: (formats.IDENTITY, formats.IDENTITY),
    8: (formats.INT8_PER_CHANNEL, formats.INT8_PER_TOKEN),
    4: (formats.INT4_PER_CHANNEL, formats.INT4_PER_TOKEN),
    3: (formats.INT3_PER_CHANNEL, formats.INT3_PER_TOKEN),
    2: (formats.INT2_PER_CHANNEL, formats.INT2_PER_TOKEN),
    "fp8": (formats.FP8_E4M3_PER_TOKEN, formats.FP8_E4M3_PER_TOKEN),
}

# Clipping pays at 3 bits and below, and costs a little at 4.
_MAX_CLIPPED_BITS = 3


@dataclass(frozen=True)
class QuantConfig:
    """How a cache stores its layers.

    key, value: the formats of sealed pages.
    sinks: leading tokens of every row that stay exact (attention sinks; Xiao et al., 2023).
    residual_length: most recent tokens that stay exact; between this many and `page_size` more are exact at any time.
    page_size: tokens per page, and the group of per-channel scales; a multiple of 8.
    rotation: whether quantized states are Hadamard-rotated over head_dim.
    max_length: tokens per row to allocate pages for at once; None lets the pool grow.
    precision: "exact" has kernels compute in float32 throughout; by default they may round queries to 15 and attention
    weights to 16 bits, which 16-bit floats do more coarsely. It does not change what is stored.
    quantize_sliding: whether layers with a sliding window are packed as well; they hold no more than the window anyway.
    quantize_rope: whether the RoPE part of latent states (MLA), which are cached as values, is quantized as well.

    Raises TypeError or ValueError for values out of range, naming the argument.
    """

    key: QuantFormat = formats.INT4_PER_CHANNEL
    value: QuantFormat = formats.INT4_PER_TOKEN
    sinks: int = 4
    residual_length: int = 64
    page_size: int = 128
    rotation: bool = True
    max_length: int | None = None
    precision: Literal["default", "exact"] = "default"
    quantize_sliding: bool = False
    quantize_rope: bool = False

    def __post_init__(self) -> None:
        _check_count("sinks", self.sinks, at_least=0)
        _check_count("residual_length", self.residual_length, at_least=0)
        _check_count("page_size", self.page_size, at_least=8)
        if self.page_size % 8:
            raise ValueError(
                f"page_size={self.page_size} must be a multiple of 8, so that every format fills whole bytes"
            )
        if self.max_length is not None:
            _check_count("max_length", self.max_length, at_least=1)
        for name in ("rotation", "quantize_sliding", "quantize_rope"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.precision not in ("default", "exact"):
            raise ValueError(f"precision={self.precision!r} is not supported; use 'default' or 'exact'")
        for part in ("key", "value"):
            fmt = getattr(self, part)
            if not isinstance(fmt, QuantFormat):
                raise TypeError(
                    f"{part} must be a QuantFormat, got {fmt!r}; for a number of bits use QuantConfig.preset"
                )
            if fmt.granularity == "per_channel" and fmt.group_size not in (None, self.page_size):
                raise ValueError(
                    f"group_size={fmt.group_size} of the {part} format {fmt.name} must be page_size={self.page_size} "
                    "or None: statistics per channel are taken over whole pages"
                )

    @staticmethod
    def preset(bits: Bits | tuple[Bits, Bits], *, clip: bool | None = None, **options: Any) -> QuantConfig:
        """The default recipe at `bits`: 8, 4, 3, 2, 16, "fp8", or a pair (key, value) of these.

        `clip` turns the clipping search on or off for both; None uses it at 3 bits and below. `options` are fields of
        QuantConfig. Raises ValueError for other bits.
        """
        if clip is not None and not isinstance(clip, bool):
            raise TypeError(f"clip must be True, False or None, got {clip!r}")
        key_bits, value_bits = bits if isinstance(bits, tuple) and len(bits) == 2 else (bits, bits)
        key, value = _preset(key_bits, bits)[0], _preset(value_bits, bits)[1]
        return QuantConfig(key=_clipped(key, clip), value=_clipped(value, clip), **options)

    def codec(self, part: int) -> StateCodec:
        """The codec of keys (0) or values (1)."""
        fmt = (self.key, self.value)[part]
        return StateCodec(fmt, rotated=self.rotation and not fmt.is_exact)

    def packs_window(self, size: int) -> bool:
        """Whether layers with a sliding window of `size` tokens are packed: not if most of them were exact anyway."""
        return self.quantize_sliding and size > self.sinks + self.residual_length + self.page_size

    def for_latents(self) -> QuantConfig:
        """What to use for latent states (MLA): their RoPE part has few channels, none of them redundant."""
        return self if self.quantize_rope else replace(self, value=formats.IDENTITY)

    @cached_property
    def is_exact(self) -> bool:
        return self.key.is_exact and self.value.is_exact

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and dicts, for JSON."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return plain | {"key": self.key.to_dict(), "value": self.value.to_dict()}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> QuantConfig:
        """The configuration that `to_dict` described. Raises ValueError for unknown fields or formats."""
        unknown = set(plain) - {field.name for field in fields(QuantConfig)}
        if unknown:
            raise ValueError(f"unknown fields of QuantConfig: {', '.join(sorted(unknown))}")
        key, value = (QuantFormat.from_dict(plain[part]) for part in ("key", "value"))
        return QuantConfig(**{**plain, "key": key, "value": value})


def parse_bits(text: str) -> Bits | tuple[Bits, Bits]:
    """`bits` as typed on a command line: "4", "fp8", or "4,2" for (key, value). Raises ValueError for anything else."""
    parts = tuple(int(part) if part.isascii() and part.isdigit() else part for part in map(str.strip, text.split(",")))
    bits = parts[0] if len(parts) == 1 else parts
    QuantConfig.preset(bits)  # type: ignore[arg-type]  # rejects what is not a known width or pair
    return bits  # type: ignore[return-value]  # which it is now


def _preset(bits: Any, given: Any) -> tuple[QuantFormat, QuantFormat]:
    if isinstance(bits, bool) or not isinstance(bits, int | str) or bits not in _PRESETS:
        known = ", ".join(repr(name) for name in _PRESETS)
        raise ValueError(f"bits={given!r} is not supported; use one of {known}, or a pair (key, value) of them")
    return _PRESETS[bits]


def _clipped(fmt: QuantFormat, clip: bool | None) -> QuantFormat:
    wanted = fmt.bits <= _MAX_CLIPPED_BITS if clip is None else clip
    return replace(fmt) if fmt.is_exact else fmt.clipped(wanted)


def _check_count(name: str, value: object, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < at_least:
        raise ValueError(f"{name}={value} must be at least {at_least}")
