"""bits=16 is DynamicCache to the bit: whatever else the machinery does, it must not change a number."""

import pytest
import torch
from families import CASES, tiny_model
from transformers import DynamicCache

from kvquant import QuantCache


def assert_identical(family, attention, padding, new_tokens, **options):
    model = tiny_model(family, attention)
    ids = torch.randint(2, 97, (2, 40))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    caches = DynamicCache(config=model.config), QuantCache(bits=16, config=model.config, **options)
    outs = [
        model.generate(
            ids, attention_mask=mask, cache=cache, max_new_tokens=new_tokens, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )
        for cache in caches
    ]  # fmt: skip
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert all(torch.equal(*steps) for steps in zip(outs[0].logits, outs[1].logits, strict=True))
    assert len(outs[0].logits) == new_tokens
    return caches[1]


@pytest.mark.parametrize(("family", "attention"), CASES)
@pytest.mark.parametrize("padding", [0, 13])
def test_identity_with_small_pages(family, attention, padding):
    assert_identical(family, attention, padding, new_tokens=24, sinks=2, residual_length=5, page_size=8)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "attention"), CASES)
@pytest.mark.parametrize("padding", [0, 13])
def test_identity_over_300_tokens_and_two_seals(family, attention, padding):
    cache = assert_identical(family, attention, padding, new_tokens=300)
    rows = cache.layers[-1].states.snapshot().rows
    assert len(rows[1].pages) == 2
