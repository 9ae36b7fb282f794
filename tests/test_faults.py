"""Faults drawn by a seed: wrong settings, damaged files, kill -9.

Each ends in equal numbers or in an error of ours.
`pytest tests/test_faults.py --faults 1000` draws more than the test command does.
"""

import dataclasses
import json
import multiprocessing
import random
import shutil
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from pumalib import config, data, embedder, paths, study, training
from pumalib.data import images, mini, prepared
from pumalib.models import backbones
from pumalib.study import store

OURS = (ValueError, OSError, RuntimeError)  # what the command line shows as one line
SIDE = config.profile("smoke").data.image_size
PROFILE = config.Profile(
    "faults",
    data=config.Data(datasets=("photos", "aircraft"), image_size=SIDE),
    pretrained="random",
    dim=8,
    rank_scale=0.05,
    training=config.Training(
        epochs=2, batch_size=300, lr=1e-3, device="cpu", checkpoint_seconds=1e-3
    ),
)
RUN = PROFILE.run("linear")

NUMBERS = st.one_of(st.integers(-5, 10**10), st.floats(), st.booleans(), st.none())
TEXTS = st.one_of(st.text(max_size=4), st.sampled_from(["1e-4", "cls", "cuda:9", "../up", "false"]))
VALUES = st.one_of(NUMBERS, TEXTS, st.lists(st.one_of(NUMBERS, TEXTS), max_size=3), st.just({}))
PARTS = {
    config.Data: "data",
    config.Method: "method",
    config.Training: "training",
    config.Run: None,
}
FIELDS = [
    (cls, field.name) for cls in (*PARTS, config.Profile) for field in dataclasses.fields(cls)
]


def test_any_setting_is_taken_and_read_back_or_refused_by_its_name(request, tmp_path):
    file = tmp_path / "some.yaml"
    quiet = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}

    @settings(max_examples=max(150, request.config.getoption("faults")), derandomize=True, **quiet)
    @given(st.sampled_from(FIELDS), VALUES)
    def draw(where, value):
        cls, name = where
        content = json.loads(config.Run().to_json())
        (content[PARTS[cls]] if PARTS.get(cls) else content)[name] = value
        try:
            file.write_text(yaml.safe_dump({name: value}))
            run = config.Run.from_dict(content) if cls in PARTS else config.profile(str(file)).run()
        except ValueError as error:
            assert name in str(error), str(error)
            return
        again = config.Run.from_dict(json.loads(run.to_json()))
        assert again == run and again.identity("data", "weights") == run.identity("data", "weights")

    draw()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the faults are done to, undamaged.

    A kept run with its model, a checkpoint, images, and the numbers of all.
    """
    home = tmp_path_factory.mktemp("faults")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "RESULTS", home)
        results = study.run_all({"linear": RUN, "puma": PROFILE.run("puma")}, PROFILE)
        name = results.names["linear"][0]

        def stop(*args, **options):
            raise KeyboardInterrupt

        patch.setattr(training.loop.evaluation, "scores", stop)
        with pytest.raises(KeyboardInterrupt):
            training.train(RUN, home / "stopped")
    rng = np.random.default_rng(0)
    for number in range(24):
        file = home / "images" / "things" / f"class {number // 4}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(file)
    rows = [f"things,class {number},{'train' if number < 3 else 'test'}\n" for number in range(6)]
    (home / "images" / "split.csv").write_text("dataset,class_name,split\n" + "".join(rows))
    shutil.copytree(paths.MINI, home / "mini", ignore=shutil.ignore_patterns("make"))
    return home, name


def table_of(run_folder: Path) -> list:
    return training.run_folder.read_record(run_folder)["table"]


def resumed(home: Path, name: str):
    return table_of(training.train(RUN, home / "stopped"))


def lines(home: Path, name: str):
    return store.read(home / "faults")


def embedded(home: Path, name: str):
    return (
        embedder.load(home / "faults" / "runs" / name)
        .embed(np.zeros((1, SIDE, SIDE, 3), np.uint8))
        .tolist()
    )


def pictures(home: Path, name: str):
    mini._read.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "MINI", home / "mini")
        try:
            return data.load(PROFILE.data).digest
        finally:
            mini._read.cache_clear()


def folders(home: Path, name: str):
    benchmark = data.load(config.Data(benchmark="folders", root=str(home / "images")))
    errors = images.unreadable(benchmark)
    if errors:
        raise next(iter(errors.values()))
    return benchmark.digest


def weights(home: Path, name: str):
    file = home / "mini" / "mini_vit.safetensors"
    digest = backbones.weights_digest("mini_vit", str(file))
    backbones.create("mini_vit", str(file))
    return digest


# What is read, the files that are harmed, and whether another value may come out: of contents that
# name the run anew.
READS = {
    "kept runs": (lines, "faults/kept-*.jsonl", False),
    "checkpoint": (resumed, "stopped/checkpoint*.pt", False),
    "model": (embedded, "faults/runs/linear*/model.safetensors", False),
    "mini": (pictures, "mini/photos.png", True),
    "mini's table": (pictures, "mini/images.csv", True),
    "weights": (weights, "mini/mini_vit.safetensors", True),
    "images": (folders, "images/things/*/*.png", True),
    "split": (folders, "images/split.csv", True),
}


def pytest_generate_tests(metafunc):
    faults = metafunc.config.getoption("faults")
    for name, count in {"fault": faults // 2, "moment": max(6, faults // 40)}.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, range(count))


@pytest.fixture(scope="module")
def expected(whole):
    copy = whole[0].with_name("expected")
    shutil.copytree(whole[0], copy)
    return {what: read(copy, whole[1]) for what, (read, _, _) in READS.items()}


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_is_noticed(fault, whole, expected, tmp_path):
    rng, (home, name) = random.Random(fault), whole
    what = list(READS)[fault % len(READS)]
    read, pattern, another = READS[what]
    copy = tmp_path / "copy"
    shutil.copytree(home, copy)
    file = rng.choice(sorted(copy.glob(pattern)))
    content = bytearray(file.read_bytes())
    harm = rng.choice(["cut", "flip", "flip", "flip", "swap", "empty"])
    if harm == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    swapped = (copy / "faults" / "runs" / name / "run.json").read_bytes()
    file.write_bytes(
        {"cut": content[: rng.randrange(len(content))], "swap": swapped, "empty": b""}.get(
            harm, content
        )
    )
    try:
        found = read(copy, name)
    except OURS as error:
        assert file.name in str(error) or file.parent.name in str(error), f"{what}, {harm}: {error}"
        return
    if what == "kept runs":  # a damaged line costs its own run
        assert all(record == expected[what][name] for name, record in found.items()), harm
    else:
        assert found == expected[what] or (another and type(found) is str), (
            f"{what}, {harm}: silently another value"
        )


def work(kind: str, home: Path) -> None:
    """Runs in a process that is killed."""
    warnings.simplefilter("ignore")
    paths.RESULTS, paths.CACHE = home / "results", home / "cache"
    if kind == "train":
        training.train(RUN, home / "results" / "run")
    elif kind == "run":
        study.run_all({"linear": RUN}, PROFILE)
    else:
        prepared.prepare(data.load(config.Data(benchmark="folders", root=str(home / "images"))))


def outcome(kind: str, home: Path):
    if kind == "train":
        return table_of(home / "results" / "run")
    if kind == "run":
        return [record["table"] for record in store.read(home / "results" / "faults").values()]
    return {file.name: file.read_bytes() for file in (home / "cache").rglob("*.jpg")}


def started(kind: str, home: Path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pumalib.study", "hypothesis"])
    process = context.Process(target=work, args=(kind, home))
    process.start()
    return process


@pytest.fixture(scope="module")
def undisturbed(whole, tmp_path_factory):
    """Of each kind of work, done once: how many seconds it takes, and what comes out."""
    done = {}

    def find(kind):
        if kind not in done:
            home = tmp_path_factory.mktemp("undisturbed")
            shutil.copytree(whole[0] / "images", home / "images")
            start = time.monotonic()
            started(kind, home).join(120)
            done[kind] = time.monotonic() - start, outcome(kind, home)
        return done[kind]

    return find


def test_a_process_killed_at_any_moment_goes_on(moment, whole, undisturbed, tmp_path):
    kind = ("train", "run", "prepare")[moment % 3]
    rng = random.Random(moment)
    seconds, expected = undisturbed(kind)
    shutil.copytree(whole[0] / "images", tmp_path / "images")
    for _ in range(3):
        process = started(kind, tmp_path)
        process.join(rng.uniform(0, seconds))
        process.kill()
        process.join()
    process = started(kind, tmp_path)
    process.join(120)
    assert process.exitcode == 0
    assert expected and outcome(kind, tmp_path) == expected
    assert not [file for file in tmp_path.rglob("*") if file.suffix == ".tmp"]
