"""Retrieval: facts hidden in a long text, asked for through one prefilled cache, in several kinds and at every depth.

Every question is asked on its own copy of the cache that holds the document. Source: RULER (Hsieh et al., 2024).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from kvquant.compat import CACHE_ARGUMENT
from kvquant_evals.error import EvalError
from kvquant_evals.model import Source, Subject
from kvquant_evals.settings import Settings
from kvquant_evals.task import Column, Finding, Item, Task, Turn
from kvquant_evals.tasks import _kind
from kvquant_evals.tasks._document import Document, Draft, Question
from kvquant_evals.tasks._record import MOST as MOST_RECORDS
from kvquant_evals.tasks._ruler import NAMES

QUESTION_TOKENS = 25  # about what a question takes without its answer, to foretell how long that lasts
SLACK = 16  # tokens by which a document may miss its context, since seams are tokenized in another way than their sides

# KL in nats of half the questions beyond which a cache is broken rather than coarse. SmolLM2 has 0.05 to 0.1 with 2
# bits; 0.3 to 0.5 once its sinks are lost, 0.4 to 1.5 with swapped pages, and 7 with one bit. The median, since a cache
# that is only coarse is far off at a question here and there. How many answers are as in full precision does not tell
# them apart: a third to a half with 2 bits, and up to all of them without the sinks.
BROKEN_KL = 0.2


@dataclass(frozen=True)
class Reply:
    """Token ids of an answer, and the logits [T, vocabulary] with which its question was read."""

    ids: list[int]
    logits: Tensor


@dataclass(frozen=True)
class Answered:
    """A document, and the reply to each of its questions."""

    document: Document
    replies: list[Reply]


class Needles:
    name = "needles"
    aliases = ("retrieval",)

    def check(self, source: Source, text: str, settings: Settings) -> None:
        _check_counts(settings)
        kinds = _kind.find(settings.retrieval)
        available = source.encode(text).shape[1]
        for context in settings.contexts:
            if available < context:
                raise EvalError(f"the text has {available} tokens, fewer than context={context}; use a longer text")
            for kind in kinds:
                _check_room(kind, Draft(source, text, settings, kind.name, context, index=0))

    def items(self, source: Source, text: str, settings: Settings) -> list[Item]:
        return [
            Item(
                f"{kind.name}-{context}-{index}",
                context + kind.questions(settings) * (QUESTION_TOKENS + kind.new_tokens),
                {"kind": kind.name, "context": context, "index": index},
            )
            for kind in _kind.find(settings.retrieval)
            for context in settings.contexts
            for index in range(kind.documents(settings))
        ]

    def measure(self, turn: Turn) -> Finding:
        about = turn.item.about
        document = turn.full.evidence.document if turn.full else make_document(turn)
        replies = _replies(turn, document)
        full = turn.full.evidence.replies if turn.full else replies
        told = [
            _told(about, question, turn.subject.decode(reply.ids))
            for question, reply in zip(document.questions, replies, strict=True)
        ]
        pairs = list(zip(full, replies, strict=True))
        series = {
            "agreement": [float(theirs.ids == ours.ids) for theirs, ours in pairs],
            "kl": [_divergence(theirs.logits, ours.logits) for theirs, ours in pairs],
        }
        return Finding({**about, "answers": told}, series, evidence=Answered(document, replies))

    def scores(self, found: Sequence[Finding], settings: Settings) -> dict[str, float]:
        answers = [answer for finding in found for answer in finding.values["answers"]]
        agreement, kl = (
            list(chain.from_iterable(finding.series[name] for finding in found)) for name in ("agreement", "kl")
        )
        return {
            **_means(answers),
            "retrieval_agreement": fmean(agreement),
            "retrieval_kl": fmean(kl),
            "retrieval_kl_median": fmean(kl) if any(map(math.isnan, kl)) else median(kl),
            "questions": float(len(answers)),
        }

    def columns(self, settings: Settings) -> list[Column]:
        kinds = _kind.find(settings.retrieval)
        return [
            *(Column(f"needles @{context}", f"retrieval_{context}", ".2f") for context in settings.contexts),
            *(Column(kind.name, f"retrieval_{kind.name}", ".2f") for kind in kinds if len(kinds) > 1),
        ]

    def fault(self, scores: dict[str, float]) -> str | None:
        divergence = scores["retrieval_kl_median"]
        return None if divergence <= BROKEN_KL else f"median KL {divergence:.2f} nats while questions are read"


def make_document(turn: Turn) -> Document:
    """That of the turn's item, the same for every cache."""
    about = turn.item.about
    (kind,) = _kind.find([about["kind"]])
    return kind.make(Draft(turn.subject.source, turn.text, turn.settings, **about))


def _check_counts(settings: Settings) -> None:
    """Raises EvalError for a number that cannot be."""
    for name, most in (("needles", len(NAMES)), ("records", MOST_RECORDS)):
        if not 1 <= getattr(settings, name) <= most:
            raise EvalError(f"{name}={getattr(settings, name)} must be 1 to {most}")
    for name in ("documents", "depths", "hops"):
        if getattr(settings, name) < 1:
            raise EvalError(f"{name}={getattr(settings, name)} must be at least 1")


def _check_room(kind: _kind.Kind, draft: Draft) -> None:
    """Raises EvalError if half of the context does not hold what is hidden, or the model's not the whole document."""
    source, context = draft.source, draft.context
    frame, document = source.frame(draft.settings.chat), kind.make(draft)
    if context < 2 * document.planted:
        raise EvalError(
            f"context={context} is too short for the {document.planted} tokens that {kind.name} hides; "
            f"use fewer needles or hops, or a longer context"
        )
    around = context + SLACK + source.encode(frame.before).shape[1]
    longest = max(
        source.encode(question.prompt(frame)).shape[1] + kind.new_tokens * len(question.expected)
        for question in document.questions
    )
    if source.max_length is not None and around + longest > source.max_length:
        raise EvalError(f"context={context} and its question exceed the model's context of {source.max_length}")


def _replies(turn: Turn, document: Document) -> list[Reply]:
    """The reply to each question, all after one prefill."""
    subject, about, cache = turn.subject, turn.item.about, turn.new_cache()
    frame, (kind,) = subject.source.frame(turn.settings.chat), _kind.find([about["kind"]])
    ids = subject.encode(frame.before + document.text)
    replies = []
    with torch.no_grad():
        # Without the head: logits of a long document would take more memory than its cache.
        subject.model.base_model(ids, **{CACHE_ARGUMENT: cache}, use_cache=True)
        turn.advance(about["context"])
        for question in document.questions:
            prompt = subject.encode(question.prompt(frame))
            replies.append(_reply(subject, prompt, copy.deepcopy(cache), kind.new_tokens * len(question.expected)))
            turn.advance(QUESTION_TOKENS + kind.new_tokens)
    return replies


def _reply(subject: Subject, prompt: Tensor, cache: Cache, most: int) -> Reply:
    """The greedy continuation of a prompt [1, T] that is read through the cache, up to the end of the text.

    Not by generate(), whose defaults are the model's: a penalty for repetition would forbid to repeat a code.
    """
    ends = _ends(subject)
    read = logits = subject.model(prompt, **{CACHE_ARGUMENT: cache}, use_cache=True).logits
    ids = [int(logits[0, -1].argmax())]
    while len(ids) < most and ids[-1] not in ends:
        token = torch.tensor([ids[-1:]], device=prompt.device)
        logits = subject.model(token, **{CACHE_ARGUMENT: cache}, use_cache=True).logits
        ids.append(int(logits[0, -1].argmax()))
    return Reply(ids, read[0])


def _divergence(full: Tensor, logits: Tensor) -> float:
    """Mean KL(full || logits) in nats over tokens [T, vocabulary]."""
    log_p, log_q = full.float().log_softmax(dim=-1), logits.float().log_softmax(dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1).mean().item()


def _ends(subject: Subject) -> set[int]:
    """Ids of the tokens after which a model's text is over."""
    ends = getattr(subject.model.generation_config, "eos_token_id", None)
    return {subject.source.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}


def _told(about: dict[str, Any], question: Question, answer: str) -> dict[str, Any]:
    score = question.score(answer)
    return {
        "kind": about["kind"],
        "context": about["context"],
        "depth": question.depth,
        "depths": list(question.depths),
        "expected": list(question.expected),
        "answer": answer.strip(),
        "score": score,
        "correct": score == 1,
    }


def _means(answers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Mean scores. Every kind and every context has the same weight, however many questions it has.

    Source: RULER (Hsieh et al., 2024), section 4.
    """
    cells: dict[tuple[str, int], list[float]] = {}
    for answer in answers:
        cells.setdefault((answer["kind"], answer["context"]), []).append(answer["score"])
    means = {cell: fmean(scores) for cell, scores in cells.items()}
    return {
        "retrieval": fmean(means.values()),
        **{f"retrieval_{at}": fmean(_of(means, at)) for at in sorted({context for _, context in means})},
        **{f"retrieval_{kind}": fmean(_of(means, kind)) for kind in dict.fromkeys(kind for kind, _ in means)},
        **{f"retrieval_{kind}_{context}": mean for (kind, context), mean in means.items()},
    }


def _of(means: dict[tuple[str, int], float], name: str | int) -> Iterable[float]:
    return (mean for cell, mean in means.items() if name in cell)


TASK: Task = Needles()
