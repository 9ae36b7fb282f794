"""`python -m pumalib data status|download|prepare|verify`; whatever is interrupted goes on when it is called again."""

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
from pathlib import Path, PureWindowsPath

import filelock
import pandas as pd
import pooch
from tqdm import tqdm

from . import check_known, paper, prepared


def status(root: str | Path) -> pd.DataFrame:
    """What is where: a row per dataset of the paper with its folder, images found, expected and prepared, and state."""
    root, rows = Path(root).expanduser(), []
    for name, dataset in paper.DATASETS.items():
        try:
            with warnings.catch_warnings(record=True, action="always") as caught:
                benchmark = paper.load(root, [name], strict=False)
            found, copies = len(benchmark.images), len(benchmark.images) - len(prepared.unprepared(benchmark))
            state = str(caught[0].message) if caught else "complete"
        except ValueError as error:
            found, copies, state = 0, 0, str(error).splitlines()[0]
        expected = sum(images for images, _ in dataset.counts.values())
        rows.append((name, str(paper.find(root, name) or ""), found, expected, copies, state))
    return pd.DataFrame(rows, columns=["dataset", "folder", "images", "expected", "prepared", "state"])


def download(names: list[str] | None, root: str | Path, mirror: str | None = None) -> list[str]:
    """Fetch and unpack what may be fetched freely and is not complete; print how to get the rest, and return its names.
    Archives stay in `root/archives`, a `mirror` has them by their own names.  ValueError: wrong checksum, unsafe."""
    root, names, by_hand = Path(root).expanduser(), names or list(paper.DATASETS), []
    check_known("dataset", names, paper.DATASETS)
    for name in names:
        try:
            paper.load(root, [name])
            print(f"{name}: complete in {paper.find(root, name)}")
            continue
        except ValueError:  # missing or incomplete
            source = paper.DATASETS[name].source
        if isinstance(source, str):
            by_hand.append(name)
            print("\n" + source.format(root=root))
            continue
        for url, md5, into in source:
            file = root / "archives" / url.rsplit("/", 1)[1]
            url = f"{mirror.rstrip('/')}/{file.name}" if mirror else url
            with filelock.FileLock(f"{file}.lock"):
                try:
                    pooch.retrieve(url, f"md5:{md5}", file.name, file.parent, downloader=_resuming)
                except (ValueError, urllib.error.URLError, TimeoutError, ConnectionError) as error:
                    remedy = f"Run it again, it goes on; or put {file.name} from elsewhere into {file.parent}"
                    kind = ValueError if isinstance(error, ValueError) else OSError  # the first: a wrong checksum
                    raise kind(f"{url}: {error}. {remedy}") from None
                unpack(file, root / into)
        print(f"{name}: unpacked under {root}")
    return by_hand


def _resuming(url: str, output_file: str, _) -> None:
    """A downloader for pooch, whose own starts anew: keeps `<name>.part` and asks for the rest only."""
    part = Path(output_file).with_name(url.rsplit("/", 1)[1] + ".part")
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not done:
            raise
        part.unlink()  # nothing follows what we have: it is of another release
        return _resuming(url, output_file, _)
    done = done if response.status == 206 else 0  # else the server sends all of it
    total = done + int(response.headers.get("Content-Length", 0))
    bar = tqdm.wrapattr(response, "read", total=total or None, initial=done, desc=part.stem)
    with response, open(part, "ab" if done else "wb") as out, bar as counted:
        shutil.copyfileobj(counted, out, 1 << 18)
    if (done := part.stat().st_size) < total:
        raise ConnectionError(f"broke off after {done:,} of {total:,} bytes")
    part.replace(output_file)


def unpack(archive: Path, target: Path) -> None:
    """Unpack a tar or zip archive into `target`, or copy a .mat file; ValueError, leaving nothing: damaged, unsafe."""
    fresh = target / f".unpacking-{archive.name}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        if archive.suffix == ".mat":
            shutil.copy(archive, fresh)
        else:
            with zipfile.ZipFile(archive) if zipfile.is_zipfile(archive) else tarfile.open(archive) as packed:
                packed.extraction_filter = tarfile.data_filter
                packed.extractall(fresh, tqdm(_members(archive, packed), f"unpacking {archive.name}", unit="file"))
        shutil.copytree(fresh, target, copy_function=os.replace, dirs_exist_ok=True)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"{archive}: damaged or cut short ({error}); delete it and download it again") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _members(archive: Path, packed: zipfile.ZipFile | tarfile.TarFile) -> list:
    """What an archive holds, without the files of macOS; all of it is checked before any is written."""
    limit, total, members = min(200e9, max(1e9, 100 * archive.stat().st_size)), 0, []
    for member in packed.infolist() if isinstance(packed, zipfile.ZipFile) else packed:
        if isinstance(member, zipfile.ZipInfo):
            name, size, kind = member.filename, member.file_size, stat.S_IFMT(member.external_attr >> 16)
        else:
            name, size, kind = member.name, member.size, 0 if member.isreg() or member.isdir() else stat.S_IFLNK
        path, total = PureWindowsPath(name), total + size  # a Windows path knows drive letters and both slashes
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR) or path.anchor or ".." in path.parts or total > limit:
            why = f"is a link or a device, leaves its folder, or makes it more than {limit / 1e9:.0f} GB"
            raise ValueError(f"{archive}: member {name!r} {why}; the archive is refused")
        if not path.name.startswith("._") and "__MACOSX" not in path.parts:
            members.append(member)
    return members
