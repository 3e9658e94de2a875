"""Greedy text of full length after prompts: where it leaves that of full precision, and whether it repeats itself.

Tokens are chosen by the logits alone. Neither what ends a text nor the penalties of a model's generation_config play a
part, and so the texts of all caches are equally long, whichever and however many end tokens the model has.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from kvquant.compat import CACHE_ARGUMENT
from kvquant_evals.error import EvalError
from kvquant_evals.model import Source, Subject
from kvquant_evals.settings import Settings
from kvquant_evals.task import Column, Finding, Item, Task, Turn
from kvquant_evals.tasks._prompt import check_prompts, encode_prompt, prompt_items
from kvquant_evals.tasks.perplexity import compare

# Nats beyond which a cache is broken rather than coarse. After 512 and 1,024 tokens SmolLM2 has 0.01 to 0.03 with 2
# bits, 0.16 to 0.39 without its sinks, 3.2 to 5.1 with swapped pages and 7 with one bit.
BROKEN_KL = 0.1
KL_STEPS = 16  # steps that are compared by their logits, all caches having read the same tokens
GRAM = 4  # tokens in a row that count as a repetition if they were there before


@dataclass(frozen=True)
class Continuation:
    """Generated tokens, and the logits [steps, vocabulary] after each of the first tokens of full precision's text.

    The prompt's own attention reads exact states, and so its logits, which chose the first token, are not among them.
    """

    tokens: list[int]
    logits: Tensor


class Generate:
    name = "generate"
    aliases = ("generation",)

    def check(self, source: Source, text: str, settings: Settings) -> None:
        if settings.new_tokens < 2:
            raise EvalError(
                f"new_tokens={settings.new_tokens} must be at least 2: the first is chosen before the cache is read"
            )
        check_prompts(source, text, settings, settings.contexts[0], settings.new_tokens)

    def items(self, source: Source, text: str, settings: Settings) -> list[Item]:
        context = settings.contexts[0]
        return prompt_items(source, text, settings, context, context + settings.new_tokens + KL_STEPS)

    def measure(self, turn: Turn) -> Finding:
        found = _continue(turn)
        full: Continuation = turn.full.evidence if turn.full else found
        diverges, divergence = first_divergence(full.tokens, found.tokens), kl(full.logits, found.logits)
        values = {
            "first": turn.item.about["first"],
            "tokens": len(found.tokens),
            "first_divergence": diverges,
            "equal_share": equal_share(full.tokens, found.tokens),
            "is_equal": diverges == len(full.tokens),
            "repetition": repetition(found.tokens),
            "kl": sum(divergence) / len(divergence),
        }
        return Finding(values, {"token": [float(token) for token in found.tokens], "kl": divergence}, evidence=found)

    def scores(self, found: Sequence[Finding], settings: Settings) -> dict[str, float]:
        names = {
            "generate_first_divergence": "first_divergence",
            "generate_equal": "is_equal",
            "generate_agreement": "equal_share",
            "generate_repetition": "repetition",
            "generate_kl": "kl",
        }
        return {score: sum(finding.values[name] for finding in found) / len(found) for score, name in names.items()}

    def columns(self, settings: Settings) -> list[Column]:
        return [
            Column("diverges at", "generate_first_divergence", ".0f", full=False),
            Column("same text", "generate_equal", ".0%", full=False),
            Column("repeats", "generate_repetition", ".0%"),
        ]

    def fault(self, scores: dict[str, float]) -> str | None:
        divergence = scores["generate_kl"]
        return None if divergence <= BROKEN_KL else f"KL {divergence:.2f} nats in the first generated tokens"


def first_divergence(full: Sequence[int], tokens: Sequence[int]) -> int:
    """The index of the first token that differs; their number if none does."""
    return next((i for i, pair in enumerate(zip(full, tokens, strict=True)) if pair[0] != pair[1]), len(full))


def equal_share(full: Sequence[int], tokens: Sequence[int]) -> float:
    """The share of positions with the same token."""
    return sum(one == other for one, other in zip(full, tokens, strict=True)) / len(full)


def repetition(tokens: Sequence[int]) -> float:
    """The share of the runs of GRAM tokens that were there before; 0 if there are none."""
    runs = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def kl(full: Tensor, logits: Tensor) -> list[float]:
    """KL(full || logits) in nats of each step."""
    wide = full.to(torch.float32)
    divergence: list[float] = compare(wide, logits.to(torch.float32), wide.argmax(dim=-1)).divergence.tolist()
    return divergence


def _continue(turn: Turn) -> Continuation:
    settings, source, cache = turn.settings, turn.subject.source, turn.new_cache()
    full: Continuation | None = turn.full.evidence if turn.full else None
    prompt = encode_prompt(source, turn.text, settings, settings.contexts[0], turn.item.about["first"])
    with torch.inference_mode():
        tokens = [int(_read(turn, cache, prompt).argmax())]
        kept = [] if full is None else _read_after(turn, copy.deepcopy(cache), full.tokens[: len(full.logits)])
        while len(tokens) < settings.new_tokens:
            logits = _read(turn, cache, torch.tensor([tokens[-1:]]))
            kept += [logits] if full is None and len(kept) < KL_STEPS else []
            tokens.append(int(logits.argmax()))
    return Continuation(tokens, torch.stack(kept))


def _read_after(turn: Turn, cache: Cache, tokens: Sequence[int]) -> list[Tensor]:
    """The logits after each of these tokens, read one by one as in decoding."""
    return [_read(turn, cache, torch.tensor([[token]])) for token in tokens]


def _read(turn: Turn, cache: Cache, ids: Tensor) -> Tensor:
    """The logits [vocabulary] after ids int64 [1, t]."""
    model = turn.subject.model
    ids = ids.to(model.device)
    logits: Tensor = model(ids, **{CACHE_ARGUMENT: cache}, use_cache=True, **_only_last(turn.subject)).logits
    turn.advance(ids.shape[1])
    return logits[0, -1].clone()


def _only_last(subject: Subject) -> dict[str, Any]:
    """What keeps a model from computing logits of the whole prompt, which can take more memory than its states."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(subject.model.forward).parameters else {}


TASK: Task = Generate()
