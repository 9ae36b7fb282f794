"""What a command does for its terminal: plain text, a reader that has gone, the signal to end."""

import io
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from .paths import printable


def plain(text: object) -> str:
    """Lines without what a terminal would obey: they hold names of files and classes."""
    return "\n".join(map(printable, str(text).split("\n")))


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Let warnings be `plain` too."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda *about, **more: plain(before(*about, **more))
    try:
        yield
    finally:
        warnings.formatwarning = before


class _Pipe(io.FileIO):
    """Standard output of which what nobody reads any more is dropped: `... | head -1`."""

    def write(self, data: Any) -> int:
        """Write bytes, or count them as written where the reader has gone."""
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            return len(data)


@contextmanager
def without_reader() -> Iterator[None]:
    """Let a command do its work, and end well, where the reader of what it prints has gone."""
    before = sys.stdout
    if before is not sys.__stdout__ or before is None or before.isatty():
        yield
        return
    before.flush()
    pipe = _Pipe(before.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(pipe),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
    )
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = before


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM, by which schedulers and `kill` end a process, do what Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
