"""The benchmark's arithmetic and bookkeeping; its timings themselves are nobody's promise."""

from __future__ import annotations

import json

import pytest
from families import tiny_model

from kvquant.cli import main
from kvquant_evals import bench, table
from kvquant_evals.bench import Shape, Timing
from kvquant_evals.model import Source, Subject


def test_every_contender_is_timed_at_every_context_and_thread_count():
    timings = bench.time_attention(Shape(4, 2, 32), [200, 300], [8, (4, 2)], [1, 2], rounds=3)
    labels = [
        "sdpa bf16, enable_gqa",
        "sdpa bf16, packed heads",
        "matmul, softmax, matmul bf16",
        "kvquant 8",
        "kvquant (4, 2)",
    ]
    expected = [(label, context, threads) for context in (200, 300) for threads in (1, 2) for label in labels]
    assert [(timing.contender, timing.context, timing.threads) for timing in timings] == expected
    assert all(timing.rounds == 3 and timing.milliseconds > 0 for timing in timings)


def test_contenders_compute_the_same_attention():
    forms = bench._torch_forms(Shape(4, 2, 32), 50)
    outs = [form().flatten() for form in forms.values()]
    for out in outs[1:]:
        # bfloat16 weights have 8 bits, and some 50 of them are summed.
        assert (out - outs[0]).abs().max() < 0.02


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
def test_decoding_is_timed_for_models_with_and_without_grouped_heads(family):
    model = tiny_model(family, "sdpa")
    subject = Subject(Source(family, {}, model.config, None), model)
    timings = bench.time_decoding(subject, [300], [4], [1], rounds=2)
    assert [(timing.kind, timing.contender) for timing in timings] == [
        ("decoding, float32", "DynamicCache"),
        ("decoding, float32", "kvquant 4"),
    ]


def test_median_and_spread_of_the_middle_half():
    timing = bench._timing("attention", "x", 100, 1, [0.004, 0.001, 0.002, 0.003, 0.100])
    assert timing.milliseconds == pytest.approx(3.0)
    assert timing.spread == pytest.approx((0.004 - 0.002) / 0.003)
    assert timing.is_noisy


def test_table_of_timings():
    timings = [
        Timing("attention", "a", 2048, 1, 1.234, 0.01, 15),
        Timing("attention", "b", 2048, 1, 0.5, 0.2, 15),
        Timing("decoding", "a", 2048, 1, 7.0, 0.0, 15),
    ]
    report = bench.report(timings, Shape(), "m")
    assert table.timings(report, "attention") == [
        ["attention (ms)", "2,048 tokens, 1 thr."],
        ["a", "1.23"],
        ["b", "0.50~"],
    ]
    assert "medians of 15 alternating rounds" in table.bench_caption(report)


def test_command_line(tiny_folder, tmp_path, capsys):
    path = tmp_path / "bench.json"
    assert (
        main(["bench", "--model", tiny_folder, "--context", "300", "--bits", "4", "--rounds", "2", "--json", str(path)])
        == 0
    )
    report = json.loads(path.read_text())
    assert {row["kind"] for row in report["timings"]} == {"attention", "decoding, bfloat16", "decoding, float32"}
    assert "kvquant 4" in capsys.readouterr().out
    assert main(["bench", "--model", "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("kvquant bench: model '/nowhere' cannot be loaded")
