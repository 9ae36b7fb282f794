"""How fast image files become normalised batches: the authors' way, ours from the files, ours from a packed copy.

All three do the training transform of the paper (random resized crop to 224 pixels, bicubic, flip, normalise) on the
same photographs and one core, end to end from the file to a float batch.
"""

from __future__ import annotations

import argparse
import platform
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision import transforms

from . import data, paths
from .data import loading, packing, sampling

SIZE = 224
MEAN = STD = (0.5, 0.5, 0.5)


def photographs(root: Path, count: int, seed: int = 0) -> data.Benchmark:
    """Made-up photographs in `root`: parts of two real ones at a longer side of 500 to 1,200 pixels, with sensor noise.

    They are JPEGs of quality 92, about 2.5 bits per pixel, like those of the paper's datasets.
    """
    rng = np.random.default_rng(seed)
    real = [Image.fromarray(image) for image in load_sample_images().images]
    for i in range(count):
        longer = int(rng.integers(500, 1201))
        size = longer, int(longer * rng.uniform(0.66, 0.8))
        size = size if rng.random() < 0.75 else size[::-1]
        source, zoom = real[i % 2], rng.uniform(0.5, 1)
        w, h = source.width * zoom, source.height * zoom
        x, y = rng.uniform(0, source.width - w), rng.uniform(0, source.height - h)
        image = np.asarray(source.resize(size, Image.Resampling.BICUBIC, box=(x, y, x + w, y + h)), np.float32)
        image = image + 4 * rng.standard_normal((*image.shape[:2], 1), np.float32)
        folder = root / "photographs" / f"class {i % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / f"{i:05d}.jpg", quality=92)
    return data.load("folders", root)


def authors_batches(benchmark: data.Benchmark, index_batches: list[np.ndarray]) -> Iterator[torch.Tensor]:
    """As the authors' code: Pillow decodes the whole file, torchvision transforms one image after the other."""
    transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE, scale=(0.2, 1.0), interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )
    paths = benchmark.images["path"].tolist()
    for positions in index_batches:
        yield torch.stack([transform(Image.open(benchmark.root / paths[i]).convert("RGB")) for i in positions])


def _our_batches(benchmark: data.Benchmark, index_batches: list[np.ndarray]) -> Iterator[torch.Tensor]:
    args = dict(train=True, size=SIZE, mean=MEAN, std=STD)
    return (x for x, _, _ in loading.batches(benchmark, benchmark.images, index_batches, **args))


def run(images: int = 240, epochs: int = 4, batch_size: int = 30, seed: int = 0) -> pd.DataFrame:
    """Images per second on one core, and growth of memory over the epochs, for the three ways.

    The ways take turns batch by batch.  The ratio to the authors' is the median over the batches, so that it holds on
    a busy machine too; the first epoch warms up.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            benchmark = photographs(Path(folder), images, seed)
            packing.prepare(benchmark)
            ways: dict[str, tuple[Callable, data.Benchmark]] = {
                "authors (Pillow, torchvision)": (authors_batches, benchmark),
                "ours, from the files": (_our_batches, benchmark),
                "ours, from the packed copy": (_our_batches, packing.use(benchmark)),
            }
            rounds, memory = [], []
            for epoch in range(epochs + 1):
                index_batches = sampling.random_batches(images, batch_size, seed, epoch)
                takers = [make(source, index_batches) for make, source in ways.values()]
                for _ in index_batches:
                    seconds = []
                    for taker in takers:
                        start = time.process_time()
                        next(taker)
                        seconds.append(time.process_time() - start)
                    rounds.append(seconds)
                memory.append(_resident())
    finally:
        torch.set_num_threads(threads)
    seconds = np.array(rounds[len(index_batches) :])  # (rounds, ways)
    table = pd.DataFrame(index=pd.Index(ways, name="way"))
    table["images_per_second_per_core"] = batch_size / np.median(seconds, axis=0)
    table["ratio"] = np.median(seconds[:, :1] / seconds, axis=0)
    table["memory_growth_mib"] = memory[-1] - memory[1]  # of the process: all ways together
    return table


def main(argv: list[str] | None = None) -> Path:
    """`python -m pumalib bench data`: measure, print the table, write `results/bench/data-cpu.csv`."""
    parser = argparse.ArgumentParser(prog="python -m pumalib bench data", description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=240, help="photographs made for it")
    parser.add_argument("--epochs", type=int, default=4, help="passes over them after the first")
    chosen = parser.parse_args(argv)
    table = run(chosen.images, chosen.epochs).assign(python=platform.python_version(), torch=torch.__version__)
    print(table.iloc[:, :3].round(2).to_string())
    file = paths.RESULTS / "bench" / "data-cpu.csv"
    with paths.written_whole(file) as temporary:
        table.to_csv(temporary, float_format="%.4f")
    print(file)
    return file


def _resident() -> float:
    """Resident memory of this process in MiB (its highest so far where the system does not tell the present one)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
