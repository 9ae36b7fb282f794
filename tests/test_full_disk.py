"""A full disk: for every file the promised message, nothing lost, and the same numbers after it.

Uses a file system in memory if one can be mounted, else files that fail.
"""

import re

import numpy as np
import pandas as pd
import pytest
import torch
from kept_runs import add, another, any_name
from PIL import Image
from safetensors.torch import load_file
from small_disks import PAGE, mounted_if_possible

from puma_study import analysis, one_run, store
from pumalib import config, data, embedder, index, models, paths
from pumalib.data import prepared
from pumalib.training import checkpoint, run_folder

PROFILE = config.Profile(
    "disk",
    data=config.Data(datasets=("photos",), image_size=48, shots=2),
    pretrained="random",
    dim=8,
    training=config.Training(epochs=2, batch_size=20, lr=1e-3, device="cpu"),
)
RUNS = {
    # Its tensors are larger than a single write.
    "adapter": PROFILE.run("adapter", adapter_rank=32),
    "pretrained": PROFILE.run("pretrained"),
}


@pytest.fixture(params=[mounted_if_possible])
def disk(request, tmp_path, monkeypatch):
    """A disk of 16 MB to which everything is written."""
    folder = tmp_path / "disk"
    found = request.param(folder)
    monkeypatch.setattr(paths, "RESULTS", folder / "results")
    any_name(monkeypatch)
    monkeypatch.setattr(paths, "CACHE", folder / "cache")
    yield found
    found.close()


def words(file):
    """A pattern of the message on a file that could not be written."""
    return (
        rf"cannot write \S*{re.escape(file)}: No space left on device; "
        r"free some space on the disk of \S+, or write elsewhere: PUMALIB_RESULTS=\S+ .*"
        r"All that was written before is whole and kept: the same command goes on from there"
    )


def left_behind(folder):
    """Names of temporary files that were not removed."""
    return [file.name for file in folder.rglob("*") if file.suffix == ".tmp"]


# ---- A training


def sizes_of(folder):
    """Bytes of a run's files, rounded up to pages: final files, and one checkpoint."""
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    return {name: -size // PAGE * -PAGE for name, size in sizes.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Folders of runs that had enough space, and the sizes of their files, by method."""
    home = tmp_path_factory.mktemp("undisturbed")
    folders = {}
    sizes = {}
    write = checkpoint.save

    def noted(folder, *args):
        write(folder, *args)
        sizes[folder.name] = sizes_of(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "RESULTS", home)
        patch.setattr(checkpoint, "save", noted)
        for method, run in RUNS.items():
            one_run.train_new(run, "disk")
            folder = store.folder(run_folder.run_name(run), "disk")
            folders[method] = folder
            sizes[method] = sizes.get(folder.name, {}) | sizes_of(folder)
    return folders, sizes


def space(file, size):
    """The bytes to leave free so that `file` fails, in a training with files of these sizes."""
    settings = size["run.json"]
    if file == "run.json":
        return 0
    if file == "checkpoint.pt":
        return settings + size["checkpoint.pt"] // 2
    if file == "log.csv":
        return settings + size["checkpoint.pt"]
    if file == "model.safetensors":
        # While a checkpoint is written, the two before it are still there.
        return settings + size["log.csv"] + 3 * size["checkpoint.pt"]
    if file == "metrics.json":
        whole = settings + size["log.csv"] + 2 * size["checkpoint.pt"] + size["model.safetensors"]
        return whole + size["metrics.json"] // 2
    return settings + size["model.safetensors"] + size["metrics.json"]


@pytest.mark.parametrize(
    "file, method",
    [
        ("run.json", "adapter"),
        ("checkpoint.pt", "adapter"),
        ("log.csv", "adapter"),
        ("model.safetensors", "adapter"),
        ("metrics.json", "adapter"),
        # With checkpoints, whose space is free in the end, there would be room for the line.
        ("kept-1.jsonl", "pretrained"),
    ],
)
def test_whatever_does_not_fit_is_said_and_the_same_command_goes_on(
    file, method, disk, undisturbed
):
    folders, sizes = undisturbed
    expected = folders[method]
    disk.leave(space(file, sizes[method]))
    with pytest.raises(OSError, match=words(file)):
        one_run.train_new(RUNS[method], "disk")
    assert not left_behind(disk.folder)
    assert store.read("disk") == {}

    disk.free()
    one_run.train_new(RUNS[method], "disk")
    assert store.read("disk").keys() == {expected.name}
    folder = store.folder(expected.name, "disk")
    record = run_folder.read_record(folder)
    wanted = run_folder.read_record(expected)
    assert record["table"] == wanted["table"]
    assert record["hits"] == wanted["hits"]
    assert_same_tensors(folder / store.MODEL, expected / store.MODEL)


def assert_same_tensors(file, other):
    mine = load_file(file)
    its = load_file(other)
    assert mine.keys() == its.keys()
    assert all(tensor.equal(its[name]) for name, tensor in mine.items())


# ---- other files


@pytest.fixture
def pictures(tmp_path):
    """A benchmark of images in folders, which lie on another disk."""
    root = tmp_path / "pictures"
    rng = np.random.default_rng(0)
    for number in range(8):
        file = root / "pens" / f"class-{number // 2}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(file)
    return data.read("folders", root)


def digests(benchmark):
    return benchmark.digest


def copies(benchmark):
    return prepared.prepare(benchmark)


def searched(benchmark):
    run = RUNS["pretrained"]
    torch.manual_seed(0)
    model = models.build(run.method, run.backbone, run.dim, pretrained="random")
    found = index.FolderIndex(
        embedder.Embedder(model.eval(), run), benchmark.folder, paths.CACHE / "index"
    )
    found.update()
    return found.vectors().tolist()


def line(benchmark):
    add(another())
    return store.read("test")


def derived(benchmark):
    return analysis.cached_table("title", "test", lambda: pd.DataFrame({"x": [1.5]})).to_csv()


# A function that writes, the file that does not fit, and the space there is.
WRITERS = {
    "digests": (digests, "pens.json", 0),
    "copies": (copies, ".png.jpg", 0),
    # All but the last bytes fit: faiss alone would report success.
    "index": (searched, "index.npz", PAGE),
    "a line": (line, "kept-1.jsonl", 0),
    "derived": (derived, ".csv", 0),
}


@pytest.mark.parametrize("write, file, left", WRITERS.values(), ids=WRITERS)
def test_whatever_is_written_says_so_where_it_does_not_fit(write, file, left, disk, pictures):
    disk.leave(left)
    with pytest.raises(OSError, match=words(file)):
        write(pictures)
    assert not left_behind(disk.folder)
    disk.free()
    first = write(pictures)
    assert first
    assert write(pictures) == first
