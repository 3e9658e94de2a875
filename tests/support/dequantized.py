"""What a QuantCache is held to: the same states, handed out as plain tensors for the model's own attention to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from torch import Tensor

from kvquant import QuantCache, QuantLayer
from kvquant.transport import LazyStates, paired


class DequantizedCache(QuantCache):
    """A QuantCache whose update() returns dequantized tensors.

    states: the keys and values to store, call by call, instead of those that it is given. In another order of additions
    the model's own differ in their last bits, which now and then is a whole step of a code.
    starts: the column at which the tokens of each row begin. They are learned from masks that only attention sees.
    """

    def __init__(self, *args: Any, states: Iterator[tuple[Tensor, Tensor]], starts: Sequence[int], **options: Any):
        super().__init__(*args, **options)
        self._given, self._starts = states, starts
        self.layers = [self._dequantizing(layer) for layer in self.layers]
        new_layer = self.layer_class_to_replicate
        if new_layer is not None:
            self.layer_class_to_replicate = lambda: self._dequantizing(new_layer())

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        key, value = next(self._given)
        assert key.shape == key_states.shape
        return super().update(key, value, *args, **kwargs)

    def _dequantizing(self, layer: Any) -> Any:
        if isinstance(layer, QuantLayer):
            layer.__class__ = _dequantizing(type(layer))
            layer.starts = self._starts
        return layer


@cache
def _dequantizing(kind: type[QuantLayer]) -> type[QuantLayer]:
    """The class of layers of a kind that hand out plain tensors."""

    class Dequantized(kind):  # type: ignore[misc, valid-type]
        starts: Sequence[int]

        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            lazy = super().update(key_states, value_states, *args, **kwargs)
            plain = lazy[0].materialize(), lazy[1].materialize()
            pair = paired(*lazy)
            assert pair is not None
            states, snapshot = pair
            states.settle(snapshot.chunk, self.starts)
            return plain

        @property
        def keys(self) -> Tensor | None:
            return _plain(super().keys)

        @property
        def values(self) -> Tensor | None:
            return _plain(super().values)

    return Dequantized


def _plain(states: LazyStates | None) -> Tensor | None:
    return None if states is None else states.materialize()
