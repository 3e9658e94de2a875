"""Evaluations that are interrupted, taken up again, and divided among processes: always the same report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from evaluation import evaluate, interrupt
from transformers import DynamicCache

from kvquant.cli import main
from kvquant_evals.error import EvalError
from kvquant_evals.results import Record, Results
from kvquant_evals.rows import Contender
from kvquant_evals.runner import fingerprint
from kvquant_evals.settings import Settings
from kvquant_evals.share import Share
from kvquant_evals.tasks import needles, perplexity

SMALL = [
    "--tokens",
    "120",
    "--segments",
    "2",
    "--chunk",
    "32",
    "--needles",
    "2",
    "--context",
    "160",
    "--documents",
    "2",
]
CACHES = ["--bits", "8", "--bits", "2", "--peer", "kivi-2"]


@pytest.fixture(scope="module")
def uninterrupted(tiny_folder, tmp_path_factory):
    """The report of a run in one go, without a folder."""
    path = tmp_path_factory.mktemp("whole") / "report.json"
    assert main(["eval", "--model", tiny_folder, *CACHES, *SMALL, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    ("task", "after"),
    [
        (perplexity.TASK, 1),
        *(
            pytest.param(task, after, marks=pytest.mark.broad)
            for task, after in ((perplexity.TASK, 6), (needles.TASK, 0), (needles.TASK, 5))
        ),
    ],
)
def test_an_interrupted_run_goes_on_to_the_same_report(tiny_folder, tmp_path, monkeypatch, uninterrupted, task, after):
    out = tmp_path / "out"
    arguments = ["eval", "--model", tiny_folder, *CACHES, *SMALL, "--out", str(out)]
    with monkeypatch.context() as patch:
        interrupt(patch, task, after)
        assert main(arguments) == 130
    assert json.loads((out / "report.json").read_text())["is_complete"] is False
    assert main(arguments) == 0
    assert json.loads((out / "report.json").read_text()) == uninterrupted


def test_what_is_there_is_not_done_again(tiny_folder, tmp_path, monkeypatch):
    out = str(tmp_path / "out")
    assert main(["eval", "--model", tiny_folder, "--bits", "8", *SMALL, "--out", out]) == 0
    turns = interrupt(monkeypatch, perplexity.TASK, after=100)
    assert main(["eval", "--model", tiny_folder, "--bits", "8", *SMALL, "--out", out]) == 0
    assert turns == []
    # Another cache needs what full precision gave once more, as evidence, but not the first cache.
    assert main(["eval", "--model", tiny_folder, "--bits", "8", "--bits", "4", *SMALL, "--out", out]) == 0
    assert [turn.full is None for turn in turns] == [True, False] * 2


@pytest.mark.broad
def test_a_killed_run_goes_on_to_the_same_report(tiny_folder, tmp_path, uninterrupted):
    out = tmp_path / "out"
    arguments = ["eval", "--model", tiny_folder, *CACHES, *SMALL, "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvquant", *arguments], env=_environment(), stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not list(out.glob("items/*/*/*.json")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "report.json").exists()
    assert main(arguments) == 0
    assert json.loads((out / "report.json").read_text()) == uninterrupted


@pytest.mark.broad
def test_two_processes_give_the_report_of_one(tiny_folder, tmp_path, uninterrupted):
    reports = {}
    for out in (None, tmp_path / "out"):
        path = tmp_path / "report.json"
        arguments = ["eval", "--model", tiny_folder, *CACHES, *SMALL, "--json", str(path)]
        arguments += ["--out", str(out)] if out else []
        launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"]
        launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0", "-m", "kvquant"]
        done = subprocess.run([sys.executable, *launch, *arguments], env=_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("full precision") == 1
        reports[out] = json.loads(path.read_text())
    assert reports[None] == reports[tmp_path / "out"] == uninterrupted


def test_another_evaluation_is_refused(tiny_folder, tmp_path, capsys):
    arguments = ["eval", "--model", tiny_folder, "--bits", "8", "--tasks", "ppl", *SMALL, "--out", str(tmp_path)]
    assert main(arguments) == 0
    capsys.readouterr()
    assert main([*arguments, "--tokens", "121"]) == 2
    err = capsys.readouterr().err
    assert "holds an evaluation with settings.tokens 120, and this one has 121; give another folder" in err


def test_a_damaged_folder_is_one_line(tiny_folder, tmp_path, capsys):
    arguments = ["eval", "--model", tiny_folder, "--bits", "8", "--tasks", "ppl", *SMALL, "--out", str(tmp_path)]
    assert main(arguments) == 0
    next(tmp_path.glob("items/*/*/*.json")).write_text("{")
    capsys.readouterr()
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"kvquant eval: out '{tmp_path}' cannot be used: ")


@pytest.mark.parametrize("written", ["{", "[]"])
def test_a_damaged_identity_is_one_line(tiny_folder, tmp_path, capsys, written):
    (tmp_path / "run.json").write_text(written)
    assert main(["eval", "--model", tiny_folder, "--tasks", "ppl", *SMALL, "--out", str(tmp_path)]) == 2
    assert "cannot be used: " in capsys.readouterr().err.strip().split("\n")[-1]


def test_other_weights_of_the_same_name_are_another_evaluation(tiny):
    before = fingerprint(tiny.model)
    weight = next(tiny.model.parameters())
    kept = weight.data.clone()
    weight.data.mul_(1.001)
    changed = fingerprint(tiny.model)
    weight.data.copy_(kept)
    assert before == fingerprint(tiny.model) != changed


def test_what_full_precision_cannot_do_after_a_resume_is_no_failure_of_a_peer(tiny, monkeypatch):
    """Its evidence is computed anew there, in the turn of the cache that still misses something."""
    results = Results()
    settings = Settings(tokens=120, chunk=32, skip=60)
    evaluate(tiny, [perplexity.TASK], settings, results=results)
    monkeypatch.setattr(perplexity.TASK, "measure", _out_of_memory)
    peer = Contender("peer", DynamicCache, is_peer=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        evaluate(tiny, [perplexity.TASK], settings, [peer], results=results)


def _out_of_memory(turn):
    raise RuntimeError("out of memory")


def test_labels_that_look_alike_have_files_of_their_own():
    paths = {Record("t", "i", label).path for label in ("a b", "a-b", "A b", "é", "ü", "")}
    assert len(paths) == 6
    assert all(path.parts[:3] == ("items", "t", "i") for path in paths)


def test_records_are_the_same_with_and_without_a_folder(tmp_path):
    record = Record("perplexity", "from-0", "x", {"a": (1, 2), "b": 0.1}, {"kl": [1e-17, float("inf")]})
    memory, folder = Results(), Results(tmp_path)
    for results in (memory, folder):
        results.identify({"model": "m"})
        results.add(record)
    again = Results(tmp_path)
    again.identify({"model": "m"})
    found = [vars(results._records["perplexity", "from-0", "x"]) for results in (memory, folder, again)]
    assert found[0] == found[1] == found[2]
    assert found[0]["values"] == {"a": [1, 2], "b": 0.1}


def test_shares_are_all_of_the_work_once():
    jobs = list(range(11))
    parts = [Share(rank, 3).of(jobs) for rank in range(3)]
    assert sorted(job for part in parts for job in part) == jobs
    assert Share().of(jobs) == jobs


def test_processes_on_several_machines_need_a_folder(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(EvalError, match="give --out"):
        Share(0, 4).folder(None)
    assert Share(0, 4).folder(Path("shared")) == Path("shared")


def _environment():
    # One thread, as in the tests' own process: sums depend on how they are divided among threads.
    return os.environ | {"OMP_NUM_THREADS": "1"}
