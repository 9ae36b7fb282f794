"""Every folder of the project: from this file's place, or from the environment.

papermill starts kernels in the caller's folder and nbval in the notebook's, so nothing else in the
project may rely on the current folder.  `PUMALIB_ROOT` moves the whole project (needed only where
pumalib is installed away from its checkout); `PUMALIB_RESULTS` and `PUMALIB_CACHE` move what is written.
"""

import os
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(os.environ.get("PUMALIB_ROOT", Path(__file__).resolve().parent.parent)).expanduser().resolve()
NOTEBOOKS = ROOT / "notebooks"
PROFILES = NOTEBOOKS / "profiles"
PAPER = ROOT / "data" / "paper"  # the numbers the paper prints
MINI = ROOT / "data" / "mini"  # the embedded backbone
CACHE = Path(os.environ.get("PUMALIB_CACHE", ROOT / "data" / "cache")).expanduser().resolve()
RESULTS = Path(os.environ.get("PUMALIB_RESULTS", ROOT / "results")).expanduser().resolve()


def resolve(path: str | Path) -> Path:
    """`path` itself if absolute, else relative to the project's root (never to the current folder)."""
    return ROOT / Path(path).expanduser()


@contextmanager
def written_whole(path: Path):
    """Give a temporary path beside `path` to write to; rename it to `path` only if nothing was raised.

    Raises:
        OSError: the folder cannot be written or the disk is full; the message says how to write elsewhere.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write {path}: {error.strerror or error}; free some space, or name another folder for what is written: "
            "PUMALIB_RESULTS=<folder> (PUMALIB_CACHE=<folder> for the cache)",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def shown(path: Path) -> str:
    """`path` relative to the project, as it reads on any machine; one elsewhere as it is."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
