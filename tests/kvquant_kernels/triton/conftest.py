"""Triton kernels on a GPU where there is one, else in Triton's interpreter."""

import importlib.util
import os

import pytest
import torch

HAS_GPU = os.environ.get("TRITON_INTERPRET") != "1"

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
elif not HAS_GPU:
    import interpreter

    interpreter.install()


@pytest.fixture(autouse=True)
def device():
    """Where tests make their tensors, unless they say otherwise."""
    with torch.device("cuda" if HAS_GPU else "cpu") as chosen:
        yield chosen


@pytest.fixture(autouse=True)
def _triton_layout(monkeypatch):
    """Pages in the layout of the Triton kernels on any device."""
    from kvquant import pages
    from kvquant_kernels.triton.attend import KERNEL

    def choose(key, value, device):
        found = KERNEL.page_layout(key, value)
        assert not isinstance(found, str), found
        return found

    monkeypatch.setattr(pages, "choose_layout", choose)
