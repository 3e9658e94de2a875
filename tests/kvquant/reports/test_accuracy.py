"""Public reports of numbers that came back wrong. Each test is named after the symptom and cites its thread."""

import pytest
import torch
from conformance import definition
from torch.nn import functional as F

from kvquant import AttentionCall, QuantCache, QuantConfig, attend
from kvquant.formats import FP8_E4M3_PER_CHANNEL, INT4_PER_TOKEN
from kvquant.snapshot import Snapshot
from kvquant.testing import relative_errors

SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}


def held(cache, key, value=None):
    """The keys and values of a one-layer cache after these states, one settled chunk."""
    cache.update(key, key if value is None else value, 0)
    layer = cache.layers[0]
    layer.settle()
    return layer.keys.materialize(), layer.values.materialize()


def rms(x):
    return x.square().mean().sqrt().item()


@pytest.mark.parametrize("rotation", [True, False])
def test_one_outlier_channel_leaves_the_others_accurate(rotation):
    """https://github.com/huggingface/transformers/issues/35185: int4 keys of Qwen2.5 fail 120 of 120 questions."""
    key = torch.randn(1, 2, 132, 64)
    key[..., 5] += 60
    keys, _ = held(QuantCache(bits=4, sinks=4, residual_length=0, rotation=rotation), key)
    error = (keys - key)[:, :, 4:]
    assert (error != 0).any(dim=-1).all()  # all 128 are packed
    # 128 normal numbers span some 5.4; in 15 steps of 0.36 they round with an error of 0.36 / sqrt(12) = 0.10. Scales
    # per token have to span 60 in the same 15 steps, for an error above 1.
    assert rms(error[..., torch.arange(64) != 5]) < 0.15


def test_a_huge_first_token_is_exact_and_costs_the_others_nothing():
    """The same thread: the first token, which heads attend to for want of another, was rounded with all others."""
    key = torch.randn(1, 2, 132, 64)
    without = held(QuantCache(bits=4, sinks=4, residual_length=0), key)
    loud = key.clone()
    loud[:, :, 0] *= 100
    for before, after in zip(without, held(QuantCache(bits=4, sinks=4, residual_length=0), loud), strict=True):
        assert torch.equal(after[:, :, :4], loud[:, :, :4])
        assert torch.equal(after[:, :, 4:], before[:, :, 4:])


@pytest.mark.parametrize("fmt", [None, FP8_E4M3_PER_CHANNEL], ids=["fp8", "fp8 per channel"])
def test_a_later_token_that_is_eight_times_larger_is_not_clipped(fmt):
    """https://github.com/huggingface/transformers/pull/48677: its scale is that of the first tokens, for good."""
    quant = QuantConfig.preset("fp8", **SMALL_PAGES) if fmt is None else QuantConfig(fmt, fmt, **SMALL_PAGES)
    cache = QuantCache(quant=quant)
    key = torch.randn(1, 2, 60, 64)
    key[:, :, 40] *= 8
    for tokens in key.split(1, dim=2):
        keys, values = held(cache, tokens)
    for states in (keys, values):
        error = (states - key)[:, :, 40]
        assert (error != 0).any()
        # Three bits of mantissa round a number by 1/16 of itself at most, and rotation keeps the norms.
        assert (error.norm(dim=-1) <= key[:, :, 40].norm(dim=-1) / 16).all()


@pytest.mark.parametrize("bits", [8, 4, 2, "fp8"])
@pytest.mark.parametrize("head_dim", [40, 72, 80, 96])
def test_head_dims_that_no_group_of_64_divides(bits, head_dim):
    """https://github.com/dropbox/hqq/issues/124: groups of 64 do not fit such heads, nor a prompt of 7 tokens."""
    cache = QuantCache(bits=bits, **SMALL_PAGES)
    key, value = torch.randn(2, 1, 2, 60, head_dim)
    keys, values = held(cache, key[:, :, :7], value[:, :, :7])
    assert torch.equal(keys, key[:, :, :7])
    assert torch.equal(values, value[:, :, :7])
    for i in range(7, 59):
        held(cache, key[:, :, i : i + 1], value[:, :, i : i + 1])
    pair = cache.update(key[:, :, 59:], value[:, :, 59:], 0)
    query = torch.randn(1, 4, 1, head_dim)
    out = F.scaled_dot_product_attention(query, *pair, enable_gqa=True)
    snapshot = cache.layers[0].states.snapshot()
    assert len(snapshot.rows[0].pages) == (60 - 2 - 5) // 8
    assert relative_errors(out, definition(snapshot, AttentionCall(query))).rms < 1e-3
    # Groups of up to 64 normal numbers span some 5, which 2**bits - 1 steps round. Three bits of mantissa, by 1/16.
    bound = 1 / 16 / 3**0.5 if bits == "fp8" else 5 / (2**bits - 1) / 12**0.5
    assert all(rms(got.materialize() - given) < bound for got, given in zip(pair, (key, value), strict=True))


@pytest.mark.parametrize("bits", [8, 4, 2, "fp8", (8, 4)])
def test_tokens_do_not_decay_with_every_further_step(bits):
    """https://github.com/huggingface/transformers/pull/48700: packed anew with every flush, they drift."""
    cache = QuantCache(bits=bits, **SMALL_PAGES)
    before = held(cache, torch.randn(1, 2, 71, 64), torch.randn(1, 2, 71, 64))
    for _ in range(200):
        after = held(cache, torch.randn(1, 2, 1, 64))
    for states, then in zip(after, before, strict=True):
        assert torch.equal(states[:, :, :66], then[:, :, :66])  # 2 sinks and 8 pages


@pytest.mark.parametrize("bits", [8, 4, 2, "fp8", (8, 4)])
def test_a_row_is_stored_the_same_whatever_shares_its_batch(bits):
    """https://github.com/jy-yuan/KIVI/issues/18: other results in a batch. In some formats rows share their groups."""
    rows = torch.randn(2, 2, 60, 64)
    alone = held(QuantCache(bits=bits, **SMALL_PAGES), rows[:1])
    rows[1] *= 50
    together = held(QuantCache(bits=bits, **SMALL_PAGES), rows)
    assert all(torch.equal(both[:1], one) for both, one in zip(together, alone, strict=True))


@pytest.mark.parametrize("bits", [8, "fp8"])
def test_attention_sinks_survive_eight_bits(bits):
    """https://github.com/TheTom/llama-cpp-turboquant/issues/305: gpt-oss differs in a quarter of its tokens at q8_0."""
    key, value = torch.randn(2, 1, 2, 600, 64)
    query, sink_logits = torch.randn(1, 4, 1, 64), torch.tensor([-2.0, 4.0, 8.0, 0.0])
    cache = QuantCache(bits=bits)
    keys, _ = held(cache, key[:, :, :-1], value[:, :, :-1])
    cache.update(key[:, :, -1:], value[:, :, -1:], 0)
    assert torch.equal(keys[:, :, :4], key[:, :, :4])
    call = AttentionCall(query, sink_logits=sink_logits)
    snapshot = cache.layers[0].states.snapshot()
    assert len(snapshot.rows[0].pages) == 4
    out = attend(snapshot, call)
    errors = relative_errors(out, definition(Snapshot.of(key, value), call))
    no_sinks = relative_errors(attend(snapshot, AttentionCall(query)), definition(Snapshot.of(key, value), call))
    # Values are wrong by up to 2.7 / 255, or 1/16, of their deviation, and the scores by as much.
    assert errors.rms < (0.02 if bits == 8 else 0.1) < no_sinks.rms / 3


@pytest.mark.parametrize("form", ["enable_gqa", "packed heads", "repeated heads"])
def test_grouped_query_heads_read_the_head_that_is_theirs(form):
    """https://github.com/jy-yuan/KIVI/issues/41: an assertion forbids grouped heads; also issues 33 and 42."""
    cache = QuantCache(bits=4, **SMALL_PAGES)
    key, value, query = torch.randn(2, 2, 60, 64), torch.randn(2, 2, 60, 64), torch.randn(2, 4, 1, 64)
    value[:, 1] += 10  # so that a head which reads the other's values shows
    held(cache, key[:, :, :-1], value[:, :, :-1])
    pair = cache.update(key[:, :, -1:], value[:, :, -1:], 0)
    expected = definition(cache.layers[0].states.snapshot(), AttentionCall(query))
    if form == "packed heads":
        out = F.scaled_dot_product_attention(query.view(2, 2, 2, 64), *pair).view(2, 4, 1, 64)
    elif form == "repeated heads":
        out = F.scaled_dot_product_attention(query, *(torch.repeat_interleave(x, 2, dim=1) for x in pair))
    else:
        out = F.scaled_dot_product_attention(query, *pair, enable_gqa=True)
    assert relative_errors(out, expected).rms < 1e-3  # queries and weights are rounded to 15 and 16 bits
    assert (out[:, :2].mean() < 1) & (out[:, 2:].mean() > 9)


def test_a_format_per_token_would_fail_the_test_of_outlier_channels():
    """What the first test guards against, so that it is known to be able to fail."""
    key = torch.randn(1, 2, 132, 64)
    key[..., 5] += 60
    config = QuantConfig(INT4_PER_TOKEN, INT4_PER_TOKEN, sinks=4, residual_length=0, rotation=False)
    keys, _ = held(QuantCache(quant=config), key)
    assert rms((keys - key)[:, :, 4:, torch.arange(64) != 5]) > 1
