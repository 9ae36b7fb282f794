"""One image: from a file to RGB, and from RGB to the network's input."""

import stat
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from timm.data import create_transform
from torch import Tensor
from torchvision.transforms import Compose, v2

from ..config import Data
from .readers import reader
from .table import Benchmark, check, in_threads

_BICUBIC = v2.InterpolationMode.BICUBIC


# The formats that Pillow may open, those of `folders.EXTENSIONS`; a file's name does not matter.
# Others could start programs: PostScript starts Ghostscript.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
# Grey images have one of these numbers of bits, the smallest that holds their largest value.
_BITS = (8, 12, 16)
# Pixels at least this bright (0 to 255) look white.
_NEARLY_WHITE = 245


class ImageError(ValueError):
    """An image that cannot be read; the message names it, and `why` is the reason."""

    def __init__(self, message: str, why: str = ""):
        super().__init__(message)
        self.why = why


# ---- from files to RGB


def decode(source: str | Path | IO[bytes] | Image.Image, upright: bool = False) -> Image.Image:
    """Return the image as RGB: on white where transparent, 12 or 16 bits scaled to 8.

    A file must have one of `FORMATS`; of an animation the first frame is used.  `upright`: apply
    the EXIF rotation (the authors' code ignores it).  Warns if a transparent image becomes all
    white.  Raises ImageError.
    """
    name = getattr(source, "filename", None) or source
    try:
        if isinstance(source, Image.Image):
            return _first_frame(source, upright, name)
        if isinstance(source, (str, Path)):
            _require_file(Path(source))
        with Image.open(source, formats=FORMATS) as image:
            return _first_frame(image, upright, name)
    # Decoders of damaged files raise nearly anything.
    except Exception as error:
        why = _reason(error)
        raise ImageError(f"{name}: cannot be read as an image ({why})", why) from error


def _require_file(path: Path) -> None:
    """Raise OSError if a path is no regular file: opening a pipe would wait for its writer."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no file but a folder, pipe, socket or device")


def _reason(error: Exception) -> str:
    """The reason why an image cannot be read, as words for a message."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, PermissionError):
        return "reading it is not permitted"
    if isinstance(error, UnidentifiedImageError):
        return f"it has none of the formats {', '.join(FORMATS)}"
    return str(error) or f"it is damaged, {type(error).__name__}"


def _first_frame(image: Image.Image, upright: bool, name: object) -> Image.Image:
    image.seek(0)
    if upright:
        image = ImageOps.exif_transpose(image)
    return _to_rgb(image, name)


def _to_rgb(image: Image.Image, name: object) -> Image.Image:
    # "F", "I" and "I;16": floats, or more than 8 bits.
    if image.mode[0] in "FI":
        image = _with_8_bits(image)
    if image.has_transparency_data:
        # Pillow cannot convert "La" to "RGBA" directly.
        if image.mode == "La":
            image = image.convert("LA")
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        shown = Image.alpha_composite(white, image)
        _warn_if_white(shown, image, name)
        image = shown
    return image.convert("RGB")


def _warn_if_white(shown: Image.Image, image: Image.Image, name: object) -> None:
    """Warn if a white picture on a transparent ground disappears on white."""
    is_white = np.asarray(shown).min() >= _NEARLY_WHITE
    alpha = np.asarray(image.getchannel("A"))
    is_on_nothing = alpha.min() < 255 and alpha.max() > 0
    if is_white and is_on_nothing:
        what = f"{name}: white on transparent is shown as one white image"
        warnings.warn(f"{what}; put it on another ground", stacklevel=2)


def _with_8_bits(image: Image.Image) -> Image.Image:
    """Convert a grey image of up to 16 bits to 8, scaled by the number of bits that it uses.

    Microscopes and scanners write 12 bits into 16-bit files, which would be nearly black if 16 were
    assumed.  Raises ValueError for floats and integers without an agreed range.
    """
    grey = np.asarray(image)
    if image.mode == "F" or grey.min() < 0 or grey.max() > 65535:
        what = f"{grey.dtype} up to {grey.max()} has no agreed range"
        raise ValueError(f"{what}; save it with 8 or 16 bits")
    bits = min(bits for bits in _BITS if grey.max() < 2**bits)
    # 16 bits by 257, as 65535 is 255 x 257.
    scaled = grey.astype(np.int64) * 255 // (2**bits - 1)
    shown = Image.fromarray(scaled.astype(np.uint8))
    transparent = image.info.get("transparency")
    if transparent is not None:
        opaque = np.where(grey == transparent, 0, 255).astype(np.uint8)
        shown.putalpha(Image.fromarray(opaque))
    return shown


# ---- unreadable images


def image_error(function: Callable[..., object], *args: Path) -> ImageError | None:
    """The ImageError that `function(*args)` raises, or None."""
    try:
        function(*args)
    except ImageError as error:
        return error
    return None


def unreadable(benchmark: Benchmark) -> dict[int, ImageError]:
    """Decode every image file, and return the errors by position in `benchmark.images`."""
    if benchmark.pixels is not None:
        return {}
    root = benchmark.folder

    def error_of(path: str) -> ImageError | None:
        return image_error(decode, root / path)

    errors = in_threads(error_of, benchmark.images["path"].tolist(), "decoding")
    return {position: error for position, error in enumerate(errors) if error is not None}


def drop_unreadable(benchmark: Benchmark) -> Benchmark:
    """The benchmark without unreadable images; one warning names them all."""
    images = benchmark.images
    bad = list(unreadable(benchmark))
    if not bad:
        return benchmark
    names = "\n  ".join(images["path"].iloc[bad])
    what = f"{len(bad)} of {len(images)} images cannot be read and are left out"
    warnings.warn(f"{what}:\n  {names}", stacklevel=2)
    left = images.drop(images.index[bad]).reset_index(drop=True)
    return check(replace(benchmark, images=left))


# ---- from RGB to the network's input


@dataclass(frozen=True)
class View:
    """How an image becomes the network's input, as `settings` say.

    In evaluation it is resized and cropped at the centre; in `training` a random crop is resized,
    and flipped half of the time (Appendix A).  `mean` and `std` of the channels, from 0 to 1, are
    the backbone's.
    """

    settings: Data
    mean: Sequence[float]
    std: Sequence[float]
    training: bool = False
    # For resize = "timm", the backbone's own values in timm: the share of the resized image that
    # the crop covers, how it crops, and how pixels are interpolated.
    crop_share: float = 0.875
    crop_mode: str = "center"
    interpolation: str = "bicubic"

    @property
    def upright(self) -> bool:
        """Whether the EXIF rotation is applied."""
        if self.settings.upright is None:
            return reader(self.settings.benchmark).upright
        return self.settings.upright


def pixels(image: Image.Image | np.ndarray, view: View, seed: int = 0) -> Tensor:
    """Transform an RGB image, or an array (H, W, 3) uint8, to (3, size, size) uint8.

    Augmentation depends on `seed` alone.
    """
    if isinstance(image, np.ndarray):
        size = view.settings.image_size
        if not view.training and image.shape[:2] == (size, size):
            # It has the network's size already.
            return torch.tensor(image).permute(2, 0, 1)
        image = Image.fromarray(image)
    if view.training:
        image = _training_view(image, view.settings, seed)
    elif view.settings.resize == "timm":
        image = _timms_view(image, view)
    else:
        image = _test_view(image, view.settings)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def _test_view(image: Image.Image, settings: Data) -> Image.Image:
    size = settings.image_size
    side = round(256 * size / 224)
    if settings.resize == "both":
        sides = [side, side]
    else:
        sides = [side]
        image = _without_ends(image)
    image = v2.functional.resize(image, sides, _BICUBIC)
    return v2.functional.center_crop(image, [size])


def _without_ends(image: Image.Image) -> Image.Image:
    """Cut a long strip to 4:1: resized it would fill the memory, and the crop drops its ends."""
    width, height = image.size
    return v2.functional.center_crop(image, [min(height, 4 * width), min(width, 4 * height)])


def _timms_view(image: Image.Image, view: View) -> Image.Image:
    if view.crop_mode == "center":
        image = _without_ends(image)
    size = view.settings.image_size
    shown = _timms_transform(
        size, view.crop_share, view.crop_mode, view.interpolation, tuple(view.mean)
    )
    return shown(image)


@cache
def _timms_transform(
    size: int, crop_share: float, crop_mode: str, interpolation: str, mean: tuple[float, ...]
) -> Callable:
    """Make timm's evaluation transform without its last step, the conversion to a tensor."""
    whole = create_transform(
        (3, size, size),
        crop_pct=crop_share,
        crop_mode=crop_mode,
        interpolation=interpolation,
        # The colour of the padding of "border".
        mean=mean,
        use_prefetcher=True,
    )
    *steps, _ = whole.transforms
    return Compose(steps)


_random_crop = cache(v2.RandomResizedCrop)


def _training_view(image: Image.Image, settings: Data, seed: int) -> Image.Image:
    """Crop, resize and flip as v2's own forward does, without its overhead.

    For small images that overhead is half of the time.
    """
    size = settings.image_size
    mirrored = False
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        crop = _random_crop(size, settings.crop_scale).make_params([image])
        if settings.flip:
            mirrored = bool(torch.rand(1) < 0.5)
    top, left, height, width = crop.values()
    image = image.crop((left, top, left + width, top + height))
    image = image.resize((size, size), Image.Resampling.BICUBIC)
    if mirrored:
        image = ImageOps.mirror(image)
    return image


def normalise(images: Tensor, view: View) -> Tensor:
    """Convert uint8 (B, 3, S, S) to float32, minus the mean, divided by the standard deviation."""
    mean = torch.tensor([255 * value for value in view.mean]).view(3, 1, 1)
    std = torch.tensor([255 * value for value in view.std]).view(3, 1, 1)
    return images.float().sub_(to_device(mean, images.device)).div_(to_device(std, images.device))


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of this machine's memory to a device, without waiting for a GPU."""
    if device.type == "cuda":
        # Only from pinned memory does a copy run beside the GPU's work.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
