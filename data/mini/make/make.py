"""Make the images of `mini`.

`python data/mini/make/make.py` writes the sheets and images.csv beside this folder.

Digits, glyphs and photos come from what scikit-learn and matplotlib ship; birds, flowers, garments,
vehicles and aircraft are drawn (families.py).  The shares of the train images follow Table 1 of the
paper (the dataset whose role each plays stands in `SIZES`).  Difficulty was set on held-out
training classes, by the frozen embedded backbone and by full fine-tuning.  Other versions of numpy,
scikit-learn, matplotlib or Pillow than those named in ../README.md may draw other pixels.  What the
backbones are trained on is drawn by world.py and shares no family with this file.
"""

import unicodedata
import zlib
from functools import cache
from pathlib import Path

import draw
import families
import matplotlib
import numpy as np
import pandas as pd
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits, load_sample_images

SIDE, CELL = (
    draw.SIZE,
    draw.SIZE + 2,
)  # pixels: a picture, and its cell of a sheet with the gap on the right and below
COLUMNS = 48  # pictures side by side on a sheet, at most

# dataset -> (train classes, images per train class, test classes, images per test class);
# a fraction: on average
SIZES = {
    "glyphs": (400, 8.2, 200, 6),  # SOP: 42 % of the train images, many classes of few images
    "garments": (170, 8.4, 90, 8),  # In-Shop: 18 %, queries and gallery apart
    "birds": (60, 21, 50, 12),  # NABirds: 16 %
    "digits": (50, 11.7, 50, 12),  # Dogs: 7.5 %
    "vehicles": (44, 10.1, 50, 10),  # Cars: 5.7 %
    "photos": (42, 7.7, 45, 10),  # CUB: 4.1 %
    "aircraft": (40, 6.9, 48, 10),  # Aircraft: 3.5 %
    "flowers": (24, 8, 48, 10),  # Flowers: 2.5 %
}


def build() -> tuple[pd.DataFrame, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """A row of images.csv for each image, and the pictures of each dataset.

    Of a dataset: its pictures (n, 48, 48) and their palette (255, 3).
    A class fills neighbouring cells of one row of its sheet; the classes follow one another.
    """
    tables, pictures = [], {}
    for dataset, (train, per_train, test, per_test) in SIZES.items():
        counts = np.concatenate([_counts(train, per_train), _counts(test, per_test)])
        images, names = _make(dataset, counts, train, _rng(dataset))
        assert len(set(names)) == len(names) and max(map(len, names)) <= 24, dataset
        label, turn = (
            np.repeat(np.arange(len(counts)), counts),
            np.concatenate([np.arange(n) for n in counts]),
        )
        split = np.where(label < train, "train", "test").astype(object)
        if dataset == "garments":
            split[split == "test"] = np.where(turn[label >= train] % 2, "gallery", "query")
        column, row = np.transpose(_starts(counts))
        place = {"column": column[label] + turn, "row": row[label]}
        tables.append(
            pd.DataFrame(
                dict(
                    dataset=dataset, class_name=np.array(names, object)[label], split=split, **place
                )
            )
        )
        pictures[dataset] = _quantised(images)
    return pd.concat(tables, ignore_index=True), pictures


def write(folder: Path) -> None:
    """The sheets, <dataset>.png, of 256 colours each, and images.csv."""
    table, pictures = build()
    table.to_csv(folder / "images.csv", index=False, lineterminator="\n")
    for dataset, rows in table.groupby("dataset"):
        indices, palette = pictures[dataset]
        cells = np.full(
            (rows["row"].max() + 1, rows["column"].max() + 1, CELL, CELL), 255, np.uint8
        )
        cells[rows["row"], rows["column"], :SIDE, :SIDE] = indices
        sheet = Image.fromarray(
            cells.swapaxes(1, 2).reshape(cells.shape[0] * CELL, cells.shape[1] * CELL), "P"
        )
        sheet.putpalette([*palette.ravel().tolist(), *[255] * (768 - palette.size)])
        sheet.save(folder / f"{dataset}.png", optimize=True)


def _quantised(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pictures (n, 48, 48) uint8 of at most 255 colours, and their palette (255, 3).

    The palette is fitted to a part of the pixels.
    """
    some = Image.fromarray(images.reshape(-1, 1, 3)[:: len(images) // 40 + 1]).quantize(
        255, kmeans=1
    )
    whole = Image.fromarray(images.reshape(-1, SIDE, 3)).quantize(
        palette=some, dither=Image.Dither.NONE
    )
    return np.asarray(whole).reshape(images.shape[:3]), np.reshape(some.getpalette(), (-1, 3))[:255]


# ---------------------------------------------------------------- classes and their images


def _rng(name: str) -> np.random.Generator:
    """A stream per dataset, so that a change in one leaves the others' pixels alone."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def _counts(classes: int, mean: float) -> np.ndarray:
    """Images per class: whole numbers around `mean`."""
    return np.diff(np.floor(mean * np.arange(classes + 1) + 1e-9).astype(int))


def _starts(counts: np.ndarray) -> list[tuple[int, int]]:
    """Column and row of the first picture of each class."""
    starts, column, row = [], 0, 0
    for count in counts.tolist():
        if column + count > COLUMNS:
            column, row = 0, row + 1
        starts.append((column, row))
        column += count
    return starts


def _make(dataset, counts, train, rng) -> tuple[np.ndarray, list[str]]:
    """Images of as many classes as `counts` has entries, class by class, and their names.

    The first `train` classes are for training.
    """
    sources = {"glyphs": _glyphs, "digits": _digits, "photos": _photos}
    if dataset in sources:
        return sources[dataset](counts, train, rng)
    words = families.TRAITS[dataset]
    levels = [len(names) for names in words.values()]
    chosen = (
        np.indices(levels)
        .reshape(len(levels), -1)
        .T[rng.permutation(np.prod(levels))[: len(counts)]]
    )
    rows = np.repeat(chosen, counts, axis=0).astype(np.float32)[:, :, None, None]
    paint = getattr(families, dataset)
    blocks = [
        paint(rng, *block.swapaxes(0, 1)) for block in np.array_split(rows, len(rows) // 64 + 1)
    ]  # cache-sized
    return np.concatenate(blocks), [
        " ".join(w[i] for w, i in zip(words.values(), cell)) for cell in chosen
    ]


FACES = [
    [f"DejaVu{family}{style}.ttf" for style in styles]
    for family, styles in [
        ("Sans", ("", "-Bold", "-Oblique", "-BoldOblique")),
        ("SansMono", ("", "-Bold", "-Oblique", "-BoldOblique")),
        ("Serif", ("", "-Bold", "-Italic", "-BoldItalic")),
    ]
]


@cache
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(Path(matplotlib.get_data_path(), "fonts", "ttf", name), size)


def _glyph(character: str, font: str, size: int, weight: int = 0) -> np.ndarray:
    """The character in the middle of a (2 size, 2 size) picture, ink 1 on 0."""
    page = Image.new("L", (2 * size, 2 * size))
    face = _font(font, size)
    ImageDraw.Draw(page).text(
        (size, size), character, fill=255, font=face, anchor="mm", stroke_width=weight
    )
    return np.asarray(page, np.float32) / 255


@cache
def characters() -> list[str]:
    """Letters and signs that every face has, no two of one shape and none of a digit's.

    Latin A stays, Greek Alpha goes.
    """
    have = [set(FT2Font(_font(name, 24).path).get_charmap()) for family in FACES for name in family]
    kept, shapes = (
        [],
        np.stack([_shape(digit) for digit in "0123456789"]),
    )  # Latin O is a zero, Cyrillic Ze a three
    for character in map(chr, sorted(set.intersection(*have))):
        if unicodedata.category(character) not in (
            "Lu",
            "Ll",
            "Lo",
            "Sc",
            "Sm",
        ):  # letters, currency, mathematics
            continue
        if unicodedata.decomposition(character):  # an accented letter is its letter
            continue
        shape = _shape(character)
        if shape is not None and (shapes @ shape).max() < 0.93:
            kept.append(character)
            shapes = np.vstack([shapes, shape])
    return kept


def _shape(character: str) -> np.ndarray | None:
    """The character's ink stretched over 16 x 16 pixels, as a unit vector.

    None for a mere line or dot.
    """
    ink = Image.fromarray((255 * _glyph(character, "DejaVuSans.ttf", 32)).astype(np.uint8))
    left, top, right, bottom = ink.getbbox() or (0, 0, 0, 0)
    if min(right - left, bottom - top) < 8:
        return None
    trimmed = ink.crop((left, top, right, bottom)).resize((16, 16), Image.Resampling.BOX)
    shape = np.asarray(trimmed, np.float32).ravel()
    return shape / np.linalg.norm(shape)


def _glyph_names(chosen: list[str]) -> list[str]:
    """Names of characters by Unicode, shortened to at most 24 characters.

    The code point follows a name that was cut, or that another character has.
    """
    names, drop = [], ("LATIN", "LETTER", "SIGN", "WITH", "AND", "SYMBOL")
    for character in chosen:
        words = [word for word in unicodedata.name(character).split() if word not in drop]
        name = " ".join(words).lower()
        short = name if len(name) <= 24 else name[:19].rstrip() + f" {ord(character):x}"
        names.append(short if short not in names else f"{short[:19].rstrip()} {ord(character):x}")
    return names


def _glyphs(counts, train, rng):
    """Class = character.

    Instance = face, weight, size, slant, place, two colours and what lies about.
    """
    chosen = [characters()[i] for i in rng.permutation(len(characters()))[: len(counts)]]
    masks = []
    for character, count in zip(chosen, counts):
        styles = rng.permutation(12)
        for style in np.resize(styles, count):
            masks.append(
                _glyph(character, FACES[style % 3][style // 3], 48, int(rng.integers(0, 3)))
            )
    return _inked(
        rng, np.stack(masks)[..., None], clutter=1, turn=0.1, zoom=(0.48, 0.6), shift=0.05
    ), _glyph_names(chosen)


def _digits(counts, train, rng):
    """Class = two-digit number, from two handwritten digits (scikit-learn's 8 x 8 images).

    One half of the images of digits is for training classes, the other for test classes; an image
    may occur in two numbers.
    """
    data, words = (
        load_digits(),
        ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"],
    )
    numbers, side = rng.permutation(100)[: len(counts)], rng.permutation(len(data.target)) % 2
    pairs = []
    for turn, (number, count) in enumerate(zip(numbers, counts)):
        written = [
            np.flatnonzero((data.target == digit) & (side == (turn >= train)))
            for digit in divmod(number, 10)
        ]
        tens, units = (data.images[rng.permutation(those)[:count]] / 16 for those in written)
        pairs.append(np.concatenate([tens[:, :, :7], units[:, :, 1:]], axis=2))
    small = np.pad(np.concatenate(pairs).astype(np.float32), ((0, 0), (5, 5), (2, 2)))[
        ..., None
    ]  # 18 x 18
    names = [f"{words[number // 10]} {words[number % 10]}" for number in numbers]
    return _inked(
        rng, small, clutter=1, turn=0.06, zoom=(0.76, 0.84), shift=0.03, sharpen=2.2
    ), names


def _inked(rng, masks, clutter, sharpen=1.0, **view):
    """Pictures of written `masks`, dark on pale paper, from random viewpoints.

    Other things lie on the paper, some of them on the writing.
    """
    blocks = []
    for block in np.array_split(masks, len(masks) // 64 + 1):
        c = draw.Canvas(rng, len(block))
        paper, ink = c.colour((0, 0.5), (0.75, 1)), c.colour((0.2, 1), (0, 0.45))
        c.scene(paper, paper * c.any(0.7, 1)[..., None], clutter=clutter, strength=0.6)
        seen = draw.warp(rng, block, squeeze=0.15, fine=True, **view)
        c.image += np.clip(sharpen * (seen - 0.5) + 0.5, 0, 1) * (ink - c.image)
        c.veil(0.1)
        blocks.append(c.develop(noise=0.005))
    return np.concatenate(blocks)


def _photos(counts, train, rng):
    """Class = place in scikit-learn's two photographs; instance = viewpoint and light."""
    side, places = 44, []
    for photo, name in zip(load_sample_images().images, ("temple", "dahlia")):
        for row in range(photo.shape[0] // side):
            for column in range(photo.shape[1] // side):
                window = photo[row * side :, column * side :][:side, :side].astype(np.float32) / 255
                quarters = window.reshape(2, side // 2, 2, side // 2, 3).std((1, 3)).mean(-1)
                places.append((quarters.min(), f"{name} {column} right {row} down", window))
    lively = sorted(places, key=lambda place: -place[0])[
        : len(counts)
    ]  # sky and blur look alike everywhere
    chosen = [lively[i] for i in rng.permutation(len(lively))]
    windows = np.repeat(np.stack([window for *_, window in chosen]), counts, axis=0)
    views = draw.warp(rng, windows, turn=0.6, zoom=(0.55, 0.95), shift=0.2, squeeze=0.25)
    return draw.lit(rng, views, light=0.55, noise=0.02), [name for _, name, _ in chosen]


if __name__ == "__main__":
    write(Path(__file__).resolve().parent.parent)
