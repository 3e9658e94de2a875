"""What code written for other caches, or for older transformers, is told to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from kvquant.config import QuantConfig


class Replaced:
    """A name that caches no longer have. Reading it raises AttributeError, so that hasattr() is False, with a hint."""

    def __init__(self, hint: str) -> None:
        self._hint = hint

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, cache: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__} has no {self._name}: {self._hint}")


_STATES_OF_LAYERS = (
    "layers keep linear-attention states, in cache.layers[i]; before transformers 5.5 models with such layers need the "
    "cache class of their own, which QuantCache cannot stand in for"
)


class FormerNames:
    """The names that transformers' caches once had. A base after DynamicCache: what that still has, it serves."""

    key_cache = Replaced("use cache.layers[i].keys, or [layer.keys for layer in cache.layers]")
    value_cache = Replaced("use cache.layers[i].values, or [layer.values for layer in cache.layers]")
    seen_tokens = Replaced("use cache.get_seq_length()")
    get_usable_length = Replaced("use cache.get_seq_length(layer_idx)")
    get_max_length = Replaced("use cache.get_max_cache_shape(), its name before transformers 5.13")
    get_max_cache_shape = Replaced("use cache.get_max_length(), its name since transformers 5.13")
    to_legacy_cache = Replaced("use tuple((keys, values) for keys, values, *_ in cache)")
    from_legacy_cache = Replaced("make an empty cache and call cache.update(keys, values, i) for every layer i")
    batch_split = Replaced("use copy.deepcopy(cache) and batch_select_indices(rows) on each copy")
    from_batch_splits = Replaced("keep the cache whole, or one cache for each part of the batch")
    conv_states = Replaced(_STATES_OF_LAYERS)
    recurrent_states = Replaced(_STATES_OF_LAYERS)
    ssm_states = Replaced(_STATES_OF_LAYERS)

    def __getitem__(self, layer: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be indexed: use cache.layers[{layer!r}].keys and "
            f"cache.layers[{layer!r}].values, or iterate over (keys, values, window)"
        )


# Arguments of transformers' QuantizedCache that have no equivalent, with the reason.
_NEEDLESS = {
    "q_group_size": "values share a scale over at most 64 channels, keys over page_size tokens",
    "axis_key": "keys are grouped per channel; quant=QuantConfig(key=...) takes another format",
    "axis_value": "values are grouped per token; quant=QuantConfig(value=...) takes another format",
    "backend": "nothing else needs to be installed",
    "compute_dtype": "the cache takes the dtype of the states it is given",
    "device": "the cache stays on the device of the states it is given",
}
_FOREIGN = {"nbits", "cache_config", *_NEEDLESS}


def refuse_foreign(options: Mapping[str, Any]) -> None:
    """Raises TypeError if some options are arguments of transformers' QuantizedCache, naming the equivalent of each."""
    if options.keys().isdisjoint(_FOREIGN):
        return
    nested = options.get("cache_config")
    given = {name: value for name, value in options.items() if name in _FOREIGN and name != "cache_config"}
    given |= nested if isinstance(nested, Mapping) else {}
    hints = [_hint(name, value) for name, value in given.items()]
    if "cache_config" in options:
        hints.append("cache_config: pass what it holds as arguments")
    raise TypeError(f"got arguments of transformers' QuantizedCache; {'; '.join(hints)}")


def _hint(name: str, value: Any) -> str:
    if name == "nbits":
        return f"nbits={value!r}: {_bits_hint(value)}"
    if name == "backend" and value == "fp8":
        return "backend='fp8': use bits='fp8'"
    if name in _NEEDLESS:
        return f"{name}={value!r}: leave it out, {_NEEDLESS[name]}"
    return f"{name}: use {name}=... itself"


def _bits_hint(bits: Any) -> str:
    try:
        QuantConfig.preset(bits)
    except ValueError as error:
        return str(error)
    return f"use bits={bits!r}"
