"""Runs the notebooks from top to bottom, each in a process of its own. `--write` keeps their outputs in the files."""

from __future__ import annotations

import argparse
import ast
import copy
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parents[1] / "notebooks"
SECONDS = 600  # that a cell may take

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def run(notebook: NotebookNode, sizes: Mapping[str, Any] | None = None) -> NotebookNode:
    """A copy of the notebook with the outputs of a run in a fresh process.

    sizes: other values for names of its first cell, by name.
    Raises CellExecutionError, naming the cell, if one raises; ValueError for a name that the first cell does not set.
    """
    notebook = copy.deepcopy(notebook)
    if sizes:
        first = first_code_cell(notebook)
        first.source = "\n".join([first.source, *(f"{name} = {value!r}" for name, value in _known(first, sizes))])
    client = NotebookClient(
        notebook, timeout=SECONDS, record_timing=False, resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()
    return tidy(notebook)


def tidy(notebook: NotebookNode) -> NotebookNode:
    """A copy without what differs from one machine to the next though the results are the same, and without what was
    written to standard error: progress, and warnings with the paths of files.
    """
    notebook = copy.deepcopy(notebook)
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def first_code_cell(notebook: NotebookNode) -> NotebookNode:
    """The cell that holds the sizes."""
    return next(cell for cell in notebook.cells if cell.cell_type == "code")


def names_set(cell: NotebookNode) -> set[str]:
    """The names that a cell assigns to."""
    targets = (node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Name))
    return {node.id for node in targets if isinstance(node.ctx, ast.Store)}


def _known(first: NotebookNode, sizes: Mapping[str, Any]) -> list[tuple[str, Any]]:
    unknown = sizes.keys() - names_set(first)
    if unknown:
        raise ValueError(f"the first cell does not set {', '.join(sorted(unknown))}")
    return list(sizes.items())


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="notebooks, by the beginnings of their names (default: all)")
    parser.add_argument("--write", action="store_true", help="keep the outputs in the files")
    options = parser.parse_args(arguments)
    for path in sorted(FOLDER.glob("*.ipynb")):
        if options.names and not path.name.startswith(tuple(options.names)):
            continue
        begin = time.perf_counter()
        found = run(read(path))
        sys.stdout.write(f"{path.name}: {time.perf_counter() - begin:.0f} s\n")
        if options.write:
            path.write_text(nbformat.writes(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
