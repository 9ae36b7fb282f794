"""The list of benchmarks: a new one is a file with a `Reader`, and an entry here."""

from . import folders, mini, paper
from .table import Reader, check_known

READERS: dict[str, Reader] = {
    "mini": mini.READER,
    "folders": folders.READER,
    "paper": paper.READER,
}


def reader(benchmark: str) -> Reader:
    """The reader of a benchmark; an unknown name is a ValueError that lists the known ones."""
    check_known("benchmark", [benchmark], READERS)
    return READERS[benchmark]


def list_benchmarks() -> list[str]:
    """The names of all benchmarks."""
    return list(READERS)
