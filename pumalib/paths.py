"""The folders of the project, independent of the current folder.

`PUMALIB_ROOT` moves all of them, `PUMALIB_RESULTS` and `PUMALIB_CACHE` those that are written to.
If pumalib is installed without a checkout around it, the project is the current folder, and folders
that only the checkout has (`NOTEBOOKS`, `PROFILES`, `PAPER`, `MINI`) raise FileNotFoundError.
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
    """The folder in an environment variable; `default` if it is unset or empty."""
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
    """The user's cache folder for pumalib on this platform."""
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
    """Warn if this code is from one checkout, but `root` or the current folder is another.

    If two checkouts share an environment, a kernel imports the one that is installed there.
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

# The most bytes of a name that is extended for a temporary file: file systems allow 255.
_LONG = 200
# Errors for which more disk space does not help.
_NOT_OURS_TO_WRITE = (errno.EACCES, errno.EPERM, errno.EROFS)

# Temporary files of `written_whole`, with sixteen random hexadecimal digits: process numbers could
# repeat in another container.  No other program uses such names.
_TEMPORARY = re.compile(r"\..+\.pumalib-[0-9a-f]{16}\.tmp")
# Seconds without a change after which such a file belongs to a dead process.
_ABANDONED = 24 * 60 * 60

# Folders that `written_whole` has swept already: listing thousands of files at every write would
# be slow.
_swept: set[Path] = set()

_OF_CHECKOUT = {
    "NOTEBOOKS": ROOT / "notebooks",
    "PROFILES": ROOT / "notebooks" / "profiles",
    "PAPER": ROOT / "data" / "paper",  # the numbers the paper prints
    "MINI": ROOT / "data" / "mini",  # the embedded benchmark and its backbones
}


def __getattr__(name: str) -> Path:
    """A folder of the checkout; FileNotFoundError if pumalib runs without a checkout."""
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
    """`path` if absolute, else relative to the project's root, not to the current folder."""
    return ROOT / Path(path).expanduser()


def find(path: str | Path) -> Path:
    """`path` for reading: in the project if it exists there, otherwise in the current folder."""
    of_project = resolve(path)
    here = Path.cwd() / Path(path).expanduser()
    if not of_project.exists() and here.exists():
        return here
    return of_project


def shown(path: Path) -> str:
    """`path` relative to the project, with forward slashes; unchanged if it is elsewhere."""
    if path.is_relative_to(ROOT):
        return path.relative_to(ROOT).as_posix()
    return str(path)


def printable(text: object) -> str:
    """`text` for display: bytes that are not UTF-8, and control characters, as escapes."""
    name = os.fsencode(str(text)).decode(errors="backslashreplace")
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in name)


def state(known: os.stat_result) -> tuple[int, int, int, int]:
    """Size, times of change and inode of a file, which change when its contents do.

    Size and modification time alone can be the same for other contents, as after `cp -p`.
    """
    return known.st_size, known.st_mtime_ns, known.st_ctime_ns, known.st_ino


@contextmanager
def written_whole(path: Path, durable: bool = True) -> Iterator[Path]:
    """Give a temporary path to write to, and rename it to `path` if nothing was raised.

    If `durable`, the file is then whole on disk even after a power loss.  Thousands of small files
    are faster without, for files that are made again if empty.

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
            # Before the rename: otherwise a power loss may leave an empty file of that name.
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
    """Make a folder and its parents, so that they survive a power loss."""
    missing = [above for above in (folder, *folder.parents) if not above.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync_folder(made.parent)


def _sync_file(file: Path) -> None:
    """Flush the contents of a file to disk."""
    # Opened for writing, as Windows requires.
    with file.open("rb+") as opened:
        os.fsync(opened.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk; Windows needs no call."""
    if sys.platform == "win32":
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        # Some network file systems do not support it, and do not need it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(opened)


def remedy(path: Path, error: OSError) -> str:
    """The advice in a message that `path` could not be written: a remedy, and what is not lost."""
    if error.errno == errno.ENAMETOOLONG:
        return "shorten its name"
    helps = f"free some space on the disk of {path.parent}"
    if error.errno in _NOT_OURS_TO_WRITE:
        helps = f"allow writing to {path.parent}"
    elsewhere = "PUMALIB_RESULTS=<folder> (PUMALIB_CACHE=<folder> for the cache)"
    kept = "All that was written before is whole and kept: the same command goes on from there"
    return f"{helps}, or write elsewhere: {elsewhere}. {kept}"


def _remove(file: Path) -> None:
    """Remove a file if it exists; a name that is too long cannot exist."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise


def sweep(folder: Path) -> None:
    """Remove temporary files of `written_whole` that nobody has changed for a day.

    Only in results and cache: elsewhere nothing is removed.
    """
    _swept.add(folder)
    if not (folder.is_relative_to(RESULTS) or folder.is_relative_to(CACHE)):
        return
    for left in folder.glob(".*.tmp"):
        if _TEMPORARY.fullmatch(left.name) and _is_abandoned(left):
            left.unlink(missing_ok=True)


def _is_abandoned(left: Path) -> bool:
    """Whether it is a file that nobody has changed for a day."""
    try:
        state = left.lstat()
    except FileNotFoundError:
        return False  # another process swept it
    return stat.S_ISREG(state.st_mode) and time.time() - state.st_mtime > _ABANDONED
