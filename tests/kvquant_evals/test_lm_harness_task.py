"""Tasks of lm-eval as ours, on the tiny model and with data from files."""

from __future__ import annotations

import json
import sys
from functools import partial

import evaluation
import lm_tasks
import pytest
from transformers import DynamicCache

from kvquant import QuantCache
from kvquant.cli import main
from kvquant_evals.error import EvalError
from kvquant_evals.settings import Settings
from kvquant_evals.task import Finding, Turn, find

pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install 'kvquant-cache[dev]'")

from kvquant_evals.lm_harness import catalog
from kvquant_evals.lm_harness.task import LmEvalTask

pytestmark = pytest.mark.broad

SMALL_PAGES = {"sinks": 2, "residual_length": 5, "page_size": 8}
SETTINGS = Settings(chunk=16)
DOCUMENTS = lm_tasks.documents(3, 300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return lm_tasks.write(tmp_path_factory.mktemp("tasks"), DOCUMENTS)


class TestTask:
    def rows(self, tiny, folder, name, *bits, settings=SETTINGS):
        caches = {str(b): partial(QuantCache, bits=b, **SMALL_PAGES) for b in bits}
        return evaluation.rows(tiny, [LmEvalTask(name, folder)], settings, caches)

    @pytest.mark.parametrize("name", lm_tasks.BODIES)
    def test_identity_is_full_precision(self, tiny, folder, name):
        full, identity = self.rows(tiny, folder, name, 16).values()
        assert identity.scores[f"{name}_shift"] == 0.0
        assert {**identity.scores, f"{name}_packed": 0} == {**full.scores, f"{name}_packed": 0}
        assert identity.scores.get(f"{name}_same", 1.0) == 1.0
        assert not identity.faults

    @pytest.mark.parametrize("name", lm_tasks.BODIES)
    def test_log_likelihoods_change_more_with_fewer_bits(self, tiny, folder, name):
        _, *found = (
            row.scores[f"{name}_shift"]
            for row in self.rows(tiny, folder, name, 8, 4, 2, settings=Settings(chunk=16, limit=1)).values()
        )
        assert 0 < found[0] < found[1] / 3 < found[2] / 6

    def test_likelihoods_are_kept_for_each_request(self, tiny, folder):
        found = LmEvalTask("local_choice", folder)
        (item,) = found.items(tiny.source, "", SETTINGS)
        assert (item.name, item.about) == ("local_choice", {"task": "local_choice"})
        passed = []
        turn = Turn(tiny, "", SETTINGS, item, partial(DynamicCache, config=tiny.model.config), None, passed.append)
        finding = found.measure(turn)
        assert len(finding.series["loglikelihood"]) == 4 * len(DOCUMENTS)
        assert finding.values["documents"] == len(DOCUMENTS)
        assert finding.values["packed"] is None
        assert 0.5 < sum(passed) / item.tokens < 2
        json.dumps(finding.values)

    def test_answers_are_compared(self, tiny, folder):
        rows = self.rows(tiny, folder, "local_words", 2, settings=Settings(chunk=16, limit=3))
        assert rows["2"].scores["local_words_same"] < 1
        assert rows["2"].items["local_words"][0]["answers"] == 3
        assert rows["2"].scores["local_words_packed"] == 1.0

    def test_limit_and_examples(self, tiny, folder):
        task = LmEvalTask("local_last", folder)
        lengths = {}
        for shots in (None, 2):
            settings = Settings(chunk=16, limit=2, num_fewshot=shots)
            row = evaluation.rows(tiny, [task], settings)[evaluation.FULL_PRECISION]
            assert row.items["local_last"][0]["documents"] == 2
            lengths[shots] = task.items(tiny.source, "", settings)[0].tokens
        assert 2 < lengths[2] / lengths[None] < 3

    def test_group_is_the_mean_over_documents(self):
        task = LmEvalTask("group")
        common = {"answers": 0, "same": None, "lm_eval": "0", "version": 1}
        found = [
            Finding(
                {"task": "a", "documents": 3, "metrics": {"acc": 1.0}, "shift": 0.1, "tokens": 30, "packed": 1.0}
                | common
            ),
            Finding(
                {"task": "b", "documents": 1, "metrics": {"acc": 0.0}, "shift": 0.5, "tokens": 10, "packed": None}
                | common
            ),
        ]
        task_of_lm_eval = type(
            "Task", (), {"config": type("", (), {"filter_list": None}), "aggregation": lambda: {"acc": None}}
        )
        object.__setattr__(task, "_first", lambda settings: task_of_lm_eval)
        scores = task.scores(found, SETTINGS)
        assert scores == pytest.approx(
            {"group_acc": 0.75, "group_shift": 0.2, "group_packed": 1.0, "group_a_acc": 1.0, "group_b_acc": 0.0}
        )

    def test_group_has_an_item_per_task(self, tiny, folder):
        task = LmEvalTask("local_group", folder)
        assert [item.name for item in task.items(tiny.source, "", SETTINGS)] == ["local_choice", "local_last"]
        rows = self.rows(tiny, folder, "local_group", 4)
        scores = rows["4"].scores
        members = [scores[f"local_group_local_{name}_acc"] for name in ("choice", "last")]
        assert scores["local_group_acc"] == sum(members) / 2
        assert [column.title for column in task.columns(SETTINGS)] == [
            "local_group acc",
            "local_group shift",
            "local_group packed",
        ]

    def test_broken_is_more_than_one_nat(self):
        task = LmEvalTask("local_choice")
        assert task.fault({"local_choice_shift": 1.0}) is None
        assert task.fault({"local_choice_shift": 1.25}) == "log-likelihoods change by 1.25 nats per token"
        assert task.fault({"local_choice_shift": float("nan")}) is not None

    def test_data_that_is_not_there_is_one_line(self, tiny, folder):
        with pytest.raises(
            EvalError, match="task 'local_missing' of lm-eval cannot be loaded: FileNotFoundError: "
        ) as error:
            LmEvalTask("local_missing", folder).check(tiny.source, "", SETTINGS)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [({"chat": True}, "has no chat template"), ({"num_fewshot": -1}, "num_fewshot=-1 must be at least 0")],
        ids=str,
    )
    def test_what_cannot_be_is_refused(self, tiny, folder, settings, message):
        with pytest.raises(EvalError, match=message):
            LmEvalTask("local_choice", folder).check(tiny.source, "", Settings(**settings))

    def test_names_are_looked_for_here_and_then_there(self, folder, monkeypatch):
        place = catalog._manager(folder)
        monkeypatch.setattr(catalog, "_manager", lambda given: place)  # lm-eval's own tasks take seconds to be found
        ours, theirs = find("needles,local_choice", folder)
        assert ours.name == "needles"
        assert theirs == LmEvalTask("local_choice", folder)
        with pytest.raises(EvalError, match=r"'chess' is unknown; known are perplexity.*listed by: lm-eval ls tasks"):
            find("chess", folder)

    def test_without_lm_eval_it_is_told_how_to_get_it(self, monkeypatch):
        for name in [name for name in sys.modules if name.startswith("kvquant_evals.lm_harness")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr("kvquant_evals.lm_harness")
        monkeypatch.setitem(sys.modules, "lm_eval", None)
        with pytest.raises(EvalError, match=r"'hellaswag' is unknown; known are .*pip install 'kvquant-cache\[eval\]'"):
            find("hellaswag")

    def test_from_the_command_line(self, tiny_folder, folder, tmp_path, capsys):
        path = tmp_path / "report.json"
        arguments = ["--model", tiny_folder, "--tasks", "local_choice,local_words", "--include-path", folder]
        arguments += ["--limit", "2", "--bits", "16", "--bits", "4", "--json", str(path)]
        assert main(["eval", *arguments]) == 0
        report = json.loads(path.read_text())
        assert report["tasks"] == ["local_choice", "local_words"]
        full, identity, ours = report["rows"]
        assert identity["scores"]["local_choice_shift"] == identity["scores"]["local_words_shift"] == 0.0
        assert full["scores"]["local_choice_acc"] == identity["scores"]["local_choice_acc"]
        assert ours["items"]["local_choice"][0]["documents"] == 2
        assert "local_choice acc" in capsys.readouterr().out
