"""Every folder of the project, whatever the current one: `PUMALIB_ROOT` moves all (where pumalib is installed away from
its checkout), `PUMALIB_RESULTS` and `PUMALIB_CACHE` what is written."""

import glob
import os
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(os.environ.get("PUMALIB_ROOT", Path(__file__).resolve().parent.parent)).expanduser().resolve()
NOTEBOOKS = ROOT / "notebooks"
PROFILES = NOTEBOOKS / "profiles"
PAPER = ROOT / "data" / "paper"  # the numbers the paper prints
MINI = ROOT / "data" / "mini"  # the embedded benchmark and its backbones
CACHE = Path(os.environ.get("PUMALIB_CACHE", ROOT / "data" / "cache")).expanduser().resolve()
RESULTS = Path(os.environ.get("PUMALIB_RESULTS", ROOT / "results")).expanduser().resolve()


def resolve(path: str | Path) -> Path:
    """`path` itself if absolute, else relative to the project's root (never to the current folder)."""
    return ROOT / Path(path).expanduser()


@contextmanager
def written_whole(path: Path):
    """Give a temporary path to write to, renamed to `path` only if nothing was raised; an OSError names the remedy."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent, glob.escape(path.name))
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        remedy = "free some space, or write elsewhere: PUMALIB_RESULTS=<folder> (PUMALIB_CACHE=<folder> for the cache)"
        raise OSError(error.errno, f"cannot write {path}: {error.strerror or error}; {remedy}") from error
    finally:
        temporary.unlink(missing_ok=True)


def sweep(folder: Path, name: str = "*") -> None:
    """Remove what dead processes left of `written_whole` in a folder."""
    for left in folder.glob(f".{name}.*.tmp"):
        process = left.name.split(".")[-2]
        if process.isdecimal() and not psutil.pid_exists(int(process)):
            left.unlink(missing_ok=True)


def shown(path: Path) -> str:
    """`path` relative to the project, as it reads on any machine; one elsewhere as it is."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
