"""How sure a mean over text is, when neighbouring tokens are alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

BLOCK = 64  # tokens that are drawn together: a few sentences, beyond which differences between caches are unrelated
DRAWS = 2000


def interval(series: Sequence[Sequence[float]], seed: int, share: float = 0.95) -> tuple[float, float]:
    """The bounds within which the mean over all tokens lies in `share` of the draws of blocks, with replacement.

    series: a value per token, one sequence per segment; no block spans two. NaN if there are no values.
    Source: Künsch, "The jackknife and the bootstrap for general stationary observations", 1989, with fixed blocks.
    """
    blocks = [part for values in series for part in torch.tensor(values, dtype=torch.float64).split(BLOCK) if len(part)]
    if not blocks:
        return float("nan"), float("nan")
    sums = torch.stack([block.sum() for block in blocks])
    sizes = torch.tensor([len(block) for block in blocks], dtype=torch.float64)
    drawn = torch.randint(len(blocks), (DRAWS, len(blocks)), generator=torch.Generator().manual_seed(seed))
    means = sums[drawn].sum(dim=1) / sizes[drawn].sum(dim=1)
    low, high = means.quantile(torch.tensor([(1 - share) / 2, (1 + share) / 2], dtype=torch.float64)).tolist()
    return low, high
