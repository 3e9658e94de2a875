"""KVQuant: codes of a fitted codebook, keys per channel and values per token, and outliers that stay exact.

Source: KVQuant (Hooper et al., 2024), and the simulation in its repository.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvquant import MemoryReport
from kvquant.formats import Granularity
from kvquant_evals.peers.simulated_cache import Plan

_OUTLIERS = 0.005  # of a vector's numbers, at each of its ends
_TILE = 200  # the fewest tokens of which that is one
_OUTLIER_BYTES = 4  # its value in float16, and its place in the vector
_RANGE_BYTES = 4  # per vector: middle and half width, 16 bits each
_ROUNDS = 50


@dataclass(frozen=True)
class DenseAndSparse:
    """Codes of `bits` from one codebook per tile, for numbers taken relative to the range of their vector.

    A vector is a channel of a tile (`per_channel`), or a token with all heads (`per_token`). Its range leaves out its
    outliers. is_normalized: whether levels are moved so that codes keep mean and deviation of the numbers ("Q-Norm").
    """

    bits: int
    granularity: Granularity
    is_normalized: bool = False
    tile: int = _TILE

    def stored(self, x: Tensor) -> Tensor:
        vectors = self._as_vectors(x)
        count = num_outliers(vectors.shape[2])
        ordered, order = vectors.sort(dim=2, stable=True)
        inner = ordered[..., count : vectors.shape[2] - count]
        middle = _half((inner[..., -1:] + inner[..., :1]) / 2)
        width = _half((inner[..., -1:] - inner[..., :1]) / 2).clamp(min=2.0**-24)  # the least of float16
        relative, fitting = (((part - middle) / width).clamp(-1, 1).flatten(1) for part in (vectors, inner))
        dense = nearest(relative, self._codebook(fitting)).view_as(vectors) * width + middle
        outer = torch.cat([order[..., :count], order[..., vectors.shape[2] - count :]], dim=2)
        return self._as_tile(dense.scatter(2, outer, _half(vectors.gather(2, outer))), x)

    def size(self, num_heads: int, head_dim: int) -> MemoryReport:
        """Codes are there for outliers, too. The codebook is stored with each tile."""
        channels = num_heads * head_dim
        vectors, length = (channels, self.tile) if self.granularity == "per_channel" else (self.tile, channels)
        per_vector = _RANGE_BYTES + 2 * num_outliers(length) * _OUTLIER_BYTES
        return MemoryReport(codes=vectors * length * self.bits // 8, scales=vectors * per_vector + 2 * 2**self.bits)

    def _codebook(self, x: Tensor) -> Tensor:
        levels = fitted(x, 2**self.bits)
        return _half(normalized(levels, x) if self.is_normalized else levels)

    def _as_vectors(self, x: Tensor) -> Tensor:
        """[B, H, t, D] as [B, vectors, length]."""
        order = (0, 1, 3, 2) if self.granularity == "per_channel" else (0, 2, 1, 3)
        return x.permute(order).flatten(1, 2) if self.granularity == "per_channel" else x.permute(order).flatten(2)

    def _as_tile(self, vectors: Tensor, like: Tensor) -> Tensor:
        """What `_as_vectors` did, undone."""
        rows, heads, tokens, channels = like.shape
        if self.granularity == "per_channel":
            return vectors.view(rows, heads, channels, tokens).transpose(2, 3)
        return vectors.view(rows, tokens, heads, channels).transpose(1, 2)


def num_outliers(length: int) -> int:
    """How many of a vector's numbers lie beyond the percentile at one of its ends, which is interpolated."""
    return int(_OUTLIERS * (length - 1)) + 1


def fitted(x: Tensor, num_levels: int) -> Tensor:
    """Ascending levels [B, L] that k-means finds for the numbers x [B, n]."""
    x = x.to(torch.float64).sort(dim=1).values
    sums = torch.nn.functional.pad(x.cumsum(dim=1), (1, 0))
    levels = _first_levels(x, num_levels)
    for _ in range(_ROUNDS):
        inner = torch.searchsorted(x, (levels[:, 1:] + levels[:, :-1]) / 2)
        edges = torch.nn.functional.pad(torch.nn.functional.pad(inner, (1, 0)), (0, 1), value=x.shape[1])
        counts = edges.diff(dim=1)
        levels = torch.where(counts > 0, sums.gather(1, edges).diff(dim=1) / counts.clamp(min=1), levels)
    return levels.to(torch.float32)


def _first_levels(x: Tensor, num_levels: int) -> Tensor:
    """Levels [B, L] as dense as the cube root of the density of x [B, n], ascending: the best ones where L is large.

    Source: Panter and Dite (1951). Gaps between numbers are as 1 / density, and their powers 2 / 3 add up to its root.
    """
    path = torch.nn.functional.pad(x.diff(dim=1).pow(2 / 3).cumsum(dim=1), (1, 0))
    target = path[:, -1:] * (torch.arange(num_levels, dtype=x.dtype, device=x.device) + 0.5) / num_levels
    after = torch.searchsorted(path, target).clamp(1, x.shape[1] - 1)
    (x0, x1), (p0, p1) = ((of.gather(1, after - 1), of.gather(1, after)) for of in (x, path))
    return x0 + (x1 - x0) * (target - p0) / (p1 - p0).clamp(min=torch.finfo(x.dtype).tiny)


def normalized(levels: Tensor, x: Tensor) -> Tensor:
    """Levels [B, L] moved so that rounding x [B, n] to them keeps its mean and standard deviation."""
    rounded = nearest(x, levels)
    spread = x.std(dim=1, keepdim=True) / rounded.std(dim=1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return (levels - rounded.mean(dim=1, keepdim=True)) * spread + x.mean(dim=1, keepdim=True)


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """The level of [B, L], ascending, that is nearest to each number of x [B, n]."""
    edges = ((levels[:, 1:] + levels[:, :-1]) / 2).contiguous()
    return levels.gather(1, torch.searchsorted(edges, x.contiguous()))


def _half(x: Tensor) -> Tensor:
    """As it is stored."""
    return x.to(torch.float16).to(torch.float32)


def kvquant(bits: int) -> Plan:
    """With the first token exact, and the normalization that the published 2-bit checkpoints have."""
    key, value = (DenseAndSparse(bits, granularity, bits == 2) for granularity in ("per_channel", "per_token"))
    return Plan(key, value, sinks=1)
