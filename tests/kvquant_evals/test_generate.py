"""The task generate on a tiny model: its texts against decoding without a cache, and its numbers computed by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import evaluation
import pytest
import torch
from transformers import DynamicCache

from kvquant import QuantCache
from kvquant.compat import CACHE_ARGUMENT
from kvquant_evals.error import EvalError
from kvquant_evals.model import default_text
from kvquant_evals.results import Results
from kvquant_evals.settings import Settings
from kvquant_evals.task import find
from kvquant_evals.tasks import _prompt, generate

pytestmark = pytest.mark.broad

SETTINGS = Settings(contexts=(48, 96), prompts=2, new_tokens=24)
SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}


def caches(*bits):
    return {str(b): partial(QuantCache, bits=b, **SMALL_PAGES) for b in bits}


def records(tiny, settings=SETTINGS, contenders=()):
    """By label, one for each prompt."""
    results = Results()
    evaluation.evaluate(tiny, [generate.TASK], settings, contenders, results=results)
    items = generate.TASK.items(tiny.source, default_text(), settings)
    labels = [evaluation.FULL_PRECISION, *dict(contenders)]
    return {label: results.of(generate.TASK, items, label) for label in labels}


def most_likely(tiny, ids, count):
    """Tokens chosen one by one, each in a pass over all of the text so far."""
    tokens = []
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(tiny.model(ids, use_cache=False).logits[0, -1].argmax()))
            ids = torch.cat((ids, torch.tensor([tokens[-1:]])), dim=1)
    return tokens


def test_it_is_found_by_both_names():
    assert find("generate,generation") == [generate.TASK]


class TestText:
    def test_it_is_that_of_passes_without_a_cache(self, tiny):
        (full,) = records(tiny).values()
        ids = tiny.encode(default_text())
        for record in full:
            first = record.values["first"]
            assert record.series["token"] == most_likely(tiny, ids[:, first : first + 48], 24)

    def test_neither_end_tokens_nor_penalties_change_it(self, tiny, monkeypatch):
        before = records(tiny)[evaluation.FULL_PRECISION]
        monkeypatch.setattr(tiny.model.generation_config, "eos_token_id", list(range(400)))
        monkeypatch.setattr(tiny.model.generation_config, "repetition_penalty", 9.0)
        after = records(tiny)[evaluation.FULL_PRECISION]
        assert [record.series["token"] for record in after] == [record.series["token"] for record in before]
        assert {record.values["tokens"] for record in after} == {24}

    def test_the_prompt_takes_one_pass_and_only_its_last_logits(self, tiny, monkeypatch):
        passes = []
        forward = tiny.model.forward

        def spy(ids, *, logits_to_keep=0, **options):
            passes.append((ids.shape[1], logits_to_keep))
            return forward(ids, logits_to_keep=logits_to_keep, **options)

        monkeypatch.setattr(tiny.model, "forward", spy)
        records(tiny, replace(SETTINGS, prompts=1))
        assert passes == [(48, 1)] + [(1, 1)] * 23

    def test_models_that_know_no_logits_to_keep_give_the_same(self, tiny, monkeypatch):
        before = records(tiny)[evaluation.FULL_PRECISION]
        forward = tiny.model.forward
        monkeypatch.setattr(tiny.model, "forward", lambda ids, **options: forward(ids, **options))
        assert records(tiny)[evaluation.FULL_PRECISION] == before


class TestScores:
    def test_identity_is_full_precision_in_everything(self, tiny):
        found = records(tiny, contenders=caches(16))
        full, identity = found[evaluation.FULL_PRECISION], found["16"]
        assert [record.values for record in identity] == [record.values for record in full]
        assert [record.series for record in identity] == [record.series for record in full]
        assert generate.TASK.scores([record.finding for record in identity], SETTINGS) == {
            "generate_first_divergence": 24.0,
            "generate_equal": 1.0,
            "generate_agreement": 1.0,
            "generate_repetition": sum(record.values["repetition"] for record in full) / 2,
            "generate_kl": 0.0,
        }

    def test_texts_part_earlier_the_fewer_the_bits(self, tiny):
        found = evaluation.scores(tiny, generate.TASK, SETTINGS, caches(8, 2))
        assert 0 < 10 * found["8"]["generate_kl"] < found["2"]["generate_kl"]
        assert 1 <= found["2"]["generate_first_divergence"] < found["8"]["generate_first_divergence"]
        assert found["2"]["generate_agreement"] < found["8"]["generate_agreement"]

    def test_the_first_token_is_chosen_before_anything_is_packed(self, tiny):
        found = records(tiny, contenders=caches(2))
        full, two = ([record.series["token"][0] for record in records] for records in found.values())
        assert two == full

    def test_by_hand(self):
        full, other = [1, 2, 3, 4], [1, 2, 9, 4]
        assert generate.first_divergence(full, other) == 2
        assert generate.first_divergence(full, full) == 4
        assert generate.equal_share(full, other) == 3 / 4

    def test_repetition_by_hand(self):
        assert generate.repetition([1, 2, 3, 4, 5, 6]) == 0.0
        # Runs: 1234 2341 3412 4123 1234, of which the last was there before.
        assert generate.repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
        assert generate.repetition([7] * 10) == pytest.approx(6 / 7)
        assert generate.repetition([7, 7, 7]) == 0.0


class TestDivergence:
    def test_by_hand(self):
        # p = (3/4, 1/4) against q = p, (1/4, 3/4) and (9/10, 1/10).
        full = torch.tensor([3.0, 1.0]).log().expand(3, 2)
        logits = torch.tensor([[3.0, 1.0], [1.0, 3.0], [9.0, 1.0]]).log()
        expected = [0.0, 0.5 * math.log(3), 0.75 * math.log(30 / 36) + 0.25 * math.log(10 / 4)]
        assert generate.kl(full, logits) == pytest.approx(expected, abs=1e-6)

    def test_every_cache_reads_the_text_of_full_precision(self, tiny):
        settings = replace(SETTINGS, prompts=1)
        found = records(tiny, settings, caches(2))
        (full,), (other,) = found.values()
        assert other.values["first_divergence"] < generate.KL_STEPS == 16
        prompt = _prompt.encode_prompt(tiny.source, default_text(), settings, 48, full.values["first"])
        expected = []
        with torch.no_grad():
            exact, packed = DynamicCache(), QuantCache(bits=2, **SMALL_PAGES)
            for ids in [prompt, *torch.tensor(full.series["token"], dtype=torch.long)[:16].view(16, 1, 1)]:
                p, q = (
                    tiny.model(ids, **{CACHE_ARGUMENT: cache}, use_cache=True).logits[0, -1].double().log_softmax(0)
                    for cache in (exact, packed)
                )
                expected.append((p.exp() * (p - q)).sum().item())
        assert expected[0] == 0  # of the prompt's own attention
        assert other.series["kl"] == pytest.approx(expected[1:], rel=1e-3, abs=1e-6)
        assert other.values["kl"] == pytest.approx(sum(expected) / 16, rel=1e-3)

    def test_short_texts_have_fewer_steps(self, tiny):
        found = records(tiny, replace(SETTINGS, new_tokens=4, prompts=1), caches(16))
        assert found["16"][0].series["kl"] == [0.0] * 3


def test_what_is_broken_says_by_how_much():
    assert generate.TASK.fault({"generate_kl": generate.BROKEN_KL}) is None
    assert generate.TASK.fault({"generate_kl": 1.25}) == "KL 1.25 nats in the first generated tokens"


class TestPrompts:
    def test_they_are_from_the_middles_of_equal_parts(self, tiny):
        available = tiny.encode(default_text()).shape[1]
        items = generate.TASK.items(tiny.source, default_text(), SETTINGS)
        assert [item.about["first"] for item in items] == [(available - 48) // 4, (available - 48) * 3 // 4]
        assert [item.tokens for item in items] == [48 + 24 + 16] * 2
        assert len({item.name for item in items}) == 2

    def test_they_are_the_text_itself(self, tiny):
        prompt = _prompt.encode_prompt(tiny.source, default_text(), SETTINGS, 48, 1000)
        assert torch.equal(prompt, tiny.encode(default_text())[:, 1000:1048])

    def test_in_a_chat_a_user_asks_for_it(self, tiny, monkeypatch):
        template = "{% for message in messages %}user: {{ message.content }}\n{% endfor %}model:"
        monkeypatch.setattr(tiny.source.tokenizer, "chat_template", template)
        settings = replace(SETTINGS, chat=True)
        prompt = _prompt.encode_prompt(tiny.source, default_text(), settings, 96, 1000)
        assert prompt.shape == (1, 96)
        text = tiny.decode(prompt[0])
        assert text.startswith("user: Continue this text:\n\n")
        assert text.endswith("\nmodel:")
        stretch = text.removeprefix("user: Continue this text:\n\n").removesuffix("\nmodel:")
        assert tiny.decode(tiny.encode(default_text())[0, 1000:1096]).startswith(stretch)
        assert len(stretch) > 40

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"new_tokens": 1}, "new_tokens=1 must be at least 2"),
            ({"prompts": 0}, "prompts=0 must be at least 1"),
            ({"contexts": (1001,)}, "context=1001 and new_tokens=24 exceed the model's context of 1024"),
            ({"chat": True}, "has no chat template; leave out --chat"),
        ],
    )
    def test_what_cannot_be_done_is_refused(self, tiny, change, message):
        with pytest.raises(EvalError, match=message):
            generate.TASK.check(tiny.source, default_text(), replace(SETTINGS, **change))

    def test_short_text_is_refused(self, tiny):
        with pytest.raises(EvalError, match=r"the text has .* tokens and 48 are needed"):
            generate.TASK.check(tiny.source, "too short", SETTINGS)

    def test_a_template_longer_than_the_prompt_is_refused(self, tiny, monkeypatch):
        template = "{{ 'You are of great help. ' * 20 }}{{ messages[0].content }}"
        monkeypatch.setattr(tiny.source.tokenizer, "chat_template", template)
        with pytest.raises(EvalError, match=r"context=48 is too short for the .* tokens of the model's chat template"):
            generate.TASK.check(tiny.source, default_text(), replace(SETTINGS, chat=True))
