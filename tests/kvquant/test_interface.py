"""attn_implementation="kvquant", and that importing kvquant changes nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import tiny_model
from torch import nn
from torch.nn import functional as F

import kvquant
from kvquant import QuantCache
from kvquant.interface import attention_forward

ROOT = Path(__file__).parents[2]
SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}


@pytest.fixture(scope="module", autouse=True)
def _registered():
    kvquant.register()
    kvquant.register()


def test_a_model_that_never_calls_it_is_refused():
    model = tiny_model("bloom", "kvquant")
    with pytest.raises(NotImplementedError, match=r"BloomModel computes attention by itself .* load it with 'eager'"):
        model(torch.randint(2, 97, (1, 9)))


def test_the_chunk_is_packed_and_padding_learned_as_with_sdpa():
    model = tiny_model("llama", "kvquant")
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :13] = 0
    cache = QuantCache(bits=4, **SMALL_PAGES)
    with torch.no_grad():
        model(torch.randint(2, 97, (2, 60)), attention_mask=mask, cache=cache, use_cache=True)
    states = cache.layers[-1].states.snapshot()
    assert states.chunk.num_tokens == 0
    assert [row.start for row in states.rows] == [13, 0]


def test_position_bias_is_added():
    query, key, value = torch.randn(3, 1, 4, 6, 16).unbind(0)
    bias = torch.randn(1, 4, 6, 6)
    module = nn.Module()
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    for mask, is_causal, expected in (
        (None, False, bias),
        (None, True, bias.masked_fill(~causal, torch.finfo(torch.float32).min)),
        (causal[None, None], None, bias.masked_fill(~causal, torch.finfo(torch.float32).min)),
        (torch.ones(1, 1, 6, 6), None, bias + 1),
    ):
        out, weights = attention_forward(module, query, key, value, mask, is_causal=is_causal, position_bias=bias)
        reference = F.scaled_dot_product_attention(query, key, value, attn_mask=expected).transpose(1, 2)
        torch.testing.assert_close(out, reference)
        assert weights is None


def test_queries_whose_first_ones_were_dropped_are_the_last_ones():
    """Gemma 4 computes the layers that share keys and values only for the tokens whose logits are asked for."""
    query, key, value = torch.randn(3, 1, 4, 6, 16).unbind(0)
    module = nn.Module()
    whole, _ = attention_forward(module, query, key, value, None)
    some, _ = attention_forward(module, query[:, :, -3:], key, value, None)
    torch.testing.assert_close(some, whole[:, -3:])


def test_a_static_cache_which_is_longer_than_the_prompt_gives_what_sdpa_gives():
    ids = torch.randint(2, 97, (2, 20))
    outs = [
        tiny_model("llama", attention).generate(
            ids, max_new_tokens=5, do_sample=False, cache_implementation="static", disable_compile=True,
            return_dict_in_generate=True, output_logits=True,
        )
        for attention in ("sdpa", "kvquant")
    ]  # fmt: skip
    torch.testing.assert_close(outs[0].logits, outs[1].logits)


def test_dropout_is_refused():
    states = torch.randn(1, 2, 3, 16)
    with pytest.raises(NotImplementedError, match=r"attention dropout=0\.1 is not implemented by kvquant"):
        attention_forward(nn.Module(), states, states, states, None, dropout=0.1)


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    ).stdout.split()


def test_import_patches_nothing_and_loads_no_kernels_and_no_models():
    code = """
import sys
from transformers import AttentionInterface, AttentionMaskInterface, cache_utils
import torch
before = (dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping),
          dict(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING), torch.nn.functional.scaled_dot_product_attention)
loaded = set(sys.modules)
import kvquant
after = (dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping),
         dict(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING), torch.nn.functional.scaled_dot_product_attention)
new = {name.split(".")[0] for name in set(sys.modules) - loaded}
print(before == after, new & {"triton", "kvquant_kernels", "kvquant_evals", "tqdm"} or "nothing")
"""
    assert run_python(code) == ["True", "nothing"]


def test_no_top_level_package_shadows_another_library():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "evals" / "__init__.py").exists()
    found = run_python(
        "import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s and s.origin else 'none')"
    )
    assert str(ROOT) not in found[0]


def test_the_version_is_the_installed_one():
    from importlib.metadata import version

    assert kvquant.__version__ == version("kvquant-cache")


def test_readme_tables_are_those_of_the_results():
    subprocess.run([sys.executable, ROOT / "tools" / "update_readme.py", "--check"], check=True)
