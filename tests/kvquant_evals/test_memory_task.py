"""The memory task on a tiny model: bytes against the size equation, peaks against tensors known to be alive."""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict, replace
from functools import partial

import evaluation
import pytest
import torch
from torch import nn
from transformers import DynamicCache

from kvquant import QuantCache, QuantConfig
from kvquant.compat import CACHE_ARGUMENT
from kvquant_evals import verb
from kvquant_evals.error import EvalError
from kvquant_evals.model import default_text
from kvquant_evals.plan.architecture import Architecture
from kvquant_evals.plan.fit import largest_context
from kvquant_evals.plan.size import Storage, Workload
from kvquant_evals.results import Results
from kvquant_evals.settings import Settings
from kvquant_evals.tasks import _allocation, memory

pytestmark = pytest.mark.broad

SETTINGS = Settings(contexts=(160, 224), chunk=32, offset=100)
SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 64}
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, head_dim, float32: of the tiny model


def ours(*bits):
    return {str(b): partial(QuantCache, bits=b, **SMALL_PAGES) for b in bits}


def found_items(subject, settings, caches):
    """Values of the task's items by label, and the rows they are from."""
    rows = evaluation.rows(subject, [memory.TASK], settings, caches)
    return {label: row.items["memory"] for label, row in rows.items()}, rows


@pytest.fixture(scope="module")
def found(tiny):
    return found_items(tiny, SETTINGS, ours(16, 8, 4, 2))


class Hoarder(DynamicCache):
    """Keeps a copy of what it is given where nobody asks for it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.hoard = []

    def update(self, key_states, value_states, *args, **kwargs):
        self.hoard.append(key_states.clone())
        return super().update(key_states, value_states, *args, **kwargs)


class Halved(DynamicCache):
    """Stores bfloat16 and gives back float32."""

    def update(self, key_states, value_states, *args, **kwargs):
        keys, values = super().update(key_states.bfloat16(), value_states.bfloat16(), *args, **kwargs)
        return keys.float(), values.float()


class TestBytes:
    @pytest.mark.parametrize("bits", [16, 8, 4, 2])
    def test_they_are_those_of_the_size_equation(self, tiny, found, bits):
        items, _ = found
        quant = QuantConfig.preset(bits, **SMALL_PAGES)
        storage = Storage.of(Architecture.of(tiny.model.config, torch.float32), quant, "cpu")
        for item in items[str(bits)]:
            expected = storage.memory(Workload(item["context"], 1))
            assert item["bytes"] == expected.total
            assert item["bits"] == expected.effective_bits
            assert item["parts"] == {name: asdict(expected)[name] for name in item["parts"]}

    def test_full_precision_is_all_tokens(self, found):
        items, _ = found
        for item, context in zip(items[evaluation.FULL_PRECISION], SETTINGS.contexts, strict=True):
            assert item["context"] == context
            assert item["bytes"] == item["parts"]["unquantized"] == context * TOKEN_BYTES
            assert (item["bytes_per_token"], item["bits"]) == (TOKEN_BYTES, 32)

    def test_parts_add_up(self, found):
        for item in (item for items in found[0].values() for item in items):
            assert sum(item["parts"].values()) == item["bytes"]

    def test_chunks_do_not_matter(self, tiny, found):
        other, _ = found_items(tiny, replace(SETTINGS, chunk=50), ours(4))
        assert [item["bytes"] for item in other["4"]] == [item["bytes"] for item in found[0]["4"]]

    def test_bits_of_a_cache_that_does_not_count_its_numbers(self, tiny):
        items, _ = found_items(tiny, replace(SETTINGS, contexts=(160,)), {"halved": partial(Halved)})
        (item,) = items["halved"]
        assert (item["bytes"], item["bits"]) == (160 * TOKEN_BYTES // 2, 16)

    def test_scores_and_columns_tell_the_same(self, found):
        items, rows = found
        scores, item = rows["4"].scores, items["4"][1]
        assert scores["memory_bytes_224"] == item["bytes"]
        assert scores["memory_bits_160"] == items["4"][0]["bits"]
        assert scores["memory_mb_224"] == item["bytes"] / 1e6
        assert scores["memory_prefill_peak_224"] == item["prefill_peak"]
        assert scores["memory_decode_peak_224"] == item["decode_peak"]
        assert scores["memory_peak_mb"] == max(item["prefill_peak"], item["decode_peak"]) / 1e6
        columns = memory.TASK.columns(SETTINGS)
        assert [column.title for column in columns] == ["cache MB @224", "peak MB"]
        assert all(column.score in scores and column.is_cost for column in columns)


class TestPeaks:
    def test_what_is_held_in_the_end_is_the_cache(self, found):
        items, _ = found
        for item, context in zip(items[evaluation.FULL_PRECISION], SETTINGS.contexts, strict=True):
            assert item["held"] == (context + memory.STEPS) * TOKEN_BYTES
            assert item["peak_source"] == "tensors"

    def test_a_step_of_full_precision_needs_another_copy_of_a_layers_keys(self, found):
        for item in found[0][evaluation.FULL_PRECISION]:
            assert item["decode_peak"] >= item["held"] + item["held"] // 4  # one of K and V, one of two layers

    @pytest.mark.parametrize("bits", [8, 4, 2])
    def test_packed_caches_hold_what_they_say_and_what_they_reserve(self, tiny, found, bits):
        ids = tiny.encode(default_text())[:, 100 : 324 + memory.STEPS]
        cache = ours(bits)[str(bits)]()
        with torch.no_grad():
            for part in ids.split(1, dim=1):
                tiny.model(part, **{CACHE_ARGUMENT: cache}, use_cache=True)
        item = found[0][str(bits)][-1]
        ours_to_tell = cache.memory().total + cache.memory().reserved
        assert 0.95 * ours_to_tell <= item["held"] <= ours_to_tell
        assert item["held"] < item["decode_peak"] < item["prefill_peak"]

    def test_what_is_kept_besides_the_states_is_seen(self, tiny):
        items, _ = found_items(tiny, replace(SETTINGS, contexts=(160,)), {"hoarder": Hoarder})
        (full,), (hoarder,) = items[evaluation.FULL_PRECISION], items["hoarder"]
        copies = (160 + memory.STEPS) * TOKEN_BYTES // 2
        assert hoarder["bytes"] == full["bytes"]
        assert hoarder["held"] == full["held"] + copies
        assert hoarder["decode_peak"] >= full["decode_peak"] + copies - TOKEN_BYTES


class TestTensorMeter:
    def test_by_hand(self):
        x = torch.zeros(1000)
        counted = _allocation.TensorMeter()
        with torch.no_grad(), counted.watching():
            y = x + 1
            del y
            z = (x + 1) + 1
            assert (counted.held(), counted.take_peak(), counted.take_peak()) == (4000, 8000, 4000)
            view = z[:10]
            del z
            assert counted.held() == 4000  # the view keeps all of it
            w = x.repeat(3)
            del view, w
        assert (counted.held(), counted.take_peak(), counted.take_peak()) == (0, 16_000, 0)

    def test_what_was_there_before_does_not_count(self):
        weight = nn.Parameter(torch.zeros(30, 50))
        counted = _allocation.TensorMeter()
        with torch.no_grad(), counted.watching():
            view = weight.t()
            assert counted.held() == 0
            copy = view.contiguous()
        assert counted.held() == 6000
        del copy, view, weight
        assert counted.held() == 0

    def test_composite_operations_are_seen_inside(self):
        query, key = torch.randn(1, 1, 8, 16), torch.randn(1, 1, 8, 16)
        mask = torch.zeros(8, 8)
        counted = _allocation.TensorMeter()
        with torch.no_grad(), counted.watching(), nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            out = nn.functional.scaled_dot_product_attention(query, key, key, mask)
        assert counted.held() == out.nbytes
        assert counted.take_peak() >= out.nbytes + 8 * 8 * 4  # the scores

    def test_a_gpu_is_asked_over_what_it_held_before(self, monkeypatch):
        told = {"memory_allocated": 1000, "max_memory_allocated": 5000, "reset_peak_memory_stats": None}
        for name in told:
            monkeypatch.setattr(torch.cuda, name, lambda device, name=name: told[name])
        counted = _allocation.meter(torch.device("cuda", 1))
        with counted.watching():
            told["memory_allocated"] = 1800
        assert (counted.source, counted.held(), counted.take_peak()) == ("allocator", 800, 4000)

    def test_devices_that_tell_nothing(self):
        nothing = _allocation.meter(torch.device("meta"))
        with nothing.watching():
            torch.zeros(10)
        assert (nothing.source, nothing.held(), nothing.take_peak()) == (None, None, None)


def test_numbers_that_are_not_had_are_no_scores(tiny, monkeypatch):
    monkeypatch.setattr(memory, "meter", lambda device: _allocation.NoMeter())
    items, rows = found_items(tiny, replace(SETTINGS, contexts=(160,)), ours(4))
    assert items["4"][0]["prefill_peak"] is None
    assert not any("peak" in name for row in rows.values() for name in row.scores)


def test_two_runs_find_the_same(tiny, found):
    again, _ = found_items(tiny, SETTINGS, ours(4))
    assert json.dumps(again["4"]) == json.dumps(found[0]["4"])
    assert json.dumps(again[evaluation.FULL_PRECISION]) == json.dumps(found[0][evaluation.FULL_PRECISION])


class TestText:
    def test_identity_has_the_text_of_full_precision(self, found):
        items, rows = found
        assert [item["kl"] for item in items["16"]] == [0.0, 0.0]
        assert rows["16"].scores["memory_kl"] == rows[evaluation.FULL_PRECISION].scores["memory_kl"] == 0.0

    def test_divergence_is_that_of_the_decoded_steps(self, tiny, found):
        settings, results = replace(SETTINGS, contexts=(160,)), Results()
        caches = ours(4)
        evaluation.evaluate(tiny, [memory.TASK], settings, caches, results=results)
        ids = tiny.encode(default_text())[:, 100 : 260 + memory.STEPS]
        parts = (0, 32, 64, 95, 96, 128, 159, *range(160, 161 + memory.STEPS))  # 96 lies 64 before 160
        steps = []
        with torch.no_grad():
            for cache in (DynamicCache(), caches["4"]()):
                for start, stop in itertools.pairwise(parts):
                    logits = tiny.model(ids[:, start:stop], **{CACHE_ARGUMENT: cache}, use_cache=True).logits
                    steps.append(logits[0, -1].double().log_softmax(-1))
        full, packed = torch.stack(steps).view(2, len(parts) - 1, -1)[:, -memory.STEPS :]
        (item,) = memory.TASK.items(tiny.source, default_text(), settings)
        series = results.find(memory.TASK, item, "4").series["kl"]
        # The same operations up to the softmax, which is in float32 there and in float64 here.
        torch.testing.assert_close(
            torch.tensor(series).double(), (full.exp() * (full - packed)).sum(-1), rtol=1e-3, atol=1e-6
        )
        assert found[0]["4"][0]["kl"] == pytest.approx(sum(series) / memory.STEPS)

    def test_a_cache_that_has_lost_the_text_is_broken(self):
        assert memory.TASK.fault({"memory_kl": 0.2}) is None
        assert memory.TASK.fault({"memory_kl": 0.256}).startswith("mean KL 0.26 nats")


class TestLongest:
    @pytest.mark.parametrize(
        ("budget", "most", "expected"),
        [
            (2000, None, (300, "budget")),  # five bytes per token behind 1,500 at 200 tokens
            (2004, None, (300, "budget")),
            (2005, None, (301, "budget")),
            (2000, 250, (250, "model")),
            (1000, 250, (100, "budget")),
            (400, None, (0, "budget")),
        ],
    )
    def test_by_hand(self, budget, most, expected):
        assert memory.longest((100, 1000), (200, 1500), budget, most) == expected

    def test_caches_that_do_not_grow_have_no_end_but_the_models(self):
        assert memory.longest((100, 1000), (200, 1000), 1000, 4096) == (4096, "model")
        assert memory.longest((100, 1000), (200, 1000), 1000, None) == (None, "model")
        assert memory.longest((100, 1000), (200, 1000), 999, 4096) == (0, "budget")

    @pytest.mark.parametrize(
        ("context", "earlier"), [(2, 1), (3, 2), (512, 256), (1000, 744), (1023, 767), (1024, 512)]
    )
    def test_the_earlier_length_lies_a_power_of_two_before(self, context, earlier):
        assert memory._earlier(context) == earlier

    @pytest.mark.parametrize("bits", [8, 2])
    def test_it_is_what_the_plan_finds(self, tiny, bits):
        budget = 60_000 if bits == 2 else 140_000
        items, rows = found_items(tiny, replace(SETTINGS, budget=budget), ours(bits))
        quant = QuantConfig.preset(bits, **SMALL_PAGES)
        storage = Storage.of(Architecture.of(tiny.model.config, torch.float32), quant, "cpu")
        planned = largest_context(storage, Workload(0, 1), budget)
        assert planned < 1024
        # The plan counts a page's tokens exactly until they are packed; the line counts on as many as at its ends.
        page = storage.memory(Workload(224, 1)).total - storage.memory(Workload(224 - 64, 1)).total
        waiting = 64 * TOKEN_BYTES / (page / 64)
        for item in items[str(bits)]:
            assert abs(item["longest"] - planned) <= waiting
            assert item["longest_limit"] == "budget"
        assert rows[str(bits)].scores["memory_longest"] == items[str(bits)][-1]["longest"]
        assert rows[evaluation.FULL_PRECISION].scores["memory_longest"] == budget // TOKEN_BYTES

    def test_it_is_no_longer_than_the_model_was_made_for(self, tiny):
        items, _ = found_items(tiny, replace(SETTINGS, contexts=(160,), budget=10**9), ours(4))
        assert [(found[0]["longest"], found[0]["longest_limit"]) for found in items.values()] == [(1024, "model")] * 2

    def test_without_a_budget_there_is_none(self, found):
        items, rows = found
        assert (items["4"][0]["longest"], items["4"][0]["longest_limit"]) == (None, None)
        assert "memory_longest" not in rows["4"].scores

    def test_with_one_there_is_a_column(self):
        columns = memory.TASK.columns(replace(SETTINGS, budget=1))
        assert [column.score for column in columns] == ["memory_mb_224", "memory_peak_mb", "memory_longest"]


class TestBudgetOption:
    def parse(self, *arguments):
        parser = argparse.ArgumentParser()
        verb.add_arguments(parser)
        return verb.settings_of(parser.parse_args(arguments))

    def test_sizes(self):
        assert self.parse().budget is None
        assert self.parse("--budget", "8GB").budget == 8 * 1000**3
        assert self.parse("--budget", "40GiB").budget == 40 * 1024**3

    def test_what_is_no_size_is_told(self, capsys):
        with pytest.raises(SystemExit):
            self.parse("--budget", "plenty")
        assert "budget 'plenty' is not a size; write 80GB (decimal)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 0}, "chunk=0 must be at least 1"),
        ({"contexts": (160, 1)}, "context=1 must be at least 2"),
        ({"contexts": (1000,)}, "context=1000 and 32 tokens of decoding exceed the model's context of 1024"),
    ],
)
def test_what_cannot_be_done_is_refused(tiny, change, message):
    with pytest.raises(EvalError, match=message):
        memory.TASK.check(tiny.source, default_text(), replace(SETTINGS, **change))


def test_short_text_is_refused(tiny):
    with pytest.raises(EvalError, match=r"the text has .* tokens and context=160 needs 193"):
        memory.TASK.check(tiny.source, "too short", SETTINGS)
