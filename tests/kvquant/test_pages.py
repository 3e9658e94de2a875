"""The pool: what is written is read, whatever memory it lies in."""

import pickle

import psutil
import pytest
import torch

from kvquant import pages
from kvquant.pages import PagePool


class Layout:
    page_bytes = 4096


@pytest.mark.parametrize("count", [3, 3000], ids=["small", "on_huge_pages"])
def test_a_pool_holds_what_was_written(count):
    with torch.inference_mode():
        pool = PagePool(Layout(), torch.device("cpu"))
    assert (count * 4096 >= pages._LEAST_HUGE) == (count == 3000)
    written = torch.randint(0, 256, (count, 4096), dtype=torch.uint8)
    held = pool.write(written[:-1])
    held += pool.write(written[-1:])
    assert torch.equal(pool.read(held), written)
    again = pickle.loads(pickle.dumps(held))
    assert torch.equal(again[0].pool.read(again), written)
    assert again[0].pool is again[-1].pool


def test_memory_that_is_not_used_any_more_is_given_back():
    def resident():
        return psutil.Process().memory_info().rss

    records = torch.ones(4000, 4096, dtype=torch.uint8)  # 16 MB
    before = resident()
    for _ in range(50):
        pool = PagePool(Layout(), torch.device("cpu"))
        held = pool.write(records)
        del pool, held
    assert resident() - before < 5 * records.numel()  # not 50 times


@pytest.mark.skipif(pages._HUGE_PAGES is None, reason="huge pages are asked for on Linux only")
def test_a_system_that_refuses_huge_pages_gives_others():
    records = pages._on_huge_pages(16 << 20, advice=1 << 20)  # no such advice: EINVAL
    records[-1] = 7
    assert records[-1] == 7
