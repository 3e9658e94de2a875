"""Public reports of models whose layers are not all alike."""

import copy

import pytest
import torch
from families import tiny_config, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

import kvquant
from kvquant import QuantCache, QuantLayer
from kvquant.testing import relative_errors

SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}


@pytest.fixture(scope="module", autouse=True)
def _registered():
    kvquant.register()


def stream(model, ids, cache, mask=None, prompt=30):
    """Logits [B, T, vocabulary]: a prompt, then single tokens."""
    cuts = [(0, prompt), *((i, i + 1) for i in range(prompt, ids.shape[1]))]
    with torch.no_grad():
        logits = [
            model(
                ids[:, first:last],
                attention_mask=None if mask is None else mask[:, :last],
                cache=cache,
                use_cache=True,
            ).logits
            for first, last in cuts
        ]
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(
    ("family", "kept"), [("gemma3_text", DynamicSlidingWindowLayer), ("qwen3_next", LinearAttentionLayer)]
)
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_only_full_layers_of_a_hybrid_are_packed_and_all_work(family, kept, bits):
    """https://github.com/huggingface/transformers/pull/47828 (sliding windows) and
    https://github.com/huggingface/transformers/pull/46781 (linear attention): both are refused altogether.
    """
    model, ids = tiny_model(family, "sdpa"), torch.randint(2, 97, (2, 80))
    cache, exact = QuantCache(bits=bits, config=model.config, **SMALL_PAGES), DynamicCache(config=model.config)
    logits, full = stream(model, ids, cache), stream(model, ids, exact)
    assert [type(layer) for layer in cache.layers] == [kept, QuantLayer]
    assert len(cache.layers[1].states.snapshot().rows[0].pages) == (80 - 2 - 5) // 8
    # The packed layer is the last one: what it is given does not depend on what was read from it.
    keys, exact_keys = cache.layers[1].keys.materialize(), exact.layers[1].keys
    assert torch.equal(keys[:, :, :2], exact_keys[:, :, :2])
    if bits == 16:
        assert torch.equal(logits, full)
        assert torch.equal(keys, exact_keys)
    else:
        # Eight numbers span three times their deviation, which 255 or 15 steps round by 3 / steps / sqrt(12).
        bound = 3 / (2**bits - 1) / 12**0.5
        assert 0 < relative_errors(keys, exact_keys).rms < 1.5 * bound
        assert 0 < relative_errors(logits, full).rms < bound
    if kept is DynamicSlidingWindowLayer:
        assert torch.equal(cache.layers[0].keys, exact.layers[0].keys)
        assert cache.layers[0].keys.shape[2] == 31  # its window, less the token to come


@pytest.mark.parametrize("linear_first", [True, False])
def test_a_linear_layer_without_configuration_is_refused_at_once(linear_first):
    """https://github.com/huggingface/transformers/pull/46781: such models failed late, with an IndexError."""
    config = copy.deepcopy(tiny_config("qwen3_next"))
    config.layer_types = config.layer_types[:: 1 if linear_first else -1]
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match=r"other states than keys and values.* pass config=model\.config"):
        stream(model, torch.randint(2, 97, (1, 20)), QuantCache(bits=4))


def test_a_model_with_sink_logits_keeps_its_tokens_at_eight_bits():
    """https://github.com/TheTom/llama-cpp-turboquant/issues/305: gpt-oss at q8_0 agrees in 75% of the tokens."""
    model = tiny_model("gpt_oss", "eager")
    for layer, values in zip(model.model.layers, torch.tensor([[3.0, -1, 5, 0], [4.0, 0, -2, 3]]), strict=True):
        layer.self_attn.sinks.data.copy_(values)
    ids = torch.randint(2, 97, (1, 80))
    full = stream(model, ids, DynamicCache(config=model.config))
    model.set_attn_implementation("kvquant")
    identity, packed = (
        stream(model, ids, QuantCache(bits=bits, config=model.config, **SMALL_PAGES)) for bits in (16, 8)
    )
    torch.testing.assert_close(identity, full, atol=1e-5, rtol=1e-5)  # float32 in another order
    assert not torch.equal(packed, identity)
    assert torch.equal(packed.argmax(-1), full.argmax(-1))
    model.model.layers[1].self_attn.sinks.data.fill_(-torch.inf)
    without = stream(model, ids, DynamicCache(config=model.config))
    errors = [relative_errors(x[:, 30:], full[:, 30:]).rms for x in (packed, without)]
    assert errors[0] < errors[1] / 10  # what is compared does depend on the sinks


def test_a_custom_attention_keeps_padding_and_causality():
    """https://github.com/huggingface/transformers/issues/46132: without a mask function it gets no mask at all.

    See also https://github.com/huggingface/transformers/pull/45811.
    """
    ids, mask = torch.randint(2, 97, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    logits = []
    for attention in ("eager", "kvquant"):
        model = tiny_model("llama", attention)
        with torch.no_grad():
            logits.append(model(ids, attention_mask=mask, cache=QuantCache(bits=4), use_cache=True).logits)
    torch.testing.assert_close(logits[0][mask.bool()], logits[1][mask.bool()], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        alone = tiny_model("llama", "kvquant")(ids[:1, 4:], cache=QuantCache(bits=4), use_cache=True).logits
    torch.testing.assert_close(logits[1][:1, 4:], alone, atol=1e-5, rtol=1e-5)


class TestSensitiveLayer:
    """https://github.com/jundot/omlx/pull/717 and https://github.com/ikawrakow/ik_llama.cpp/pull/1599: gemma-4-31B
    gives garbage if its last full-attention layer is quantized, at 8 bits even; there was no way to leave it out.
    """

    def test_a_layer_that_breaks_can_be_left_in_full_precision(self):
        model, ids = with_four_layers(), torch.randint(2, 97, (1, 80))
        cache = QuantCache(bits=4, config=model.config, skip_layers=(-1,), **SMALL_PAGES)
        stream(model, ids, cache, prompt=80)
        exact = DynamicCache(config=model.config)
        stream(model, ids, exact, prompt=80)  # one chunk: what is cached does not depend on what was packed before
        equal = [
            torch.equal(ours.keys.clone(), theirs.keys) for ours, theirs in zip(cache.layers, exact.layers, strict=True)
        ]
        assert equal == [False, False, False, True]
        assert type(cache.layers[-1]) is DynamicLayer

    def test_leaving_it_out_takes_its_damage_away(self):
        model, ids = with_four_layers(), torch.randint(2, 97, (1, 80))
        full = stream(model, ids, DynamicCache(config=model.config))
        options = {"config": model.config, "layer_bits": {0: 16, 1: 16, 2: 16}, **SMALL_PAGES}
        damage = [
            relative_errors(stream(model, ids, cache), full).rms
            for cache in (QuantCache(2, **options), QuantCache(8, **options), QuantCache(2, skip_layers=[3], **options))
        ]
        assert damage[0] > 10 * damage[1] > 0 == damage[2]


def with_four_layers():
    config = copy.deepcopy(tiny_config("llama"))
    config.num_hidden_layers = 4
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
