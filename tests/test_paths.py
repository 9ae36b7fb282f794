"""Folders in a checkout and without one, files written whole, and bars of few lines in a file."""

import errno
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import kept_runs
import pytest
from ipykernel import iostream

from puma_study import store
from pumalib import paths, progress
from pumalib.training import run_folder

PACKAGE = Path(paths.__file__).parent


def program(code, cwd=None, **variables):
    """Run a program that imports this very package, with some environment variables."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), **variables},
        capture_output=True,
        text=True,
        check=True,
    )


FOLDERS = "from pumalib import paths; print(paths.ROOT, paths.RESULTS, paths.CACHE, sep='\\n')"


def test_an_empty_variable_is_not_the_current_folder(tmp_path):
    empty = {"PUMALIB_ROOT": "", "PUMALIB_RESULTS": "", "PUMALIB_CACHE": ""}
    root, results, cache = program(FOLDERS, cwd=tmp_path, **empty).stdout.splitlines()
    assert root == str(PACKAGE.parent)
    assert results == f"{root}/results" and cache == f"{root}/data/cache"


def a_checkout(folder):
    for name in ("pumalib", "notebooks", "data/mini"):
        (folder / name).mkdir(parents=True)
    return folder


def test_another_checkout_than_that_of_the_code_is_told(tmp_path):
    other = a_checkout(tmp_path / "other")
    for cwd, root in ((tmp_path, str(other)), (other / "notebooks", "")):
        said = program(FOLDERS, cwd=cwd, PUMALIB_ROOT=root).stderr
        assert f"pumalib is imported from {PACKAGE.parent}, and data" in said
        assert f"for {other}: PYTHONPATH={other} PUMALIB_ROOT={other}, before" in said
    for cwd, root in ((tmp_path, ""), (PACKAGE.parent / "notebooks", str(PACKAGE.parent))):
        assert program(FOLDERS, cwd=cwd, PUMALIB_ROOT=root).stderr == ""


@pytest.fixture
def elsewhere(tmp_path):
    """A copy of the module without a checkout around it, as in site-packages, and a folder."""
    package = tmp_path / "site-packages" / "pumalib"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "paths.py").write_bytes((PACKAGE / "paths.py").read_bytes())
    project = tmp_path / "project"
    project.mkdir()
    variables = {
        "PYTHONPATH": str(package.parent),
        "PUMALIB_ROOT": "",
        "PUMALIB_RESULTS": "",
        "PUMALIB_CACHE": "",
        "HOME": str(tmp_path / "home"),
        "XDG_CACHE_HOME": "",
    }
    return project, variables


@pytest.mark.skipif(sys.platform != "linux", reason="the folders of other platforms are others")
def test_without_a_checkout_the_project_is_the_current_folder(elsewhere):
    project, variables = elsewhere
    root, results, cache = program(FOLDERS, cwd=project, **variables).stdout.splitlines()
    assert root == str(project) and results == f"{project}/results"
    assert cache == f"{variables['HOME']}/.cache/pumalib"
    variables["XDG_CACHE_HOME"] = f"{project}/caches"
    cache = program(FOLDERS, cwd=project, **variables).stdout.splitlines()[2]
    assert cache == f"{project}/caches/pumalib"
    assert not list(project.iterdir()), "asking for a folder makes none"


ASKED = """
import sys
from pumalib import paths
for name in ("NOTEBOOKS", "PROFILES", "PAPER", "MINI"):
    try:
        print(getattr(paths, name))
    except FileNotFoundError as error:
        print(error)
assert not hasattr(paths, "NOTHING")
"""


def test_what_only_a_checkout_has_says_so_where_there_is_none(elsewhere):
    project, variables = elsewhere
    said = program(ASKED, cwd=project, **variables).stdout.splitlines()
    assert len(said) == 4
    for line in said:
        assert "need the checkout of pumalib; name it by PUMALIB_ROOT=<checkout>" in line
    variables["PUMALIB_ROOT"] = str(paths.ROOT)
    said = program(ASKED, cwd=project, **variables).stdout.splitlines()
    assert said == [str(paths.NOTEBOOKS), str(paths.PROFILES), str(paths.PAPER), str(paths.MINI)]


def test_what_is_read_is_looked_for_in_the_project_then_where_the_shell_stands(
    tmp_path, monkeypatch
):
    for place in ("project", "shell"):
        (tmp_path / place / "in both").mkdir(parents=True)
    (tmp_path / "shell" / "in shell").mkdir()
    (tmp_path / "project" / "in project").mkdir()
    monkeypatch.setattr(paths, "ROOT", tmp_path / "project")
    monkeypatch.chdir(tmp_path / "shell")
    assert paths.find("in both") == tmp_path / "project" / "in both"
    assert paths.find("in project") == tmp_path / "project" / "in project"
    assert paths.find("in shell") == tmp_path / "shell" / "in shell"
    assert paths.find("nowhere") == tmp_path / "project" / "nowhere"
    assert paths.find(tmp_path / "shell") == tmp_path / "shell"


def test_a_folder_is_listed_once_however_many_files_are_written(tmp_path, monkeypatch):
    listed = []
    glob = Path.glob

    def counted(folder, pattern):
        listed.append(folder)
        return glob(folder, pattern)

    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    monkeypatch.setattr(Path, "glob", counted)
    monkeypatch.setattr(os, "scandir", None)  # nor in another way
    monkeypatch.setattr(os, "listdir", None)
    paths._swept.add(tmp_path / "swept")
    for number in range(3):
        with paths.written_whole(tmp_path / "swept" / f"{number}.txt") as temporary:
            temporary.write_text("x")
    monkeypatch.undo()
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    monkeypatch.setattr(Path, "glob", counted)
    for number in range(3):
        with paths.written_whole(tmp_path / "other" / f"{number}.txt") as temporary:
            temporary.write_text("x")
    assert listed == [tmp_path / "other"]


DAY = 24 * 60 * 60


def made(file, age=0):
    """A file that was last written to some seconds ago."""
    file.write_text("left")
    then = time.time() - age
    os.utime(file, (then, then))
    return file


def test_the_first_write_sweeps_own_abandoned_files_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(paths, "CACHE", tmp_path / "cache")
    ours = f".one.txt.pumalib-{'0a' * 8}.tmp"
    for folder in ("results", "cache", "elsewhere"):
        (tmp_path / folder).mkdir()
        made(tmp_path / folder / ours, 1.1 * DAY)
    results = tmp_path / "results"
    a_folder = results / f".x.pumalib-{'1b' * 8}.tmp"
    a_folder.mkdir()
    os.utime(a_folder, (0, 0))
    kept = [
        tmp_path / "elsewhere" / ours,
        a_folder,
        made(results / f".live.txt.pumalib-{'0a' * 8}.tmp", 0.9 * DAY),
        # Those of other programs.
        made(results / ".letter.odt.4194000.tmp", 2 * DAY),
        made(results / ".four.tmp", 2 * DAY),
        made(results / f".five.pumalib-{'0a' * 7}.tmp", 2 * DAY),
        made(results / f"six.pumalib-{'0a' * 8}.tmp", 2 * DAY),
    ]
    for folder in ("results", "cache", "elsewhere"):
        with paths.written_whole(tmp_path / folder / "seven.txt") as temporary:
            temporary.write_text("whole")
        kept.append(tmp_path / folder / "seven.txt")
    left = [file for file in tmp_path.rglob("*") if file.parent != tmp_path]
    assert sorted(left) == sorted(kept)


def test_two_that_write_one_file_at_once_have_a_name_each(tmp_path):
    """Processes of two containers can have the same number."""
    with (
        paths.written_whole(tmp_path / "file") as one,
        paths.written_whole(tmp_path / "file") as two,
    ):
        assert one != two
        one.write_text("one")
        two.write_text("two")
    assert (tmp_path / "file").read_text() == "one"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


# ---- a power loss


class Disk:
    """What would be left after a power loss: contents and names that were let reach the disk."""

    def __init__(self, monkeypatch):
        self.contents = {}  # by inode
        self.names = {}  # by folder its inodes by name
        self.renamed = []  # names of files without contents
        replace = Path.replace

        def fsync(opened):
            place = Path(f"/proc/self/fd/{opened}").readlink()
            if place.is_dir():
                self.names[place] = {file.name: file.stat().st_ino for file in place.iterdir()}
            else:
                self.contents[place.stat().st_ino] = place.read_bytes()

        def noted(file, target):
            # A name can reach the disk before what it names.
            if self.contents.get(file.stat().st_ino) != file.read_bytes():
                self.renamed.append(Path(target).name)
            return replace(file, target)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(Path, "replace", noted)

    def left(self, folder):
        """The files below a folder, with what they hold."""
        found = {}
        for name, inode in self.names.get(folder, {}).items():
            if (folder / name).is_dir():
                found |= self.left(folder / name)
            else:
                found[name] = self.contents.get(inode, b"")
        return found


@pytest.fixture
def disk(monkeypatch):
    if sys.platform != "linux":
        pytest.skip("which file is meant is read from /proc")
    return Disk(monkeypatch)


def test_what_was_written_is_there_after_a_power_loss(disk, tmp_path):
    file = tmp_path / "one" / "two" / "file.txt"
    for text in ("first", "second"):
        with paths.written_whole(file) as temporary:
            temporary.write_text(text)
        assert disk.left(tmp_path) == {"file.txt": text.encode()}
    with paths.written_whole(file.with_name("copy.jpg"), durable=False) as temporary:
        temporary.write_text("made again")
    assert disk.renamed == ["copy.jpg"]


def test_kept_lines_and_a_finished_folder_are_there_after_a_power_loss(disk, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "RESULTS", tmp_path)
    run = kept_runs.RUNS["linear"]
    name = run_folder.run_name(run)
    folder = store.folder(name, "test")
    run_folder.make(folder)
    record = {"run": asdict(run), **kept_runs.results_of(run, 0, 0.5)}
    run_folder.write_record(folder, record)
    kept_runs.keep(run, kept_runs.PROFILE, 0.5)
    kept_runs.keep(kept_runs.RUNS["puma"], kept_runs.PROFILE, 0.5)
    left = disk.left(tmp_path)
    assert json.loads(left["metrics.json"])["run"]["method"]["name"] == "linear"
    assert len(left["kept-1.jsonl"].splitlines()) == 2
    assert disk.renamed == []


def test_a_file_that_cannot_be_written_says_what_to_do(tmp_path):
    def write(name, error=None):
        with paths.written_whole(tmp_path / name) as temporary:
            temporary.touch()
            if error is not None:
                raise error

    with pytest.raises(OSError, match=r"cannot write .*; shorten its name"):
        write(256 * "x")
    # As long as a name may be.
    write(255 * "x")
    (tmp_path / (255 * "x")).unlink()
    with pytest.raises(
        OSError, match=r"No space left.* free some space on the disk of .*, or write"
    ):
        write("file", OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match=r"Read-only.*; allow writing to .*, or write elsewhere"):
        write("file", OSError(errno.EROFS, "Read-only file system"))
    assert not list(tmp_path.iterdir())


BARS = """
import time
from pumalib import progress
for _ in progress.bar(range(40), desc="counted"):
    time.sleep(0.02)
with progress.bar(total=40, desc="by hand") as bar:
    for _ in range(40):
        time.sleep(0.02)
        bar.update()
"""


def test_a_bar_in_a_file_is_drawn_twice():
    said = program(BARS, TQDM_MININTERVAL="0.01").stderr
    assert "counted: 100%" in said and "by hand: 100%" in said
    assert said.count("counted") == said.count("by hand") == 2, "at the start and at the end"


def test_a_bar_on_a_terminal_or_in_a_notebook_is_as_tqdm_has_it(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert progress.bar([]).mininterval == 30
    assert progress.bar([], mininterval=2).mininterval == 2
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    notebook = iostream.OutStream.__new__(iostream.OutStream)
    for stream in (terminal, notebook):
        monkeypatch.setattr(sys, "stderr", stream)
        assert progress.pace() == {}


def test_a_printed_name_has_nothing_that_a_terminal_would_obey():
    assert paths.printable("Übung 1.jpg") == "Übung 1.jpg"
    assert paths.printable("a\x1b[2J\n\u202e") == r"a\x1b[2J\n\u202e"
    assert paths.printable("caf\udce9.jpg") == r"caf\xe9.jpg"
