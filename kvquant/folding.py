"""Products with quantized pages that leave their numbers as codes: scales and zero points go into the other factor.

A page is read as integers, converted to float32 and multiplied; nothing of its size is scaled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvquant.codec import Quantized


class FoldedPages:
    """Keys or values of pages, [rows, pages, Hkv, page_size, D], as factors of a product. R is any number of vectors.

    q . x = (q * scale) . number + q . zero, with number = the code less the middle of its grid, and zero = the zero
    point; groups of channels (`per_token`) are multiplied apart, since each has a scale of its own for every token.
    """

    def __init__(self, quantized: Quantized, num_rows: int) -> None:
        fmt = quantized.fmt
        by_row: Tensor = quantized.codes.unflatten(0, (num_rows, -1))
        self.num_pages = by_row.shape[1]
        scale, zero = _scale_and_zero(quantized, num_rows)
        self._is_per_channel = fmt.is_exact or fmt.granularity == "per_channel"
        groups = 1 if self._is_per_channel else scale.shape[-1]
        numbers: Tensor = fmt.grid.decode(by_row).float()
        self._codes = numbers.unflatten(4, (groups, -1)).transpose(3, 4)  # [..., groups, page_size, channels]
        # Per channel [..., 1, 1, D]; per token [..., groups, page_size, 1].
        self._scale, self._zero = (self._like_codes(x) for x in (scale, zero))

    def _like_codes(self, x: Tensor) -> Tensor:
        like: Tensor = x.unsqueeze(3) if self._is_per_channel else x.transpose(3, 4).unsqueeze(5)
        return like

    def products(self, vectors: Tensor) -> Tensor:
        """Of vectors [rows, 1 or pages, Hkv, R, D] with every token: [rows, pages, Hkv, R, page_size]"""
        split = vectors.unflatten(4, (self._codes.shape[3], -1)).transpose(3, 4)  # [..., groups, R, channels]
        if self._is_per_channel:
            out = (split * self._scale) @ self._codes.transpose(4, 5) + split @ self._zero.transpose(4, 5)
        else:
            out = (split @ self._codes.transpose(4, 5)) * self._scale.transpose(4, 5)
            out += split.sum(dim=5, keepdim=True) * self._zero.transpose(4, 5)
        total: Tensor = out.sum(dim=3)
        return total

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Of tokens with weights [rows, pages, Hkv, R, page_size]: [rows, pages, Hkv, R, D]"""
        split = weights.unsqueeze(3)  # [..., 1, R, page_size]
        if self._is_per_channel:
            out = (split @ self._codes) * self._scale + split.sum(dim=5, keepdim=True) * self._zero
        else:
            out = (split * self._scale.transpose(4, 5)) @ self._codes + split @ self._zero
        joined: Tensor = out.transpose(3, 4).flatten(4)
        return joined


def _scale_and_zero(quantized: Quantized, num_rows: int) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each group: float32 [rows, pages, Hkv, tokens or 1, groups or D]."""
    if quantized.scale is None:
        ones = torch.ones(1, 1, 1, 1, quantized.codes.shape[-1], device=quantized.codes.device)
        return ones, torch.zeros_like(ones)
    scale = quantized.scale.unflatten(0, (num_rows, -1)).to(torch.float32)
    if quantized.zero_point is None:
        return scale, torch.zeros_like(scale)
    return scale, quantized.zero_point.unflatten(0, (num_rows, -1)).to(torch.float32)
