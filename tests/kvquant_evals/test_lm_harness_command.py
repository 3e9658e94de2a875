"""`lm_eval --model kvquant`: its arguments, and lm-eval's command line on the tiny model."""

from __future__ import annotations

import json
import re
import sys
from functools import partialmethod
from importlib.metadata import EntryPoint
from pathlib import Path

import lm_tasks
import pytest
import torch

from kvquant_evals.error import EvalError

pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install 'kvquant-cache[dev]'")

from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from kvquant_evals.lm_harness import __main__ as command
from kvquant_evals.lm_harness.arguments import Arguments
from kvquant_evals.lm_harness.lm import KvquantLM, register

pytestmark = pytest.mark.broad

DOCUMENTS = lm_tasks.documents(2, 600)  # some 280 tokens each, of which 128 are packed by default


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return lm_tasks.write(tmp_path_factory.mktemp("tasks"), DOCUMENTS)


class TestArguments:
    @pytest.mark.parametrize(
        ("bits", "formats"),
        [
            (None, ("int4_per_channel", "int4_per_token")),
            (8, ("int8_per_channel", "int8_per_token")),
            ("8/4", ("int8_per_channel", "int4_per_token")),
            ("4+2", ("int4_per_channel", "int2_per_token")),
            ((8, 4), ("int8_per_channel", "int4_per_token")),
            ("fp8", ("fp8_e4m3_per_token", "fp8_e4m3_per_token")),
        ],
        ids=str,
    )
    def test_bits(self, tiny, bits, formats):
        quant = Arguments.of({"bits": bits} if bits else {}).contender(tiny).quant
        assert (quant.key.name, quant.value.name) == formats

    def test_peer(self, tiny):
        assert Arguments.of({"peer": "kivi-4"}).contender(tiny).label == "KIVI 4"

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"bits": 5}, "bits=5 is not supported"),
            ({"bits": "8/4/2"}, "is not supported"),
            ({"peer": "nobody"}, "peer 'nobody' is unknown"),
            ({"bits": 4, "peer": "kivi-4"}, "bits=4 and peer='kivi-4' are two caches"),
            ({"dtype": "int8"}, "dtype='int8' is not supported; use one of float32, bfloat16, float16"),
            ({"chunk": 0}, "chunk=0 must be a positive whole number"),
            ({"max_length": "long"}, "max_length='long' must be a positive whole number"),
            ({"bit": 4}, "model_args bit are unknown; known are pretrained, bits, peer"),
            ({"pretrained": "/nowhere"}, "model '/nowhere' cannot be loaded"),
        ],
        ids=str,
    )
    def test_what_cannot_be_is_refused(self, tiny_folder, given, message):
        with pytest.raises(EvalError, match=re.escape(message)):
            KvquantLM(**({"pretrained": tiny_folder} | given))

    def test_cache_and_version_are_part_of_the_results(self, tiny_folder):
        info = KvquantLM(pretrained=tiny_folder, bits="8/4", dtype="bfloat16", batch_size=4).get_model_info()
        assert info["kvquant_cache"] == "bits=8/4"
        assert info["kvquant_config"]["value"]["name"] == "int4_per_token"
        assert info["model_dtype"] == "torch.bfloat16"


class TestCommand:
    """lm-eval's own command line, in this process."""

    @pytest.fixture
    def run(self, monkeypatch, tiny_folder, folder, tmp_path):
        # It would ask compilers and package managers for their versions, for seconds.
        monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        monkeypatch.setattr("lm_eval.__main__.setup_logging", lambda: None)  # would outlive the test
        # Its own tasks are thousands of files, which take seconds to be listed.
        monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))

        def run(tasks, model_args="bits=16"):
            out = tmp_path / str(len(list(tmp_path.iterdir())))
            out.mkdir()
            arguments = f"--model kvquant --model_args pretrained={tiny_folder},{model_args} --tasks {tasks} "
            arguments += f"--include_path {folder} --output_path {out}/report.json"
            monkeypatch.setattr(sys, "argv", ["lm-eval", *arguments.split()])
            code = command.main()
            return code, *(json.loads(path.read_text()) for path in out.glob("report_*.json"))

        return run

    def test_scores_are_those_of_the_model(self, run, tiny, capsys):
        code, report = run("local_choice,local_last,local_words,local_pages")
        assert code == 0
        results = report["results"]
        hits = 0
        for document in DOCUMENTS:
            before = len(tiny.encode(document["text"])[0])
            wholes = [tiny.encode(document["text"] + choice)[0].tolist() for choice in document["choices"]]
            totals = [lm_tasks.likelihood(tiny, whole, len(whole) - before)[0] for whole in wholes]
            hits += totals.index(max(totals)) == document["label"]
        assert results["local_choice"]["acc,none"] == hits / len(DOCUMENTS)
        pages = [[0, *tiny.encode(document["text"])[0].tolist()] for document in DOCUMENTS]
        total = sum(lm_tasks.likelihood(tiny, page, len(page) - 1)[0] for page in pages)
        size = sum(len(document["text"].encode()) for document in DOCUMENTS)
        expected = torch.tensor(-total / size).exp().item()
        assert results["local_pages"]["byte_perplexity,none"] == pytest.approx(expected, rel=1e-4)
        assert set(results["local_words"]) >= {"exact_match,none"}
        assert report["config"]["kvquant_cache"] == "bits=16"
        assert "|local_choice" in capsys.readouterr().out

    def test_quantized_caches_change_what_is_found(self, run):
        reports = [run("local_pages", model_args=f"bits={bits},chunk=16")[1] for bits in ("16", "8/4", "2")]
        found = [report["results"]["local_pages"]["byte_perplexity,none"] for report in reports]
        assert 0 < abs(found[1] / found[0] - 1) < abs(found[2] / found[0] - 1)
        assert [report["config"]["kvquant_cache"] for report in reports] == ["bits=16", "bits=8/4", "bits=2"]

    def test_mistakes_are_one_line_and_exit_code_2(self, run, capsys):
        assert run("local_choice", model_args="bits=5") == (2,)
        assert capsys.readouterr().err.strip().split("\n")[-1].startswith("kvquant: bits=5 is not supported")

    def test_registering_twice_is_no_harm(self):
        register()
        register()
        assert get_model("kvquant") is KvquantLM
        assert get_model("hf").__name__ == "HFLM"

    def test_newer_releases_find_the_model_by_its_entry_point(self):
        text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
        found = re.search(r'\[project\.entry-points\."lm_eval\.models"\]\nkvquant = "(.+)"', text)
        assert EntryPoint("kvquant", found[1], "lm_eval.models").load() is KvquantLM
