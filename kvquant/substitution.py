"""kvquant.default: QuantCache in place of the caches that transformers makes itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ContextDecorator
from contextvars import ContextVar
from functools import wraps
from threading import Lock
from typing import Any

from transformers import DynamicCache

from kvquant.cache import QuantCache, take_over
from kvquant.config import Bits, QuantConfig

# Outermost first. A ContextVar has a value per thread, and per task where asyncio runs several in one thread.
_active: ContextVar[tuple[QuantCache, ...]] = ContextVar("kvquant_default", default=())


def default(
    bits: Bits | tuple[Bits, Bits] | None = None, *, quant: QuantConfig | None = None, **options: Any
) -> Substitution:
    """A context in which every DynamicCache that this thread creates is a QuantCache, for code that takes no cache.

    >>> with kvquant.default(bits=4):
    ...     model.generate(**inputs)

    Takes the arguments of QuantCache but for `config`, which each cache gets from its model; layers are counted from
    the first one. It yields the QuantConfig, decorates functions too, and may be entered again and inside another one;
    the innermost counts. Caches live on after it, and caches made before it stay what they were.

    It cannot tell who calls DynamicCache(...): your own calls are affected like those of transformers. Not affected are
    other threads, also those started inside (enter it in the thread that generates), and caches of another kind:
    subclasses of DynamicCache, static, quantized and offloaded caches, and those of continuous batching.

    Raises ValueError or TypeError as QuantCache does, at once.
    """
    if "config" in options:
        raise TypeError("default() takes no config: every cache gets that of its own model")
    return Substitution(QuantCache(bits, quant=quant, **options))


class Substitution(ContextDecorator):
    """What `default` returns: the context in which new caches are like `template`, an empty QuantCache.

    It keeps no state of its own, so that one object can be entered again, and by several threads at once.
    """

    def __init__(self, template: QuantCache) -> None:
        self._template = template

    def __enter__(self) -> QuantConfig:
        _patch.acquire()
        _active.set((*_active.get(), self._template))
        return self._template.quant

    def __exit__(self, *exception: object) -> None:
        _active.set(_active.get()[:-1])
        _patch.release()


class _Patch:
    """The one change to transformers: DynamicCache's constructor, replaced while any thread is in a substitution.

    Models import the class by name, so that only the class itself is seen by all of them. Its constructor, and not
    __new__: that would also make what is copied or unpickled something else.
    """

    def __init__(self) -> None:
        self._lock, self._users = Lock(), 0

    def acquire(self) -> None:
        with self._lock:
            if self._users == 0:
                self._original = DynamicCache.__init__
                self._replacement = _substituting(self._original)
                DynamicCache.__init__ = self._replacement  # type: ignore[method-assign]  # on purpose
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            # Someone else's patch on top of ours stays; what it calls does nothing outside a substitution.
            if self._users == 0 and DynamicCache.__init__ is self._replacement:
                DynamicCache.__init__ = self._original  # type: ignore[method-assign]  # on purpose


_patch = _Patch()


def _substituting(original: Callable[..., None]) -> Callable[..., None]:
    """DynamicCache's constructor `original`, whose result becomes a QuantCache where a substitution is active."""

    @wraps(original)
    def init(self: DynamicCache, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        active = _active.get()
        if active and type(self) is DynamicCache and not self.offloading:
            take_over(self, active[-1])

    return init
