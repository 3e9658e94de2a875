"""Public reports of code around a cache that stopped working: dependencies, examples, signatures, compilers."""

import copy
import doctest
import inspect
import subprocess
import sys

import pytest
import torch
from families import tiny_model

import kvquant
from kvquant import QuantCache

SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}


@pytest.mark.broad
def test_no_other_quantization_library_is_needed():
    """https://github.com/huggingface/transformers/issues/34848: a release of optimum-quanto broke the cache."""
    code = """
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec

class WithoutThem(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.split(".")[0] in ("optimum", "quanto", "hqq")
        return None if hidden else super().find_spec(name, path, target)

sys.meta_path = [WithoutThem if finder is PathFinder else finder for finder in sys.meta_path]
import torch
from kvquant import QuantCache
cache = QuantCache(bits=4)
for tokens in (300, 1):
    keys, values = cache.update(torch.randn(1, 2, tokens, 64), torch.randn(1, 2, tokens, 64), 0)
    torch.nn.functional.scaled_dot_product_attention(torch.randn(1, 2, 1, 64), keys, values)
print(find_spec("hqq"), find_spec("optimum"), cache.memory().codes > 0)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/").stdout
    assert out.split() == ["None", "None", "True"]


def test_the_examples_in_docstrings_run():
    """https://github.com/huggingface/transformers/issues/40099: a documented example raised after a refactoring.

    It was in a docstring. README.md's examples are run in tests/end_to_end, with the real model.
    """
    ids = torch.randint(2, 97, (1, 20))
    names = {
        "model": tiny_model("llama", "sdpa"),
        "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        "QuantCache": QuantCache,
        "kvquant": kvquant,
    }
    found = 0
    for name in kvquant.__all__:
        docstring = inspect.getdoc(getattr(kvquant, name))
        for example in doctest.DocTestParser().get_examples(docstring or ""):
            exec(example.source, dict(names))
            found += 1
    assert found >= 1


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (({"sin": torch.zeros(1), "cos": torch.zeros(1), "cache_position": torch.arange(3)},), {}),
        ((None,), {}),
        ((), {"cache_kwargs": {"cache_position": torch.arange(3)}}),
        ((), {"kwargs": {}}),
        ((), {"kwargs": {"position_ids": torch.arange(3)[None], "output_router_logits": False}}),
        ((), {"kwargs": None}),
    ],
    ids=["positional cache_kwargs", "positional None", "cache_kwargs", "empty kwargs", "kwargs", "no kwargs"],
)
def test_update_takes_what_old_and_new_models_hand_it(args, kwargs):
    """https://github.com/huggingface/transformers/pull/48931: models now pass `kwargs=`, until 5.3 `cache_kwargs`."""
    cache = QuantCache(bits=4, **SMALL_PAGES)
    chunks = torch.randn(2, 2, 1, 2, 30, 16)
    for key, value in chunks:
        keys, values = cache.update(key, value, 0, *args, **kwargs)
    layer = QuantCache(bits=4, config=tiny_model("llama", "sdpa").config, **SMALL_PAGES).layers[0]
    for key, value in chunks:
        pair = layer.update(key, value, *args, **kwargs)
    plain = QuantCache(bits=4, **SMALL_PAGES)
    for key, value in chunks:
        expected = plain.update(key, value, 0)
    for got in ((keys, values), pair):
        assert all(torch.equal(x.materialize(), y.materialize()) for x, y in zip(got, expected, strict=True))


@pytest.mark.slow  # compiling takes a while
@pytest.mark.parametrize("bits", [8, 16])
def test_a_compiled_model_generates_the_same(bits):
    """https://github.com/huggingface/transformers/pull/31277: a quantized cache that torch.compile cannot take."""
    model, ids = tiny_model("llama", "sdpa"), torch.randint(2, 97, (1, 20))
    compiled = torch.compile(model, backend="eager", dynamic=True)
    results = []
    for forward in (model, compiled):
        cache, step, logits = QuantCache(bits=bits, **SMALL_PAGES), ids, []
        with torch.no_grad():
            for _ in range(12):
                logits.append(forward(step, cache=cache, use_cache=True).logits[:, -1])
                step = logits[-1].argmax(-1, keepdim=True)
        assert len(cache.layers[-1].states.snapshot().rows[0].pages) >= 2
        results.append(torch.stack(logits))
    assert torch.equal(results[0].argmax(-1), results[1].argmax(-1))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)


@pytest.mark.slow  # compiling takes a while
def test_copies_of_a_cache_keep_their_own_tokens_under_a_compiled_model():
    """The second copy finds the room of the tail taken that the first one has."""
    model, ids = tiny_model("llama", "sdpa"), torch.randint(2, 97, (1, 60))
    compiled = torch.compile(model, backend="eager", dynamic=True)
    tails = []
    for forward in (model, compiled):
        prefix = QuantCache(bits=4, sinks=2, residual_length=5, page_size=32)
        with torch.no_grad():
            model(ids, cache=prefix, use_cache=True)
            copies = [copy.deepcopy(prefix) for _ in range(4)]
            for token, cache in enumerate(copies):
                forward(torch.full((1, 1), 5 + token), cache=cache, use_cache=True)
        tails.append([cache.layers[0].states.snapshot().tail for cache in copies])
    for eager, other in zip(*tails, strict=True):
        torch.testing.assert_close(tuple(eager), tuple(other), atol=1e-5, rtol=1e-5)
