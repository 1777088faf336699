"""examples/notebooks: a kernel of Jupyter shows what the files show, and marimo runs each as a program."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import subprocess
import symtable
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.program_template import executed
from tests.rows import rows

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))
SHORTEST = "first_mesh.ipynb"
PROGRAM_SECONDS = 100.0

NOTEBOOKS = [pytest.param(name, marks=[pytest.mark.torch] if name == "tensors.ipynb" else []) for name in NAMES]
OTHERS = [one for one in NOTEBOOKS if one.values != (SHORTEST,)]
each_notebook = pytest.mark.parametrize("name", NOTEBOOKS)

VARIES = re.compile(r"(?<=pid )\d+( on [\w.-]+)?|(?<=after )[\d.]+(?= s\n)")
"""Process ids, names of hosts and random delays of restarts."""


def cells_of(name: str) -> list[Any]:
    """Return the cells of a notebook that hold code."""
    return [cell for cell in json.loads((FOLDER / name).read_text())["cells"] if cell["cell_type"] == "code"]


def shown(cells: list[Any]) -> list[dict[str, str]]:
    """Return the texts below each cell, joined by stream. Tables of HTML hold the same as their text."""
    found = []
    for cell in cells:
        texts: dict[str, str] = {}
        for output in cell["outputs"]:
            key = output.get("name", output["output_type"])
            text = output.get("text") or output["data"]["text/plain"]
            texts[key] = texts.get(key, "") + VARIES.sub("...", "".join(text))
        found.append(texts)
    return found


@each_notebook
@pytest.mark.real
def test_notebook_shows_what_its_file_shows(name: str, tmp_path: Path) -> None:
    """Where the results have changed, run the notebook in Jupyter, and save it."""
    from tests.blocking.test_notebooks import client_of, nbformat  # which skips what is not installed

    notebook = nbformat.read(FOLDER / name, as_version=4)
    asyncio.run(client_of(notebook, tmp_path).async_execute())
    assert shown([cell for cell in notebook.cells if cell.cell_type == "code"]) == shown(cells_of(name))


@rows("name", NAMES)
def test_each_name_is_bound_in_one_cell(name: str) -> None:
    """marimo refuses other notebooks. Names that begin with an underscore are local to their cells there."""
    bound = Counter[str]()
    for cell in cells_of(name):
        table = symtable.symtable("".join(cell["source"]), name, "exec")
        bound.update(one.get_name() for one in table.get_symbols() if one.is_assigned() or one.is_imported())
    assert len(bound) > 5
    assert [one for one, times in bound.items() if times > 1 and not one.startswith("_")] == []


@pytest.mark.parametrize(
    "name", [SHORTEST, *(pytest.param(*one.values, marks=[*one.marks, pytest.mark.stress]) for one in OTHERS)]
)
@pytest.mark.real
@pytest.mark.skipif(importlib.util.find_spec("marimo") is None, reason="marimo is not installed")
def test_marimo_runs_it_in_the_order_of_its_names(name: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    subprocess.run([sys.executable, "-m", "marimo", "convert", FOLDER / name, "-o", program], check=True)
    done = executed(program, cwd=tmp_path, seconds=PROGRAM_SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "".join(texts.get("stdout", "") for texts in shown(cells_of(name)))
