"""What a step allocates at most, counted by the tensors that are alive at once."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kvquant import QuantCache


class PeakBytes(TorchDispatchMode):
    """The largest number of bytes that storages made inside hold at any one time."""

    def __init__(self):
        super().__init__()
        self.peak, self._live, self._seen = 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        old = {x.untyped_storage()._cdata for x in pytree.tree_leaves((args, kwargs)) if type(x) is torch.Tensor}
        for tensor in pytree.tree_leaves(out):
            if type(tensor) is torch.Tensor and tensor.untyped_storage()._cdata not in old:
                self._count(tensor)
        return out

    def _count(self, tensor):
        size = tensor.untyped_storage().nbytes()
        self._live += size
        self.peak = max(self.peak, self._live)
        weakref.finalize(tensor, self._free, size)

    def _free(self, size):
        self._live -= size


def test_the_measure_itself():
    x = torch.zeros(1000)
    with PeakBytes() as measured:
        y = x + 1
        del y
        z = (x + 1) + 1
    assert measured.peak == 8000
    del z


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decode_step_at_8k_tokens_needs_little_beside_the_packed_cache(bits, dtype):
    layers, heads, dim, tokens = 4, 3, 64, 8192
    cache = QuantCache(bits=bits)
    for layer in range(layers):
        states = torch.randn(1, heads, tokens, dim, dtype=dtype)
        cache.update(states, states, layer)
        cache.layers[layer].settle()
    query, new = torch.randn(1, 3 * heads, 1, dim, dtype=dtype), torch.randn(1, heads, 1, dim, dtype=dtype)
    with PeakBytes() as measured, torch.no_grad():
        for layer in range(layers):
            key, value = cache.update(new, new, layer)
            F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    one_layer = 2 * heads * tokens * dim * dtype.itemsize
    assert cache.memory().total + measured.peak < 1.3 * (cache.memory().total + one_layer)


def test_prefill_needs_little_beside_the_states_it_is_given():
    heads, dim, tokens = 8, 128, 8192
    states = torch.randn(1, heads, tokens, dim)
    cache = QuantCache(bits=4)
    key, value = cache.update(states, states, 0)
    with PeakBytes() as measured, torch.no_grad():
        cache.layers[0].settle()
    # Packed pages, and the scratch of one run of pages: float32 copies, rotation, codes and packing.
    run = 32 * 128 * heads * dim * 4
    assert measured.peak < cache.memory().total + 6 * run
    del key, value
