"""Where the rows of a padded batch start: what attention masks and position ids tell."""

from __future__ import annotations

import torch
from torch import Tensor


def row_starts(mask: Tensor | None, batch_size: int, kv_len: int) -> list[int] | None:
    """The first column that each row's mask [B or 1, H, Q, KV] lets any query attend to; `kv_len` where there is none.

    None without a mask, or if it does not cover `kv_len` columns.
    """
    if mask is None or mask.dim() != 4 or mask.shape[-1] != kv_len:
        return None
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    columns = allowed.any(dim=1).any(dim=1)  # [B or 1, KV]
    first = torch.where(columns.any(dim=-1), columns.int().argmax(dim=-1), kv_len)
    starts: list[int] = first.expand(batch_size).tolist()
    return starts


def padding_of(positions: list[int]) -> int:
    """How many tokens of left padding a row's position ids show.

    generate() numbers a padded row c, .., c, 0, 1, 2, .. with c = 0 or, by another custom, 1. Of a row of nothing but
    zeros the last may be a token. Any other sequence counts as all real.
    """
    if len(positions) > 1 and set(positions) == {1}:
        return len(positions)
    start = max((i for i, position in enumerate(positions) if position == 0), default=0)
    is_padded = positions[start:] == list(range(len(positions) - start)) and set(positions[:start]) in ({0}, {1})
    return start if is_padded else 0
