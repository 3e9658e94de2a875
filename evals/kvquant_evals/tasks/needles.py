"""Multi-needle retrieval: facts hidden in a long text, every one asked for on its own copy of one prefilled cache.

Source: the multi-key needle of RULER (Hsieh et al., 2024), section 3, with all needles of the same form.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from kvquant.compat import CACHE_ARGUMENT
from kvquant_evals.model import EvalError, Source, Subject
from kvquant_evals.task import Outcome, Run, Settings, Task

NAMES = """
    Alice Bruno Carla David Elena Frank Greta Hugo Irene Jonas Karen Louis Maria
    Nadia Oscar Paula Quinn Ralph Sofia Tomas Ursula Victor Wendy Xavier Yvonne Zachary
""".split()
NEEDLE = "The secret code of {name} is {code}."
QUESTION = "\n\nQuestion: What is the secret code of {name}?\nAnswer: The secret code of {name} is"
CODE_DIGITS = 5


@dataclass(frozen=True)
class Document:
    """A text of about `context` tokens with its needles: name -> code."""

    context: int
    index: int
    text: str
    codes: dict[str, str]


class Needles:
    name = "needles"

    def check(self, source: Source, text: str, settings: Settings) -> None:
        if not 1 <= settings.needles <= len(NAMES):
            raise EvalError(f"needles={settings.needles} must be 1 to {len(NAMES)}")
        if settings.documents < 1:
            raise EvalError(f"documents={settings.documents} must be at least 1")
        longest_needle = source.encode(NEEDLE.format(name=NAMES[0], code="0" * CODE_DIGITS)).shape[1] + 4
        question = source.encode(QUESTION.format(name=NAMES[0])).shape[1] + 2 * CODE_DIGITS + 4
        available = source.encode(text).shape[1]
        for context in settings.contexts:
            if available < context:
                raise EvalError(f"the text has {available} tokens, fewer than context={context}; use a longer text")
            if context < 2 * settings.needles * longest_needle:
                raise EvalError(
                    f"context={context} is too short for {settings.needles} needles; use fewer or a longer context"
                )
            if source.max_length is not None and context + question > source.max_length:
                raise EvalError(f"context={context} and its question exceed the model's context of {source.max_length}")

    def run(self, run: Run) -> Outcome:
        documents = make_documents(run.subject, run.text, run.settings)
        items: list[dict[str, Any]] = []
        total = sum(len(document.codes) for document in documents)
        with run.open_bar(f"{run.label}: needles", total, "q") as bar:
            for document in documents:
                ids, cache = run.subject.encode(document.text), run.new_cache()
                with torch.no_grad():
                    run.subject.model(ids, **{CACHE_ARGUMENT: cache}, use_cache=True)
                for name, code in document.codes.items():
                    answer = _ask(run.subject, ids, copy.deepcopy(cache), name)
                    items.append(_item(document, name, code, answer))
                    bar.update(1)
        return Outcome(_scores(items), items)


def make_documents(subject: Subject, text: str, settings: Settings) -> list[Document]:
    """`documents` documents of every context length, the same for every cache: they depend on seed and text only."""
    tokens = subject.encode(text)[0].tolist()
    documents = []
    for context in settings.contexts:
        for index in range(settings.documents):
            rng = random.Random(f"{settings.seed}/{context}/{index}")
            documents.append(_make_document(subject, tokens, context, index, settings.needles, rng))
    return documents


def _make_document(
    subject: Subject, tokens: list[int], context: int, index: int, needles: int, rng: random.Random
) -> Document:
    names = rng.sample(NAMES, needles)
    codes = {name: "".join(rng.choice("0123456789") for _ in range(CODE_DIGITS)) for name in names}
    sentences = [NEEDLE.format(name=name, code=code) for name, code in codes.items()]
    room = max(1, context - sum(subject.encode(f" {sentence}").shape[1] for sentence in sentences))
    first = rng.randrange(max(1, len(tokens) - room))
    words = subject.decode(tokens[first : first + room]).split(" ")
    depths = sorted(rng.sample(range(1, max(len(words), needles + 1)), needles), reverse=True)
    for depth, sentence in zip(depths, reversed(sentences), strict=True):
        words.insert(depth, sentence)
    return Document(context, index, " ".join(words), codes)


def _ask(subject: Subject, ids: Tensor, cache: Cache, name: str) -> str:
    """The greedy continuation after the question, read through a cache that holds the document."""
    prompt = torch.cat((ids, subject.encode(QUESTION.format(name=name))), dim=1)
    generate: Any = subject.model.generate
    out = generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        **{CACHE_ARGUMENT: cache},
        max_new_tokens=CODE_DIGITS + 2,
        do_sample=False,
        pad_token_id=subject.source.tokenizer.eos_token_id,
    )
    return subject.decode(out[0, prompt.shape[1] :])


def _item(document: Document, name: str, code: str, answer: str) -> dict[str, Any]:
    is_correct = answer.strip().startswith(code)
    return {
        "context": document.context,
        "document": document.index,
        "name": name,
        "code": code,
        "answer": answer.strip(),
        "correct": is_correct,
    }


def _scores(items: list[dict[str, Any]]) -> dict[str, float]:
    scores = {"retrieval": sum(item["correct"] for item in items) / len(items), "questions": float(len(items))}
    for context in sorted({item["context"] for item in items}):
        here = [item["correct"] for item in items if item["context"] == context]
        scores[f"retrieval_{context}"] = sum(here) / len(here)
    return scores


TASK: Task = Needles()
