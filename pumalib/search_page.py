"""Write search results as one self-contained HTML page, as CSV or as JSON."""

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import pandas as pd
from PIL import Image

from . import paths
from .data.images import ImageError, decode

# The longer side of a thumbnail in pixels, and the quality of its JPEG: 3 to 8 KB each.
SIDE = 144
QUALITY = 75
# The most thumbnails of a page, which then has about 20 MB.
MOST_PICTURES = 2500

_STYLE = """
body { font: 15px/1.4 system-ui, sans-serif; margin: 1.5rem; color: #222; background: #fff; }
.row { display: flex; flex-wrap: wrap; gap: .6rem; margin: 0 0 1.4rem; align-items: flex-start; }
figure { margin: 0; width: 150px; }
figure.query { border-right: 2px solid #888; padding-right: .6rem; }
img { max-width: 144px; max-height: 144px; display: block; }
h1, figcaption { overflow-wrap: anywhere; }
figcaption { font-size: 12px; }
"""


@dataclass(frozen=True)
class Answer:
    """A query with the images found for it."""

    query: Path  # its file
    found: pd.DataFrame  # columns path (below the folder of the index) and cosine


@dataclass(frozen=True)
class Picture:
    """An image in a row of the page, with its caption."""

    file: Path
    caption: str
    kind: str = "found"  # or "query", which has a line beside it


def write(answers: Sequence[Answer], folder: Path, file: Path, title: str) -> None:
    """Write a page of `answers`, with thumbnails of the images below `folder`.

    Raises ValueError if there are more than `MOST_PICTURES` pictures, OSError where it cannot be
    written.
    """
    rows = []
    for answer in answers:
        row = [Picture(answer.query, answer.query.name, "query")]
        for place in answer.found.itertuples():
            row.append(Picture(folder / str(place.path), f"{place.cosine:.3f} {place.path}"))
        rows.append(row)
    _write(rows, file, title, "ask for fewer, or lower k")


def write_groups(groups: pd.DataFrame, folder: Path, file: Path, title: str) -> None:
    """Write a page with a row for each group of `FolderIndex.duplicate_groups`; errors as above."""
    rows = []
    for _, group in groups.groupby("group"):
        row = []
        for image in group.itertuples():
            row.append(Picture(folder / str(image.path), f"{image.cosine:.6f} {image.path}"))
        rows.append(row)
    _write(rows, file, title, "raise the threshold")


def write_suspects(suspects: pd.DataFrame, folder: Path, file: Path, title: str) -> None:
    """Write a page of the images of `FolderIndex.likely_wrong_labels`; errors as above."""
    row = []
    for image in suspects.itertuples():
        caption = f"{image.path}: {image.votes} of {image.of} in {image.suggested}"
        row.append(Picture(folder / str(image.path), caption))
    _write([row], file, title, "write --csv instead")


def write_table(table: pd.DataFrame, csv_file: Path | None, json_file: Path | None) -> None:
    """Write a table as CSV, as JSON (a list of rows) or both, each file whole."""
    if csv_file is not None:
        with paths.written_whole(csv_file) as temporary:
            table.to_csv(temporary, index=False)
    if json_file is not None:
        text = table.to_json(orient="records", indent=2, force_ascii=False, double_precision=8)
        with paths.written_whole(json_file) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")


def _write(rows: Sequence[Sequence[Picture]], file: Path, title: str, remedy: str) -> None:
    pictures = sum(len(row) for row in rows)
    if pictures > MOST_PICTURES:
        what = f"{pictures:,} pictures are too many for a page"
        raise ValueError(f"{what}, which has at most {MOST_PICTURES:,}: {remedy}")
    body = "\n".join(_row(row) for row in rows)
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{html.escape(title)}</h1>\n{body}\n</body></html>\n"
    )
    with paths.written_whole(file) as temporary:
        temporary.write_text(page, encoding="utf-8", errors="replace")


def _row(row: Sequence[Picture]) -> str:
    figures = [_figure(one.file, one.caption, one.kind) for one in row]
    return f'<div class="row">{"".join(figures)}</div>'


def _figure(file: Path, caption: str, kind: str) -> str:
    text = html.escape(caption)
    return (
        f'<figure class="{kind}"><img src="{_thumbnail(file)}" alt="{text}">'
        f"<figcaption>{text}</figcaption></figure>"
    )


def _thumbnail(file: Path) -> str:
    """A small JPEG of an image as a data URI; a grey square if the file has become unreadable."""
    try:
        picture = decode(file, upright=True)
    except ImageError:
        picture = Image.new("RGB", (SIDE, SIDE), "lightgrey")
    picture.thumbnail((SIDE, SIDE))
    content = BytesIO()
    picture.save(content, "JPEG", quality=QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(content.getvalue()).decode()
