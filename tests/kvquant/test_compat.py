"""What differs between transformers' releases, on the one that is installed. `make versions` runs it on older ones."""

from __future__ import annotations

import copy

import pytest
import torch
from families import generate, prompt, tiny_model
from transformers import Cache, DynamicCache

from kvquant import QuantCache
from kvquant.compat import CACHE_ARGUMENT, TRANSFORMERS

pytestmark = pytest.mark.compat
SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}


@pytest.fixture
def model():
    return tiny_model("llama", "sdpa")


@pytest.fixture
def caches(model):
    """A DynamicCache and the cache that must equal it, filled with the same 40 tokens of two rows."""
    caches = DynamicCache(config=model.config), QuantCache(bits=16, config=model.config, **SMALL_PAGES)
    ids = torch.randint(3, 97, (2, 40))
    for cache in caches:
        next_logits(model, cache, ids)
    return caches


def next_logits(model, cache, ids):
    with torch.no_grad():
        return model(ids, use_cache=True, **{CACHE_ARGUMENT: cache}).logits


def assert_equal(model, caches):
    """Both hold the same, and go on in the same way."""
    dynamic, quant = caches
    assert quant.get_seq_length() == dynamic.get_seq_length()
    for held, expected in zip(quant.layers, dynamic.layers, strict=True):
        assert torch.equal(held.keys.materialize(), expected.keys)
        assert torch.equal(held.values.materialize(), expected.values)
    ids = torch.randint(3, 97, (dynamic.layers[0].keys.shape[0], 1))
    assert torch.equal(*(next_logits(model, cache, ids) for cache in caches))


@pytest.mark.parametrize("argument", [-1, -9, 0, *([1, 30, 40, 50] if TRANSFORMERS < (5, 15) else [])])
def test_crop(model, caches, argument):
    for cache in caches:
        cache.crop(argument)
    if caches[0].get_seq_length() == 0:
        assert caches[1].get_seq_length() == 0
    else:
        assert_equal(model, caches)


@pytest.mark.parametrize(
    ("method", "argument"),
    [
        ("reorder_cache", torch.tensor([1, 1])),
        ("batch_repeat_interleave", 3),
        ("batch_select_indices", torch.tensor([1])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_move(model, caches, method, argument):
    for cache in caches:
        getattr(cache, method)(argument)
    assert_equal(model, caches)


def test_a_reset_cache_starts_over(model, caches):
    ids = torch.randint(3, 97, (3, 40))
    caches[1].reset()
    assert caches[1].get_seq_length() == 0
    assert torch.equal(*(next_logits(model, cache, ids) for cache in (caches[1], DynamicCache())))


def test_properties_are_those_of_dynamic_cache(caches):
    names = [name for name, member in vars(Cache).items() if isinstance(member, property)]
    # Some are of static caches only; dynamic ones have no such attribute.
    dynamic, quant = ({name: getattr(cache, name, "missing") for name in names} for cache in caches)
    assert quant == dynamic
    assert dynamic["is_initialized"]


@pytest.mark.parametrize("method", ["get_max_length", "get_max_cache_shape"])
def test_there_is_no_longest_length_under_the_name_of_any_release(caches, method):
    assert caches[1].layers[0].get_max_length() == -1
    assert [getattr(cache, method)() for cache in caches if hasattr(cache, method)] in ([], [-1, -1])


def test_mask_sizes_and_iteration_are_those_of_dynamic_cache(caches):
    assert caches[1].get_mask_sizes(7, 0) == caches[0].get_mask_sizes(7, 0) == (47, 0)
    for held, expected in zip(*(list(cache) for cache in caches[::-1]), strict=True):
        assert torch.equal(held[0].materialize(), expected[0])
        assert held[2] is expected[2] is None


def test_early_initialization(model):
    cache = QuantCache(bits=16, config=model.config, **SMALL_PAGES)
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    assert cache.is_initialized
    ids = torch.randint(3, 97, (2, 40))
    assert torch.equal(next_logits(model, cache, ids), next_logits(model, DynamicCache(), ids))


@pytest.mark.parametrize(
    "options", [{"do_sample": True}, {"prefill_chunk_size": 8}, {"do_sample": True, "num_return_sequences": 3}], ids=str
)
def test_other_ways_to_generate(model, options):
    outs = []
    for cache in (DynamicCache(config=model.config), QuantCache(bits=16, **SMALL_PAGES)):
        torch.manual_seed(1)
        outs.append(generate(model, prompt(model, rows=1), cache, **options))
    assert torch.equal(outs[0].sequences, outs[1].sequences)


def test_a_prefix_is_reused_by_deepcopy(model):
    ids = prompt(model, rows=2)
    outs = []
    for cache in (DynamicCache(config=model.config), QuantCache(bits=16, **SMALL_PAGES)):
        next_logits(model, cache, ids["input_ids"][:, :30])
        outs += [generate(model, ids, copy.deepcopy(cache)).sequences for _ in range(2)]
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert torch.equal(outs[0], generate(model, ids, None).sequences)
