"""`import pumalib` alone: its names come when they are asked for, and do what examples say."""

import doctest
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

import pumalib
from pumalib import api, config, evaluation, paths, training

PACKAGE = Path(pumalib.__file__).parent
EXAMPLES = [test for test in doctest.DocTestFinder().find(api, "pumalib") if test.examples]
PROFILE = config.Profile(
    "tiny",
    data=config.Data(datasets=("photos", "aircraft"), image_size=48),
    pretrained="random",
    dim=8,
    training=config.Training(epochs=1, batch_size=300, lr=1e-3, device="cpu"),
)

IMPORT = """
import os, sys
variables, modules = dict(os.environ), set(sys.modules)
opened = []
sys.addaudithook(lambda event, arguments: event == "open" and opened.append(str(arguments[0])))
import pumalib
assert variables == dict(os.environ)
ours = sorted(name for name in set(sys.modules) - modules if name.startswith("pumalib"))
assert ours == ["pumalib"], ours
assert not {"torch", "numpy", "pandas", "tqdm", "pydantic"} & sys.modules.keys()
others = [name for name in opened if not name.endswith((".py", ".pyc"))]
assert not others, others

import pumalib.models
assert "pumalib.data" not in sys.modules
project = os.path.dirname(os.path.dirname(pumalib.__file__))
# An environment in the project's folder is not of the project.
ours = [name for name in opened if name.startswith(project) and "site-packages" not in name]
# A .pyc is written under a name that ends in a number.
others = [name for name in ours if not name.endswith((".py", ".pyc")) and ".pyc." not in name]
assert not others, others

from pumalib.data import download, paper
assert not {"scipy.io", "pooch"} & set(sys.modules), "imported too early"
import pumalib.index, pumalib.__main__ as command
assert command.main(["embed", "--help"]) == 0
assert not {"dask", "distributed"} & set(sys.modules), "it is for --scheduler alone"

loss = pumalib.losses.make("curricularface", 3, 4)
assert pumalib.models.load_model and pumalib.embedder.load
assert variables == dict(os.environ)
"""


def test_importing_reads_nothing_and_changes_nothing_and_gives_rooms():
    """In a process of its own: this one has imported more."""
    variables = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    subprocess.run([sys.executable, "-c", IMPORT], env=variables, check=True)


def test_every_public_name_and_every_room_is_there():
    for name in pumalib.__all__:
        assert getattr(pumalib, name) is not None
    rooms = {file.stem for file in PACKAGE.glob("*.py")}
    rooms |= {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    rooms -= {"__init__", "__main__", "api"}
    assert rooms <= set(dir(pumalib)), "a new room has a name in pumalib/__init__.py"
    for room in rooms:
        assert getattr(pumalib, room).__name__ == f"pumalib.{room}"
    assert pumalib.__version__[0].isdecimal()
    with pytest.raises(AttributeError, match="module 'pumalib' has no attribute 'trian'"):
        _ = pumalib.trian


@pytest.fixture(scope="module", autouse=True)
def results(tmp_path_factory):
    """One folder for all examples, so that they share trained runs."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("results")
        patch.setattr(paths, "RESULTS", folder)
        yield folder


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.name for example in EXAMPLES])
def test_the_examples_say_what_comes_out(example):
    said = []
    runner = doctest.DocTestRunner()
    runner.run(example, out=said.append)
    assert not runner.failures, "".join(said)


def test_every_public_function_has_an_example():
    assert {example.name for example in EXAMPLES} == {
        f"pumalib.{name}" for name in pumalib._FUNCTIONS
    }


def test_a_run_or_a_profile_is_trained_where_its_name_says(results, tmp_path):
    run = PROFILE.run("linear", seed=3)
    name = training.run_name(run)
    by_profile = pumalib.train(PROFILE, "linear", seed=3)
    assert by_profile == results / "tiny" / "runs" / name
    by_run = pumalib.train(run)
    assert by_run == results / "runs" / name
    chosen = pumalib.train(run, folder=tmp_path / "mine")
    assert chosen == tmp_path / "mine"
    weights = [load_file(at / "model.safetensors") for at in (by_profile, by_run, chosen)]
    for name, tensor in weights[0].items():
        assert tensor.equal(weights[1][name]) and tensor.equal(weights[2][name])

    finished = (chosen / "metrics.json").stat().st_mtime_ns
    assert pumalib.train(run, folder=chosen) == chosen
    assert (chosen / "metrics.json").stat().st_mtime_ns == finished
    assert pumalib.load(chosen).run == run


def test_what_cannot_be_meant_is_refused():
    run = PROFILE.run("linear")
    for given in ({"method": "linear"}, {"seed": 1}):
        with pytest.raises(ValueError, match=r"a Run is whole: change it by dataclasses\.replace"):
            pumalib.train(run, **given)
    with pytest.raises(ValueError, match=r"of a profile one method is trained: .* puma"):
        pumalib.train("smoke")
    with pytest.raises(ValueError, match="no profile 'smoek'"):
        pumalib.train("smoek", "linear")
    with pytest.raises(ValueError, match="unknown setting 'sede'"):
        pumalib.train(PROFILE, "linear", sede=1)
    with pytest.raises(ValueError, match="unknown benchmark"):
        pumalib.train(replace(run, data=replace(run.data, benchmark="no")))


def test_plain_arrays_are_evaluated_as_a_benchmark_is():
    benchmark = pumalib.data.load(PROFILE.data).test
    vectors = np.random.default_rng(0).normal(size=(len(benchmark), 8)).astype(np.float32)
    expected = evaluation.scores(vectors, benchmark, evaluation.KS).table()
    found = pumalib.evaluate(vectors, benchmark["label"], benchmark["dataset"])
    assert found.equals(expected)
    photos = (benchmark["dataset"] == "photos").to_numpy()
    alone = pumalib.evaluate(vectors[photos], benchmark["class_name"][photos].tolist())
    assert list(alone.index) == ["all"]
    assert alone.loc["all", "R@1"] == expected.loc["photos", "R@1"]
    with pytest.raises(ValueError, match="2 labels for 3 vectors"):
        pumalib.evaluate(vectors[:3], [0, 1])
    with pytest.raises(ValueError, match="1 datasets for 3 vectors"):
        pumalib.evaluate(vectors[:3], [0, 1, 1], ["a"])
