"""Every notebook is a template, and `python -m puma_study run` runs it.

It refuses before it starts, plans without training, keeps successes.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from PIL import Image

import puma_study as study
from puma_study import notebooks
from puma_study.__main__ import main, run
from pumalib import config, paths

# Every folder of results that is in git but for its tables of speed.
IGNORED = (paths.ROOT / ".gitignore").read_text(encoding="utf-8")
KEPT = [
    paths.ROOT / "results" / name
    for name in re.findall(r"^!results/([\w-]+)/$", IGNORED, re.MULTILINE)
    if name != "bench"
]
TEMPLATES = sorted(paths.NOTEBOOKS.glob("[0-9]*.ipynb"))
PARAMETERS = 'profile = "smoke"  # name\noverrides = {}  # fields\n'
# Notebooks that read kept tables, or write elsewhere by hand too: 17 what it counts, 22 the texts
# of which its runs are named, 24 the index of a folder, 90 and 92 what they are there to make.
BESIDE_THE_KEPT = (
    "17_claims",
    "22_language_guidance",
    "24_search_your_images",
    "90_pretrain_mini_backbone",
    "92_speed",
)
P = (
    "from pumalib import config\n"
    "import puma_study as study\n"
    "p = config.profile(profile, **overrides, pretrained='random', "
    "datasets=['photos', 'aircraft'], image_size=48)\n"
)


def tags(cell):
    return cell.metadata.get("tags", [])


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.stem)
def test_template(file):
    notebook = nbformat.read(file, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert notebook.metadata["kernelspec"]["name"] == "python3"
    assert not any(cell.outputs or cell.execution_count for cell in cells), (
        "store notebooks without outputs"
    )
    parameters = [cell for cell in cells if "parameters" in tags(cell)]
    assert len(parameters) == 1 and parameters[0] is cells[0], (
        "one cell tagged parameters, before all other code"
    )
    values = {
        s.targets[0].id: ast.literal_eval(s.value) for s in ast.parse(parameters[0].source).body
    }
    assert values.get("notebook", notebooks.title(file)) == notebooks.title(file), (
        "name it after itself"
    )
    assert values.get("overrides", {}) == {}
    if "profile" in values:
        # What a reader opens has numbers; conftest.py tests it at `smoke`, by these words.
        is_tool = file.stem.startswith("9")
        assert values["profile"] == "mini" or (is_tool and values["profile"] == "smoke")
        assert f'profile = "{values["profile"]}"' in parameters[0].source
    rows = [number for number, cell in enumerate(cells) if "rows" in tags(cell)]
    asks = [number for number, cell in enumerate(cells) if "run_all(" in cell.source]
    assert not asks or (len(rows) == 1 and rows[0] < asks[0]), (
        "one cell tagged rows, before run_all"
    )
    planned = cells[: rows[0] + 1] if rows else []
    for cell in planned:
        assert not re.search(r"written_whole|cached_table\(|\.save\(|save_table\(", cell.source), (
            "--plan executes the cells up to the rows, and must leave results/ as they are"
        )
    if any("paths.RESULTS" in cell.source for cell in cells):
        assert file.stem in BESIDE_THE_KEPT, "write to study.store.output_folder(profile)"
    assert any("assert " in cell.source for cell in cells), "a green run must not be an empty one"
    for cell in cells:
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Assert):
                assert node.msg is not None, f"say what is wrong: {ast.unparse(node)}, <message>"
    assert "jupyter" not in parameters[0].metadata, "parameters are seen: do not fold them"
    for cell in cells:
        if cell.source.startswith(("import ", "from ")) and "rows" not in tags(cell):
            assert cell.metadata["jupyter"] == {"source_hidden": True}, (
                "fold imports: in JupyterLab, View > Collapse Selected Code"
            )


@pytest.mark.parametrize(
    "file", [file for home in KEPT for file in sorted(home.glob("*.csv"))], ids=paths.shown
)
def test_every_number_of_a_committed_table_is_the_mean_of_its_kept_runs(file, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", paths.ROOT / "results")
    table = pd.read_csv(file)
    for runs, lines in table.groupby("runs") if {"runs", "metric", "low"} <= set(table) else []:
        again = study.collect({"row": runs.split()}, file.parent.name).tidy.set_index(
            ["dataset", "metric"]
        )
        again = again.loc[list(zip(lines["dataset"], lines["metric"]))]
        assert np.allclose(
            lines[["value", "low", "high"]], again[["value", "low", "high"]], atol=2e-5
        ), runs


@pytest.mark.parametrize(
    "file", [file for home in KEPT for file in sorted(home.glob("*.ipynb"))], ids=paths.shown
)
def test_committed_notebooks_are_of_no_machine(file):
    notebook = nbformat.read(file, as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert (
        not [output for output in outputs if output.output_type == "error"]
        and file.stat().st_size < 2**20
    )
    assert not re.search(r"/(home|root|work|tmp|Users)/|tcp://", json.dumps(notebook)), (
        "a path of a machine"
    )


def write(stem, *cells, parameters=PARAMETERS, rows=None):
    """A notebook of the test; `rows` is the source of its cell `rows`."""
    kernel = {"display_name": "", "language": "python", "name": "python3"}
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    sources = [
        (parameters, "parameters"),
        *([(rows, "rows")] if rows else []),
        *((cell, None) for cell in cells),
    ]
    for source, tag in sources:
        notebook.cells.append(
            nbformat.v4.new_code_cell(source, metadata={"tags": [tag]} if tag else {})
        )
    nbformat.write(notebook, paths.NOTEBOOKS / f"{stem}.ipynb")
    return paths.NOTEBOOKS / f"{stem}.ipynb"


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Empty folders of notebooks and of results, for kernels too."""
    for name in ("NOTEBOOKS", "RESULTS"):
        (tmp_path / name.lower()).mkdir()
        monkeypatch.setattr(paths, name, tmp_path / name.lower())
    monkeypatch.setenv("PUMALIB_RESULTS", str(paths.RESULTS))
    return paths.RESULTS / "smoke"


def test_refused_before_anything_starts(results, capsys):
    write("03_components")
    write("04_backbones")
    write("90_tool", parameters='profile = "smoke"  # name\n')
    for arguments, said in (
        (
            ["03_componets"],
            "unknown notebook '03_componets'; known: 03_components, 04_backbones, 90_tool",
        ),
        (["0"], "unknown notebook '0'"),
        (["-p", "sedes=[0]"], "unknown parameter of 03_components 'sedes'; known: .*seeds"),
        (["04", "-p", "epochs=many"], "epochs = 'many'"),
        (["-p", "seeds"], "write name=value"),
        (["-p", "seeds=[0"], "the value in YAML"),
        (["-p", "profile=mini"], "use --profile"),
        (["-p", "seeds=[1]", "--seeds", "2"], "give one of"),
        (["90", "--seeds", "2"], "unknown parameter of 90_tool 'seeds'"),
        (["--seeds", "0"], "Invalid value for '--seeds'"),
        (["--seeds", "99999999999"], "Invalid value for '--seeds'"),
        (["-p", "datasets=null"], "datasets = null would change nothing"),
        (["--profile", "minni"], "no profile 'minni'; known: .*mini"),
    ):
        assert main(["run", *arguments]) == 2, arguments
        assert re.search(said, capsys.readouterr().err) and not results.exists(), said


def test_names_and_parameters_find_their_notebooks(results):
    first, second, tool = (write(stem) for stem in ("03_components", "04_backbones", "90_tool"))
    assert notebooks.find([]) == [first, second]
    assert notebooks.find(["04", "03_components", "notebooks/04_backbones.ipynb", "90"]) == [
        second,
        first,
        tool,
    ]
    write("04_backbones", parameters=PARAMETERS + "seeds = None  # list\n")
    assert notebooks.parameters([first, second], "mini", {"seeds": [4], "lr": 1e-4}) == {
        first: {"profile": "mini", "overrides": {"seeds": [4], "lr": 1e-4}},
        second: {"profile": "mini", "overrides": {"lr": 1e-4}, "seeds": [4]},
    }


def test_a_copy_writes_under_its_own_name(results):
    """... also where its cell of parameters still has the name of the original."""
    named = PARAMETERS + 'notebook = "components"  # name\n'
    cell = "(paths.RESULTS / profile / f'{notebook}.csv').write_text(notebook)"
    for stem in ("03_components", "30_mine"):
        write(stem, "from pumalib import paths", cell, parameters=named)
    assert main(["run", "30"]) == 0
    assert [file.name for file in results.glob("*.csv")] == ["mine.csv"]
    assert main(["run", "03"]) == 0
    assert sorted(file.read_text() for file in results.glob("*.csv")) == ["components", "mine"]


def test_values_take_their_places_among_the_parameters():
    source = (
        'name = "é"; rates = [\n    1,\n    2,\n]  # of the é\nmethods = None\nloss = "ms"  # one'
    )
    given = {"rates": [3e-5], "name": "photos-8", "methods": ["a", "b"], "unknown": 1}
    assert notebooks.with_values(source, given) == (
        'name = "photos-8"; rates = [3e-05]  # of the é\nmethods = ["a", "b"]\nloss = "ms"  # one'
    )
    assert notebooks.with_values(source, {}) == source


def opened(*found):
    """The cells of a notebook that opens with a cell `found`, which has shown these outputs."""
    folded = {"tags": ["found"], "jupyter": {"source_hidden": True}}
    cells = [
        nbformat.v4.new_markdown_cell("# Title"),
        nbformat.v4.new_code_cell('profile = "mini"', metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell("found()", metadata=folded, outputs=list(found)),
    ]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebooks.open_with_finding(notebook, "mini")
    nbformat.validate(notebook)
    return [(cell.cell_type, cell.source, cell.metadata) for cell in notebook.cells]


def test_what_was_found_is_markdown_below_the_title():
    shown = "## What we found\n\n![a](../results/mini/a.png) ![b](../results/photos/b.png)"
    data = {"text/markdown": shown, "text/plain": "<Markdown>"}
    title, found, parameters = opened(nbformat.v4.new_output("execute_result", data=data))
    assert title[1] == "# Title" and parameters[1] == 'profile = "mini"'
    beside = "## What we found\n\n![a](a.png) ![b](../results/photos/b.png)"
    assert found == ("markdown", beside, {"tags": ["found"]})

    *before, untouched = opened()
    assert before == [title, parameters] and untouched[:2] == ("code", "found()")


def test_a_plan_names_what_is_missing_and_is_no_success(results, tmp_path, capsys):
    rows = (
        P + "from pumalib.config import Data\n"
        f"d = Data(benchmark='paper', root={str(tmp_path / 'none')!r}, "
        "datasets=('cub',), image_size=48)\n"
        "rows = {'x': p.run('linear', data=d), 'y': p.run('linear', pretrained='no.pth')}"
    )
    write("05_far", "1 + 1", rows=rows)
    assert main(["run", "--plan", "--images-per-second", "100"]) == 1
    out = capsys.readouterr().out
    line = next(line.split() for line in out.splitlines() if line.startswith("05_far"))
    assert line[1:3] == ["2", "2"] and line[-2:] == ["missing", "missing"]
    assert "Missing, without which nothing of it is trained:\nnot found under" in out
    command = f"python -m pumalib data download --root {tmp_path / 'none'}"
    assert out.count(f"`{command}` fetches them") == 1
    assert "no weights at" in out
    assert "by 100 images/s of a ViT-S at 224 px, stated and not measured" in out
    assert not results.exists()


def test_a_plan_of_nothing_says_why_and_has_no_empty_table(results, capsys):
    write("03_broken", "1 + 1", rows="rows = missing_name")
    assert main(["run", "--plan"]) == 1
    assert capsys.readouterr().out == (
        "03_broken cannot be planned: NameError: name 'missing_name' is not defined\n"
        "Nothing was trained.\n"
    )


def test_a_speed_is_for_a_plan(results, capsys):
    assert main(["run", "--images-per-second", "100"]) == 2
    assert "--images-per-second is for --plan" in capsys.readouterr().err


def test_plan_run_and_kept(results, capsys):
    rows, cells = (
        P + "rows = {m: p.run(m, dim=8) for m in ('linear', '%s')}",
        ["study.run_all(rows, p).save('first');"],
    )
    write("01_first", *cells, "print('here')\nassert p.seeds == (0, 1)", rows=rows % "pretrained")
    write("02_second", "study.run_all(rows, p)", rows=rows % "mlp3")
    write("03_broken", "1 + 1", rows="rows = missing_name")
    write("04_without", "open('ran', 'w')")
    assert main(["run", "--plan", "--seeds", "2"]) == 1, "one cannot be planned"
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    table = {line[0]: line[1:] for line in lines}
    columns = ["runs", "left", "hours", "GB", "new", "new_hours", "data", "weights"]
    planned = {name: dict(zip(columns, table[name])) for name in table if name[0] == "0"}
    counts = {name: (one["runs"], one["left"], one["new"]) for name, one in planned.items()}
    assert counts["01_first"] == ("4", "4", "4")
    assert counts["02_second"] == ("4", "4", "2"), "by itself it has four to train"
    assert counts["04_without"] == ("0", "0", "0")
    assert planned["01_first"]["data"] == planned["01_first"]["weights"] == "there"
    assert table["all,"][:3] == ["shared", "once", "6"]
    assert "Missing" not in out
    assert "03_broken cannot be planned: NameError: name 'missing_name'" in out
    assert not results.exists() and not (paths.NOTEBOOKS / "ran").exists()

    assert main(["run", "01", "03", "--seeds", "2", "--jobs", "2"]) == 1
    said = capsys.readouterr()
    lines = {line.split()[0]: line.split() for line in said.out.splitlines() if line}
    assert lines["01_first"][1:3] == ["done", "4"] and lines["01_first"][-1] == "first.csv"
    assert (
        "NameError: name 'missing_name' is not defined (cell In [" in said.out
        and lines["03_broken"][1] == "FAILED"
    )
    assert "runs: 100%" in said.err and len(study.list_runs("smoke")) == 4
    executed = nbformat.read(results / "01_first.ipynb", 4)
    nbformat.validate(executed)
    # Where runs are trained, here by two at once, is not kept.
    assert executed.cells[0].source == (
        'profile = "smoke"  # name\noverrides = {"seeds": [0, 1]}  # fields\n'
    )
    assert [(o.name, o.text) for o in executed.cells[-1].outputs] == [("stdout", "here\n")]
    (output,) = executed.cells[-2].outputs
    assert output.text.startswith("table ") and output.text.endswith("/smoke/first.csv\n")
    assert "papermill" not in json.dumps(executed)
    assert "missing_name" in (results / "03_broken.failed.ipynb").read_text()

    assert main(["run", "01", "02", "--seeds", "2", "--kept"]) == 0
    out = capsys.readouterr().out
    assert re.search("01_first +done +0", out) and re.search(
        "02_second: left out: .*2 of 4 runs and 0 ", out
    )
    assert sorted(f.name for f in results.glob("*.ipynb")) == [
        "01_first.ipynb",
        "03_broken.failed.ipynb",
    ]


@pytest.mark.parametrize("is_another", [True, False])
def test_a_kernel_of_another_python_is_told(results, tmp_path, monkeypatch, is_another):
    write("01_first", "print('here')")
    python = tmp_path / "bin" / "python"
    if not is_another:
        python = Path(sys.executable)
    spec = KernelSpec(argv=[str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"])
    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", lambda self, name: spec)
    monkeypatch.setattr(notebooks, "_run_one", lambda *given: notebooks.Outcome("", "done", 0, 0))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert main(["run", "01"]) == 0
    told = [str(one.message) for one in said if "the kernel python3" in str(one.message)]
    assert bool(told) == is_another
    if told:
        assert f"is {python}, not this {sys.executable}" in told[0]


def test_stopped_in_the_middle_nothing_looks_finished(results, capsys):
    results.mkdir()
    left = results / f".01_slow.ipynb.pumalib-{'0' * 16}.tmp"
    left.write_text("left by a killed process")
    os.utime(left, (0, 0))
    stop = f"import os, signal, time\nos.kill({os.getpid()}, signal.SIGINT)\ntime.sleep(300)"
    write("01_slow", stop)
    assert main(["run"]) == 130 and "the same command goes on" in capsys.readouterr().err
    assert not list(results.glob("*.ipynb")) and not list(results.glob(".*ipynb*"))


def test_what_lab_folds_stays_folded():
    given = {"source_hidden": True, "outputs_hidden": False}
    cells = [
        nbformat.v4.new_code_cell("1", metadata={"jupyter": given, "papermill": {"duration": 1}}),
        nbformat.v4.new_code_cell("2", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell("3", metadata={"tags": []}),
    ]
    notebook = notebooks.clean(nbformat.v4.new_notebook(cells=cells))
    assert [cell.metadata for cell in notebook.cells] == [
        {"jupyter": given},
        {"tags": ["parameters"]},
        {},
    ]


def test_redrawn_lines_are_not_kept():
    text = f"\rrun · 1\rrun · 2\n{paths.ROOT}{os.sep}file.py:3: UserWarning\n\r10%|#\x1b[A\r     \r"
    cell = nbformat.v4.new_code_cell(
        "x", outputs=[nbformat.v4.new_output("stream", name="stderr", text=text)]
    )
    (output,) = notebooks.clean(nbformat.v4.new_notebook(cells=[cell])).cells[0].outputs
    assert output.text.strip() == "file.py:3: UserWarning"


def test_the_commands_of_make_trial_and_photos_ask_for_what_there_is():
    arguments = ["make", "-n", "-o", ".venv/installed", "trial", "photos"]
    done = subprocess.run(arguments, cwd=paths.ROOT, check=True, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if " -m puma_study run " in line]
    assert len(lines) > 15
    for line in lines:
        given = shlex.split(line.partition(" -m puma_study run ")[2])
        asked = run.make_context("run", given).params
        wanted = notebooks.find(list(asked["names"]))
        notebooks.parameters(wanted, asked["profile"], asked["values"])
        if wanted[0].stem.startswith(("06", "18")):
            assert set(asked["values"]["methods"]) <= set(config.METHODS)


def test_the_rows_of_make_gpu_in_two_tiny_steps(results, tmp_path, monkeypatch):
    for i in range(16):
        file = tmp_path / "images" / f"set {i // 8}" / f"class {i // 2}" / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((40, 30), 50).save(file)
    monkeypatch.setattr(paths, "NOTEBOOKS", paths.ROOT / "notebooks")
    tiny = {
        "root": tmp_path / "images",
        "pretrained": "random",
        "image_size": 32,
        "seeds": [0],
        "workers": 0,
    }
    tiny |= {"epochs": 1, "batch_size": 4, "methods": ["linear", "puma"]}
    arguments = [part for name, value in tiny.items() for part in ("-p", f"{name}={value}")]
    assert main(["run", "06", "--profile", "photos-gpu", *arguments]) == 0
    assert set(pd.read_csv(results.parent / "photos-gpu" / "adaptation_methods.csv")["row"]) > {
        "Linear Emb.",
        "PUMA",
    }
