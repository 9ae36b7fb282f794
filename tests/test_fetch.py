"""Downloads that resume, against a server on 127.0.0.1; safe unpacking; status and verify."""

import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
import warnings
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fake_datasets
import pytest

from pumalib import data
from pumalib.data import fetch, paper

pytestmark = pytest.mark.filterwarnings("ignore:.*Table 1 expects")


@pytest.fixture
def server(tmp_path):
    """Serves `files`; notes every Range asked for; `slow` seconds after each 64 KiB; `cut` ends answers early."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            content = server.files[self.path[1:]]
            asked = self.headers.get("Range") if server.ranges else None
            server.asked.append(asked)
            first = int(asked[6:-1]) if asked else 0
            if first >= len(content):
                self.send_error(416)
                return
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(len(content) - first))
            self.end_headers()
            for at in range(first, server.cut or len(content), 1 << 16):
                self.wfile.write(content[at : at + (1 << 16)])
                self.wfile.flush()
                time.sleep(server.slow)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.asked, server.slow, server.cut, server.ranges = {}, [], 0, None, True
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def tar_of(folder: Path) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as out:
        for file in sorted(folder.iterdir()):
            out.add(file, file.name)
    return stream.getvalue()


def offer(server, name, content, into=".") -> dict:
    """Put `content` on the server; the archives for `fetch.download`."""
    server.files[name] = content
    return {"cub": [fetch.Archive(f"{server.url}/{name}", f"md5:{hashlib.md5(content).hexdigest()}", into)]}


@pytest.fixture
def cub(tmp_path, server):
    """A miniature CUB, with half a megabyte that does not compress, as an archive on the server."""
    source = tmp_path / "source"
    fake_datasets.small(source, "cub")
    (source / "CUB_200_2011" / "noise.bin").write_bytes(os.urandom(500_000))
    return offer(server, "CUB_200_2011.tgz", tar_of(source))


def test_download_unpacks_and_keeps_the_archive(tmp_path, server, cub):
    root = tmp_path / "root"
    assert fetch.download(root, ["cub", "cars"], archives=cub) == ["cars"]
    assert len(data.load("paper", root, ["cub"], strict=False).images) == 12
    assert not list(root.rglob("._*")) and not list(root.rglob("*.part")) and not list(root.glob(".unpacking*"))
    fetch.download(root, ["cub"], archives=cub)
    assert len(server.asked) == 1  # the archive is there


def test_a_broken_download_goes_on(tmp_path, server, cub):
    root = tmp_path / "root"
    server.cut = 200_000
    with pytest.raises(OSError, match="Run it again, it goes on"):
        fetch.download(root, ["cub"], archives=cub)
    assert not (root / "CUB_200_2011").exists()
    have = (root / "archives" / "CUB_200_2011.tgz.part").stat().st_size
    assert 0 < have < 500_000
    server.cut = None
    fetch.download(root, ["cub"], archives=cub)
    assert server.asked == [None, f"bytes={have}-"]
    assert paper.find(root, "cub")


def test_a_killed_download_goes_on(tmp_path, server, cub):
    root, (archive,) = tmp_path / "root", cub["cub"]
    server.slow = 0.1
    call = f"fetch.download({str(root)!r}, ['cub'], archives={{'cub': [fetch.{archive}]}})"
    code = f"from pumalib.data import fetch; {call}"
    killed = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    part = root / "archives" / "CUB_200_2011.tgz.part"
    while not (part.exists() and part.stat().st_size) and killed.poll() is None:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    have = part.stat().st_size
    assert 0 < have < 500_000
    server.slow = 0
    fetch.download(root, ["cub"], archives=cub)
    assert server.asked[-1] == f"bytes={have}-" and len(server.asked) == 2
    assert len(data.load("paper", root, ["cub"], strict=False).images) == 12


def test_servers_without_ranges_and_stale_parts(tmp_path, server, cub):
    root = tmp_path / "root"
    (root / "archives").mkdir(parents=True)
    part = root / "archives" / "CUB_200_2011.tgz.part"
    part.write_bytes(b"old")
    server.ranges = False
    fetch.download(root, ["cub"], archives=cub)
    (root / "archives" / "CUB_200_2011.tgz").unlink()
    server.ranges = True
    part.write_bytes(bytes(10**6))  # longer than the file
    fetch.download(root, ["cub"], archives=cub)
    assert paper.find(root, "cub")


def test_wrong_checksum(tmp_path, server, cub):
    root = tmp_path / "root"
    server.files["CUB_200_2011.tgz"] = b"another release" * 1000
    with pytest.raises(ValueError, match="CUB_200_2011.tgz: wrong checksum.*Run it again.*put it into"):
        fetch.download(root, ["cub"], archives=cub)
    assert not (root / "CUB_200_2011").exists() and not list((root / "archives").glob("CUB*.tgz*[!k]"))
    with pytest.raises(OSError, match="Run it again"):
        fetch.download(root, ["cub"], mirror="http://127.0.0.1:9", archives=cub)


def test_a_mirror_holds_the_archives_by_name(tmp_path, server, cub):
    elsewhere = {"cub": [fetch.Archive("http://127.0.0.1:9/CUB_200_2011.tgz", cub["cub"][0].checksum)]}
    fetch.download(tmp_path / "root", ["cub"], mirror=server.url + "/", archives=elsewhere)
    assert paper.find(tmp_path / "root", "cub")


def evil_tar(kind) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as out:
        good = tarfile.TarInfo("CUB/good.txt")
        good.size = 4
        out.addfile(good, io.BytesIO(b"good"))
        bad = tarfile.TarInfo({"up": "../evil", "absolute": "/evil"}.get(kind, "CUB/evil"))
        bad.type = {"symlink": tarfile.SYMTYPE, "hardlink": tarfile.LNKTYPE, "device": tarfile.CHRTYPE}.get(
            kind, tarfile.REGTYPE
        )
        bad.linkname = "/etc/passwd"
        out.addfile(bad)
    return stream.getvalue()


def evil_zip(kind) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as out:
        out.writestr("CUB/good.txt", "good")
        info = zipfile.ZipInfo({"up": "CUB/../../evil", "absolute": "/evil"}.get(kind, "CUB/evil"))
        info.external_attr = (0o120777 if kind == "symlink" else 0o100644) << 16
        out.writestr(info, "/etc/passwd")
    return stream.getvalue()


@pytest.mark.parametrize("make, kind", [(evil_tar, k) for k in ("up", "absolute", "symlink", "hardlink", "device")]
                         + [(evil_zip, k) for k in ("up", "absolute", "symlink")])  # fmt: skip
def test_unsafe_archives_are_refused_and_leave_nothing(tmp_path, make, kind):
    archive, target = tmp_path / "archive", tmp_path / "deep" / "target"
    archive.write_bytes(make(kind))
    with pytest.raises(ValueError, match="member .*evil.* the archive is refused"):
        fetch.unpack(archive, target)
    assert list(target.iterdir()) == [] and not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize("name", ["a.tgz", "a.zip"])
def test_half_an_archive(tmp_path, name):
    archive, target = tmp_path / name, tmp_path / "target"
    fake_datasets.small(tmp_path / "source", "cub")
    (tmp_path / "source" / "noise.bin").write_bytes(os.urandom(100_000))
    if name == "a.zip":
        with zipfile.ZipFile(archive, "w") as out:
            for file in (tmp_path / "source").rglob("*"):
                out.write(file, file.relative_to(tmp_path / "source"))
    else:
        archive.write_bytes(tar_of(tmp_path / "source"))
    fetch.unpack(archive, target)
    assert paper.find(target, "cub") and (target / "noise.bin").stat().st_size == 100_000
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a\.(tgz|zip).*delete it and download it again"):
        fetch.unpack(archive, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def test_a_half_unpacked_dataset_is_completed(tmp_path, server, cub):
    root = tmp_path / "root"
    fetch.download(root, ["cub"], archives=cub)
    file = next((root / "CUB_200_2011" / "images").rglob("*.jpg"))
    file.unlink()
    (root / "CUB_200_2011" / "mine.txt").write_text("kept")
    fetch.download(root, ["cub"], archives=cub)
    assert file.is_file() and (root / "CUB_200_2011" / "mine.txt").is_file()


def test_complete_datasets_are_left_alone(tmp_path, server, cub, monkeypatch, capsys):
    root = fake_datasets.small(tmp_path / "root", "cub")
    monkeypatch.setitem(paper.DATASETS["cub"].counts, "train", fake_datasets.SMALL["cub"]["train"])
    monkeypatch.setitem(paper.DATASETS["cub"].counts, "test", fake_datasets.SMALL["cub"]["test"])
    fetch.download(root, ["cub"], archives=cub)
    assert server.asked == [] and "cub: complete in" in capsys.readouterr().out


def test_status_and_instructions(tmp_path):
    root = fake_datasets.small(tmp_path, "cub", "sop")
    (root / "Stanford_Online_Products" / "Ebay_test.txt").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = fetch.status(root)
    assert list(table.index) == list(paper.DATASETS)
    assert table.images["cub"] == 12 and table.expected["cub"] == 11_788 and "Table 1 expects" in table.state["cub"]
    assert "Ebay_test.txt is missing" in table.state["sop"]
    assert table.state["dogs"].startswith("missing") and "by hand" in table.state["cars"]
    assert set(fetch.ARCHIVES) | set(fetch.MANUAL) == set(paper.DATASETS)
    assert "16,185" in fetch.instructions(root, "cars") and "data download dogs" in fetch.instructions(root, "dogs")
    assert fetch.status(tmp_path / "nowhere").images.sum() == 0


def test_verify_names_bad_images(tmp_path):
    root = fake_datasets.small(tmp_path, "cub", "dogs")
    benchmark = data.load("paper", root, ["cub", "dogs"], strict=False)
    assert len(fetch.verify(benchmark)) == 0
    bad = benchmark.images.path.iloc[[3, 15]]
    whole = (root / bad.iloc[0]).read_bytes()
    (root / bad.iloc[0]).write_bytes(whole[:-20])
    (root / bad.iloc[1]).write_bytes(b"")
    table = fetch.verify(benchmark)
    assert table.path.tolist() == bad.tolist() and table.dataset.tolist() == ["cub", "dogs"]
    assert table.error.str.contains("cannot be read").all()
