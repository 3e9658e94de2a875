"""Tiny random models of the families in family_table.py, with prompts and caches for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from family_table import DROP, FAMILIES, SMALL
from torch import Tensor
from transformers import (
    AutoConfig,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)

import kvquant.interface
from kvquant.compat import CACHE_ARGUMENT

ATTENTIONS = ("sdpa", "eager", kvquant.interface.NAME)
PROMPT, PADDING = 68, 33  # tokens
# The last one first, since its runs are the ones that are looked at.
WAYS = {"prompt lookup": {"prompt_lookup_num_tokens": 4}, "beams": {"num_beams": 3}, "greedy": {}}
# Of which every prompt fills several, and some more are sealed while decoding.
SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}


def tiny_config(name: str) -> PreTrainedConfig:
    family = FAMILIES[name]
    fields = {name: value for name, value in {**SMALL, **family.fields}.items() if value is not DROP}
    return AutoConfig.for_model(family.model_type or name, **fields)


def tiny_model(name: str, attention: str, spread: float = 0.02) -> PreTrainedModel:
    """A model with random weights of standard deviation `spread`. At 0.1, most of a logit is what attention reads.

    It is the caller's own, to change as a test likes: no other test sees it.
    """
    if attention == kvquant.interface.NAME:
        kvquant.register()
    return copy.deepcopy(_made(name, attention, spread))


@cache
def _made(name: str, attention: str, spread: float) -> PreTrainedModel:
    config = tiny_config(name)
    config.initializer_range = config.init_std = spread  # as most call it, and as BART does
    with torch.random.fork_rng():  # a test's random numbers are the same whether it is the first to ask or not
        torch.manual_seed(0)
        return FAMILIES[name].auto.from_config(config, attn_implementation=attention).eval()


def rows_of(way: str) -> int:
    """Prompts in a batch; prompt lookup takes one."""
    return 1 if way == "prompt lookup" else 2


def prompt(model: PreTrainedModel, rows: int, padding: int = 0) -> dict[str, Tensor]:
    """Random tokens for some rows, the first of them padded at the left; decoders of encoders get half as many."""
    torch.manual_seed(1)
    ids = torch.randint(3, 97, (rows, PROMPT // 2)).repeat(1, 2)  # so that prompt lookup finds what follows
    if not model.config.is_encoder_decoder:
        return {"input_ids": ids, "attention_mask": _mask(rows, PROMPT, padding)}
    mask = _mask(rows, PROMPT // 2, padding // 2)
    decoder = {"decoder_input_ids": ids[:, : PROMPT // 2].clone(), "decoder_attention_mask": mask}
    # Else generate() puts the start token before the padding.
    decoder["decoder_input_ids"][range(rows), mask.argmax(dim=1)] = model.config.decoder_start_token_id
    if model.main_input_name == "input_features":
        features = torch.randn(rows, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        return {"input_features": features, **decoder}
    return {"input_ids": ids, "attention_mask": _mask(rows, PROMPT, padding), **decoder}


def _mask(rows: int, tokens: int, padding: int) -> Tensor:
    mask = torch.ones(rows, tokens, dtype=torch.long)
    mask[0, :padding] = 0
    return mask


def new_cache(name: str, make: Callable[..., Cache]) -> Cache:
    """An empty cache for a family, of one or two that `make` gives."""
    family = FAMILIES[name]
    config = tiny_config(name)
    new = partial(make, config=config) if family.with_config else make
    if not config.is_encoder_decoder:
        return new()
    return EncoderDecoderCache(new(), DynamicCache() if family.own_cross_cache else new())


def generate(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], cache: Cache | None, new_tokens: int = 11, **options: Any
) -> Any:
    """What generate() returns, with the logits of every step."""
    held = {} if cache is None else {CACHE_ARGUMENT: cache}
    # The token that ends a text, which prompt lookup asks for before 5.5, is one that models do not have.
    defaults = {
        "eos_token_id": 1000,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "output_scores": True,
    }
    # Not the model's own method: Whisper's cuts its input into segments and calls this one for each.
    return GenerationMixin.generate(model, **inputs, **held, max_new_tokens=new_tokens, **(defaults | options))
