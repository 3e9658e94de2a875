"""Public reports of crop, reorder and batch operations that lost or mixed up tokens."""

import copy

import pytest
import torch
from families import tiny_config, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache

import kvquant
from kvquant import QuantCache, QuantConfig

SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}
PACKED = [8, 4, 2, "fp8", (8, 4)]


def run(model, ids, cache, mask=None):
    with torch.no_grad():
        return model(ids, attention_mask=mask, cache=cache, use_cache=True).logits


def generate(model, ids, cache, mask=None, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": 40, "do_sample": False} | options
    return model.generate(ids, attention_mask=mask, cache=cache, **options)


def states(cache):
    """All layers' keys and values as plain tensors."""
    return [torch.stack([layer.keys.clone(), layer.values.clone()]) for layer in cache.layers]


def pages(cache):
    return [len(row.pages) for row in cache.layers[-1].states.snapshot().rows]


class TestCrop:
    @pytest.mark.parametrize("residual_length", [0, 5])
    @pytest.mark.parametrize("bits", [16, *PACKED], ids=str)
    def test_crop_keeps_length_and_contents_in_step(self, bits, residual_length):
        """https://github.com/huggingface/transformers/pull/45510: 20 tokens, 5 more, 3 back: 25 are claimed, 22 held.

        Without a residual, those 3 lie in a page that is sealed.
        """
        model, ids = tiny_model("llama", "sdpa"), torch.randint(2, 97, (1, 26))
        cache = QuantCache(bits=bits, sinks=1, residual_length=residual_length, page_size=8)
        for cut in (slice(0, 20), slice(20, 25)):
            run(model, ids[:, cut], cache)
        cache.layers[-1].settle()
        assert pages(cache) == [(25 - 1 - residual_length) // 8]
        before = states(cache)
        cache.crop(-3)
        assert cache.get_seq_length() == 22
        assert cache.get_mask_sizes(1, 0) == (23, 0)
        assert all(torch.equal(after, then[..., :22, :]) for after, then in zip(states(cache), before, strict=True))
        next_logits = run(model, ids[:, 25:], cache)
        exact = DynamicCache()
        run(model, ids[:, :22], exact)
        if bits == 16:
            assert torch.equal(next_logits, run(model, ids[:, 25:], exact))

    @pytest.mark.parametrize("argument", [-3, 0, 3, 25, 30])
    def test_crop_takes_the_sign_that_the_installed_version_takes(self, argument):
        """https://github.com/huggingface/transformers/pull/47720: from the length to keep to minus what to remove."""
        found = []
        for cache in (DynamicCache(), QuantCache(bits=4, **SMALL_PAGES)):
            cache.update(*torch.randn(2, 1, 2, 25, 16), 0)
            try:
                cache.crop(argument)
                found.append(cache.get_seq_length())
            except ValueError:
                found.append("refused")
        assert found[0] == found[1]

    @pytest.mark.parametrize("bits", [16, 8])
    def test_rejected_guesses_are_rolled_back_past_a_sliding_window(self, bits):
        """https://github.com/huggingface/transformers/pull/47447: what the window dropped has to come back."""
        model = with_window_of_six()
        ids = torch.randint(2, 97, (1, 20))
        options = {"sinks": 2, "residual_length": 16, "page_size": 8}  # guesses stay in the tail
        crops = []
        cache = QuantCache(bits=bits, config=model.config, **options)
        cache.crop = lambda count: crops.append(count) or type(cache).crop(cache, count)
        out = generate(model, ids, cache, prompt_lookup_num_tokens=5)
        assert min(crops) < 0
        assert len(crops) < 40  # some guesses were right
        assert torch.equal(out, generate(model, ids, QuantCache(bits=bits, config=model.config, **options)))
        if bits == 16:
            assert torch.equal(out, generate(model, ids, DynamicCache(config=model.config)))

    def test_a_rolled_back_sliding_window_holds_what_it_held(self):
        """The same thread, without generate()."""
        model, ids = with_window_of_six(), torch.randint(2, 97, (1, 30))
        logits = []
        for cache in (DynamicCache(config=model.config), QuantCache(bits=16, config=model.config, **SMALL_PAGES)):
            run(model, ids[:, :20], cache)
            cache.activate_past_recording()
            run(model, ids[:, 20:25], cache)
            cache.crop(-3)
            logits.append(run(model, ids[:, 25:], cache))
        fresh = DynamicCache(config=model.config)
        run(model, ids[:, :22], fresh)
        assert torch.equal(*logits)
        torch.testing.assert_close(logits[1], run(model, ids[:, 25:], fresh))

    @pytest.mark.parametrize("is_stateful", [True, False])
    def test_guessing_on_a_recurrent_hybrid_is_refused_and_not_wrong(self, monkeypatch, is_stateful):
        """https://github.com/huggingface/transformers/issues/49036: a recurrent state cannot be rolled back.

        transformers refuses by what the model says of itself, and else by what the cache says after the prompt.
        """
        model, ids = tiny_model("qwen3_next", "sdpa"), torch.randint(2, 97, (1, 20))
        monkeypatch.setattr(type(model), "_is_stateful", is_stateful)
        message = "not supported with stateful models" if is_stateful else "cache that can be cropped"
        with pytest.raises(ValueError, match=message):
            generate(model, ids, QuantCache(bits=8, config=model.config, **SMALL_PAGES), prompt_lookup_num_tokens=5)


def with_window_of_six():
    config = copy.deepcopy(tiny_config("gemma3_text"))
    config.sliding_window = 6
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


class TestBatch:
    @pytest.mark.parametrize("operation", ["repeat", "select", "reorder"])
    @pytest.mark.parametrize("bits", [16, *PACKED], ids=str)
    def test_batch_operations_reach_packed_tokens_too(self, bits, operation):
        """https://github.com/huggingface/transformers/pull/45510: they move the residual only."""
        model, ids = tiny_model("llama", "sdpa"), torch.randint(2, 97, (3, 41))
        order = {"repeat": [0, 0, 1, 1, 2, 2], "select": [2, 0], "reorder": [1, 1, 0]}[operation]
        caches = QuantCache(bits=bits, **SMALL_PAGES), DynamicCache()
        logits = []
        for cache in caches:
            run(model, ids[:, :40], cache)
            before = states(cache)
            if operation == "repeat":
                cache.batch_repeat_interleave(2)
            else:
                {"select": cache.batch_select_indices, "reorder": cache.reorder_cache}[operation](torch.tensor(order))
            assert all(torch.equal(now, then[:, order]) for now, then in zip(states(cache), before, strict=True))
            logits.append(run(model, ids[order, 40:], cache))
        assert pages(caches[0]) == [(40 - 2 - 5) // 8] * len(order)
        if bits == 16:
            assert torch.equal(*logits)

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    def test_beams_are_right_past_a_flush(self, attention):
        """https://github.com/huggingface/transformers/pull/48700: the residual was reordered, the packed tokens not.

        Pages are sealed as soon as they are full, while beams still differ in their tokens.
        """
        model, ids = tiny_model("llama", attention), torch.randint(2, 97, (2, 20))
        cache = QuantCache(bits=16, sinks=0, residual_length=0, page_size=8)
        outs = [generate(model, ids, each, num_beams=3) for each in (cache, DynamicCache())]
        assert min(pages(cache)) == (20 + 40 - 1) // 8
        assert torch.equal(*outs)

    @pytest.mark.parametrize("bits", PACKED, ids=str)
    def test_beams_and_crops_act_on_packed_codes(self, bits):
        """https://github.com/huggingface/transformers/pull/45931: plugins that cannot reorder or crop their codes.

        Nor are they to be packed again, which would change them.
        """
        cache = QuantCache(bits=bits, **SMALL_PAGES)
        cache.update(*torch.randn(2, 3, 2, 60, 64), 0)
        cache.layers[0].settle()
        records = cache.layers[0].states.snapshot().pool.records
        before, (packed,) = records.clone(), states(cache)
        for order in ([2, 2, 0], [1, 0, 2], [0, 1, 1]):
            cache.reorder_cache(torch.tensor(order))
            packed = packed[:, order]
            assert torch.equal(states(cache)[0], packed)
        cache.crop(-20)
        assert torch.equal(states(cache)[0], packed[..., :40, :])
        assert torch.equal(records, before)
        pair = bits if isinstance(bits, tuple) else (bits, bits)
        widths = [8 if width == "fp8" else width for width in pair]
        distinct = len({page.index for row in cache.layers[0].states.snapshot().rows for page in row.pages})
        assert cache.memory().codes == distinct * 8 * 2 * 64 * sum(widths) // 8

    def test_one_configuration_serves_two_models(self):
        """https://github.com/huggingface/transformers/pull/48700: the first model's config stayed in `cache_config`."""
        llama, gemma = tiny_model("llama", "sdpa"), tiny_model("gemma3_text", "sdpa")
        plain = QuantConfig.preset(4, **SMALL_PAGES).to_dict()
        untouched, ids = copy.deepcopy(plain), torch.randint(2, 97, (1, 40))
        shared = QuantConfig.from_dict(plain)
        for model in (llama, gemma, llama):
            used = QuantCache(quant=shared, config=model.config)
            fresh = QuantCache(bits=4, config=model.config, **SMALL_PAGES)
            assert [type(layer) for layer in used.layers] == [type(layer) for layer in fresh.layers]
            assert torch.equal(generate(model, ids, used), generate(model, ids, fresh))
        assert plain == shared.to_dict() == untouched

    @pytest.mark.parametrize("attention", ["sdpa", "kvquant"])
    @pytest.mark.parametrize("bits", [4, (8, 4)], ids=str)
    def test_results_do_not_change_with_the_batch_size(self, attention, bits):
        """https://github.com/jy-yuan/KIVI/issues/46: padding leaks into other rows; also issue 18."""
        kvquant.register()
        # In float64 the model's own matrix products are the same for every batch size, up to 1e-15. (Not with eager
        # attention, whose float64 mask overflows in its float32 softmax: padding is NaN, whatever the cache.)
        model, ids = tiny_model("llama", attention).double(), torch.randint(2, 97, (3, 60))
        lengths = [7, 60, 33]
        mask = (torch.arange(60) >= 60 - torch.tensor(lengths)[:, None]).long()
        options = {"return_dict_in_generate": True, "output_logits": True}
        together = generate(model, ids, QuantCache(bits=bits, **SMALL_PAGES), mask, **options)
        for i, length in enumerate(lengths):
            alone = generate(model, ids[i : i + 1, 60 - length :], QuantCache(bits=bits, **SMALL_PAGES), **options)
            assert torch.equal(alone.sequences[0, length:], together.sequences[i, 60:])
            steps = zip(alone.logits, together.logits, strict=True)
            # Attention on packed tokens is computed in float32, in another order for another number of rows.
            assert max((one[0] - rows[i]).abs().max() for one, rows in steps) < 1e-5
