"""QuantCache as transformers and its users see it, on tiny random models."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from families import tiny_config, tiny_model
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import (
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from kvquant import FORMATS, QuantCache, QuantConfig, QuantLayer, cache_memory, compat
from kvquant.transport import LazyStates

SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}
GREEDY = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}


def generate(model, ids, cache, mask=None, new_tokens=40, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=new_tokens, **(GREEDY | options))


def fill(cache, tokens, rows=1, heads=2, dim=16, layers=1, dtype=torch.float32):
    for layer in range(layers):
        cache.update(
            torch.randn(rows, heads, tokens, dim, dtype=dtype),
            torch.randn(rows, heads, tokens, dim, dtype=dtype),
            layer,
        )
    for layer in cache.layers:
        layer.settle()
    return cache


class TestConstruction:
    @pytest.mark.parametrize(
        ("family", "kinds"),
        [
            ("llama", [QuantLayer, QuantLayer]),
            ("gemma3_text", [DynamicSlidingWindowLayer, QuantLayer]),
            ("qwen3_next", [LinearAttentionLayer, QuantLayer]),
            ("falcon_h1", [LinearAttentionAndFullAttentionLayer] * 2),
        ],
    )
    def test_config_leaves_other_layers_as_transformers_makes_them(self, family, kinds):
        cache = QuantCache(bits=4, config=tiny_config(family))
        assert [type(layer) for layer in cache.layers] == kinds

    def test_without_config_every_layer_is_packed(self):
        assert [type(layer) for layer in fill(QuantCache(bits=4), 3, layers=3).layers] == [QuantLayer] * 3

    def test_options_reach_the_layers(self):
        cache = fill(QuantCache(bits=(4, 2), sinks=1, residual_length=3, page_size=16, rotation=False, clip=True), 3)
        expected = QuantConfig.preset((4, 2), sinks=1, residual_length=3, page_size=16, rotation=False, clip=True)
        assert cache.layers[0].quant == expected

    def test_quant_is_taken_as_it_is(self):
        quant = QuantConfig.preset(8, sinks=0)
        assert QuantCache(quant=quant).quant is quant

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({}, ValueError, "bits is missing; pass bits=4"),
            ({"bits": 5}, ValueError, "bits=5 is not supported"),
            ({"bits": 4, "group": 4}, TypeError, "unknown options group; known are clip, max_length, page_size"),
            (
                {"bits": 4, "precision": "half"},
                ValueError,
                "precision='half' is not supported; use 'default' or 'exact'",
            ),
            ({"bits": 4, "quant": QuantConfig()}, ValueError, "do not pass bits beside it"),
            ({"quant": QuantConfig(), "sinks": 3}, ValueError, "do not pass sinks beside it"),
            ({"quant": 4}, TypeError, "quant must be a QuantConfig, got 4"),
            ({"bits": 4, "rotation": "no"}, TypeError, "rotation must be True or False, got 'no'"),
            ({"bits": 4, "clip": "yes"}, TypeError, "clip must be True, False or None, got 'yes'"),
            ({"bits": 4, "config": "x"}, TypeError, "config must be a model's configuration .*, got 'x'"),
        ],
    )
    def test_mistakes_are_named(self, arguments, error, message):
        with pytest.raises(error, match=message):
            QuantCache(**arguments)


class TestLayerContract:
    def test_an_empty_cache_answers(self):
        cache = QuantCache(bits=4, config=tiny_model("llama", "sdpa").config)
        assert cache.get_seq_length() == 0
        assert cache.get_mask_sizes(7, 0) == (7, 0)
        assert cache.get_max_length() == -1
        assert (cache.is_croppable, cache.is_compileable, cache.is_initialized) == (True, False, False)
        assert cache.is_sliding == [False, False]
        cache.crop(-3)
        cache.reorder_cache(torch.tensor([0]))
        cache.batch_repeat_interleave(2)
        cache.reset()
        assert cache.layers[0].keys is None

    def test_keys_and_values_are_readable_and_not_assignable(self):
        cache = fill(QuantCache(bits=4, **SMALL_PAGES), 40)
        assert isinstance(cache.layers[0].keys, LazyStates)
        assert cache.layers[0].values.shape == (1, 2, 40, 16)
        assert cache.layers[0].keys.numel() == 2 * 40 * 16
        for name in ("keys", "values"):
            with pytest.raises(AttributeError, match=f"{name} of a QuantLayer are packed"):
                setattr(cache.layers[0], name, torch.zeros(1))

    def test_what_is_read_again_is_packed_first(self):
        """Cross-attention updates its cache once and reads keys and values from then on."""
        cache = QuantCache(bits=4, **SMALL_PAGES)
        cache.update(torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16), 0)
        assert torch.equal(cache.layers[0].keys + 0, cache.layers[0].keys.materialize())
        assert cache.layers[0].states.snapshot().chunk.num_tokens == 0
        assert len(cache.layers[0].states.snapshot().rows[0].pages) == (40 - 2 - 5) // 8

    def test_iteration_gives_keys_values_and_no_window(self):
        cache = fill(QuantCache(bits=16), 5, layers=2)
        for keys, values, window in cache:
            assert keys.shape == values.shape == (1, 2, 5, 16)
            assert window is None

    def test_positive_crop_is_refused(self):
        with pytest.raises(
            ValueError, match=r"crop\(3\): pass minus the number of tokens to remove, for example crop\(-3\)"
        ):
            fill(QuantCache(bits=4), 5).crop(3)

    @pytest.mark.parametrize(
        ("version", "argument", "removed"),
        [
            ((5, 24), -3, 3),
            ((5, 24), 0, 0),
            ((5, 14), 0, 0),
            ((5, 14), 30, 10),
            ((5, 4), -3, 3),
            ((5, 4), 30, 10),
            ((5, 4), 50, 0),
            ((5, 4), 0, 40),
        ],
    )
    def test_crop_means_what_it_means_in_the_installed_version(self, monkeypatch, version, argument, removed):
        monkeypatch.setattr(compat, "TRANSFORMERS", version)
        cache = fill(QuantCache(bits=4, **SMALL_PAGES), 40)
        cache.crop(argument)
        assert cache.get_seq_length() == 40 - removed

    @pytest.mark.parametrize(
        "indices", [[1], torch.tensor([1]), torch.tensor([False, True]), torch.tensor([-1])], ids=str
    )
    def test_rows_are_selected_as_a_tensor_would_be_indexed(self, indices):
        cache = fill(QuantCache(bits=16, **SMALL_PAGES), 40, rows=2)
        keys = cache.layers[0].keys.materialize()
        cache.batch_select_indices(indices)
        assert torch.equal(cache.layers[0].keys.materialize(), keys[indices])

    def test_early_initialization(self):
        cache = QuantCache(bits=4, config=tiny_model("llama", "sdpa").config)
        cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
        assert cache.is_initialized
        assert cache.get_seq_length() == 0
        assert fill(cache, 5, layers=2).get_seq_length() == 5

    def test_reset_starts_over_even_with_another_batch_size(self):
        cache = fill(QuantCache(bits=4, **SMALL_PAGES), 40)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert fill(cache, 3, rows=2).layers[0].keys.shape == (2, 2, 3, 16)

    def test_a_layer_is_packed_when_the_next_one_begins_even_if_its_attention_is_not_seen(self):
        cache = QuantCache(bits=4, **SMALL_PAGES)
        chunk = torch.randn(1, 2, 100, 16)
        cache.update(chunk, chunk, 0)
        first = cache.layers[0].states
        assert first.snapshot().chunk.num_tokens == 100
        cache.update(chunk, chunk, 1)
        assert first.snapshot().chunk.num_tokens == 0
        assert cache.memory().codes == 2 * 11 * 8 * 2 * 2 * 16 // 2  # reading the memory packs the last layer too


class TestMemory:
    def test_hand_computed_report(self):
        cache = fill(
            QuantCache(bits=4, sinks=4, residual_length=64, page_size=128), 1000, rows=2, dim=64, dtype=torch.bfloat16
        )
        memory = cache.memory()
        pages = (1000 - 4 - 64) // 128  # 7 per row
        exact_tokens = 1000 - 128 * pages
        per_token = 2 * 2 * 64  # elements of keys and values, two heads
        assert memory.codes == 2 * pages * 128 * per_token // 2
        # Per page and head: a scale and a zero point for each of 64 key channels, and for each of 128 value tokens.
        assert memory.scales == 2 * pages * 2 * (64 + 128) * 2 * 2
        assert memory.exact == 2 * exact_tokens * per_token * 2
        assert memory.page_tables == 2 * pages * 4
        assert memory.elements == 2 * 1000 * per_token
        assert memory.full_precision == 2 * 1000 * per_token * 2
        assert memory.total == memory.codes + memory.scales + memory.exact + memory.page_tables
        assert memory.effective_bits == pytest.approx(8 * memory.total / memory.elements)
        assert memory.ratio == pytest.approx(memory.total / memory.full_precision)

    @pytest.mark.parametrize(("bits", "bound"), [(8, 8.7), (4, 4.8), (2, 2.8)])
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_effective_bits_at_8k_tokens_of_a_bfloat16_model(self, bits, bound, head_dim):
        cache = fill(QuantCache(bits=bits), 8192, dim=head_dim, dtype=torch.bfloat16)
        assert bits < cache.memory().effective_bits <= bound

    def test_reserved_room_is_reported_apart(self):
        cache = fill(QuantCache(bits=4, max_length=1000, **SMALL_PAGES), 40)
        pages, page_bytes = (40 - 2 - 5) // 8, cache.layers[0].states.snapshot().layout.page_bytes
        tail = 40 - 2 - 8 * pages
        room = 2 + 5 + 8 - tail
        assert cache.memory().reserved == (1000 // 8 - pages) * page_bytes + room * 2 * 2 * 16 * 4

    def test_page_tables_are_as_wide_as_the_longest_row(self):
        model = tiny_model("llama", "sdpa")
        mask = torch.ones(2, 60, dtype=torch.long)
        mask[0, :50] = 0
        cache = QuantCache(bits=4, **SMALL_PAGES)
        generate(model, torch.randint(2, 97, (2, 60)), cache, mask, new_tokens=1)
        assert cache.memory().page_tables == 2 * 2 * ((60 - 2 - 5) // 8) * 4

    def test_other_caches_are_measured_too(self):
        cache = DynamicCache()
        cache.update(torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16), 0)
        both = EncoderDecoderCache(cache, fill(QuantCache(bits=16), 5))
        assert cache_memory(cache).total == 2 * 2 * 5 * 16 * 4
        assert cache_memory(both).total == 2 * cache_memory(cache).total

    def test_an_empty_cache_has_no_bits(self):
        memory = QuantCache(bits=4).memory()
        assert memory.total == 0
        assert memory.effective_bits != memory.effective_bits

    def test_shared_pages_count_once(self):
        cache = fill(QuantCache(bits=4, **SMALL_PAGES), 100)
        codes = cache.memory().codes
        cache.batch_repeat_interleave(3)
        assert cache.memory().codes == codes
        assert cache.memory().elements == 3 * 100 * 2 * 2 * 16

    def test_layers_that_stay_unquantized_are_counted_on_both_sides(self):
        model = tiny_model("gemma3_text", "sdpa")
        cache = QuantCache(bits=4, config=model.config)
        generate(model, torch.randint(2, 97, (1, 50)), cache, new_tokens=2)
        memory = cache.memory()
        assert memory.unquantized == 2 * 31 * 2 * 16 * 4  # window - 1 tokens, 2 heads, head_dim 16, float32, K and V
        assert memory.full_precision == memory.unquantized + 51 * 2 * 2 * 16 * 4

    def test_left_padding_is_not_stored_as_elements(self):
        model = tiny_model("llama", "sdpa")
        cache = QuantCache(bits=4)
        mask = torch.ones(2, 30, dtype=torch.long)
        mask[0, :20] = 0
        generate(model, torch.randint(2, 97, (2, 30)), cache, mask, new_tokens=1)
        assert cache.memory().elements == 2 * (10 + 30) * 2 * 2 * 16


class TestGeneration:
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("prompt", [1, 7, 60])
    def test_left_padded_rows_equal_the_rows_alone(self, attention, prompt):
        model = tiny_model("llama", attention)
        ids = torch.randint(2, 97, (3, 60))
        lengths = [prompt, 60, 33]
        mask = (torch.arange(60) >= 60 - torch.tensor(lengths)[:, None]).long()
        together = generate(model, ids, QuantCache(bits=8, **SMALL_PAGES), mask)
        for i, length in enumerate(lengths):
            alone = generate(model, ids[i : i + 1, 60 - length :], QuantCache(bits=8, **SMALL_PAGES))
            assert torch.equal(alone.sequences[0, length:], together.sequences[i, 60:])
            for step_alone, step_together in zip(alone.logits, together.logits, strict=True):
                assert (step_alone[0] - step_together[i]).abs().max() < 1e-4

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_padding_is_not_stored_when_the_prompt_comes_in_chunks(self, attention):
        model = tiny_model("llama", attention)
        ids = torch.randint(2, 97, (2, 60))
        mask = torch.ones(2, 60, dtype=torch.long)
        mask[0, :43] = 0  # more than two chunks of nothing but padding
        together = generate(model, ids, QuantCache(bits=8, **SMALL_PAGES), mask, prefill_chunk_size=16)
        alone = generate(model, ids[:1, 43:], QuantCache(bits=8, **SMALL_PAGES), prefill_chunk_size=16)
        assert torch.equal(together.sequences[0, 60:], alone.sequences[0, 17:])

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize(
        "positions", [[0, *range(19)], [0] * 20, list(range(20, 40))], ids=["two documents", "zeros", "late"]
    )
    def test_unusual_position_ids_lose_no_token(self, attention, positions):
        model = tiny_model("llama", attention)
        ids, mask = torch.randint(2, 97, (1, 22)), torch.ones(1, 22, dtype=torch.long)
        logits = []
        for cache in (DynamicCache(config=model.config), QuantCache(bits=16, **SMALL_PAGES)):
            with torch.no_grad():
                first, more = torch.tensor([positions]), torch.tensor([[40, 41]])
                model(ids[:, :20], position_ids=first, attention_mask=mask[:, :20], cache=cache, use_cache=True)
                logits.append(
                    model(ids[:, 20:], position_ids=more, attention_mask=mask, cache=cache, use_cache=True).logits
                )
        assert torch.equal(*logits)

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("bits", [16, 4, (8, 16)])
    def test_autocast(self, attention, bits):
        model = tiny_model("llama", attention)
        ids = torch.randint(2, 97, (1, 30))
        with torch.autocast("cpu", torch.bfloat16):
            out = generate(model, ids, QuantCache(bits=bits, **SMALL_PAGES))
            expected = generate(model, ids, DynamicCache(config=model.config))
        assert out.sequences.shape == (1, 70)
        if bits == 16:
            assert torch.equal(out.sequences, expected.sequences)

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize(
        "options",
        [
            {"num_beams": 3},
            {"num_beams": 3, "num_return_sequences": 2, "do_sample": True},
            {"do_sample": True},
            {"prompt_lookup_num_tokens": 5},
            {"prefill_chunk_size": 8},
            {"num_return_sequences": 3, "do_sample": True},
        ],
        ids=lambda options: "+".join(options),
    )
    def test_every_way_to_generate_equals_dynamic_cache_with_the_identity(self, attention, options):
        model = tiny_model("llama", attention)
        ids = torch.randint(2, 97, (1, 20))
        results = []
        for cache in (DynamicCache(config=model.config), QuantCache(bits=16, **SMALL_PAGES)):
            torch.manual_seed(1)
            results.append(generate(model, ids, cache, **options))
        assert torch.equal(results[0].sequences, results[1].sequences)

    @pytest.mark.parametrize("bits", [8, 4, 2, "fp8"])
    @pytest.mark.parametrize(
        "options", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 5}], ids=lambda options: "+".join(options)
    )
    def test_crop_and_reorder_keep_the_length(self, bits, options):
        model = tiny_model("llama", "sdpa")
        cache = QuantCache(bits=bits, **SMALL_PAGES)
        out = generate(model, torch.randint(2, 97, (1, 20)), cache, **options)
        assert cache.get_seq_length() == out.sequences.shape[1] - 1

    def test_prefix_is_reused_by_deepcopy(self):
        model = tiny_model("llama", "sdpa")
        ids = torch.randint(2, 97, (1, 60))
        prefix = QuantCache(bits=4, **SMALL_PAGES)
        with torch.no_grad():
            model(ids[:, :50], cache=prefix, use_cache=True)
        outs = [generate(model, ids, copy.deepcopy(prefix)).sequences for _ in range(2)]
        assert torch.equal(*outs)
        assert prefix.get_seq_length() == 50

    @pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
    def test_decoding_reads_what_was_quantized(self, fmt):
        """The same tokens through sdpa, which reads pages, and eager, which reads dequantized tensors."""
        ids = torch.randint(2, 97, (2, 60))
        logits = []
        for attention in ("sdpa", "eager"):
            cache = QuantCache(quant=QuantConfig(key=fmt, value=fmt, **SMALL_PAGES))
            model = tiny_model("llama", attention)
            with torch.no_grad():
                model(ids[:, :50], cache=cache, use_cache=True)
                steps = [model(ids[:, i : i + 1], cache=cache, use_cache=True).logits for i in range(50, 60)]
            logits.append(torch.cat(steps, dim=1))
        torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)  # float32 in another order

    def test_a_forward_with_gradients_gives_those_of_dynamic_cache(self):
        model = tiny_model("llama", "sdpa")
        ids = torch.randint(2, 97, (1, 30))
        grads = []
        for cache in (DynamicCache(), QuantCache(bits=16, **SMALL_PAGES)):
            model.zero_grad()
            with torch.no_grad():
                model(ids[:, :20], cache=cache, use_cache=True)
            model(ids[:, 20:], cache=cache, use_cache=True).logits.square().mean().backward()
            grads.append([parameter.grad.clone() for parameter in model.parameters()])
        assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))

    def test_one_pass_and_streaming_differ_so_that_streaming_is_what_measures(self):
        model = tiny_model("llama", "sdpa")
        ids = torch.randint(2, 97, (1, 80))
        with torch.no_grad():
            full = model(ids).logits
            cache = QuantCache(bits=2, **SMALL_PAGES)
            streamed = torch.cat(
                [model(ids[:, i : i + 20], cache=cache, use_cache=True).logits for i in range(0, 80, 20)], dim=1
            )
            at_once = model(ids, cache=QuantCache(bits=2, **SMALL_PAGES), use_cache=True).logits
        assert torch.equal(at_once, full)
        assert (streamed - full).abs().max() > 1e-3


def test_bfloat16_and_float16_models_run():
    for dtype in (torch.bfloat16, torch.float16):
        model = tiny_model("llama", "sdpa").to(dtype)
        out = generate(model, torch.randint(2, 97, (1, 30)), QuantCache(quant=replace(QuantConfig(), **SMALL_PAGES)))
        assert out.sequences.shape == (1, 70)
        assert all(step.isfinite().all() for step in out.logits)
