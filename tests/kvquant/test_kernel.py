"""How kernels are found and chosen, and that results do not depend on the choice."""

import ctypes.util
import logging
import subprocess
import sys

import pytest
import torch
from families import tiny_model
from native import needs_library

from kvquant import AttentionCall, QuantCache, attend, kernel
from kvquant.config import QuantConfig
from kvquant.layout import PlainLayout
from kvquant.states import LayerStates
from kvquant_kernels.cpu import library
from kvquant_kernels.cpu.layout import CpuLayout


@pytest.fixture(autouse=True)
def _fresh_log():
    kernel.log_once.cache_clear()


def filled(config, tokens=300):
    key = torch.randn(1, 2, tokens, 64)
    states = LayerStates(config, key, key)
    states.append(key, key)
    states.settle()
    return states.append(key[:, :, :1], key[:, :, :1])


def test_kernels_are_found_once_each():
    assert [found.name for found in kernel.discover()] == ["cpu attention", "triton attention"]


@needs_library
def test_pages_get_the_layout_of_the_kernel_that_can_read_them():
    assert isinstance(filled(QuantConfig.preset(4)).layout, CpuLayout)
    assert isinstance(filled(QuantConfig.preset(3)).layout, PlainLayout)
    assert isinstance(filled(QuantConfig.preset(16)).layout, PlainLayout)


def test_switched_off_everything_is_the_reference(monkeypatch):
    monkeypatch.setenv("KVQUANT_KERNELS", "off")
    assert kernel.available("cpu") == ()
    assert isinstance(filled(QuantConfig.preset(4)).layout, PlainLayout)


@needs_library
def test_pages_are_read_by_the_kernel_that_they_were_laid_out_for(monkeypatch):
    snapshot, call = filled(QuantConfig.preset(4)), AttentionCall(torch.randn(1, 4, 1, 64))
    monkeypatch.setenv("KVQUANT_KERNELS", "off")
    assert kernel.choose(snapshot, call).name == "cpu attention"


@pytest.mark.parametrize("is_missing", [False, True])
def test_switched_off_nothing_is_said(monkeypatch, caplog, is_missing):
    monkeypatch.setenv("KVQUANT_KERNELS", "off")
    if is_missing:
        monkeypatch.setattr(library, "load", lambda: library.Missing("it was not built"))
    with caplog.at_level(logging.WARNING, "kvquant"):
        assert kernel.choose(filled(QuantConfig.preset(4)), AttentionCall(torch.randn(1, 4, 1, 64))) is None
    assert caplog.messages == []


def test_a_missing_library_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(library, "load", lambda: library.Missing("it was not built"))
    with caplog.at_level(logging.WARNING, "kvquant"):
        for _ in range(3):
            assert isinstance(filled(QuantConfig.preset(4)).layout, PlainLayout)
    assert caplog.messages == ["cpu attention is not used, slower plain PyTorch is: it was not built"]


@needs_library
def test_a_call_that_the_kernel_cannot_take_goes_to_the_reference_with_the_reason(caplog):
    snapshot = filled(QuantConfig.preset(4))
    with caplog.at_level(logging.WARNING, "kvquant"):
        out = attend(snapshot, AttentionCall(torch.randn(1, 4, 1, 64), is_causal=True))
    assert out.shape == (1, 4, 1, 64)
    assert caplog.messages == ["cpu attention is not used: causality without a mask over a history"]


@pytest.mark.parametrize("bits", [8, 4, 2, "fp8", (8, 4), (4, 2)])
def test_kernels_and_reference_generate_the_same_tokens(monkeypatch, bits):
    model = tiny_model("llama", "sdpa")
    ids = torch.randint(2, 97, (2, 90))
    mask = torch.ones_like(ids)
    mask[0, :17] = 0
    outs = []
    for switch in ("on", "off"):
        monkeypatch.setenv("KVQUANT_KERNELS", switch)
        cache = QuantCache(bits=bits, residual_length=8, page_size=64)
        outs.append(model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=60, do_sample=False))
    assert torch.equal(*outs)


@pytest.mark.broad
def test_a_process_without_the_library_works():
    code = """
import torch
from kvquant import QuantCache
from torch.nn import functional as F
cache = QuantCache(bits=4)
x = torch.randn(1, 2, 300, 64)
cache.update(x, x, 0)
cache.layers[0].settle()
print(F.scaled_dot_product_attention(x[:, :, :1], *cache.update(x[:, :, :1], x[:, :, :1], 0)).isfinite().all().item())
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"KVQUANT_CPU_LIBRARY": "/nowhere.so"}
    )
    assert run.stdout == "True\n"
    reason = "there is no nowhere.so: KVQUANT_CPU_LIBRARY names no file"
    assert run.stderr.count(f"cpu attention is not used, slower plain PyTorch is: {reason}") == 1


def test_a_library_that_is_not_ours_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setenv("KVQUANT_CPU_LIBRARY", ctypes.util.find_library("m") and torch._C.__file__)
    assert "cannot be loaded: " in library.load.__wrapped__().reason
