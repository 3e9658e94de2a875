"""MLA: what is cached as values is the RoPE part of the keys, and stays exact."""

import pytest
import torch
from families import tiny_model
from transformers import DynamicCache

from kvquant import QuantCache, formats

SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}


def filled(cache):
    model, ids = (
        tiny_model("deepseek_v3", "sdpa"),
        torch.randint(2, 97, (2, 60), generator=torch.Generator().manual_seed(0)),
    )
    with torch.no_grad():
        logits = [model(chunk, cache=cache, use_cache=True).logits for chunk in ids.split(10, dim=1)]
    return cache, torch.cat(logits, dim=1)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_latents_are_packed_and_their_rope_part_is_exact(bits):
    exact, full = filled(DynamicCache())
    cache, logits = filled(QuantCache(bits=bits, **SMALL_PAGES))
    first = cache.layers[0]  # later ones see other hidden states
    assert first.states.config.value is formats.IDENTITY
    assert len(first.states.snapshot().rows[0].pages) == 6
    assert torch.equal(first.values.materialize(), exact.layers[0].values)
    assert not torch.equal(first.keys.materialize(), exact.layers[0].keys)
    assert not torch.equal(logits, full)


def test_the_summary_says_that_the_rope_part_is_exact():
    cache, _ = filled(QuantCache(bits=4, **SMALL_PAGES))
    assert str(cache.summary()) == "2 layers: 2 full attention, packed (int4_per_channel / identity)"


def test_the_rope_part_is_packed_on_request():
    for cache in (filled(QuantCache(bits=4, quantize_rope=on, **SMALL_PAGES))[0] for on in (False, True)):
        states = cache.layers[0].states
        held = cache.layers[0].values.materialize()
        assert states.config.value.is_exact is not cache.quant.quantize_rope
        assert torch.equal(held, filled(DynamicCache())[0].layers[0].values) is not cache.quant.quantize_rope


def test_one_wide_kv_head_is_not_taken_for_latents():
    cache = QuantCache(bits=4, **SMALL_PAGES)
    cache.update(*torch.randn(2, 1, 1, 5, 16), 0)  # multi-query attention
    cache.update(torch.randn(1, 1, 5, 16), torch.randn(1, 1, 5, 32), 1)
    cache.update(torch.randn(1, 4, 5, 24), torch.randn(1, 4, 5, 16), 2)  # expanded MLA, before transformers 5.15
    assert all(layer.states.config == cache.quant for layer in cache.layers)
