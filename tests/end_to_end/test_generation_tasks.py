"""The tasks generate and attention on a real model: which caches they find broken, and that the identity is exact."""

from __future__ import annotations

from functools import partial

import evaluation
import pytest

from kvquant import QuantCache
from kvquant_evals.settings import Settings
from kvquant_evals.tasks import attention, generate

pytestmark = pytest.mark.slow

GENERATE = Settings(contexts=(512,), prompts=1, new_tokens=10)
ATTENTION = Settings(contexts=(768,), prompts=1)
SETTINGS = pytest.mark.parametrize(
    ("task", "settings"), [(generate.TASK, GENERATE), (attention.TASK, ATTENTION)], ids=["generate", "attention"]
)


@SETTINGS
def test_all_widths_pass_and_the_identity_has_no_difference_at_all(smollm2, task, settings):
    caches = {str(bits): partial(QuantCache, bits=bits) for bits in (16, 8, 4, 2)}
    found = evaluation.rows(smollm2, [task], settings, caches)
    scores = {label: row.scores for label, row in found.items()}
    assert scores["16"] == scores[evaluation.FULL_PRECISION]
    assert [row.faults for row in found.values()] == [{}] * 5
    name = {generate.TASK: "generate_kl", attention.TASK: "attention_error"}[task]
    # A step is 17 times as long at 4 bits as at 8, and 5 times at 2 as at 4; KL goes by its square.
    assert 0 < 5 * scores["8"][name] < scores["4"][name] < scores["2"][name] / 2


@SETTINGS
def test_what_is_broken_is_found(smollm2, task, settings):
    found = evaluation.rows(smollm2, [task], settings, evaluation.broken_caches())
    assert [label for label, row in found.items() if row.faults] == list(evaluation.broken_caches())
