"""What things cost, measured side by side with references in one process (notebooks 92 and 24).

Machines differ and others use them too, so only ratios mean something: candidates take turns
(`Clock.by_turns`), and each is told beside what is common for the same job.
"""

import importlib
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .. import config, data, evaluation, losses, models, paths, training
from ..data import Benchmark, batches, prepared
from ..data.images import View
from ..training import loop

# Training images of the eight datasets (Table 1).
TRAIN_IMAGES = 141_404
# Test images and classes of the eight datasets (Table 1).
EIGHT_DATASETS = {
    "cub": (5_924, 100),
    "cars": (8_131, 98),
    "sop": (60_502, 11_316),
    "inshop": (26_830, 3_985),
    "nabirds": (25_653, 277),
    "dogs": (9_929, 60),
    "flowers": (4_696, 51),
    "aircraft": (5_000, 50),
}
# Mean, and standard deviation, of each channel as most timm models have them.
HALF = (0.5, 0.5, 0.5)

# Of embeddings and labels, ours or a reference.
LossFunction = Callable[[Tensor, Tensor], Tensor]


# ---- time and machine


@dataclass(frozen=True)
class Clock:
    """Measures seconds on a device; each candidate has `rounds` turns that count."""

    device: torch.device
    rounds: int

    def by_turns(
        self, candidates: Mapping[str, Callable[[], object]], rounds: int | None = None
    ) -> dict[str, np.ndarray]:
        """Let candidates, functions by name, take turns; seconds of each turn, (rounds,), by name.

        The first turn of each warms up and does not count.
        """
        if rounds is None:
            rounds = self.rounds
        spent: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(rounds + 1):
            for name, candidate in candidates.items():
                self._wait()
                start = time.perf_counter()
                candidate()
                self._wait()
                spent[name].append(time.perf_counter() - start)
        return {name: np.array(turns[1:]) for name, turns in spent.items()}

    def _wait(self) -> None:
        """Wait for what was begun on a GPU, which runs beside Python."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def environment(device: torch.device) -> dict[str, str | int]:
    """Describe what the numbers depend on: device, threads, versions."""
    return {
        "device": training.device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def peak_memory() -> int:
    """Get the most memory that this process has used so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in KiB, macOS in bytes.
    if platform.system() == "Linux":
        return peak * 1024
    return peak


def _library(module: str) -> Any:
    """A module of pytorch-metric-learning: a reference here, and needed nowhere else."""
    return importlib.import_module(f"pytorch_metric_learning.{module}")


# ---- losses


@dataclass(frozen=True)
class LossEntry:
    """A loss to be timed, and the most that its ratio to the reference may be."""

    shown: str
    name: str
    bar: float
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LossSizes:
    """Embeddings in a batch, their dimensions, and the classes of the training set."""

    batch: int
    dim: int
    classes: int


@dataclass(frozen=True)
class _Reference:
    """What losses are timed beside."""

    name: str
    loss: LossFunction


class PlainCrossEntropy(nn.Module):
    """Cross-entropy of scaled cosines to `count` proxies, written as anyone would."""

    def __init__(self, count: int, dim: int):
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(count, dim))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of embeddings (B, dim)."""
        cosines = F.linear(F.normalize(x), F.normalize(self.proxies))
        return F.cross_entropy(32 * cosines, labels)


def losses_beside_cross_entropy(
    entries: Sequence[LossEntry], proxies_per_class: int, sizes: LossSizes, clock: Clock
) -> pd.DataFrame:
    """Time losses with proxies, forward and backward, beside a cross-entropy over as many.

    A row per loss: loss, reference, batch, dim, classes, milliseconds, reference_milliseconds,
    ratio, bar, met.
    """
    count = sizes.classes * proxies_per_class
    plain = PlainCrossEntropy(count, sizes.dim).to(clock.device)
    reference = _Reference(f"cross-entropy over {count:,} proxies", plain)
    labels = torch.randint(sizes.classes, (sizes.batch,), device=clock.device)
    return _loss_times(entries, reference, labels, sizes, clock)


def losses_beside_library(sizes: LossSizes, clock: Clock) -> pd.DataFrame:
    """Time losses over pairs beside pytorch-metric-learning's, on batches of four images a class.

    Columns as of `losses_beside_cross_entropy`; ImportError without pytorch-metric-learning.
    """
    labels = torch.arange(sizes.batch, device=clock.device) // 4 % sizes.classes
    tables = []
    for entry, loss in _library_losses(sizes.dim):
        reference = _Reference("pytorch-metric-learning", loss)
        tables.append(_loss_times([entry], reference, labels, sizes, clock))
    return pd.concat(tables, ignore_index=True)


def _library_losses(dim: int) -> list[tuple[LossEntry, LossFunction]]:
    """Losses over pairs, each with the same of pytorch-metric-learning."""
    distances = _library("distances")
    miners = _library("miners")
    theirs = _library("losses")

    def mined(loss: Callable, miner: Callable) -> LossFunction:
        return lambda x, labels: loss(x, labels, miner(x, labels))

    cosine = distances.CosineSimilarity()
    plain_product = distances.DotProductSimilarity(normalize_embeddings=False)
    triplet = theirs.TripletMarginLoss(distance=cosine)
    hardest = miners.BatchHardMiner(distance=cosine)
    semihard = miners.TripletMarginMiner(0.05, "semihard", distance=cosine)
    similar = miners.MultiSimilarityMiner()
    by_distance = miners.DistanceWeightedMiner()

    def entry(shown: str, name: str, **settings: str) -> LossEntry:
        return LossEntry(shown, name, 1.0, settings)

    return [
        (entry("contrastive", "contrastive"), theirs.ContrastiveLoss()),
        (entry("triplet, batch-hard", "triplet"), mined(triplet, hardest)),
        (entry("triplet, all", "triplet", miner="all"), triplet),
        (entry("triplet, semi-hard", "triplet", miner="semihard"), mined(triplet, semihard)),
        (
            entry("triplet, random", "triplet", miner="random"),
            theirs.TripletMarginLoss(triplets_per_anchor=3),
        ),
        (entry("npair", "npair"), theirs.NPairsLoss(distance=plain_product)),
        (entry("margin", "margin"), mined(theirs.MarginLoss(), by_distance)),
        (entry("ms", "ms"), mined(theirs.MultiSimilarityLoss(), similar)),
        (entry("supcon", "supcon"), theirs.SupConLoss()),
        (
            entry("xbm of contrastive", "xbm"),
            theirs.CrossBatchMemory(theirs.ContrastiveLoss(), dim, 4096),
        ),
    ]


def _loss_times(
    entries: Sequence[LossEntry],
    reference: _Reference,
    labels: Tensor,
    sizes: LossSizes,
    clock: Clock,
) -> pd.DataFrame:
    x = F.normalize(torch.randn(sizes.batch, sizes.dim, device=clock.device)).requires_grad_()
    candidates = {reference.name: _loss_step(reference.loss, x, labels)}
    for entry in entries:
        loss = losses.make(entry.name, sizes.classes, sizes.dim, **entry.settings)
        candidates[entry.shown] = _loss_step(loss.to(clock.device), x, labels)
    milliseconds = {}
    for name, turns in clock.by_turns(candidates).items():
        milliseconds[name] = 1000 * statistics.median(turns)

    rows = []
    for entry in entries:
        ratio = milliseconds[entry.shown] / milliseconds[reference.name]
        rows.append(
            {
                "loss": entry.shown,
                "reference": reference.name,
                "batch": sizes.batch,
                "dim": sizes.dim,
                "classes": sizes.classes,
                "milliseconds": milliseconds[entry.shown],
                "reference_milliseconds": milliseconds[reference.name],
                "ratio": ratio,
                "bar": entry.bar,
                "met": ratio <= entry.bar,
            }
        )
    return pd.DataFrame(rows)


def _loss_step(loss: LossFunction, x: Tensor, labels: Tensor) -> Callable[[], None]:
    """What is timed: forward and backward."""

    def step() -> None:
        x.grad = None
        if isinstance(loss, nn.Module):
            loss.zero_grad()
        loss(x, labels).backward()

    return step


# ---- training steps


@dataclass(frozen=True)
class StepSetting:
    """The network of a training step, and how it computes."""

    backbone: str
    pixels: int
    dtype: torch.dtype
    device: torch.device


class PlainModel(nn.Module):
    """A timm model as it comes, with a linear head: the floor of full fine-tuning."""

    def __init__(self, model: models.EmbeddingModel):
        super().__init__()
        self.backbone = model.backbone
        self.head = model.head

    def forward(self, images: Tensor, gates: object) -> Tensor:
        """Embed images (B, 3, H, W): (B, dim).  There is nothing that gates could switch."""
        return F.normalize(self.head(self.backbone(images)).float(), dim=-1)


class TrainingStep:
    """An optimiser step of a method, or of "timm", the plain model, on the same batch each time."""

    def __init__(self, name: str, images: Tensor, labels: Tensor, setting: StepSetting):
        self.images = images
        self.labels = labels
        self.setting = setting
        is_plain = name == "timm"
        built = models.build(
            "full" if is_plain else name,
            setting.backbone,
            pretrained="random",
            image_size=setting.pixels,
        )
        built.to(setting.device)
        self.draw_gates = built.draw_gates
        self.model: nn.Module = built
        if is_plain:
            self.model = PlainModel(built)
        self.model.train()
        classes = int(labels.max()) + 1
        self.loss = losses.make("curricularface", classes, 128).to(setting.device)

        parameters = [*self.model.parameters(), *self.loss.parameters()]
        trained = [p for p in parameters if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=1e-4)
        if setting.device.type == "cpu" and setting.dtype == torch.bfloat16:
            loop.use_plain_attention(self.model)

    def run(self) -> None:
        """Do the step."""
        self.optimizer.zero_grad(set_to_none=True)
        in_bfloat16 = self.setting.dtype == torch.bfloat16
        device = self.setting.device.type
        with torch.autocast(device, dtype=torch.bfloat16, enabled=in_bfloat16):
            embeddings = self.model(self.images, self.draw_gates(len(self.images)))
        self.loss(embeddings, self.labels).backward()
        self.optimizer.step()

    def operations(self) -> float:
        """Count floating-point operations of an image, forward and backward."""
        # Fused kernels are not all counted.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            self.run()
        return counter.get_total_flops() / len(self.images)

    def memory(self) -> int:
        """Count the bytes that training needs.

        On CUDA the allocator's peak.  On a CPU parameters, optimiser state, gradients, and what
        autograd keeps for the backward pass.
        """
        standing = _bytes_of([*self._weights(), *self._optimizer_state()])
        self.optimizer.zero_grad(set_to_none=True)
        if self.setting.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.setting.device)
            before = torch.cuda.memory_allocated(self.setting.device)
            self.run()
            peak = torch.cuda.max_memory_allocated(self.setting.device)
            return standing + peak - before
        kept = self._kept_by_autograd()
        return standing + _bytes_of(self._gradients()) + kept

    def _weights(self) -> list[Tensor]:
        found: list[Tensor] = []
        for module in (self.model, self.loss):
            found.extend(module.parameters())
            found.extend(module.buffers())
        return found

    def _optimizer_state(self) -> list[Tensor]:
        found: list[Tensor] = []
        for state in self.optimizer.state.values():
            found.extend(value for value in state.values() if isinstance(value, Tensor))
        return found

    def _gradients(self) -> list[Tensor]:
        found: list[Tensor] = []
        for group in self.optimizer.param_groups:
            found.extend(p.grad for p in group["params"] if p.grad is not None)
        return found

    def _kept_by_autograd(self) -> int:
        """Bytes kept for the backward pass of a step, weights not counted."""
        weights = {tensor.untyped_storage().data_ptr() for tensor in self._weights()}
        kept = {}

        def remember(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
            self.run()
        return sum(kept.values())


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class TrainingSizes:
    """Images in a step, classes of the loss, and the side of a large matrix product."""

    batch: int
    classes: int
    matmul_side: int


def training_times(
    methods: Sequence[str], sizes: TrainingSizes, setting: StepSetting, clock: Clock
) -> pd.DataFrame:
    """Time a training step of each method ("timm" and "full" must be among them), by turns.

    A row per method; beside the speed stand its memory, its operations, and what share they are
    of those that one large matrix product reaches here.  `hours_100_epochs` is extrapolated to
    the paper's training, decoding not included.
    """
    torch.manual_seed(0)
    shape = (sizes.batch, 3, setting.pixels, setting.pixels)
    images = torch.randn(*shape, device=setting.device)
    labels = torch.randint(sizes.classes, (sizes.batch,), device=setting.device)
    square = (sizes.matmul_side, sizes.matmul_side)
    a = torch.randn(*square, device=setting.device, dtype=setting.dtype)
    b = torch.randn(*square, device=setting.device, dtype=setting.dtype)

    steps = {name: TrainingStep(name, images, labels, setting) for name in methods}
    operations = {}
    memory = {}
    for name, step in steps.items():
        operations[name] = step.operations()
        memory[name] = step.memory()

    candidates: dict[str, Callable[[], object]] = {name: step.run for name, step in steps.items()}
    candidates["matmul"] = lambda: a @ b
    best = {name: turns.min() for name, turns in clock.by_turns(candidates).items()}
    matmul_rate = 2 * sizes.matmul_side**3 / best["matmul"]

    rows = []
    for name in methods:
        images_per_second = sizes.batch / best[name]
        rows.append(
            {
                "method": name,
                "backbone": setting.backbone,
                "size": setting.pixels,
                "batch": sizes.batch,
                "dtype": _dtype_name(setting.dtype),
                "images_per_s": images_per_second,
                "beside_full": best["full"] / best[name],
                "memory_mb": memory[name] / 1e6,
                "memory_beside_full": memory[name] / memory["full"],
                "gflop_per_image": operations[name] / 1e9,
                "matmul_gflops": matmul_rate / 1e9,
                "share": operations[name] * images_per_second / matmul_rate,
                "hours_100_epochs": 100 * TRAIN_IMAGES / images_per_second / 3600,
            }
        )
    return pd.DataFrame(rows)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- from image files to batches


@dataclass(frozen=True)
class PhotographSizes:
    """How many photographs are made, and from which width up to below which one, in pixels."""

    images: int
    narrowest: int
    widest: int


def photographs(root: Path, sizes: PhotographSizes, image_size: int) -> config.Data:
    """Write photographs as a benchmark of image files, and return its settings.

    They are parts of the two that scikit-learn brings, with sensor noise, as JPEGs of quality 92,
    in four classes; always the same ones.
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
    """A part of a photograph, half as wide as it or wider, resized to `shape`, with noise."""
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
    """Time the way from photographs to training batches of 224 px on one core, by turns of a batch.

    Columns: way, images_per_second_per_core, and ratio to the authors' way.
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


def _seconds_of_batches(
    ways: Mapping[str, Callable[[list[np.ndarray]], Iterator[Tensor]]], images: int, batch: int
) -> dict[str, np.ndarray]:
    """Seconds of this process for each batch of two epochs; an epoch before them warms up."""
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
    """Prepared copies go there: they are of no use to anybody else."""
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


def small_file_times(sizes: PhotographSizes, batch: int, clock: Clock) -> pd.DataFrame:
    """Time steps of a DeiT-Tiny on small files beside the same steps on a batch in memory.

    At 96 px in float32 as in the profile `photos-96`, at 128 px in bfloat16 as in `photos`, by
    turns; `clock.rounds` epochs count after a first one, which decodes.  Columns: method, size,
    dtype, epoch ("first" or "later"), images_per_s, beside_memory.
    """
    tables = []
    for method in ("linear", "puma"):
        for pixels, dtype in ((96, torch.float32), (128, torch.bfloat16)):
            setting = StepSetting("deit_tiny_patch16_224", pixels, dtype, clock.device)
            spent = _small_file_seconds(method, sizes, batch, setting, clock)
            tables.append(_first_and_later(method, sizes.images, batch, setting, spent))
    return pd.concat(tables, ignore_index=True)


def _small_file_seconds(
    method: str, sizes: PhotographSizes, batch: int, setting: StepSetting, clock: Clock
) -> dict[str, np.ndarray]:
    """Seconds of the steps of all epochs but the very first step, by "files" and "memory"."""
    order = []
    for epoch in range(1 + clock.rounds):
        order += batches.random_batches(sizes.images, batch, 0, epoch)
    labels = torch.randint(sizes.images, (batch,), device=setting.device)
    # A folder of its own each time: files that nobody has read yet.
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
        return clock.by_turns(candidates, len(order) - 1)


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
                "dtype": _dtype_name(setting.dtype),
                "epoch": epoch,
                "images_per_s": batch / files,
                "beside_memory": memory / files,
            }
        )
    return pd.DataFrame(rows)


# ---- search of a test set


def embeddings_of(
    sizes: Mapping[str, tuple[int, int]], dim: int = 128
) -> tuple[np.ndarray, pd.DataFrame]:
    """Make noisy unit vectors around class centres, and the table that belongs to them.

    `sizes` has (images, classes) by dataset.  Returns (n, dim) float32, and the columns dataset,
    label and split, all of it test; always the same ones.
    """
    rng = np.random.default_rng(0)
    vectors = []
    tables = []
    first_label = 0
    for name, (images, classes) in sizes.items():
        of_class = np.arange(images) % classes
        centres = rng.standard_normal((classes, dim), np.float32)
        noise = rng.standard_normal((images, dim), np.float32)
        vectors.append(centres[of_class] + 1.5 * noise)
        labels = first_label + of_class
        tables.append(pd.DataFrame({"dataset": name, "label": labels, "split": "test"}))
        first_label += classes
    joined = np.concatenate(vectors)
    lengths = np.linalg.norm(joined, axis=1, keepdims=True)
    return joined / lengths, pd.concat(tables, ignore_index=True)


def search_times(sizes: Mapping[str, tuple[int, int]], clock: Clock) -> pd.DataFrame:
    """Time all metrics of a test set beside one faiss search and pytorch-metric-learning.

    `sizes` as of `embeddings_of`.  Columns: search, rows, seconds (of the best turn), beside_faiss
    and beside_library.  Raises ImportError without pytorch-metric-learning.
    """
    vectors, images = embeddings_of(sizes)
    tensor = torch.from_numpy(vectors)
    labels = torch.from_numpy(images["label"].to_numpy(copy=True))
    calculator = _library("utils.accuracy_calculator").AccuracyCalculator(
        include=("precision_at_1", "r_precision", "mean_average_precision_at_r"),
        k="max_bin_count",
        device=torch.device("cpu"),
    )

    def five_nearest() -> None:
        index: Any = faiss.IndexFlatIP(vectors.shape[1])
        index.add(vectors)
        index.search(vectors, 5)

    def metrics(ks: Sequence[int]) -> Callable[[], object]:
        return lambda: evaluation.scores(vectors, images, ks, device=clock.device)

    spent = clock.by_turns(
        {
            "faiss IndexFlatIP, 5 nearest": five_nearest,
            "pumalib.evaluation, R@1 to R@8, RP, MAP@R": metrics((1, 2, 4, 8)),
            "pumalib.evaluation, R@1 to R@100, RP, MAP@R": metrics(evaluation.KS),
            "pytorch-metric-learning, P@1, RP, MAP@R": lambda: calculator.get_accuracy(
                tensor, labels
            ),
        }
    )
    rows = [(name, len(images), turns.min()) for name, turns in spent.items()]
    table = pd.DataFrame(rows, columns=["search", "rows", "seconds"])
    faiss_seconds = table["seconds"].iloc[0]
    library_seconds = table["seconds"].iloc[-1]
    return table.assign(
        beside_faiss=table["seconds"] / faiss_seconds,
        beside_library=table["seconds"] / library_seconds,
    )


def search_of_eight(device: torch.device) -> pd.DataFrame:
    """Time all metrics of all eight test sets at once, one time: search, rows, seconds."""
    vectors, images = embeddings_of(EIGHT_DATASETS)
    start = time.perf_counter()
    evaluation.scores(vectors, images, evaluation.KS, device=device)
    seconds = time.perf_counter() - start
    name = "pumalib.evaluation, eight datasets"
    return pd.DataFrame([{"search": name, "rows": len(images), "seconds": seconds}])


# ---- exact and approximate indexes


def clustered(count: int, classes: int, seed: int, dim: int = 128) -> np.ndarray:
    """Draw unit vectors (count, dim) float32 in clusters, as embeddings form them.

    A vector is the sum of three Gaussian draws: of its one of 8 datasets, of its class, and, 1.5
    times as large, its own; coordinate i is divided by 1 + i/16, and the sum L2-normalised.
    `seed` draws classes and vectors of its own; datasets and classes are always the same.
    """
    centres = np.random.default_rng(0)
    draws = np.random.default_rng(seed)
    of_dataset = centres.standard_normal((8, dim), np.float32)
    of_class = centres.standard_normal((classes, dim), np.float32)
    chosen = draws.integers(classes, size=count)
    x = draws.standard_normal((count, dim), np.float32)
    x *= 1.5
    # In parts: a million vectors in one would take three times the memory.
    for start in range(0, count, 100_000):
        some = chosen[start : start + 100_000]
        x[start : start + 100_000] += of_class[some] + of_dataset[some % 8]
    x /= 1 + np.arange(dim, dtype=np.float32) / 16
    faiss.normalize_L2(x)
    return x


def directions(vectors: np.ndarray) -> float:
    """How many directions vectors (n, dim) spread over.

    (sum of variances)^2 / sum of their squares, along their principal axes.
    """
    variances = np.linalg.eigvalsh(np.cov(vectors[:20_000].T))
    return float(variances.sum() ** 2 / (variances**2).sum())


def queries_per_second(index: Any, calls: Sequence[np.ndarray], k: int) -> float:
    """Time a search for `k` neighbours; `calls` has the queries (n, dim) of each call."""
    start = time.perf_counter()
    for queries in calls:
        index.search(queries, k)
    seconds = time.perf_counter() - start
    return sum(len(queries) for queries in calls) / seconds


def written_bytes(index: Any) -> int:
    """Count the bytes of an index of faiss, written out: about what it holds in memory."""
    sizes: list[int] = []
    # faiss has it, its types do not.
    writer = faiss.PyCallbackIOWriter  # type: ignore[attr-defined]
    faiss.write_index(index, writer(lambda content: sizes.append(len(content))))
    return sum(sizes)
