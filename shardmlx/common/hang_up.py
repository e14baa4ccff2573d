"""Output that nobody takes any more: of a closed terminal, or of a pipe whose reader has gone; and
output that is lost, since a disk is full."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Buffer

_CLOSED_TERMINAL = (errno.EIO, errno.ENXIO)


class OutputLost(OSError):
    """A fault of what takes a command's output, such as a full disk."""


def outlive_readers() -> None:
    """Let writes to stdout and stderr do nothing once nobody takes them, as ``write_all`` does."""
    sys.stdout = _above(sys.stdout, _LastingOutput, io.TextIOWrapper)
    sys.stderr = _above(sys.stderr, _LastingOutput, io.TextIOWrapper)


def tell_losses() -> None:
    """Let writes to stdout raise ``OutputLost`` for a fault; ``BrokenPipeError`` stays itself."""
    sys.stdout = _above(sys.stdout, partial(io.FileIO, mode="w", closefd=False), _TellingOutput)


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``, as far as anybody takes it.

    The kernel tells a process by SIGHUP that its terminal is closed. If the reader of stdout's pipe
    has gone (``| head -3``), this function does so. It says nothing if the reader of stderr has
    gone. Raises other ``OSError``: a disk may be full.
    """
    try:
        _put(fd, data)
    except BrokenPipeError:
        _drop(fd)
    except OSError as error:
        if error.errno not in _CLOSED_TERMINAL:
            raise


def _put(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            select.select([], [fd], [])


def say_line(text: str) -> None:
    """Write a line to stderr, as far as anybody takes it. Signal handlers may call it: unlike
    print, it has no buffer that they may have interrupted."""
    with contextlib.suppress(OSError):
        write_all(2, f"{text}\n".encode(errors="backslashreplace"))


def send_nowhere(fd: int) -> None:
    """Let all that this process writes there go nowhere from here on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)


def _drop(fd: int) -> None:
    """Write nothing more there. If it is stdout, send SIGHUP; with nohup, which ignores that, the
    process goes on."""
    send_nowhere(fd)
    if fd == 1:
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        say_line(f"shardmlx: nobody reads the output any more{': goes on' if ignored else ''}")
        if not ignored:
            os.kill(os.getpid(), signal.SIGHUP)


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """Say of faults that the output is lost."""
    try:
        yield
    except (BrokenPipeError, OutputLost):
        raise
    except OSError as error:
        raise OutputLost(error.errno, f"cannot write the output: {error.strerror}") from None


class _TellingOutput(io.TextIOWrapper):
    """Text output, of which a fault says that it is lost.

    The file below is Python's own: a signal cannot come between its write and the count of what is
    written, after which a buffer would write the same again.
    """

    def write(self, text: str, /) -> int:
        """Write text; return the number of characters. Raises ``OutputLost``."""
        with _telling():
            return super().write(text)

    def flush(self) -> None:
        """Write what is in the buffer. Raises ``OutputLost``."""
        with _telling():
            super().flush()


class _LastingOutput(io.FileIO):
    """A file descriptor to which all is written, as far as anybody takes it; what it raises says
    that the output is lost. It stays open without this."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)

    def write(self, data: Buffer, /) -> int:
        """Write all; return the number of bytes, also if nobody has taken them."""
        whole = bytes(memoryview(data))
        with _telling():
            write_all(self.fileno(), whole)
        return len(whole)


def _above(
    stream: TextIO, file_of: Callable[[int], io.FileIO], kind: type[io.TextIOWrapper]
) -> TextIO:
    """Return text output like ``stream``, above another file for its descriptor."""
    try:
        fd = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return stream  # closed by the caller, or no file
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    raw = file_of(fd)
    return kind(
        # Text that is written through stays in no buffer, as with python -u.
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
