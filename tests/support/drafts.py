"""Decoding with drafts that are accepted and rejected at random."""

import random

import torch

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
def drafted(model, prompt, cache, expected, rounds):
    """The tokens of some rounds, in each of which up to 8 are drafted; wrong ones are cropped away."""
    choose, vocabulary = random.Random(0), model.config.vocab_size
    tokens = greedy(model, prompt, cache, 1)
    cropped = []
    for _ in range(rounds):
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
