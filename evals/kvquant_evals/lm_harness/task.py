"""A task of lm-eval as one of ours: its own metrics, and how far what was read of each text is from full precision."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from typing import Any

import lm_eval
import numpy as np
import torch
from torch import Tensor

from kvquant_evals.error import EvalError
from kvquant_evals.lm_harness import catalog
from kvquant_evals.lm_harness.lm import CachedLM
from kvquant_evals.lm_harness.reader import Answer, Reader
from kvquant_evals.model import Source
from kvquant_evals.settings import Settings
from kvquant_evals.task import Column, Finding, Item, Turn

# Mean change of a token's log-likelihood in nats beyond which a cache is broken rather than coarse.
BROKEN_SHIFT = 1.0
SAMPLED = 8  # documents whose length tells about how many tokens all of them have
ANSWER = 64  # tokens that an answer may take, to foretell how long that lasts


@dataclass(frozen=True)
class Evidence:
    """What was read of every text that was asked for, in order, and of what full precision has written itself."""

    likelihoods: list[Tensor]
    answers: list[tuple[list[int], Answer]]


@dataclass(frozen=True)
class LmEvalTask:
    """A task, a group or a tag of lm-eval. folder: where it is described, if it is none of lm-eval's own.

    Of a group or tag, each task is an item, and its score is the mean over all their documents.
    """

    name: str
    folder: str | None = None

    @property
    def aliases(self) -> tuple[str, ...]:
        return ()

    def check(self, source: Source, text: str, settings: Settings) -> None:
        source.frame(settings.chat)
        if settings.num_fewshot is not None and settings.num_fewshot < 0:
            raise EvalError(f"num_fewshot={settings.num_fewshot} must be at least 0")
        for name, task in self._tasks(settings).items():
            if getattr(task, "MULTIMODAL", False):
                raise EvalError(
                    f"task {name!r} of lm-eval needs a model that sees or hears; only text is evaluated here"
                )
            if getattr(task, "UNSAFE_CODE", False):
                raise EvalError(
                    f"task {name!r} of lm-eval runs code that the model wrote, which is left to lm-eval itself: "
                    f"python -m kvquant_evals.lm_harness --tasks {name} --confirm_run_unsafe_code"
                )

    def items(self, source: Source, text: str, settings: Settings) -> list[Item]:
        return [
            Item(name.replace("/", "-"), _tokens(source, task, settings), {"task": name})
            for name, task in self._tasks(settings).items()
        ]

    def measure(self, turn: Turn) -> Finding:
        name, settings = turn.item.about["task"], turn.settings
        lm = CachedLM(Reader(turn.subject, turn.new_cache, settings.chunk, turn.advance), show_progress=False)
        results = _evaluate(lm, name, self._tasks(settings)[name], settings)
        answers = turn.full.evidence.answers if turn.full else lm.answers
        likelihoods = [reading.loglikelihoods for reading in lm.readings]
        likelihoods += [lm.score_answer(context, answer.tokens).loglikelihoods for context, answer in answers]
        found = Evidence(likelihoods, lm.answers)
        full: Evidence = turn.full.evidence if turn.full else found
        values = {
            "task": name,
            "documents": results["n-samples"][name]["effective"],
            "metrics": _metrics(results["results"][name]),
            **_differences(full, found),
            "packed": sum(lm.packed) / len(lm.packed) if lm.packed else None,
            "version": results["versions"][name],
            "lm_eval": lm_eval.__version__,
        }
        series = {"loglikelihood": [part.to(torch.float64).sum().item() for part in likelihoods]}
        return Finding(values, series, evidence=found)

    def scores(self, found: Sequence[Finding], settings: Settings) -> dict[str, float]:
        values = [finding.values for finding in found]
        own = {
            "_".join(dict.fromkeys((self.name, value["task"], metric))): x  # a member may also be a task of its own
            for value in values
            for metric, x in value["metrics"].items()
        }
        main = _main_metric(self._first(settings))
        mains = [{"main": value["metrics"].get(main), "documents": value["documents"]} for value in values]
        whole = {
            f"{self.name}_{main}": _mean(mains, "main", "documents"),
            f"{self.name}_shift": _mean(values, "shift", "tokens"),
            f"{self.name}_same": _mean(values, "same", "answers"),
            f"{self.name}_packed": _mean(values, "packed", "documents"),
        }
        return {name: score for name, score in whole.items() if score is not None} | own

    def columns(self, settings: Settings) -> list[Column]:
        task = self._first(settings)
        main, same = _main_metric(task), Column(f"{self.name} same", f"{self.name}_same", ".0%", full=False)
        return [
            Column(f"{self.name} {next(iter(task.aggregation()))}", f"{self.name}_{main}", ".4f"),
            Column(f"{self.name} shift", f"{self.name}_shift", ".4f", full=False),
            *([same] if task.OUTPUT_TYPE == "generate_until" else []),
            Column(f"{self.name} packed", f"{self.name}_packed", ".0%", full=False),
        ]

    def fault(self, scores: dict[str, float]) -> str | None:
        shift = scores.get(f"{self.name}_shift", 0.0)
        return None if shift <= BROKEN_SHIFT else f"log-likelihoods change by {shift:.2f} nats per token"

    def _tasks(self, settings: Settings) -> dict[str, Any]:
        return catalog.load(self.name, self.folder, settings.num_fewshot)

    def _first(self, settings: Settings) -> Any:
        """What tells which metrics there are: tasks of a group have the same."""
        return next(iter(self._tasks(settings).values()))


def _evaluate(lm: CachedLM, name: str, task: Any, settings: Settings) -> dict[str, Any]:
    """lm-eval's results. Examples and whatever else is drawn are the same in every turn."""
    random.seed(settings.seed)
    np.random.seed(settings.seed)
    torch.manual_seed(settings.seed)
    task.set_fewshot_seed(settings.seed)
    results: dict[str, Any] = lm_eval.evaluate(
        lm,
        {"tasks": {name: task}},
        limit=settings.limit,
        bootstrap_iters=0,
        log_samples=False,
        apply_chat_template=settings.chat,
        fewshot_as_multiturn=settings.chat,
    )
    return results


def _tokens(source: Source, task: Any, settings: Settings) -> int:
    """About how many tokens a turn takes, from the first documents and their answers."""
    documents = task.eval_docs
    texts = [f"{task.doc_to_text(document)} {task.doc_to_target(document)}" for document in islice(documents, SAMPLED)]
    length = sum(source.encode(text).shape[1] for text in texts) / len(texts)
    count = len(documents) if settings.limit is None else min(settings.limit, len(documents))
    shots: int = task.get_config("num_fewshot")
    return round(count * (length * (1 + shots) + ANSWER))


def _main_metric(task: Any) -> str:
    """The first of a task's metrics, after the first of its filters."""
    filters = task.config.filter_list
    return _metric_name(next(iter(task.aggregation())), filters[0]["name"] if filters else "none")


def _metric_name(metric: str, filter_name: str) -> str:
    return metric if filter_name == "none" else f"{metric}_{filter_name}"


def _metrics(result: dict[str, Any]) -> dict[str, float]:
    """A task's metrics without their errors, of keys such as `acc,none`."""
    parts = {key: key.partition(",") for key in result if "," in key}
    return {
        _metric_name(metric, filter_name): float(result[key])
        for key, (metric, _, filter_name) in parts.items()
        if not metric.endswith("_stderr") and isinstance(result[key], Real)
    }


def _differences(full: Evidence, found: Evidence) -> dict[str, float | int | None]:
    """Mean change of a token's log-likelihood in nats, and the share of answers that are the same; None of nothing."""
    pairs = zip(full.likelihoods, found.likelihoods, strict=True)
    shifts = torch.cat([torch.zeros(0), *((one - other).abs() for one, other in pairs)])
    texts = zip(full.answers, found.answers, strict=True)
    same = [one.text == other.text for (_, one), (_, other) in texts]
    return {
        "shift": shifts.to(torch.float64).mean().item() if len(shifts) else None,
        "tokens": len(shifts),
        "same": sum(same) / len(same) if same else None,
        "answers": len(same),
    }


def _mean(values: Sequence[dict[str, Any]], name: str, weight: str) -> float | None:
    """The mean of what has one, by weight."""
    there = [value for value in values if value[name] is not None and value[weight]]
    total: float = sum(value[weight] for value in there)
    return sum(value[name] * value[weight] for value in there) / total if there else None
