"""KVarN: rotated tiles whose standard deviations are evened out over tokens and channels before they are rounded.

Source: KVarN (Muller et al., 2026) and the kernels in its repository.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvquant import MemoryReport
from kvquant.formats import Granularity
from kvquant.rotation import rotate
from kvquant_evals.peers.simulated_cache import Plan

_PASSES = 16
_LEAST, _MOST = 1e-3, 1e3  # of a standard deviation
_LEAST_LOG, _MOST_LOG = -0.3, 10.0  # of a scale: those of small numbers end at exp(-0.3), and are not evened out


@dataclass(frozen=True)
class VarianceNormalized:
    """Rotated numbers in groups per channel or per token, which share a scale along the other direction as well."""

    bits: int
    granularity: Granularity
    tile: int = 128

    def stored(self, x: Tensor) -> Tensor:
        grouped = rotate(x) if self.granularity == "per_token" else rotate(x).transpose(2, 3)
        groups, across = evened(grouped)
        values = _rounded(grouped / groups / across, groups, self.bits) * _half(across)
        return rotate(values if self.granularity == "per_token" else values.transpose(2, 3))

    def size(self, num_heads: int, head_dim: int) -> MemoryReport:
        """Scales: two numbers of 16 bits per group, and one per number of a group."""
        extents = (self.tile, head_dim) if self.granularity == "per_token" else (head_dim, self.tile)
        codes = num_heads * self.tile * head_dim * self.bits // 8
        return MemoryReport(codes=codes, scales=num_heads * 2 * (2 * extents[0] + extents[1]))


def evened(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [..., R, 1] of rows and [..., 1, C] of columns, by which x [..., R, C] varies most alike everywhere."""
    row_log, column_log = torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1, :])
    best = (row_log, column_log)
    least = _imbalance(x)
    for _ in range(_PASSES):
        column_log = _stepped(column_log, _divided(x, row_log, column_log).std(dim=-2, keepdim=True))
        row_log = _stepped(row_log, _divided(x, row_log, column_log).std(dim=-1, keepdim=True))
        imbalance = _imbalance(_divided(x, row_log, column_log))
        is_better = imbalance <= least
        best = (torch.where(is_better, row_log, best[0]), torch.where(is_better, column_log, best[1]))
        least = torch.where(is_better, imbalance, least)
    return best[0].exp(), best[1].exp()


def _divided(x: Tensor, row_log: Tensor, column_log: Tensor) -> Tensor:
    return x / column_log.exp() / row_log.exp()


def _stepped(log: Tensor, deviation: Tensor) -> Tensor:
    return (log + deviation.clamp(_LEAST, _MOST).log()).clamp(_LEAST_LOG, _MOST_LOG)


def _imbalance(x: Tensor) -> Tensor:
    """Largest over smallest standard deviation, of rows plus of columns, [..., 1, 1]."""
    rows, columns = (x.std(dim=dim, keepdim=True) for dim in (-1, -2))
    return _largest_over_smallest(rows) + _largest_over_smallest(columns)


def _largest_over_smallest(x: Tensor) -> Tensor:
    return x.amax((-2, -1), keepdim=True) / x.amin((-2, -1), keepdim=True).clamp(min=1e-8)


def _rounded(x: Tensor, scale: Tensor, bits: int) -> Tensor:
    """x [..., R, C] times `scale` [..., R, 1], from integers over the range of each row."""
    low, high, top = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), (1 << bits) - 1
    step = ((high - low) / top).clamp(min=1e-10)
    codes = ((x - low) / step).round().clamp(0, top)
    return codes * _half(scale * step) + _half(scale * low)


def _half(x: Tensor) -> Tensor:
    """As it is stored."""
    return x.to(torch.float16).to(torch.float32)


def kvarn(key_bits: int, value_bits: int) -> Plan:
    """The first tile stays exact, and so does the last one until it is full."""
    return Plan(VarianceNormalized(key_bits, "per_channel"), VarianceNormalized(value_bits, "per_token"), sinks=128)
