"""lm-eval's tasks on a real model: what broken caches do to them, and what coarse ones do not."""

from __future__ import annotations

from functools import partial

import evaluation
import lm_tasks
import pytest

from kvquant import QuantCache
from kvquant_evals.model import default_text
from kvquant_evals.settings import Settings

pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install 'kvquant-cache[dev]'")

from kvquant_evals.lm_harness.task import LmEvalTask

pytestmark = pytest.mark.slow

PAGES = {"page_size": 32, "residual_length": 16}  # so that a few hundred tokens fill several pages


def document(index):
    """A stretch of text, what follows it, and what follows others."""
    text = default_text()[100_000 + 20_000 * index :]
    others = [default_text()[100_000 + 20_000 * (index + step) + 900 :][:60].strip() for step in (1, 2)]
    return {
        "text": text[:900].strip(),
        "choices": [f" {choice}" for choice in (text[900:960].strip(), *others)],
        "label": 0,
    }


@pytest.mark.parametrize(("name", "index", "coarse"), [("local_choice", 0, (8, 4, 2)), ("local_words", 1, (2,))])
def test_broken_caches_are_told_from_coarse_ones(smollm2, tmp_path, name, index, coarse):
    folder = lm_tasks.write(tmp_path, [document(index)])
    caches = {str(bits): partial(QuantCache, bits=bits, **PAGES) for bits in (16, *coarse)}
    broken = evaluation.broken_caches(**PAGES)
    found = evaluation.rows(smollm2, [LmEvalTask(name, folder)], Settings(), caches | broken)
    shifts = [found[str(bits)].scores[f"{name}_shift"] for bits in (16, *coarse)]
    assert shifts[0] == 0.0
    assert shifts == sorted(set(shifts))
    assert [label for label, row in found.items() if row.faults] == list(broken)
