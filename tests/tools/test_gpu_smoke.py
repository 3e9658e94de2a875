"""`make gpu` from end to end at tiny sizes, in Triton's interpreter."""

import itertools
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

pytestmark = pytest.mark.xdist_group("gpu smoke")  # so that one process runs all tests, and the script once

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of a run, and the folder that they are in."""
    folder = tmp_path_factory.mktemp("gpu")
    command = [sys.executable, ROOT / "tools" / "gpu" / "run.py", "--smoke", "--json", folder / "gpu.json"]
    done = subprocess.run([*command, "--seconds", "600"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "gpu.json").read_text()), folder


@pytest.fixture(autouse=True)
def _path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


@pytest.mark.broad
def test_every_part_comes_to_its_end(found):
    parts = found[0]["parts"]
    assert list(parts) == ["correctness", "kernels", "decoding", "launch"]
    for part in parts.values():
        assert part["results"]
        assert (part["failed"], part["skipped"], part["running"], part["deaths"]) == ({}, {}, None, [])


@pytest.mark.broad
def test_tests_and_checks_are_counted(found):
    tests = found[0]["parts"]["correctness"]["results"]["tests"]
    assert (tests["passed"], tests["failed"], tests["unfinished"]) == (2, 0, [])
    assert len(tests["checks"]) == 5
    assert all(check["passed"] for check in tests["checks"].values())


@pytest.mark.broad
def test_numbers_say_what_they_were_measured_on(found):
    data = found[0]
    assert data["machine"]["versions"]["torch"]
    cells = [unit for unit in data["parts"]["kernels"]["results"].values() if "batch" in unit]
    assert len(cells) == 8
    for cell in cells:
        assert {"shape", "batch", "context", "rounds"} <= cell.keys()
        for row in cell["rows"]:
            assert row["is_finite"]
            assert row["graph"]["repetitions"] >= 1
            assert row["graph"]["microseconds"] > 0
    assert all(row["relative_error"] < 1e-2 for row in cells[0]["rows"])


@pytest.mark.broad
def test_plots_lie_beside_the_results(found):
    names = {path.name for path in found[1].iterdir()}
    assert names == {"gpu.json", "gpu_ratio.png", "gpu_bandwidth.png", "gpu_decoding.png"}


def units(*names, run=lambda: {"passed": True}, seconds=0.0):
    from gpu.work import Unit

    return [Unit(name, run, seconds) for name in names]


def results_at(path):
    from gpu.results import Results

    return Results(path / "gpu.json")


def test_what_fails_is_noted_and_the_next_unit_runs(tmp_path):
    from gpu.work import run_units

    def failing():
        raise RuntimeError("out of everything")

    results = results_at(tmp_path)
    run_units([*units("first", run=failing), *units("second")], "kernels", results, time.time() + 60)
    section = results_at(tmp_path).section("kernels")
    assert "out of everything" in section["failed"]["first"]
    assert section["results"]["second"]["passed"]


def test_units_without_time_are_skipped_by_name(tmp_path):
    from gpu.work import run_units

    results = results_at(tmp_path)
    run_units([*units("long", seconds=90.0), *units("short")], "kernels", results, time.time() + 60)
    assert results.section("kernels")["skipped"] == {"long": "no time left"}
    assert list(results.section("kernels")["results"]) == ["short"]


def test_a_second_process_goes_on_behind_the_unit_that_ended_the_first(tmp_path):
    from gpu.work import run_units

    results, ran = results_at(tmp_path), []
    results.section("kernels")["results"]["first"] = {"passed": True}
    results.section("kernels")["running"] = "second"
    results.write()
    again = results_at(tmp_path)
    todo = units("first", "second", "third", run=lambda: ran.append(1) or {})
    run_units(todo, "kernels", again, time.time() + 60)
    assert len(ran) == 1
    assert again.section("kernels")["failed"] == {"second": "the process ended"}
    assert list(again.section("kernels")["results"]) == ["first", "third"]


def test_flashinfer_is_given_the_same_states(monkeypatch):
    """With a stand-in for the package, which needs a GPU."""
    import torch
    from gpu import contenders, packed
    from gpu.plan import Shape

    class Wrapper:
        def __init__(self, workspace, kv_layout, use_tensor_cores):
            assert (kv_layout, use_tensor_cores) == ("HND", True)

        def plan(self, indptr, indices, last_page_len, *shape, sm_scale, q_data_type, kv_data_type):
            self.indptr, self.indices, self.scale = indptr.tolist(), indices.long(), sm_scale
            assert shape == (4, 2, 64, contenders.FLASHINFER_PAGE)

        def run(self, query, pages):
            rows = [self.indices[first:last] for first, last in itertools.pairwise(self.indptr)]
            key, value = (torch.stack([part[row].transpose(0, 1).flatten(1, 2) for row in rows]) for part in pages)
            return packed.plain_attention(query.unsqueeze(2), key, value, self.scale).squeeze(2)

    fake = types.SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", fake)
    states = contenders.Bf16States(Shape("tiny", 4, 2, 64), 3, 48, torch.device("cpu"))
    contender = states.makers(0.0)[contenders.FLASHINFER]()
    torch.testing.assert_close(contender.run(), contender.definition())


def test_numbers_that_json_lacks_become_strings(tmp_path):
    results = results_at(tmp_path)
    results.data["error"] = [float("nan"), float("inf"), 1.5]
    results.write()
    assert json.loads((tmp_path / "gpu.json").read_text()) == {"error": ["nan", "inf", 1.5]}


def test_without_a_gpu_nothing_is_overwritten(tmp_path):
    path = tmp_path / "gpu.json"
    path.write_text("{}")
    command = [sys.executable, ROOT / "tools" / "gpu" / "run.py", "--json", path]
    done = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.strip() == "torch sees no GPU; --smoke does without"
    assert path.read_text() == "{}"
