"""attn_implementation="kvquant", and that importing kvquant changes nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import FAMILIES, tiny_model
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache

import kvquant
from kvquant import QuantCache
from kvquant.interface import attention_forward

ROOT = Path(__file__).parents[2]
SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}
WITH_ATTENTION_INTERFACE = [family for family in FAMILIES if family not in ("bloom", "falcon")]


@pytest.fixture(scope="module", autouse=True)
def _registered():
    kvquant.register()
    kvquant.register()


# These do not tell the cache their position ids, so that eager attention stores padding: other groups, other codes.
PADDING_UNSEEN_IN_EAGER = ("gpt_neox", "opt")
CASES = [
    (family, padding, bits)
    for family in WITH_ATTENTION_INTERFACE
    for padding in (0, 13)
    for bits in (None, 16, 4)
    if not (padding and bits == 4 and family in PADDING_UNSEEN_IN_EAGER)
]


@pytest.mark.parametrize(("family", "padding", "bits"), CASES)
def test_gives_what_eager_gives(family, padding, bits):
    ids = torch.randint(2, 97, (2, 40))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    logits = []
    for attention in ("eager", "kvquant"):
        model = tiny_model(family, attention)
        options = {"position_ids": positions} if family not in ("opt",) else {}
        cache = DynamicCache(config=model.config)
        if bits is not None:
            cache = QuantCache(bits=bits, config=model.config, **SMALL_PAGES)
        with torch.no_grad():
            steps = []
            for first, last in ((0, 30), (30, 31), (31, 36), (36, 40)):
                part = {name: value[:, first:last] for name, value in options.items()}
                out = model(ids[:, first:last], attention_mask=mask[:, :last], cache=cache, use_cache=True, **part)
                steps.append(out.logits)
        logits.append(torch.cat(steps, dim=1)[mask.bool()])
    torch.testing.assert_close(*logits, atol=2e-5, rtol=1e-4)  # float32 in another order, over two layers


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
