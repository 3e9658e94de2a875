"""`kvquant compare`: its exit codes, its reasons, and what it refuses to compare."""

from __future__ import annotations

import argparse
import copy
import json
from functools import partial

import pytest
from evaluation import evaluate

from kvquant import QuantCache
from kvquant.cli import main
from kvquant_evals.compare.limit import Amount, parse_amount, parse_increase
from kvquant_evals.settings import Settings
from kvquant_evals.tasks import needles, perplexity

ALL_IS_WELL = "nothing of ours is worse than allowed\n"


def column(title, score, is_relative=False):
    return {"title": title, "score": score, "spec": ".4f", "full": True, "is_relative": is_relative, "is_cost": False}


def row(label, kl, perplexity, retrieval, is_peer=False):
    scores = {"perplexity": perplexity, "kl_mean": kl, "kl_mean_low": 0.0, "kl_mean_high": 9.0, "top1": 0.98}
    scores |= {"retrieval": retrieval, "retrieval_512": retrieval, "bytes_per_token": 6000.0, "scored_tokens": 100}
    plain = {"label": label, "quant": None, "scores": scores, "items": {}, "failures": {}, "faults": {}}
    return plain | {"is_peer": is_peer}


def made():
    columns = [column("perplexity", "perplexity"), column("change", "perplexity", is_relative=True)]
    columns += [column("KL mean", "kl_mean"), column("needles @512", "retrieval_512")]
    return {
        "model": "m",
        "settings": {"tokens": 4096, "segments": 1, "chunk": 128, "seed": 0},
        "versions": {"kvquant": "0.1", "transformers": "5.4", "torch": "2.6", "python": "3.11"},
        "machine": {"processor": "x", "threads": 2},
        "tasks": ["perplexity", "needles"],
        "columns": columns,
        "is_complete": True,
        "rows": [
            row("full precision", 0.0, 10.0, 0.70),
            row("8 bit", 1e-5, 10.001, 0.70),
            row("4 bit", 0.002, 10.05, 0.68),
            row("peer 4", 0.01, 10.3, 0.60, is_peer=True),
        ],
    }


def changed(*path, value):
    """The made report with one thing changed."""
    plain = made()
    inner = plain
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return plain


@pytest.fixture
def compare(tmp_path, capsys):
    """Exit code, standard output and the lines on standard error."""

    def run(b, *options, a=None):
        for name, plain in (("a", a or made()), ("b", b)):
            (tmp_path / f"{name}.json").write_text(json.dumps(plain))
        code = main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json"), *options])
        out, err = capsys.readouterr()
        return code, out, [line.removeprefix("kvquant compare: ") for line in err.splitlines()]

    return run


FOUR, PEER = ("rows", 2, "scores"), ("rows", 3, "scores")


class TestAgainstBefore:
    def test_the_same_is_not_worse(self, compare):
        code, out, reasons = compare(made())
        assert (code, reasons) == (0, [])
        assert out.endswith(ALL_IS_WELL)
        assert "4 bit KL mean 0.002000 0.002000 +0.00% +10%" in [" ".join(line.split()) for line in out.splitlines()]

    def test_one_folder_is_not_worse_than_itself(self, tmp_path, capsys):
        (tmp_path / "report.json").write_text(json.dumps(made()))
        assert main(["compare", str(tmp_path), str(tmp_path)]) == 0
        assert capsys.readouterr().out.endswith(ALL_IS_WELL)

    @pytest.mark.parametrize(
        ("score", "value", "reason"),
        [
            ("kl_mean", 0.00219, None),
            ("kl_mean", 0.00221, "KL mean went from 0.002000 to 0.002210 (+10.50%), more than --max-kl-increase 10%"),
            ("kl_mean", float("nan"), "KL mean went from 0.002000 to nan (+nan%), more than --max-kl-increase 10%"),
            ("kl_mean", 0.0001, None),
            ("perplexity", 10.15, None),
            ("perplexity", 10.16,
             "perplexity went from 10.0500 to 10.1600 (+1.09%), more than --max-perplexity-increase 1%"),
            ("top1", 0.971, None),
            ("top1", 0.969, "top1 went from 98.00% to 96.90% (-0.011), more than --max-top1-decrease 0.01"),
            ("retrieval_512", 0.66, None),
            ("retrieval_512", 0.65,
             "needles @512 went from 0.680 to 0.650 (-0.03), more than --max-retrieval-decrease 0.02"),
            ("bytes_per_token", 6060.0, None),
            ("bytes_per_token", 6061.0,
             "bytes_per_token went from 6,000 to 6,061 (+1.02%), more than --max-bytes-increase 1%"),
            ("kl_mean_high", 99.0, None),
        ],
    )  # fmt: skip
    def test_what_got_worse_by_more_than_is_allowed(self, compare, score, value, reason):
        code, out, reasons = compare(changed(*FOUR, score, value=value))
        assert reasons == ([f"4 bit: {reason}"] if reason else [])
        assert code == (1 if reason else 0)
        assert out.count("worse than allowed\n") == 1  # the verdict of one line, or that of all
        assert out.endswith(ALL_IS_WELL) is (reason is None)

    @pytest.mark.parametrize(
        ("options", "code"),
        [
            (["--max-kl-increase", "50%"], 0),
            (["--max-kl-increase", "49%"], 1),
            (["--max-kl-increase", "0.001"], 0),
            (["--max-kl-increase", "0.0009"], 1),
        ],
    )
    def test_what_is_allowed_is_a_share_or_a_number(self, compare, options, code):
        assert compare(changed(*FOUR, "kl_mean", value=0.003), *options)[0] == code

    def test_rounding_is_not_worse(self, compare):
        # A quarter more than 1e-6, in what 10 % would not cover.
        b = changed("rows", 1, "scores", "kl_mean", value=1.2e-6)
        assert compare(b, a=changed("rows", 1, "scores", "kl_mean", value=8e-7))[0] == 0

    def test_peers_may_get_worse(self, compare):
        code, out, _ = compare(changed(*PEER, "kl_mean", value=0.5))
        assert code == 0
        assert "+4900.00%" in out

    def test_a_row_that_is_missing(self, compare):
        b = made()
        del b["rows"][2]
        assert compare(b)[::2] == (1, ["4 bit: is missing in B: it was evaluated without it"])
        assert compare(b, "--label", "8 bit")[0] == 0

    def test_a_score_that_is_missing(self, compare):
        b = made()
        del b["rows"][2]["scores"]["kl_mean"]
        del b["rows"][3]["scores"]["kl_mean"]
        assert compare(b)[::2] == (1, ["4 bit: has no KL mean, which in A is 0.002000"])

    def test_rows_and_scores_that_are_new_are_shown(self, compare):
        b = made()
        b["rows"].append(row("2 bit", 0.06, 11.0, 0.3))
        b["rows"][2]["scores"]["retrieval_1024"] = 0.1
        code, out, _ = compare(b)
        assert code == 0
        assert "2 bit " in out
        assert "retrieval_1024" in out

    def test_a_broken_cache_is_worse_and_so_is_one_that_packed_nothing(self, compare):
        b = changed("rows", 2, "faults", value={"perplexity": "mean KL 1.30 nats"})
        assert compare(b, a=b)[::2] == (1, ["4 bit: is broken, says perplexity: mean KL 1.30 nats"])
        b = changed("rows", 2, "quant", value={})
        b["rows"][2]["is_untested"] = True
        assert compare(b)[::2] == (1, ["4 bit: packed nothing, so that its scores say nothing"])
        assert compare(changed("rows", 3, "faults", value={"perplexity": "mean KL 1.30 nats"}))[0] == 0


class TestLimits:
    @pytest.mark.parametrize(
        ("options", "reasons"),
        [
            (["--max-kl", "0.002"], []),
            (["--max-kl", "0.0019"], ["4 bit: KL mean 0.002000 is beyond --max-kl 0.0019"]),
            (["--max-kl", "0.000001", "--label", "8 bit"], ["8 bit: KL mean 0.000010 is beyond --max-kl 1e-06"]),
            (["--max-perplexity", "0.5%"], []),
            (
                ["--max-perplexity", "0.4%"],
                ["4 bit: perplexity 10.0500 is beyond --max-perplexity 0.4%, from full precision's 10.0000"],
            ),
            (["--max-perplexity", "0.05"], []),
            (["--max-perplexity", "0.04"], ["4 bit: perplexity 10.0500 is beyond --max-perplexity 0.04, "
                                            "from full precision's 10.0000"]),
            (["--min-top1", "98%"], []),
            (["--min-top1", "0.99", "--label", "4 bit"], ["4 bit: top1 98.00% is beyond --min-top1 0.99"]),
            (["--min-retrieval", "-0.02"], []),
            (["--min-retrieval", "-0.01"], [
                "4 bit: retrieval 0.680 is beyond --min-retrieval -0.01, from full precision's 0.700",
                "4 bit: needles @512 0.680 is beyond --min-retrieval -0.01, from full precision's 0.700",
            ]),
        ],
    )  # fmt: skip
    def test_limits_are_for_every_row_of_ours_in_b(self, compare, options, reasons):
        code, _, found = compare(made(), *options)
        assert found == reasons
        assert code == (1 if reasons else 0)

    def test_a_limit_for_a_score_that_is_not_there_is_not_kept(self, compare):
        b = made()
        del b["rows"][2]["scores"]["kl_mean"]
        assert compare(b, "--max-kl", "1", a=b)[::2] == (1, ["4 bit: has no KL mean, for which there is a limit"])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--max-kl", "many"], "argument --max-kl: 'many' is neither a number as 0.003 nor a share as 1%"),
            (["--max-kl", "nan"], "'nan' is neither a number"),
            (["--max-kl-increase=-1%"], "'-1%' is negative; give by how much it may get worse"),
            (["--min-retrieval", "0.9"], "min-retrieval 0.9 is relative to full precision; use one as -0.02, or 0"),
            (["--max-kl", "1%"], "max-kl 1% is in nats, of which there is no share; use one as 0.003"),
            (["--label", "5 bit"], "label '5 bit' is in neither; there are 'full precision', '8 bit', '4 b"),
        ],
    )  # fmt: skip
    def test_bad_options_are_one_line(self, compare, capsys, options, message):
        try:
            code, _, lines = compare(made(), *options)
        except SystemExit as error:
            code, lines = error.code, capsys.readouterr().err.splitlines()
        assert code == 2
        assert len(lines) == 1
        assert message in lines[0]

    def test_amounts(self):
        assert parse_amount("-2%") == Amount(-0.02, is_share=True)
        assert parse_amount("1e-3") == Amount(0.001)
        assert (str(parse_amount("12.5%")), str(parse_amount("0.02"))) == ("12.5%", "0.02")
        assert parse_increase("0") == Amount(0.0)
        for text in ("", "%", "inf", "1 %x"):
            with pytest.raises(argparse.ArgumentTypeError):
                parse_amount(text)


class TestWhatCannotBeCompared:
    @pytest.mark.parametrize(
        ("b", "message"),
        [
            (changed("model", value="n"), "A and B cannot be compared: model is m in A and n in B; use --force"),
            (changed("settings", "tokens", value=512), "settings.tokens is 4096 in A and 512 in B"),
            (changed("tasks", value=["perplexity"]), "B lacks the tasks needles"),
            (changed("dtype", value="bfloat16") | {"model": "n"}, "model is m in A and n in B; use"),
            (changed("is_complete", value=False), "is unfinished, so that its scores are of fewer items"),
        ],
    )
    def test_other_conditions_are_refused_unless_forced(self, compare, b, message):
        code, out, lines = compare(b)
        assert (code, out, len(lines)) == (2, "", 1)
        assert message in lines[0]
        assert compare(b, "--force")[0] == 0

    def test_conditions_that_only_one_of_them_tells_are_no_difference(self, compare):
        assert compare(changed("settings", "batches", value=[1, 4]))[0] == 0
        assert compare(changed("dtype", value="bfloat16"))[0] == 0
        code, _, lines = compare(changed("dtype", value="bfloat16"), a=changed("dtype", value="float32"))
        assert code == 2
        assert "dtype is float32 in A and bfloat16 in B" in lines[0]

    def test_other_versions_are_told_and_compared(self, compare):
        code, out, _ = compare(changed("versions", "torch", value="2.9"))
        assert code == 0
        assert "also different: torch is 2.6 in A and 2.9 in B\n" in out

    def test_a_file_that_is_no_report_is_named(self, tmp_path, capsys):
        (tmp_path / "report.json").write_text(json.dumps(made()))
        assert main(["compare", str(tmp_path), str(tmp_path / "x.json")]) == 2
        assert capsys.readouterr().err.startswith(f"kvquant compare: B '{tmp_path / 'x.json'}' cannot be read: ")


def test_markdown(compare):
    out = compare(made(), "--markdown")[1]
    assert "| 4 bit | KL mean | 0.002000 | 0.002000 | +0.00% | +10% |  |\n" in out


@pytest.mark.broad
def test_a_real_evaluation_is_as_good_as_itself_and_better_than_one_with_fewer_bits(tiny, compare):
    settings = Settings(tokens=200, chunk=32, skip=40, offset=100, needles=2, contexts=(160,), documents=1)
    pages = {"sinks": 2, "residual_length": 5, "page_size": 8}
    reports = [
        evaluate(tiny, [perplexity.TASK, needles.TASK], settings, {"ours": partial(QuantCache, bits=bits, **pages)})
        for bits in (8, 4)
    ]
    good, coarse = (json.loads(json.dumps(report.to_dict())) for report in reports)
    assert compare(copy.deepcopy(good), a=good)[0] == 0
    code, _, reasons = compare(coarse, a=good)
    assert code == 1
    assert any(reason.startswith("ours: KL mean went from ") for reason in reasons)
    # In the other direction memory got worse; perplexity of random weights goes either way.
    _, _, reasons = compare(good, "--max-perplexity-increase", "100%", a=coarse)
    assert [reason.split(" went")[0] for reason in reasons] == ["ours: bytes/token"]
