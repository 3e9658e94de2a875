"""What a file says of a layer in plain words, and how it is read with suspicion."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kvquant.config import QuantConfig
from kvquant.formats import FORMATS
from kvquant.snapshot import KV

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_MOST = 2**31 - 1  # of anything counted: columns are int32

T = TypeVar("T")


class Stored(NamedTuple):
    """The description of a layer, and its tensors by name."""

    plain: Any
    tensors: dict[str, Tensor]

    def take(self, name: str, dtype: torch.dtype, *shape: int | None) -> Tensor:
        """Removes and returns a tensor. None in `shape` stands for any size."""
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            raise ValueError(f"tensor {name} is missing")
        sizes = [size if wanted is None else wanted for wanted, size in zip(shape, tensor.shape, strict=False)]
        if tensor.dtype != dtype or tensor.dim() != len(shape) or list(tensor.shape) != sizes:
            wanted = ", ".join("*" if size is None else str(size) for size in shape)
            raise ValueError(f"tensor {name} is {tensor.dtype} {list(tensor.shape)}, not {dtype} [{wanted}]")
        return tensor

    def take_states(self, name: str, rows: int | None, tokens: int | None, device: torch.device) -> KV:
        """Keys and values [rows, Hkv, tokens, D] with the heads, head_dim and dtypes of the description."""
        key = self._take_part(name, "key", rows, tokens)
        value = self._take_part(name, "value", key.shape[0], key.shape[2])
        return KV(key.to(device, copy=True), value.to(device, copy=True))

    def _take_part(self, name: str, part: str, rows: int | None, tokens: int | None) -> Tensor:
        shape = field(self.plain, part, dict)
        dtype = field(shape, "dtype", str)
        if dtype not in DTYPES:
            raise ValueError(f"the dtype {dtype!r} of its {part} is not one of {', '.join(DTYPES)}")
        heads, dim = count(shape, "heads"), count(shape, "head_dim")
        return self.take(f"{name}.{part}", DTYPES[dtype], rows, heads, tokens, dim)


def plain_config(config: QuantConfig) -> dict[str, Any]:
    """The dict of a configuration. Raises NotImplementedError for formats that a reader could not know."""
    plain, names = config.to_dict(), {config.key.name, config.value.name}
    if not names <= {fmt.name for fmt in FORMATS} or QuantConfig.from_dict(plain) != config:
        raise NotImplementedError(f"its formats {' and '.join(sorted(names))} are not those of kvquant.FORMATS")
    return plain


def config_of(plain: Any) -> QuantConfig:
    """The configuration in a description."""
    try:
        return QuantConfig.from_dict(field(plain, "quant", dict))
    except (KeyError, TypeError) as error:
        raise ValueError(f"quant={plain['quant']} in its description is no configuration: {error!r}") from error


def field(plain: Any, name: str, kind: type[T]) -> T:
    """An entry of a description, which must be of a type."""
    value = plain.get(name) if isinstance(plain, dict) else None
    if type(value) is not kind:
        raise ValueError(f"{name}={value!r} in its description is not of type {kind.__name__}")
    return value


def count(plain: Any, name: str) -> int:
    number = field(plain, name, int)
    if not 0 <= number <= _MOST:
        raise ValueError(f"{name}={number} in its description is not between 0 and {_MOST}")
    return number
