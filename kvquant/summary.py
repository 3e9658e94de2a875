"""Which kinds of layers a cache has, and how each is stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvquant.config import QuantConfig


class LayerKind(NamedTuple):
    """What layers are, and how they are stored.

    name: "full attention", "sliding-window", "linear attention", ...; of a layer class of a model's own, its name.
    quant: how they are packed; None if they are as transformers makes them.
    """

    name: str
    quant: QuantConfig | None

    def __str__(self) -> str:
        if self.quant is None:
            return f"{self.name}, unquantized"
        return f"{self.name}, packed ({self.quant.key.name} / {self.quant.value.name})"


@dataclass(frozen=True)
class CacheSummary:
    """The layers of a cache by kind.

    kinds: every kind with the number of its layers, in the order of their first ones.
    added: what layers will be that the cache adds as tokens come; None if all layers are there from the beginning.
    """

    kinds: tuple[tuple[LayerKind, int], ...]
    added: LayerKind | None

    @staticmethod
    def of(layers: Iterable[LayerKind], added: LayerKind | None) -> CacheSummary:
        return CacheSummary(tuple(Counter(layers).items()), added)

    @property
    def num_layers(self) -> int:
        return sum(count for _, count in self.kinds)

    @property
    def num_packed(self) -> int:
        return sum(count for kind, count in self.kinds if kind.quant is not None)

    def __str__(self) -> str:
        if not self.kinds:
            return f"no layers yet; those to come: {self.added}"
        plural = "" if self.num_layers == 1 else "s"
        return f"{self.num_layers} layer{plural}: " + "; ".join(f"{count} {kind}" for kind, count in self.kinds)
