"""The benchmark's arithmetic and bookkeeping; its timings themselves are nobody's promise."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from itertools import chain, islice, permutations

import pytest
import torch
from families import tiny_model
from transformers import DynamicCache, LlamaConfig, QuantizedCache

from kvquant.cache import cache_memory
from kvquant.cli import main
from kvquant_evals.bench import attention, command, decoding, memory, race, report
from kvquant_evals.bench.attention import Shape
from kvquant_evals.bench.memory import Residence
from kvquant_evals.bench.race import Contender, Effort, Timing, label_of, timing
from kvquant_evals.model import default_text

QUICK = Effort(rounds=3)


def test_every_form_of_attention_is_timed_at_every_context_and_thread_count():
    timings = attention.time_attention(Shape(4, 2, 32), [200, 300], [8, (4, 2)], [1, 2], QUICK)
    labels = [
        "sdpa bf16, enable_gqa",
        "sdpa bf16, packed heads",
        "matmul, softmax, matmul bf16",
        "kvquant 8",
        "kvquant 4,2",
    ]
    expected = [(label, context, threads) for context in (200, 300) for threads in (1, 2) for label in labels]
    assert [(t.contender, t.context, t.threads) for t in timings] == expected
    assert all(t.rounds == 3 and t.milliseconds > 0 for t in timings)
    by_label = {t.contender: t.cache_bytes for t in timings if t.context == 200}
    assert by_label["sdpa bf16, enable_gqa"] == 2 * 2 * 200 * 32 * 2
    assert by_label["kvquant 4,2"] < by_label["kvquant 8"] < by_label["sdpa bf16, enable_gqa"]


def test_forms_of_attention_compute_the_same():
    outs = [form.run().flatten() for form in attention.torch_forms(Shape(4, 2, 32), 50).values()]
    for out in outs[1:]:
        # bfloat16 weights have 8 bits, and some 50 of them are summed.
        assert (out - outs[0]).abs().max() < 0.02


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
def test_decoding_is_timed_for_models_with_and_without_grouped_heads(family):
    model = tiny_model(family, "sdpa")
    labels = decoding.cache_labels([4], peers=False, grouped=family == "llama")
    timings = decoding.time_decoding(family, model, [300], labels, [1], QUICK)
    assert [t.contender for t in timings] == ["no cache, one token", *labels]
    assert {t.kind for t in timings} == {f"decoding, {family}, float32"}
    assert ("DynamicCache, packed heads" in labels) == (family == "llama")


def test_packed_heads_give_the_logits_of_stock_decoding():
    model = tiny_model("llama", "sdpa")
    logits = []
    for wrap in (lambda step: step, lambda step: decoding._with_packed_heads(model, step)):
        cache = DynamicCache()
        torch.manual_seed(0)
        decoding.fill(cache, model, 50)
        with torch.inference_mode():
            logits.append(wrap(decoding._step(model, cache))().logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)  # float32 sums in another order
    assert model.config._attn_implementation == "sdpa"


def test_labels_name_the_caches_they_stand_for():
    model = tiny_model("llama", "sdpa")
    assert label_of((8, "fp8")) == "kvquant 8,fp8"
    cache = decoding.new_cache("kvquant 8,fp8", model)
    assert (cache.quant.key.bits, cache.quant.value.name) == (8, "fp8_e4m3_per_token")
    assert type(decoding.new_cache("DynamicCache, packed heads", model)) is DynamicCache
    assert type(decoding.new_cache("QuantizedCache fp8", model)) is QuantizedCache


def test_bytes_of_transformers_quantized_cache_are_those_it_holds():
    config = LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=1, num_key_value_heads=1)
    cache = QuantizedCache("fp8", config)
    cache.update(torch.randn(1, 1, 100, 64), torch.randn(1, 1, 100, 64), 0)
    assert cache_memory(cache).total == 2 * 100 * 64


def test_slow_contenders_get_fewer_rounds(monkeypatch):
    monkeypatch.setattr(race, "_seconds", lambda run: run())
    contenders = {"slow": Contender(lambda: 3.0, 0), "quick": Contender(lambda: 0.5, 0)}
    slow, quick = race.race("x", contenders, 100, 1, Effort(rounds=15, seconds=10.0))
    assert (slow.rounds, slow.milliseconds) == (4, 3000.0)
    assert quick.rounds == 15
    assert race.race("x", contenders, 100, 1, Effort(rounds=15, seconds=1.0))[0].rounds == race.FEWEST_ROUNDS


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_no_contender_comes_soon_after_another_more_often_than_by_chance(distance):
    orders = list(islice(race.random_orders("abcdefghi"), 400))
    assert all(sorted(order) == list("abcdefghi") for order in orders)
    pairs = Counter(pair for order in orders for pair in zip(order, order[distance:], strict=False))
    mean = 400 * (9 - distance) / (9 * 8)
    # Each count is a binomial one, if its rounds are independent: five standard deviations for the 72 pairs.
    assert all(abs(pairs[pair] - mean) < 5 * mean**0.5 for pair in permutations("abcdefghi", 2))


def test_rounds_take_the_orders_in_turn():
    turns = []
    contenders = {label: Contender(partial(turns.append, label), 0) for label in "abcd"}
    race.race("x", contenders, 100, 1, Effort(rounds=9))
    assert turns == [*"abcd", *chain.from_iterable(islice(race.random_orders("abcd"), 9))]


def test_median_and_spread_of_the_middle_half():
    found = timing("attention", "x", 100, 1, [0.004, 0.001, 0.002, 0.003, 0.100])
    assert found.milliseconds == pytest.approx(3.0)
    assert found.spread == pytest.approx((0.004 - 0.002) / 0.003)
    assert found.is_noisy


def example():
    timings = [
        Timing("attention", "matmul, softmax, matmul bf16", 2048, 1, 1.234, 0.01, 15, 4_000_000),
        Timing("attention", "kvquant 4", 2048, 1, 0.5, 0.2, 15, 1_000_000),
        Timing("attention", "matmul, softmax, matmul bf16", 8192, 1, 4.0, 0.01, 9, 16_000_000),
        Timing("attention", "kvquant 4", 8192, 1, 1.0, 0.0, 15, 4_000_000),
        Timing("decoding, m, bfloat16", "DynamicCache", 2048, 1, 7.0, 0.0, 12, 0),
    ]
    residence = [
        Residence("DynamicCache", 8192, 200_000_000, 300_000_000),
        Residence("k", 8192, 50_000_000, 90_000_000),
    ]
    return report.Report(Shape(), timings, residence).to_dict()


def test_tables():
    found = example()
    assert report.milliseconds(found, "attention", 1) == [
        ["attention: ms", "2,048 tokens", "8,192 tokens", "MB at 8,192"],
        ["matmul, softmax, matmul bf16", "1.23", "4.00", "16.0"],
        ["kvquant 4", "0.50~", "1.00", "4.0"],
    ]
    assert report.ratios(found, "attention", 1)[1:] == [
        ["matmul, softmax, matmul bf16", "1.00x", "1.00x"],
        ["kvquant 4", "2.47x", "4.00x"],
    ]
    assert report.residences(found)[1:] == [
        ["DynamicCache", "200.0", "1.00", "300.0", "1.00"],
        ["k", "50.0", "0.25", "90.0", "0.30"],
    ]
    assert "medians of 15 rounds of attention and 12 rounds of decoding in random orders, 9 at least" in report.caption(
        found
    )
    titles = [lines[0][0] for lines in report.printed(found)]
    assert titles[0] == "attention: ms, 1 thr."
    assert len(titles) == 5  # two kinds with ratios, and memory


def test_what_a_gain_comes_from():
    times = {"DynamicCache": 60.0, "DynamicCache, packed heads": 20.0, "kvquant 4": 10.0}
    timings = [Timing("decoding, m, bfloat16", label, 8192, 1, ms, 0.0, 15, 0) for label, ms in times.items()]
    (sentence,) = report.origins(report.Report(Shape(), timings).to_dict(), "kvquant 4")
    assert "6.0x as fast as DynamicCache; 3.0x come from torch" in sentence
    assert sentence.endswith("2.0x from the cache")


def test_plot(tmp_path):
    report.plot(example(), str(tmp_path / "plot.png"))
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_resident_sets_are_measured_in_the_model_that_decodes(tiny):
    ids = tiny.encode(default_text())[:, : 400 + memory.STEPS]
    found = memory.residence(tiny.model, ids, "kvquant 4")
    assert (found.contender, found.context) == ("kvquant 4", 400)
    assert found.peak >= found.held - 2**20  # both over the same base, up to what malloc keeps


@pytest.mark.broad
def test_command_line(tiny_folder, tmp_path, capsys):
    path = tmp_path / "bench.json"
    options = "--context 300 --context 1100 --bits 4 --rounds 2 --no-peers --memory 256"
    arguments = ["--model", tiny_folder, *options.split()]
    assert main(["bench", *arguments, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    name = tiny_folder.split("/")[-1]
    assert report.kinds(found) == ["attention", f"decoding, {name}, bfloat16", f"decoding, {name}, float32"]
    reach = {kind: {row["context"] for row in found["timings"] if row["kind"] == kind} for kind in report.kinds(found)}
    assert list(reach.values()) == [{300, 1100}, {300}, {300}]  # the model was made for 1,024 tokens
    assert {(row["kind"].split(",")[0], row["rounds"]) for row in found["timings"]} == {
        ("attention", 20),
        ("decoding", 2),
    }
    assert [row["contender"] for row in found["memory"]] == ["DynamicCache", "kvquant 4"]
    assert "kvquant 4" in capsys.readouterr().out
    assert main(["bench", "--model", "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("kvquant bench: model '/nowhere' cannot be loaded")


def test_what_cannot_be_done_is_said_before_anything_is_timed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "time_attention", None)
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert main(["bench", "--plot", str(tmp_path / "plot.png")]) == 2
    assert capsys.readouterr().err == "kvquant bench: --plot needs matplotlib: pip install matplotlib\n"
    monkeypatch.setattr(command, "Path", lambda path: tmp_path / "nothing")
    assert main(["bench", "--memory", "100"]) == 2
    assert "memory can only be measured on Linux" in capsys.readouterr().err
    assert main(["bench", "--json", "/nowhere/x.json"]) == 2
    assert capsys.readouterr().err.startswith("kvquant bench: json '/nowhere/x.json' cannot be written")


def test_the_random_model_has_the_shape_it_says(monkeypatch):
    monkeypatch.setattr(decoding.AutoModelForCausalLM, "from_config", lambda config, dtype: _Recorded(config, dtype))
    (label, made), *_ = command._models(None)
    assert label == decoding.RANDOM_MODEL
    embeddings = made.config.vocab_size * made.config.hidden_size
    per_layer = 2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192
    assert 1.2e9 < embeddings + made.config.num_hidden_layers * per_layer < 1.3e9
    assert made.dtype == torch.bfloat16


class _Recorded:
    def __init__(self, config, dtype):
        self.config, self.dtype = config, dtype

    def eval(self):
        return self
