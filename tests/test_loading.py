"""From the table to batches: samplers, decoding, augmentation, the same batches whatever the workers."""

import time
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms import functional as tvf

from pumalib.data import COLUMNS, Benchmark, decoding, loading, sampling

HALF = dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def photo(height, width, seed=0):
    """A smooth random picture (H, W, 3) uint8."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


def table(paths, classes, **more):
    rows = {"path": paths, "label": classes, "class_name": [f"c{c}" for c in classes], "dataset": "d"}
    rows["split"] = ["train" if c < 2 else "test" for c in classes]
    return Benchmark("folders", pd.DataFrame(rows)[COLUMNS], **more)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """150 small pictures of 4 classes in files."""
    root = tmp_path_factory.mktemp("files")
    for i in range(150):
        Image.fromarray(photo(40 + i % 7, 48, i)).save(root / f"{i}.{'jpg' if i % 2 else 'png'}")
    return table([f"{i}.{'jpg' if i % 2 else 'png'}" for i in range(150)], [i % 4 for i in range(150)], root=root)


@pytest.fixture(scope="module")
def embedded():
    pixels = np.stack([photo(32, 32, i) for i in range(60)])
    return table(list(range(60)), [i % 4 for i in range(60)], pixels=pixels)


# ---- samplers


def test_random_batches_cover_and_change_with_the_epoch():
    one = sampling.random_batches(23, 5, seed=3, epoch=0)
    assert [len(b) for b in one] == [5, 5, 5, 5]  # the incomplete fifth is dropped
    assert len(set(np.concatenate(one))) == 20
    assert all((a == b).all() for a, b in zip(one, sampling.random_batches(23, 5, seed=3, epoch=0)))
    for other in (sampling.random_batches(23, 5, seed=3, epoch=1), sampling.random_batches(23, 5, seed=4, epoch=0)):
        assert not (np.concatenate(one) == np.concatenate(other)).all()
    (only,) = sampling.random_batches(3, 5, seed=0, epoch=0)
    assert sorted(only) == [0, 1, 2]
    with pytest.raises(ValueError, match="at least 1"):
        sampling.random_batches(0, 5, seed=0, epoch=0)


def test_class_batches():
    labels = np.repeat(np.arange(10), [1, 2, 3, 4, 5, 6, 7, 8, 9, 30])[::-1]
    batches = sampling.class_batches(labels, 4, 4, seed=1, epoch=2)
    assert len(batches) == len(labels) // 16
    for batch in batches:
        classes = labels[batch].reshape(4, 4)
        assert (classes == classes[:, :1]).all() and len(set(classes[:, 0])) == 4
        for four in batch.reshape(4, 4):
            size = (labels == labels[four[0]]).sum()
            assert len(set(four)) == min(4, size)  # repeats only where a class is too small, and then all its images
    firsts = np.concatenate([labels[b][::4] for b in batches])
    assert set(firsts[:10]) == set(range(10))  # all classes once before one comes again
    again = sampling.class_batches(labels, 4, 4, seed=1, epoch=2)
    assert all((a == b).all() for a, b in zip(batches, again))
    assert not (batches[0] == sampling.class_batches(labels, 4, 4, seed=1, epoch=3)[0]).all()


def test_class_batches_with_few_classes_or_few_images():
    batches = sampling.class_batches([0] * 10 + [1] * 10, 180, 4, seed=0, epoch=0)
    assert [len(b) for b in batches] == [8, 8]
    sparse = sampling.class_batches(list(range(7)), 3, 4, seed=0, epoch=0)  # 7 images, one per class
    assert len(sparse) == 3 and set(np.concatenate(sparse)) == set(range(7))
    with pytest.raises(ValueError, match="at least 1"):
        sampling.class_batches([], 3, 4, seed=0, epoch=0)


def test_ordered_batches():
    assert [b.tolist() for b in sampling.ordered_batches(5, 2)] == [[0, 1], [2, 3], [4]]


def test_few_shot():
    labels = [0] * 3 + [1] * 20 + [2] * 20
    split = ["train"] * 33 + ["test"] * 10
    images = pd.DataFrame({"path": [str(i) for i in range(43)], "label": labels, "split": split})
    tables = {shots: sampling.few_shot(images, shots, seed=1) for shots in (1, 2, 4, 8, 16)}
    for shots, table in tables.items():
        assert table.groupby("label").size().tolist() == [shots] * 3 and (table.split == "train").all()
        distinct = table.groupby("label").path.nunique().tolist()
        assert distinct == [min(3, shots), shots, min(10, shots)]  # repeats only where a class is smaller
    assert set(tables[2].path) <= set(tables[4].path) <= set(tables[8].path)
    assert tables[8].equals(sampling.few_shot(images, 8, seed=1))
    assert not tables[8].equals(sampling.few_shot(images, 8, seed=2))
    assert len(sampling.few_shot(images, 0, seed=1)) == 0


# ---- decoding


def test_every_kind_of_image_becomes_rgb(tmp_path):
    colour = (200, 100, 50)
    for mode in ("L", "CMYK", "P", "RGB", "1", "YCbCr"):
        Image.new("RGB", (6, 5), colour).convert(mode).save(tmp_path / f"{mode}.tif")
        image = decoding.decode(tmp_path / f"{mode}.tif")
        assert image.mode == "RGB" and image.size == (6, 5), mode
    assert decoding.decode(tmp_path / "RGB.tif").getpixel((0, 0)) == colour
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "red.jpg")
    r, g, b = decoding.decode(tmp_path / "red.jpg").getpixel((8, 8))
    assert r > 220 and g < 40 and b < 60

    Image.new("RGBA", (4, 4), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    Image.new("LA", (4, 4), (0, 128)).save(tmp_path / "half.png")
    Image.new("RGB", (4, 4), colour).save(tmp_path / "key.png", transparency=colour)
    Image.new("L", (4, 4), 9).save(tmp_path / "greykey.png", transparency=9)
    Image.new("P", (4, 4), 0).save(tmp_path / "clear.gif", transparency=0)
    assert decoding.decode(tmp_path / "clear.png").getpixel((0, 0)) == (255, 255, 255)
    assert decoding.decode(tmp_path / "half.png").getpixel((0, 0)) == (127, 127, 127)
    for name in ("key.png", "greykey.png", "clear.gif"):
        assert decoding.decode(tmp_path / name).getpixel((0, 0)) == (255, 255, 255), name

    Image.fromarray(np.full((4, 4), 200 * 257, np.uint16)).save(tmp_path / "deep.png")
    assert decoding.decode(tmp_path / "deep.png").getpixel((0, 0)) == (200, 200, 200)

    exif = Image.Exif()
    exif[0x0112] = 6  # "rotate by 90 degrees"
    Image.new("RGB", (8, 4)).save(tmp_path / "turned.jpg", exif=exif)
    assert decoding.decode(tmp_path / "turned.jpg").size == (8, 4)


@pytest.fixture
def damaged(tmp_path):
    paths = []
    for i in range(12):
        paths.append(f"{i}.jpg")
        Image.fromarray(photo(64, 64, i)).save(tmp_path / paths[-1])
    whole = (tmp_path / "3.jpg").read_bytes()
    (tmp_path / "3.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "8.jpg").write_text("404 not found")
    (tmp_path / "10.jpg").unlink()
    return table(paths, [i % 4 for i in range(12)], root=tmp_path)


@pytest.mark.parametrize("name, cause", [("3", "truncated"), ("8", "identify"), ("10", "No such file")])
def test_an_unreadable_image_is_named(damaged, name, cause):
    with pytest.raises(decoding.ImageError, match=rf"{name}\.jpg: cannot.*{cause}.*drop_unreadable.*data verify"):
        decoding.decode(damaged.root / f"{name}.jpg")


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_stops_the_batches(damaged, workers):
    order = sampling.ordered_batches(12, 4)
    taken = loading.batches(damaged, damaged.images, order, train=True, size=16, workers=workers, **HALF)
    with pytest.raises(decoding.ImageError, match=r"3\.jpg: cannot be read") as caught:
        next(taken)
    assert "Traceback" not in str(caught.value)


def test_drop_unreadable(damaged):
    with pytest.warns(UserWarning, match=r"3 of 12 images.*\n  3.jpg\n  8.jpg\n  10.jpg"):
        left = decoding.drop_unreadable(damaged)
    assert list(left.images.path) == [f"{i}.jpg" for i in range(12) if i not in (3, 8, 10)]
    assert list(left.images.index) == list(range(9)) and len(damaged.images) == 12
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decoding.drop_unreadable(left) is left


# ---- crops


def test_random_boxes_are_distributed_as_in_torchvision():
    height, width, scale = 300, 400, (0.2, 1.0)
    uniform = np.random.default_rng(0).random((4000, 22)).tolist()
    boxes = np.array([loading.random_box(draw, height, width, scale) for draw in uniform])
    assert (boxes[:, :2] >= 0).all() and (boxes[:, 2] <= width).all() and (boxes[:, 3] <= height).all()
    torch.manual_seed(0)
    image = torch.empty(3, height, width)
    theirs = np.array([RandomResizedCrop.get_params(image, scale, (3 / 4, 4 / 3)) for _ in range(4000)])
    ours = np.stack([boxes[:, 1], boxes[:, 0], boxes[:, 3] - boxes[:, 1], boxes[:, 2] - boxes[:, 0]], 1)
    for quantile in (0.1, 0.5, 0.9):
        np.testing.assert_allclose(np.quantile(ours, quantile, 0), np.quantile(theirs, quantile, 0), atol=12)


def test_where_no_box_fits_the_largest_centred_one_is_taken():
    uniform = np.random.default_rng(0).random(22).tolist()
    assert loading.random_box(uniform, 10, 100, (1.0, 1.0)) == (43, 0, 56, 10)  # 13 x 10
    assert loading.random_box(uniform, 100, 10, (1.0, 1.0)) == (0, 43, 10, 56)


@pytest.mark.parametrize("resize, full", [("both", (256, 256)), ("shorter", (256, 384))])
def test_test_transform_is_resize_and_centre_crop(tmp_path, resize, full):
    Image.fromarray(photo(300, 450)).save(tmp_path / "a.png")
    benchmark = table(["a.png"], [0], root=tmp_path)
    args = dict(train=False, size=224, resize=resize, **HALF)
    ((x, y, positions),) = loading.batches(benchmark, benchmark.images, [np.array([0])], **args)
    image = tvf.resize(Image.open(tmp_path / "a.png"), list(full), Image.Resampling.BICUBIC)
    expected = tvf.to_tensor(tvf.center_crop(image, 224)) * 2 - 1
    assert x.dtype == torch.float32 and x.is_contiguous() and y.tolist() == [0] and positions.tolist() == [0]
    assert (x[0] - expected).abs().max() <= 4 / 255 + 1e-6  # two levels
    with pytest.raises(ValueError, match="unknown resize 'longer'; known: both, shorter"):
        loading.test_size(10, 10, 8, "longer")


def test_resample_is_pillows_antialiased_bicubic():
    pixels = np.stack([photo(40, 36, i) for i in range(4)])
    boxes = np.array([[0, 0, 36, 40], [3, 5, 20, 17], [1, 2, 35, 12], [4.5, 8.25, 30, 39]], float)
    flipped = np.array([False, True, False, True])
    for size in (16, 32, 64):
        ours = loading.resample(torch.from_numpy(pixels), boxes, size, flipped)
        for i in range(4):
            image = Image.fromarray(pixels[i]).resize((size, size), Image.Resampling.BICUBIC, box=tuple(boxes[i]))
            theirs = np.asarray(image)[:, ::-1] if flipped[i] else np.asarray(image)
            assert np.abs(ours[i].permute(1, 2, 0).numpy() - theirs).max() < 1.6, (size, i)


# ---- batches


def collect(benchmark, order, **args):
    args = dict(train=True, size=32, seed=5, epoch=2, **HALF) | args
    return list(loading.batches(benchmark, benchmark.images, order, **args))


def equal(one, two):
    return len(one) == len(two) and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and (a[2] == b[2]).all() for a, b in zip(one, two)
    )


@pytest.mark.parametrize("source", ["files", "embedded"])
def test_same_batches_whatever_the_workers_and_the_start(source, request):
    benchmark = request.getfixturevalue(source)
    order = sampling.random_batches(len(benchmark.images), 70 if source == "files" else 20, seed=5, epoch=2)
    whole = collect(benchmark, order)
    assert equal(whole, collect(benchmark, order, workers=2))
    assert equal(whole[1:], collect(benchmark, order, start=1))
    assert equal(whole[1:], collect(benchmark, order, start=1, workers=1))
    assert not equal(whole, collect(benchmark, order, epoch=3))
    assert not equal(whole, collect(benchmark, order, seed=6))
    x, y, positions = whole[0]
    assert x.shape == (len(positions), 3, 32, 32) and x.dtype == torch.float32 and x.is_contiguous()
    assert y.tolist() == benchmark.images.label.iloc[positions].tolist() and y.dtype == torch.int64
    assert -1 <= x.min() < -0.3 and 0.3 < x.max() <= 1


def test_embedded_pixels_of_the_right_size_are_only_normalised(embedded):
    order = sampling.ordered_batches(60, 40)
    x = torch.cat([x for x, _, _ in collect(embedded, order, train=False, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))])
    expected = (embedded.pixels / 255 - (0.1, 0.2, 0.3)) / (0.4, 0.5, 0.6)
    np.testing.assert_allclose(x.permute(0, 2, 3, 1).numpy(), expected, atol=1e-6)


def test_whole_images_without_crop_and_flip(files, embedded):
    order = [np.arange(10)]
    (x, _, _), = collect(embedded, order, crop_scale=(1.0, 1.0), flip=False)
    (flipped, _, _), = collect(embedded, order, crop_scale=(1.0, 1.0))
    mirrored = [torch.equal(a.flip(2), b) and not torch.equal(a, b) for a, b in zip(x, flipped)]
    assert 0 < sum(mirrored) < 10


def test_rows_in_any_order_and_own_labels(embedded):
    rows = embedded.images.iloc[[7, 3, 50]]
    ((x, y, positions),) = loading.batches(
        embedded, rows, [np.array([2, 0])], train=False, size=32, labels=[10, 11, 12], **HALF
    )
    assert y.tolist() == [12, 10] and positions.tolist() == [2, 0]
    np.testing.assert_allclose(x[0].permute(1, 2, 0).numpy(), embedded.pixels[50] / 127.5 - 1, atol=1e-6)


def test_embedded_augmentation_is_fast():
    pixels = np.random.default_rng(0).integers(0, 256, (720, 32, 32, 3), dtype=np.uint8)
    benchmark = table(list(range(720)), [i % 4 for i in range(720)], pixels=pixels)
    order = [np.arange(720)] * 5
    collect(benchmark, order[:1])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        start = time.process_time()
        collect(benchmark, order)
        rate = 5 * 720 / (time.process_time() - start)
    finally:
        torch.set_num_threads(threads)
    assert rate > 5000, f"{rate:.0f} images/s"
