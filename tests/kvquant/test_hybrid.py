"""A cache without a configuration, given to a model that keeps other states than keys and values."""

import pytest
import torch
from families import tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from kvquant import QuantCache
from kvquant.compat import CACHE_ARGUMENT

JAMBA = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8,
    "use_mamba_kernels": False, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip


def hybrid_model(family):
    if family == "jamba":
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("jamba", **JAMBA)).eval()
    return tiny_model(family, "sdpa")


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "jamba"])
class TestModels:
    def test_it_is_told_what_to_pass(self, family):
        model, ids = hybrid_model(family), torch.randint(2, 97, (1, 20))
        for call in (model.generate, model):
            with pytest.raises(ValueError, match=r"keeps other states than keys and values.*pass config=model\.config"):
                call(ids, **{CACHE_ARGUMENT: QuantCache(bits=4)}, use_cache=True)

    def test_then_it_works(self, family):
        model, ids = hybrid_model(family), torch.randint(2, 97, (1, 20))
        cache = QuantCache(bits=4, config=model.config)
        out = model.generate(ids, **{CACHE_ARGUMENT: cache}, max_new_tokens=5, do_sample=False)
        assert out.shape == (1, 25)


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.has_previous_state(0),
        lambda cache: cache.get_conv_state(0),
        lambda cache: cache.update_conv_state(torch.ones(1, 2, 4), 0),
        lambda cache: cache.get_recurrent_state(0),
        lambda cache: cache.update_recurrent_state(torch.ones(1, 2, 4), 0),
        lambda cache: cache.update_indexer(torch.ones(1, 2, 4), 0),
    ],
)
def test_every_method_for_other_states_asks_for_the_configuration(call):
    with pytest.raises(ValueError, match=r"pass config=model\.config"):
        call(QuantCache(bits=4))


def test_with_a_configuration_the_methods_are_those_of_dynamic_cache():
    cache = QuantCache(bits=4, config=tiny_config("qwen3_next"))
    states = torch.randn(1, 2, 4)
    assert not cache.has_previous_state()
    assert cache.get_conv_state(0) is None
    cache.update_conv_state(states, 0, conv_kernel_size=4)
    cache.update_recurrent_state(states, 0)
    assert cache.has_previous_state(0)
    assert torch.equal(cache.get_conv_state(0), states)
    assert torch.equal(cache.get_recurrent_state(0), states)
    with pytest.raises(ValueError, match="conv state for non linear attention layer 1"):
        cache.get_conv_state(1)
