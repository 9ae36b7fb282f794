"""Image files: downloads that resume, safe unpacking, prepared copies, digests."""

import hashlib
import io
import os
import shutil
import sys
import tarfile
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fake_datasets
import numpy as np
import pytest
from PIL import Image

from pumalib import config, data, paths
from pumalib.data import download, images, paper, prepared, table

pytestmark = pytest.mark.filterwarnings("ignore:.*Table 1 expects")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")


@pytest.fixture
def server():
    """A server on 127.0.0.1 of `files`; notes every Range asked for; `cut` ends answers early."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            content, asked = (
                server.files[self.path[1:]],
                self.headers.get("Range") if server.ranges else None,
            )
            server.asked.append(asked)
            first = int(asked[6:-1]) if asked else 0
            if first >= len(content):
                self.send_error(416)
                return
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(len(content) - first))
            self.end_headers()
            self.wfile.write(content[first : server.cut])

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.cut, server.ranges = {}, [], None, True
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def change_cub(monkeypatch, **changes):
    changed = replace(paper.all_datasets()["cub"], **changes)
    monkeypatch.setitem(paper.all_datasets(), "cub", changed)


@pytest.fixture
def cub(tmp_path, server, monkeypatch):
    """A miniature CUB, with half a megabyte that does not compress, as an archive on the server."""
    source = fake_datasets.small(tmp_path / "source", "cub")
    (source / "CUB_200_2011" / "noise.bin").write_bytes(os.urandom(500_000))
    content = server.files["CUB.tgz"] = Path(
        shutil.make_archive(tmp_path / "CUB", "gztar", source)
    ).read_bytes()
    archive = paper.Archive(f"{server.url}/CUB.tgz", hashlib.md5(content).hexdigest(), ".")
    change_cub(monkeypatch, archives=(archive,))
    return tmp_path / "root"


def test_a_broken_download_goes_on_and_is_unpacked(cub, server, capsys):
    server.cut = 200_000
    with pytest.raises(OSError, match="Run it again, it goes on"):
        download.download(["cub"], cub)
    assert not (cub / "CUB_200_2011").exists()
    have = (cub / "archives" / "CUB.tgz.part").stat().st_size
    server.cut = None
    assert download.download(["cub", "cars"], cub) == ["cars"]
    assert server.asked == [None, f"bytes={have}-"] and 0 < have < 500_000
    assert "cars_test.tgz (0.9 GB, MD5 4ce7ebf6a94d07f1952d94dd34c4d501)" in capsys.readouterr().out
    assert len(data.read("paper", cub, ["cub"], strict=False).images) == 12
    assert not [f for pattern in ("._*", "*.part", ".unpacking*") for f in cub.rglob(pattern)]
    file = next((cub / "CUB_200_2011" / "images").rglob("*.jpg"))
    file.unlink()
    (cub / "CUB_200_2011" / "mine.txt").write_text("kept")
    download.download(
        ["cub"], cub
    )  # a half-unpacked dataset is completed, from the archive that is there
    assert (
        file.is_file() and (cub / "CUB_200_2011" / "mine.txt").is_file() and len(server.asked) == 2
    )


def test_stale_parts_servers_without_ranges_wrong_checksums_and_mirrors(cub, server, monkeypatch):
    part = cub / "archives" / "CUB.tgz.part"
    part.parent.mkdir(parents=True)
    for server.ranges, old in (
        (False, b"old"),
        (True, bytes(10**6)),
    ):  # the second is longer than the file
        part.write_bytes(old)
        download.download(["cub"], cub)
        assert paper.find(cub, "cub")
        shutil.rmtree(cub / "CUB_200_2011")
        (cub / "archives" / "CUB.tgz").unlink()
    content, server.files["CUB.tgz"] = server.files["CUB.tgz"], b"another release" * 1000
    with pytest.raises(
        ValueError, match=r"CUB.tgz: MD5 hash .* does not match.*Run it again.*put CUB.tgz from"
    ):
        download.download(["cub"], cub)
    assert not (cub / "CUB_200_2011").exists() and not list(
        (cub / "archives").glob("CUB*.tgz*[!k]")
    )
    server.files["CUB.tgz"] = content
    download.download(["cub"], cub, mirror=server.url + "/")
    assert paper.find(cub, "cub")
    change_cub(monkeypatch, counts=fake_datasets.COUNTS)
    asked = len(server.asked)
    download.download(["cub"], cub)
    assert len(server.asked) == asked  # complete datasets are left alone


def test_a_complete_part_is_finished_not_fetched_again(cub, server):
    """A process killed before its last step leaves one; the server then answers 416."""
    part = cub / "archives" / "CUB.tgz.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(server.files["CUB.tgz"])
    download.download(["cub"], cub)
    assert server.asked == [f"bytes={len(server.files['CUB.tgz'])}-"]
    assert paper.find(cub, "cub") and not part.exists()


def test_a_part_of_another_release_of_the_same_size_is_fetched_again(cub, server):
    part = cub / "archives" / "CUB.tgz.part"
    part.parent.mkdir(parents=True)
    size = len(server.files["CUB.tgz"])
    part.write_bytes(bytes(size))
    download.download(["cub"], cub)
    assert server.asked == [f"bytes={size}-", None] and paper.find(cub, "cub")


def test_without_pooch_the_remedy_is_named(cub, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(RuntimeError, match=r'pip install "pumalib\[download\]"'):
        download.download(["cub"], cub)


def evil_tar(name="CUB/evil", kind=tarfile.REGTYPE, size=0):
    good, bad = tarfile.TarInfo("CUB/good.txt"), tarfile.TarInfo(name)
    bad.type, bad.linkname, bad.size = kind, "/etc/passwd", size
    return good.tobuf() + bad.tobuf() + bytes(1024)


def evil_zip(name="CUB/evil", kind=0o100644):
    stream, bad = io.BytesIO(), zipfile.ZipInfo(name)
    bad.external_attr = kind << 16
    with zipfile.ZipFile(stream, "w") as out:
        out.writestr("CUB/good.txt", "good")
        out.writestr(bad, "/etc/passwd")
    return stream.getvalue()


TYPES = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE)
NAMES = (
    "../evil",
    "CUB/../../evil",
    "/evil",
    "C:evil",
    "C:\\evil",
    "..\\evil",
    "\\\\host\\share\\evil",
)
EVIL = [evil_tar(kind=kind) for kind in TYPES] + [evil_tar(size=2 * 10**9), evil_zip(kind=0o120777)]


@pytest.mark.parametrize("content", [*EVIL, *map(evil_tar, NAMES), *map(evil_zip, NAMES)])
def test_unsafe_archives_are_refused_and_leave_nothing(tmp_path, content):
    archive, target = tmp_path / "archive", tmp_path / "deep" / "target"
    archive.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"member .*evil.* or makes it more than 1 GB; the archive is refused"
    ):
        download.unpack(archive, target)
    assert list(target.iterdir()) == [] and not list(tmp_path.rglob("*evil"))


@pytest.mark.parametrize("kind", ["gztar", "zip"])
def test_half_an_archive(tmp_path, kind):
    source = fake_datasets.small(tmp_path / "source", "cub")
    (source / "noise.bin").write_bytes(os.urandom(100_000))
    archive = Path(shutil.make_archive(tmp_path / "a", kind, source))
    download.unpack(archive, tmp_path / "target")
    assert paper.find(tmp_path / "target", "cub") and not list((tmp_path / "target").rglob("._*"))
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"(?s)a\.(tar\.gz|zip).*delete it and download it again"):
        download.unpack(archive, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def test_status_and_verify(tmp_path):
    root = fake_datasets.small(tmp_path / "root", "cub", "sop", "dogs")
    benchmark = data.read("paper", root, ["cub", "dogs"], strict=False)
    assert not images.unreadable(benchmark)
    bad = benchmark.images.path.iloc[[3, 15]]
    (root / bad.iloc[0]).write_bytes((root / bad.iloc[0]).read_bytes()[:-20])
    (root / bad.iloc[1]).write_bytes(b"")
    errors = images.unreadable(benchmark)
    assert list(errors) == [3, 15] and all(
        "cannot be read" in str(error) for error in errors.values()
    )
    (root / "Stanford_Online_Products" / "Ebay_test.txt").unlink()
    table = download.status(root).set_index("dataset")
    assert list(table.index) == list(paper.all_datasets()) and "Ebay_test.txt" in table.state["sop"]
    assert (
        table.images["cub"] == 12
        and table.expected["cub"] == 11_788
        and "Table 1 expects" in table.state["cub"]
    )
    assert table.state["aircraft"].startswith("not found") and table.images["aircraft"] == 0


@pytest.fixture
def root(tmp_path):
    """Two datasets of 12 photographs in 4 classes, some larger than 384 pixels."""
    for i in range(24):
        folder = tmp_path / "root" / ("birds" if i < 12 else "cars") / f"class {i % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(
            np.random.default_rng(i).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        )
        image, exif = (
            small.resize((350 + 20 * i, 600 - 10 * i)).convert("L" if i == 5 else "RGB"),
            Image.Exif(),
        )
        exif[0x0112] = 6 if i == 1 else 1
        image.save(folder / f"{i}.{'png' if i % 4 == 0 else 'jpg'}", quality=95, exif=exif)
    return tmp_path / "root"


def test_prepared_copies_look_the_same(root, tmp_path):
    settings = config.Data(benchmark="folders", root=str(root), prepared=True)
    with pytest.raises(
        ValueError,
        match=r"24 of 24 images .* prepare --benchmark folders --root .*root birds cars`",
    ):
        data.load(settings)
    renamed = shutil.copytree(root, tmp_path / "my photos; rm x")
    with pytest.raises(ValueError, match=r"--root '.*/my photos; rm x' birds cars`"):
        prepared.use_prepared(data.read("folders", renamed))
    original = data.read("folders", root)
    folder, copies = prepared.prepare(original), data.load(settings)
    assert copies.root == folder and copies.digest != original.digest
    assert copies.images.drop(columns="path").equals(original.images.drop(columns="path"))
    for upright in (False, True):
        for one, two in zip(original.images.path, copies.images.path):
            one, two = images.decode(root / one, upright), images.decode(folder / two, upright)
            assert min(two.size) == min(384, min(one.size)) and two.mode == "RGB"
            assert np.abs(np.asarray(one.resize(two.size), float) - two).mean() < 2
    before, image = copies.select(["birds"]).digest, root / original.images.path[7]
    image.write_bytes((root / original.images.path[8]).read_bytes())
    os.utime(image, ns=(0, 10**18))
    with pytest.raises(ValueError, match=rf"1 of 24 images .* instance .*{image.name}; run"):
        prepared.use_prepared(original)
    (root / original.images.path[20]).write_bytes(b"no image")
    os.utime(root / original.images.path[20], ns=(0, 10**18))  # times are told apart by 2 s or more
    with pytest.raises(
        ValueError, match=r"1 images cannot be prepared, all others are; .*cannot be read"
    ):
        prepared.prepare(original)
    assert prepared.use_prepared(original.select(["birds"])).digest != before
    with pytest.raises(ValueError, match="'mini' is embedded; only image files are prepared"):
        data.load(config.Data(prepared=True))


@pytest.mark.parametrize("name", ["turned.tif", "turned.png"])
def test_a_turned_picture_is_turned_once_in_its_copy(name, tmp_path):
    """Pillow turns a TIFF when it loads it."""
    picture = np.zeros((400, 600, 3), np.uint8)
    picture[:100, :100] = 255
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(picture).save(tmp_path / name, exif=exif)
    prepared._copy(tmp_path / name, tmp_path / "copy.jpg")
    expected = images.decode(tmp_path / name, upright=True)
    found = images.decode(tmp_path / "copy.jpg", upright=True)
    assert np.abs(np.asarray(expected.resize(found.size), float) - found).mean() < 2


def test_what_was_changed_just_now_is_read_again(root, monkeypatch):
    """Within a tick of the file system another change has the same time."""
    image = root / "cars" / "class 1" / "13.jpg"
    os.utime(image)
    known = paths.state(image.stat())
    monkeypatch.setattr(paths, "state", lambda _: known)
    before = data.read("folders", root).digest
    image.write_bytes(image.read_bytes()[:-1] + b"x")
    assert data.read("folders", root).digest != before


def test_a_copy_is_made_again_of_another_image_of_the_same_time(root):
    original = data.read("folders", root)
    folder = prepared.prepare(original)
    assert prepared.unprepared(original) == []
    first, second = original.images.path[:2]
    time = (root / first).stat().st_mtime_ns
    shutil.copy(root / second, root / first)
    os.utime(root / first, ns=(time, time))
    assert prepared.unprepared(original) == [first]
    prepared.prepare(original)
    assert prepared.unprepared(original) == []
    # A power loss can leave an empty copy.
    copy = folder / prepared._jpeg(second)
    known = copy.stat()
    copy.write_bytes(b"")
    os.utime(copy, ns=(known.st_atime_ns, known.st_mtime_ns))
    assert prepared.unprepared(original) == [second]


class Endless:
    """A server's answer that never ends, in pieces of `size` bytes."""

    def __init__(self, size):
        self.size = size

    def read1(self, most):
        return bytes(min(self.size, most))


def test_an_answer_without_end_or_drop_by_drop_is_given_up(monkeypatch):
    monkeypatch.setattr(download, "MOST_BYTES", 10**6)
    with pytest.raises(ConnectionError, match="sends more than"):
        list(download._bounded(Endless(10**5), 0))
    monkeypatch.setattr(download, "SECONDS", 0.05)
    monkeypatch.setattr(download, "SLOWEST", 10**12)
    with pytest.raises(ConnectionError, match="bytes a second"):
        list(download._bounded(Endless(1), 0))


def test_digest_is_of_contents_wherever_they_lie(root, tmp_path, monkeypatch):
    before = data.read("folders", root).digest
    shutil.copytree(root, tmp_path / "elsewhere")
    assert data.read("folders", tmp_path / "elsewhere").digest == before
    image = root / "cars" / "class 1" / "13.jpg"
    for file in data.read("folders", root).images.path:
        os.utime(root / file, (1e9, 1e9))  # none was changed just now
    assert data.read("folders", root).digest == before
    read, in_threads = [], table.in_threads

    def noting(function, files, what):
        read.extend(files)
        return in_threads(function, files, what)

    monkeypatch.setattr(table, "in_threads", noting)
    assert data.read("folders", root).digest == before and read == []  # kept
    # As many bytes, and the same time of change, as after `cp -p`.
    image.write_bytes(image.read_bytes()[:-1] + b"x")
    os.utime(image, (1e9, 1e9))
    changed = data.read("folders", root)
    assert changed.digest != before and read == ["cars/class 1/13.jpg"]
    assert (
        changed.select(["birds"]).digest
        == data.read("folders", tmp_path / "elsewhere", ["birds"]).digest
    )
    for damage in (
        lambda old: old[:100],
        lambda old: b"[1]",
        lambda old: b"\xff",
    ):  # a damaged cache is made again
        for file in (tmp_path / "cache" / "contents").rglob("*.json"):
            file.write_bytes(damage(file.read_bytes()))
        assert data.read("folders", root).digest == changed.digest
    mini = data.Benchmark(
        "x", changed.images.assign(path=range(24)), pixels=np.zeros((24, 2, 2, 3), np.uint8)
    )
    assert mini.digest != replace(mini, pixels=mini.pixels + np.uint8(1)).digest
