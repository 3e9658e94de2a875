"""Memory and speed of a real model: packed caches cost less and keep the text; broken ones are told apart."""

from __future__ import annotations

from functools import partial

import evaluation
import pytest

from kvquant import QuantCache
from kvquant_evals.settings import Settings
from kvquant_evals.tasks import _reading, memory, speed

pytestmark = pytest.mark.slow

CONTEXT = 256
PAGES = {"page_size": 64, "residual_length": 16}  # several of them in so short a context
SETTINGS = Settings(contexts=(CONTEXT,))
TOKEN_BYTES = 2 * 30 * 3 * 64 * 4  # K and V of 30 layers with 3 heads of 64 channels in float32

TASKS = pytest.mark.parametrize("task", [memory.TASK, speed.TASK], ids=lambda task: task.name)


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch):
    """What these tests look at does not depend on how long it is done."""
    monkeypatch.setattr(memory, "STEPS", 8)
    monkeypatch.setattr(speed, "STEPS", 10)
    monkeypatch.setattr(_reading, "WARM", 8)


def ours(*bits):
    return {str(b): partial(QuantCache, bits=b, **PAGES) for b in bits}


@TASKS
def test_identity_keeps_the_text_exactly_and_two_bits_well_enough(smollm2, task):
    rows = evaluation.rows(smollm2, [task], SETTINGS, ours(16, 2))
    assert [row.scores[f"{task.name}_kl"] for row in rows.values()][:2] == [0.0, 0.0]
    assert not any(row.faults for row in rows.values())


@TASKS
def test_more_bits_keep_it_better(smollm2, task):
    rows = evaluation.rows(smollm2, [task], SETTINGS, ours(8, 4))
    _, eight, four = (row.scores[f"{task.name}_kl"] for row in rows.values())
    assert 0 < eight < four / 10
    assert not any(row.faults for row in rows.values())


@TASKS
def test_broken_caches_are_told(smollm2, task):
    broken = evaluation.broken_caches(**PAGES)
    rows = evaluation.rows(smollm2, [task], SETTINGS, broken)
    assert [label for label, row in rows.items() if row.faults] == list(broken)


def test_packed_caches_take_what_their_bits_say(smollm2):
    rows = evaluation.rows(smollm2, [memory.TASK], SETTINGS, ours(8, 4))
    full, eight, four = (row.items["memory"][0] for row in rows.values())
    assert full["bytes"] == CONTEXT * TOKEN_BYTES
    assert full["held"] == (CONTEXT + memory.STEPS) * TOKEN_BYTES
    # Three pages are sealed; codes of 8 bits are a quarter of float32, and the other tokens are exact.
    assert eight["parts"]["codes"] == 2 * four["parts"]["codes"] == 3 * 64 * TOKEN_BYTES // 4
    assert eight["parts"]["exact"] == four["parts"]["exact"] == (CONTEXT - 3 * 64) * TOKEN_BYTES
    assert four["decode_peak"] < eight["decode_peak"] < full["decode_peak"]
