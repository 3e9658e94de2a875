"""Bytes that are allocated for a cache and for what computes with it: in the end, and at most on the way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Meter(Protocol):
    """Counts what is allocated while it watches, over what there was when it was made.

    source: what its numbers are of; None if there are none on this device.
    """

    @property
    def source(self) -> str | None: ...

    def watching(self) -> AbstractContextManager[Any]: ...

    def held(self) -> int | None:
        """Bytes held now."""

    def take_peak(self) -> int | None:
        """The most bytes held since this was last asked."""


class TensorMeter(TorchDispatchMode):
    """By the tensors that are alive, each storage once, for a CPU: the same in every run, as a resident set is not.

    What an operation needs for the time of its own call is not in it. Gradients have to be off by no_grad(): in
    inference mode torch does not show what composite operations consist of.
    """

    source = "tensors"

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers gives it no types
        self._held = self._peak = 0
        self._alive: set[int] = set()

    def watching(self) -> TensorMeter:
        return self

    def held(self) -> int:
        return self._held

    def take_peak(self) -> int:
        peak, self._peak = self._peak, self._held
        return peak

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for storage in _storages(out):
            if id(storage) not in self._alive:
                given = {id(old) for old in _storages((args, kwargs))} if given is None else given
                if id(storage) not in given:
                    self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        # Its Python object, and so its id, lives as long as the storage, however many views come and go.
        self._alive.add(id(storage))
        self._held += storage.nbytes()
        self._peak = max(self._peak, self._held)
        weakref.finalize(storage, self._remove, id(storage), storage.nbytes()).atexit = False

    def _remove(self, which: int, size: int) -> None:
        self._alive.discard(which)
        self._held -= size


class CudaMeter:
    """By the statistics of torch's allocator."""

    source = "allocator"

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self._device, self._before = device, torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)

    def watching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def held(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    def take_peak(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device) - self._before
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


class NoMeter:
    """For devices whose allocator keeps no such statistics."""

    source = None

    def watching(self) -> AbstractContextManager[None]:
        return nullcontext()

    def held(self) -> None:
        return None

    def take_peak(self) -> None:
        return None


def meter(device: torch.device) -> Meter:
    """A meter for that device, from now on."""
    if device.type == "cuda":
        return CudaMeter(device)
    return TensorMeter() if device.type == "cpu" else NoMeter()


def _storages(found: Any) -> Iterator[torch.UntypedStorage]:
    """Of all plain tensors in nested values. Others, such as lazy ones, consist of these or have no storage."""
    if type(found) in (Tensor, torch.nn.Parameter):
        yield found.untyped_storage()
    elif isinstance(found, (tuple, list)):
        for part in found:
            yield from _storages(part)
    elif isinstance(found, dict):
        yield from _storages(tuple(found.values()))
