"""The wheel: its library half works without the checkout, and writes nothing beside its own."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest

from pumalib import paths

SOURCES = ["pumalib", "pyproject.toml", "README.md", "LICENSE"]


def run(command, **options):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments):
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    return run([sys.executable, "-m", "pip", arguments[0], *quiet, *arguments[1:]])


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The installed wheel, built from a copy, because setuptools reuses its earlier builds."""
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"
    source.mkdir()
    for name in SOURCES:
        place = paths.ROOT / name
        if place.is_dir():
            shutil.copytree(place, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(place, source)
    pip("wheel", source, "--no-build-isolation", "--wheel-dir", home)
    (wheel,) = home.glob("*.whl")
    pip("install", "--no-index", "--target", home / "installed", wheel)
    return home / "installed"


# -I: neither the current folder nor PYTHONPATH counts.
PYTHON = [sys.executable, "-I", "-S", "-c"]
OTHERS = sysconfig.get_path("purelib")
# -S: no .pth file is read, so that neither an editable installation nor a path of ours wins.
START = """
import sys
sys.path[:0] = [{installed!r}]
sys.path.append({others!r})
sys.dont_write_bytecode = True
import pumalib
assert pumalib.__file__.startswith({installed!r}), pumalib.__file__
assert pumalib.__version__ == "0.1.0"
"""


@pytest.fixture
def elsewhere(installed, in_a_fork, tmp_path):
    """Run a program by the wheel in the folder `tmp_path / "project"`, with a home of its own."""
    project = tmp_path / "project"
    project.mkdir()
    variables = {key: value for key, value in os.environ.items() if "PUMALIB" not in key}
    variables.pop("XDG_CACHE_HOME", None)
    variables["HOME"] = str(tmp_path / "home")

    def call(program, bare=False):
        start = START.format(installed=str(installed), others=OTHERS)
        if bare:
            return in_a_fork(start + program, project, variables)
        return run([*PYTHON, start + program], cwd=project, env=variables)

    call.project = project
    call.home = tmp_path / "home"
    return call


# As where only the dependencies of the library are installed, and no extra.
BARE = """
import sys
from importlib.machinery import PathFinder

EXTRAS = {
    "IPython", "dask", "distributed", "ipykernel", "jinja2", "matplotlib", "nbclient", "nbformat",
    "onnx", "onnxruntime", "onnxscript", "papermill", "pooch", "psutil", "seaborn",
    "sentence_transformers", "sklearn",
}
find = PathFinder.find_spec

def found(name, path=None, target=None):
    if name.split(".")[0] in EXTRAS:
        return None
    return find(name, path, target)

PathFinder.find_spec = found
"""
# Runs each program that it is told of in a fork, with what takes time imported, and none of ours.
FORKS = """
import json
import os
import runpy

sys.path.append({others!r})
import faiss, pandas, pydantic, scipy.stats, timm, torch, torch._dynamo, torchvision

sys.path.pop()
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        for number, file in enumerate(asked["said"], 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.environ.clear()
        os.environ.update(asked["variables"])
        os.chdir(asked["folder"])
        runpy.run_path(asked["program"], run_name="__main__")
        sys.exit()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, flush=True)
"""


@pytest.fixture(scope="module")
def in_a_fork(tmp_path_factory):
    """Run a program as a process of its own without the extras, and return what it wrote."""
    files = tmp_path_factory.mktemp("programs")
    given = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": files}
    command = [*PYTHON, BARE + FORKS.format(others=OTHERS)]
    with subprocess.Popen(command, **given) as server:

        def call(text, folder, variables):
            program = files / "program.py"
            program.write_text(text)
            said = [files / "stdout", files / "stderr"]
            asked = {"program": str(program), "said": [str(file) for file in said]}
            asked |= {"folder": str(folder), "variables": variables}
            print(json.dumps(asked), file=server.stdin, flush=True)
            status = server.stdout.readline()
            stdout, stderr = (file.read_text() for file in said)
            assert status == "0\n", stdout + stderr
            return stdout

        yield call
        server.stdin.close()


EMBED = """
from pathlib import Path
import numpy as np
from PIL import Image

of_trial = ["photos-8-linear", "photos-8-lora", "photos-8-puma"]
assert pumalib.list_models() == ["mini", "mini-puma", *of_trial]
Path("pictures").mkdir()
for number in range(3):
    Image.new("RGB", (60, 50), (80 * number, 9, 9)).save(f"pictures/{number}.png")
model = pumalib.load("mini")
vectors = model.embed(sorted(Path("pictures").iterdir()))
assert vectors.shape == (3, 128)

from pumalib.__main__ import main
assert main(["embed", "pictures", "-o", "vectors.npz", "--model", "mini"]) == 0
stored = np.load("vectors.npz")
assert stored["paths"].tolist() == ["0.png", "1.png", "2.png"]
np.testing.assert_allclose(stored["vectors"], vectors, atol=1e-5)
try:
    model.to_onnx("model.onnx")
except ImportError as error:
    assert "pip install 'pumalib[onnx]'" in str(error)
else:
    raise AssertionError
"""


def test_a_model_is_in_the_box(installed, elsewhere):
    before = files(installed)
    elsewhere(EMBED, bare=True)
    assert {name.split("/")[0] for name in files(elsewhere.project)} == {"pictures", "vectors.npz"}
    assert files(installed) == before


def files(folder):
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


TRAIN = """
import numpy as np
from pathlib import Path
from PIL import Image

rng = np.random.default_rng(0)
for number in range(16):
    file = Path("images", "things", f"class {number // 4}", f"{number}.png")
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(file)

profile = pumalib.config.Profile(
    "own",
    data=pumalib.config.Data(benchmark="folders", root="images", image_size=32),
    backbone="test_vit",
    pretrained="random",
    dim=8,
    training=pumalib.config.Training(epochs=1, batch_size=8, device="cpu"),
)
folder = pumalib.train(profile, "puma", adapter_rank=4, prompts=3)
vectors = pumalib.load(folder).embed(Path("images/things/class 0/0.png"))
assert vectors.shape == (1, 8) and vectors.dtype == np.float32
table = pumalib.evaluate(np.eye(4)[[0, 0, 1, 1]], [0, 0, 1, 1])
assert table.at["all", "R@1"] == 1
print(folder.relative_to(Path.cwd()).as_posix())
"""


def test_the_library_works_without_the_checkout_and_writes_only_its_own(installed, elsewhere):
    before = files(installed)
    folder = elsewhere(TRAIN, bare=True).splitlines()[-1]
    assert folder.startswith("results/own/runs/puma-curricularface-")
    made = files(elsewhere.project)
    assert {name.split("/")[0] for name in made} == {"images", "results"}
    assert f"{folder}/model.safetensors" in made and f"{folder}/metrics.json" in made
    cached = files(elsewhere.home)
    assert cached and all(name.startswith(".cache/pumalib/") for name in cached), cached
    assert files(installed) == before


IMPORT = """
import importlib, pkgutil

for room in ["data", "models", "losses", "evaluation", "training"]:
    package = importlib.import_module(f"pumalib.{room}")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"pumalib.{room}.{module.name}")
import pumalib.config, pumalib.embedder
assert {"folders", "paper"} <= set(pumalib.list_benchmarks())
assert "puma" in pumalib.list_methods() and "ms" in pumalib.list_losses()
loss = pumalib.losses.make("contrastive", 3, 4)
from pumalib.data import paper
assert list(paper.all_datasets())[0] == "cub"
assert "flower" in paper._package_file("flowers_classes.txt")
"""

REFUSED = """
try:
    pumalib.data.load(pumalib.config.Data(benchmark="mini"))
except FileNotFoundError as error:
    print(error)
try:
    pumalib.train("mini", "linear")
except ValueError as error:
    print(error)
"""


def test_every_module_is_imported_and_what_needs_the_checkout_says_so(elsewhere):
    images, profile = elsewhere(IMPORT + REFUSED, bare=True).splitlines()
    assert "need the checkout of pumalib; name it by PUMALIB_ROOT=" in images
    assert "no profile 'mini'; those of the study need its checkout: PUMALIB_ROOT=" in profile
    assert not list(elsewhere.project.iterdir())


COMMANDS = """
import runpy
from pathlib import Path

runpy.run_path({page!r})["run_all_commands"]()
from pumalib.__main__ import main

assert main(["train", "linear", "--profile", "my-images.yaml"]) == 0
assert main(["embed", "photos", "-o", "x.npz", "--model", "mini", "--scheduler", "x:1"]) == 1
"""


def test_every_command_of_the_page_runs_without_any_extra(elsewhere):
    page = paths.ROOT / "tests" / "own_images_page.py"
    said = elsewhere(COMMANDS.format(page=str(page)), bare=True)
    assert len(re.findall(r"^R@1: .*harmonic ", said, re.MULTILINE)) >= 3


ON_A_CLUSTER = """
from pathlib import Path

import numpy as np
from PIL import Image

from pumalib import cluster
from pumalib.__main__ import main

Path("pictures").mkdir()
for number in range(3):
    Image.new("RGB", (60, 50), (80 * number, 9, 9)).save(f"pictures/{number}.png")
with cluster.local(1) as address:
    ask = ["embed", "pictures", "-o", "x.npz", "--model", "mini", "--store", "store"]
    assert main([*ask, "--scheduler", address]) == 0
assert len(np.load("x.npz")["vectors"]) == 3
"""


def test_a_folder_is_embedded_on_a_cluster(elsewhere):
    elsewhere(ON_A_CLUSTER)


def test_the_study_is_not_in_it(installed):
    packages = {name.split("/")[0] for name in files(installed)}
    assert packages == {"pumalib", "pumalib-0.1.0.dist-info"}


def test_help_of_the_wheel(elsewhere):
    said = elsewhere("from pumalib.__main__ import main\nmain(['--help'])")
    assert "Usage: python -m pumalib [OPTIONS] COMMAND" in said
