"""The texts to be continued, for generate and attention: stretches from all over the text, in a chat with a request."""

from __future__ import annotations

import torch
from torch import Tensor

from kvquant_evals.error import EvalError
from kvquant_evals.model import Source
from kvquant_evals.settings import Settings
from kvquant_evals.task import Item

REQUEST = "Continue this text:\n\n"


def check_prompts(source: Source, text: str, settings: Settings, context: int, new_tokens: int = 0) -> None:
    """Raises EvalError if there are no prompts of `context` tokens, or the model cannot go on after them."""
    if settings.prompts < 1:
        raise EvalError(f"prompts={settings.prompts} must be at least 1")
    if source.max_length is not None and context + new_tokens > source.max_length:
        more = f" and new_tokens={new_tokens} exceed" if new_tokens else " exceeds"
        raise EvalError(f"context={context}{more} the model's context of {source.max_length}")
    room, available = _room(source, settings, context), source.encode(text).shape[1]
    if room < 1:
        raise EvalError(f"context={context} is too short for the {context - room} tokens of the model's chat template")
    if available < room:
        raise EvalError(f"the text has {available} tokens and {room} are needed; use a longer text")


def prompt_items(source: Source, text: str, settings: Settings, context: int, tokens: int) -> list[Item]:
    """An item of `tokens` tokens for each prompt of `context` tokens, from the middle of equal parts of the text."""
    last, count = source.encode(text).shape[1] - _room(source, settings, context), settings.prompts
    firsts = [last * (2 * index + 1) // (2 * count) for index in range(count)]
    return [Item(f"prompt-{index}", tokens, {"first": first}) for index, first in enumerate(firsts)]


def encode_prompt(source: Source, text: str, settings: Settings, context: int, first: int) -> Tensor:
    """Token ids int64 [1, context]."""
    before, after = _frame(source, settings)
    room = context - before.shape[1] - after.shape[1]
    return torch.cat((before, source.encode(text)[:, first : first + room], after), dim=1)


def _room(source: Source, settings: Settings, context: int) -> int:
    """How many of a prompt's tokens are from the text."""
    return context - sum(part.shape[1] for part in _frame(source, settings))


def _frame(source: Source, settings: Settings) -> tuple[Tensor, Tensor]:
    """The tokens before and after the text."""
    frame = source.frame(settings.chat)
    before = frame.before + REQUEST if settings.chat else ""
    return source.encode(before), source.encode(frame.after)
