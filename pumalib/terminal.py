"""Run a command: exit status, plain-text errors, Ctrl-C, and broken pipes."""

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
    """Ctrl-C, with a message about the work that is saved."""


def plain(text: object) -> str:
    """The lines of `text` with control characters escaped, as names of files may contain some."""
    return "\n".join(map(printable, str(text).split("\n")))


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Format warnings by `plain` too, in this context."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda *about, **more: plain(before(*about, **more))
    try:
        yield
    finally:
        warnings.formatwarning = before


class _Pipe(io.FileIO):
    """Standard output that ignores a closed pipe, as in `... | head -1`."""

    def write(self, data: Any) -> int:
        """Write bytes; if the pipe is closed, count them as written."""
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            return len(data)


@contextmanager
def without_reader() -> Iterator[None]:
    """Let a command finish its work even if the reader of its output has closed the pipe."""
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
    """Make SIGTERM, sent by schedulers and `kill`, act like Ctrl-C."""
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
    """Run one command of `program`, and return its exit status.

    0 for success, 1 for failure, 2 for wrong usage, 130 if interrupted; then the message of the
    command in `goes_on` says what is saved.
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
    """The message after an interrupt: of the command itself, or its entry in `goes_on`."""
    for one in (error, error.__cause__):
        if isinstance(one, Interrupted):
            return str(one)
    given = sys.argv[1:] if argv is None else argv
    command = given[0] if given else ""
    return goes_on.get(command, "the same command begins anew")


def _refused(error: Exception, status: int) -> int:
    """Print an error without a traceback, and return `status`."""
    click.echo(f"error: {plain(error)}", err=True)
    return status
