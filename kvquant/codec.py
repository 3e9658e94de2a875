"""What each format means, number by number: quantize and dequantize. Where the bits lie in memory is in layout.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvquant.formats import QuantFormat
from kvquant.rotation import rotate


@dataclass(frozen=True)
class Quantized:
    """Codes with the scales of their groups.

    codes: uint8 [..., T, D], one code per element (exact formats keep the numbers, in their own dtype).
    scale, zero_point: float16 [..., T / group_size, D] (`per_channel`) or [..., T, D / group_size] (`per_token`);
    None where the format has none.
    """

    codes: Tensor
    scale: Tensor | None
    zero_point: Tensor | None
    fmt: QuantFormat


def quantize(x: Tensor, fmt: QuantFormat) -> Quantized:
    """The nearest codes of a floating point tensor [..., T, D].

    Every finite group satisfies |x - dequantize(...)| <= scale / 2 for integer formats without clipping. A group that
    holds NaN or an infinity, or whose scale or zero point exceeds float16, is NaN throughout.

    Raises TypeError for a tensor that is not floating point, ValueError for a group size that does not fit its shape.
    """
    if not x.is_floating_point() or x.dim() < 2:
        raise TypeError(f"x must be a floating point tensor [..., T, D], got {x.dtype} with shape {tuple(x.shape)}")
    if fmt.is_exact:
        return Quantized(x, None, None, fmt)
    groups = _split(x, fmt).to(torch.float32)
    dim = fmt.group_dim
    low, high = groups.amin(dim, keepdim=True), groups.amax(dim, keepdim=True)
    if fmt.clip is None:
        scale, zero_point = _fit(low, high, fmt)
    else:
        scale, zero_point = _search_clip(groups, low, high, fmt, fmt.clip.norm)
    codes = fmt.grid.encode(groups, zero_point, _divisor(scale))
    half_scale, half_zero = scale.to(torch.float16).squeeze(dim), zero_point.to(torch.float16).squeeze(dim)
    return Quantized(codes.reshape(x.shape), half_scale, None if fmt.symmetric else half_zero, fmt)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values that `q` stands for: [..., T, D], computed in float32 and rounded to `dtype` once."""
    if q.scale is None:
        return q.codes.to(dtype)
    dim = q.fmt.group_dim
    values = q.fmt.grid.decode(_split(q.codes, q.fmt)).mul_(q.scale.unsqueeze(dim).to(torch.float32))
    if q.zero_point is not None:
        values = values.add_(q.zero_point.unsqueeze(dim).to(torch.float32))
    return values.reshape(q.codes.shape).to(dtype)


@dataclass(frozen=True)
class StateCodec:
    """How one kind of states, keys or values, enters and leaves a page: a format, in a rotated basis or not."""

    fmt: QuantFormat
    rotated: bool

    def encode(self, states: Tensor) -> Quantized:
        return quantize(rotate(states) if self.rotated else states, self.fmt)

    def decode(self, q: Quantized) -> Tensor:
        """The values of `q` in the basis they are stored in: float32, or the states' own dtype for exact formats."""
        return dequantize(q, q.codes.dtype if self.fmt.is_exact else torch.float32)

    def restore(self, values: Tensor) -> Tensor:
        """What `decode` gives, back in the model's basis."""
        return rotate(values) if self.rotated else values


def _split(x: Tensor, fmt: QuantFormat) -> Tensor:
    """[..., T, D] -> [..., T / g, g, D] (per channel) or [..., T, D / g, g] (per token)."""
    g = fmt.resolve_group_size(x.shape[-2], x.shape[-1])
    groups: Tensor = x.unflatten(fmt.group_dim, (x.shape[fmt.group_dim] // g, g))
    return groups


def _fit(low: Tensor, high: Tensor, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """Scale and zero point (float32, exactly representable in float16) whose grid covers [low, high].

    The zero point is rounded first and the scale is rounded up, so that float16 never cuts off the ends of a group.
    """
    middle = torch.zeros_like(low) if fmt.symmetric else (low * 0.5 + high * 0.5)
    zero_point = middle.to(torch.float16).to(torch.float32)
    half_range = torch.maximum(high - zero_point, zero_point - low)
    scale = _round_up_to_half(half_range / fmt.grid.half_width)
    is_bad = ~(scale.isfinite() & zero_point.isfinite() & low.isfinite() & high.isfinite())
    return scale.masked_fill_(is_bad, torch.nan), zero_point.masked_fill_(is_bad, torch.nan)


def _round_up_to_half(x: Tensor) -> Tensor:
    """The least float16 not below x >= 0, as float32. Positive float16 numbers are ordered as their bit patterns."""
    nearest = x.to(torch.float16)
    bits = nearest.view(torch.int16) + (nearest.to(torch.float32) < x)
    return bits.view(torch.float16).to(torch.float32)


def _divisor(scale: Tensor) -> Tensor:
    """The scale, with 1 where it is 0: every number of such a group rounds to the zero point."""
    return scale.masked_fill(scale == 0, 1.0)


def _search_clip(groups: Tensor, low: Tensor, high: Tensor, fmt: QuantFormat, norm: float) -> tuple[Tensor, Tensor]:
    """Scale and zero point of the least error per group among the ranges that clipping allows."""
    best_scale, best_zero, best_error = torch.zeros_like(low), torch.zeros_like(low), torch.full_like(low, torch.inf)
    for factor in shrink_factors(fmt):
        scale, zero_point = _fit(*_shrink(low, high, factor, fmt), fmt)
        codes = fmt.grid.encode(groups, zero_point, _divisor(scale))
        residue = fmt.grid.decode(codes).mul_(scale).add_(zero_point).sub_(groups)
        error = _sum_by_halves(_power(residue, norm), fmt.group_dim)
        is_better = error < best_error
        best_scale = torch.where(is_better, scale, best_scale)
        best_zero = torch.where(is_better, zero_point, best_zero)
        best_error = torch.where(is_better, error, best_error)
    is_bad = _fit(low, high, fmt)[0].isnan()  # the whole range counts: clipping must not make a bad group look good
    return best_scale.masked_fill_(is_bad, torch.nan), best_zero


def _power(x: Tensor, norm: float) -> Tensor:
    """|x| ** norm; of norms 2 and 4 by multiplications, which every device rounds alike."""
    if norm not in (2.0, 4.0):
        return x.abs_().pow_(norm)
    square = x.mul_(x)
    return square.mul_(square) if norm == 4.0 else square


def _sum_by_halves(x: Tensor, dim: int) -> Tensor:
    """The sum over `dim`, which is kept: its second half is added to its first, again and again.

    The order is part of the clipping search, which has to find the same range on every device. Overwrites x.
    """
    while (n := x.shape[dim]) > 1:
        x.narrow(dim, 0, n // 2).add_(x.narrow(dim, n - n // 2, n // 2))
        x = x.narrow(dim, 0, n - n // 2)  # that of an odd number in the middle waits
    return x


def shrink_factors(fmt: QuantFormat) -> list[float]:
    """For each ratio that clipping tries, what it cuts off a group's range, as `_shrink` uses it."""
    assert fmt.clip is not None
    return [ratio if fmt.symmetric else 0.5 * (1.0 - ratio) for ratio in fmt.clip.ratios]


def _shrink(low: Tensor, high: Tensor, factor: float, fmt: QuantFormat) -> tuple[Tensor, Tensor]:
    """The range times `factor` around zero for symmetric formats, else less `factor` of its width at both ends."""
    if fmt.symmetric:
        return low * factor, high * factor
    cut = (high - low) * factor
    return low + cut, high - cut
