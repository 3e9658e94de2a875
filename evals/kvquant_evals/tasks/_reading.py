"""Reading real text through a cache as generate() does: logits after the last token only, and tokens that are given."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from kvquant.compat import CACHE_ARGUMENT
from kvquant_evals.error import EvalError
from kvquant_evals.model import Source
from kvquant_evals.task import Turn
from kvquant_evals.tasks.perplexity import BROKEN_KL, compare, segments

WARM = 200  # tokens that are read before anything is measured: enough for a page to be sealed


@dataclass(frozen=True)
class Reader:
    """A model that reads through a cache; `options` are what its forward takes for that."""

    model: Any
    options: dict[str, Any]

    @staticmethod
    def of(model: Any, cache: Cache | None) -> Reader:
        options: dict[str, Any] = {"use_cache": False} if cache is None else {CACHE_ARGUMENT: cache, "use_cache": True}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            options["logits_to_keep"] = 1
        return Reader(model, options)

    def read(self, ids: Tensor) -> Tensor:
        """Logits [B, vocabulary] after the last of the tokens [B, T]."""
        logits: Tensor = self.model(ids, **self.options).logits
        return logits[:, -1]

    def warm_up(self, ids: Tensor, chunk: int) -> Tensor:
        """Lets what is made once be made: reads the first of ids [B, T] in chunks, and one more token. Its logits."""
        first = ids[:, : min(WARM, ids.shape[1] - 1)]
        for part in first.split(chunk, dim=1):
            self.read(part)
        return self.read(ids[:, first.shape[1] : first.shape[1] + 1])


def check_length(source: Source, text: str, context: int, steps: int, what: str) -> None:
    """Raises EvalError if `steps` tokens cannot follow `context` of them."""
    needed, available = context + steps, source.encode(text).shape[1]
    if source.max_length is not None and needed > source.max_length:
        raise EvalError(
            f"context={context} and {steps} tokens of {what} exceed the model's context of {source.max_length}"
        )
    if available < needed + 1:
        raise EvalError(f"the text has {available} tokens and context={context} needs {needed + 1}; use a longer text")


def rows_of_text(turn: Turn, length: int, batch: int = 1) -> Tensor:
    """Token ids [batch, length]: rows that begin at different places of the text, where it is long enough."""
    ids = turn.subject.encode(turn.text)
    firsts = segments(ids.shape[1], replace(turn.settings, tokens=length - 1, segments=batch))
    return torch.cat([ids[:, first : first + length] for first in firsts])


def divergences(full: Tensor, logits: Tensor, targets: Tensor) -> list[float]:
    """KL(full || logits) in nats per step, of logits [steps, B, vocabulary] and the tokens [steps, B] that followed."""
    steps = zip(full.to(torch.float32), logits.to(torch.float32), targets.cpu(), strict=True)
    return [compare(*step).divergence.mean().item() for step in steps]


def lost_text(kl: float) -> str | None:
    """Why what a cache costs says nothing, if it has lost the text that it was given."""
    return None if kl <= BROKEN_KL else f"mean KL {kl:.2f} nats; what a cache costs that has lost the text says nothing"
