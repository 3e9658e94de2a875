"""What every attention kernel must satisfy: the definition of attention, for each format, shape and option."""

from __future__ import annotations

import math

import torch

from kvquant.states import LayerStates


def states_for(config, shape, starts=None, dtype=torch.float32, q_len=1, outlier=20):
    """A snapshot of (rows, KV heads, tokens, head_dim) random states, of which the last q_len are the chunk."""
    rows, heads, tokens, dim = shape
    key, value = (torch.randn(rows, heads, tokens, dim).to(dtype) for _ in range(2))
    key[..., 3] *= outlier
    states = LayerStates(config, key, value)
    states.append(key[:, :, :-q_len], value[:, :, :-q_len])
    states.settle(starts=starts)
    return states.append(key[:, :, -q_len:], value[:, :, -q_len:])


def definition(snapshot, call):
    """Attention in float64 on the dequantized states, in one piece."""
    exact = [_columns(snapshot, part)[:, :, snapshot.hidden :] for part in (0, 1)]
    n_rep = call.query.shape[1] // exact[0].shape[1]
    key, value = (states.repeat_interleave(n_rep, dim=1) for states in exact)
    scale = key.shape[-1] ** -0.5 if call.scale is None else call.scale
    scores = call.query.double() @ key.transpose(-1, -2) * scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if call.mask is not None:
        is_bool = call.mask.dtype == torch.bool
        scores = scores.masked_fill(~call.mask, -math.inf) if is_bool else scores + call.mask.double()
    if call.sink_logits is not None:
        sink = call.sink_logits.double().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sink), dim=-1)
    return scores.softmax(dim=-1).nan_to_num(0.0)[..., : key.shape[2]] @ value


def _columns(snapshot, part):
    """The states in float64, page contents not rounded to the model's dtype."""
    out = snapshot.columns(part, 0).double()
    codec, config = snapshot.config.codec(part), snapshot.config
    for group in snapshot.groups():
        if group.num_pages:
            pages = codec.decode(snapshot.quantized_pages(group, 0, group.num_pages)[part])
            states = codec.restore(pages).double().unflatten(0, (len(group.rows), -1)).transpose(1, 2).flatten(2, 3)
            first = group.start + config.sinks
            rows = torch.tensor(group.rows)
            out[rows, :, first : first + states.shape[2]] = states
    return out


def left_padding_mask(starts, kv_len):
    return (torch.arange(kv_len) >= torch.tensor(starts)[:, None])[:, None, None]
