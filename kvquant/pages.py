"""The pool that owns a layer's sealed pages. A page lives as long as something refers to it and is written once."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from kvquant.config import QuantConfig
from kvquant.formats import QuantFormat
from kvquant.kernel import choose_layout
from kvquant.layout import PageLayout, PagePart, StateShape

GROWTH = 1.125  # little: of a pool that grew, what is not used yet may be resident all the same


class Page:
    """A sealed page. Caches that share it hold the same object; its slot is free when the last of them drops it."""

    __slots__ = ("index", "pool")

    def __init__(self, index: int, pool: PagePool) -> None:
        self.index = index
        self.pool = pool

    def __del__(self) -> None:
        self.pool.free_slots.append(self.index)

    def __deepcopy__(self, memo: dict[int, object]) -> Page:
        return self

    def __reduce__(self) -> tuple[type[Page], tuple[int, PagePool]]:
        return Page, (self.index, self.pool)


class PagePool:
    """The bytes of one layer's pages: uint8 [capacity, page_bytes], growing geometrically.

    Safe to share between caches and threads: a page is written before anyone can refer to it, and never again.
    """

    def __init__(self, layout: PageLayout, device: torch.device, capacity: int = 0) -> None:
        self.layout = layout
        self.free_slots = list(range(capacity - 1, -1, -1))
        self.records = _empty_records(capacity, layout.page_bytes, device)
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, object]) -> PagePool:
        return self

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())
        if self.records.is_inference():  # unpickled inside inference mode: could not be written to outside
            with torch.inference_mode(False):
                self.records = self.records.clone()

    @property
    def capacity(self) -> int:
        return self.records.shape[0]

    def write(self, records: Tensor) -> list[Page]:
        """New pages holding `records` uint8 [pages, page_bytes]."""
        with self._lock:
            self._reserve(records.shape[0])
            slots = [self.free_slots.pop() for _ in range(records.shape[0])]
            self.records.index_copy_(0, torch.tensor(slots, dtype=torch.long, device=self.records.device), records)
        return [Page(slot, self) for slot in slots]

    def read(self, pages: Sequence[Page]) -> Tensor:
        """The records uint8 [pages, page_bytes] of `pages`."""
        slots = torch.tensor([page.index for page in pages], dtype=torch.long, device=self.records.device)
        return self.records.index_select(0, slots)

    def move(self, device: torch.device) -> None:
        """Moves all pages to a device, for everyone who refers to them."""
        with self._lock, torch.inference_mode(False):
            self.records = self.records.to(device)

    def _reserve(self, count: int) -> None:
        missing = count - len(self.free_slots)
        if missing <= 0:
            return
        old = self.capacity
        new = max(old + missing, int(old * GROWTH))
        grown = _empty_records(new, self.layout.page_bytes, self.records.device)
        grown[:old] = self.records
        self.records = grown
        self.free_slots[:0] = range(new - 1, old - 1, -1)


def page_parts(config: QuantConfig, key: Tensor, value: Tensor) -> tuple[PagePart, PagePart]:
    """What a page holds of keys [B, Hkv, *, Dk] and values [B, Hkv, *, Dv]."""

    def part(fmt: QuantFormat, states: Tensor) -> PagePart:
        return PagePart(fmt, StateShape(states.shape[1], config.page_size, states.shape[3]), states.dtype)

    return part(config.key, key), part(config.value, value)


def pool_for(config: QuantConfig, key: Tensor, value: Tensor, num_pages: int) -> PagePool:
    """A pool for pages of such states, with room for `num_pages`."""
    return PagePool(choose_layout(*page_parts(config, key, value), key.device), key.device, num_pages)


def _empty_records(capacity: int, page_bytes: int, device: torch.device) -> Tensor:
    # Outside inference mode, since tensors made inside it could not be written to by a later call outside.
    with torch.inference_mode(False):
        if device.type == "cpu" and capacity * page_bytes >= _LEAST_HUGE and _HUGE_PAGES is not None:
            return _on_huge_pages(capacity * page_bytes, _HUGE_PAGES).view(capacity, page_bytes)
        return torch.empty(capacity, page_bytes, dtype=torch.uint8, device=device)


# Decoding reads a whole pool for each token. With pages of 4 KiB, looking up their addresses takes some of the time.
# Smaller pools are left alone, since the last huge page of each is resident as a whole.
_HUGE_PAGES: int | None = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
_LEAST_HUGE = 8 << 20


def _on_huge_pages(size: int, advice: int) -> Tensor:
    """uint8 [size], of huge pages if the system grants them."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # EINVAL where the kernel was built without them, which is no reason to fail.
    with contextlib.suppress(OSError):
        memory.madvise(advice)
    return torch.frombuffer(memory, dtype=torch.uint8)
