"""Caches filled with random states, and all that they hold, in a form that can be compared bit for bit."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch.nn import functional as F
from transformers.cache_utils import DynamicLayer

from kvquant import QuantCache, QuantLayer

SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 32}
TOKENS = 200


def random_states(rows, tokens, dim=64, heads=2, dtype=torch.float32):
    return torch.randn(rows, heads, tokens, dim).to(dtype)


def fill(cache, tokens=TOKENS, rows=2, layers=2, dims=(64, 64), dtype=torch.float32):
    for layer in range(layers):
        cache.update(*(random_states(rows, tokens, dim, dtype=dtype) for dim in dims), layer)
    return cache


def bits(x):
    """Whatever is held, NaN included, in a form that can be compared."""
    return x.dtype, tuple(x.shape), x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def content(cache):
    """All that the packed layers hold, with page tables as numbers of distinct pages."""
    held = []
    for layer in cache.layers:
        states = layer.states.snapshot()
        pages = list(dict.fromkeys(page for row in states.rows for page in row.pages))
        tables = [[pages.index(page) for page in row.pages] for row in states.rows]
        records = [bits(states.pool.read(pages))] if pages else []
        exact = [bits(part) for part in (*states.tail, *(states.sinks or ()))]
        held.append((states.config, states.settled, [row.start for row in states.rows], tables, records, exact))
    return held


def attention(cache, steps=40):
    """Attention over the cache as it grows, and after a crop, a reordering and in a deep copy."""
    torch.manual_seed(1)
    outs = []
    for step in range(steps):
        if step == steps // 2:
            cache.crop(-50)
            cache.reorder_cache(torch.tensor([1, 1]))
            cache = copy.deepcopy(cache)
        for i, layer in enumerate(cache.layers):
            like = layer.states.snapshot().chunk
            new = [random_states(2, 1, x.shape[3], x.shape[1], x.dtype) for x in like]
            query = random_states(2, 1, like.key.shape[3], 2 * like.key.shape[1], like.key.dtype)
            key, value = cache.update(*new, i)
            value = value.to(like.key.dtype) if value.dtype != like.key.dtype else value
            outs.append(F.scaled_dot_product_attention(query, key, value, enable_gqa=True))
    return outs


def assert_same(loaded, cache):
    assert content(loaded) == content(cache)
    assert loaded.quant == cache.quant
    assert replace(loaded.memory(), reserved=0) == replace(cache.memory(), reserved=0)
    for ours, theirs in zip(attention(loaded), attention(cache), strict=True):
        assert bits(ours) == bits(theirs)


def small_cache():
    """A file of few bytes with everything in it."""
    cache = QuantCache(bits=(4, 16), sinks=2, residual_length=3, page_size=8)
    cache.layers = [QuantLayer(cache.quant), DynamicLayer()]
    fill(cache, 30, rows=2, dims=(8, 4), dtype=torch.bfloat16)
    cache.batch_repeat_interleave(2)
    return cache


def same_cache(loaded, cache):
    ours, theirs = loaded.layers[1], cache.layers[1]
    packed = [copy.copy(each) for each in (loaded, cache)]
    for each in packed:
        each.layers = each.layers[:1]
    return content(packed[0]) == content(packed[1]) and bits(ours.keys) == bits(theirs.keys)
