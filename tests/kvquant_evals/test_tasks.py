"""The tasks on a tiny model: their numbers against direct computation, and their documents."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from transformers import DynamicCache

from kvquant import QuantCache
from kvquant_evals.model import EvalError, default_text
from kvquant_evals.task import Run, Settings, discover
from kvquant_evals.tasks import needles, perplexity

SETTINGS = Settings(tokens=200, chunk=32, skip=40, offset=100, needles=2, contexts=(160, 224), documents=2)
SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}


class Bar:
    def __init__(self):
        self.done = 0

    def update(self, count):
        self.done += count


@pytest.fixture
def run(tiny):
    def run(task, bits=None, baseline=None, settings=SETTINGS):
        bars = []

        def open_bar(title, total, unit):
            bars.append((title, total, unit, Bar()))
            return contextlib.nullcontext(bars[-1][-1])

        new_cache = DynamicCache if bits is None else partial(QuantCache, bits=bits, **SMALL_PAGES)
        outcome = task.run(Run(tiny, default_text(), settings, f"{bits}", new_cache, open_bar, baseline))
        assert [bar.done for *_, bar in bars] == [total for _, total, _, _ in bars]
        return outcome

    return run


def test_tasks_are_found_perplexity_first():
    assert [task.name for task in discover()] == ["perplexity", "needles"]


class TestPerplexity:
    def test_full_precision_is_that_of_one_pass(self, tiny, run):
        ids = perplexity.segment(tiny.encode(default_text()), SETTINGS)
        assert torch.equal(ids, tiny.encode(default_text())[:, 100:301])
        with torch.no_grad():
            logits = tiny.model(ids).logits[0, 40:200]
        expected = torch.nn.functional.cross_entropy(logits, ids[0, 41:201]).exp()
        outcome = run(perplexity.TASK)
        assert outcome.scores["perplexity"] == pytest.approx(expected.item(), rel=1e-4)
        assert outcome.scores["scored_tokens"] == 160
        assert outcome.scores["kl_mean"] == 0.0
        assert outcome.scores["effective_bits"] == 32
        assert outcome.scores["bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, head_dim, float32

    def test_identity_has_no_divergence_at_all(self, run):
        baseline = run(perplexity.TASK)
        outcome = run(perplexity.TASK, 16, baseline)
        assert outcome.scores["kl_mean"] == outcome.scores["kl_p99"] == 0.0
        assert outcome.scores["top1"] == 1.0
        assert outcome.scores["perplexity"] == baseline.scores["perplexity"]

    def test_divergence_grows_as_bits_shrink(self, run):
        baseline = run(perplexity.TASK)
        found = [run(perplexity.TASK, bits, baseline).scores["kl_mean"] for bits in (8, 4, 2)]
        assert 0 < found[0] < found[1] / 10 < found[2] / 50

    def test_divergence_against_direct_computation(self):
        full, logits = torch.randn(5, 7), torch.randn(5, 7)
        loss, divergence, agreement = perplexity._compare(full, logits, torch.tensor([0, 1, 2, 3, 6]))
        p, q = full.double().softmax(-1), logits.double().softmax(-1)
        torch.testing.assert_close(divergence.double(), (p * (p / q).log()).sum(-1), atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(loss.double(), -q[range(5), [0, 1, 2, 3, 6]].log(), atol=1e-6, rtol=1e-5)
        assert agreement.tolist() == (p.argmax(-1) == q.argmax(-1)).tolist()

    def test_items_cover_the_text_and_skip_what_is_not_scored(self, run):
        items = run(perplexity.TASK).items
        assert [item["first"] for item in items] == [0, 32, 64, 96, 128, 160, 192]
        assert [item["tokens"] for item in items] == [0, 24, 32, 32, 32, 32, 8]
        assert items[0]["nll"] is None

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


class TestNeedles:
    def test_documents_depend_on_the_seed_only_and_hold_their_needles(self, tiny):
        documents = needles.make_documents(tiny, default_text(), SETTINGS)
        assert documents == needles.make_documents(tiny, default_text(), SETTINGS)
        other = needles.make_documents(tiny, default_text(), Settings(**{**vars(SETTINGS), "seed": 1}))
        assert [document.codes for document in documents] != [document.codes for document in other]
        assert [(document.context, document.index) for document in documents] == [
            (160, 0),
            (160, 1),
            (224, 0),
            (224, 1),
        ]
        for document in documents:
            assert len(document.codes) == 2
            for name, code in document.codes.items():
                assert document.text.count(needles.NEEDLE.format(name=name, code=code)) == 1
                assert len(code) == 5
            assert abs(tiny.encode(document.text).shape[1] - document.context) <= 16

    def test_every_needle_is_asked_for_on_its_own_copy(self, run, monkeypatch):
        lengths = []
        original = needles._ask

        def ask(subject, ids, cache, name):
            before = cache.get_seq_length()
            answer = original(subject, ids, cache, name)
            lengths.append((ids.shape[1], before, cache.get_seq_length()))
            return answer

        monkeypatch.setattr(needles, "_ask", ask)
        outcome = run(needles.TASK, 4)
        assert len(lengths) == outcome.scores["questions"] == 2 * 2 * 2
        assert all(document == before < after for document, before, after in lengths)

    def test_answers_are_scored_exactly(self):
        document = needles.Document(160, 0, "", {"Alice": "01234"})
        answers = {" 01234.": True, "01234": True, "1234": False, "the code 01234": False, "": False}
        for answer, is_correct in answers.items():
            assert needles._item(document, "Alice", "01234", answer)["correct"] is is_correct

    def test_scores_by_context(self):
        items = [
            {"context": 160, "correct": True},
            {"context": 160, "correct": False},
            {"context": 224, "correct": True},
        ]
        expected = {"retrieval": 2 / 3, "questions": 3.0, "retrieval_160": 0.5, "retrieval_224": 1.0}
        assert needles._scores(items) == expected

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"needles": 27}, "needles=27 must be 1 to 26"),
            ({"needles": 0}, "needles=0 must be 1 to 26"),
            ({"documents": 0}, "documents=0 must be at least 1"),
            ({"contexts": (20,)}, "context=20 is too short for 2 needles"),
            ({"contexts": (1020,)}, "context=1020 and its question exceed the model's context of 1024"),
        ],
    )
    def test_what_cannot_be_done_is_refused(self, tiny, change, message):
        with pytest.raises(EvalError, match=message):
            needles.TASK.check(tiny.source, default_text(), Settings(**{**vars(SETTINGS), **change}))
