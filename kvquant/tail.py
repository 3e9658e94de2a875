"""The tail: the most recent tokens of a layer, exact, in buffers that grow in place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvquant.config import QuantConfig
from kvquant.snapshot import KV

Append = Callable[[Sequence[Tensor], Sequence[Tensor], int], None]  # as PageLayout.append


class _Written:
    """How many tokens of some buffers are written. Tails may share them: only one that ends there goes on in place."""

    __slots__ = ("_lock", "_tokens")

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._lock = threading.Lock()

    def claim(self, first: int, last: int) -> bool:
        """Whether tokens first..last-1 are free; they are the caller's then."""
        with self._lock:
            is_free = self._tokens == first
            self._tokens = last if is_free else self._tokens
        return is_free


class Tail:
    """Exact states that grow at the end, in buffers with room to spare. A value: what grows is another tail."""

    def __init__(self, buffers: KV, length: int, written: _Written | None = None) -> None:
        self.buffers = buffers
        self.length = length
        self._written = _Written(length) if written is None else written

    @property
    def states(self) -> KV:
        return self.buffers.tokens(0, self.length)

    @staticmethod
    def copy_of(states: KV, config: QuantConfig) -> Tail:
        room = max(states.num_tokens, config.sinks + config.residual_length + config.page_size)
        buffers = KV(*(empty_like(part, room) for part in states))
        for buffer, part in zip(buffers, states, strict=True):
            buffer[..., : part.shape[-2], :] = part
        return Tail(buffers, states.num_tokens)

    def __getstate__(self) -> tuple[KV, int]:
        return self.buffers, self.length

    def __setstate__(self, state: tuple[KV, int]) -> None:
        buffers, length = state
        self.__init__(KV(*map(writable, buffers)), length)  # type: ignore[misc]  # as if made here

    @property
    def room(self) -> int:
        return self.buffers.num_tokens - self.length

    def extended(self, states: KV, config: QuantConfig, append: Append) -> Tail:
        """The tail with `states` at its end; in the same buffers where there is room that no other tail has taken.

        Gradients end here: what was a chunk is packed sooner or later.
        """
        first, last = self.length, self.length + states.num_tokens
        if last > self.buffers.num_tokens:
            detached = KV(*(part.detach() for part in states))
            return Tail(detached if first == 0 else _joined(self.states, detached), last)
        if not self._written.claim(first, last):
            return Tail.copy_of(self.states, config).extended(states, config, append)
        append(states, self.buffers, first)
        return Tail(self.buffers, last, self._written)

    def last(self, length: int, config: QuantConfig) -> Tail:
        """The last `length` tokens, in buffers of their own if that frees memory or the room is used up."""
        held = self.length
        if length == held and self.buffers.num_tokens > held:
            return self
        return Tail.copy_of(self.states.tokens(held - length, held), config)


def _joined(first: KV, second: KV) -> KV:
    return KV(*(torch.cat(pair, dim=-2) for pair in zip(first, second, strict=True)))


def writable(x: Tensor) -> Tensor:
    """x, or a copy that may be written to outside inference mode as well: what is unpickled inside may not."""
    if not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()


def empty_like(states: Tensor, length: int) -> Tensor:
    """Room for `length` tokens of states like [B, H, *, D]."""
    # Outside inference mode, since tensors made inside it could not be written to by a later call outside.
    with torch.inference_mode(False):
        return torch.empty(*states.shape[:2], length, states.shape[-1], dtype=states.dtype, device=states.device)
