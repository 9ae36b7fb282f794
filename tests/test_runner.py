"""`python -m pumalib run`: refuses before it starts, keeps only what succeeded, and plans without training."""

import json
import os
import signal
import threading
import time

import nbformat
import pytest

from pumalib import paths, planning, runner, training
from pumalib.__main__ import main

PARAMETERS = 'profile = "smoke"  # name\nseeds = None  # list\n'
ROWS = (
    "from pumalib import config, study\n"
    "p = config.profile(profile, seeds=seeds, pretrained='random', datasets=['digits', 'aircraft'])\n"
)


def write(folder, stem, *cells, parameters=PARAMETERS):
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel, "language_info": {"name": "python"}})
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in (parameters, *cells)]
    notebook.cells[0].metadata["tags"] = ["parameters"]
    nbformat.write(notebook, folder / f"{stem}.ipynb")
    return folder / f"{stem}.ipynb"


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Empty folders of notebooks and of results."""
    for name in ("NOTEBOOKS", "RESULTS"):
        (tmp_path / name.lower()).mkdir()
        monkeypatch.setattr(paths, name, tmp_path / name.lower())
    return paths.NOTEBOOKS, paths.RESULTS / "smoke"


@pytest.fixture
def nothing_starts(monkeypatch):
    monkeypatch.setattr(runner, "run", None)
    monkeypatch.setattr(runner.papermill, "execute_notebook", None)
    monkeypatch.setattr(training, "train", None)


def visible(folder):
    return sorted(file.name for file in folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["03_componets"], r"'03_componets'; did you mean 03_components\? known: 03_components, 04_backbones, 90_tool"),
        (["backbone"], "did you mean 04_backbones"),
        (["0"], "did you mean 03_components or 04_backbones"),
        (["-p", "sedes=[0]"], r"'sedes' is not known to 03_components, 04_backbones; did you mean seeds\?"),
        (["-p", "dims=[8]"], r"'dims' is not known to 03_components; known to all selected: profile, seeds"),
        (["-p", "seeds"], "write name=value"),
        (["-p", "seeds=[0"], "no YAML"),
        (["-p", "profile=mini"], "use --profile"),
        (["-p", "seeds=[1]", "--seeds", "2"], "give one of them"),
        (["90", "--seeds", "2"], "none of the selected notebooks has seeds"),
        (["--seeds", "0"], "at least 1"),
        (["--profile", "minni"], "no profile 'minni'; known: .*mini"),
    ],
)
def test_refused_before_anything_starts(folders, nothing_starts, capsys, arguments, said):
    write(folders[0], "03_components")
    write(folders[0], "04_backbones", parameters=PARAMETERS + "dims = None  # list\n")
    write(folders[0], "90_tool", parameters='profile = "smoke"  # name\n')
    with pytest.raises(ValueError, match=said):
        runner.main(arguments)
    assert main(["run", *arguments]) == 1 and capsys.readouterr().err.startswith("error: ")
    assert not folders[1].exists()


def test_notebooks_are_found_by_stem_beginning_or_file(folders):
    first, second, tool = (write(folders[0], stem) for stem in ("03_components", "04_backbones", "90_tool"))
    assert runner.find([]) == [first, second]
    assert runner.find(["04", "03_components", "notebooks/04_backbones.ipynb", "90"]) == [second, first, tool]


def test_parameters_go_to_those_who_know_them(folders):
    with_seeds = write(folders[0], "03_components")
    without = write(folders[0], "04_backbones", parameters='profile = "smoke"  # name\n')
    found = runner.settings([with_seeds, without], "mini", [], 3)
    assert found == {with_seeds: {"profile": "mini", "seeds": [0, 1, 2]}, without: {"profile": "mini"}}
    assert runner.settings([with_seeds], "mini", ["seeds=[4, 5]"], None)[with_seeds]["seeds"] == [4, 5]


def test_one_failure_stops_nothing_and_success_cleans_up(folders, capsys, monkeypatch):
    notebooks, results = folders
    monkeypatch.setenv("HERE", str(results))
    bad = write(notebooks, "01_bad", "print('before')", "x = 1\nassert seeds == 'none'")
    write(notebooks, "02_good",
          "import os, pathlib, sys\nassert seeds == [0, 1] and profile == 'smoke'\n"
          "print('out')\nsys.stderr.write('a warning\\n')\n"
          "sys.stderr.write('\\r 50%|##  | 1/2 [00:01<00:01]\\r100%|####| 2/2 [00:02<00:00]\\n')\n"
          "pathlib.Path(os.environ['HERE'], 'good.csv').write_text('a');")  # fmt: skip
    results.mkdir()
    (results / ".02_good.999999999.tmp.ipynb").write_text("left by a killed process")
    assert runner.main(["--seeds", "2"]) == 1
    said = capsys.readouterr()
    bad_line, note, good_line = said.out.strip().splitlines()[1:4]
    assert bad_line.split()[:4] == ["01_bad", "FAILED", "0", "0"]
    assert "AssertionError: assert seeds == 'none' (cell In [4])" in note and "01_bad.failed.ipynb" in note
    assert good_line.split() == ["02_good", "done", "0", "0", good_line.split()[4], "good.csv"]
    assert [line.split(" after")[0] for line in said.err.splitlines()] == [
        "[1/2] 01_bad: 0 of 0 runs, started", "[1/2] 01_bad: 0 of 0 runs, failed",
        "[2/2] 02_good: 0 of 0 runs, started", "[2/2] 02_good: 0 of 0 runs, done",
    ]  # fmt: skip
    assert visible(results) == ["01_bad.failed.ipynb", "02_good.ipynb", "good.csv"]
    assert "before" in (results / "01_bad.failed.ipynb").read_text()
    good = nbformat.read(results / "02_good.ipynb", 4)
    nbformat.validate(good)
    assert [(o.name, o.text) for o in good.cells[-1].outputs] == [("stdout", "out\n"), ("stderr", "a warning\n")]
    assert "papermill" not in json.dumps([good.metadata, *(cell.metadata for cell in good.cells)])
    assert str(paths.RESULTS.parent) not in (results / "02_good.ipynb").read_text()

    write(notebooks, bad.stem, "print('before')")
    assert runner.main(["01"]) == 0
    assert visible(results) == ["01_bad.ipynb", "02_good.ipynb", "good.csv"]


def test_what_stands_there_already_is_left_untouched(folders, monkeypatch):
    source = write(folders[0], "01_same", "1 + 1")

    def pretend(notebook, output, parameters, **options):
        executed = nbformat.read(notebook, 4)
        executed.metadata["papermill"] = {"duration": time.monotonic()}
        executed.cells.append(nbformat.v4.new_code_cell("profile = 'smoke'", metadata={"tags": ["injected-parameters"]}))
        executed.cells[1].metadata.update(papermill={"start": time.monotonic()}, execution={"iopub": "now"})
        return executed

    monkeypatch.setattr(runner.papermill, "execute_notebook", pretend)
    target = runner.execute(source, folders[1], {})
    os.utime(target, (1, 1))
    assert runner.execute(source, folders[1], {}).stat().st_mtime == 1


def test_progress_bars_go_and_warnings_stay():
    def stream(name, text):
        return nbformat.v4.new_output("stream", name=name, text=text)

    value = nbformat.v4.new_output("execute_result", data={"text/plain": "4"})
    cell = nbformat.v4.new_code_cell("x", outputs=[
        stream("stderr", "\rruns:   0%|   | 0/2 [00:00<?, ?run/s]"), stream("stdout", f"{paths.ROOT}{os.sep}one "), value,
        stream("stderr", "\rruns:  50%|## | 1/2 [00:01<00:01]file.py:3: UserWarning: careful\n  warn()\n"),
        stream("stdout", "two\n"), stream("stderr", "\n\rbatches: 7it [00:01, 4.2it/s]\x1b[A\r     \r"),
    ])  # fmt: skip
    only_bars = nbformat.v4.new_code_cell("y", outputs=[stream("stderr", "\r10%|#\r100%|####| 2/2 [00:00<00:00]\n")])
    cleaned = runner.clean(nbformat.v4.new_notebook(cells=[cell, only_bars]))
    texts = {o.name: o.text for o in cleaned.cells[0].outputs if o.output_type == "stream"}
    assert texts["stdout"] == "one two\n"
    assert texts["stderr"].split("\n")[:2] == ["file.py:3: UserWarning: careful", "  warn()"] and "[" not in texts["stderr"]
    assert value in cleaned.cells[0].outputs and cleaned.cells[1].outputs == []


def test_plan_tells_new_cached_and_shared_runs_and_trains_nothing(folders, nothing_starts, capsys):
    draws = "open('drawn', 'w').write('after the runs')"
    first = write(folders[0], "01_first", ROWS, "rows = {}", "rows['linear'] = p.run('linear')",
                  "rows['none'] = p.run('pretrained')", "print(study.run_all(rows, p))", draws)  # fmt: skip
    write(folders[0], "02_second", ROWS + "rows = {m: p.run(m) for m in ('linear', 'puma')}\nstudy.run_all(rows, p)")
    write(folders[0], "03_broken", ROWS + "rows = missing_name", "study.run_all(rows, p)")
    write(folders[0], "04_without", "raise SystemExit")
    runs, _ = planning.runs_of(first, {"seeds": [0, 1]})
    assert len(runs) == 4 and {run.method.name for run in runs.values()} == {"linear", "pretrained"}
    linear = [run for run in runs.values() if run.method.name == "linear"][0]
    images = planning.images_to_train(linear)
    assert images == len(training.load_data(linear.data).train) and {planning.images_to_train(r) for r in runs.values()} == {0, images}

    def planned():
        assert runner.main(["--plan", "--seeds", "2"]) == 0
        lines = capsys.readouterr().out.splitlines()
        return {line.split()[0]: line.split()[1:] for line in lines[1:] if line}, "\n".join(lines)

    table, text = planned()
    none = ["no", "measured", "speed"]
    assert table["01_first"] == ["4", "0", f"{2 * images:,}", *none]
    assert table["02_second"] == ["2", "2", f"{2 * images:,}", *none]
    assert table["03_broken"] == ["?", "?", "?", "?"] and "NameError: name 'missing_name'" in text
    assert table["04_without"] == ["0", "0", "0", "0.0"]
    assert table["sum,"][2:] == ["6", "0", f"{4 * images:,}", *none] and "An estimate" in text

    for folder, run in runs.items():  # as if the first notebook had been executed, at one image per second
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(run.to_json())
        (folder / "environment.json").write_text(json.dumps({"device": training.device_name(training.choose_device("auto"))}))
        (folder / training.FINISHED).write_text(json.dumps({"images_per_second": 1.0 if run == linear else None}))
    table, _ = planned()
    assert table["01_first"] == ["0", "4", "0", "0.0"]
    assert table["02_second"] == ["2", "2", f"{2 * images:,}", f"{2 * images / 60:.1f}"]
    assert table["sum,"][2:4] == ["2", "4"]
    assert not (folders[0] / "drawn").exists()


def test_measured_speeds_are_of_the_same_network(folders):
    from pumalib.config import Profile

    profile = Profile("test")
    table = planning.pd.DataFrame(
        [("mini_vit", 224, "lora", False, 8.0), ("mini_vit", 224, "lora", False, 10.0), ("mini_vit", 224, "vpt", False, 20.0),
         ("mini_vit", 224, "full", True, 5.0), ("other", 224, "puma", False, 99.0)], columns=planning.SPEED)  # fmt: skip
    empty = table[:0]
    assert planning._speed(profile.run("lora"), [empty, table]) == 9
    assert planning._speed(profile.run("puma"), [table]) == 10  # median of the frozen ones
    assert planning._speed(profile.run("puma"), [table[table["tuned"]]]) == 5
    assert planning._speed(Profile("test", backbone="another").run("puma"), [table]) is None


def test_where_runs_are_trained_reaches_kernels_and_is_put_back(folders, monkeypatch):
    write(folders[0], "01_one")
    monkeypatch.setenv("PUMALIB_DASK", "before")
    seen = []
    monkeypatch.setattr(runner, "run", lambda wanted, profile: seen.append(os.environ["PUMALIB_DASK"]) or 0)
    assert runner.main(["--dask", "tcp://there:8786"]) == 0
    assert seen == ["tcp://there:8786"] and os.environ["PUMALIB_DASK"] == "before"


def test_stopped_in_the_middle_nothing_looks_finished(folders, monkeypatch, capsys):
    """SIGINT is answered; what SIGKILL leaves is as hidden, and removed by the next call (tested above)."""
    begun = folders[0] / "begun"
    monkeypatch.setenv("BEGUN", str(begun))
    write(folders[0], "01_slow", "import os, pathlib, time\npathlib.Path(os.environ['BEGUN']).touch()\ntime.sleep(300)")
    write(folders[0], "02_later")
    hidden = []

    def stop():
        while not begun.exists() and not over.is_set():
            time.sleep(0.1)
        if begun.exists():
            hidden.extend(visible(folders[1]))
            os.kill(os.getpid(), signal.SIGINT)

    over, thread = threading.Event(), threading.Thread(target=stop)
    thread.start()
    try:
        assert runner.main([]) == 130
    finally:
        over.set()
        thread.join()
    assert hidden == [f".01_slow.{os.getpid()}.tmp.ipynb"] and visible(folders[1]) == []
    assert "interrupted in 01_slow; finished notebooks: none" in capsys.readouterr().err
