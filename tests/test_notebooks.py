"""Every notebook is a template that papermill and nbval can run: one parameters cell of literals, no outputs."""

import ast
import json

import papermill
import pytest

from pumalib import paths

NOTEBOOKS = sorted(paths.NOTEBOOKS.glob("*.ipynb"))


def code_cells(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return notebook, [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_template(path):
    notebook, cells = code_cells(path)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells), "store notebooks without outputs"
    tagged = [cell for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1 and tagged[0] is cells[0], "one cell tagged parameters, before all other code"
    source = "".join(tagged[0]["source"])
    values = {}
    for statement in ast.parse(source).body:
        assert isinstance(statement, ast.Assign), "only assignments among the parameters"
        values[statement.targets[0].id] = ast.literal_eval(statement.value)
    assert values["profile"] == "smoke"
    assert all("#" in line for line in source.splitlines() if line.strip()), "each parameter has a comment"
    assert any("assert " in "".join(cell["source"]) for cell in cells), "a green run must not be an empty one"
    for cell in cells:
        ast.parse("".join(cell["source"]))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_papermill_knows_every_parameter_and_its_help(path, caplog):
    _, cells = code_cells(path)
    names = {statement.targets[0].id for statement in ast.parse("".join(cells[0]["source"])).body}
    found = papermill.inspect_notebook(str(path))
    assert set(found) == names and all(parameter["help"] for parameter in found.values())
    assert "Unable to parse" not in caplog.text
