"""Hadamard rotation over head_dim. It spreads outlier channels over all channels, so that one scale fits them all.

Source: QuaRot (Ashkboos et al., 2024), section 4, and SAW-INT4 (2026) for rotating keys after RoPE.
"""

from __future__ import annotations

import torch
from torch import Tensor


def block_size(head_dim: int) -> int:
    """The size of the Hadamard blocks for `head_dim` channels: the largest power of two that divides it."""
    return head_dim & -head_dim


def rotate(x: Tensor) -> Tensor:
    """x [..., D] in the rotated basis: float32, block-diagonal Sylvester-Hadamard over D, scaled to be orthogonal.

    The matrix is symmetric and its own inverse, so the same call rotates back, and (rotate q) . (rotate k) = q . k.
    It is computed as butterflies of distance 1, 2, 4, ... in float32: the order is part of the format, since a sealed
    page must not depend on how many tokens were rotated together or on which device.
    """
    if x.numel() == 0:
        return x.to(torch.float32)
    n = block_size(x.shape[-1])
    y, spare = x.to(torch.float32, copy=True).contiguous(), torch.empty(x.shape, dtype=torch.float32, device=x.device)
    distance = 1
    while distance < n:
        pair = y.view(*x.shape[:-1], -1, 2, distance)
        out = spare.view(*x.shape[:-1], -1, 2, distance)
        torch.add(pair[..., 0, :], pair[..., 1, :], out=out[..., 0, :])
        torch.sub(pair[..., 0, :], pair[..., 1, :], out=out[..., 1, :])
        y, spare = spare, y
        distance *= 2
    return y.mul_(n**-0.5)
