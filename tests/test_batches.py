"""From the table to batches: decoding, views, samplers, and equal batches for any workers."""

import io
import multiprocessing
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path

import forks
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms import v2

from pumalib import config
from pumalib.data import COLUMNS, Benchmark, batches, folders, images
from pumalib.data.batches import Plan
from pumalib.data.images import ImageError, View, decode

HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
TRAIN = View(config.Data(image_size=32), *HALF, training=True)


def photo(height, width, seed=0):
    """A smooth random picture."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def table(paths, classes, **more):
    rows = {
        "path": paths,
        "label": classes,
        "class_name": [f"c{c}" for c in classes],
        "dataset": "d",
    }
    rows["split"] = ["train" if c < 2 else "test" for c in classes]
    return Benchmark("folders", pd.DataFrame(rows)[COLUMNS], **more)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """150 small pictures of 4 classes in files."""
    root = tmp_path_factory.mktemp("files")
    names = [f"{i}é.{'jpg' if i % 2 else 'png'}" for i in range(150)]
    for i, name in enumerate(names):
        photo(40 + i % 7, 48, i).save(root / name)
    return table(names, [i % 4 for i in range(150)], root=root)


@pytest.fixture(scope="module")
def embedded():
    pixels = np.stack([np.asarray(photo(32, 32, i)) for i in range(60)])
    return table(list(range(60)), [i % 4 for i in range(60)], pixels=pixels)


def test_random_batches_cover_and_change_with_the_epoch():
    one, again, *others = (
        batches.random_batches(23, 5, *keys) for keys in ((3, 0), (3, 0), (3, 1), (4, 0))
    )
    assert [len(b) for b in one] == [5, 5, 5, 5]  # the incomplete fifth is dropped
    assert len(set(np.concatenate(one))) == 20
    assert np.array_equal(one, again) and not any(np.array_equal(one, other) for other in others)
    (only,) = batches.random_batches(3, 5, seed=0, epoch=0)
    assert sorted(only) == [0, 1, 2]


@pytest.mark.parametrize("repeat", [True, False])
def test_class_batches(repeat):
    labels = np.repeat(np.arange(10), [1, 2, 3, 4, 5, 6, 7, 8, 9, 30])[::-1]
    drawn = batches.class_batches(labels, 4, 4, repeat, seed=1, epoch=2)
    assert len(drawn) == len(labels) // 16
    distinct = []
    for batch in drawn:
        classes = labels[batch].reshape(4, 4)
        assert (classes == classes[:, :1]).all() and len(set(classes[:, 0])) == 4
        for four in batch.reshape(4, 4):
            distinct.append(len(set(four)) == min(4, (labels == labels[four[0]]).sum()))
    assert (
        all(distinct) != repeat
    )  # without, a class repeats images only where it has too few, and then all of them
    assert np.array_equal(drawn, batches.class_batches(labels, 4, 4, repeat, seed=1, epoch=2))
    assert not np.array_equal(drawn, batches.class_batches(labels, 4, 4, repeat, seed=1, epoch=3))
    (few,) = batches.class_batches([0] * 10 + [1] * 10, 5, 4, repeat, seed=0, epoch=0)
    assert len(few) == 20 and {4, 8, 12} >= {
        (few < 10).sum()
    }  # a batch keeps its size: classes come again


@pytest.mark.parametrize(
    ("batch_size", "images_per_class", "expected"),
    [(30, 4, (7, 4)), (90, 4, (22, 4)), (720, 4, (180, 4)), (8, 4, (2, 4))],
)
def test_sizes_of_class_batches(batch_size, images_per_class, expected):
    assert batches.class_sizes(batch_size, images_per_class) == expected


@pytest.mark.parametrize(("batch_size", "images_per_class"), [(30, 60), (30, 30), (7, 4)])
def test_no_class_batch_is_larger_than_was_asked_for(batch_size, images_per_class):
    message = f"images_per_class = {images_per_class} and batch_size = {batch_size}: .*two classes"
    remedy = f"raise batch_size to {2 * images_per_class} or more, or lower images_per_class to"
    with pytest.raises(ValueError, match=f"{message}.*; {remedy} {batch_size // 2}"):
        batches.class_sizes(batch_size, images_per_class)


def test_few_shot():
    labels = [0] * 3 + [1] * 20 + [2] * 20
    rows = pd.DataFrame(
        {"path": map(str, range(43)), "label": labels, "split": ["train"] * 33 + ["test"] * 10}
    )
    tables = {shots: batches.few_shot(rows, shots, seed=1) for shots in (1, 2, 4, 8, 16)}
    for shots, few in tables.items():
        assert few.groupby("label").size().tolist() == [shots] * 3 and (few.split == "train").all()
        distinct = few.groupby("label").path.nunique().tolist()
        assert distinct == [
            min(3, shots),
            shots,
            min(10, shots),
        ]  # repeats only where a class is smaller
    assert set(tables[2].path) <= set(tables[4].path) <= set(tables[8].path)
    assert tables[8].equals(batches.few_shot(rows, 8, seed=1))
    assert not tables[8].equals(batches.few_shot(rows, 8, seed=2))


def test_the_orders_of_kept_runs():
    """Printed once and kept: another order would orphan them."""
    assert batches.random_batches(8, 4, seed=1, epoch=2)[0].tolist() == [0, 2, 6, 5]
    assert batches.class_batches([0, 0, 1, 1, 2, 2], 2, 2, False, seed=1, epoch=0)[0].tolist() == [
        4,
        5,
        1,
        0,
    ]
    rows = pd.DataFrame({"path": range(8), "label": [0] * 4 + [1] * 4, "split": "train"})
    assert batches.few_shot(rows, 2, seed=1)["path"].tolist() == [0, 1, 4, 6]


COLOUR, WHITE = (200, 100, 50), (255, 255, 255)
IMAGES = {  # name: (image, how it is saved, the RGB of its first pixel)
    "rgb.png": (Image.new("RGB", (6, 5), COLOUR), {}, COLOUR),
    "grey.png": (Image.new("L", (6, 5), 77), {}, (77, 77, 77)),
    "palette.png": (
        Image.new("RGB", (6, 5), COLOUR).convert("P", palette=Image.Palette.ADAPTIVE),
        {},
        COLOUR,
    ),
    "clear.png": (Image.new("RGBA", (6, 5), (0, 0, 0, 0)), {}, WHITE),
    "half.png": (Image.new("LA", (6, 5), (0, 128)), {}, (127, 127, 127)),
    "key.png": (Image.new("RGB", (6, 5), COLOUR), {"transparency": COLOUR}, WHITE),
    "deep key.png": (
        Image.fromarray(np.full((5, 6), 51400, np.uint16)),
        {"transparency": 51400},
        WHITE,
    ),
    "clear.gif": (Image.new("P", (6, 5), 0), {"transparency": 0}, WHITE),
    "deep.png": (Image.fromarray(np.full((5, 6), 200 * 257, np.uint16)), {}, (200, 200, 200)),
    "deep.tif": (Image.fromarray(np.full((5, 6), 200 * 257, np.int32)), {}, (200, 200, 200)),
    "inks.tif": (Image.new("CMYK", (6, 5), (0, 255, 255, 0)), {}, (255, 0, 0)),
}


@pytest.mark.parametrize("name", IMAGES)
def test_every_kind_of_image_becomes_rgb(name, tmp_path):
    image, options, expected = IMAGES[name]
    image.save(tmp_path / name, **options)
    found = decode(tmp_path / name)
    assert found.mode == "RGB" and found.size == (6, 5) and found.getpixel((0, 0)) == expected
    with Image.open(tmp_path / name) as opened:
        for same in (decode(opened), decode(io.BytesIO((tmp_path / name).read_bytes()))):
            assert same.mode == "RGB" and same.tobytes() == found.tobytes()
    if not options:
        assert decode(image).tobytes() == found.tobytes()


@pytest.mark.parametrize("kind", [np.uint16, np.int32])
@pytest.mark.parametrize(("bits", "highest"), [(8, 255), (12, 4095), (16, 65535)])
def test_grey_of_any_number_of_bits_is_the_picture_in_8(tmp_path, kind, bits, highest):
    """A ramp from black to white, as a microscope of 12 bits writes it into files of 16."""
    grey = np.linspace(0, highest, 64).round().reshape(8, 8)
    Image.fromarray(grey.astype(kind)).save(tmp_path / "ramp.tif")
    expected = np.linspace(0, 255, 64).reshape(8, 8)
    found = np.asarray(decode(tmp_path / "ramp.tif"))[..., 0]
    np.testing.assert_allclose(found, expected, atol=1)


def test_white_on_transparent_is_said(tmp_path):
    drawn = np.full((8, 8, 4), 255, np.uint8)
    drawn[:4, :, 3] = 0
    Image.fromarray(drawn).save(tmp_path / "icon.png")
    with pytest.warns(UserWarning, match=r"icon\.png: white on transparent .* another ground"):
        decode(tmp_path / "icon.png")
    with pytest.warns(UserWarning, match="white on transparent"):
        decode(Image.fromarray(drawn - np.array([5, 5, 5, 0], np.uint8)))
    drawn[5, 5, :3] = 0
    empty = np.zeros_like(drawn)
    with warnings.catch_warnings(action="error"):
        decode(Image.fromarray(drawn))
        decode(Image.fromarray(empty))
        decode(Image.fromarray(np.full((8, 8, 3), 255, np.uint8)))
        # Nothing is transparent: it is an empty page.
        decode(Image.fromarray(np.full((8, 8, 4), 255, np.uint8)))


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n{} loop\n"


def test_no_program_is_started_for_an_image(tmp_path, monkeypatch):
    """Pillow passes PostScript to Ghostscript, also from a file with another extension."""
    started = []
    monkeypatch.setattr(subprocess, "check_call", lambda *given, **more: started.append(given))
    monkeypatch.setattr(subprocess, "Popen", lambda *given, **more: started.append(given))
    (tmp_path / "evil.png").write_bytes(POSTSCRIPT)
    for source in (tmp_path / "evil.png", io.BytesIO(POSTSCRIPT)):
        with pytest.raises(ImageError, match="it has none of the formats JPEG, PNG"):
            decode(source)
    assert not started


def test_each_extension_is_of_a_format_that_is_opened():
    Image.init()
    known = Image.registered_extensions()
    assert {known[name] for name in folders.EXTENSIONS} == set(images.FORMATS)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes among files")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for name in ("pipe.png", "."):
        with pytest.raises(ImageError, match="it is no file but a folder, pipe"):
            decode(tmp_path / name)


def test_values_without_an_agreed_range_the_first_frame_and_the_orientation(tmp_path):
    for name, values in (
        ("float", np.ones((4, 4), np.float32)),
        ("wide", np.full((4, 4), 70000, np.int32)),
    ):
        Image.fromarray(values).save(tmp_path / f"{name}.tif")
        with pytest.raises(
            ImageError, match=rf"{name}\.tif: cannot be read.*save it with 8 or 16 bits"
        ):
            decode(tmp_path / f"{name}.tif")

    first, second = photo(20, 30, 1), photo(20, 30, 2)
    first.save(tmp_path / "a.gif", save_all=True, append_images=[second])
    with Image.open(tmp_path / "a.gif") as opened:
        opened.seek(1)
        assert decode(opened).tobytes() == decode(tmp_path / "a.gif").tobytes()

    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees"
    photo(20, 30).save(tmp_path / "a.jpg", exif=exif)
    plain, turned = decode(tmp_path / "a.jpg"), decode(tmp_path / "a.jpg", upright=True)
    assert (
        plain.size == (30, 20)
        and turned.tobytes() == plain.transpose(Image.Transpose.ROTATE_270).tobytes()
    )
    with Image.open(tmp_path / "a.jpg") as opened:
        assert (
            decode(opened, upright=True).tobytes()
            == turned.tobytes()
            == ImageOps.exif_transpose(opened).tobytes()
        )


@pytest.fixture
def damaged(tmp_path):
    for i in range(12):
        photo(64, 64, i).save(tmp_path / f"{i}.jpg")
    whole = (tmp_path / "3.jpg").read_bytes()
    (tmp_path / "3.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "8.jpg").write_text("404 not found")
    (tmp_path / "10.jpg").unlink()
    return table([f"{i}.jpg" for i in range(12)], [i % 4 for i in range(12)], root=tmp_path)


def test_unreadable_images_are_named_and_dropped(damaged):
    errors = [str(error) for error in images.unreadable(damaged).values()]
    for name, cause, error in zip(
        (3, 8, 10), ("truncated", "none of the formats", "no such file"), errors, strict=True
    ):
        assert re.search(rf"{name}\.jpg: cannot be read as an image \(.*{cause}", error)
    with pytest.warns(UserWarning, match=r"3 of 12 images.*\n  3.jpg\n  8.jpg\n  10.jpg"):
        left = images.drop_unreadable(damaged)
    assert list(left.images.path) == [f"{i}.jpg" for i in range(12) if i not in (3, 8, 10)]
    assert list(left.images.index) == list(range(9)) and images.drop_unreadable(left) is left


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_stops_the_batches(damaged, workers):
    thirds = np.split(np.arange(12), 3)
    plan = Plan(damaged, damaged.images, thirds, TRAIN, workers=workers)
    with pytest.raises(ImageError, match=r"3\.jpg: cannot be read") as caught:
        next(batches.batches(plan))
    assert "Traceback" not in str(caught.value)
    within_20_s(lambda: not multiprocessing.active_children())


def within_20_s(condition):
    deadline = time.monotonic() + 20  # a busy machine takes its time
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def view_of(size, **settings):
    return View(config.Data(image_size=size, **settings), *HALF)


def test_exif_orientation_is_honoured_in_folders_unless_settings_say_otherwise():
    assert not view_of(32).upright and view_of(32, upright=True).upright
    assert [view_of(32, benchmark="folders", upright=asked).upright for asked in (None, False)] == [
        True,
        False,
    ]


def test_the_test_view_is_resize_and_centre_crop_of_a_long_strip_too():
    image, bicubic = photo(300, 450), v2.InterpolationMode.BICUBIC
    for resize, full in (("both", (256, 256)), ("shorter", (256, 384))):
        expected = v2.functional.center_crop(v2.functional.resize(image, full, bicubic), 224)
        assert torch.equal(
            images.pixels(image, view_of(224, resize=resize)), v2.functional.pil_to_tensor(expected)
        )
    strip, view = photo(40, 400), view_of(32, resize="shorter")
    expected = v2.functional.resize(strip, (37, 370), bicubic)
    expected = v2.functional.pil_to_tensor(v2.functional.center_crop(expected, 32)).int()
    assert (images.pixels(strip, view) - expected).abs().max() <= 1
    for size in ((30000, 2), (2, 30000), (1, 1)):
        assert images.pixels(Image.new("RGB", size), view_of(224, resize="shorter")).shape == (
            3,
            224,
            224,
        )


def collect(benchmark, order, view=TRAIN, seed=5, epoch=2, **more):
    plan = Plan(benchmark, benchmark.images, order, view, seed=seed, epoch=epoch, **more)
    return list(batches.batches(plan))


def equal(one, two):
    return len(one) == len(two) and all(
        torch.equal(a, b) and (m == n).all() for (a, m), (b, n) in zip(one, two)
    )


@pytest.mark.parametrize("source", ["files", "embedded"])
def test_same_batches_whatever_the_workers_the_start_and_the_parts(source, request):
    benchmark = request.getfixturevalue(source)
    order = batches.random_batches(
        len(benchmark.images), 70 if source == "files" else 20, seed=5, epoch=2
    )
    before = torch.get_rng_state()
    whole = collect(benchmark, order)
    assert equal(whole, collect(benchmark, order, workers=2))
    assert torch.equal(torch.get_rng_state(), before)
    assert equal(whole[1:], collect(benchmark, order, first=1, workers=1))
    halves = [
        collect(benchmark, [np.split(b, 2)[part] for b in order], part=part) for part in (0, 1)
    ]
    joined = [(torch.cat([a, b]), np.concatenate([m, n])) for (a, m), (b, n) in zip(*halves)]
    assert equal(whole, joined)
    assert not equal(whole, collect(benchmark, order, epoch=3)) and not equal(
        whole, collect(benchmark, order, seed=6)
    )
    shown, positions = whole[0]
    assert shown.shape == (len(positions), 3, 32, 32) and shown.dtype == torch.float32
    assert -1 <= shown.min() < -0.3 and 0.3 < shown.max() <= 1
    ((views, _),) = collect(benchmark, [np.zeros(9, int)])
    assert (
        len({view.numpy().tobytes() for view in views}) == 9
    )  # each image of a batch has its own crop


def test_embedded_pixels_of_the_right_size_are_only_normalised(embedded):
    rows, colours = embedded.images.iloc[[7, 3, 50]], ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    plan = Plan(embedded, rows, [np.array([2, 0])], View(config.Data(image_size=32), *colours))
    ((shown, positions),) = batches.batches(plan)
    expected = torch.from_numpy(embedded.pixels[[50, 7]]).permute(0, 3, 1, 2) / 255
    assert positions.tolist() == [2, 0] and shown.dtype == torch.float32
    torch.testing.assert_close(shown, v2.functional.normalize(expected, *colours))


def ended(process):
    """Whether a process of Linux is gone, or only waits for its parent to be told so ("Z")."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_workers_end_with_a_killed_parent(files):
    ours, theirs = multiprocessing.Pipe()
    parent = multiprocessing.get_context("fork").Process(target=hold, args=[files, theirs])
    parent.start()
    workers = ours.recv()
    assert len(workers) == 2 and not any(map(ended, workers))
    parent.kill()
    parent.join()
    within_20_s(lambda: all(map(ended, workers)))


def outlive():
    time.sleep(1)
    batches._end_with_parent(worker=0)
    time.sleep(60)


def leave(connection):
    worker = multiprocessing.get_context("fork").Process(target=outlive)
    worker.start()
    connection.send(worker.pid)
    os._exit(0)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_worker_whose_parent_was_gone_before_it_began_ends_too():
    ours, theirs = multiprocessing.Pipe()
    parent = multiprocessing.get_context("fork").Process(target=leave, args=[theirs])
    parent.start()
    worker = ours.recv()
    parent.join()
    within_20_s(lambda: ended(worker))


def hold(benchmark, connection):
    """Take one batch and leave the workers with full pipes."""
    torch.set_num_threads(1)
    positions = np.split(np.arange(150), 15) * 10
    taken = batches.batches(Plan(benchmark, benchmark.images, positions, view_of(224), workers=2))
    next(taken)
    connection.send([child.pid for child in multiprocessing.active_children()])
    time.sleep(60)


def test_the_training_crop_is_torchvisions():
    for seed in range(20):
        image, view = (
            photo(20 + 9 * seed, 60),
            View(config.Data(image_size=32, flip=seed % 2 == 1), *HALF, True),
        )
        steps = v2.RandomResizedCrop(32, (0.2, 1.0), interpolation=v2.InterpolationMode.BICUBIC)
        torch.manual_seed(seed)
        expected = v2.functional.pil_to_tensor(
            v2.RandomHorizontalFlip(0.5 * (seed % 2))(steps(image))
        )
        assert torch.equal(images.pixels(image, view, seed), expected)


def of_a_fork_server(folder, connection):
    """Take all batches by workers of a fork server, the default of Python 3.14."""
    multiprocessing.set_start_method("forkserver", force=True)
    rows = table([f"{number}.jpg" for number in range(4)], [0, 0, 1, 1], root=folder)
    plan = Plan(rows, rows.images, [np.arange(4)] * 3, view_of(48), workers=1)
    connection.send([images.sum().item() for images, _ in batches.batches(plan)])


@pytest.mark.skipif(sys.platform != "linux", reason="fork servers")
def test_workers_of_a_fork_server_decode(tmp_path):
    for number in range(4):
        photo(64, 64, number).save(tmp_path / f"{number}.jpg")
    ours, theirs = multiprocessing.Pipe()
    process = forks.start(of_a_fork_server, tmp_path, theirs)
    assert ours.poll(200)
    sums = ours.recv()
    process.join()
    assert len(sums) == 3
    assert len(set(sums)) == 1
