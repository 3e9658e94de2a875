"""skip_layers and layer_bits: which layer gets which precision."""

import copy
import pickle

import pytest
import torch
from families import tiny_config, tiny_model
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvquant import QuantCache, QuantConfig, QuantLayer
from kvquant.layer_policy import LayerPolicy

SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}
FOUR_LAYERS = copy.deepcopy(tiny_config("llama"))
FOUR_LAYERS.num_hidden_layers = 4


def fill(cache, layers=4, tokens=40):
    for layer in range(layers):
        cache.update(*torch.randn(2, 1, 2, tokens, 16), layer)
    return cache


def found(cache):
    """The number of bits of each layer's keys and values; None for those of transformers."""
    return [
        (layer.quant.key.bits, layer.quant.value.bits) if isinstance(layer, QuantLayer) else None
        for layer in cache.layers
    ]


def test_named_layers_differ_and_the_others_do_not():
    options = {"skip_layers": (0, -1), "layer_bits": {1: (8, 4)}}
    assert found(QuantCache(bits=4, config=FOUR_LAYERS, **options)) == [None, (8, 4), (4, 4), None]


def test_without_config_layers_are_counted_as_they_come():
    cache = QuantCache(bits=4, skip_layers=[2], layer_bits={0: 8})
    assert found(fill(cache, layers=1)) == [(8, 8)]
    assert found(fill(cache)) == [(8, 8), (4, 4), None, (4, 4)]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_made_before_the_layers_counts_its_own(duplicate):
    original = QuantCache(bits=4, skip_layers=(1,))
    other = duplicate(original)
    fill(original)
    assert found(fill(other)) == [(4, 4), None, (4, 4), (4, 4)]


def test_a_skipped_layer_is_dynamic_cache_to_the_bit():
    torch.manual_seed(1)
    packed = fill(QuantCache(bits=2, skip_layers=(1,), **SMALL_PAGES), layers=2)
    torch.manual_seed(1)
    exact = fill(DynamicCache(), layers=2)
    assert [torch.equal(packed.layers[i].keys.clone(), exact.layers[i].keys) for i in (0, 1)] == [False, True]
    assert type(packed.layers[1]) is DynamicLayer


def test_all_else_of_a_layer_is_as_in_the_other_layers():
    options = {"sinks": 1, "residual_length": 3, "page_size": 16, "rotation": False, "clip": True}
    cache = QuantCache(bits=4, config=FOUR_LAYERS, layer_bits={1: 8}, **options)
    assert cache.layers[1].quant == QuantConfig.preset(8, **options)
    quant = QuantConfig.preset(4, sinks=0)
    assert QuantCache(quant=quant, config=FOUR_LAYERS, layer_bits={1: 2}).layers[1].quant == QuantConfig.preset(
        2, sinks=0
    )


def test_memory_counts_a_skipped_layer_as_unquantized():
    cache = fill(QuantCache(bits=4, skip_layers=(1,), layer_bits={2: 8}, **SMALL_PAGES))
    per_layer = 2 * 2 * 40 * 16  # keys and values, heads, tokens, head_dim
    pages = (40 - 2 - 5) // 8
    codes_at_8_bit = pages * 8 * 2 * 2 * 16
    memory = cache.memory()
    assert memory.unquantized == 4 * per_layer
    assert memory.codes == codes_at_8_bit * (0.5 + 1 + 0.5)
    assert memory.elements == 3 * per_layer


def test_generation_with_a_skipped_layer_equals_dynamic_cache_with_the_identity():
    model = tiny_model("llama", "sdpa")
    ids = torch.randint(2, 97, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    outs = [
        model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=20, do_sample=False, num_beams=2)
        for cache in (DynamicCache(), QuantCache(bits=16, skip_layers=(0,), **SMALL_PAGES))
    ]
    assert torch.equal(*outs)


def test_layers_that_are_never_quantized_may_be_skipped():
    cache = QuantCache(bits=4, config=tiny_config("gemma3_text"), skip_layers=range(2))
    assert [type(layer) for layer in cache.layers] == [DynamicSlidingWindowLayer, DynamicLayer]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"skip_layers": 3}, TypeError, "skip_layers must be a tuple of layer indices, got 3"),
        ({"skip_layers": ("3",)}, TypeError, "skip_layers must name layers by their index, an int, got '3'"),
        ({"skip_layers": (True,)}, TypeError, "skip_layers must name layers by their index, an int, got True"),
        ({"skip_layers": (4,)}, ValueError, "skip_layers names layer 4, but the model has layers 0 to 3"),
        ({"skip_layers": (-5,)}, ValueError, "skip_layers names layer -5, but the model has layers 0 to 3"),
        ({"layer_bits": ((1, 8),)}, TypeError, r"layer_bits must be a mapping like {3: 8}, got \(\(1, 8\),\)"),
        ({"layer_bits": {4: 8}}, ValueError, "layer_bits names layer 4, but the model has layers 0 to 3"),
        ({"layer_bits": {1: 5}}, ValueError, "layer_bits of layer 1: bits=5 is not supported"),
        ({"layer_bits": {1: 8, -3: 4}}, ValueError, "layer_bits names layer 1, which layer_bits names too"),
        (
            {"layer_bits": {3: 8}, "skip_layers": (-1,)},
            ValueError,
            "layer 3, which skip_layers names too",
        ),
    ],
)
def test_mistakes_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        QuantCache(bits=4, config=FOUR_LAYERS, **arguments)


@pytest.mark.parametrize("arguments", [{"skip_layers": (-1,)}, {"layer_bits": {-1: 8}}], ids=lambda a: next(iter(a)))
def test_counting_from_the_end_needs_the_number_of_layers(arguments):
    with pytest.raises(ValueError, match=r"names layer -1, counted from the last one; pass config=model\.config"):
        QuantCache(bits=4, **arguments)


def test_bits_for_a_layer_that_is_not_ours_are_refused():
    with pytest.raises(ValueError, match="layer_bits names layer 0, which stays as transformers makes it"):
        QuantCache(bits=4, config=tiny_config("gemma3_text"), layer_bits={0: 8})


def test_a_policy_is_a_value():
    policies = [LayerPolicy.resolve(QuantConfig(), (-1,), {0: 8}, quantizable=[True] * 3) for _ in range(2)]
    assert policies[0] == policies[1]
    assert hash(policies[0]) == hash(policies[1])
    assert [policies[0].of(i) for i in range(3)] == [QuantConfig.preset(8), QuantConfig(), None]
