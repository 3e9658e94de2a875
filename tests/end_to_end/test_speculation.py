"""Drafts that are accepted and rejected at random leave no trace, on the real model."""

import random

import pytest
import torch

from kvquant import QuantCache

pytestmark = pytest.mark.slow

ROUNDS = 200
MOST_DRAFTED = 8


@torch.inference_mode()
def greedy(model, prompt, cache, count):
    """The `count` tokens that follow the prompt, one by one."""
    tokens, new = [], prompt
    while len(tokens) < count:
        new = model(new, cache=cache, use_cache=True, logits_to_keep=1).logits.argmax(dim=-1)
        tokens.append(new.item())
    return tokens


@torch.inference_mode()
def drafted(model, prompt, cache, expected):
    """The tokens of ROUNDS rounds, in each of which up to 8 are drafted; wrong ones are cropped away."""
    choose, vocabulary = random.Random(0), model.config.vocab_size
    tokens = greedy(model, prompt, cache, 1)
    cropped = []
    for _ in range(ROUNDS):
        draft = expected[len(tokens) : len(tokens) + choose.randint(0, MOST_DRAFTED)]
        wrong = choose.randint(0, len(draft) // 2)
        draft = draft[:wrong] + [choose.randrange(vocabulary) for _ in draft[wrong:]]
        logits = model(torch.tensor([[tokens[-1], *draft]]), cache=cache, use_cache=True).logits
        verified = logits.argmax(dim=-1)[0].tolist()
        accepted = next((i for i, token in enumerate(draft) if token != verified[i]), len(draft))
        tokens += verified[: accepted + 1]
        cropped.append(len(draft) - accepted)
        cache.crop(-cropped[-1])
    assert set(cropped) == set(range(MOST_DRAFTED + 1))
    return tokens


@pytest.mark.parametrize("options", [{}, {"residual_length": 0, "page_size": 16}], ids=["default", "into_pages"])
def test_rejected_drafts_leave_the_tokens_of_greedy_decoding(smollm2, text_ids, options):
    prompt = text_ids[:, 20_000:20_310]
    expected = greedy(smollm2.model, prompt, QuantCache(bits=4, **options), 3 * ROUNDS)
    cache = QuantCache(bits=4, **options)
    tokens = drafted(smollm2.model, prompt, cache, expected)
    assert tokens == expected[: len(tokens)]
    assert len(tokens) < len(expected)
    assert cache.get_seq_length() == 310 + len(tokens) - 1
