"""Attention over packed states, in plain PyTorch: the reference, and what runs where there is no kernel.

It is defined as: dequantize, then softmax attention in float32. Every kernel is held to this definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvquant.folding import FoldedPages
from kvquant.kernel import choose
from kvquant.rotation import rotate
from kvquant.snapshot import RowGroup, Snapshot

# Beyond this many queries, dequantizing a layer once and calling torch's own kernel is cheaper than page by page. On a
# GPU that is where they no longer fit one program, so that pages would be read again and again.
LONG_CHUNK, LONG_CHUNK_ON_GPU = 64, 8

# Pages whose numbers are unpacked at once: few enough to stay in a processor's cache, enough to keep the calls few.
_PAGES_AT_ONCE = 4


class AttentionCall(NamedTuple):
    """What attention asks of a layer's states.

    query: [B, Hq, Q, D], Hq a multiple of the layer's KV heads, query heads of one KV head next to each other.
    mask: None, bool (True attends) or float (added to scores), broadcastable to [B, Hq, Q, KV].
    is_causal: query i attends to columns 0..i, as torch defines it.
    scale: factor of the scores, 1 / sqrt(D) if None.
    softcap: c in c * tanh(score / c), before the mask.
    sink_logits: [Hq], a score per head that takes part in the softmax without a value (gpt-oss).
    """

    query: Tensor
    mask: Tensor | None = None
    is_causal: bool = False
    scale: float | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether F.scaled_dot_product_attention can express it."""
        return self.softcap is None and self.sink_logits is None


def attend(states: Snapshot, call: AttentionCall) -> Tensor:
    """The attention output [B, Hq, Q, Dv] in the query's dtype.

    Queries whose columns are all masked give zeros. Gradients reach the query, mask and sink logits, and the chunk.
    Raises ValueError if the heads, batch or mask do not fit the states.
    """
    _check(states, call)
    if states.is_exact or _wants_gradient(states, call):
        states = Snapshot.of(states.columns(0), states.columns(1))
    if call.is_plain and (states.is_exact or _is_long(call)):
        return _attend_dequantized(states, call)
    kernel = None if states.is_exact else choose(states, call)
    if kernel is not None:
        return kernel.run(states, call)
    if states.hidden:
        call = with_hidden(call, states)
    with torch.autocast(call.query.device.type, enabled=False):  # which would round the products to 16 bits
        return _attend_plainly(states, call)


def _is_long(call: AttentionCall) -> bool:
    q_len = call.query.shape[-2]
    return q_len > LONG_CHUNK_ON_GPU and (q_len > LONG_CHUNK or call.query.device.type != "cpu")


def _attend_plainly(states: Snapshot, call: AttentionCall) -> Tensor:
    out = call.query.new_empty(*call.query.shape[:-1], states.chunk.value.shape[-1])
    groups = states.groups()
    if len(groups) == 1:
        return _attend_group(states, groups[0], call).to(out.dtype)
    for group in groups:
        out[list(group.rows)] = _attend_group(states, group, call).to(out.dtype)
    return out


def _wants_gradient(states: Snapshot, call: AttentionCall) -> bool:
    if not torch.is_grad_enabled():
        return False
    inputs = (call.query, call.mask, call.sink_logits, *states.chunk)
    return any(x is not None and x.requires_grad for x in inputs)


def _check(states: Snapshot, call: AttentionCall) -> None:
    batch, heads, _, dim = call.query.shape
    held_batch, held_heads, _, held_dim = states.chunk.key.shape
    if batch != held_batch or heads % held_heads:
        raise ValueError(
            f"query of {batch} rows and {heads} heads does not fit states of {held_batch} rows and {held_heads} "
            "KV heads: rows must be equal and query heads a multiple of KV heads"
        )
    if dim != held_dim:
        raise ValueError(f"query has head_dim {dim}, the keys have {held_dim}")
    if call.sink_logits is not None and call.sink_logits.shape != (heads,):
        raise ValueError(
            f"sink_logits have shape {tuple(call.sink_logits.shape)}, not one for each of {heads} query heads"
        )
    if call.softcap is not None and not call.softcap > 0:
        raise ValueError(f"softcap={call.softcap} must be above 0, or None for none")
    if call.mask is not None:
        _check_mask(call.mask, (batch, heads, call.query.shape[2]), states.visible_len)


def _check_mask(mask: Tensor, rows: tuple[int, int, int], kv_len: int) -> None:
    if mask.dim() == 0 or mask.shape[-1] != kv_len:
        raise ValueError(f"mask of shape {tuple(mask.shape)} does not cover the {kv_len} columns of the states")
    sizes = (1,) * (4 - mask.dim()) + tuple(mask.shape[:-1])
    if mask.dim() > 4 or any(size not in (1, full) for size, full in zip(sizes, rows, strict=True)):
        raise ValueError(f"mask of shape {tuple(mask.shape)} cannot be broadcast to {[*rows, kv_len]}")


def with_hidden(call: AttentionCall, states: Snapshot) -> AttentionCall:
    """The call with a mask that also covers the hidden columns, and hides them."""
    mask, hidden = call.mask, states.hidden
    if mask is None:
        mask = torch.ones(call.query.shape[2], states.visible_len, dtype=torch.bool, device=call.query.device)
        mask = mask.tril() if call.is_causal else mask[:1]
    mask = F.pad(mask, (hidden, 0), value=False if mask.dtype == torch.bool else -torch.inf)
    return call._replace(mask=mask, is_causal=False)


def _attend_dequantized(states: Snapshot, call: AttentionCall) -> Tensor:
    """torch's attention over one layer's states, dequantized as a whole."""
    dtype = call.query.dtype
    key, value = states.columns(0).to(dtype), states.columns(1).to(dtype)
    return F.scaled_dot_product_attention(
        *_with_equal_heads(call.query, key, value), attn_mask=call.mask, is_causal=call.is_causal, scale=call.scale
    )


def _with_equal_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n_rep = query.shape[1] // key.shape[1]
    return query, key.repeat_interleave(n_rep, dim=1), value.repeat_interleave(n_rep, dim=1)


class _ExactBlock(NamedTuple):
    """Keys and values of some columns of a group, float32 [rows, Hkv, t, D], in the model's basis."""

    columns: Tensor  # [t]
    key: Tensor
    value: Tensor
    key_rotated: bool = False
    value_rotated: bool = False

    def scores(self, query: Tensor) -> Tensor:
        """Of queries [rows, Hkv, R, D]: [rows, Hkv, R, t]"""
        return query @ self.key.transpose(-1, -2)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Of weights [rows, Hkv, R, t]: [rows, Hkv, R, Dv]"""
        return weights @ self.value


class _PageBlock(NamedTuple):
    """Some pages of a group, in the basis in which they are stored. Scales are folded into queries and weights."""

    columns: Tensor  # [t]
    key: FoldedPages
    value: FoldedPages
    key_rotated: bool
    value_rotated: bool

    def scores(self, query: Tensor) -> Tensor:
        by_page = self.key.products(query.unsqueeze(1))  # [rows, pages, Hkv, R, page_size]
        joined: Tensor = by_page.permute(0, 2, 3, 1, 4).flatten(3)
        return joined

    def weighted_sum(self, weights: Tensor) -> Tensor:
        by_page = weights.unflatten(3, (self.value.num_pages, -1)).permute(0, 3, 1, 2, 4)
        return self.value.weighted_sum(by_page).sum(dim=1)


def _attend_group(states: Snapshot, group: RowGroup, call: AttentionCall) -> Tensor:
    """Attention of one group of rows, block by block: float32 [rows, Hq, Q, Dv].

    Rotated values are summed in their own basis and rotated back once. Source of the running softmax: Milakov and
    Gimelshein, 2018, as used by FlashAttention (Dao et al., 2022).
    """
    query = _rows_of(call.query, group.rows)
    num_kv_heads = states.chunk.key.shape[1]
    scale = call.query.shape[-1] ** -0.5 if call.scale is None else call.scale
    query = query.to(torch.float32).unflatten(1, (num_kv_heads, -1)) * scale  # [rows, Hkv, n_rep, Q, D]
    heads_and_queries = query.shape[2:4]
    query = query.flatten(2, 3)  # [rows, Hkv, n_rep * Q, D]
    softmax = _RunningSoftmax(query, states.chunk.value.shape[-1], _sink_logits(call, num_kv_heads))
    rotated_query = rotate(query) if group.num_pages else query
    for block in _blocks(states, group):
        scores = block.scores(rotated_query if block.key_rotated else query)
        scores = _masked(scores.unflatten(2, heads_and_queries), block.columns, group, call).flatten(2, 3)
        softmax.add(scores, block.weighted_sum, block.value_rotated)
    out: Tensor = softmax.output().unflatten(2, heads_and_queries)
    return out.flatten(1, 2)


def _blocks(states: Snapshot, group: RowGroup) -> Iterator[_ExactBlock | _PageBlock]:
    """The exact states of a group as one block, then its pages in runs."""
    config, device = states.config, states.chunk.key.device
    segments = states.exact_segments(group)
    if segments:
        columns = torch.cat([torch.arange(s.first, s.first + s.states.num_tokens, device=device) for s in segments])
        key, value = (torch.cat([s.states[part] for s in segments], dim=2).to(torch.float32) for part in (0, 1))
        yield _ExactBlock(columns, key, value)
    start, size = group.start + config.sinks, config.page_size
    rotated = [config.codec(part).rotated for part in (0, 1)]
    for first in range(0, group.num_pages, _PAGES_AT_ONCE):
        last = min(first + _PAGES_AT_ONCE, group.num_pages)
        columns = torch.arange(start + first * size, start + last * size, device=device)
        pages = [FoldedPages(part, len(group.rows)) for part in states.quantized_pages(group, first, last)]
        yield _PageBlock(columns, pages[0], pages[1], rotated[0], rotated[1])


def _masked(scores: Tensor, columns: Tensor, group: RowGroup, call: AttentionCall) -> Tensor:
    """Scores [rows, Hkv, n_rep, Q, t] after softcap, mask and causality."""
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.is_causal:
        scores = scores.masked_fill(
            columns > torch.arange(scores.shape[-2], device=columns.device)[:, None], -torch.inf
        )
    if call.mask is None:
        return scores
    mask = call.mask[(None,) * (4 - call.mask.dim())]
    mask = (mask if mask.shape[0] == 1 else _rows_of(mask, group.rows))[..., columns]
    mask = mask.unflatten(1, (1, 1) if mask.shape[1] == 1 else scores.shape[1:3])
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, -torch.inf)
    wide = mask.to(torch.promote_types(mask.dtype, scores.dtype))
    bias = wide.clamp_min(torch.finfo(scores.dtype).min).to(scores.dtype)  # what is finite stays so
    masked: Tensor = (scores + bias).masked_fill(mask == -torch.inf, -torch.inf)  # also where a score is NaN
    return masked


class _RunningSoftmax:
    """Softmax-weighted sum of values that arrive block by block."""

    def __init__(self, query: Tensor, value_dim: int, sink_logits: Tensor | None) -> None:
        shape = query.shape[:-1]
        if sink_logits is None:
            self._max, self._sum = query.new_full(shape, -torch.inf), query.new_zeros(shape)
        else:
            self._max, self._sum = sink_logits.expand(shape).clone(), query.new_ones(shape)
        self._plain, self._rotated = query.new_zeros(*shape, value_dim), query.new_zeros(*shape, value_dim)
        self._has_rotated = False

    def add(self, scores: Tensor, weighted_sum: Callable[[Tensor], Tensor], is_rotated: bool) -> None:
        """Scores [..., Q, t], and what sums their values for weights of that shape; -inf leaves a column out."""
        maximum = torch.maximum(self._max, scores.amax(dim=-1))
        shift = maximum.masked_fill(maximum == -torch.inf, 0.0)  # all masked so far: exp(-inf - 0) = 0
        weights, keep = torch.exp(scores - shift.unsqueeze(-1)), torch.exp(self._max - shift)
        self._sum = self._sum * keep + weights.sum(dim=-1)
        self._plain, self._rotated = self._plain * keep.unsqueeze(-1), self._rotated * keep.unsqueeze(-1)
        if is_rotated:
            self._rotated, self._has_rotated = self._rotated + weighted_sum(weights), True
        else:
            self._plain = self._plain + weighted_sum(weights)
        self._max = maximum

    def output(self) -> Tensor:
        total = self._plain + rotate(self._rotated) if self._has_rotated else self._plain
        return total / self._sum.masked_fill(self._sum == 0, 1.0).unsqueeze(-1)


def _sink_logits(call: AttentionCall, num_kv_heads: int) -> Tensor | None:
    """[1, Hkv, n_rep * Q]"""
    if call.sink_logits is None:
        return None
    logits = call.sink_logits.to(torch.float32).view(1, num_kv_heads, -1, 1)
    return logits.expand(-1, -1, -1, call.query.shape[2]).flatten(2)


def _rows_of(x: Tensor, rows: tuple[int, ...]) -> Tensor:
    return x if len(rows) == x.shape[0] else x[list(rows)]
