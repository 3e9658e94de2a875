"""A prefix that was computed once, continued by a batch of several rows."""

import copy

import pytest
import torch
from families import tiny_model
from transformers import DynamicCache

from kvquant import QuantCache
from kvquant.pages import PagePool

SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}


def prefix_of(model, ids, cache):
    with torch.no_grad():
        model(ids, cache=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}, {"num_beams": 2, "num_return_sequences": 2}],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 2])
def test_a_batch_that_grows_continues_what_it_would_have_computed_itself(family, options, rows):
    model = tiny_model(family, "sdpa")
    ids = torch.randint(2, 97, (rows, 60))
    mask = torch.ones_like(ids)
    options = {"do_sample": False, "max_new_tokens": 20} | options
    outs = []
    prefix = prefix_of(model, ids[:, :50], QuantCache(bits=16, config=model.config, **SMALL_PAGES))
    for cache in (DynamicCache(config=model.config), copy.deepcopy(prefix)):
        torch.manual_seed(1)
        outs.append(model.generate(ids, attention_mask=mask, cache=cache, **options))
    assert torch.equal(*outs)
    assert prefix.get_seq_length() == 50


def test_growing_copies_no_page(monkeypatch):
    model, ids = tiny_model("llama", "sdpa"), torch.randint(2, 97, (1, 60))
    cache = prefix_of(model, ids, QuantCache(bits=4, **SMALL_PAGES))
    monkeypatch.setattr(PagePool, "write", None)  # any call would fail
    with torch.no_grad():
        model(torch.full((5, 1), 3), cache=cache, use_cache=True)
    rows = cache.layers[0].states.snapshot().rows
    assert len(rows) == 5
    assert len({row.pages for row in rows}) == 1


def test_a_batch_that_is_no_multiple_is_refused():
    cache = QuantCache(bits=4, **SMALL_PAGES)
    cache.update(*torch.randn(2, 2, 2, 20, 16), 0)
    with pytest.raises(ValueError, match=r"of shape \(3, 2, 1, 16\) .* do not continue a cache of \[2, 2, \*, 16\]"):
        cache.update(*torch.randn(2, 3, 2, 1, 16), 0)


def test_a_cache_grows_again_after_rows_were_dropped():
    cache = QuantCache(bits=4, **SMALL_PAGES)
    cache.update(*torch.randn(2, 3, 2, 20, 16), 0)
    cache.batch_select_indices(torch.tensor([1]))
    cache.update(*torch.randn(2, 3, 2, 1, 16), 0)
    assert cache.layers[0].keys.shape == (3, 2, 21, 16)
