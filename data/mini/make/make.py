"""Make the images of `mini`: python data/mini/make/make.py writes the sheets and images.csv beside this folder.

Digits, glyphs and photos come from what scikit-learn and matplotlib ship; birds, flowers, garments, vehicles and
aircraft are drawn (draw.py).  The shares of the train images follow Table 1 of the paper (the dataset whose role each
plays stands in `SIZES`).  Difficulty was set by looking at the frozen embedded backbone alone.  Other versions of
numpy, scikit-learn, matplotlib or Pillow than those named in ../README.md may draw other pixels.

Classes of the benchmark and those the backbone is trained on never meet: glyphs are dealt out by character, drawn
classes by the colour of a chessboard (`cells`), and digits and photographs are not used in pretraining.
"""

import unicodedata
import zlib
from functools import cache
from pathlib import Path

import draw
import matplotlib
import numpy as np
import pandas as pd
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_digits, load_sample_images

SIDE, CELL = 32, 34  # pixels: a picture, and its cell of a sheet with the gap on the right and below
COLUMNS = 48  # pictures side by side on a sheet, at most

# dataset -> (train classes, images per train class, test classes, images per test class); a fraction: on average
SIZES = {
    "glyphs": (250, 5, 250, 5),  # SOP: 42 % of the train images, many classes of few images
    "garments": (83, 6.5, 83, 6.5),  # In-Shop: 18 %, queries and gallery apart
    "birds": (30, 16, 30, 16),  # NABirds: 16 %
    "digits": (5, 45, 5, 45),  # Dogs: 7.5 %, here with a handful of classes
    "vehicles": (14, 12, 14, 12),  # Cars: 5.7 %
    "photos": (12, 10, 12, 10),  # CUB: 4.1 %
    "aircraft": (10, 10.5, 10, 10.5),  # Aircraft: 3.5 %
    "flowers": (8, 9.5, 8, 12),  # Flowers: 2.5 %
}

HUES = ("red", "orange", "lime", "green", "cyan", "azure", "violet", "pink")
# family -> trait of its draw function -> what its levels are called
TRAITS = {
    "birds": {"back": HUES, "belly": HUES, "crown": HUES},
    "flowers": {
        "petals": tuple(f"{number}-petalled" for number in ("three", "four", "five", "six", "seven", "eight")),
        "form": ("round", "oval", "pointed"),
        "hue": HUES,
        "heart": ("small-hearted", "large-hearted"),
    },
    "garments": {
        "cut": ("shirt", "dress", "trousers", "skirt"),
        "motif": ("stripes", "checks", "dots", "zigzag"),
        "angle": ("level", "rising", "upright", "falling"),
        "period": ("close", "medium", "wide"),
        "width": ("fine", "bold"),
    },
    "vehicles": {
        "length": ("short", "middling", "long"),
        "cabin": ("coupe", "cabin", "van"),
        "place": ("rear", "central", "forward"),
        "roof": ("low", "high", "towering"),
        "wheel": ("small-wheeled", "big-wheeled"),
    },
    "aircraft": {
        "sweep": ("straight-winged", "swept", "arrow-winged"),
        "span": ("short-span", "middle-span", "long-span"),
        "chord": ("slender", "broad"),
        "tail": ("small-tailed", "large-tailed"),
        "engines": ("glider", "twin", "four-engined"),
    },
    "emblems": {
        "corners": ("two", "three", "four", "five", "six", "seven"),
        "depth": ("blunt", "lobed", "spiky"),
        "aspect": ("wide", "even", "tall"),
        "hue": HUES,
        "print_hue": HUES,
        "motif": ("stripes", "checks", "dots", "zigzag", "plain"),
        "period": ("fine", "coarse"),
    },
}
# what the backbone is trained on: family -> classes (emblems and leaves are in no dataset)
PRETRAINING = {
    "glyphs": 100,
    "garments": 100,
    "vehicles": 50,
    "aircraft": 50,
    "birds": 30,
    "flowers": 24,
    "emblems": 80,
    "leaves": 30,
}


def build() -> tuple[pd.DataFrame, np.ndarray]:
    """All images: a row of images.csv for each, and the pixels (n, 32, 32, 3) uint8 (about 6,000 images).

    A class fills neighbouring cells of one row of its sheet, several small classes side by side.
    """
    tables, pixels = [], []
    for dataset, (train, per_train, test, per_test) in SIZES.items():
        counts = np.concatenate([_counts(train, per_train), _counts(test, per_test)])
        images, names = _make(dataset, counts, _rng(dataset))
        assert names == sorted(set(names)), dataset  # first half by name trains
        label, turn = np.repeat(np.arange(len(counts)), counts), np.concatenate([np.arange(n) for n in counts])
        split = np.where(label < train, "train", "test").astype(object)
        if dataset == "garments":
            split[split == "test"] = np.where(turn[label >= train] % 2, "gallery", "query")
        abreast = COLUMNS // counts.max()  # classes in a row
        place = {"column": label % abreast * counts.max() + turn, "row": label // abreast}
        tables.append(
            pd.DataFrame(dict(dataset=dataset, class_name=np.array(names, object)[label], split=split, **place))
        )
        pixels.append(images)
    return pd.concat(tables, ignore_index=True), np.concatenate(pixels)


def write(folder: Path) -> None:
    """The sheets, <dataset>.png, and images.csv."""
    table, pixels = build()
    table.to_csv(folder / "images.csv", index=False, lineterminator="\n")
    for dataset, rows in table.groupby("dataset"):
        cells = np.full((rows["row"].max() + 1, rows["column"].max() + 1, CELL, CELL, 3), 255, np.uint8)
        cells[rows["row"], rows["column"], :SIDE, :SIDE] = pixels[rows.index]
        sheet = cells.swapaxes(1, 2).reshape(cells.shape[0] * CELL, cells.shape[1] * CELL, 3)
        Image.fromarray(sheet).save(folder / f"{dataset}.png", optimize=True)


def pretraining_images(per_class: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """What the embedded backbone is trained on: other classes than the benchmark's.

    Args:
        per_class: images per class.
        seed: another seed gives other images of the same classes.

    Returns:
        pixels (n, 32, 32, 3) uint8, labels (n,) int, and the class names "family: name" by label.
    """
    pixels, names = [], []
    for family, classes in PRETRAINING.items():
        images, found = _make(family, np.full(classes, per_class), _rng(family, seed), pretraining=True)
        pixels.append(images)
        names += [f"{family}: {name}" for name in found]
    return np.concatenate(pixels), np.repeat(np.arange(len(names)), per_class), names


# ---------------------------------------------------------------- classes and their images


def _rng(name: str, seed: int = 0) -> np.random.Generator:
    """A stream per dataset, so that a change in one leaves the others' pixels alone."""
    return np.random.default_rng([zlib.crc32(name.encode()), seed])


def _counts(classes: int, mean: float) -> np.ndarray:
    """Images per class: whole numbers around `mean`."""
    return np.diff(np.floor(mean * np.arange(classes + 1)).astype(int))


def _make(family, counts, rng, pretraining=False) -> tuple[np.ndarray, list[str]]:
    """Images of as many classes as `counts` has entries, class by class, and the names of the classes."""
    sources = {"glyphs": _glyphs, "digits": _digits, "photos": _photos, "leaves": _leaves}
    if family in sources:
        return sources[family](counts, rng, pretraining)
    return _drawn(family, counts, rng, pretraining)


def cells(family: str, pretraining: bool) -> np.ndarray:
    """The (cells, traits) levels a drawn class may have.

    A class owns a cell of the chessboard its traits span: the benchmark has the white cells, pretraining the
    black ones, so that two neighbours are never on the same side.
    """
    levels = [len(words) for words in TRAITS[family].values()]
    board = np.indices(levels).reshape(len(levels), -1).T
    return board[board.sum(1) % 2 == pretraining]


def _drawn(family, counts, rng, pretraining):
    words = TRAITS[family]
    classes = np.random.default_rng([zlib.crc32(family.encode()), 1 + pretraining])  # the classes know no seed
    own = classes.permutation(cells(family, pretraining))[: len(counts)]
    traits = (own + classes.uniform(0.3, 0.7, own.shape)) / [len(names) for names in words.values()]
    names = [f"{i:03d} " + " ".join(w[level] for w, level in zip(words.values(), cell)) for i, cell in enumerate(own)]
    rows = np.repeat(traits, counts, axis=0).astype(np.float32)[:, :, None, None]
    family = getattr(draw, family)
    blocks = [family(rng, *block.swapaxes(0, 1)) for block in np.array_split(rows, len(rows) // 256 + 1)]  # cache-sized
    return np.concatenate(blocks), names


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
    ImageDraw.Draw(page).text((size, size), character, fill=255, font=face, anchor="mm", stroke_width=weight)
    return np.asarray(page, np.float32) / 255


@cache
def characters() -> list[str]:
    """Letters and signs that every face has, no two of one shape (Latin A stays, Greek Alpha goes), none a digit's."""
    have = [set(FT2Font(_font(name, 24).path).get_charmap()) for family in FACES for name in family]
    kept, shapes = [], np.stack([_shape(digit) for digit in "0123456789"])  # Latin O is a zero, Cyrillic Ze a three
    for character in map(chr, sorted(set.intersection(*have))):
        if unicodedata.category(character) not in ("Lu", "Ll", "Lo", "Sc", "Sm"):  # letters, currency, mathematics
            continue
        if unicodedata.decomposition(character):  # an accented letter is its letter
            continue
        shape = _shape(character)
        if shape is not None and (shapes @ shape).max() < 0.93:
            kept.append(character)
            shapes = np.vstack([shapes, shape])
    return kept


def _shape(character: str) -> np.ndarray | None:
    """The character's ink stretched over 16 x 16 pixels, as a unit vector; None for a mere line or dot."""
    ink = Image.fromarray((255 * _glyph(character, "DejaVuSans.ttf", 32)).astype(np.uint8))
    left, top, right, bottom = ink.getbbox() or (0, 0, 0, 0)
    if min(right - left, bottom - top) < 8:
        return None
    trimmed = ink.crop((left, top, right, bottom)).resize((16, 16), Image.Resampling.BOX)
    shape = np.asarray(trimmed, np.float32).ravel()
    return shape / np.linalg.norm(shape)


def _glyphs(counts, rng, pretraining):
    """Class = character; instance = face, weight, size, slant, place and two colours."""
    dealt = [c for i, c in enumerate(characters()) if (i % 6 == 0) == pretraining]
    names = sorted(unicodedata.name(c).lower() for c in dealt)
    chosen = sorted(np.random.default_rng(5).permutation(names)[: len(counts)])
    masks = []
    for name, count in zip(chosen, counts):
        character = unicodedata.lookup(name)
        styles = rng.permutation(12)
        for style in np.resize(styles, count):
            masks.append(_glyph(character, FACES[style % 3][style // 3], 48, int(rng.integers(0, 3))))
    masks = draw.warp(rng, np.stack(masks)[..., None], turn=0.1, zoom=(0.48, 0.6), shift=0.04)
    return _inked(rng, masks), chosen


def _digits(counts, rng, pretraining):
    """Class = handwritten digit (scikit-learn's real 8 x 8 images, at most one picture of each), coloured."""
    data, chosen = load_digits(), []
    for digit, count in enumerate(counts):
        chosen.append(rng.permutation(np.flatnonzero(data.target == digit))[:count])
    small = data.images[np.concatenate(chosen)].astype(np.float32) / 16
    small = np.pad(small, ((0, 0), (3, 3), (3, 3)))[..., None]
    masks = np.clip(2.2 * draw.warp(rng, small, turn=0.15, zoom=(0.6, 0.75), shift=0.06) - 0.5, 0, 1)
    return _inked(rng, masks), [f"digit {digit}" for digit in range(len(counts))]


def _inked(rng, masks):
    """Dark ink of any colour on pale paper of any colour."""
    n = len(masks)
    dark = draw.hsv(*rng.uniform([[0], [0.2], [0]], [[1], [1], [0.5]], (3, n)).astype(np.float32))[:, None, None]
    pale = draw.hsv(*rng.uniform([[0], [0], [0.7]], [[1], [0.6], [1]], (3, n)).astype(np.float32))[:, None, None]
    return draw.lit(rng, pale + masks * (dark - pale))


def _photos(counts, rng, pretraining):
    """Class = place in scikit-learn's two photographs; instance = viewpoint and light."""
    side, places = 80, []
    for photo, name in zip(load_sample_images().images, ("temple", "dahlia")):
        for top in range(0, photo.shape[0] - side + 1, side):
            for left in range(0, photo.shape[1] - side + 1, side):
                window = photo[top : top + side, left : left + side].astype(np.float32) / 255
                places.append((window.std((0, 1)).mean(), f"{name}, {left} px right, {top} px down", window))
    lively = sorted(places, key=lambda place: -place[0])[: 2 * len(counts)]  # sky and blur look alike everywhere
    chosen = [lively[i] for i in rng.permutation(len(lively))[: len(counts)]]
    windows = np.repeat(np.stack([window for *_, window in chosen]), counts, axis=0)
    views = draw.warp(rng, windows, turn=0.3, zoom=(0.45, 0.75), shift=0.25)
    return draw.lit(rng, views, light=0.4, noise=0.03), [f"{i:03d} {name}" for i, (_, name, _) in enumerate(chosen)]


def _leaves(counts, rng, pretraining):
    """Class = a texture of fallen leaves, seen like the photos."""
    textures = draw.leaves(np.random.default_rng(7), len(counts), 96)
    views = draw.warp(rng, np.repeat(textures, counts, axis=0), turn=0.3, zoom=(0.45, 0.75), shift=0.2)
    return draw.lit(rng, views, light=0.4, noise=0.03), [f"texture {i:03d}" for i in range(len(counts))]


if __name__ == "__main__":
    write(Path(__file__).resolve().parent.parent)
