"""Running evaluations in tests, and caches that are broken in the ways that an evaluation has to notice."""

from __future__ import annotations

import functools

import torch

from kvquant import QuantCache, QuantConfig
from kvquant.formats import integer_format
from kvquant_evals.model import default_text
from kvquant_evals.results import Results
from kvquant_evals.rows import FULL_PRECISION, Contender
from kvquant_evals.runner import Evaluation, plan


def evaluate(subject, tasks, settings, caches=(), text=None, results=None):
    """The report on `caches`, contenders or functions that make an empty cache, by label."""
    text = default_text() if text is None else text
    contenders = [Contender.full_precision(subject), *map(_contender, _items(caches))]
    jobs, results = plan(tasks, subject.source, text, settings), results or Results()
    evaluation = Evaluation(subject, text, settings, contenders)
    evaluation.run(jobs, results, lambda title, tokens: None)
    found = evaluation.report(jobs, results)
    assert found.is_complete
    return found


def rows(subject, tasks, settings, caches=(), **options):
    """Rows by label, with that of full precision."""
    return {row.label: row for row in evaluate(subject, tasks, settings, caches, **options).rows}


def scores(subject, task, settings, caches=(), **options):
    """Scores of one task by label, with those of full precision."""
    return {label: row.scores for label, row in rows(subject, [task], settings, caches, **options).items()}


def interrupt(monkeypatch, task, after):
    """Makes the task end the run, as Ctrl-C does, after that many turns. Returns the turns that it takes."""
    turns, measure = [], task.measure

    def counted(turn):
        if len(turns) == after:
            raise KeyboardInterrupt
        turns.append(turn)
        return measure(turn)

    monkeypatch.setattr(task, "measure", counted)
    return turns


def _items(caches):
    return caches.items() if isinstance(caches, dict) else caches


def _contender(cache):
    return cache if isinstance(cache, Contender) else Contender(*cache)


class SwappedPages(QuantCache):
    """A cache that reads the keys of its pages in reverse order, and the values in theirs."""

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        size, sinks = self.quant.page_size, self.quant.sinks
        old = (keys.shape[2] - key_states.shape[2] - sinks) // size
        order = torch.arange(keys.shape[2])
        if old > 0:
            order[sinks : sinks + size * old] = order[sinks : sinks + size * old].view(old, size).flip(0).flatten()
        return keys.index_select(2, order), values


class LostSinks(QuantCache):
    """A cache that has other tokens where its sinks should be, once the first chunk is over.

    In that chunk the token in their place would see only itself, and the model would make a new sink of it.
    """

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if keys.shape[2] == key_states.shape[2]:
            return keys, values
        order = torch.arange(keys.shape[2])
        order[: self.quant.sinks] = self.quant.sinks
        return keys.index_select(2, order), values.index_select(2, order)


def broken_caches(**pages):
    """Functions that make caches which every task has to find broken, by label. pages: options of QuantConfig."""
    one_bit = QuantConfig(integer_format(1, "per_channel"), integer_format(1, "per_token"), **pages)
    return {
        "one bit": functools.partial(QuantCache, quant=one_bit),
        "swapped pages": functools.partial(SwappedPages, bits=8, **pages),
        "lost sinks": functools.partial(LostSinks, bits=8, **pages),
    }


__all__ = ["FULL_PRECISION", "broken_caches", "evaluate", "interrupt", "rows", "scores"]
