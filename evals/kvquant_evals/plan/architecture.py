"""What a model's layers keep per token, and its number of weights: found by running it without weights or data."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedConfig, PreTrainedModel

from kvquant import cache_memory
from kvquant.compat import CACHE_ARGUMENT, layer_kind
from kvquant_evals.error import EvalError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ASSUMED_DTYPE = torch.bfloat16  # where a configuration states none

_LENGTHS = (8, 16, 24)  # tokens of the runs; a third, to see whether what two of them tell holds
_RUN_ERRORS = (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, KeyError, IndexError)


class Heads(NamedTuple):
    """The keys, or the values, of one token of one layer."""

    heads: int
    head_dim: int

    @property
    def numbers(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True)
class LayerShape:
    """What one layer keeps of each row of a batch.

    kind: what the layer is, in words.
    key, value: of each token; None where a layer keeps no keys and values of its own.
    window: tokens that a query attends to, itself included; all but one of them are kept. None for all tokens.
    state_bytes: what else it keeps, whatever the number of tokens; `state_token_bytes` more for each token.
    is_known: whether these two are so; if not, they are 0.
    """

    kind: str
    dtype: torch.dtype
    key: Heads | None = None
    value: Heads | None = None
    window: int | None = None
    state_bytes: int = 0
    state_token_bytes: int = 0
    is_known: bool = True

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token, as transformers keeps them."""
        if self.key is None or self.value is None:
            return 0
        return (self.key.numbers + self.value.numbers) * self.dtype.itemsize

    def visible(self, tokens: int) -> int:
        """How many of `tokens` the next one attends to."""
        return tokens if self.window is None else min(tokens, self.window - 1)

    def states(self) -> tuple[Tensor, Tensor] | None:
        """Keys and values [1, H, 0, D] without data; None if it keeps none."""
        if self.key is None or self.value is None:
            return None
        key, value = (
            torch.empty(1, part.heads, 0, part.head_dim, dtype=self.dtype, device="meta")
            for part in (self.key, self.value)
        )
        return key, value


@dataclass(frozen=True)
class Architecture:
    """A model as far as a plan needs it.

    num_weights: parameters, tied ones counted once.
    notes: what the user should know about these numbers, one sentence each.
    """

    config: PreTrainedConfig
    dtype: torch.dtype
    layers: tuple[LayerShape, ...]
    num_weights: int
    notes: tuple[str, ...] = ()

    @property
    def weight_bytes(self) -> int:
        return self.num_weights * self.dtype.itemsize

    @property
    def max_length(self) -> int | None:
        """The longest context the model was made for, in tokens; None if its configuration does not say."""
        return getattr(self.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @staticmethod
    def of(config: PreTrainedConfig, dtype: torch.dtype | None = None) -> Architecture:
        """The architecture that a configuration describes, in its own dtype by default.

        Raises EvalError if such a model cannot be built, or not be run without data.
        """
        stated: Any = config.dtype or config.get_text_config(decoder=True).dtype
        notes = [] if dtype or stated else [f"the configuration states no dtype; {_name(ASSUMED_DTYPE)} is assumed"]
        chosen: torch.dtype = dtype or stated or ASSUMED_DTYPE
        model, about_model = _build(config, chosen)
        layers = _layers(model, chosen)
        num_weights = sum(weight.numel() for weight in model.parameters())
        notes += about_model + _about_weights(config) + _about_layers(layers)
        return Architecture(config, chosen, layers, num_weights, tuple(notes))


def _build(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, list[str]]:
    """The model without weights, and what to say about it: of one that also reads images, it may be the text part."""
    if config.is_encoder_decoder:
        raise _refusal(config, "it has an encoder, whose states are cached as well")
    try:
        return _empty_model(config, dtype), []
    except (*_RUN_ERRORS, ImportError) as error:
        reason = _first_line(error)
    try:
        text_model = _empty_model(config.get_text_config(decoder=True), dtype)
    except (*_RUN_ERRORS, ImportError) as error:
        raise _refusal(config, reason) from error
    return text_model, [f"only the text part is counted, since the whole model cannot be built: {reason}"]


def _refusal(config: PreTrainedConfig, reason: str) -> EvalError:
    return EvalError(f"a {config.model_type} model cannot be planned for: {reason}")


def _empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    config = deepcopy(config)
    config.pad_token_id = None  # models look for it in their input, which has no data
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    # By default experts are products of groups, whose sizes are data, and which want bfloat16.
    model.set_experts_implementation("batched_mm")
    return model


def _layers(model: PreTrainedModel, dtype: torch.dtype) -> tuple[LayerShape, ...]:
    try:
        runs = [_run(model, length) for length in _LENGTHS]
    except _RUN_ERRORS as error:
        reason = f"what its layers keep cannot be told without data: {_first_line(error)}"
        raise _refusal(model.config, reason) from error
    return tuple(_layer_shape(layers, dtype) for layers in zip(*(run.layers for run in runs), strict=True))


def _run(model: PreTrainedModel, length: int) -> Cache:
    """The cache of a row of `length` tokens."""
    cache = DynamicCache(config=model.config)
    tokens = torch.ones(1, length, dtype=torch.long, device="meta")
    with torch.no_grad():
        model(input_ids=tokens, **{CACHE_ARGUMENT: cache}, use_cache=True)
    return cache


def _layer_shape(runs: tuple[Any, ...], dtype: torch.dtype) -> LayerShape:
    """The shape of a layer that was seen with each of _LENGTHS tokens."""
    layer = runs[0]
    key, value = getattr(layer, "keys", None), getattr(layer, "values", None)
    shape = LayerShape(layer_kind(layer), dtype)
    if key is not None and value is not None:
        key_heads, value_heads = (Heads(part.shape[1], part.shape[3]) for part in (key, value))
        window = getattr(layer, "sliding_window", None)
        shape = replace(shape, dtype=key.dtype, key=key_heads, value=value_heads, window=window)
    held = zip(runs, _LENGTHS, strict=True)
    others = [_plain_bytes(run) - shape.visible(length) * shape.token_bytes for run, length in held]
    return _with_states(shape, others)


def _with_states(shape: LayerShape, sizes: list[int]) -> LayerShape:
    """The shape with what else a layer keeps, by the bytes of it at each of _LENGTHS tokens."""
    per_token, rest = divmod(sizes[1] - sizes[0], _LENGTHS[1] - _LENGTHS[0])
    constant = sizes[0] - per_token * _LENGTHS[0]
    if rest or constant < 0 or sizes[2] != constant + per_token * _LENGTHS[2]:
        return replace(shape, is_known=False)
    return replace(shape, state_bytes=constant, state_token_bytes=per_token)


def _plain_bytes(layer: Any) -> int:
    return cache_memory(Cache(layers=[layer])).unquantized


def _about_weights(config: PreTrainedConfig) -> list[str]:
    if getattr(config, "quantization_config", None) is None:
        return []
    return ["the weights are stored quantized, which the estimate does not know; give their size with --weights"]


def _about_layers(layers: tuple[LayerShape, ...]) -> list[str]:
    unknown = [layer.kind for layer in layers if not layer.is_known]
    if not unknown:
        return []
    kinds = ", ".join(sorted(set(unknown)))
    return [f"not counted: what {len(unknown)} layers ({kinds}) keep beside keys and values"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
