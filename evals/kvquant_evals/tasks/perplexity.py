"""Perplexity, KL divergence to full precision and top-1 agreement of text streamed through the cache in chunks.

A perplexity taken in one forward pass measures nothing: the prompt's own attention reads exact states.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from transformers import Cache

from kvquant.compat import CACHE_ARGUMENT
from kvquant_evals.bootstrap import interval
from kvquant_evals.error import EvalError
from kvquant_evals.model import Source, Subject
from kvquant_evals.peers.simulated_cache import memory_of
from kvquant_evals.settings import Settings
from kvquant_evals.task import Column, Finding, Item, Task, Turn

# Mean KL in nats of text beyond which a cache is broken rather than coarse. SmolLM2 has 0.04 to 0.07 with 2 bits, 0.3
# to 0.9 once its sinks are lost, and more than 2 with swapped pages or one bit.
BROKEN_KL = 0.25


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


@dataclass(frozen=True)
class Comparison:
    """Per token [t]: negative log-likelihood, KL(full || logits) in nats, whether the most likely token is the same."""

    loss: Tensor
    divergence: Tensor
    agreement: Tensor


class Perplexity:
    name = "perplexity"
    aliases = ("ppl", "kl")

    def check(self, source: Source, text: str, settings: Settings) -> None:
        if settings.chunk < 1:
            raise EvalError(f"chunk={settings.chunk} must be at least 1")
        if settings.tokens <= settings.skip:
            raise EvalError(
                f"tokens={settings.tokens} must exceed the {settings.skip} leading tokens that are not scored"
            )
        if source.max_length is not None and settings.tokens > source.max_length:
            raise EvalError(f"tokens={settings.tokens} exceeds the model's context of {source.max_length}")
        available, needed = source.encode(text).shape[1], settings.segments * settings.tokens + 1
        if available < needed:
            raise EvalError(f"the text has {available} tokens and {needed} are needed; use a longer text")

    def items(self, source: Source, text: str, settings: Settings) -> list[Item]:
        firsts = segments(source.encode(text).shape[1], settings)
        return [Item(f"from-{first}", settings.tokens, {"first": first}) for first in firsts]

    def measure(self, turn: Turn) -> Finding:
        cache = turn.new_cache()
        store: LogitStore | None = turn.full.evidence if turn.full else None
        found = []
        for chunk in _stream(turn, cache):
            logits = full = chunk.logits.to(torch.float32)
            if turn.full is None:
                store = store or LogitStore(turn.settings.tokens, chunk.logits)
                store.write(chunk.first, chunk.logits)
            else:
                assert store is not None
                full = store.read(chunk.first, chunk.logits).to(torch.float32)
            scored = slice(max(0, turn.settings.skip - chunk.first), None)
            found.append(compare(full[scored], logits[scored], chunk.targets[scored]))
        loss, divergence, agreement = (
            torch.cat([getattr(part, name) for part in found]) for name in ("loss", "divergence", "agreement")
        )
        values = {
            "first": turn.item.about["first"],
            "tokens": len(loss),
            "nll": loss.mean().item(),
            "kl": divergence.mean().item(),
            **_memory(cache, turn.subject, turn.settings.tokens),
        }
        series = {"nll": loss.tolist(), "kl": divergence.tolist(), "agreement": agreement.tolist()}
        return Finding(values, series, evidence=store)

    def scores(self, found: Sequence[Finding], settings: Settings) -> dict[str, float]:
        loss, divergence, agreement = (
            torch.tensor(list(chain.from_iterable(finding.series[name] for finding in found)), dtype=torch.float64)
            for name in ("nll", "kl", "agreement")
        )
        low, high = interval([finding.series["kl"] for finding in found], settings.seed)
        memory = ("bytes_per_token", "effective_bits", "packed_bytes")
        return {
            "perplexity": loss.mean().exp().item(),  # infinite rather than an error, beyond 709 nats
            "kl_mean": divergence.mean().item(),
            "kl_mean_low": low,
            "kl_mean_high": high,
            "kl_median": divergence.median().item(),
            "kl_p99": divergence.quantile(0.99).item(),
            "kl_p999": divergence.quantile(0.999).item(),
            "top1": agreement.mean().item(),
            "scored_tokens": len(loss),
            **{name: sum(finding.values[name] for finding in found) / len(found) for name in memory},
        }

    def columns(self, settings: Settings) -> list[Column]:
        return [
            Column("perplexity", "perplexity", ".4f"),
            Column("change", "perplexity", "+.2%", full=False, is_relative=True),
            Column("KL mean", "kl_mean", ".5f", full=False),
            Column("KL p99", "kl_p99", ".5f", full=False),
            Column("KL p99.9", "kl_p999", ".4f", full=False),
            Column("top-1", "top1", ".2%", full=False),
            Column("bytes/token", "bytes_per_token", ",.0f", is_cost=True),
            Column("bits", "effective_bits", ".2f", is_cost=True),
        ]

    def fault(self, scores: dict[str, float]) -> str | None:
        kl = scores["kl_mean"]
        return None if kl <= BROKEN_KL else f"mean KL {kl:.2f} nats"


def segments(available: int, settings: Settings) -> list[int]:
    """Where segments begin: the first at `offset` or as late as the text allows, the others evenly over what follows
    and, where that is too short, over all of it."""
    last, count = available - settings.tokens - 1, settings.segments
    first = min(settings.offset, last)
    if (count - 1) * settings.tokens > last - first:
        first = 0
    return [first + (last - first) * i // max(1, count - 1) for i in range(count)]


def compare(full: Tensor, logits: Tensor, targets: Tensor) -> Comparison:
    """Of two models' logits [t, vocabulary] in float32 and the tokens [t] that really followed."""
    log_p, log_q = full.log_softmax(dim=-1), logits.log_softmax(dim=-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(dim=-1)
    loss = -log_q.gather(1, targets[:, None]).squeeze(1)
    return Comparison(loss.cpu(), divergence.cpu(), (full.argmax(dim=-1) == logits.argmax(dim=-1)).cpu())


def _stream(turn: Turn, cache: Cache) -> Iterator[_Chunk]:
    """The item's segment, chunk by chunk through one growing cache."""
    settings, start = turn.settings, turn.item.about["first"]
    ids = turn.subject.encode(turn.text)[:, start : start + settings.tokens + 1]
    with torch.inference_mode():
        for first in range(0, settings.tokens, settings.chunk):
            last = min(first + settings.chunk, settings.tokens)
            logits = turn.subject.model(ids[:, first:last], **{CACHE_ARGUMENT: cache}, use_cache=True).logits[0]
            yield _Chunk(first, logits, ids[0, first + 1 : last + 1])
            turn.advance(last - first)


def _memory(cache: Cache, subject: Subject, tokens: int) -> dict[str, float]:
    """Bytes per token, bits per number of the layers that are quantized or else of the model's dtype, packed bytes."""
    memory = memory_of(cache)
    bits = memory.effective_bits if memory.elements else 8.0 * subject.model.dtype.itemsize
    return {"bytes_per_token": memory.total / tokens, "effective_bits": bits, "packed_bytes": memory.codes}


TASK: Task = Perplexity()
