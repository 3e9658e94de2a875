"""The task attention: what it captures against the model itself, and its errors against direct computation."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import evaluation
import families
import pytest
import torch
from transformers import DynamicCache

from kvquant import QuantCache
from kvquant.compat import CACHE_ARGUMENT
from kvquant_evals.error import EvalError
from kvquant_evals.model import Subject, default_text
from kvquant_evals.settings import Settings
from kvquant_evals.task import Finding
from kvquant_evals.tasks import attention
from kvquant_evals.tasks._capture import LayerCall, capture

pytestmark = pytest.mark.broad

SETTINGS = Settings(contexts=(48, 100), prompts=2, chunk=16)
SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}
BOUNDS = [0, 4, 20, 36, 52, 68]


def caches(*bits, **options):
    return {str(b): partial(QuantCache, bits=b, **SMALL_PAGES, **options) for b in bits}


def layers(tiny, contenders):
    """Of every cache, the values of its layers in all prompts."""
    found = evaluation.rows(tiny, [attention.TASK], SETTINGS, contenders)
    return {
        label: [layer for item in row.items["attention"] for layer in item["layers"]] for label, row in found.items()
    }


def captured(model, ids, queries=8):
    with torch.inference_mode():
        return capture(Subject(None, model), ids, BOUNDS, queries, lambda tokens: None)


def random_ids(tokens=68):
    return torch.randint(3, 97, (1, tokens))


class TestErrors:
    """Of one layer: 4 query heads on 2 KV heads, 11 queries, 20 columns."""

    def call(self, mask=None, scale=None):
        key, value = torch.randn(1, 2, 20, 16), torch.randn(1, 2, 20, 16)
        return LayerCall(3, (key, value), (key, value), torch.randn(1, 4, 11, 16), mask, scale)

    def expected(self, call, keys, values):
        """In float64, a head at a time."""
        output, score = [], []
        for head in range(4):
            found = []
            for key, value in (call.read, (keys, values)):
                scores = call.query[0, head].double() @ key[0, head // 2].double().T * (call.scale or 1 / 4)
                if call.mask is not None:
                    scores = scores.masked_fill(~call.mask[0, 0], -torch.inf)
                found.append((scores.softmax(-1), scores.softmax(-1) @ value[0, head // 2].double()))
            (p, exact), (q, other) = found
            output.append(((other - exact).norm() / exact.norm()).item())
            score.append(((q - p).norm() / p.norm()).item())
        return {"layer": 3, "output": pytest.approx(output, rel=1e-4), "score": pytest.approx(score, rel=1e-4)}

    @pytest.mark.parametrize("scale", [None, 0.7])
    @pytest.mark.parametrize("is_masked", [False, True], ids=["no mask", "causal"])
    def test_they_are_those_of_direct_computation(self, scale, is_masked):
        mask = torch.ones(1, 1, 11, 20, dtype=torch.bool).tril(9) if is_masked else None
        call = self.call(mask, scale)
        keys, values = (states + 0.1 * torch.randn_like(states) for states in call.read)
        assert attention.compare(call, keys, values) == self.expected(call, keys, values)

    def test_a_float_mask_is_added(self):
        mask = torch.ones(1, 1, 11, 20, dtype=torch.bool).tril(9)
        call = self.call(mask)
        keys, values = (states + 0.1 * torch.randn_like(states) for states in call.read)
        as_float = replace(call, mask=torch.zeros(1, 1, 11, 20).masked_fill(~mask, torch.finfo(torch.float32).min))
        assert attention.compare(as_float, keys, values) == self.expected(call, keys, values)

    def test_what_differs_in_one_kv_head_shows_in_its_query_heads(self):
        call = self.call()
        keys, values = (states.clone() for states in call.read)
        values[:, 1] *= 1.25
        found = attention.compare(call, keys, values)
        assert found == {"layer": 3, "output": pytest.approx([0, 0, 0.25, 0.25]), "score": [0.0] * 4}

    def test_values_of_zero_have_no_error(self):
        call = self.call()
        nothing = torch.zeros(1, 2, 20, 16)
        call = replace(call, read=(call.read[0], nothing))
        assert attention.compare(call, call.read[0], nothing)["output"] == [0.0] * 4


class TestCapture:
    # Grouped heads and not, normalized keys, windows, states that later layers share, linear attention beside.
    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("llama", [0, 1]),
            ("phi", [0, 1]),
            ("gpt_neox", [0, 1]),
            ("qwen3", [0, 1]),
            ("mistral", [0, 1]),
            ("gemma3_text", [0, 1]),
            ("gemma3n_text", [0, 1]),
            ("qwen3_next", [1]),
            ("falcon_h1", [0, 1]),
        ],
    )
    def test_states_are_those_of_a_cache_and_errors_of_it_are_zero(self, name, expected):
        model, ids = families.tiny_model(name, "sdpa"), random_ids()
        calls = captured(model, ids)
        assert [call.layer for call in calls] == expected
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            for call in calls:
                read = attention._fill(cache, call, BOUNDS)
                assert all(map(torch.equal, read, call.read))
                assert call.given[0].shape[2] == 68
                assert call.query.shape[2] == 8
                assert set(attention.compare(call, *read)["output"]) == {0.0}

    @pytest.mark.parametrize("name", ["llama", "mistral", "granite"])
    def test_attention_of_what_is_captured_is_the_models_own(self, name):
        """Granite has a scale of its own, Mistral a window of 32 tokens."""
        model, ids = families.tiny_model(name, "sdpa"), random_ids()
        outputs = []
        hooks = [
            layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: outputs.append(args[0]))
            for layer in model.model.layers
        ]
        calls = captured(model, ids, queries=5)
        for hook in hooks:
            hook.remove()
        for call, output in zip(calls, outputs[-2:], strict=True):
            read = attention._Reading.of(call, *call.read)
            found = read.output(slice(0, 5)).transpose(1, 2).flatten(2)
            torch.testing.assert_close(found, output[:, -5:], atol=1e-6, rtol=1e-5)
            values = call.read[1].repeat_interleave(2, dim=1)
            plain = (read.probabilities(slice(0, 5)) @ values).transpose(1, 2).flatten(2)
            torch.testing.assert_close(plain, output[:, -5:], atol=1e-6, rtol=1e-5)

    def test_queries_without_a_mask_see_no_later_ones(self):
        """As in a first chunk, where the model leaves causality to sdpa."""
        model, ids = families.tiny_model("llama", "sdpa"), random_ids(20)
        with torch.inference_mode():
            calls = capture(Subject(None, model), ids, [0, 20], 6, lambda tokens: None)
        expected = torch.arange(20) <= torch.arange(14, 20)[:, None]
        assert all(torch.equal(call.mask, expected) for call in calls)

    def test_a_window_limits_what_is_read_and_not_what_was_given(self):
        model = families.tiny_model("mistral", "sdpa")
        whole = DynamicCache()
        ids = random_ids()
        (first, *_) = captured(model, ids)
        with torch.inference_mode():
            model(ids, **{CACHE_ARGUMENT: whole}, use_cache=True)
        assert [states.shape[2] for states in first.read] == [32 - 1 + 16] * 2
        # The first layer's states depend on the tokens only.
        torch.testing.assert_close(first.given[0], whole.layers[0].keys)
        torch.testing.assert_close(first.given[1], whole.layers[0].values)
        assert all(torch.equal(read, given[:, :, -47:]) for read, given in zip(first.read, first.given, strict=True))

    def test_a_cache_that_shows_what_has_left_the_window_is_read_within_it(self):
        model = families.tiny_model("mistral", "sdpa")
        with torch.inference_mode():
            for call in captured(model, random_ids()):
                read = attention._fill(DynamicCache(), call, BOUNDS)
                assert attention.compare(call, *read)["output"] == [0.0] * 4

    def test_states_take_no_more_memory_than_the_cache(self):
        calls = captured(families.tiny_model("llama", "sdpa"), random_ids())
        for call in calls:
            assert [given is read for given, read in zip(call.given, call.read, strict=True)] == [True, True]


class TestTask:
    def test_identity_has_no_error_at_all(self, tiny):
        found = evaluation.scores(tiny, attention.TASK, SETTINGS, caches(16))
        assert found["16"] == {"attention_error": 0.0, "attention_error_max": 0.0, "attention_score_error": 0.0}
        assert found["16"] == found[evaluation.FULL_PRECISION]

    def test_errors_grow_as_bits_shrink(self, tiny):
        found = evaluation.scores(tiny, attention.TASK, SETTINGS, caches(8, 4, 2))
        # A step is 1/255 of a range at 8 bits, 1/15 at 4 and 1/3 at 2: 17 and 5 times as long, and so are errors.
        for name in ("attention_error", "attention_score_error"):
            assert found["4"][name] == pytest.approx(17 * found["8"][name], rel=0.3), name
            assert 3 < found["2"][name] / found["4"][name] < 8, name
        assert all(row["attention_error_max"] >= row["attention_error"] for row in found.values())

    def test_every_layer_and_query_head_has_its_own(self, tiny):
        found = layers(tiny, caches(4))["4"]
        assert [layer["layer"] for layer in found] == [0, 1] * 2
        assert all(len(layer[name]) == 4 for layer in found for name in ("output", "score"))
        assert len({error for layer in found for error in layer["output"]}) == 16

    def test_errors_of_a_layer_do_not_reach_the_next(self, tiny):
        found = layers(tiny, {"first": partial(QuantCache, bits=2, skip_layers=(1,), **SMALL_PAGES)})["first"]
        for layer in found:
            errors = layer["output"] + layer["score"]
            assert min(errors) > 0.01 if layer["layer"] == 0 else max(errors) == 0

    def test_errors_of_keys_show_in_probabilities_and_of_values_in_outputs_only(self, tiny):
        values = partial(QuantCache, bits=(16, 2), **SMALL_PAGES)
        keys = partial(QuantCache, bits=(2, 16), **SMALL_PAGES)
        found = evaluation.scores(tiny, attention.TASK, SETTINGS, {"values": values, "keys": keys})
        assert found["values"]["attention_score_error"] == 0
        assert found["values"]["attention_error"] > 0.01
        assert found["keys"]["attention_score_error"] > 0.01
        assert found["keys"]["attention_error"] > 0.01

    def test_packed_windows(self):
        """Of layers with a window, those that are packed have errors and the others none."""
        model = families.tiny_model("gemma3_text", "sdpa")
        errors = {}
        with torch.inference_mode():
            calls = captured(model, random_ids())
            for packs in (False, True):
                cache = QuantCache(bits=2, quantize_sliding=packs, config=model.config, **SMALL_PAGES)
                errors[packs] = [max(attention.compare(c, *attention._fill(cache, c, BOUNDS))["output"]) for c in calls]
        assert errors[False][0] == 0
        assert errors[True][0] > 0.01
        assert errors[False][1] == errors[True][1] > 0.01

    def test_scores_by_hand(self):
        one = {"layers": [{"layer": 0, "output": [0.1, 0.2], "score": [0.0, 0.1]}]}
        two = {"layers": [{"layer": 0, "output": [0.3, 0.6], "score": [0.3, 0.0]}]}
        found = attention.TASK.scores([attention.Finding(one), attention.Finding(two)], SETTINGS)
        assert found == pytest.approx(
            {"attention_error": 0.3, "attention_error_max": 0.6, "attention_score_error": 0.1}
        )

    @pytest.mark.parametrize(
        ("context", "chunk", "expected"),
        [(96, 32, [0, 32, 64, 96]), (100, 32, [0, 4, 36, 68, 100]), (33, 32, [0, 1, 33]), (3, 1, [0, 1, 2, 3])],
    )
    def test_the_last_chunk_is_whole(self, context, chunk, expected):
        assert attention.chunk_bounds(context, chunk) == expected


def test_what_is_broken_says_by_how_much():
    assert attention.TASK.fault({"attention_error": attention.BROKEN_ERROR}) is None
    assert attention.TASK.fault({"attention_error": 0.5}) == "mean error of attention 50%"


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"chunk": 0}, "chunk=0 must be at least 1"),
            ({"chunk": 100}, "context=100 must exceed chunk=100"),
            ({"prompts": 0}, "prompts=0 must be at least 1"),
            ({"contexts": (48, 1025)}, "context=1025 exceeds the model's context of 1024"),
        ],
    )
    def test_what_cannot_be_done_is_refused(self, tiny, change, message):
        with pytest.raises(EvalError, match=message):
            attention.TASK.check(tiny.source, default_text(), replace(SETTINGS, **change))

    def test_attention_without_sdpa_is_refused(self, tiny, monkeypatch):
        monkeypatch.setattr(tiny.model.config, "_attn_implementation", "eager")
        full, eight = evaluation.evaluate(tiny, [attention.TASK], SETTINGS, {"8": partial(QuantCache, bits=8)}).rows
        assert full.failures["attention"].endswith("this one uses 'eager': --attn sdpa")
        assert full.failures == eight.failures
        assert full.scores == eight.scores == {}

    @pytest.mark.parametrize("name", ["deepseek_v3", "diffllama"])
    def test_what_a_model_makes_of_what_the_cache_returns_is_not_captured(self, name):
        """DeepSeek makes keys of latents; DiffLlama has values' heads in another order than keys'."""
        assert captured(families.tiny_model(name, "sdpa"), random_ids()) == []
        assert "sdpa never reads what its cache returns" in attention._why_nothing("sdpa")


class TestBadNumbers:
    def test_the_worst_head_is_one_without_a_number(self):
        layers = [{"layer": 0, "output": [0.1, math.nan, 0.05], "score": [0.1] * 3}]
        scores = attention.TASK.scores([Finding({"layers": layers})], SETTINGS)
        assert math.isnan(scores["attention_error_max"])
        assert attention.TASK.fault(scores) is not None

    def test_layers_that_hold_them_are_captured(self):
        model = families.tiny_model("llama", "sdpa")
        layers = len(captured(model, random_ids()))
        model.model.layers[0].self_attn.v_proj.weight.data.fill_(math.nan)
        assert len(captured(model, random_ids())) == layers
