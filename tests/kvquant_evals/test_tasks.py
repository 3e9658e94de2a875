"""The tasks on a tiny model: their numbers against direct computation."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import evaluation
import pytest
import torch

from kvquant import QuantCache
from kvquant_evals.error import EvalError
from kvquant_evals.model import default_text
from kvquant_evals.results import Results
from kvquant_evals.settings import Settings
from kvquant_evals.task import discover
from kvquant_evals.tasks import perplexity

SETTINGS = Settings(tokens=200, chunk=32, skip=40, offset=100)
SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}


def scores(tiny, task, *bits, settings=SETTINGS):
    """Those of full precision, and of our cache at each of `bits`."""
    found = evaluation.scores(tiny, task, settings, {str(b): partial(QuantCache, bits=b, **SMALL_PAGES) for b in bits})
    return list(found.values())


def test_tasks_are_found_perplexity_first():
    assert [task.name for task in discover()] == ["perplexity", "attention", "generate", "memory", "needles", "speed"]


class TestPerplexity:
    def test_full_precision_is_that_of_one_pass(self, tiny):
        ids = tiny.encode(default_text())[:, 100:301]
        with torch.no_grad():
            logits = tiny.model(ids).logits[0, 40:200]
        expected = torch.nn.functional.cross_entropy(logits, ids[0, 41:201]).exp()
        (full,) = scores(tiny, perplexity.TASK)
        assert full["perplexity"] == pytest.approx(expected.item(), rel=1e-4)
        assert full["scored_tokens"] == 160
        assert full["kl_mean"] == 0.0
        assert full["effective_bits"] == 32
        assert full["bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, head_dim, float32

    def test_identity_has_no_divergence_at_all(self, tiny):
        full, identity = scores(tiny, perplexity.TASK, 16)
        assert [value for name, value in identity.items() if name.startswith("kl_")] == [0.0] * 6
        assert identity["top1"] == 1.0
        assert identity["perplexity"] == full["perplexity"]

    def test_divergence_grows_as_bits_shrink(self, tiny):
        _, *found = (row["kl_mean"] for row in scores(tiny, perplexity.TASK, 8, 4, 2))
        assert 0 < found[0] < found[1] / 10 < found[2] / 50

    def test_the_tail_lies_beyond_the_mean_and_the_mean_in_its_interval(self, tiny):
        _, found = scores(tiny, perplexity.TASK, 2)
        assert found["kl_median"] < found["kl_mean"] < found["kl_p99"] < found["kl_p999"]
        assert found["kl_mean_low"] < found["kl_mean"] < found["kl_mean_high"]

    def test_segments_are_scored_together(self, tiny):
        report = evaluation.evaluate(tiny, [perplexity.TASK], replace(SETTINGS, segments=3))
        items = report.rows[0].items["perplexity"]
        available = tiny.encode(default_text()).shape[1]
        assert [item["first"] for item in items] == [100, 100 + (available - 301) // 2, available - 201]
        mean = sum(item["nll"] for item in items) / 3
        assert report.rows[0].scores["perplexity"] == pytest.approx(math.exp(mean), rel=1e-6)
        assert report.rows[0].scores["scored_tokens"] == 480

    def test_segments_do_not_overlap_where_little_follows_the_first(self):
        settings = Settings(tokens=100, segments=3, offset=250)
        assert perplexity.segments(401, settings) == [0, 150, 300]
        assert perplexity.segments(301, settings) == [0, 100, 200]

    def test_divergence_against_direct_computation(self):
        full, logits = torch.randn(5, 7), torch.randn(5, 7)
        found = perplexity.compare(full, logits, torch.tensor([0, 1, 2, 3, 6]))
        p, q = full.double().softmax(-1), logits.double().softmax(-1)
        torch.testing.assert_close(found.divergence.double(), (p * (p / q).log()).sum(-1), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found.loss.double(), -q[range(5), [0, 1, 2, 3, 6]].log(), atol=1e-6, rtol=1e-5)
        assert found.agreement.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()

    def test_what_is_not_scored_is_no_part_of_the_series(self, tiny):
        results = Results()
        evaluation.evaluate(tiny, [perplexity.TASK], SETTINGS, results=results)
        (item,) = perplexity.TASK.items(tiny.source, default_text(), SETTINGS)
        series = results.find(perplexity.TASK, item, evaluation.FULL_PRECISION).series
        assert {name: len(values) for name, values in series.items()} == {"nll": 160, "kl": 160, "agreement": 160}

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"tokens": 40}, "tokens=40 must exceed the 40 leading tokens"),
            ({"tokens": 2000}, "tokens=2000 exceeds the model's context of 1024"),
            ({"chunk": 0}, "chunk=0 must be at least 1"),
        ],
    )
    def test_what_cannot_be_done_is_refused(self, tiny, change, message):
        with pytest.raises(EvalError, match=message):
            perplexity.TASK.check(tiny.source, default_text(), Settings(**{"tokens": 200, "skip": 40} | change))

    def test_short_text_is_refused(self, tiny):
        with pytest.raises(EvalError, match=r"the text has .* tokens and 201 are needed"):
            perplexity.TASK.check(tiny.source, "too short", SETTINGS)
