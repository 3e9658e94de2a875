"""Copies of a cache share what they can, and never see each other's tokens."""

import copy
import threading

import pytest
import torch

from kvquant import QuantCache
from kvquant.pages import PagePool


def storages(cache):
    """Bytes by address, of everything that a cache's layers hold."""
    held = {}
    for layer in cache.layers:
        snapshot = layer.states.snapshot()
        parts = [*snapshot.tail_buffers, *snapshot.chunk, *(snapshot.sinks or ())]
        parts += [snapshot.pool.records] if snapshot.pool else []
        held |= {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts if part.numel()}
    return held


def filled(bits, tokens, layers=2, dtype=torch.bfloat16, **options):
    cache = QuantCache(bits=bits, **options)
    for layer in range(layers):
        cache.update(*torch.randn(2, 1, 2, tokens, 64).to(dtype), layer)
    for layer in cache.layers:
        layer.settle()
    return cache


@pytest.mark.parametrize("bits", [16, 8, 4, 2])
def test_a_deep_copy_allocates_next_to_nothing(bits):
    cache = filled(bits, 8192)
    held = storages(cache)
    new = {at: size for at, size in storages(copy.deepcopy(cache)).items() if at not in held}
    assert sum(new.values()) < 0.05 * sum(held.values())


def test_of_copies_that_grow_only_one_writes_in_place():
    original = filled(4, 300)
    before = [layer.keys.materialize() for layer in original.layers]
    copies = [copy.deepcopy(original) for _ in range(3)]
    tokens = torch.randn(3, 2, 1, 2, 1, 64).to(torch.bfloat16)
    for _ in range(2):
        for cache, new in zip(copies, tokens, strict=True):
            for layer in range(2):
                cache.update(*new, layer)
                cache.layers[layer].settle()
    for cache, (key, _) in zip(copies, tokens, strict=True):
        for layer, held in zip(cache.layers, before, strict=True):
            keys = layer.keys.materialize()
            assert torch.equal(keys[:, :, :300], held)
            assert torch.equal(keys[:, :, 300:], torch.cat((key, key), dim=2))
    assert all(torch.equal(layer.keys.materialize(), held) for layer, held in zip(original.layers, before, strict=True))


def test_threads_that_continue_one_prefix_do_not_mix():
    prefix = filled(4, 300, layers=1)
    tokens = torch.randn(4, 60, 2, 1, 2, 1, 64).to(torch.bfloat16)
    caches = [copy.deepcopy(prefix) for _ in tokens]
    start = threading.Barrier(len(caches), timeout=30)

    def grow(cache, new):
        start.wait()
        for key, value in new:
            cache.update(key, value, 0)
            cache.layers[0].settle()

    threads = [threading.Thread(target=grow, args=pair) for pair in zip(caches, tokens, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for cache, new in zip(caches, tokens, strict=True):
        own = torch.cat([key for key, _ in new], dim=2)
        assert torch.equal(cache.layers[0].keys.materialize()[:, :, 300:], own)


def test_reordering_beams_and_copies_pack_nothing(monkeypatch):
    cache = QuantCache(bits=4)
    cache.update(*torch.randn(2, 6, 2, 500, 64), 0)
    cache.layers[0].settle()
    writes = []
    monkeypatch.setattr(PagePool, "write", lambda pool, records: writes.append(records))
    before = cache.layers[0].keys.materialize()
    order = torch.tensor([3, 3, 0, 5, 5, 5])
    cache.reorder_cache(order)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.arange(0, 12, 2))
    reordered = copy.deepcopy(cache)
    assert writes == []
    assert torch.equal(reordered.layers[0].keys.materialize(), before[order])
