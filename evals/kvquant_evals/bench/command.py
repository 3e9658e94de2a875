"""What `kvquant bench` measures, one thing after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from kvquant_evals import model
from kvquant_evals.bench.attention import Shape, time_attention
from kvquant_evals.bench.decoding import RANDOM_MODEL, cache_labels, random_model, time_decoding
from kvquant_evals.bench.memory import measure as measure_memory
from kvquant_evals.bench.race import Effort
from kvquant_evals.bench.report import Report
from kvquant_evals.error import EvalError


@dataclass(frozen=True)
class Plan:
    """models: names as for `kvquant eval`, None for the default one, or RANDOM_MODEL; memory: tokens, None for none;
    plot: whether what is found will be drawn.
    """

    models: list[str | None]
    contexts: list[int]
    bits: list[Any]
    threads: list[int]
    peers: bool
    memory: int | None
    rounds: int
    plot: bool = False


def measure(plan: Plan) -> Report:
    """Contexts beyond what a model was made for are left out.

    Raises EvalError, before anything is timed, for a model that cannot be loaded, or for what cannot be done here, such
    as measuring memory.
    """
    if plan.memory is not None and not Path("/proc/self/clear_refs").exists():
        raise EvalError("memory can only be measured on Linux; leave out --memory")
    if plan.plot and find_spec("matplotlib") is None:
        raise EvalError("--plot needs matplotlib: pip install matplotlib")
    sources = {name: model.find_source(name) for name in plan.models if name != RANDOM_MODEL}
    effort, shape = Effort(plan.rounds), Shape()
    report = Report(shape)
    if plan.memory is not None:  # first: what cannot be measured is then known before half an hour of timings
        name = next((name for name in plan.models if name != RANDOM_MODEL), None)
        report.memory += measure_memory(name, cache_labels(plan.bits, plan.peers, grouped=False), plan.memory)
    # What lies in the processor's caches weighs more in a millisecond of attention than in a model's step.
    more = Effort(10 * effort.rounds, 6 * effort.seconds)
    report.timings += time_attention(shape, plan.contexts, plan.bits, plan.threads, more)
    for name in plan.models:
        for label, loaded in _models(sources.get(name)):
            config = loaded.config.get_text_config(decoder=True)
            kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
            caches = cache_labels(plan.bits, plan.peers, grouped=kv_heads < config.num_attention_heads)
            most = getattr(config, "max_position_embeddings", None) or max(plan.contexts)
            contexts = [context for context in plan.contexts if context <= most]
            report.timings += time_decoding(label, loaded, contexts, caches, plan.threads, effort)
    return report


def _models(source: model.Source | None) -> Iterator[tuple[str, PreTrainedModel]]:
    """A model in the dtypes in which it is timed, with its name."""
    if source is None:
        yield RANDOM_MODEL, random_model()
        return
    loaded: Any = source.load().model
    for dtype in (torch.bfloat16, torch.float32):
        yield source.name, loaded.to("cpu", dtype)
