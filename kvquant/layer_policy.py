"""LayerPolicy: which layers of a cache are quantized otherwise than the rest, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvquant.config import Bits, QuantConfig


@dataclass(frozen=True)
class LayerPolicy:
    """How each layer of a cache is stored.

    quant: of the layers that are not named below.
    skipped: the indices of layers that stay in full precision.
    special: the indices of layers with a configuration of their own, and these.
    """

    quant: QuantConfig
    skipped: frozenset[int] = frozenset()
    special: tuple[tuple[int, QuantConfig], ...] = ()

    def of(self, layer_idx: int) -> QuantConfig | None:
        """How this layer is quantized; None if it stays in full precision."""
        return None if layer_idx in self.skipped else dict(self.special).get(layer_idx, self.quant)

    @staticmethod
    def resolve(
        quant: QuantConfig,
        skip_layers: Iterable[int],
        layer_bits: Mapping[int, Bits | tuple[Bits, Bits]],
        *,
        clip: bool | None = None,
        quantizable: Sequence[bool] | None = None,
    ) -> LayerPolicy:
        """The policy that QuantCache's arguments of these names describe.

        Bits and `clip` mean what they mean to QuantConfig.preset; all else is as in `quant`. `quantizable` says of each
        of the model's layers whether it can be quantized; None if they are unknown.

        Raises TypeError or ValueError naming the argument: for what is no layer index or no number of bits, for layers
        that the model does not have, and for layers named twice.
        """
        if not isinstance(layer_bits, Mapping):
            raise TypeError(f"layer_bits must be a mapping like {{3: 8}}, got {layer_bits!r}")
        num_layers = None if quantizable is None else len(quantizable)
        skipped = _indices("skip_layers", skip_layers, num_layers)
        special = _indices("layer_bits", layer_bits, num_layers)
        for layer in special:
            if special.count(layer) > 1 or layer in skipped:
                other = "skip_layers" if layer in skipped else "layer_bits"
                raise ValueError(f"layer_bits names layer {layer}, which {other} names too; name it once")
            if quantizable is not None and not quantizable[layer]:
                raise ValueError(f"layer_bits names layer {layer}, which stays as transformers makes it; leave it out")
        configs = [_with_bits(quant, index, bits, clip) for index, bits in layer_bits.items()]
        return LayerPolicy(quant, frozenset(skipped), tuple(zip(special, configs, strict=True)))


def _indices(name: str, given: Iterable[int], num_layers: int | None) -> list[int]:
    """The layers that an argument names, counted from the first one."""
    if not isinstance(given, Iterable):
        raise TypeError(f"{name} must be a tuple of layer indices, got {given!r}")
    return [_index(name, index, num_layers) for index in given]


def _index(name: str, index: int, num_layers: int | None) -> int:
    if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(f"{name} must name layers by their index, an int, got {index!r}")
    if num_layers is None:
        if index < 0:
            raise ValueError(f"{name} names layer {index}, counted from the last one; pass config=model.config as well")
        return index
    if not -num_layers <= index < num_layers:
        raise ValueError(f"{name} names layer {index}, but the model has layers 0 to {num_layers - 1}")
    return index % num_layers


def _with_bits(quant: QuantConfig, index: int, bits: Bits | tuple[Bits, Bits], clip: bool | None) -> QuantConfig:
    try:
        formats = QuantConfig.preset(bits, clip=clip)
    except ValueError as error:
        raise ValueError(f"layer_bits of layer {index}: {error}") from None
    return replace(quant, key=formats.key, value=formats.value)
