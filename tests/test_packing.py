"""The packed copy: parts of images decode alone; interrupted, damaged, stale, full disk, two at once."""

import errno
import io
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from pumalib import bench_data, data
from pumalib.data import decoding, loading, packing

HALF = dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def photo(height, width, seed=0):
    """A smooth random picture (H, W, 3) uint8."""
    small = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


@pytest.fixture
def benchmark(tmp_path):
    """Two datasets of 24 photographs in 4 classes, of 100 to 170 pixels."""
    for i in range(48):
        folder = tmp_path / "root" / ("birds" if i < 24 else "cars") / f"class {i % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(photo(100 + i, 170 - i, i))
        image.convert("L" if i == 5 else "RGB").save(folder / f"{i}.{'png' if i % 9 == 0 else 'jpg'}", quality=95)
    return data.load("folders", tmp_path / "root")


def test_parts_decode_alone():
    image = Image.fromarray(photo(173, 301))
    record = np.frombuffer(packing.encode(image, 90), np.uint8)
    stream, corner = packing.part(record, (0, 0, *image.size))
    whole = np.asarray(Image.open(io.BytesIO(stream))).astype(int)
    assert corner == (0, 0) and whole.shape == (176, 320, 3)
    assert np.abs(whole[:173, :301] - np.asarray(image)).mean() < 1.5
    rng = np.random.default_rng(0)
    for _ in range(30):
        left, right = sorted(rng.choice(302, 2, replace=False).tolist())
        top, bottom = sorted(rng.choice(174, 2, replace=False).tolist())
        jpeg, (x, y) = packing.part(record, (left, top, right, bottom))
        part = np.asarray(Image.open(io.BytesIO(jpeg))).astype(int)
        assert x <= left < x + 64 and y <= top < y + 16 and part.shape[1] < right - left + 128
        shown = np.abs(part[top - y : bottom - y, left - x : right - x] - whole[top:bottom, left:right])
        assert shown.max() <= 16 and shown.mean() < 0.5  # at its edge colour is interpolated from one side only


@pytest.mark.parametrize("size", [(1, 1), (1, 200), (64, 16), (65, 17), (1000, 3)])
def test_images_of_any_size(size):
    image = Image.new("RGB", size, (200, 100, 50))
    jpeg, _ = packing.part(np.frombuffer(packing.encode(image, 90), np.uint8), (size[0] - 1, size[1] - 1, *size))
    assert np.abs(np.asarray(Image.open(io.BytesIO(jpeg))).astype(int) - (200, 100, 50)).max() <= 3


def both(benchmark, packed, **args):
    order = [np.arange(48)]
    args = dict(size=64, **HALF) | args
    return [next(loading.batches(b, b.images, order, **args))[0] for b in (benchmark, packed)]


def test_batches_from_the_packed_copy_look_the_same(benchmark, tmp_path):
    files = packing.prepare(benchmark, tmp_path / "packed", workers=0)
    assert [file.name for file in files] == ["birds.pack", "cars.pack"]
    packed = packing.use(benchmark, tmp_path / "packed")
    assert (benchmark.form, packed.form) == ("files", "packed") and benchmark.digest() != packed.digest()
    for args in (dict(train=True), dict(train=False), dict(train=False, resize="shorter")):
        one, two = both(benchmark, packed, **args)
        assert one.shape == two.shape and (one - two).abs().mean() < 0.02, args  # of a range of 2
    one, two = both(benchmark, packed, train=True, size=16)  # from the smallest records: boxes round to 1/60 of a side
    assert (one - two).abs().mean() < 0.08
    assert torch.equal(both(packed, packed, train=True)[0], both(packed, packed, train=True, workers=2)[1])
    few = packed.select(["cars"])
    order = [np.arange(10)]
    x, _, _ = next(loading.batches(few, few.train, order, train=False, size=64, **HALF))
    assert torch.equal(x, next(loading.batches(packed, few.train, order, train=False, size=64, **HALF))[0])


def test_sizes_and_what_is_recorded(benchmark, tmp_path):
    packing.prepare(benchmark, tmp_path, side=80, quality=70, workers=0)
    pack = packing.read(tmp_path, "birds")
    assert (pack.side, pack.quality) == (80, 70) and len(pack.index["paths"]) == 24
    sizes = pack.index["sizes"]
    assert (sizes.min(1) == 80).all() and pack.size(0) == tuple(sizes[0])
    assert [min(pack.size(0, level)) for level in (1, 2)] == [57, 40]
    assert [pack.level(shrink) for shrink in (0.5, 1.4, 1.42, 1.99, 2, 9)] == [0, 0, 1, 1, 2, 2]
    packing.verify(tmp_path, "birds")
    before = (tmp_path / "birds.pack").stat()
    packing.prepare(benchmark, tmp_path, side=80, quality=70, workers=0)
    assert (tmp_path / "birds.pack").stat().st_mtime_ns == before.st_mtime_ns  # it was there
    packing.prepare(benchmark, tmp_path, side=60, quality=70, workers=0)
    assert packing.read(tmp_path, "birds").side == 60


def test_the_default_folder_is_no_dataset(benchmark):
    packing.prepare(benchmark, workers=0)
    again = data.load("folders", benchmark.root)
    assert again.datasets == ["birds", "cars"] and packing.use(again).form == "packed"


def test_bench_measures_three_ways():
    table = bench_data.run(images=8, epochs=1, batch_size=4)
    assert len(table) == 3 and np.isfinite(table.to_numpy(float)).all() and table.ratio.iloc[0] == 1
    assert (table.images_per_second_per_core > 0).all()


def test_the_same_file_whatever_the_workers(benchmark, tmp_path):
    packing.prepare(benchmark, tmp_path / "a", workers=0)
    packing.prepare(benchmark, tmp_path / "b", workers=2)
    assert packing.read(tmp_path / "a", "birds").digest == packing.read(tmp_path / "b", "birds").digest


# ---- interrupted


SLOW = """
import sys, time
from pumalib import data
from pumalib.data import packing
append = packing._append
packing._append = lambda stream, content: (append(stream, content), time.sleep(float(sys.argv[3])))
packing.prepare(data.load("folders", sys.argv[1]), sys.argv[2], workers=int(sys.argv[4]))
"""


def start(benchmark, folder, seconds, workers=0):
    command = [sys.executable, "-c", SLOW, benchmark.root, folder, str(seconds), str(workers)]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def test_killed_and_run_again(benchmark, tmp_path):
    packing.prepare(benchmark, tmp_path / "whole", workers=0)
    folder = tmp_path / "killed"
    killed = start(benchmark, folder, 0.05, workers=1)
    journal = folder / "birds.journal"
    while killed.poll() is None and not (journal.exists() and len(journal.read_text().splitlines()) > 6):
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    done = len(journal.read_bytes().splitlines()) - 1
    assert 5 < done < 24 and not (folder / "birds.index.npz").exists()
    with pytest.raises(ValueError, match="dataset 'birds': no finished packed copy in .*data prepare"):
        packing.use(benchmark, folder)
    with open(folder / "birds.pack.part", "ab") as part:
        part.write(b"half a record")
    with open(journal, "a") as stream:
        stream.write('["birds/cla')
    seen = []
    decode = decoding.decode
    try:
        decoding.decode = lambda file: seen.append(file) or decode(file)
        packing.prepare(benchmark.select(["birds"]), folder, workers=0)
    finally:
        decoding.decode = decode
    assert len(seen) == 24 - done
    assert packing.read(folder, "birds").digest == packing.read(tmp_path / "whole", "birds").digest
    assert sorted(p.name for p in folder.glob("birds*")) == ["birds.index.npz", "birds.lock", "birds.pack"]


def test_a_journal_of_other_settings_or_images_is_not_believed(benchmark, tmp_path):
    birds = benchmark.select(["birds"])
    packing.prepare(birds, tmp_path / "whole", workers=0)
    for side, size in ((100, None), (512, 1)):
        folder = tmp_path / f"{side}"
        folder.mkdir()
        (folder / "birds.pack.part").write_bytes(bytes(1000))
        path = birds.images.path[0]
        source = packing._source(birds.root / path)
        settings = {"format": packing.FORMAT, "side": side, "quality": 90}
        lines = [json.dumps(settings), json.dumps([path, 500, 300, 200, 9, 9, size or source[0], source[1]])]
        (folder / "birds.journal").write_text("\n".join(lines) + "\n")
        packing.prepare(birds, folder, workers=0)
        assert packing.read(folder, "birds").digest == packing.read(tmp_path / "whole", "birds").digest


def test_two_at_once(benchmark, tmp_path):
    packing.prepare(benchmark, tmp_path / "whole", workers=0)
    both = [start(benchmark, tmp_path / "packed", 0.01) for _ in range(2)]
    assert [process.wait(240) for process in both] == [0, 0]
    for name in ("birds", "cars"):
        packing.verify(tmp_path / "packed", name)
        assert packing.read(tmp_path / "packed", name).digest == packing.read(tmp_path / "whole", name).digest


def test_no_space_left(benchmark, tmp_path, monkeypatch):
    append, calls = packing._append, []

    def full(stream, content):
        calls.append(content)
        if len(calls) > 20:
            stream.write(content[: len(content) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        append(stream, content)

    monkeypatch.setattr(packing, "_append", full)
    with pytest.raises(OSError, match=r"no space left in .*packed: 9 of 24 images of birds.*free about .* GB.*goes on"):
        packing.prepare(benchmark, tmp_path / "packed", workers=0)
    monkeypatch.setattr(packing, "_append", append)
    packing.prepare(benchmark, tmp_path / "packed", workers=0)
    packing.prepare(benchmark, tmp_path / "whole", workers=0)
    assert packing.read(tmp_path / "packed", "birds").digest == packing.read(tmp_path / "whole", "birds").digest


# ---- bad input


def test_stale_cut_short_damaged(benchmark, tmp_path):
    packing.prepare(benchmark, tmp_path, workers=0)
    image = benchmark.root / benchmark.images.path[7]
    Image.fromarray(photo(90, 90, 99)).save(image)
    with pytest.raises(ValueError, match=rf"birds.pack: older than its source .*{image.name}; run .*data prepare"):
        packing.use(benchmark, tmp_path)
    packing.prepare(benchmark, tmp_path, workers=0)
    assert packing.use(benchmark, tmp_path).packed["birds"].index["sizes"][7].tolist() == [90, 90]

    file = tmp_path / "cars.pack"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"cars.pack: cut short, [\d,]+ of [\d,]+ bytes; run"):
        packing.use(benchmark, tmp_path)
    packed = packing.use(benchmark.select(["birds"]), tmp_path)
    (tmp_path / "birds.pack").write_bytes(bytes((tmp_path / "birds.pack").stat().st_size))  # zeros, at the right length
    with pytest.raises(decoding.ImageError, match="birds.pack: record 0 is damaged; remove it and run"):
        next(loading.batches(packed, packed.images, [np.arange(1)], train=True, size=32, **HALF))
    file.write_bytes(content[:-1] + b"x")
    with pytest.raises(ValueError, match="cars.pack: damaged, its SHA-256"):
        packing.verify(tmp_path, "cars")
    (tmp_path / "cars.index.npz").write_bytes(b"PK nothing")
    with pytest.raises(ValueError, match="cars.index.npz: damaged .*; run"):
        packing.use(benchmark, tmp_path)
    packing.prepare(benchmark, tmp_path, workers=0)
    packing.verify(tmp_path, "cars")


def test_images_added_since(benchmark, tmp_path):
    packing.prepare(benchmark, tmp_path, workers=0)
    Image.fromarray(photo(50, 50)).save(benchmark.root / "birds" / "class 0" / "new.png")
    with pytest.raises(ValueError, match="birds.pack: lacks 1 images, for instance birds/class 0/new.png"):
        packing.use(data.load("folders", benchmark.root), tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_named(benchmark, tmp_path, workers):
    (benchmark.root / benchmark.images.path[3]).write_bytes(b"no image")
    with pytest.raises(decoding.ImageError, match=rf"{benchmark.images.path[3]}: cannot be read"):
        packing.prepare(benchmark, tmp_path, workers=workers)


def test_refusals(benchmark, tmp_path):
    with pytest.raises(ValueError, match="side 8, quality 90"):
        packing.prepare(benchmark, tmp_path, side=8)
    with pytest.raises(ValueError, match="side 512, quality 0"):
        packing.prepare(benchmark, tmp_path, quality=0)
    with pytest.raises(ValueError, match="is embedded; only image files are packed"):
        packing.prepare(data.Benchmark("mini", benchmark.images, pixels=np.zeros((1, 32, 32, 3), np.uint8)), tmp_path)
