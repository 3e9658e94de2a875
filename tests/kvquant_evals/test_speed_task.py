"""The speed task on a tiny model: its bookkeeping and its texts; timings themselves are nobody's promise."""

from __future__ import annotations

import logging
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
from kvquant_evals.tasks import _reading, speed

pytestmark = pytest.mark.broad

SETTINGS = Settings(contexts=(60, 40), batches=(2, 1), offset=100)
ONE = replace(SETTINGS, contexts=(60,), batches=(2,))
SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 32}
ALL_STEPS = speed.UNTIMED + speed.STEPS


def ours(*bits):
    return {str(b): partial(QuantCache, bits=b, **SMALL_PAGES) for b in bits}


def rows(subject, settings, caches):
    return evaluation.rows(subject, [speed.TASK], settings, caches)


@pytest.fixture(scope="module")
def found(tiny):
    return rows(tiny, SETTINGS, ours(16, 4))


@pytest.fixture
def clock(monkeypatch):
    """Makes a step take as long as its reader's cache says, the first ones 100 s."""

    def set_seconds(seconds):
        steps = {}

        def timed(device, run):
            found = run()
            reader = getattr(getattr(run, "func", None), "__self__", None)
            if reader is None:  # a prefill
                return 3.0, found
            label = type(next((x for x in reader.options.values() if not isinstance(x, int)), None)).__name__
            steps[id(reader)] = steps.get(id(reader), 0) + 1
            return (100.0 if steps[id(reader)] <= speed.UNTIMED else seconds[label]), found

        monkeypatch.setattr(speed, "_timed", timed)

    return set_seconds


def test_an_item_per_context_and_batch(tiny):
    items = speed.TASK.items(tiny.source, default_text(), SETTINGS)
    assert [item.about for item in items] == [
        {"context": 60, "batch": 2},
        {"context": 60, "batch": 1},
        {"context": 40, "batch": 2},
        {"context": 40, "batch": 1},
    ]
    assert len({item.name for item in items}) == 4


def test_rates_follow_from_times(found):
    for row in found.values():
        for item in row.items["speed"]:
            batch, tokens = item["batch"], item["batch"] * item["context"]
            assert item["prefill_tokens_per_second"] * item["first_token_ms"] == pytest.approx(1e3 * tokens)
            assert item["decode_tokens_per_second"] * item["step_ms"] == pytest.approx(1e3 * batch)
            assert item["ratio"] * item["step_ms"] == pytest.approx(item["full_step_ms"])
            assert sum(item["parts"].values()) == pytest.approx(item["step_ms"])
            assert item["slowest_step_ms"] >= item["step_ms"]
            assert item["steps"] == speed.STEPS >= 16


def test_full_precision_is_as_fast_as_itself(found):
    full = found[evaluation.FULL_PRECISION]
    assert {item["ratio"] for item in full.items["speed"]} == {1.0}
    assert not any(item["takes_turns"] for item in full.items["speed"])
    assert all(item["takes_turns"] for item in found["4"].items["speed"])


def test_medians_leave_out_the_first_steps(tiny, clock):
    clock({"DynamicCache": 0.02, "QuantCache": 0.005, "NoneType": 0.004})
    (item,) = rows(tiny, ONE, ours(4))["4"].items["speed"]
    expected = {
        "first_token_ms": 3000.0,
        "prefill_tokens_per_second": 40.0,
        "step_ms": 5.0,
        "slowest_step_ms": 5.0,
        "full_step_ms": 20.0,
        "ratio": 4.0,
        "decode_tokens_per_second": 400.0,
    }
    assert {name: item[name] for name in expected} == pytest.approx(expected)
    assert item["parts"] == pytest.approx({"forward_without_cache": 4.0, "attention_and_cache": 1.0})
    assert item["is_noisy"] is False


@pytest.mark.parametrize("noisy", [speed.OWN, speed.FULL])
def test_noise_of_either_is_told(tiny, monkeypatch, noisy):
    original = speed._timings

    def timings(turn, seconds):
        steady = {label: [1.0] * len(found) for label, found in seconds.items()}
        if noisy in steady:
            steady[noisy] = [1.0, 1.4] * (len(seconds[noisy]) // 2)
        return original(turn, steady)

    monkeypatch.setattr(speed, "_timings", timings)
    (item,) = rows(tiny, ONE, ours(4))["4"].items["speed"]
    assert item["is_noisy"] is True
    # The quartiles of as many 1.0 as 1.4 lie 0.4 apart, and the median between them.
    assert item["spread" if noisy == speed.OWN else "full_spread"] == pytest.approx(0.4 / 1.2)


def test_both_caches_are_at_the_same_place_of_the_text(tiny, monkeypatch):
    steps = []
    original = _reading.Reader.read

    def read(reader, ids):
        cache = next((x for x in reader.options.values() if not isinstance(x, int)), None)
        if ids.shape[1] == 1 and cache is not None and cache.get_seq_length() >= 60:
            steps.append((type(cache).__name__, cache.get_seq_length(), ids.flatten().tolist()))
        return original(reader, ids)

    monkeypatch.setattr(_reading.Reader, "read", read)
    rows(tiny, ONE, ours(4))
    alone, beside = steps[:ALL_STEPS], steps[ALL_STEPS:]
    ids = tiny.encode(default_text())[0]
    assert [length for _, length, _ in alone] == list(range(60, 60 + ALL_STEPS))
    assert [first for _, _, (first, _) in alone] == ids[160 : 160 + ALL_STEPS].tolist()
    assert len(beside) == 2 * ALL_STEPS
    for i in range(ALL_STEPS):
        one, other = beside[2 * i : 2 * i + 2]
        assert {one[0], other[0]} == {"DynamicCache", "QuantCache"}
        assert one[1:] == other[1:] == alone[i][1:]
        assert (one[0] == "QuantCache") == (i % 2 == 0)  # they alternate in who is first


def test_rows_of_a_batch_are_different_texts(tiny, monkeypatch):
    seen = []
    original = speed.rows_of_text
    monkeypatch.setattr(speed, "rows_of_text", lambda *args: seen.append(original(*args)) or seen[-1])
    rows(tiny, replace(ONE, batches=(3, 1)), {})
    three, one = seen
    assert three.shape == (3, 60 + ALL_STEPS + 1)
    assert torch.equal(three[:1], one)
    assert len({tuple(row.tolist()) for row in three}) == 3


class TestText:
    def test_identity_has_the_text_of_full_precision(self, found):
        assert [item["kl"] for item in found["16"].items["speed"]] == [0.0] * 4
        assert found["16"].scores["speed_kl"] == found[evaluation.FULL_PRECISION].scores["speed_kl"] == 0.0

    def test_it_is_the_same_in_every_run(self, tiny, found):
        (again,) = rows(tiny, ONE, ours(4))["4"].items["speed"]
        assert again["kl"] == found["4"].items["speed"][0]["kl"] > 0

    def test_divergence_is_that_of_the_decoded_steps(self, tiny):
        results, caches = Results(), ours(4)
        evaluation.evaluate(tiny, [speed.TASK], replace(ONE, batches=(1,)), caches, results=results)
        ids = tiny.encode(default_text())[:, 100 : 160 + ALL_STEPS]
        steps = []
        with torch.no_grad():
            for cache in (DynamicCache(), caches["4"]()):
                for part in (ids[:, :60], *ids[:, 60:].split(1, dim=1)):
                    logits = tiny.model(part, **{CACHE_ARGUMENT: cache}, use_cache=True).logits
                    steps.append(logits[0, -1].double().log_softmax(-1))
        full, packed = torch.stack(steps).view(2, 1 + ALL_STEPS, -1)[:, 1:]
        (item,) = speed.TASK.items(tiny.source, default_text(), replace(ONE, batches=(1,)))
        series = torch.tensor(results.find(speed.TASK, item, "4").series["kl"]).double()
        # The same operations up to the softmax, which is in float32 there and in float64 here.
        torch.testing.assert_close(series, (full.exp() * (full - packed)).sum(-1), rtol=1e-3, atol=1e-6)

    def test_a_cache_that_has_lost_the_text_is_broken(self):
        assert speed.TASK.fault({"speed_kl": 0.2}) is None
        assert speed.TASK.fault({"speed_kl": 0.256}).startswith("mean KL 0.26 nats")


def test_where_both_do_not_fit_the_ratio_is_to_full_precisions_own_turn(tiny, monkeypatch, caplog, clock):
    def too_much(**_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(speed, "DynamicCache", too_much)
    clock({"DynamicCache": 0.03, "QuantCache": 0.01, "NoneType": 0.004})
    with caplog.at_level(logging.WARNING, logger="kvquant"):
        (item,) = rows(tiny, ONE, ours(4))["4"].items["speed"]
    assert (item["takes_turns"], item["full_spread"]) == (False, None)
    assert item["ratio"] == pytest.approx(3.0)
    assert "full precision does not fit beside the cache" in caplog.text


def test_scores_by_item_and_columns_of_the_longest_and_first(found):
    scores, items = found["4"].scores, found["4"].items["speed"]
    for item in items:
        name = f"{item['context']}_{item['batch']}"
        assert scores[f"speed_prefill_{name}"] == item["prefill_tokens_per_second"]
        assert scores[f"speed_first_token_{name}"] == item["first_token_ms"]
        assert scores[f"speed_decode_{name}"] == item["decode_tokens_per_second"]
        assert scores[f"speed_step_{name}"] == item["step_ms"]
        assert scores[f"speed_ratio_{name}"] == item["ratio"]
    columns = speed.TASK.columns(SETTINGS)
    assert {column.title: column.score for column in columns} == {
        "prefill tok/s @60": "speed_prefill_60_2",
        "decode tok/s @60": "speed_decode_60_2",
        "decode ratio @60": "speed_ratio_60_2",
    }
    assert all(column.is_cost for column in columns)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": (1, 0)}, "batch=0 must be at least 1"),
        ({"contexts": (1000,)}, "context=1000 and 26 tokens of decoding exceed the model's context of 1024"),
    ],
)
def test_what_cannot_be_done_is_refused(tiny, change, message):
    with pytest.raises(EvalError, match=message):
        speed.TASK.check(tiny.source, default_text(), replace(SETTINGS, **change))
