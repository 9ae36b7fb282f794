"""Running a command: its status, its errors in plain text, Ctrl-C, a reader that has gone."""

import io
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from .paths import printable


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with what is kept."""


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


def run(
    commands: click.Group, argv: list[str] | None, program: str, goes_on: Mapping[str, str]
) -> int:
    """Run one command of `program`, and return its status.

    0 if all went well, 1 if not, 2 if it was asked in a wrong way, 130 if interrupted: then
    `goes_on` says by command what is kept.
    """
    try:
        with sigterm_interrupts(), without_reader(), plain_warnings():
            return commands.main(argv, prog_name=program, standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort) as error:
        click.echo(f"\ninterrupted; {_what_is_kept(error, argv, goes_on)}", err=True)
        return 130
    except ValueError as error:
        return _refused(error, 2)
    except (OSError, RuntimeError) as error:
        return _refused(error, 1)
    except ArithmeticError as error:
        from .training import NonFiniteLoss  # torch takes seconds

        if not isinstance(error, NonFiniteLoss):
            raise
        return _refused(error, 1)


def _what_is_kept(error: BaseException, argv: list[str] | None, goes_on: Mapping[str, str]) -> str:
    """What is said of an interrupted command."""
    for one in (error, error.__cause__):
        if isinstance(one, Interrupted):
            return str(one)
    given = sys.argv[1:] if argv is None else argv
    command = given[0] if given else ""
    return goes_on.get(command, "the same command begins anew")


def _refused(error: Exception, status: int) -> int:
    """Say an error that names what is wrong and the remedy, without a traceback."""
    click.echo(f"error: {plain(error)}", err=True)
    return status
