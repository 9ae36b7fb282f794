"""A trained model with the image transform it was evaluated with: images in, embeddings out."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from torch import Tensor

from . import export, paths
from .config import METHODS, Data, Run, checked
from .data import Benchmark, batches
from .data.images import ImageError, View, decode, normalise, pixels
from .models import EmbeddingModel, backbones, build, load_model, save_trained, save_whole
from .progress import bar

# Images per batch where a benchmark is embedded.
_BATCH = 256
# The benchmark whose pictures have the network's size and are not resized.
_SHOWN_AS_THEY_ARE = "mini"
# The numbers of channels that an image in an array may have: grey, RGB, RGB with transparency.
_CHANNELS = (1, 3, 4)
# The trained models that come with the package: a folder each, with a card.
KEPT_FOLDER = Path(__file__).parent / "kept"


def list_kept() -> list[str]:
    """Names of the trained models that come with the package."""
    return sorted(file.parent.name for file in KEPT_FOLDER.glob("*/model.safetensors"))


def load(
    folder: str | Path, pretrained: str | Path | None = None, device: str | torch.device = "cpu"
) -> "Embedder":
    """Load a trained model, ready to embed, from its folder or by its name in `list_kept`.

    Other arguments and errors are those of `models.load_model`.
    """
    if folder in list_kept():
        folder = KEPT_FOLDER / folder
    model, run = load_model(folder, pretrained)
    return Embedder(model.to(device), run)


def frozen(
    backbone: str,
    pretrained: str | Path = "hub",
    image_size: int | None = None,
    device: str | torch.device = "cpu",
    *,
    resize: str = "timm",
) -> "Embedder":
    """Make an embedder of a pretrained timm backbone, without any further training.

    Its embeddings are the pooled features of timm's model with `num_classes=0`, of length 1.
    `image_size` in pixels is by default the model's own.  Images pass timm's own evaluation
    transform, unless `resize` (see `config.Data`) says otherwise; a mini_vit uses the transform of
    `mini`.  Other arguments and errors are those of `models.backbones.create`.
    """
    own_size = backbones.native_size(backbone)
    if backbone in backbones.EMBEDDED:
        # timm does not know these models.
        resize = "both"
    settings = {"benchmark": "folders", "image_size": image_size or own_size, "resize": resize}
    run = Run(
        data=checked("frozen", Data, settings),
        backbone=backbone,
        pretrained=str(pretrained),
        method=METHODS["pretrained"],
        pooling="timm",
    )
    model = build(
        run.method,
        backbone,
        run.dim,
        pretrained=pretrained,
        image_size=image_size,
        pooling=run.pooling,
    )
    return Embedder(model.to(device).eval(), run)


def named(
    model: str, pretrained: str | Path | None = None, device: str | torch.device = "cpu"
) -> "Embedder":
    """Load the model that a command names: one of `list_kept`, a folder, or a timm backbone.

    Other arguments and errors are those of `load` and `frozen`.
    """
    if model in list_kept() or paths.find(model).is_dir():
        return load(model, pretrained, device)
    return frozen(model, pretrained or "hub", device=device)


@contextmanager
def true_float32() -> Iterator[None]:
    """Compute convolutions of a GPU in float32, where cuDNN would round to TF32, and products too.

    Neighbours of nearly equal cosines would change places.
    """
    # Their stubs lack these.
    backends: Any = torch.backends
    kinds = (backends.cudnn.conv, backends.cuda.matmul)
    before = [kind.fp32_precision for kind in kinds]
    for kind in kinds:
        kind.fp32_precision = "ieee"
    try:
        yield
    finally:
        for kind, precision in zip(kinds, before, strict=True):
            kind.fp32_precision = precision


# ---- a benchmark's images


def embed_rows(
    model: EmbeddingModel,
    benchmark: Benchmark,
    rows: pd.DataFrame,
    settings: Data,
    *,
    device: str | torch.device = "cpu",
    workers: int = 0,
) -> np.ndarray:
    """Embed rows of a benchmark with the test transform of `settings`: (n, dim) float32.

    `workers` processes decode the images; 0: this process does.  Raises ImageError.
    """
    embeddings, _ = embed_with_prompt_weights(
        model, benchmark, rows, settings, device=device, workers=workers
    )
    return embeddings


def embed_with_prompt_weights(
    model: EmbeddingModel,
    benchmark: Benchmark,
    rows: pd.DataFrame,
    settings: Data,
    *,
    device: str | torch.device = "cpu",
    workers: int = 0,
) -> tuple[np.ndarray, np.ndarray | None]:
    """`embed_rows`, and the prompt weights (n, M) of the pool, or None without a pool (Fig. 4)."""
    model.eval()
    view = View(settings, **backbones.transform(model.backbone))
    positions = np.split(np.arange(len(rows)), range(_BATCH, len(rows), _BATCH))
    plan = batches.Plan(benchmark, rows, positions, view, workers=workers, device=device)
    embeddings = []
    weights = []
    with torch.inference_mode(), true_float32():
        for images, _ in batches.batches(plan):
            embedded, chosen = model(images, prompt_weights=True)
            # Copies: a network replayed as CUDA graphs writes its next outputs over these.
            embeddings.append(embedded.clone())
            if chosen is not None:
                weights.append(chosen.clone())
    if not weights:
        return _joined(embeddings), None
    return _joined(embeddings), _joined(weights)


def _joined(parts: list[Tensor]) -> np.ndarray:
    return torch.cat(parts).float().cpu().numpy()


# ---- any images


@dataclass(frozen=True)
class Embedded:
    """Embeddings of the readable images, and why the others could not be read."""

    vectors: np.ndarray  # (n, dim) float32, of the readable images
    places: np.ndarray  # (n,) their places among the images given, from 0
    unreadable: dict[int, str]  # the reason for each other image, by place


class Embedder:
    """A trained model with the image transform it was evaluated with.

    `load(folder).embed(images)`.  The EXIF rotation is always applied, even if the run ignored it:
    the images are a user's own photographs.
    """

    def __init__(self, model: EmbeddingModel, run: Run):
        self.model = model
        self.run = run
        turned = replace(run.data, upright=True)
        self.view = View(turned, **backbones.transform(model.backbone))

    def embed(
        self,
        images: Any,
        batch_size: int = 64,
        progress: bool = True,
        *,
        prepared: bool = False,
        workers: int = 0,
    ) -> np.ndarray:
        """Embed one image, or an iterable of images: (n, dim) float32.

        An image is a file's path or its bytes, an open file, a PIL image, an array uint8 (H, W, 3),
        (H, W, 4) with transparency or (H, W) of grey, or a tensor uint8 with the channels first.
        All kinds give the same embedding: each image is resized and cropped as the run's test
        images were.  (A model of `mini` is an exception: it does not resize a picture that already
        has the network's size.)  `prepared` images are instead tensors (3, size, size) of floats
        that are already normalised for the network.

        `workers` threads decode the next batch while the network embeds this one; 0: no threads.
        A generator is read one batch at a time, two with workers.  Raises ValueError for anything
        that is no image, with its position.
        """
        if prepared:
            self._check_counts(batch_size, workers)
            inputs = self._prepared(_shown(images, progress))
            return self._embedded(_in_batches(inputs, batch_size), as_pixels=False)

        found = self._read(images, batch_size, progress, workers)
        return self._embedded(map(_all_or_raise, found), as_pixels=True)

    def save(self, folder: str | Path, about: str = "", half: bool = False) -> Path:
        """Write the whole model into a folder that `load` reads on any machine; return the folder.

        It holds `model.safetensors`, backbone included (4 bytes per parameter, or 2 with `half`: 87
        or 43 MB for a ViT-S), `config.json`, and a card `README.md` that ends with the text
        `about`.  A relative folder is relative to the project.  Raises OSError where it cannot be
        written.
        """
        place = paths.resolve(folder)
        dtype = torch.float16 if half else torch.float32
        save_whole(self.model, self.run, place, dtype)
        export.write_folder(self.model, self.run, self.view, place, about)
        return place

    def save_trained(self, folder: str | Path, about: str = "") -> Path:
        """Like `save`, but write only the trained tensors, without the frozen backbone.

        `load` then takes the backbone's weights from timm's hub, or from the file in
        `load(folder, pretrained=FILE)`, and refuses other weights than it was trained on.  Raises
        ValueError if the backbone was trained too, OSError where it cannot be written.
        """
        place = paths.resolve(folder)
        save_trained(self.model, self.run, place)
        export.write_folder(self.model, self.run, self.view, place, about, with_backbone=False)
        return place

    def to_onnx(self, file: str | Path) -> Path:
        """Write the model as ONNX, check it against torch, and return the file.

        A relative file is relative to the project.  For input, output, metadata and errors see
        `export.write_onnx`.
        """
        place = paths.resolve(file)
        export.write_onnx(self.model, self.view, place)
        return place

    def embed_readable(
        self, images: Any, batch_size: int = 64, progress: bool = True, *, workers: int = 0
    ) -> Embedded:
        """Embed the readable images, and give the reason for each unreadable one.

        Arguments are those of `embed`.  Anything that is no image at all, such as a number, still
        raises ValueError.
        """
        parts = list(self.embed_parts(_shown(images, progress), batch_size, workers))
        unreadable: dict[int, str] = {}
        for part in parts:
            unreadable.update(part.unreadable)
        # An array without rows, in case there is no image.
        vectors = [np.zeros((0, self.model.dim), np.float32), *[part.vectors for part in parts]]
        places = [np.zeros(0, int), *[part.places for part in parts]]
        return Embedded(np.concatenate(vectors), np.concatenate(places), unreadable)

    def embed_parts(
        self, images: Any, batch_size: int = 64, workers: int = 0
    ) -> Iterator[Embedded]:
        """Like `embed_readable`, but yield the result of each batch when it is done.

        Places count from the first image of the first batch.  It shows no progress bar.
        """
        for batch in self._read(images, batch_size, progress=False, workers=workers):
            shown = []
            places = []
            unreadable = {}
            for place, found in batch:
                if isinstance(found, ImageError):
                    unreadable[place] = found.why
                else:
                    places.append(place)
                    shown.append(found)
            vectors = self._embedded([shown], as_pixels=True)
            yield Embedded(vectors, np.array(places, dtype=int), unreadable)

    def _check_counts(self, batch_size: Any, workers: Any) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("workers", workers, 0)):
            if not isinstance(value, int) or value < least:
                what = f"{name} = {value!r}"
                raise ValueError(f"{what}; it must be a whole number of at least {least}")

    def _embedded(self, inputs: Iterable[list[Tensor]], as_pixels: bool) -> np.ndarray:
        """Embed batches of input tensors: uint8 pixels if `as_pixels`, else normalised floats."""
        device = next(self.model.parameters()).device
        # An array without rows, in case there is no image.
        embeddings = [np.zeros((0, self.model.dim), np.float32)]
        with torch.inference_mode(), true_float32():
            for batch in inputs:
                if not batch:
                    continue
                network_input = torch.stack(batch).to(device)
                if as_pixels:
                    network_input = normalise(network_input, self.view)
                embeddings.append(self.model(network_input).float().cpu().numpy())
        return np.concatenate(embeddings)

    def _read(
        self, images: Any, batch_size: int, progress: bool, workers: int
    ) -> Iterator[list[tuple[int, Tensor | ImageError]]]:
        """Batches of (place, pixels), or (place, ImageError) for an unreadable image."""
        self._check_counts(batch_size, workers)
        numbered = enumerate(_shown(images, progress))
        waiting = _in_batches(numbered, batch_size)
        if workers:
            return _by_threads(self._shown_or_error, waiting, workers)
        return ([self._shown_or_error(one) for one in batch] for batch in waiting)

    def _shown_or_error(self, numbered: tuple[int, Any]) -> tuple[int, Tensor | ImageError]:
        """The position of an image with its pixels, or with the ImageError if it is unreadable."""
        position, image = numbered
        size = self.view.settings.image_size
        as_it_is = self.run.data.benchmark == _SHOWN_AS_THEY_ARE
        try:
            decoded = _decoded(image, position, self.view.upright)
        except ImageError as error:
            return position, error
        if as_it_is and decoded.size == (size, size):
            # `pixels` does not resize an array of this size.
            return position, pixels(np.asarray(decoded), self.view)
        return position, pixels(decoded, self.view)

    def _prepared(self, images: Iterable) -> Iterator[Tensor]:
        """Yield the images, which must be input tensors of the network, else ValueError."""
        size = self.view.settings.image_size
        for position, image in enumerate(images):
            is_float = isinstance(image, Tensor) and image.is_floating_point()
            if not is_float or image.shape != (3, size, size):
                expected = f"a normalised tensor of floats (3, {size}, {size})"
                what = f"prepared image {position} is {_described(image)}"
                raise ValueError(f"{what}; expected {expected}")
            yield image.float()


def _shown(images: Any, progress: bool) -> Iterable:
    """The images, or the one image as a list, with a progress bar."""
    if _is_one(images):
        images = [images]
    return bar(images, desc="embedding", unit="image", delay=1, disable=not progress)


def _in_batches(items: Iterable, size: int) -> Iterator[list]:
    """Yield lists of `size` items, the last one shorter, reading `items` lazily."""
    left = iter(items)
    return iter(lambda: list(islice(left, size)), [])


def _by_threads(function: Callable, batches: Iterator[list], workers: int) -> Iterator[list]:
    """Call `function` on each item of each batch in threads, one batch ahead of the consumer.

    Threads help because decoding and resizing release the GIL.
    """
    with ThreadPoolExecutor(workers) as pool:
        ahead: list = []
        for batch in batches:
            begun = [pool.submit(function, item) for item in batch]
            if ahead:
                yield [future.result() for future in ahead]
            ahead = begun
        yield [future.result() for future in ahead]


def _all_or_raise(batch: list[tuple[int, Tensor | ImageError]]) -> list[Tensor]:
    """The pixels of a batch; raises the error of its first unreadable image."""
    shown = []
    for _, found in batch:
        if isinstance(found, ImageError):
            message = f"{found}; replace it, or leave such images out with embed_readable"
            raise ImageError(message, found.why) from found
        shown.append(found)
    return shown


def _is_one(images: Any) -> bool:
    """Whether this is one image, not several."""
    if isinstance(images, (str, bytes)) or not isinstance(images, Iterable):
        return True
    # An open file is an iterable, of lines.
    if hasattr(images, "read"):
        return True
    if not isinstance(images, (np.ndarray, Tensor)) or images.ndim != 3:
        return getattr(images, "ndim", 0) == 2
    # Three axes are an image with channels, or several grey images.  An image with its channels on
    # the wrong side counts as one too, and is refused later.
    if images.dtype not in (np.uint8, torch.uint8):
        return True
    return images.shape[0] in _CHANNELS or images.shape[2] <= max(_CHANNELS)


def _decoded(image: Any, position: int, upright: bool) -> Image.Image:
    """The image as RGB; ValueError if it is no image, ImageError if it cannot be read."""
    if isinstance(image, os.PathLike):
        image = Path(image)
    if isinstance(image, bytes):
        return _decoded_file(BytesIO(image), f"image {position}", upright)
    if hasattr(image, "read"):
        name = getattr(image, "name", None) or f"image {position}"
        return _decoded_file(image, str(name), upright)
    if isinstance(image, (str, Path, Image.Image)):
        return decode(image, upright)
    pixels_of_it = _array(image)
    if pixels_of_it is None:
        expected = (
            "a file path, its bytes, an open file, a PIL image or an array uint8 (H, W, 3) of RGB "
            "in 0..255, (H, W, 4) with transparency or (H, W) of grey; of a tensor the channels "
            "come first"
        )
        if isinstance(image, Tensor):
            expected += ", or prepared=True for tensors that are the network's input"
        raise ValueError(f"image {position} is {_described(image)}; expected {expected}")
    return _decoded_file(Image.fromarray(pixels_of_it), f"image {position}", upright)


def _decoded_file(file: Any, name: str, upright: bool) -> Image.Image:
    """Decode an open file or an image; an ImageError calls it `name`."""
    try:
        return decode(file, upright)
    except ImageError as error:
        message = f"{name}: cannot be read as an image ({error.why})"
        raise ImageError(message, error.why) from error


def _array(image: Any) -> np.ndarray | None:
    """Pixels (H, W) or (H, W, 3 or 4) uint8 of an array or tensor; None if it is no image."""
    if isinstance(image, Tensor):
        if image.ndim == 3:
            image = image.permute(1, 2, 0)
        image = image.detach().cpu().numpy() if image.dtype == torch.uint8 else None
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.size == 0:
        return None
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[..., 0]
    if image.ndim != 2 and (image.ndim != 3 or image.shape[2] not in _CHANNELS):
        return None
    return np.ascontiguousarray(image)


def _described(image: Any) -> str:
    """The type and shape of a value, for a message."""
    kind = getattr(image, "dtype", type(image).__name__)
    shape = getattr(image, "shape", None)
    if not shape:
        return str(kind)
    return f"{kind} {tuple(shape)}"
