"""Kitty: keys per channel in 2 bits, and in 4 those channels of a page whose numbers are largest.

Source: Kitty (Xia et al., 2025), and the simulation in its repository.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvquant import MemoryReport, QuantFormat, dequantize, quantize
from kvquant.formats import INT2_PER_CHANNEL, INT2_PER_TOKEN, INT4_PER_CHANNEL, largest_divisor
from kvquant_evals.peers.simulated_cache import Plan

_SCALE_AND_ZERO_POINT = 4  # bytes


@dataclass(frozen=True)
class BoostedChannels:
    """Keys of a page, per channel. boosted: the share of channels, largest in mean magnitude, that have more bits."""

    boosted: float
    tile: int = 128
    low: QuantFormat = INT2_PER_CHANNEL
    high: QuantFormat = INT4_PER_CHANNEL

    def stored(self, x: Tensor) -> Tensor:
        low, high = (dequantize(quantize(x, fmt)) for fmt in (self.low, self.high))
        top = x.abs().mean(dim=2, keepdim=True).topk(self._num_boosted(x.shape[3]), dim=3).indices
        return torch.where(torch.zeros_like(x[:, :, :1], dtype=torch.bool).scatter(3, top, True), high, low)

    def size(self, num_heads: int, head_dim: int) -> MemoryReport:
        """With a byte per channel that says where its bits are, as in the published pages."""
        boosted = self._num_boosted(head_dim)
        bits = self.tile * (boosted * self.high.bits + (head_dim - boosted) * self.low.bits)
        return MemoryReport(codes=num_heads * bits // 8, scales=num_heads * head_dim * (_SCALE_AND_ZERO_POINT + 1))

    def _num_boosted(self, head_dim: int) -> int:
        return int(head_dim * self.boosted)


@dataclass(frozen=True)
class PlainTokens:
    """Values per token, in groups of at most `group_size` channels."""

    fmt: QuantFormat = INT2_PER_TOKEN
    group_size: int = 128
    tile: int = 1

    def stored(self, x: Tensor) -> Tensor:
        return dequantize(quantize(x, replace(self.fmt, group_size=self._group(x.shape[3]))))

    def size(self, num_heads: int, head_dim: int) -> MemoryReport:
        groups = num_heads * head_dim // self._group(head_dim)
        return MemoryReport(codes=num_heads * head_dim * self.fmt.bits // 8, scales=groups * _SCALE_AND_ZERO_POINT)

    def _group(self, head_dim: int) -> int:
        return largest_divisor(head_dim, at_most=self.group_size)


def kitty(boosted: float) -> Plan:
    return Plan(BoostedChannels(boosted), PlainTokens(), sinks=32, value_window=128)
