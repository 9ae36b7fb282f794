"""Every folder of the project, whatever the current one.

`PUMALIB_ROOT` moves all of them, `PUMALIB_RESULTS` and `PUMALIB_CACHE` what is written.  Where
pumalib is installed without a checkout around it, the project is the current folder, and those that
only the checkout has (`NOTEBOOKS`, `PROFILES`, `PAPER`, `MINI`) raise FileNotFoundError.
"""

import errno
import hashlib
import os
import re
import secrets
import stat
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def _from_environment(variable: str, default: Path) -> Path:
    """The folder that an environment variable names; one that is not set, or empty, names none."""
    named = os.environ.get(variable)
    folder = Path(named) if named else default
    return folder.expanduser().resolve()


def _is_checkout(folder: Path) -> bool:
    return (folder / "notebooks").is_dir() and (folder / "data" / "mini").is_dir()


def _default_root() -> Path:
    around = Path(__file__).resolve().parent.parent
    if _is_checkout(around):
        return around
    return Path.cwd()


def _cache_of_user() -> Path:
    """Where this platform keeps what programs can make again."""
    if sys.platform == "darwin":
        parent = "~/Library/Caches"
    elif sys.platform == "win32":
        parent = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        parent = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(parent) / "pumalib"


def _default_cache() -> Path:
    if IN_CHECKOUT:
        return ROOT / "data" / "cache"
    return _cache_of_user()


def _warn_of_another_checkout(root: Path) -> None:
    """Warn where this code is one checkout's, and another one is named or stood in.

    Where two share an environment, a kernel imports the one that is installed there.
    """
    around = Path(__file__).resolve().parent.parent
    if not _is_checkout(around):
        return
    here = Path.cwd()
    for other in (root, here, here.parent):
        if other != around and _is_checkout(other) and (other / "pumalib").is_dir():
            what = f"pumalib is imported from {around}, and data and results are those of {root}"
            remedy = f"for {other}: PYTHONPATH={other} PUMALIB_ROOT={other}, before Python starts"
            warnings.warn(f"{what}; {remedy}", stacklevel=2)
            return


ROOT = _from_environment("PUMALIB_ROOT", _default_root())
_warn_of_another_checkout(ROOT)
IN_CHECKOUT = _is_checkout(ROOT)
RESULTS = _from_environment("PUMALIB_RESULTS", ROOT / "results")
CACHE = _from_environment("PUMALIB_CACHE", _default_cache())

# Bytes of a name, beyond which nothing is added to it: file systems take 255.
_LONG = 200
# What more space does not help against.
_NOT_OURS_TO_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS)

# What `written_whole` writes to before it renames: sixteen hexadecimal digits at random, since
# another container has a process of the same number.  Nobody else calls a file so.
_TEMPORARY = re.compile(r"\..+\.pumalib-[0-9a-f]{16}\.tmp")
# Seconds after which one that nobody has written to since belongs to a dead process.
_ABANDONED = 24 * 60 * 60

# Folders that `written_whole` has swept: to list one of thousands of files at every write would be
# slow.
_swept: set[Path] = set()

_OF_CHECKOUT = {
    "NOTEBOOKS": ROOT / "notebooks",
    "PROFILES": ROOT / "notebooks" / "profiles",
    "PAPER": ROOT / "data" / "paper",  # the numbers the paper prints
    "MINI": ROOT / "data" / "mini",  # the embedded benchmark and its backbones
}


def __getattr__(name: str) -> Path:
    """A folder that only the checkout has; FileNotFoundError where pumalib runs without one."""
    if name not in _OF_CHECKOUT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    folder = _OF_CHECKOUT[name]
    if not IN_CHECKOUT:
        raise FileNotFoundError(
            f"no {folder.relative_to(ROOT).as_posix()} in {ROOT}: the study and its embedded data "
            "need the checkout of pumalib; name it by PUMALIB_ROOT=<checkout>"
        )
    return folder


def resolve(path: str | Path) -> Path:
    """`path` if absolute, else relative to the project's root, whatever the current folder."""
    return ROOT / Path(path).expanduser()


def find(path: str | Path) -> Path:
    """What is to be read: `resolve`, or the current folder's where the project has no such."""
    of_project = resolve(path)
    here = Path.cwd() / Path(path).expanduser()
    if not of_project.exists() and here.exists():
        return here
    return of_project


def shown(path: Path) -> str:
    """`path` relative to the project, as it reads on any machine; one elsewhere as it is."""
    if path.is_relative_to(ROOT):
        return path.relative_to(ROOT).as_posix()
    return str(path)


def printable(text: object) -> str:
    """What is shown of a name: what is not UTF-8, or what a terminal would obey, as escapes."""
    name = os.fsencode(str(text)).decode(errors="backslashreplace")
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in name)


def state(known: os.stat_result) -> tuple[int, int, int, int]:
    """What changes with the contents of a file, by what the file system knows of it.

    Size and time of change alone can be those of other contents, as after `cp -p`.
    """
    return known.st_size, known.st_mtime_ns, known.st_ctime_ns, known.st_ino


@contextmanager
def written_whole(path: Path, durable: bool = True) -> Iterator[Path]:
    """Give a temporary path to write to, renamed to `path` only if nothing was raised.

    After it the file is whole on the disk, whatever happens to the power.  What is made again where
    it is empty need not be `durable`: thousands of small files are faster so.

    Raises OSError, which names the remedy, where it cannot be written.
    """
    name = path.name
    if len(os.fsencode(name)) > _LONG:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    temporary = path.with_name(f".{name}.pumalib-{secrets.token_hex(8)}.tmp")
    try:
        make_folder(path.parent)
        if path.parent not in _swept:
            sweep(path.parent)
        yield temporary
        if durable:
            # Before the name: else a power loss may leave the name, and a file without contents.
            _sync_file(temporary)
        temporary.replace(path)
        if durable:
            sync_folder(path.parent)
    except OSError as error:
        what = f"cannot write {path}: {error.strerror or error}; {remedy(path, error)}"
        raise OSError(error.errno, what) from error
    finally:
        _remove(temporary)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, so that a power loss does not take them away again."""
    missing = [above for above in (folder, *folder.parents) if not above.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync_folder(made.parent)


def _sync_file(file: Path) -> None:
    """Let the contents of a file reach the disk."""
    # To be written to, as Windows asks.
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())


def sync_folder(folder: Path) -> None:
    """Let the names in a folder reach the disk; Windows does so by itself."""
    if sys.platform == "win32":
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        # Some network file systems cannot, and need not.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(opened)


def remedy(path: Path, error: OSError) -> str:
    """What helps where `path` could not be written, and what is not lost by that."""
    if error.errno == errno.ENAMETOOLONG:
        return "shorten its name"
    helps = f"free some space on the disk of {path.parent}"
    if error.errno in _NOT_OURS_TO_WRITE:
        helps = f"allow writing to {path.parent}"
    elsewhere = "PUMALIB_RESULTS=<folder> (PUMALIB_CACHE=<folder> for the cache)"
    kept = "All that was written before is whole and kept: the same command goes on from there"
    return f"{helps}, or write elsewhere: {elsewhere}. {kept}"


def _remove(file: Path) -> None:
    """Remove a file, if there is one; for a name that is too long there is none."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise


def sweep(folder: Path) -> None:
    """Remove what processes that died a day ago or more left of `written_whole` in a folder.

    In results and cache alone: elsewhere nothing is removed.
    """
    _swept.add(folder)
    if not (folder.is_relative_to(RESULTS) or folder.is_relative_to(CACHE)):
        return
    for left in folder.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(left.name) and _is_abandoned(left):
            left.unlink(missing_ok=True)


def _is_abandoned(left: Path) -> bool:
    """Whether it is a file to which nobody has written for a day."""
    try:
        state = left.lstat()
    except FileNotFoundError:
        return False  # another process swept it
    return stat.S_ISREG(state.st_mode) and time.time() - state.st_mtime > _ABANDONED
