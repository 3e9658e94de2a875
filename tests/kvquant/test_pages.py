"""The pool: what is written is read, whatever memory it lies in."""

import pickle
import re
from pathlib import Path

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


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages to ask for"
)
def test_large_pools_are_private_memory_for_which_huge_pages_are_asked():
    """Linux makes huge pages of shared memory only where it has been told to, and forks would write to the same."""
    records = pages._empty_records(4000, 4096, torch.device("cpu"))
    header, *lines = _mapping_of(records.data_ptr())
    assert header.split()[1] == "rw-p"
    assert "hg" in next(line for line in lines if line.startswith("VmFlags:")).split()


def _mapping_of(address):
    """The lines that Linux has for the stretch of memory with this address."""
    stretches = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
    for stretch in stretches:
        first, last = (int(end, 16) for end in stretch.split()[0].split("-"))
        if first <= address < last:
            return stretch.splitlines()
    raise AssertionError(f"{address:x} is not mapped")


@pytest.mark.skipif(pages._HUGE_PAGES is None, reason="huge pages are asked for on Linux only")
def test_a_system_that_refuses_huge_pages_gives_others():
    records = pages._on_huge_pages(16 << 20, advice=1 << 20)  # no such advice: EINVAL
    records[-1] = 7
    assert records[-1] == 7
