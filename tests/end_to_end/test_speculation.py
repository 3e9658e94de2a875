"""Drafts that are accepted and rejected at random leave no trace, on the real model."""

import pytest
from drafts import drafted, greedy

from kvquant import QuantCache

pytestmark = pytest.mark.slow

ROUNDS = 200


def test_rejected_drafts_leave_the_tokens_of_greedy_decoding(smollm2, text_ids):
    prompt = text_ids[:, 20_000:20_310]
    expected = greedy(smollm2.model, prompt, QuantCache(bits=4), 2 * ROUNDS + 100)
    cache = QuantCache(bits=4)
    tokens = drafted(smollm2.model, prompt, cache, expected, ROUNDS)
    assert tokens == expected[: len(tokens)]
    assert len(tokens) <= len(expected)
    assert cache.get_seq_length() == 310 + len(tokens) - 1
