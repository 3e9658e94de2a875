"""Perplexity, KL divergence to full precision and top-1 agreement of text streamed through the cache in chunks.

A perplexity taken in one forward pass measures nothing: the prompt's own attention reads exact states.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

from kvquant import cache_memory
from kvquant.compat import CACHE_ARGUMENT
from kvquant_evals.model import EvalError, Source, Subject
from kvquant_evals.task import Outcome, Run, Settings, Task


class LogitStore:
    """The logits of full precision, [tokens, vocabulary] in the model's dtype, in a temporary file.

    They are kept as they are: rounding them to 16 bits would cost more than an 8-bit cache does.
    """

    def __init__(self, tokens: int, like: Tensor) -> None:
        self._file = tempfile.NamedTemporaryFile(prefix="kvquant-logits-")  # noqa: SIM115  # lives as long as the store
        size = tokens * like.shape[-1]
        self._logits = torch.from_file(self._file.name, shared=True, size=size, dtype=like.dtype).view(tokens, -1)

    def write(self, first: int, logits: Tensor) -> None:
        self._logits[first : first + logits.shape[0]] = logits

    def read(self, first: int, like: Tensor) -> Tensor:
        return self._logits[first : first + like.shape[0]].to(like.device)


@dataclass(frozen=True)
class _Chunk:
    """Logits [t, vocabulary] of tokens first..first+t-1, and the tokens [t] that follow them."""

    first: int
    logits: Tensor
    targets: Tensor


class Perplexity:
    name = "perplexity"

    def check(self, source: Source, text: str, settings: Settings) -> None:
        if settings.chunk < 1:
            raise EvalError(f"chunk={settings.chunk} must be at least 1")
        if settings.tokens <= settings.skip:
            raise EvalError(
                f"tokens={settings.tokens} must exceed the {settings.skip} leading tokens that are not scored"
            )
        if source.max_length is not None and settings.tokens > source.max_length:
            raise EvalError(f"tokens={settings.tokens} exceeds the model's context of {source.max_length}")
        available = source.encode(text).shape[1]
        if available < settings.tokens + 1:
            raise EvalError(f"the text has {available} tokens and {settings.tokens + 1} are needed; use a longer text")

    def run(self, run: Run) -> Outcome:
        cache = run.new_cache()
        store: LogitStore | None = None if run.baseline is None else run.baseline.evidence
        losses, divergences, agreements, items = [], [], [], []
        for chunk in _stream(run, cache):
            logits = chunk.logits.to(torch.float32)
            if run.baseline is None:
                store = store or LogitStore(run.settings.tokens, chunk.logits)
                store.write(chunk.first, chunk.logits)
                full = logits
            else:
                assert store is not None
                full = store.read(chunk.first, chunk.logits).to(torch.float32)
            scored = slice(max(0, run.settings.skip - chunk.first), None)
            loss, divergence, agreement = _compare(full[scored], logits[scored], chunk.targets[scored])
            losses.append(loss)
            divergences.append(divergence)
            agreements.append(agreement)
            items.append({"first": chunk.first, "tokens": len(loss), "nll": _mean(loss), "kl": _mean(divergence)})
        loss, divergence, agreement = torch.cat(losses), torch.cat(divergences), torch.cat(agreements)
        scores = {
            "perplexity": math.exp(loss.mean().item()),
            "kl_mean": divergence.mean().item(),
            "kl_p99": divergence.quantile(0.99).item(),
            "top1": agreement.to(torch.float32).mean().item(),
            "scored_tokens": len(loss),
            **_memory(cache, run.subject, run.settings.tokens),
        }
        return Outcome(scores, items, evidence=store)


def _stream(run: Run, cache: Cache) -> Iterator[_Chunk]:
    """The text, chunk by chunk through one growing cache."""
    settings = run.settings
    ids = segment(run.subject.encode(run.text), settings)
    with run.open_bar(f"{run.label}: perplexity", settings.tokens, "tok") as bar, torch.inference_mode():
        for first in range(0, settings.tokens, settings.chunk):
            last = min(first + settings.chunk, settings.tokens)
            logits = run.subject.model(ids[:, first:last], **{CACHE_ARGUMENT: cache}, use_cache=True).logits[0]
            yield _Chunk(first, logits, ids[0, first + 1 : last + 1])
            bar.update(last - first)


def segment(ids: Tensor, settings: Settings) -> Tensor:
    """`tokens` + 1 ids from `offset` on, or as late as the text allows."""
    first = min(settings.offset, ids.shape[1] - settings.tokens - 1)
    return ids[:, first : first + settings.tokens + 1]


def _compare(full: Tensor, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per token: negative log-likelihood, KL(full || logits) in nats, and whether the most likely token is the same."""
    log_p, log_q = full.log_softmax(dim=-1), logits.log_softmax(dim=-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    loss = -log_q.gather(1, targets[:, None]).squeeze(1)
    return loss.cpu(), divergence.cpu(), (full.argmax(dim=-1) == logits.argmax(dim=-1)).cpu()


def _memory(cache: Cache, subject: Subject, tokens: int) -> dict[str, float]:
    """Bytes per token, bits per number of the layers that are quantized or else of the model's dtype, packed bytes."""
    memory = cache_memory(cache)
    bits = memory.effective_bits if memory.elements else 8.0 * subject.model.dtype.itemsize
    return {"bytes_per_token": memory.total / tokens, "effective_bits": bits, "packed_bytes": memory.codes}


def _mean(x: Tensor) -> float | None:
    return x.mean().item() if len(x) else None


TASK: Task = Perplexity()
