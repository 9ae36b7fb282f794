"""Folders in a checkout and without one, files written whole, and bars of few lines in a file."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ipykernel import iostream

from pumalib import paths, progress

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

    monkeypatch.setattr(Path, "glob", counted)
    monkeypatch.setattr(os, "scandir", None)  # nor in another way
    monkeypatch.setattr(os, "listdir", None)
    paths._swept.add(tmp_path / "swept")
    for number in range(3):
        with paths.written_whole(tmp_path / "swept" / f"{number}.txt") as temporary:
            temporary.write_text("x")
    monkeypatch.undo()
    monkeypatch.setattr(Path, "glob", counted)
    for number in range(3):
        with paths.written_whole(tmp_path / "other" / f"{number}.txt") as temporary:
            temporary.write_text("x")
    assert listed == [tmp_path / "other"]


def test_the_first_write_sweeps_what_the_dead_left_and_no_other_file(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f".one.txt.{dead.pid}.tmp"
    kept = [
        tmp_path / f".two.txt.{os.getpid()}.tmp",
        tmp_path / ".three.txt.1.tmp",  # another user's, and alive
        tmp_path / ".four.tmp",
        tmp_path / "five.txt.99999.tmp",
    ]
    huge = tmp_path / f".six.{10**30}.tmp"
    for file in (left, huge, *kept):
        file.touch()
    with paths.written_whole(tmp_path / "seven.txt") as temporary:
        temporary.write_text("whole")
    assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / "seven.txt"])


def test_another_users_process_is_alive(monkeypatch):
    def refused(process, number):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "kill", refused)
    assert paths._is_running(1)


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


def test_a_link_of_the_name_of_a_temporary_file_is_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / f".run.json.{os.getpid()}.tmp").symlink_to(precious)
    with paths.written_whole(folder / "run.json") as temporary:
        temporary.write_text("new")
    assert precious.read_text() == "kept"
    assert (folder / "run.json").read_text() == "new"
    assert not (folder / "run.json").is_symlink()


def test_a_folder_called_like_what_the_dead_left_stays(tmp_path):
    (tmp_path / ".x.999999999.tmp").mkdir()
    paths.sweep(tmp_path)
    assert (tmp_path / ".x.999999999.tmp").is_dir()


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
