"""The attention function behind `attn_implementation="kvquant"`.

The stock sdpa implementation already reads packed states. This one also does what it cannot: softcap and sink logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvquant import compat
from kvquant.attention import AttentionCall, attend
from kvquant.snapshot import Snapshot
from kvquant.transport import learn_starts, paired

NAME = "kvquant"


def register() -> None:
    """Makes `attn_implementation="kvquant"` known to transformers, with its mask function. May be called again."""
    compat.register_attention(NAME, attention_forward)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query [B, Hq, Q, D] over key [B, Hkv, T, D] and value [B, Hkv, T, Dv], lazy or plain.

    Returns the output [B, Q, Hq, Dv] and no weights. Raises NotImplementedError for attention dropout.
    """
    if dropout > 0.0:
        raise NotImplementedError(f"attention dropout={dropout} is not implemented by {NAME}; train with sdpa or eager")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    q_len, kv_len = query.shape[2], key.shape[2]
    mask = attention_mask
    is_causal = is_causal and mask is None and q_len > 1
    if is_causal and (q_len < kv_len or position_bias is not None):
        # The queries are the last ones. torch's own is_causal would take them for the first.
        mask, is_causal = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device).tril(kv_len - q_len), False
    if position_bias is not None:
        mask = _with_bias(position_bias, mask)
    pair = paired(key, value)
    # contiguous() also dequantizes a lazy tensor that has come without its partner.
    states = Snapshot.of(key.contiguous(), value.contiguous()) if pair is None else pair[1]
    out = attend(states, AttentionCall(query, mask, is_causal, scaling, softcap, s_aux))
    if pair is not None:
        learn_starts(*pair, attention_mask)
    return out.transpose(1, 2).contiguous(), None


def _with_bias(bias: Tensor, mask: Tensor | None) -> Tensor:
    """One float mask of a position bias (T5) and what else restricts attention."""
    if mask is None:
        return bias
    return bias.masked_fill(~mask, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask
