"""Code written for DynamicCache, for older transformers, or for QuantizedCache."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from families import tiny_config
from transformers import DynamicCache

from kvquant import QuantCache
from kvquant.migration import FormerNames, Replaced

PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}
NAMES = [name for name, value in vars(FormerNames).items() if isinstance(value, Replaced)]


def filled(cache, layers=2):
    torch.manual_seed(0)
    for i in range(layers):
        cache.update(torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16), i)
    return cache


class TestReading:
    """What DynamicCache still offers, with the dequantized states in place of the exact ones."""

    def test_length_and_layers(self):
        cache = filled(QuantCache(bits=4, **PAGES))
        assert len(cache) == len(cache.layers) == 2
        assert len(QuantCache(bits=4)) == len(DynamicCache()) == 0
        assert len(QuantCache(bits=4, config=tiny_config("llama"))) == 2

    def test_iteration_and_layers_give_the_dequantized_states(self):
        cache = filled(QuantCache(bits=4, **PAGES))
        assert cache.memory().codes > 0
        for layer, (keys, values, *window) in zip(cache.layers, cache, strict=True):
            states = layer.states.snapshot()
            assert torch.equal(layer.keys.clone(), states.columns(0))
            assert torch.equal(layer.values.clone(), states.columns(1))
            assert torch.equal(keys.clone(), states.columns(0))
            assert torch.equal(values.clone(), states.columns(1))
            assert window == [None]

    def test_the_identity_gives_what_dynamic_cache_gives(self):
        ours, theirs = filled(QuantCache(bits=16, **PAGES)), filled(DynamicCache())
        assert ours.get_seq_length() == theirs.get_seq_length() == 40
        assert len(ours) == len(theirs)
        for (keys, values, window), (exact_keys, exact_values, exact_window) in zip(ours, theirs, strict=True):
            assert torch.equal(keys.clone(), exact_keys)
            assert torch.equal(values.clone(), exact_values)
            assert window is exact_window is None

    @pytest.mark.parametrize("name", ["get_max_length", "get_max_cache_shape"])
    def test_the_maximal_length_is_asked_for_as_in_the_installed_version(self, name):
        cache = filled(QuantCache(bits=4))
        assert hasattr(cache, name) == hasattr(DynamicCache(), name)
        if hasattr(cache, name):
            assert getattr(cache, name)() == -1


class TestFormerNames:
    """https://github.com/huggingface/transformers/issues/48479: names vanished without any hint."""

    @pytest.mark.parametrize("name", NAMES)
    def test_names_are_there_where_dynamic_cache_has_them(self, name):
        for cache in (QuantCache(bits=4), QuantCache):
            assert hasattr(cache, name) == hasattr(DynamicCache, name)

    @pytest.mark.parametrize(
        ("name", "hint"),
        [
            ("key_cache", r"QuantCache has no key_cache: use cache.layers\[i\].keys"),
            ("value_cache", r"use cache.layers\[i\].values"),
            ("seen_tokens", r"use cache.get_seq_length\(\)"),
            ("get_usable_length", r"use cache.get_seq_length\(layer_idx\)"),
            ("to_legacy_cache", r"use tuple\(\(keys, values\) for keys, values, \*_ in cache\)"),
            ("from_legacy_cache", r"call cache.update\(keys, values, i\) for every layer i"),
            ("conv_states", "before transformers 5.5"),
        ],
    )
    def test_hints_name_the_replacement(self, name, hint):
        for cache in (QuantCache(bits=4), QuantCache):
            with pytest.raises(AttributeError, match=hint):
                getattr(cache, name)

    def test_what_hints_say_works(self):
        cache = filled(QuantCache(bits=4, **PAGES))
        legacy = tuple((keys, values) for keys, values, *_ in cache)
        again = QuantCache(bits=16, **PAGES)
        for i, (keys, values) in enumerate(legacy):
            again.update(keys, values, i)
        for layer, keys in zip(again.layers, [layer.keys for layer in cache.layers], strict=True):
            assert torch.equal(layer.keys.clone(), keys.clone())

    @pytest.mark.parametrize("index", [0, -1, slice(2)], ids=str)
    def test_indexing_names_the_replacement(self, index):
        with pytest.raises(TypeError, match=r"QuantCache cannot be indexed: use cache.layers\[.*\].keys"):
            filled(QuantCache(bits=4))[index]

    def test_unknown_names_are_plain_attribute_errors(self):
        with pytest.raises(AttributeError, match="no attribute 'keycache'"):
            _ = QuantCache(bits=4).keycache

    def test_copies_and_pickles_are_not_disturbed(self):
        cache = filled(QuantCache(bits=4, **PAGES))
        for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            assert torch.equal(copied.layers[0].keys.clone(), cache.layers[0].keys.clone())


class TestForeignArguments:
    def test_all_given_ones_are_explained_at_once(self):
        with pytest.raises(TypeError) as caught:
            QuantCache(
                nbits=4, q_group_size=64, axis_key=0, axis_value=1, backend="quanto", compute_dtype=torch.float16,
                device="cuda", residual_length=128,
            )  # fmt: skip
        message = str(caught.value)
        assert message.startswith("got arguments of transformers' QuantizedCache; nbits=4: use bits=4; ")
        for part in (
            "q_group_size=64: leave it out, values share a scale over at most 64 channels",
            "axis_key=0: leave it out, keys are grouped per channel",
            "axis_value=1: leave it out, values are grouped per token",
            "backend='quanto': leave it out",
            "compute_dtype=torch.float16: leave it out",
            "device='cuda': leave it out",
        ):
            assert part in message
        assert "residual_length" not in message  # it is an option of ours

    @pytest.mark.parametrize(
        ("arguments", "hint"),
        [
            ({"nbits": 8}, "nbits=8: use bits=8"),
            ({"bits": 4, "nbits": 4}, "nbits=4: use bits=4"),
            ({"nbits": 1}, "nbits=1: bits=1 is not supported; use one of 16, 8, 4, 3, 2"),
            ({"backend": "fp8"}, "backend='fp8': use bits='fp8'"),
            (
                {"cache_config": {"backend": "hqq", "nbits": 2, "residual_length": 64}},
                "backend='hqq': leave it out, .*; nbits=2: use bits=2; "
                "residual_length: use residual_length=... itself; cache_config: pass what it holds as arguments",
            ),
            ({"cache_config": object()}, "cache_config: pass what it holds as arguments"),
        ],
    )
    def test_equivalents(self, arguments, hint):
        with pytest.raises(TypeError, match=hint):
            QuantCache(**arguments)
