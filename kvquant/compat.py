"""The only file that knows transformers' versions and private names."""

from __future__ import annotations

from functools import cache
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel, cache_utils

TRANSFORMERS = tuple(int(part) for part in transformers.__version__.split(".")[:2])

# The keyword under which models and generate() take a cache.
CACHE_ARGUMENT = "cache" if TRANSFORMERS >= (5, 24) else "past_key_values"

# Layers that hold nothing, for models whose layers share states; before 5.23 there were none.
EMPTY_LAYERS: tuple[type, ...] = tuple(filter(None, [getattr(cache_utils, "DummyLayer", None)]))


def stated_shapes(config: PreTrainedConfig) -> list[dict[str, int]]:
    """What a configuration states of each layer's keys: num_key_value_heads and head_dim, or less.

    Only fields of the model's own class count, not what else a file may have set, and none where latents are cached.
    An empty list in versions that cannot tell where layers differ.
    """
    layers = getattr(config.get_text_config(decoder=True), "per_layer_config", None) or ()
    return [{} if _caches_latents(own) else _stated(own, "num_key_value_heads", "head_dim") for own in layers]


def _caches_latents(own: PreTrainedConfig) -> bool:
    return bool(_stated(own, "kv_lora_rank", "qk_head_dim"))


def _stated(own: PreTrainedConfig, *names: str) -> dict[str, int]:
    found = {name: getattr(own, name) for name in names if hasattr(type(own), name)}
    return {name: value for name, value in found.items() if value is not None}


def tokens_to_crop(argument: int, length: int) -> int:
    """How many tokens `crop(argument)` removes from a cache of `length` tokens in the installed version.

    Raises ValueError for a positive argument from 5.15 on, where it no longer means the length to keep.
    """
    if argument < 0 or (argument == 0 and TRANSFORMERS >= (5, 14)):
        return -argument
    if TRANSFORMERS >= (5, 15):
        raise ValueError(f"crop({argument}): pass minus the number of tokens to remove, for example crop({-argument})")
    return max(0, length - argument)


def position_ids(update_kwargs: dict[str, Any]) -> Any:
    """The position ids of the tokens being added, which models pass along since 5.24; None before."""
    return (update_kwargs.get("kwargs") or {}).get("position_ids")


# What layers are, by the name of their class, since older versions lack some of them.
_LAYER_KINDS = {
    "DynamicLayer": "full attention",
    "DynamicSlidingWindowLayer": "sliding-window",
    "DynamicIndexedLayer": "indexed attention",
    "LinearAttentionLayer": "linear attention",
    "LinearAttentionAndFullAttentionLayer": "linear and full attention",
    "LinearAttentionAndSlidingWindowAttentionLayer": "linear and sliding-window attention",
    "DummyLayer": "dummy (no states of its own)",
}


def layer_kind(layer: object) -> str:
    """What a layer is that transformers makes, in words; for classes of a model's own, their name."""
    name = type(layer).__name__
    return _LAYER_KINDS.get(name, name)


def register_attention(name: str, function: Any) -> None:
    """Makes `attn_implementation=name` call `function`, with the masks that sdpa gets.

    Without a mask function of its own, transformers gives an unknown implementation no mask at all. Where sdpa gets
    none, causality is left to `function`: there are as many queries as keys, or a model has dropped the first queries.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def mask(
        *, config: PreTrainedConfig, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **others: Any
    ) -> Any:
        _check_calls_attention_functions(type(config), name)
        # sdpa also gets none for the prompt of a static cache, with keys of which most are still to come.
        may_skip = allow_is_causal_skip and q_length in (1, kv_length)
        return sdpa_mask(config=config, q_length=q_length, kv_length=kv_length, allow_is_causal_skip=may_skip, **others)

    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, mask)


def _check_calls_attention_functions(config: type[PreTrainedConfig], name: str) -> None:
    """Raises NotImplementedError for models that never call a registered attention function.

    They would go on without a word and add sdpa's masks, which are boolean or left out, to their scores.
    """
    from transformers import MODEL_MAPPING

    model = MODEL_MAPPING.get(config, None)
    if isinstance(model, type) and not _calls_attention_functions(model):
        raise NotImplementedError(
            f"{model.__name__} computes attention by itself and cannot use attn_implementation={name!r}; "
            "load it with 'eager', with which QuantCache works as well"
        )


@cache  # since transformers 5.4 reads the model's source every time
def _calls_attention_functions(model: type[PreTrainedModel]) -> bool:
    can_set: bool = model._can_set_attn_implementation()
    return can_set
