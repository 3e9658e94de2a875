"""Generation through the kernels: caches find and use them by themselves, and tokens do not depend on them."""

import logging

import pytest
import torch
from families import tiny_model

from kvquant import QuantCache, kernel
from kvquant_kernels.triton import attend
from kvquant_kernels.triton.attend import TritonAttention
from kvquant_kernels.triton.layout import TritonLayout

pytestmark = pytest.mark.broad


class Anywhere(TritonAttention):
    """The kernel on the device of these tests, which may be the interpreter's CPU; counts its calls."""

    def __init__(self, device):
        self.device_type, self.calls = device.type, 0

    def missing(self):
        return None

    def run(self, states, call, out_dtype=None):
        self.calls += 1
        return super().run(states, call, out_dtype)


@pytest.fixture
def found(monkeypatch, device):
    monkeypatch.undo()  # layouts are chosen as they are for users
    anywhere = Anywhere(device)
    monkeypatch.setattr(kernel, "discover", lambda: (anywhere,))
    kernel.log_once.cache_clear()
    return anywhere


@pytest.mark.parametrize(
    "bits", [4, *(pytest.param(bits, marks=pytest.mark.broad) for bits in (8, 2, "fp8", (4, 2)))], ids=str
)
def test_greedy_tokens_are_those_of_the_reference(monkeypatch, found, bits):
    model = tiny_model("llama", "sdpa").to(torch.bfloat16)
    ids = torch.randint(2, 97, (2, 100))
    mask = torch.ones_like(ids)
    mask[0, :17] = 0
    outs, layouts = [], []
    for switch in ("on", "off"):
        monkeypatch.setenv("KVQUANT_KERNELS", switch)
        cache = QuantCache(bits=bits, residual_length=8, page_size=64)
        outs.append(model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=5, do_sample=False))
        layouts.append(cache.layers[0].states.snapshot().layout)
    assert [isinstance(layout, TritonLayout) for layout in layouts] == [True, False]
    assert found.calls > 0
    assert torch.equal(*outs)


def test_a_model_in_float32_is_told_why_the_kernel_is_not_used(found, caplog):
    x = torch.randn(1, 2, 200, 64)
    with caplog.at_level(logging.WARNING, "kvquant"):
        cache = QuantCache(bits=4)
        cache.update(x, x, 0)
        cache.layers[0].settle()
    reason = "keys are torch.float32 and values torch.float32, not both bfloat16 or float16"
    assert caplog.messages == [f"triton attention is not used: {reason}"]


def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert attend._missing.__wrapped__() == "triton is not installed; pip install 'kvquant-cache[triton]'"
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert attend._missing.__wrapped__() == f"torch {torch.__version__} sees no GPU"
