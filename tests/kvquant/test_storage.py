"""Saving and loading: models go on as if nothing had happened, and a file that is not whole is refused."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from contents import SMALL_PAGES, content, fill, same_cache, small_cache
from families import tiny_config, tiny_model
from family_table import FAMILIES
from safetensors.torch import save_file
from transformers.cache_utils import DynamicLayer

from kvquant import QuantCache, QuantConfig, QuantLayer, compat, storage
from kvquant.formats import IDENTITY, IntegerGrid, QuantFormat


def saved_and_loaded(cache, path, **options):
    cache.save(path)
    return QuantCache.load(path, **options)


def prefix_of(model, options=None, tokens=50, mask=None, width=4):
    """A cache filled by a model, and the ids of the prompt that goes on."""
    ids = torch.randint(2, 97, (2, tokens + 5))
    cache = QuantCache(bits=width, config=model.config, **SMALL_PAGES)
    mask = torch.ones_like(ids) if mask is None else mask
    generate(model, ids[:, :tokens], cache, mask[:, :tokens], 3, **(options or {}))
    return cache, ids, mask


def generate(model, ids, cache, mask, new_tokens, **options):
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True,
        output_logits=True, **{compat.CACHE_ARGUMENT: cache}, **options,
    )  # fmt: skip


def logits_of(model, cache):
    """Of the next tokens, in the dark about what came before."""
    torch.manual_seed(1)
    rows = cache.layers[-1].keys.shape[0]
    with torch.no_grad():
        return [
            model(torch.randint(2, 97, (rows, count)), use_cache=True, **{compat.CACHE_ARGUMENT: cache}).logits
            for count in (1, 7, 1, 40, 1)
        ]


def assert_goes_on_alike(model, loaded, cache):
    assert loaded.get_seq_length() == cache.get_seq_length()
    for ours, theirs in zip(logits_of(model, loaded), logits_of(model, cache), strict=True):
        assert torch.equal(ours, theirs)


CASES = [
    (family, attention)
    for family in """llama qwen2 qwen3 mistral gemma2 gemma3_text phi3 gpt2 gpt_neox gpt_oss deepseek_v3 falcon bloom
    opt olmo2 cohere2 glm4""".split()
    for attention in ("sdpa", "eager")
    if FAMILIES[family].limit(attention) is None
]


@pytest.mark.parametrize("tokens", [20, 200], ids=["without_pages", "with_pages"])
def test_the_room_for_a_maximal_length_is_allocated_again(tokens, path):
    cache = QuantCache(bits=4, **(SMALL_PAGES | {"max_length": 3200}))
    loaded = saved_and_loaded(fill(cache, tokens), path)
    loaded.update(*torch.randn(2, 2, 2, 200, 64), 0)
    loaded.layers[0].settle()
    assert loaded.layers[0].states.snapshot().pool.capacity == 2 * 3200 // SMALL_PAGES["page_size"]


class TestModels:
    @pytest.mark.parametrize(("family", "attention"), CASES)
    def test_every_family_goes_on_alike_with_and_without_config(self, family, attention, path):
        model = tiny_model(family, attention)
        cache, _, _ = prefix_of(model)
        cache.save(path)
        first = QuantCache.load(path)
        assert_goes_on_alike(model, first, QuantCache.load(path, config=model.config))
        assert_goes_on_alike(model, QuantCache.load(path), cache)

    def test_left_padding(self, path):
        model = tiny_model("llama", "sdpa")
        mask = torch.ones(2, 55, dtype=torch.long)
        mask[0, :43] = 0
        cache, _, _ = prefix_of(model, mask=mask)
        loaded = saved_and_loaded(cache, path)
        assert [row.start for row in loaded.layers[0].states.snapshot().rows] == [43, 0]
        assert content(loaded) == content(cache)

    def test_a_row_of_nothing_but_padding_is_still_open(self, path):
        model = tiny_model("llama", "sdpa")
        mask = torch.ones(2, 55, dtype=torch.long)
        mask[0, :51] = 0
        outs = []
        for is_saved in (False, True):
            torch.manual_seed(0)
            ids, cache = torch.randint(2, 97, (2, 55)), QuantCache(bits=4, **SMALL_PAGES)
            with torch.no_grad():
                model(ids[:, :50], attention_mask=mask[:, :50], use_cache=True, **{compat.CACHE_ARGUMENT: cache})
                cache = saved_and_loaded(cache, path) if is_saved else cache
                more = model(ids[:, 50:], attention_mask=mask, use_cache=True, **{compat.CACHE_ARGUMENT: cache})
            outs.append(more.logits)
            assert [row.start for row in cache.layers[0].states.snapshot().rows] == [51, 0]
        assert torch.equal(*outs)

    def test_after_beam_search(self, path):
        model = tiny_model("llama", "sdpa")
        cache, _, _ = prefix_of(model, {"num_beams": 3})
        loaded = saved_and_loaded(cache, path)
        assert content(loaded) == content(cache)
        assert replace(loaded.memory(), reserved=0) == replace(cache.memory(), reserved=0)
        assert_goes_on_alike(model, loaded, cache)

    def test_a_window_whose_past_is_kept_for_rollback(self, path):
        model = tiny_model("gemma3_text", "sdpa")
        cache = QuantCache(bits=4, config=model.config, **SMALL_PAGES)
        cache.activate_past_recording()
        ids = torch.randint(2, 97, (1, 50))
        with torch.no_grad():
            model(ids, use_cache=True, **{compat.CACHE_ARGUMENT: cache})
        loaded = saved_and_loaded(cache, path, config=model.config)
        assert loaded.layers[0].keys.shape[2] == 50
        for each in (loaded, cache):
            each.crop(-3)
        assert loaded.layers[0].keys.shape[2] == 31
        assert_goes_on_alike(model, loaded, cache)

    def test_a_layer_left_exact_by_hand_and_one_that_holds_nothing(self, path):
        cache = QuantCache(bits=4, **SMALL_PAGES)
        empty = [cls() for cls in compat.EMPTY_LAYERS]
        cache.layers = [DynamicLayer(), QuantLayer(cache.quant), DynamicLayer(), *empty]
        loaded = saved_and_loaded(fill(cache), path)
        assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in cache.layers]
        assert torch.equal(loaded.layers[0].keys, cache.layers[0].keys)
        assert loaded.layers[2].keys is None

    @pytest.mark.parametrize(
        ("family", "options"),
        [
            ("gemma3_text", {"quantize_sliding": True}),
            ("gemma3_text", {"quantize_sliding": True, "skip_layers": (1,)}),
            ("deepseek_v3", {}),
            ("deepseek_v3", {"quantize_rope": True}),
            ("llama", {"layer_bits": {1: 8}}),
        ],
        ids=str,
    )
    def test_a_model_goes_on_from_packed_windows_latents_and_layers_of_their_own(self, family, options, path):
        model, ids = tiny_model(family, "sdpa"), torch.randint(2, 97, (2, 120))
        pages = {"sinks": 2, "residual_length": 5, "page_size": 8}
        cache = QuantCache(bits=4, config=model.config, **pages, **options)
        with torch.no_grad():
            model(ids[:, :80], cache=cache, use_cache=True)
            cache.save(path)
            loaded = QuantCache.load(path, config=model.config)
            assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in cache.layers]
            for token in ids[:, 80:].split(1, dim=1):
                expected, got = (model(token, cache=c, use_cache=True).logits for c in (cache, loaded))
                assert torch.equal(got, expected)
        assert loaded.memory() == cache.memory()

    @pytest.mark.parametrize(
        ("family", "kind"),
        [("qwen3_next", "LinearAttentionLayer"), ("falcon_h1", "LinearAttentionAndFullAttentionLayer")],
    )
    def test_recurrent_states_are_refused_before_anything_is_written(self, family, kind, path):
        cache = QuantCache(bits=4, config=tiny_config(family))
        with pytest.raises(NotImplementedError, match=f"layer 0 cannot be saved: it is a {kind}, which is none of"):
            cache.save(path)
        assert list(path.parent.iterdir()) == []

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"num_hidden_layers": 3}, "it holds 2 layers, and config has 3"),
            (
                {"layer_types": ["full_attention"] * 2},
                "layer 0 is a layer with a window of 32 tokens in the file, and a full-attention layer by config",
            ),
            ({"sliding_window": 16}, "window of 32 tokens in the file, and a layer with a window of 16 tokens by"),
            ({"num_key_value_heads": 4}, "layer 0 has num_key_value_heads=2 in the file, and num_key_value_heads=4"),
            ({"head_dim": 8}, "layer 0 has head_dim=16 in the file, and head_dim=8 by config"),
        ],
        ids=str,
    )
    def test_another_model_is_refused(self, changes, message, path):
        prefix_of(tiny_model("gemma3_text", "sdpa"))[0].save(path)
        config = tiny_config("gemma3_text")
        for name, value in changes.items():
            setattr(config, name, value)
        if "num_hidden_layers" in changes:
            config.layer_types = [*config.layer_types, "full_attention"]
        with pytest.raises(ValueError, match=f"prefix.safetensors does not fit config: .*{message}"):
            QuantCache.load(path, config=config)

    def test_what_is_no_config_is_named(self, path):
        fill(QuantCache(bits=4)).save(path)
        with pytest.raises(TypeError, match="config must be a model's configuration"):
            QuantCache.load(path, config="llama")


class TestWriting:
    def test_a_file_is_replaced_at_the_end_or_not_at_all(self, path, monkeypatch):
        cache = fill(QuantCache(bits=4))
        cache.save(path)
        before = path.read_bytes()

        def half(tensors, name, metadata):
            Path(name).write_bytes(b"half")
            raise KeyboardInterrupt

        monkeypatch.setattr(storage, "save_file", half)
        with pytest.raises(KeyboardInterrupt):
            fill(cache).save(path)
        assert path.read_bytes() == before
        assert list(path.parent.iterdir()) == [path]

    def test_permissions_are_those_of_other_new_files(self, path):
        other = path.with_name("other")
        other.touch()
        fill(QuantCache(bits=4)).save(path)
        assert path.stat().st_mode == other.stat().st_mode

    def test_a_folder_that_is_not_there(self, path):
        with pytest.raises(FileNotFoundError):
            fill(QuantCache(bits=4)).save(path / "nowhere" / "prefix.safetensors")

    @pytest.mark.parametrize("name", ["int4_per_token", "mine"])
    def test_formats_that_a_reader_could_not_know_are_refused(self, name, path):
        fmt = QuantFormat(name, IntegerGrid(4, 10), "per_token")
        cache = fill(QuantCache(quant=QuantConfig(key=fmt, value=IDENTITY)))
        with pytest.raises(NotImplementedError, match=r"its formats .* are not those of kvquant\.FORMATS"):
            cache.save(path)

    def test_states_that_are_no_floats_are_refused(self, path):
        cache, states = QuantCache(bits=16), torch.zeros(1, 2, 5, 8, dtype=torch.int8)
        cache.update(states, states, 0)
        with pytest.raises(NotImplementedError, match=r"layer 0 cannot be saved: its states are torch\.int8"):
            cache.save(path)

    def test_group_sizes_and_clipping_are_kept(self, path):
        quant = QuantConfig.preset(4, **SMALL_PAGES)
        quant = replace(quant, value=replace(quant.value, group_size=16).clipped())
        assert saved_and_loaded(fill(QuantCache(quant=quant)), path).layers[0].quant == quant


def loaded_or_refused(path):
    try:
        return QuantCache.load(path)
    except ValueError as error:
        return error


class TestDamage:
    def refuses(self, path, pattern=""):
        with pytest.raises(ValueError, match=f"prefix.safetensors cannot be loaded: .*{pattern}") as caught:
            QuantCache.load(path)
        assert type(caught.value) is ValueError

    def test_every_single_byte_may_flip(self, path):
        cache = small_cache()
        cache.save(path)
        good, rng, unharmed = path.read_bytes(), random.Random(0), 0
        header = 8 + int.from_bytes(good[:8], "little")
        for place in [*range(header), *(rng.randrange(header, len(good)) for _ in range(400))]:
            bad = bytearray(good)
            bad[place] ^= 1 << rng.randrange(8)
            path.write_bytes(bad)
            loaded = loaded_or_refused(path)
            if isinstance(loaded, ValueError):
                assert str(path) in str(loaded)
            else:
                unharmed += 1
                assert same_cache(loaded, cache)
        assert unharmed < 8  # what the header is padded with

    def test_every_length_is_too_short(self, path):
        small_cache().save(path)
        good = path.read_bytes()
        for length in [*range(0, 400, 7), *range(400, len(good), 101), len(good) - 1]:
            path.write_bytes(good[:length])
            self.refuses(path, "it is no whole safetensors file")
        path.write_bytes(good + b"\0")
        self.refuses(path)

    def test_a_missing_file_is_a_missing_file(self, path):
        with pytest.raises(FileNotFoundError):
            QuantCache.load(path)

    @pytest.mark.parametrize("kind", ["text", "pickle", "zeros"])
    def test_what_is_no_safetensors(self, kind, path):
        raw = {"text": b"Once upon a time\n" * 99, "pickle": pickle.dumps(print), "zeros": bytes(5000)}[kind]
        path.write_bytes(raw)
        self.refuses(path, "it is no whole safetensors file")

    @pytest.mark.parametrize("metadata", [None, {"format": "pt"}], ids=str)
    def test_safetensors_of_something_else(self, metadata, path):
        save_file({"model.weight": torch.zeros(3, 3)}, path, metadata)
        self.refuses(path, "it is a safetensors file of something else than a QuantCache")

    def test_a_newer_version(self, path, monkeypatch):
        monkeypatch.setattr(storage, "VERSION", "2")
        fill(QuantCache(bits=4)).save(path)
        monkeypatch.undo()
        self.refuses(path, "it has format version 2, and this version of kvquant reads 1")
