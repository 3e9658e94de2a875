"""Formats of a user's own: what a kernel cannot decode it refuses, and the cache is that of plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn import functional as F

from kvquant import QuantCache, QuantConfig, QuantFormat, kernel
from kvquant.formats import INT4_PER_TOKEN, FloatGrid, IntegerGrid
from kvquant.pages import page_parts

KERNELS = kernel.discover()


@dataclass(frozen=True)
class Codebook:
    """Levels at the quantiles of the normal distribution: as many bits as an integer grid has, other values."""

    bits: int = 4
    is_exact: bool = False

    @property
    def levels(self) -> torch.Tensor:
        count = 2**self.bits
        return torch.distributions.Normal(0.0, 1.0).icdf((torch.arange(count) + 0.5) / count)

    @property
    def half_width(self) -> float:
        return self.levels.max().item()

    def encode(self, x, zero_point, scale):
        middles = (self.levels[1:] + self.levels[:-1]) / 2
        return torch.bucketize(((x - zero_point) / scale).contiguous(), middles).to(torch.uint8)

    def decode(self, codes):
        return self.levels[codes.long()]


class Shifted(IntegerGrid):
    """An integer grid that decodes its codes in another way."""

    def decode(self, codes):
        return super().decode(codes).flip(-1)


def own(grid):
    return QuantFormat("own", grid, "per_token", symmetric=True)


GRIDS = [Codebook(2), Codebook(4), Codebook(8), Shifted(4, 15), FloatGrid(torch.float8_e4m3fnuz)]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("grid", GRIDS, ids=repr)
@pytest.mark.parametrize("part", ["key", "value"])
def test_grids_that_a_kernel_does_not_know_are_refused(kernel, grid, part):
    states = torch.empty(1, 2, 0, 64, dtype=torch.bfloat16)
    known = QuantConfig(key=INT4_PER_TOKEN, value=INT4_PER_TOKEN)
    assert not isinstance(kernel.page_layout(*page_parts(known, states, states)), str)
    reason = kernel.page_layout(*page_parts(replace(known, **{part: own(grid)}), states, states))
    assert reason == "format own has levels of its own"


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_a_cache_of_such_a_grid_is_that_of_plain_pytorch(grid, monkeypatch):
    torch.manual_seed(0)
    states, query = torch.randn(1, 2, 300, 64), torch.randn(1, 4, 1, 64)
    outs = []
    for switch in ("on", "off"):
        monkeypatch.setenv("KVQUANT_KERNELS", switch)
        cache = QuantCache(quant=QuantConfig(key=own(grid), value=own(grid)))
        cache.update(states[:, :, 1:], states[:, :, 1:], 0)  # what a step has added, it reads as it was
        keys, values = cache.update(states[:, :, :1], states[:, :, :1], 0)
        outs.append((F.scaled_dot_product_attention(query, keys, values, enable_gqa=True), keys + 0))
    assert torch.equal(outs[0][1], outs[1][1])
    assert torch.equal(outs[0][0], outs[1][0])
