"""`python -m pumalib data status` and `download`: find the paper's datasets, fetch the free ones.

An interrupted download goes on when the command is run again.
"""

import hashlib
import lzma
import os
import shutil
import stat
import tarfile
import time
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path, PureWindowsPath
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from tqdm import tqdm

from .. import progress
from . import check_known, paper, prepared

if TYPE_CHECKING:
    from http.client import HTTPResponse
    from urllib.error import HTTPError

# The most bytes that an archive may unpack to: RATIO times its size, within these bounds.
RATIO = 100
LEAST_BYTES = 1e9
MOST_BYTES = 200e9
# Bytes read at a time from a server.
BUFFER = 1 << 18
# Give a server up after this many seconds of silence, or if it sends fewer bytes per second.
SECONDS = 60
SLOWEST = 1000


# ---- status


def status(root: str | Path) -> pd.DataFrame:
    """Which of the paper's datasets are under `root`: a row per dataset.

    Columns: dataset, folder, the numbers of images found, expected and prepared, and state.
    """
    root = Path(root).expanduser()
    rows = [_status(root, dataset) for dataset in paper.all_datasets().values()]
    return pd.DataFrame(rows, columns=_Status._fields)


class _Status(NamedTuple):
    dataset: str
    folder: str
    images: int
    expected: int
    prepared: int
    state: str


def _status(root: Path, dataset: paper.Dataset) -> _Status:
    expected = sum(images for images, _ in dataset.counts.values())
    folder = paper.find(root, dataset.name)
    if folder is None:
        return _Status(dataset.name, "", 0, expected, 0, f"not found under {root}")
    found = 0
    copies = 0
    try:
        with warnings.catch_warnings(record=True, action="always") as caught:
            benchmark = paper.load(root, [dataset.name], strict=False)
        found = len(benchmark.images)
        copies = found - len(prepared.unprepared(benchmark))
        state = str(caught[0].message) if caught else "complete"
    except ValueError as error:
        state = str(error).splitlines()[0]
    return _Status(dataset.name, str(folder), found, expected, copies, state)


# ---- download


def download(names: Sequence[str] | None, root: str | Path, mirror: str | None = None) -> list[str]:
    """Download and unpack the named datasets (None: all) that are free and not yet complete.

    For the others it prints how to get them, and returns their names.  Archives stay in
    `root/archives`; a `mirror` serves them under the same file names.  Raises ValueError (wrong
    checksum, unsafe archive), OSError (the server cannot be reached) or RuntimeError (pooch is not
    installed).
    """
    root = Path(root).expanduser()
    known = paper.all_datasets()
    names = names or list(known)
    check_known("dataset", names, known)
    by_hand = []
    for name in names:
        dataset = known[name]
        if _is_complete(root, name):
            print(f"{name}: complete in {paper.find(root, name)}")
        elif dataset.archives:
            for archive in dataset.archives:
                _fetch_and_unpack(archive, root, mirror)
            print(f"{name}: unpacked under {root}")
        else:
            by_hand.append(name)
            print("\n" + dataset.by_hand.format(root=root))
    return by_hand


def _is_complete(root: Path, name: str) -> bool:
    try:
        paper.load(root, [name])
    except ValueError:
        return False
    return True


def _fetch_and_unpack(archive: paper.Archive, root: Path, mirror: str | None) -> None:
    """Download an archive, unless it is there, and unpack it, under a lock."""
    from urllib.error import URLError

    from filelock import FileLock

    pooch = _pooch()
    file = root / "archives" / archive.url.rsplit("/", 1)[1]
    url = archive.url
    if mirror:
        url = f"{mirror.rstrip('/')}/{file.name}"
    with FileLock(f"{file}.lock"):
        try:
            fetch = partial(_fetch, md5=archive.md5)
            pooch.retrieve(url, f"md5:{archive.md5}", file.name, file.parent, downloader=fetch)
        except (ValueError, URLError, TimeoutError, ConnectionError) as error:
            elsewhere = f"put {file.name} from elsewhere into {file.parent}"
            message = f"{url}: {error}. Run it again, it goes on; or {elsewhere}"
            # A wrong checksum is a ValueError.
            if isinstance(error, ValueError):
                raise ValueError(message) from None
            raise OSError(message) from None
        unpack(file, root / archive.into)


def _pooch() -> ModuleType:
    try:
        import pooch
    except ImportError as error:
        remedy = 'pip install "pumalib[download]"'
        raise RuntimeError(f"downloads need pooch, which is not installed: {remedy}") from error
    return pooch


def _fetch(url: str, output_file: str, _: object, md5: str) -> None:
    """Download a file for pooch, whose own downloader cannot resume.

    The bytes received so far are in `<name>.part`; only the rest is requested.
    """
    from urllib.error import HTTPError

    part = Path(output_file).with_name(url.rsplit("/", 1)[1] + ".part")
    try:
        response = _ask(url, _size(part))
    except HTTPError as error:
        if not _nothing_follows(error, part):
            raise
        if _md5(part) == md5:
            part.replace(output_file)
            return
        # The partial file is of another release.
        part.unlink()
        response = _ask(url, 0)
    _receive(response, part)
    part.replace(output_file)


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _ask(url: str, start: int) -> "HTTPResponse":
    """Request a file from byte `start` on."""
    from urllib.request import Request, urlopen

    request = Request(url)
    if start:
        request.add_header("Range", f"bytes={start}-")
    return urlopen(request, timeout=SECONDS)


def _nothing_follows(error: "HTTPError", part: Path) -> bool:
    """Whether the server has nothing beyond the bytes of `part` ("Range Not Satisfiable")."""
    return error.code == 416 and _size(part) > 0


def _md5(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "md5").hexdigest()


def _receive(response: "HTTPResponse", part: Path) -> None:
    """Append the response to `part`; ConnectionError if it breaks off."""
    # A server that knows no ranges (status 200) sends the whole file.
    goes_on = response.status == 206
    start = _size(part) if goes_on else 0
    total = start + int(response.headers.get("Content-Length", 0))
    shown = tqdm(
        total=total or None,
        initial=start,
        desc=part.stem,
        unit="B",
        unit_scale=True,
        **progress.pace(),
    )
    with response, part.open("ab" if goes_on else "wb") as out, shown:
        for content in _bounded(response, start):
            out.write(content)
            shown.update(len(content))
        out.flush()
        os.fsync(out.fileno())
    have = _size(part)
    if have < total:
        raise ConnectionError(f"broke off after {have:,} of {total:,} bytes")


def _bounded(response: "HTTPResponse", start: int) -> Iterator[bytes]:
    """Yield the bytes of a response; ConnectionError if it is too large or too slow."""
    began = time.monotonic()
    received = 0
    # `read1` returns the bytes that have arrived: waiting for a full buffer could take for ever.
    while content := response.read1(BUFFER):
        received += len(content)
        if start + received > MOST_BYTES:
            raise ConnectionError(f"sends more than {MOST_BYTES / 1e9:.0f} GB")
        seconds = time.monotonic() - began
        if seconds > SECONDS and received < SLOWEST * seconds:
            raise ConnectionError(f"sends less than {SLOWEST:,} bytes a second")
        yield content


# ---- unpacking


def unpack(archive: Path, target: Path) -> None:
    """Unpack a tar or zip archive into `target`, or copy a .mat file.

    Raises ValueError, and unpacks nothing, where the archive is damaged or unsafe.
    """
    fresh = target / f".unpacking-{archive.name}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        if archive.suffix == ".mat":
            shutil.copy(archive, fresh)
        elif zipfile.is_zipfile(archive):
            _unpack_zip(archive, fresh)
        else:
            _unpack_tar(archive, fresh)
        # Once for all files: a sync per file would take minutes for the largest dataset.
        if hasattr(os, "sync"):
            os.sync()
        shutil.copytree(fresh, target, copy_function=os.replace, dirs_exist_ok=True)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        what = f"{archive}: damaged or cut short ({error})"
        raise ValueError(f"{what}; delete it and download it again") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _unpack_zip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(folder, _members_to_unpack(archive, _zip_members(packed)))


def _unpack_tar(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extraction_filter = tarfile.data_filter
        packed.extractall(folder, _members_to_unpack(archive, _tar_members(packed)))


class _Member(NamedTuple):
    """A file or folder of an archive."""

    info: Any  # the object of `zipfile` or `tarfile`
    name: str
    size: int  # in bytes
    is_plain: bool  # no link, no device


def _zip_members(packed: zipfile.ZipFile) -> Iterator[_Member]:
    for info in packed.infolist():
        kind = stat.S_IFMT(info.external_attr >> 16)
        is_plain = kind in (0, stat.S_IFREG, stat.S_IFDIR)
        yield _Member(info, info.filename, info.file_size, is_plain)


def _tar_members(packed: tarfile.TarFile) -> Iterator[_Member]:
    for info in packed:
        is_plain = info.isreg() or info.isdir()
        yield _Member(info, info.name, info.size, is_plain)


def _members_to_unpack(archive: Path, members: Iterable[_Member]) -> tqdm:
    """The members to unpack, without the metadata files of macOS, in a progress bar.

    All members are checked before any is unpacked: ValueError if one is unsafe.
    """
    limit = min(MOST_BYTES, max(LEAST_BYTES, RATIO * archive.stat().st_size))
    total = 0
    chosen = []
    for member in members:
        # A Windows path understands drive letters and both slashes.
        path = PureWindowsPath(member.name)
        total += member.size
        leaves = bool(path.anchor) or ".." in path.parts
        if not member.is_plain or leaves or total > limit:
            size = f"{limit / 1e9:.0f} GB"
            why = f"is a link or a device, leaves its folder, or makes it more than {size}"
            raise ValueError(f"{archive}: member {member.name!r} {why}; the archive is refused")
        if not path.name.startswith("._") and "__MACOSX" not in path.parts:
            chosen.append(member.info)
    return progress.bar(chosen, desc=f"unpacking {archive.name}", unit="file")
