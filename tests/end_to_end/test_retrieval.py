"""Retrieval on a real model: what SmolLM2-135M finds in prose, and which caches keep it from that."""

from __future__ import annotations

from functools import partial

import evaluation
import pytest

from kvquant import QuantCache
from kvquant_evals.settings import Settings
from kvquant_evals.tasks import needles

pytestmark = pytest.mark.slow


def test_broken_caches_are_found_and_two_bits_pass(smollm2):
    broken = evaluation.broken_caches()
    settings = Settings(contexts=(512,), documents=1, needles=2)
    found = evaluation.rows(smollm2, [needles.TASK], settings, {"2": partial(QuantCache, bits=2)} | broken)
    assert [label for label, row in found.items() if row.faults] == list(broken)
    assert 0 < found["2"].scores["retrieval_kl_median"] <= needles.BROKEN_KL / 2


def test_a_single_fact_is_found_at_every_depth(smollm2):
    settings = Settings(contexts=(512,), documents=1, retrieval=("single",))
    (row,) = evaluation.rows(smollm2, [needles.TASK], settings).values()
    answers = [answer for item in row.items["needles"] for answer in item["answers"]]
    assert [answer["depth"] for answer in answers] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert row.scores["retrieval"] == 1.0


def test_identity_answers_all_kinds_as_full_precision(smollm2):
    kinds = ("multi_query", "variable_tracking", "common_words")
    settings = Settings(contexts=(320,), documents=1, needles=2, hops=2, retrieval=kinds)
    full, identity = evaluation.rows(smollm2, [needles.TASK], settings, {"16": partial(QuantCache, bits=16)}).values()
    assert identity.scores == full.scores
    assert identity.items == full.items
    assert full.scores["retrieval"] > 0
