"""kvquant.default: caches that transformers makes itself are QuantCaches, in this thread, for as long as it lasts."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import inspect
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from families import tiny_config, tiny_model
from family_table import SMALL
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedTokenizerFast,
    StaticCache,
    pipeline,
)
from transformers.cache_utils import DynamicSlidingWindowLayer

import kvquant
from kvquant import QuantCache, QuantConfig, QuantLayer, cache_memory
from kvquant.compat import CACHE_ARGUMENT

PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}
BEAMS, LOOKUP = {"num_beams": 3}, {"prompt_lookup_num_tokens": 5}
SEQ2SEQ = {
    "t5": {
        "vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": None,
    },
    "bart": {
        "vocab_size": 97, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 256,
        "decoder_start_token_id": 1, "forced_eos_token_id": None, "eos_token_id": None, "bos_token_id": 1,
        "pad_token_id": 0,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _leaves_no_trace():
    copy.copy(DynamicCache())  # Python notes on the class that it has been copied
    before = dict(vars(DynamicCache))
    yield
    assert dict(vars(DynamicCache)) == before
    assert type(DynamicCache()) is DynamicCache


def generate(model, ids, **options):
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True} | options
    return model.generate(ids, attention_mask=mask, **options)


class TestGeneration:
    @pytest.mark.parametrize(
        ("family", "packed", "options"),
        [
            *product(["llama"], [[True, True]], [{}, BEAMS, LOOKUP]),
            *product(["gemma3_text"], [[False, True]], [{}, BEAMS, LOOKUP]),
            *product(["qwen3_next"], [[False, True]], [{}, BEAMS]),  # its recurrent states cannot be rolled back
        ],
        ids=str,
    )
    def test_a_bare_generate_is_one_with_the_cache_passed(self, family, packed, options):
        model = tiny_model(family, "sdpa")
        ids = torch.randint(2, 97, (1, 60))
        cache = QuantCache(bits=4, config=model.config, **PAGES)
        expected = generate(model, ids, **{CACHE_ARGUMENT: cache}, **options).sequences
        with kvquant.default(bits=4, **PAGES):
            out = generate(model, ids, **options)
        made = out[CACHE_ARGUMENT]
        assert type(made) is QuantCache
        assert [isinstance(layer, QuantLayer) for layer in made.layers] == packed
        assert torch.equal(out.sequences, expected)
        assert made.memory() == cache.memory()
        assert made.memory().codes > 0

    @pytest.mark.parametrize("beams", [1, 3])
    @pytest.mark.parametrize("family", SEQ2SEQ)
    def test_encoder_decoder_models_get_two(self, family, beams):
        config = AutoConfig.for_model(family, **SEQ2SEQ[family])
        model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="sdpa").eval()
        ids = torch.randint(2, 97, (1, 60))
        caches = EncoderDecoderCache(*(QuantCache(bits=4, config=config, **PAGES) for _ in range(2)))
        expected = generate(model, ids, num_beams=beams, **{CACHE_ARGUMENT: caches})
        with kvquant.default(bits=4, **PAGES):
            out = generate(model, ids, num_beams=beams)
        made = out[CACHE_ARGUMENT]
        for cache in (made.self_attention_cache, made.cross_attention_cache):
            assert type(cache) is QuantCache
            assert cache.memory().codes > 0
        assert made.cross_attention_cache.get_seq_length() == 60
        assert cache_memory(made) == cache_memory(caches)
        assert torch.equal(out.sequences, expected.sequences)

    def test_forward_returns_one(self):
        model, ids = tiny_model("gemma3_text", "sdpa"), torch.randint(2, 97, (1, 60))
        with kvquant.default(bits=4, **PAGES), torch.no_grad():
            made = model(ids, use_cache=True)[CACHE_ARGUMENT]
        assert type(made) is QuantCache
        assert made.get_seq_length(1) == 60
        assert made.memory().codes > 0

    def test_pipelines_use_one(self):
        model, tokenizer = tiny_model("llama", "sdpa"), word_tokenizer()
        text = " ".join(f"w{i}" for i in torch.randint(2, 97, (60,)).tolist())
        write = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        options = {"max_new_tokens": 40, "do_sample": False}
        expected = write(text, **options, **{CACHE_ARGUMENT: QuantCache(bits=2, **PAGES)})
        made = []
        hook = model.register_forward_hook(lambda module, args, out: made.append(out[CACHE_ARGUMENT]))
        with kvquant.default(bits=2, **PAGES):
            out = write(text, **options)
        hook.remove()
        assert out == expected
        assert out != write(text, **options)  # 2 bits are coarse enough to be seen
        assert {type(cache) for cache in made} == {QuantCache}
        assert made[-1].memory().codes > 0

    def test_training_gets_the_gradients_of_dynamic_cache(self):
        model, ids = tiny_model("llama", "sdpa"), torch.randint(2, 97, (1, 30))
        model(ids, labels=ids).loss.backward()
        expected = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        with kvquant.default(bits=4, **PAGES):
            model(ids, labels=ids).loss.backward()
        assert all(map(torch.equal, (parameter.grad for parameter in model.parameters()), expected))


def word_tokenizer():
    vocabulary = {f"w{i}": i for i in range(SMALL["vocab_size"])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1")


class TestConstruction:
    @pytest.mark.parametrize("config", [None, tiny_config("gemma3_text")], ids=["no config", "config"])
    def test_the_cache_is_as_if_constructed_by_its_own_class(self, config):
        with kvquant.default(bits=(4, 2), clip=True, **PAGES):
            made = DynamicCache(config=config)
        explicit = QuantCache(bits=(4, 2), config=config, clip=True, **PAGES)
        assert made.quant == explicit.quant
        assert [type(layer) for layer in made.layers] == [type(layer) for layer in explicit.layers]
        assert vars(made).keys() == vars(explicit).keys()
        assert made.summary() == explicit.summary()

    def test_states_given_at_construction_are_packed(self):
        states = [(torch.randn(2, 2, 40, 16), torch.randn(2, 2, 40, 16)) for _ in range(2)]
        filled = QuantCache(bits=4, **PAGES)
        for i, (keys, values) in enumerate(states):
            filled.update(keys, values, i)
        with kvquant.default(bits=4, **PAGES):
            made = DynamicCache(iter(states))
        assert [layer.states.snapshot().chunk.num_tokens for layer in made.layers] == [0, 0]
        assert made.memory() == filled.memory()
        assert made.memory().codes > 0
        for mine, theirs in zip(made.layers, filled.layers, strict=True):
            assert torch.equal(mine.keys.materialize(), theirs.keys.materialize())
            assert torch.equal(mine.values.materialize(), theirs.values.materialize())
        chunk = torch.randn(2, 2, 1, 16)
        assert made.update(chunk, chunk, 1)[0].shape == (2, 2, 41, 16)

    def test_states_of_sliding_windows_stay_as_they_are(self):
        keys, values = torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
        with kvquant.default(bits=4, **PAGES):
            made = DynamicCache([(keys, values, torch.tensor([8]))])
        assert [type(layer) for layer in made.layers] == [DynamicSlidingWindowLayer]
        assert torch.equal(made.layers[0].keys, keys[:, :, -7:])

    def test_caches_of_other_kinds_stay_what_they_are(self):
        class Own(DynamicCache):
            pass

        config = tiny_config("llama")
        with kvquant.default(bits=4):
            assert type(Own()) is Own
            assert type(StaticCache(config=config, max_cache_len=8)) is StaticCache
            assert QuantCache(bits=8).quant == QuantConfig.preset(8)

    def test_an_offloaded_cache_stays_what_it_is(self, monkeypatch):
        monkeypatch.setattr(torch, "Stream", lambda: None)  # which is what an offloaded cache needs a GPU for
        with kvquant.default(bits=4):
            assert type(DynamicCache(offloading=True)) is DynamicCache

    def test_a_static_cache_asked_for_is_what_generate_makes(self):
        model, ids = tiny_model("llama", "sdpa"), torch.randint(2, 97, (1, 20))
        with kvquant.default(bits=4):
            made = generate(model, ids, cache_implementation="static", max_new_tokens=2)[CACHE_ARGUMENT]
        assert type(made) is StaticCache

    def test_copies_and_pickles_keep_their_class(self):
        plain = DynamicCache()
        plain.update(torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 8), 0)
        with kvquant.default(bits=4, **PAGES):
            made = DynamicCache(config=tiny_config("llama"))
            for copied in (copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))):
                assert type(copied(plain)) is DynamicCache
                assert type(copied(made)) is QuantCache
        assert type(copy.deepcopy(made)) is QuantCache

    def test_a_model_of_linear_layers_alone_is_not_compiled(self):
        """generate() compiles for caches that say they are compileable, and are not of exactly DynamicCache's class."""
        config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=97)
        with kvquant.default(bits=4):
            assert not DynamicCache(config=config).is_compileable


class TestScope:
    def test_it_yields_the_configuration(self):
        with kvquant.default(bits=4, sinks=1) as quant:
            assert quant == QuantConfig.preset(4, sinks=1)
            assert DynamicCache().quant is quant

    def test_caches_made_inside_live_on(self):
        with kvquant.default(bits=4, **PAGES):
            made = DynamicCache()
        made.update(torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16), 0)
        assert made.memory().codes > 0

    def test_the_inner_one_wins_and_the_outer_comes_back(self):
        with kvquant.default(bits=4) as outer:
            with kvquant.default(bits=8) as inner:
                assert DynamicCache().quant is inner
            assert DynamicCache().quant is outer

    def test_an_exception_ends_it(self):
        original = DynamicCache.__init__
        with pytest.raises(RuntimeError, match="mine"), kvquant.default(bits=4), kvquant.default(bits=8):
            raise RuntimeError("mine")
        assert DynamicCache.__init__ is original

    def test_one_object_can_be_entered_again_also_within_itself(self):
        quantized = kvquant.default(bits=4)
        for _ in range(2):
            with quantized:
                with quantized:
                    assert type(DynamicCache()) is QuantCache
                assert type(DynamicCache()) is QuantCache
            assert type(DynamicCache()) is DynamicCache

    def test_it_decorates_functions(self):
        @kvquant.default(bits=4)
        def depth(n):
            return [type(DynamicCache())] + (depth(n - 1) if n else [])

        assert depth(2) == [QuantCache] * 3
        assert type(DynamicCache()) is DynamicCache

    def test_the_constructor_keeps_its_signature_inside(self):
        outside = inspect.signature(DynamicCache)
        with kvquant.default(bits=4):
            assert inspect.signature(DynamicCache) == outside

    def test_a_patch_put_on_top_of_ours_stays_and_ours_does_nothing_more(self):
        original, calls = DynamicCache.__init__, []
        with kvquant.default(bits=4):
            ours = DynamicCache.__init__

            def theirs(self, *args, **kwargs):
                calls.append(type(self))
                ours(self, *args, **kwargs)

            DynamicCache.__init__ = theirs
        try:
            assert DynamicCache.__init__ is theirs
            assert type(DynamicCache()) is DynamicCache
            with kvquant.default(bits=8):
                assert DynamicCache().quant == QuantConfig.preset(8)
            assert DynamicCache.__init__ is theirs
            assert calls.count(DynamicCache) == 2
        finally:
            DynamicCache.__init__ = original

    @pytest.mark.broad
    def test_importing_changes_nothing_in_transformers(self):
        code = (
            "from transformers import DynamicCache; before = dict(vars(DynamicCache))\n"
            "import kvquant; assert dict(vars(DynamicCache)) == before"
        )
        subprocess.run([sys.executable, "-c", code], check=True)

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({}, ValueError, "bits is missing; pass bits=4"),
            ({"bits": 5}, ValueError, "bits=5 is not supported"),
            ({"bits": 4, "sinks": -1}, ValueError, "sinks=-1 must be at least 0"),
            ({"bits": 4, "group": 1}, TypeError, "unknown options group"),
            ({"nbits": 4}, TypeError, "nbits=4: use bits=4"),
            ({"bits": 4, "config": None}, TypeError, "default\\(\\) takes no config"),
            ({"quant": 4}, TypeError, "quant must be a QuantConfig"),
        ],
    )
    def test_mistakes_are_named_at_the_call(self, arguments, error, message):
        with pytest.raises(error, match=message):
            kvquant.default(**arguments)


class TestThreads:
    def test_threads_that_generate_at_once_do_not_see_each_others(self):
        model, ids = tiny_model("llama", "sdpa"), torch.randint(2, 97, (1, 60))
        expected = {None: generate(model, ids, **{CACHE_ARGUMENT: DynamicCache()}).sequences}
        for bits in (8, 2):
            cache = QuantCache(bits=bits, config=model.config, **PAGES)
            expected[bits] = generate(model, ids, **{CACHE_ARGUMENT: cache}).sequences
        together, inside = threading.Barrier(3, timeout=60), threading.Barrier(2, timeout=60)

        def run(bits):
            together.wait()
            if bits is None:
                out = generate(model, ids)
                assert type(out[CACHE_ARGUMENT]) is DynamicCache
            else:
                with kvquant.default(bits=bits, **PAGES) as quant:
                    inside.wait()
                    out = generate(model, ids)
                    assert out[CACHE_ARGUMENT].quant is quant
            return torch.equal(out.sequences, expected[bits])

        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(run, [8, None, 2])) == [True] * 3

    def test_the_patch_lasts_until_the_last_thread_leaves(self):
        original = DynamicCache.__init__
        entered, leave = threading.Event(), threading.Event()

        def stay():
            with kvquant.default(bits=8):
                entered.set()
                assert leave.wait(60)
                return type(DynamicCache())

        with ThreadPoolExecutor(1) as pool:
            with kvquant.default(bits=4):
                staying = pool.submit(stay)
                assert entered.wait(60)
            assert DynamicCache.__init__ is not original
            assert type(DynamicCache()) is DynamicCache
            leave.set()
            assert staying.result(60) is QuantCache
        assert DynamicCache.__init__ is original

    def test_a_thread_takes_it_along_only_if_run_in_a_copy_of_the_context(self):
        with ThreadPoolExecutor(1) as pool, kvquant.default(bits=4):
            assert type(pool.submit(DynamicCache).result(60)) is DynamicCache
            copied = contextvars.copy_context()
            assert type(pool.submit(copied.run, DynamicCache).result(60)) is QuantCache

    def test_tasks_of_one_thread_do_not_see_each_others(self):
        async def make(bits):
            with kvquant.default(bits=bits) as quant:
                await asyncio.sleep(0)
                return DynamicCache().quant is quant

        async def both():
            return await asyncio.gather(make(4), make(8))

        assert asyncio.run(both()) == [True, True]


def test_layers_that_are_named_and_sliding_windows_are_stored_as_asked():
    model = tiny_model("gemma3_text", "sdpa")
    with kvquant.default(bits=4, quantize_sliding=True, skip_layers=(1,), **PAGES):
        cache = model(torch.randint(2, 97, (1, 60)), use_cache=True).cache
    assert type(cache) is QuantCache
    assert [type(layer).__name__ for layer in cache.layers] == ["QuantSlidingLayer", "DynamicLayer"]
    assert cache.memory().codes > 0
