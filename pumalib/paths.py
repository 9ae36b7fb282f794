"""Every folder of the project, whatever the current one.

`PUMALIB_ROOT` moves all of them, `PUMALIB_RESULTS` and `PUMALIB_CACHE` what is written.  Where
pumalib is installed without a checkout around it, the project is the current folder, and those that
only the checkout has (`NOTEBOOKS`, `PROFILES`, `PAPER`, `MINI`) raise FileNotFoundError.
"""

import errno
import hashlib
import os
import sys
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


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to, renamed to `path` only if nothing was raised.

    Raises OSError, which names the remedy, where it cannot be written.
    """
    name = path.name
    if len(os.fsencode(name)) > _LONG:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    temporary = path.with_name(f".{name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent not in _swept:
            sweep(path.parent)
        # A link of that name would lead what is written elsewhere.
        _remove(temporary)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        what = f"cannot write {path}: {error.strerror or error}; {remedy(path, error)}"
        raise OSError(error.errno, what) from error
    finally:
        _remove(temporary)


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
    """Remove what dead processes left of `written_whole` in a folder."""
    _swept.add(folder)
    for left in folder.glob(".*.tmp"):
        process = left.name.split(".")[-2]
        is_folder = left.is_dir() and not left.is_symlink()
        if process.isdecimal() and not is_folder and not _is_running(int(process)):
            left.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    """Whether a process of this number exists; on Windows, where asking would end it, yes."""
    if sys.platform == "win32":
        return True
    try:
        os.kill(process, 0)
    except PermissionError:  # it is another user's
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
