"""Time from image files to training batches, against the authors' way and images in memory."""

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch import Tensor

from pumalib import config, data, paths
from pumalib.data import Benchmark, batches, prepared
from pumalib.data.images import View

from .clock import Clock
from .steps import StepSetting, TrainingStep, dtype_name

# Mean and standard deviation of the channels in most timm models.
HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class PhotographSizes:
    """The number of photographs to make, and the range of their widths in pixels."""

    images: int
    narrowest: int
    widest: int


def photographs(root: Path, sizes: PhotographSizes, image_size: int) -> config.Data:
    """Write photographs as a benchmark of image files, and return its settings.

    They are crops of scikit-learn's two photographs, with sensor noise, as JPEGs of quality 92, in
    four classes; the same in every call.
    """
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    originals = [Image.fromarray(image) for image in load_sample_images().images]
    for number in range(sizes.images):
        width = int(rng.integers(sizes.narrowest, sizes.widest))
        shape = (width, int(width * rng.uniform(0.66, 0.8)))
        if rng.random() >= 0.75:
            shape = shape[::-1]
        part = _some_part(originals[number % 2], shape, rng)
        folder = root / "photographs" / f"class {number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        part.save(folder / f"{number:05d}.jpg", quality=92)
    return config.Data(benchmark="folders", root=str(root), image_size=image_size)


def _some_part(
    original: Image.Image, shape: tuple[int, int], rng: np.random.Generator
) -> Image.Image:
    """A random crop, at least half as wide as the photograph, resized to `shape`, with noise."""
    zoom = rng.uniform(0.5, 1)
    width = original.width * zoom
    height = original.height * zoom
    left = rng.uniform(0, original.width - width)
    top = rng.uniform(0, original.height - height)
    box = (left, top, left + width, top + height)
    part = np.asarray(original.resize(shape, Image.Resampling.BICUBIC, box=box), np.float32)
    noise = 4 * rng.standard_normal((*part.shape[:2], 1), np.float32)
    return Image.fromarray((part + noise).clip(0, 255).astype(np.uint8))


def reading_times(sizes: PhotographSizes, batch: int) -> pd.DataFrame:
    """Time from photographs to training batches of 224 px, on one core, in turns of a batch.

    Returns the columns way, images_per_second_per_core, and ratio to the authors' way.
    """
    with tempfile.TemporaryDirectory() as folder, _one_thread(), _cache_in(Path(folder) / "cache"):
        settings = photographs(Path(folder) / "photos", sizes, 224)
        files = data.load(settings)
        prepared.prepare(files)
        copies = prepared.use_prepared(files)
        authors = "authors (Pillow, torchvision)"
        ways = {
            authors: lambda order: _authors_stream(files, order),
            "ours, from the files": lambda order: _stream(files, settings, order),
            "ours, from prepared files": lambda order: _stream(copies, settings, order),
        }
        spent = _seconds_of_batches(ways, sizes.images, batch)

    rows = []
    for name, turns in spent.items():
        rows.append(
            {
                "way": name,
                "images_per_second_per_core": batch / np.median(turns),
                "ratio": np.median(spent[authors] / turns),
            }
        )
    return pd.DataFrame(rows)


def decoding_times(sizes: PhotographSizes, batch: int) -> pd.DataFrame:
    """Time from photographs to training batches of 224 px, on one core, by decoder.

    torchvision.io decodes to the same pixels; its crops differ from ours by up to 3 of 255 levels.
    Returns the columns way, kilobytes of a file, images_per_second_per_core, and ratio to ours.
    """
    with tempfile.TemporaryDirectory() as folder, _one_thread(), _cache_in(Path(folder) / "cache"):
        settings = photographs(Path(folder) / "photos", sizes, 224)
        files = data.load(settings)
        assert files.root is not None
        kilobytes = np.mean([(files.root / path).stat().st_size for path in files.images["path"]])
        prepared.prepare(files)
        copies = prepared.use_prepared(files)
        ours = "ours, from the files"
        ways = {
            ours: lambda order: _stream(files, settings, order),
            "ours, from prepared files": lambda order: _stream(copies, settings, order),
            "torchvision.io, transforms on uint8": lambda order: _torchvision_stream(files, order),
        }
        spent = _seconds_of_batches(ways, sizes.images, batch)

    rows = []
    for name, turns in spent.items():
        rows.append(
            {
                "way": name,
                "kilobytes": kilobytes / 1e3,
                # The fastest: other work on the machine slows the others.
                "images_per_second_per_core": batch / turns.min(),
                "ratio": np.median(spent[ours] / turns),
            }
        )
    return pd.DataFrame(rows)


def _torchvision_stream(benchmark: Benchmark, order: Sequence[np.ndarray]) -> Iterator[Tensor]:
    """Training batches (B, 3, 224, 224), decoded and cut out by torchvision alone."""
    from torchvision import io
    from torchvision.transforms import v2

    cut = v2.Compose(
        [
            v2.RandomResizedCrop(224, scale=(0.2, 1.0), interpolation=v2.InterpolationMode.BICUBIC),
            v2.RandomHorizontalFlip(),
        ]
    )
    assert benchmark.root is not None
    files = [str(benchmark.root / path) for path in benchmark.images["path"]]
    # That TorchCodec is to replace it.
    warnings.filterwarnings("ignore", "The image decoding", DeprecationWarning)
    for positions in order:
        images = []
        for position in positions:
            decoded = io.decode_jpeg(io.read_file(files[position]), mode=io.ImageReadMode.RGB)
            images.append(cut(decoded))
        yield torch.stack(images).float().div_(255).sub_(0.5).div_(0.5)


def _seconds_of_batches(
    ways: Mapping[str, Callable[[list[np.ndarray]], Iterator[Tensor]]], images: int, batch: int
) -> dict[str, np.ndarray]:
    """CPU seconds for each batch of two epochs, by way; an epoch before them warms up."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for epoch in range(3):
        order = batches.random_batches(images, batch, 0, epoch)
        streams = {name: way(order) for name, way in ways.items()}
        for _ in order:
            for name, stream in streams.items():
                start = time.process_time()
                next(stream)
                spent[name].append(time.process_time() - start)
    return {name: np.array(turns[len(order) :]) for name, turns in spent.items()}


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    """Write prepared copies to `folder`, since nobody else needs them."""
    before = paths.CACHE
    paths.CACHE = folder
    try:
        yield
    finally:
        paths.CACHE = before


def _stream(
    benchmark: Benchmark,
    settings: config.Data,
    order: Sequence[np.ndarray],
    device: torch.device | str = "cpu",
) -> Iterator[Tensor]:
    """Training batches (B, 3, size, size) of a benchmark's images by this project's code."""
    view = View(settings, HALF, HALF, training=True)
    plan = batches.Plan(benchmark, benchmark.images, order, view, device=device)
    for images, _ in batches.batches(plan):
        yield images


def _authors_stream(benchmark: Benchmark, order: Sequence[np.ndarray]) -> Iterator[Tensor]:
    """Training batches (B, 3, 224, 224) as the authors' code makes them.

    Pillow decodes the whole file, torchvision transforms one image after the other.
    """
    from torchvision import transforms

    bicubic = transforms.InterpolationMode.BICUBIC
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(224, scale=(0.2, 1.0), interpolation=bicubic),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(HALF, HALF),
        ]
    )
    assert benchmark.root is not None
    files = [benchmark.root / path for path in benchmark.images["path"]]
    for positions in order:
        images = [Image.open(files[position]).convert("RGB") for position in positions]
        yield torch.stack([transform(image) for image in images])


def small_file_times(
    sizes: PhotographSizes, batch: int, clock: Clock, backbone: str = "deit_tiny_patch16_224"
) -> pd.DataFrame:
    """Time steps of a backbone on small files against the same steps on a batch in memory.

    At 96 px in float32 as in the profile `photos-96`, and at 128 px in bfloat16 as in `photos`, in
    turns; a first epoch, which decodes, and `clock.rounds` later ones.  Returns the columns method,
    size, dtype, epoch ("first" or "later"), images_per_s, beside_memory.
    """
    tables = []
    for method in ("linear", "puma"):
        for pixels, dtype in ((96, torch.float32), (128, torch.bfloat16)):
            setting = StepSetting(backbone, pixels, dtype, clock.device)
            spent = _small_file_seconds(method, sizes, batch, setting, clock)
            tables.append(_first_and_later(method, sizes.images, batch, setting, spent))
    return pd.concat(tables, ignore_index=True)


def _small_file_seconds(
    method: str, sizes: PhotographSizes, batch: int, setting: StepSetting, clock: Clock
) -> dict[str, np.ndarray]:
    """Seconds of each step of all epochs but the first step, by "files" and "memory"."""
    order = []
    for epoch in range(1 + clock.rounds):
        order += batches.random_batches(sizes.images, batch, 0, epoch)
    labels = torch.randint(sizes.images, (batch,), device=setting.device)
    # A new folder each time, so that no file has been read before.
    with tempfile.TemporaryDirectory() as folder:
        settings = photographs(Path(folder), sizes, setting.pixels)
        stream = _stream(data.load(settings), settings, order, setting.device)
        on_memory = TrainingStep(method, torch.empty(0), labels, setting)
        on_files = TrainingStep(method, torch.empty(0), labels, setting)

        def step_on_files() -> None:
            on_files.images = next(stream)
            on_memory.images = on_files.images
            on_files.run()

        candidates = {"files": step_on_files, "memory": on_memory.run}
        return clock.interleaved(candidates, len(order) - 1)


def _first_and_later(
    method: str, images: int, batch: int, setting: StepSetting, spent: Mapping[str, np.ndarray]
) -> pd.DataFrame:
    """Two rows of `small_file_times`, from the seconds of all steps."""
    # Turns of the first epoch, whose first step does not count.
    in_first = images // batch - 1
    rows = []
    for epoch, turns in (("first", slice(in_first)), ("later", slice(in_first, None))):
        files = np.median(spent["files"][turns])
        memory = np.median(spent["memory"][turns])
        rows.append(
            {
                "method": method,
                "size": setting.pixels,
                "dtype": dtype_name(setting.dtype),
                "epoch": epoch,
                "images_per_s": batch / files,
                "beside_memory": memory / files,
            }
        )
    return pd.DataFrame(rows)
