"""Scoring given tokens and writing new ones over a cache, one row at a time. Nothing here knows of lm-eval."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, StoppingCriteria, StoppingCriteriaList

from kvquant.compat import CACHE_ARGUMENT
from kvquant_evals.error import EvalError
from kvquant_evals.model import Subject

# What lm-eval's tasks call the most tokens to generate; the first that is given counts.
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


@dataclass(frozen=True)
class Reading:
    """What was read of some tokens.

    loglikelihoods: of each in nats, float32 [t] on the CPU. is_greedy: whether each was the most likely one.
    """

    loglikelihoods: Tensor
    is_greedy: bool

    @property
    def total(self) -> float:
        return self.loglikelihoods.to(torch.float64).sum().item()


@dataclass(frozen=True)
class Decoding:
    """How a text is continued. until: what ends it and is no part of it; options: arguments of generate()."""

    max_tokens: int = 256
    until: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(given: Mapping[str, Any]) -> Decoding:
        """What a task's generation_kwargs say: greedy, unless they ask for sampling or for a temperature above 0."""
        options = dict(given)
        limits = [options.pop(name, None) for name in LIMITS]
        until = options.pop("until", None) or ()
        temperature = float(options.pop("temperature", None) or 0.0)
        do_sample = options.pop("do_sample", None)
        do_sample = temperature > 0 if do_sample is None else bool(do_sample)
        if do_sample and temperature > 0:
            options["temperature"] = temperature
        max_tokens = next((int(limit) for limit in limits if limit is not None), Decoding.max_tokens)
        until = (until,) if isinstance(until, str) else tuple(until)
        return Decoding(max_tokens, until, options | {"do_sample": do_sample})

    def cut(self, text: str) -> str:
        """The text before the first of what ends it."""
        for end in filter(None, self.until):
            text = text.partition(end)[0]
        return text


@dataclass(frozen=True)
class Answer:
    """A text that was written, and its tokens with what ended it."""

    text: str
    tokens: list[int]


@dataclass(frozen=True)
class Reader:
    """A model with a kind of cache that it reads through.

    chunk: tokens per forward pass where they are scored. advance: is told how many tokens went through the model.
    """

    subject: Subject
    new_cache: Callable[[], Cache]
    chunk: int = 128
    advance: Callable[[int], None] = lambda _: None

    def hold(self, context: Sequence[int]) -> Cache:
        """A cache with all of the context but its last token.

        The pass that fills a cache attends to exact states. A continuation's first token is predicted by the context's
        last one, and so that one goes through the model with the continuation, over what the cache holds by then.
        """
        cache = self.new_cache()
        if len(context) > 1:
            self._forward(context[:-1], cache, **_only_last(self.subject.model))
        return cache

    def score(self, cache: Cache, fed: Sequence[int], targets: Sequence[Sequence[int]]) -> list[Reading]:
        """A reading of each row of targets [k, t]: what may follow the last t of the tokens that are fed."""
        wanted, found = torch.tensor(targets, dtype=torch.long), []
        unscored = len(fed) - wanted.shape[1]
        for first in range(0, len(fed), self.chunk):
            logits = self._forward(fed[first : first + self.chunk], cache)[max(0, unscored - first) :].to(torch.float32)
            rows = wanted[:, max(0, first - unscored) :][:, : len(logits)].T.to(logits.device)  # [c, k]
            likelihoods = logits.log_softmax(dim=-1).gather(1, rows)
            found.append((likelihoods.cpu(), (logits.argmax(dim=-1, keepdim=True) == rows).cpu()))
        likelihoods, hits = (torch.cat(parts) for parts in zip(*found, strict=True))  # [t, k]
        return [
            Reading(row, bool(is_hit.all())) for row, is_hit in zip(likelihoods.unbind(1), hits.unbind(1), strict=True)
        ]

    def stream(self, context: Sequence[int], continuation: Sequence[int]) -> Reading:
        """A reading of the continuation, where all tokens go through the cache in chunks, those of the context too."""
        return self.score(self.new_cache(), [*context, *continuation[:-1]], [continuation])[0]

    def write(self, context: Sequence[int], decoding: Decoding) -> Answer:
        """What the model writes after the context."""
        model, tokenizer = self.subject.model, self.subject.source.tokenizer
        prompt = torch.tensor([list(context)], device=model.device)
        generate: Any = model.generate
        out = generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            **{CACHE_ARGUMENT: self.new_cache()},
            max_new_tokens=decoding.max_tokens,
            stopping_criteria=StoppingCriteriaList([_Ends(tokenizer, prompt.shape[1], decoding.until)]),
            pad_token_id=tokenizer.eos_token_id,
            **decoding.options,
        )
        self.advance(out.shape[1])
        tokens: list[int] = out[0, prompt.shape[1] :].tolist()
        return Answer(decoding.cut(self.subject.decode(tokens)), tokens)

    def _forward(self, tokens: Sequence[int], cache: Cache, **options: Any) -> Tensor:
        """Logits [t, vocabulary] in the model's dtype after each token, or after those that the options say."""
        ids = torch.tensor([list(tokens)], device=self.subject.model.device)
        with torch.inference_mode():
            logits: Tensor = self.subject.model(ids, **{CACHE_ARGUMENT: cache}, use_cache=True, **options).logits[0]
        self.advance(len(tokens))
        return logits


class _Ends(StoppingCriteria):
    """Whether what was written so far holds one of the strings that end it.

    generate()'s own criterion prepares the whole vocabulary for each new set of strings.
    """

    def __init__(self, tokenizer: Any, prompt_length: int, until: Sequence[str]) -> None:
        self._tokenizer, self._prompt_length, self._until = tokenizer, prompt_length, tuple(filter(None, until))

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        texts = self._tokenizer.batch_decode(input_ids[:, self._prompt_length :])
        ended = [any(end in text for end in self._until) for text in texts]
        return torch.tensor(ended, device=input_ids.device)


def _only_last(model: Any) -> dict[str, Any]:
    """What keeps a model from computing logits of the whole context, which can take more memory than its states."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def fit(context: list[int], room: int, what: str) -> list[int]:
    """The last tokens of a context that leave room for others. Raises EvalError if none fits."""
    if room < 1:
        raise EvalError(f"{what} leave no room for a context; give a longer max_length, or a model with one")
    return context[-room:]
