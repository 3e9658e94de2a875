"""What a cache says about its layers."""

import pytest
import torch
from families import tiny_config
from transformers import AutoConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvquant import QuantCache, QuantConfig, QuantLayer
from kvquant.summary import LayerKind

INT4 = "packed (int4_per_channel / int4_per_token)"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (tiny_config("llama"), f"2 layers: 2 full attention, {INT4}"),
        (tiny_config("gemma3_text"), f"2 layers: 1 sliding-window, unquantized; 1 full attention, {INT4}"),
        (tiny_config("qwen3_next"), f"2 layers: 1 linear attention, unquantized; 1 full attention, {INT4}"),
        (tiny_config("falcon_h1"), "2 layers: 2 linear and full attention, unquantized"),
        (
            AutoConfig.for_model("deepseek_v32", num_hidden_layers=3),
            "3 layers: 3 indexed attention, unquantized",
        ),
        (
            AutoConfig.for_model(
                "gemma3n_text", num_hidden_layers=4, num_kv_shared_layers=2,
                layer_types=["sliding_attention", "full_attention"] * 2,
            ),
            f"4 layers: 1 sliding-window, unquantized; 1 full attention, {INT4}; "
            "2 dummy (no states of its own), unquantized",
        ),
        (
            AutoConfig.for_model("llama4_text", num_hidden_layers=1, layer_types=["chunked_attention"]),
            "1 layer: 1 sliding-window, unquantized",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)  # fmt: skip
def test_before_the_first_token(config, text):
    assert str(QuantCache(bits=4, config=config).summary()) == text


def test_without_configuration():
    cache = QuantCache(bits=(8, 2))
    kind = LayerKind("full attention", QuantConfig.preset((8, 2)))
    assert cache.summary().kinds == ()
    assert cache.summary().added == kind
    assert str(cache.summary()) == (
        "no layers yet; those to come: full attention, packed (int8_per_channel / int2_per_token)"
    )
    cache.update(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16), 2)
    assert cache.summary().kinds == ((kind, 3),)
    assert str(cache.summary()) == "3 layers: 3 full attention, packed (int8_per_channel / int2_per_token)"


def test_counts():
    summary = QuantCache(bits=16, config=tiny_config("gemma3_text")).summary()
    assert (summary.num_layers, summary.num_packed, summary.added) == (2, 1, None)
    assert [(kind.name, count) for kind, count in summary.kinds] == [("sliding-window", 1), ("full attention", 1)]
    assert str(summary).endswith("1 full attention, packed (identity / identity)")


def test_layers_are_named_by_what_they_are():
    class PackedWindow(QuantLayer):
        is_sliding = True

    class ModelsOwn(DynamicLayer):
        pass

    quant, other = QuantConfig.preset(8), QuantConfig.preset(2)
    cache = QuantCache(quant=quant)
    cache.layers = [
        QuantLayer(quant), PackedWindow(quant), ModelsOwn(), QuantLayer(other), DynamicSlidingWindowLayer(8),
        PackedWindow(quant), DynamicLayer(), QuantLayer(quant),
    ]  # fmt: skip
    assert cache.summary().kinds == (
        (LayerKind("full attention", quant), 2),
        (LayerKind("sliding-window", quant), 2),
        (LayerKind("ModelsOwn", None), 1),
        (LayerKind("full attention", other), 1),
        (LayerKind("sliding-window", None), 1),
        (LayerKind("full attention", None), 1),
    )
    assert cache.summary().num_packed == 5
