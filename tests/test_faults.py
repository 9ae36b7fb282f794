"""Faults drawn by a seed: wrong settings, damaged files, kill -9, and attacks.

Each ends in equal numbers or in an error of ours, and nothing outside results changes.
`make faults` draws a thousand (`--faults`) by a seed that it prints (`--seed`).
"""

import dataclasses
import io
import json
import multiprocessing
import pickle
import random
import shutil
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import small_disks
import torch
import yaml
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from PIL import Image

import puma_study as study
from puma_study import runs, store
from puma_study.__main__ import main
from pumalib import config, data, embedder, paths, training
from pumalib.data import images, mini, prepared
from pumalib.models import backbones

OURS = (ValueError, OSError, RuntimeError)  # what the command line shows as one line
SIDE = config.profile("smoke").data.image_size
PROFILE = config.Profile(
    "faults",
    data=config.Data(datasets=("photos", "aircraft"), image_size=SIDE),
    backbone="test_vit",
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

    @seed(request.config.getoption("seed"))
    @settings(max_examples=max(150, request.config.getoption("faults") // 4), **quiet)
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
        assert again == run and again.fingerprint("data", "weights") == run.fingerprint(
            "data", "weights"
        )

    draw()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Undamaged files, and the numbers that they give.

    A kept run with its model, a checkpoint, and images.
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


# A function that reads, the files to damage, and whether it may return another value, as for
# contents that are part of a run's name.
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
    counts = {"fault": faults // 2, "moment": max(6, faults // 40), "attack": faults // 4}
    for name, count in counts.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, range(count))


@pytest.fixture
def drawn(request):
    """Draws by the seed that was asked for, and a number."""

    def of(number):
        return random.Random(f"{request.config.getoption('seed')} {number}")

    return of


@pytest.fixture(scope="module")
def expected(whole):
    copy = whole[0].with_name("expected")
    shutil.copytree(whole[0], copy)
    return {what: read(copy, whole[1]) for what, (read, _, _) in READS.items()}


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_is_noticed(fault, drawn, whole, expected, tmp_path):
    rng, (home, name) = drawn(fault), whole
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
        return [record.table for record in store.read(home / "results" / "faults").values()]
    return {file.name: file.read_bytes() for file in (home / "cache").rglob("*.jpg")}


def started(kind: str, home: Path):
    context = multiprocessing.get_context("forkserver")
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


def test_a_process_killed_at_any_moment_goes_on(moment, drawn, whole, undisturbed, tmp_path):
    kind = ("train", "run", "prepare")[moment % 3]
    rng = drawn(moment)
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
    # A killed process leaves temporary files: nobody reads them, and they are removed after a day.
    left = [file.name for file in tmp_path.rglob("*") if file.suffix == ".tmp"]
    assert all(paths._TEMPORARY.fullmatch(name) for name in left)


# ---- attacks: each draws one, carries it out, and checks the outcome


@dataclasses.dataclass
class Scene:
    """A copy of a results folder, and a canary beside it that nothing may touch."""

    rng: random.Random
    home: Path  # the folder of results
    canary: Path
    name: str  # of a kept run
    expected: dict  # all records, read before the attack

    @property
    def profile(self):
        return self.home / "faults"

    @property
    def kept(self):
        return self.profile / "kept-1.jsonl"

    def texts(self):
        return self.kept.read_text().removesuffix("\n").split("\n")

    def insert(self, text):
        """Put a line at a place that is drawn."""
        all_lines = self.texts()
        all_lines.insert(self.rng.randint(0, len(all_lines)), text)
        self.kept.write_text("".join(f"{line}\n" for line in all_lines))

    def record(self):
        """The record of the kept run, to be changed."""
        (text,) = [text for text in self.texts() if json.loads(text)["name"] == self.name]
        found = json.loads(text)
        del found["digest"]
        return found


def signed(record):
    """The line of a record, with a valid digest of its content."""
    return json.dumps(record | {"digest": training.run_folder.short_hash(record)})


def verified(scene):
    return "\n".join(runs.problems("faults"))


def two_lines_of_a_name(scene):
    other = scene.record()
    row = scene.rng.choice(other["table"])
    row["MAP@R"] = scene.rng.random()
    scene.insert(signed(other))
    said = verified(scene)
    assert f"{scene.name}: different numbers in kept-1.jsonl, line" in said
    kept = store.read("faults")[scene.name].content()
    assert kept["table"] in (other["table"], scene.expected[scene.name].content()["table"])
    assert main(["runs", "remove", scene.name, "--yes"]) == 0
    assert scene.name not in store.read("faults")


def a_forged_line(scene):
    """A record with the content of no run, mostly with a valid digest, is damaged."""
    other = scene.record()
    row = scene.rng.choice(other["table"])
    part = scene.rng.choice(["hits", "classes"])
    kind = scene.rng.choice(["digest", "R@1", "emptied", "twice", "settings", "name", "huge"])
    if kind == "emptied":
        other |= {part: {}}
        row["R@1"] = 0.99
    elif kind == "twice":
        other["table"].append({**row, "R@1": 0.99})
    elif kind == "settings":
        other["run"]["seed"] += 1
    elif kind == "name":
        (another,) = scene.expected.keys() - {scene.name}
        other = scene.expected[another].content() | {"name": scene.name}
    elif kind == "huge":
        other["parameters"]["total"] = 10**400
    else:
        values = [0.5, 1.5, -1, 2**70, float("nan"), row["R@1"] + 1e-3, None, "1"]
        row["R@1"] = scene.rng.choice(values)
    before = next(text for text in scene.texts() if json.loads(text)["name"] == scene.name)
    text = signed(other)
    if kind == "digest":
        text = json.dumps(other | {"digest": json.loads(before)["digest"]})
    scene.kept.write_text(scene.kept.read_text().replace(before, text))
    assert scene.name not in store.read("faults"), kind
    assert "damaged line" in verified(scene)


def a_hostile_profile(scene):
    """Keys twice, aliases without end, depth, names of folders or of ours: refused shortly."""
    rng = scene.rng
    fields = [field.name for field in dataclasses.fields(config.Profile)]
    key = rng.choice(fields)
    bomb = ["a: &a [" + ", ".join(rng.randint(2, 12) * ["lol"]) + "]"]
    for above, name in zip("abcdefgh", "bcdefghi"):
        bomb.append(f"{name}: &{name} [{', '.join(9 * [f'*{above}'])}]")
    ours = rng.choice(sorted(paths.PROFILES.glob("*.yaml"))).stem
    text = rng.choice(
        [
            f"{key}: {{lr: 1}}\nseeds: [1]\n{key}: {{lr: 2}}",
            f"training: {{lr: {rng.random()}, epochs: 1, lr: {rng.random()}}}",
            "\n".join([*bomb, f"{key}: *{rng.choice('ghi')}"]),
            f"{key}: " + rng.choice("[{") * rng.randint(1000, 9000),
            f"name: {rng.choice(['../up', '..', '/x', 'a/b', '.hidden', '~', '|', '%2e%2e/'])}",
            f"name: {rng.choice([ours, ours.upper(), ours.title()])}",
            f"{key}: !!python/object/apply:pathlib.Path.touch [{scene.canary / 'touched'}]",
            f"dim: {rng.randint(1, 9)}" + ":59" * rng.randint(2500, 5000),
        ]
    )
    file = scene.home / "hostile.yaml"
    file.write_text(text)
    with pytest.raises(ValueError) as error:
        config.profile(str(file))
    assert len(str(error.value)) < 2000
    assert not (scene.home / ours / "runs").exists()


class Touches:
    """What, unpickled, would touch the canary."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return Path.touch, (self.canary / "touched",)


def a_hostile_folder(scene):
    """A model or checkpoint that is a pickle, a folder, a link to nowhere, or a tensor of lies."""
    rng = scene.rng
    pickled = pickle.dumps(Touches(scene.canary))
    header = json.dumps({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}})
    contents = [
        pickled,
        len(header).to_bytes(8, "little") + header.encode(),
        (2**63).to_bytes(8, "little") + b"{}",
        rng.randbytes(rng.randint(0, 3000)),
    ]
    if rng.random() < 0.5:
        file = scene.home / "stopped" / rng.choice(["checkpoint.pt", "checkpoint.previous.pt"])
        zipped = io.BytesIO()
        torch.save(Touches(scene.canary), zipped)
        file.write_bytes(rng.choice([*contents, zipped.getvalue()]))
        assert resumed(scene.home, scene.name) == scene.expected["resumed"]
        return
    file = scene.profile / "runs" / scene.name / "model.safetensors"
    file.unlink()
    kind = rng.choice(["content", "folder", "lost link"])
    if kind == "folder":
        file.mkdir()
    elif kind == "lost link":
        file.symlink_to(scene.canary / "gone")
    else:
        file.write_bytes(rng.choice(contents))
    with pytest.raises((ValueError, FileNotFoundError), match="model.safetensors"):
        embedder.load(file.parent)


def a_linked_folder(scene):
    """Where the folder of a run should be is a link to the canary."""
    folder = scene.profile / "runs" / scene.name
    shutil.rmtree(folder)
    folder.symlink_to(scene.rng.choice([scene.canary, scene.canary / "below", "../../../canary"]))
    with pytest.raises(ValueError, match="is a link to"), store.held(folder):
        pass
    assert main(["runs", "remove", scene.name, "--yes"]) == 0
    assert not folder.is_symlink() and scene.name not in store.read("faults")


def a_full_disk(scene):
    """Training goes on where there is little space, and again where there is enough."""
    disk = small_disks.DiskOfFiles(scene.home)
    disk.leave(scene.rng.choice([0, scene.rng.randrange(10**5), scene.rng.randrange(5 * 10**6)]))
    try:
        assert resumed(scene.home, scene.name) == scene.expected["resumed"]
    except OSError as error:
        assert "free some space on the disk of" in str(error), str(error)
        assert "the same command goes on" in str(error), str(error)
    finally:
        disk.close()
    assert not list(scene.home.rglob("*.tmp"))
    assert resumed(scene.home, scene.name) == scene.expected["resumed"]


ATTACKS = [
    two_lines_of_a_name,
    a_forged_line,
    a_hostile_profile,
    a_hostile_folder,
    a_linked_folder,
    a_full_disk,
]


def state_of(folder):
    """All that a folder holds, and when it was changed."""
    found = {}
    for file in [folder, *sorted(folder.rglob("*"))]:
        content = file.read_bytes() if file.is_file() else b""
        found[file.relative_to(folder).as_posix()] = (content, file.stat().st_mtime_ns)
    return found


@pytest.mark.filterwarnings("ignore")
def test_an_attack_changes_nothing_outside_and_passes_no_number(
    attack, drawn, whole, expected, tmp_path, monkeypatch, capsys
):
    home, name = whole
    canary = tmp_path / "canary"
    (canary / "below").mkdir(parents=True)
    (canary / "metrics.json").write_text("{}")
    (canary / "below" / "file").write_text("kept")
    before = state_of(canary)
    results = tmp_path / "results"
    shutil.copytree(home, results)
    monkeypatch.setattr(paths, "RESULTS", results)
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    kind = ATTACKS[attack % len(ATTACKS)]
    known = expected["kept runs"]
    if kind in (a_hostile_folder, a_full_disk):
        known = {"resumed": expected["checkpoint"]}

    kind(Scene(drawn(f"attack {attack}"), results, canary, name, known))
    assert state_of(canary) == before
    assert {file.name for file in tmp_path.iterdir()} <= {"canary", "results", "cache"}
    for found, record in store.read("faults").items():
        assert record == expected["kept runs"][found] or kind is two_lines_of_a_name
