"""A stranger adds a loss, a method, a benchmark and a notebook, each in one file and one entry.

All four are added to a copy of the project, in which another stranger added four before.  There
each of them trains at smoke size, notebooks compare them, and nothing else changes: no kept run
gets another name, no method another colour, and the tests that walk the tables stay green.
"""

import json
import os
import re
import shutil
from pathlib import Path

import forks
import nbformat
import pytest
from test_parts import IA3

from puma_study import figures
from pumalib import paths

LOSS = '''"""The logistic loss over pairs."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import mean_of_nonzero
from .pair import PairLoss


class Logistic(PairLoss):
    """Mean softplus of -+ scale (s - centre) over all pairs of a batch."""

    def __init__(
        self,
        num_classes: int | None = None,
        dim: int | None = None,
        *,
        scale: float = 10.0,
        centre: float = 0.5,
    ) -> None:
        super().__init__(num_classes, dim)
        self.scale = scale
        self.centre = centre

    def pairs(self, a: Tensor, b: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        """The loss of anchors a (N, D) and others b (M, D)."""
        z = self.scale * (a @ b.T - self.centre)
        terms = F.softplus(torch.where(positive, -z, z))
        return mean_of_nonzero(terms * (positive | negative))
'''

METHOD = '''"""Scale and shift of what each branch gives (Lian et al., NeurIPS 2022)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import parts


@dataclass(frozen=True)
class Settings:
    """Of scale and shift."""

    start: float = 0.0  # of the scales, 0 changes nothing


class Part(parts.Part):
    """One scale and one shift for each feature of each branch."""

    def __init__(self, settings: Settings, shapes: parts.Shapes) -> None:
        super().__init__()
        shape = (shapes.layers, len(parts.BRANCHES), shapes.width)
        self.scale = nn.Parameter(torch.full(shape, settings.start))
        self.strength = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(shape))

    def addition(
        self, layer: int, branch: str, h: Tensor, out: Tensor, gates: Tensor | None
    ) -> Tensor:
        """What to add to a branch: its output (B, N, D) scaled and shifted."""
        place = parts.BRANCHES.index(branch)
        scale = self.strength * self.scale[layer, place]
        return out * scale + self.shift[layer, place]
'''

BENCHMARK = '''"""Plain squares of many colours: a benchmark with a reader of its own."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from .table import Benchmark, Reader


def load(root: str | Path | None = None, datasets: Sequence[str] | None = None) -> Benchmark:
    """Two datasets of eight colours, four squares each; half of the colours are for training."""
    rng = np.random.default_rng(0)
    rows = []
    pixels = []
    for dataset in ("bright", "dark"):
        for number in range(8):
            colour = rng.integers(40, 215, 3)
            for _ in range(4):
                noise = rng.integers(-40, 40, (48, 48, 3))
                split = "train" if number < 4 else "test"
                rows.append((len(rows), f"colour {number}", dataset, split))
                pixels.append((colour + noise).astype(np.uint8))
    images = pd.DataFrame(rows, columns=["path", "class_name", "dataset", "split"])
    images["label"] = images.groupby(["dataset", "class_name"], sort=False).ngroup()
    return Benchmark("squares", images, pixels=np.stack(pixels)).select(datasets)


READER = Reader(load)
'''

PROFILE = """
data: {benchmark: squares, image_size: 48}
backbone: mini_vit
pretrained: embedded
dim: 16
training: {epochs: 1, batch_size: 8}
"""

# file: (above which line, the first that begins so, the entry)
ENTRIES = {
    "pumalib/losses/__init__.py": [
        ("from .pair import", "from .logistic import Logistic"),
        ('    "contrastive": Contrastive,', '    "logistic": Logistic,'),
    ],
    "pumalib/config/methods.py": [
        ('    Method("pretrained"', '    Method("scale-shift", part="scale_shift"),'),
    ],
    "pumalib/data/readers.py": [
        ("from . import", "from . import squares"),
        ('    "mini": mini.READER,', '    "squares": squares.READER,'),
    ],
}
FILES = {
    "pumalib/losses/logistic.py": LOSS,
    "pumalib/models/scale_shift.py": METHOD,
    "pumalib/data/squares.py": BENCHMARK,
    "notebooks/profiles/squares.yaml": PROFILE,
}

# Additions of the same kinds, made earlier, with other names.
EARLIER_ENTRIES = {
    "pumalib/losses/__init__.py": [
        ("from .hyperbolic import", "from .circle import Circle"),
        ('    "contrastive": Contrastive,', '    "circle": Circle,'),
    ],
    "pumalib/config/methods.py": [
        ('    Method("pretrained"', '    Method("ia3", part="ia3"),'),
    ],
    "pumalib/data/readers.py": [
        ('    "mini": mini.READER,', '    "csv_table": csv_table.READER,'),
    ],
}
EARLIER_FILES = {
    "pumalib/losses/circle.py": LOSS.replace("Logistic", "Circle"),
    "pumalib/models/ia3.py": IA3.lstrip(),
    "pumalib/data/csv_table.py": BENCHMARK.replace("squares", "csv_table"),
}

# All in one process: importing takes longer than the work itself.
PROGRAM = """
import contextlib
import io
import json

import forks
from jupyter_client.provisioning import local_provisioner

import pumalib
from pumalib import config
from puma_study import figures
from puma_study.__main__ import main

local_provisioner.launch_kernel = forks.Kernel


# The status of a command and what it prints.
def called(*arguments):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = main(list(arguments))
    return status, printed.getvalue().strip()


folders = [
    pumalib.train("smoke", "scale-shift"),
    pumalib.train("smoke", "linear", loss="logistic"),
    pumalib.train("squares", "linear"),
    pumalib.train("smoke", "ia3", inner=False),
]
given = ["--profile", "smoke", "-p"]
found = {
    "folders": [str(folder) for folder in folders],
    "verified": called("runs", "verify"),
    "planned": [
        called("run", "05", "--plan", *given, "losses=[circle]"),
        called("run", "21", "29", "--plan", *given, "losses_=[circle]"),
    ],
    "executed": called("run", "80", *given, "methods=[linear, ia3]"),
    "styles": {name: figures.styles_of([name])[name] for name in config.METHODS},
}
print(json.dumps(found))
"""
WALKING = [
    "tests/test_config.py",
    "tests/test_house.py",
    "tests/test_losses.py",
    "tests/test_notebooks.py::test_template",
    "tests/test_findings.py::test_a_notebook_opens_with_its_finding_and_ends_with_it",
    "tests/test_training.py::test_every_parameter_of_a_loss_has_a_gradient",
    "tests/test_models.py::test_every_method_trains_what_it_says_and_evaluates_alike_twice",
    "tests/test_models.py::test_unknown_names_and_impossible_methods",
]
# Of what is tested for each loss or each method those that are new: the others are tested here.
NEW = "logistic or circle or scale-shift or ia3"
CHOSEN = f"{NEW} or defaults or not (test_losses or every_parameter or every_method)"


def add_entry(file: Path, above: str, line: str) -> None:
    lines = file.read_text("utf-8").splitlines(keepends=True)
    place = next(number for number, other in enumerate(lines) if other.startswith(above))
    lines.insert(place, f"{line}\n")
    file.write_text("".join(lines), "utf-8")


def add(home: Path, files: dict, entries: dict) -> None:
    for name, content in files.items():
        (home / name).write_text(content, "utf-8")
    for name, of_file in entries.items():
        for above, line in of_file:
            add_entry(home / name, above, line)


def named(notebook: Path, original: str, name: str) -> None:
    """Name a copy of a notebook after itself."""
    text = notebook.read_text("utf-8")
    assert f'notebook = \\"{original}\\"' in text
    changed = text.replace(f'notebook = \\"{original}\\"', f'notebook = \\"{name}\\"')
    notebook.write_text(changed, "utf-8")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project, with the four additions."""
    home = tmp_path_factory.mktemp("copy") / "project"
    unneeded = shutil.ignore_patterns(
        ".*", "*.egg-info", "build", "cache", "raw", "runs", "*.png.*", "__pycache__"
    )
    for name in ("pumalib", "puma_study", "tools", "notebooks", "tests", "data", "results", "docs"):
        shutil.copytree(paths.ROOT / name, home / name, ignore=unneeded)
    for name in ("pyproject.toml", "conftest.py", ".gitignore"):
        shutil.copy(paths.ROOT / name, home)

    # As ruff sorts it: in the line of the others.
    readers = home / "pumalib" / "data" / "readers.py"
    text = readers.read_text("utf-8")
    readers.write_text(text.replace("from . import ", "from . import csv_table, ", 1), "utf-8")
    shutil.copy(
        home / "notebooks" / "18_training_length.ipynb", home / "notebooks" / "81_other.ipynb"
    )
    named(home / "notebooks" / "81_other.ipynb", "training_length", "other")

    add(home, EARLIER_FILES, EARLIER_ENTRIES)
    add(home, FILES, ENTRIES)
    # A copied notebook whose name was not changed.
    original = home / "notebooks" / "06_adaptation_methods.ipynb"
    shutil.copy(original, home / "notebooks" / "80_mine.ipynb")
    return home


@pytest.fixture(scope="module")
def python(project):
    """Run a program in the copy, with its own package and results, and return what it prints.

    Only the current folder says which package it is, as for whoever has two checkouts and one
    environment.
    """
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PUMALIB_")
    }
    environment.pop("PYTHONPATH", None)

    def run(text: str) -> str:
        done = forks.run(text, project, environment)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    return run


@pytest.fixture(scope="module")
def found(python, project):
    """What `PROGRAM` found in the copy, where a table of the copied notebook's original lies."""
    original = project / "results" / "smoke" / "adaptation_methods.csv"
    original.parent.mkdir(parents=True, exist_ok=True)
    original.write_text("row,runs\n")
    return json.loads(python(PROGRAM).splitlines()[-1])


def test_each_trains(found, project):
    folders = found["folders"]
    assert [Path(folder).name.rpartition("-")[0] for folder in folders] == [
        "scale-shift-curricularface",
        "linear-logistic",
        "linear-curricularface",
        "ia3-curricularface",
    ]
    for folder in folders:
        record = json.loads((Path(folder) / "metrics.json").read_text())
        assert Path(folder).is_relative_to(project)
        assert record["table"][-1]["dataset"] == "harmonic"
        assert record["parameters"]["trainable"] > 0


@pytest.fixture(scope="module")
def executed(found, project):
    """The copied notebook, executed with both methods."""
    status, printed = found["executed"]
    assert status == 0, printed
    return nbformat.read(project / "results" / "smoke" / "80_mine.ipynb", 4)


def test_a_copied_notebook_writes_under_its_own_name(executed, project):
    results = project / "results" / "smoke"
    assert (results / "adaptation_methods.csv").read_text() == "row,runs\n"
    assert (results / "mine.csv").is_file()
    assert not [o for cell in executed.cells for o in cell.get("outputs", []) if "error" in o]


def test_no_kept_run_changes_its_name(found):
    assert found["verified"] == [0, "no problem"]


def test_no_method_changes_its_colour(found):
    there = found["styles"]
    assert "scale-shift" in there
    for name, style in there.items():
        if name not in ("scale-shift", "ia3"):
            # As JSON has it: tuples within are lists.
            assert style == json.loads(json.dumps(figures.styles_of([name])[name]))


def test_a_loss_is_planned_by_the_notebooks(found):
    for notebooks, (status, printed) in zip((["05"], ["21", "29"]), found["planned"]):
        assert status == 0, printed
        runs = {line.split()[0][:2]: line.split()[1] for line in printed.splitlines() if line}
        assert all(int(runs[number]) > 1 for number in notebooks), printed


def test_a_method_is_in_each_table_of_methods(executed):
    tables = [
        output.data["text/html"]
        for cell in executed.cells
        for output in cell.get("outputs", [])
        if "text/html" in output.get("data", {})
    ]
    with_rows = [html for html in tables if "Linear Emb." in html or "Linear embedding" in html]
    assert len(with_rows) >= 3
    assert all("ia3" in html for html in with_rows)


def test_the_tests_that_walk_the_tables_stay_green(python, project):
    # A copy is named after itself by whoever keeps it; `run` does so anyway.
    named(project / "notebooks" / "80_mine.ipynb", "adaptation_methods", "mine")
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "-k", CHOSEN, *WALKING]
    said = python(f"import sys, pytest\nsys.exit(pytest.main({arguments!r}))")
    (passed,) = re.findall(r"(\d+) passed", said)
    assert int(passed) > 150
