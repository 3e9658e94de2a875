"""The tail: the most recent tokens of a layer, exact, in buffers that grow in place."""

from __future__ import annotations

import torch
from torch import Tensor

from kvquant.config import QuantConfig
from kvquant.snapshot import KV


class Tail:
    """Exact states that grow at the end, in buffers with room to spare."""

    def __init__(self, buffers: KV, length: int) -> None:
        self.buffers = buffers
        self.length = length

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

    def extended(self, states: KV) -> Tail:
        """The tail with `states` at its end; written in place where there is room."""
        length = self.length
        if length + states.num_tokens > self.buffers.num_tokens:
            if length == 0:
                return Tail(states, states.num_tokens)
            return Tail(
                KV(*(torch.cat(pair, dim=-2) for pair in zip(self.states, states, strict=True))),
                length + states.num_tokens,
            )
        for buffer, part in zip(self.buffers, states, strict=True):
            buffer.narrow(-2, length, part.shape[-2]).copy_(part)
        return Tail(self.buffers, length + states.num_tokens)

    def last(self, length: int, config: QuantConfig) -> Tail:
        """The last `length` tokens, in buffers of their own if that frees memory or the room is used up."""
        held = self.length
        if length == held and self.buffers.num_tokens > held:
            return self
        return Tail.copy_of(self.states.tokens(held - length, held), config)


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
