"""Getting the paper's datasets: what is there, downloads that resume, safe unpacking, a check of every image."""

from __future__ import annotations

import lzma
import os
import shutil
import stat
import tarfile
import urllib.error
import urllib.request
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import filelock
import pandas as pd
import pooch
from tqdm import tqdm

from . import Benchmark, check_known, decoding, packing, paper


@dataclass(frozen=True)
class Archive:
    """A file to fetch: its address, its checksum, and the folder under the root that it is unpacked into."""

    url: str
    checksum: str
    into: str = "."

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[1]


_DOGS = "http://vision.stanford.edu/aditya86/ImageNetDogs"
_OXFORD = "https://www.robots.ox.ac.uk/~vgg/data"
ARCHIVES: dict[str, list[Archive]] = {
    "cub": [
        Archive(
            "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
            "md5:97eceeb196236b17998738112f37df78",
        )
    ],
    "sop": [
        Archive(
            "http://ftp.cs.stanford.edu/cs/cvgl/Stanford_Online_Products.zip", "md5:7f73d41a2f44250d4779881525aea32e"
        )
    ],
    "dogs": [
        Archive(f"{_DOGS}/lists.tar", "md5:edbb9f16854ec66506b5f09b583e0656", "dogs"),
        Archive(f"{_DOGS}/images.tar", "md5:1bb1f2a596ae7057f99d7d75860002ef", "dogs"),
    ],
    "flowers": [
        Archive(f"{_OXFORD}/flowers/102/imagelabels.mat", "md5:e0620be6f572b9609742df49c70aed4d", "flowers"),
        Archive(f"{_OXFORD}/flowers/102/setid.mat", "md5:a5357ecc9cb78c4bef273ce3793fc85c", "flowers"),
        Archive(f"{_OXFORD}/flowers/102/102flowers.tgz", "md5:52808999861908f626f3c1f4e79d11fa", "flowers"),
    ],
    "aircraft": [
        Archive(
            f"{_OXFORD}/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz", "md5:d4acdd33327262359767eeaa97a4f732"
        )
    ],
}
MANUAL = {
    "cars": """\
Cars-196: its official address (ai.stanford.edu/~jkrause/cars) has been dead since 2023; copies are on Kaggle and
elsewhere. Unpack into {root}/cars/ either
  car_ims.tgz and cars_annos.mat (about 2 GB), giving car_ims/ with 16,185 images, or
  cars_train.tgz (0.9 GB, MD5 065e5b463ae28d29e77c1b4b166cfe61), giving cars_train/ with 8,144 images,
  cars_test.tgz (0.9 GB, MD5 4ce7ebf6a94d07f1952d94dd34c4d501), giving cars_test/ with 8,041 images,
  car_devkit.tgz (0.3 MB, MD5 c3b158d763b6e2245038c8ad08e45376), giving devkit/, and beside them
  cars_test_annos_withlabels.mat (0.2 MB, MD5 b0a2b23655a3edd16d84508592a98d10).""",
    "inshop": """\
In-Shop Clothes Retrieval (DeepFashion): ask for the password by the form on
mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html, then unpack into {root}/inshop/
  Eval/list_eval_partition.txt (52,714 lines) and
  Img/img.zip (not img_highres.zip), giving Img/img/ with MEN/ and WOMEN/; 52,712 images of at most 256 pixels.""",
    "nabirds": """\
NABirds: agree to the terms at dl.allaboutbirds.org/nabirds, then unpack into {root}/
  nabirds.tar.gz (MD5 df21a9e4db349a14e2b08adfd45873bd), giving nabirds/ with images.txt, image_class_labels.txt,
  classes.txt and images/; 48,562 images.""",
}


def status(root: str | Path, packed: str | Path | None = None) -> pd.DataFrame:
    """What is where: a row per dataset with its folder, images found and expected, packed copy, and state.

    Args:
        root: as for `paper.load`.
        packed: the folder of the packed copies; by default `.packed` under `root`.
    """
    root = Path(root).expanduser()
    rows = []
    for name, dataset in paper.DATASETS.items():
        folder = paper.find(root, name) if root.is_dir() else None
        how = "fetches it" if name in ARCHIVES else "says how to get it by hand"
        found, state = 0, f"missing; `python -m pumalib data download {name}` {how}"
        if folder is not None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    found = len(paper.load(root, [name], strict=False).images)
                    state = str(caught[0].message) if caught else "complete"
                except ValueError as error:
                    state = str(error)
        try:
            pack = packing.read(packed or root / packing.FOLDER, name)
            copy = f"{len(pack.index['paths']):,} images, side {pack.side}, quality {pack.quality}"
        except ValueError:
            copy = "none"
        expected = sum(images for images, _ in dataset.counts.values())
        rows.append((name, str(folder or ""), found, expected, copy, state))
    columns = ["dataset", "folder", "images", "expected", "packed", "state"]
    return pd.DataFrame(rows, columns=columns).set_index("dataset")


def download(
    root: str | Path,
    datasets: list[str] | None = None,
    mirror: str | None = None,
    archives: dict[str, list[Archive]] | None = None,
) -> list[str]:
    """Fetch and unpack the datasets that may be fetched freely; the names of those that must be fetched by hand.

    What is complete already is left alone.  Interrupted, run it again: downloads go on where they stopped.  The
    archives stay in `root/archives` and may be deleted.

    Args:
        root: where to; made if need be.
        datasets: names; None: all eight.
        mirror: an address under which the archives lie by their own names, instead of the original addresses.
        archives: what to fetch for which dataset; by default `ARCHIVES`.

    Raises:
        ValueError: a wrong checksum, a damaged archive, or one with an unsafe member (nothing of it is kept).
        OSError: the server cannot be reached, or breaks off.
    """
    archives = ARCHIVES if archives is None else archives
    names = list(paper.DATASETS) if datasets is None else list(datasets)
    check_known("dataset", names, paper.DATASETS)
    root = Path(root).expanduser()
    (root / "archives").mkdir(parents=True, exist_ok=True)
    by_hand = []
    for name in names:
        if _complete(root, name):
            print(f"{name}: complete in {paper.find(root, name)}")
        elif name not in archives:
            by_hand.append(name)
        else:
            for archive in archives[name]:
                with filelock.FileLock(root / "archives" / f"{archive.name}.lock"):
                    unpack(_fetch(archive, root / "archives", mirror), root / archive.into)
            print(f"{name}: unpacked into {root / archives[name][0].into}")
    return by_hand


def instructions(root: str | Path, name: str) -> str:
    """How to get dataset `name` by hand."""
    if name in MANUAL:
        return MANUAL[name].format(root=root)
    return f"{name}: `python -m pumalib data download {name}`"


def _complete(root: Path, name: str) -> bool:
    try:
        paper.load(root, [name])
        return True
    except ValueError:
        return False


def _fetch(archive: Archive, folder: Path, mirror: str | None) -> Path:
    url = f"{mirror.rstrip('/')}/{archive.name}" if mirror else archive.url
    try:
        return Path(pooch.retrieve(url, archive.checksum, fname=archive.name, path=folder, downloader=_resuming))
    except ValueError as error:
        raise ValueError(
            f"{url}: wrong checksum, the download was thrown away ({error}). Run it again; if it stays wrong, the "
            f"server has another release: fetch {archive.name} elsewhere and put it into {folder}"
        ) from None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise OSError(
            f"{url}: {error}. Run it again, it goes on where it stopped; or fetch {archive.name} elsewhere and put it "
            f"into {folder}"
        ) from None


def _resuming(url: str, output_file: str, _) -> None:
    """A downloader for pooch that keeps what it has in `<name>.part` and asks for the rest only."""
    part = Path(output_file).parent / (url.rsplit("/", 1)[1] + ".part")
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not done:
            raise
        part.unlink()  # nothing follows what we have: it is all there, or of another release
        response, done = urllib.request.urlopen(url, timeout=60), 0
    with response:
        if response.status != 206:  # the server sends all of it
            done = 0
        total = done + int(response.headers.get("Content-Length", 0))
        bar = tqdm(total=total or None, initial=done, desc=part.stem, unit="B", unit_scale=True)
        with open(part, "ab" if done else "wb") as out, bar:
            while block := response.read(1 << 18):
                out.write(block)
                done += len(block)
                bar.update(len(block))
    if done < total:
        raise ConnectionError(f"broke off after {done:,} of {total:,} bytes")
    os.replace(part, output_file)


def unpack(archive: Path, target: Path) -> None:
    """Unpack a tar or zip archive into `target`, or copy a single file there; other files there are kept.

    Everything goes to a folder of its own first, so that a refused or interrupted archive leaves nothing behind.

    Raises:
        ValueError: the archive is damaged, or has a member that leaves `target`, a link or a device.
    """
    target.mkdir(parents=True, exist_ok=True)
    fresh = target / f".unpacking-{archive.name}"
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        for name, stream in tqdm(_members(archive), f"unpacking {archive.name}", unit="file", mininterval=1):
            file = fresh / name
            file.parent.mkdir(parents=True, exist_ok=True)
            with stream, open(file, "wb") as out:
                shutil.copyfileobj(stream, out, 1 << 18)
        for folder, _, files in os.walk(fresh):
            place = target / Path(folder).relative_to(fresh)
            place.mkdir(parents=True, exist_ok=True)
            for file in files:
                os.replace(Path(folder) / file, place / file)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{archive}: damaged or cut short ({error}); delete it and download it again") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _members(archive: Path) -> Iterator[tuple[str, BinaryIO]]:
    """Name and content of every file in an archive, refused if anything in it is unsafe."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                kind = stat.S_IFMT(info.external_attr >> 16)
                _refuse_unsafe(archive, info.filename, kind in (0, stat.S_IFREG, stat.S_IFDIR))
                if not info.is_dir() and not _of_macos(info.filename):
                    yield info.filename, packed.open(info)
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as packed:
            for info in packed:
                _refuse_unsafe(archive, info.name, info.isreg() or info.isdir())
                if info.isreg() and not _of_macos(info.name):
                    yield info.name, packed.extractfile(info)
    elif archive.suffix == ".mat":
        yield archive.name, open(archive, "rb")
    else:
        raise ValueError(f"{archive}: neither a tar nor a zip archive; delete it and download it again")


def _refuse_unsafe(archive: Path, name: str, plain: bool) -> None:
    path = PurePosixPath(name)
    if not plain or path.is_absolute() or ".." in path.parts or "\\" in name or ":" in path.parts[:1]:
        why = "leaves its folder" if plain else "is a link or a device"
        raise ValueError(f"{archive}: member {name!r} {why}; the archive is refused")


def _of_macos(name: str) -> bool:
    return PurePosixPath(name).name.startswith("._") or "__MACOSX" in name


def verify(benchmark: Benchmark) -> pd.DataFrame:
    """Decode every image file of `benchmark`: a row with dataset, path and error for each that cannot be read."""
    errors = decoding.unreadable(benchmark, progress=True)
    bad = benchmark.images.iloc[list(errors)][["dataset", "path"]].reset_index(drop=True)
    return bad.assign(error=[str(error) for error in errors.values()])
