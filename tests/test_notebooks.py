"""The notebooks: that they run from top to bottom with small sizes, and that what is committed is presentable."""

import base64
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import nbformat
import run_notebooks
from nbclient.exceptions import CellExecutionError

NOTEBOOKS = sorted(run_notebooks.FOLDER.glob("*.ipynb"))

# Sizes for one core and a few seconds; what else is asserted is asserted inside the notebooks.
SMALL = {
    "01_quickstart": {"CONTEXT": 320, "NEW_TOKENS": 8},
    "02_quality_against_bits": {
        "TOKENS": 384,
        "BITS": (16, 8, (8, 4), 4, (4, 2), 2),
        "PEERS": ("kivi-2",),
        "CONTEXT": 384,
        "DOCUMENTS": 1,
    },
    "03_memory_and_speed": {"CONTEXTS": (256, 512), "ROUNDS": 1, "MEASURED": 384},
    "04_write_your_own_format": {"CONTEXT": 260, "TOKENS": 384, "ROUNDS": 1},
}

# A number that each prints, and what it has to lie between.
PRINTED = {
    "01_quickstart": (r"([\d.]+) bits per number", 4, 32),
    "02_quality_against_bits": (r"a tenth of the tokens carries (\d+)% of the KL", 11, 100),
    "03_memory_and_speed": (r"4 bits are ([\d.]+) times as fast", 0, 1000),
    "04_write_your_own_format": (r"codebook 3 bit +KL ([\d.]+)", 0, 1),
}

# What tells where a notebook was run: files, users and addresses of objects.
TRACES = re.compile(r"/(home|root|tmp|usr|opt|work|Users)/|site-packages|[A-Z]:\\\\|\b0x[0-9a-f]{6,}|Traceback")


def written(notebook):
    """All text among the outputs."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    parts = [output.get("text", "") for output in outputs]
    parts += [text for output in outputs for kind, text in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(parts)


def images(notebook):
    """All figures among the outputs, as PNG files' bytes."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [base64.b64decode(output.data["image/png"]) for output in outputs if "image/png" in output.get("data", {})]


def test_there_are_small_sizes_for_every_notebook():
    assert [path.stem for path in NOTEBOOKS] == sorted(SMALL) == sorted(PRINTED)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as for all other tests, of which some may run beside it
    notebook = run_notebooks.read(path)
    found = run_notebooks.run(notebook, SMALL[path.stem])
    code = [cell for cell in found.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert len(images(found)) == len(images(notebook)) > 0
    pattern, low, high = PRINTED[path.stem]
    assert low < float(re.search(pattern, written(found))[1]) < high


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestCommitted:
    def test_has_the_outputs_of_one_whole_run(self, path):
        code = [cell for cell in run_notebooks.read(path).cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
        assert all(output.output_type != "error" for cell in code for output in cell.outputs)

    def test_begins_with_its_sizes(self, path):
        names = run_notebooks.names_set(run_notebooks.first_code_cell(run_notebooks.read(path)))
        assert names == {name for name in names if name.isupper()} >= SMALL[path.stem].keys()

    def test_is_small(self, path):
        assert path.stat().st_size < 400_000
        assert max(map(len, images(run_notebooks.read(path)))) < 100_000

    def test_tells_nothing_of_where_and_when_it_ran(self, path):
        notebook = run_notebooks.read(path)
        assert notebook == run_notebooks.tidy(notebook)
        assert TRACES.search(written(notebook)) is None


def notebook_of(*sources):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])


class TestRun:
    def test_a_cell_that_raises_is_told(self):
        with pytest.raises(CellExecutionError) as told:
            run_notebooks.run(notebook_of("TOKENS = 1", "assert TOKENS > 1, 'too few'"))
        assert (told.value.ename, told.value.evalue) == ("AssertionError", "too few")

    def test_sizes_replace_those_of_the_first_cell(self):
        found = run_notebooks.run(notebook_of("TOKENS = 1", "print(2 * TOKENS)"), {"TOKENS": 21})
        assert written(found) == "42\n"

    def test_a_size_that_the_first_cell_does_not_set_is_refused(self):
        with pytest.raises(ValueError, match="the first cell does not set CHUNKS"):
            run_notebooks.run(notebook_of("TOKENS, ROUNDS = 1, 2", "CHUNKS = 3"), {"CHUNKS": 1, "ROUNDS": 1})
