"""The executed study in results/mini: every number comes from a run that is there, and nothing of a machine is in it."""

import json
import re

import nbformat
import numpy as np
import pandas as pd
import pytest

from pumalib import paths, results, training

MINI = paths.ROOT / "results" / "mini"
TABLES = sorted(file for file in MINI.glob("*.csv") if "runs" in pd.read_csv(file, nrows=0))
NOTEBOOKS = [file for file in sorted(paths.NOTEBOOKS.glob("*.ipynb")) if not file.name.startswith("9")]


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.stem)
def test_every_number_of_a_table_is_the_mean_of_its_runs(file):
    table = pd.read_csv(file)
    for runs, lines in table.groupby("runs"):
        folders = [MINI / "runs" / name for name in runs.split()]
        again = results.collect({"row": folders}, "mini").tidy.set_index(["dataset", "metric"])
        for row, part in lines.groupby("row"):
            part = part.set_index(["dataset", "metric"])
            for column in ("value", "low", "high"):
                assert np.allclose(part[column], again.loc[part.index, column], atol=2e-5), f"{file.name}, {row}, {column}"


@pytest.mark.parametrize("template", NOTEBOOKS, ids=lambda file: file.stem)
def test_every_notebook_is_there_executed_small_and_of_no_machine(template):
    file = MINI / template.name
    executed = nbformat.read(file, as_version=4)
    cells = [cell for cell in executed.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in cells if cell.source) and file.stat().st_size < 2**20
    assert not [output for cell in cells for output in cell.outputs if output.output_type == "error"]
    text = json.dumps(executed)
    assert not re.search(r"/(home|root|work|tmp|Users)/", text), "a path of a machine"
    own = [cell.source for cell in cells if "injected-parameters" not in cell.metadata.get("tags", [])]
    source = [cell.source for cell in nbformat.read(template, as_version=4).cells if cell.cell_type == "code"]
    assert own == source, "executed from another version of the notebook: python -m pumalib run"


def test_runs_have_their_numbers_and_no_models_in_git():
    folders = list((MINI / "runs").iterdir())
    assert len(folders) > 200
    assert all((folder / name).is_file() for folder in folders for name in ("run.json", "environment.json", training.FINISHED))
