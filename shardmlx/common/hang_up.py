"""Output that nobody takes any more: of a closed terminal, or of a pipe whose reader has gone."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Buffer

_CLOSED_TERMINAL = (errno.EIO, errno.ENXIO)


def outlive_readers() -> None:
    """Let writes to stdout and stderr do nothing once nobody takes them, as ``write_all`` does."""
    sys.stdout = _outliving(sys.stdout)
    sys.stderr = _outliving(sys.stderr)


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``, as far as anybody takes it.

    The kernel tells a process by SIGHUP that its terminal is closed. If the reader of stdout's pipe
    has gone (``| head -3``), this function does so. It says nothing if the reader of stderr has
    gone. Raises other ``OSError``: a disk may be full.
    """
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            select.select([], [fd], [])
        except BrokenPipeError:
            _drop(fd)
            return
        except OSError as error:
            if error.errno not in _CLOSED_TERMINAL:
                raise
            return


def say_line(text: str) -> None:
    """Write a line to stderr, as far as anybody takes it. Signal handlers may call it: unlike
    print, it has no buffer that they may have interrupted."""
    with contextlib.suppress(OSError):
        write_all(2, f"{text}\n".encode(errors="backslashreplace"))


def _drop(fd: int) -> None:
    """Let all that this process writes there go nowhere. If it is stdout, send SIGHUP; with nohup,
    which ignores that, the process goes on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)
    if fd == 1:
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        say_line(f"shardmlx: nobody reads the output any more{': goes on' if ignored else ''}")
        if not ignored:
            os.kill(os.getpid(), signal.SIGHUP)


class _Output(io.FileIO):
    """A file descriptor that outlives those who take its output. It stays open without this."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)

    def write(self, data: Buffer, /) -> int:
        """Write all; return the number of bytes, also if nobody has taken them."""
        whole = bytes(memoryview(data))
        write_all(self.fileno(), whole)
        return len(whole)


def _outliving(stream: TextIO) -> TextIO:
    try:
        fd = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return stream  # closed by the caller, or no file
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(fd)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
