"""Standard input with its end. mpirun of Open MPI 5 passes on to rank 0 what comes on its stdin,
but not that it ends (openpmix/openpmix, pull request 4024): launch passes it on in pieces, each
after its length, and a piece of length 0 is the end.
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
from collections.abc import Iterator

from shardmlx.errors import UserError, file_access

MARK = b"\0shardmlx\0"
"""Bytes before the first piece, with which no text begins."""

LENGTH_BYTES = 8

MOST = 1 << 16
"""Bytes that are read at a time."""

DASH = "-"
"""The value of an option that stands for stdin."""

_PATHS = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")
"""Paths of stdin: who opens one reads on until the end, which ranks are not told so."""


def is_path_of_stdin(value: object) -> bool:
    """Return whether the value of an option is a path of the stdin of whoever opens it."""
    return value in _PATHS


def pass_stdin_on(*, whole: bool) -> None:
    """Have this process's stdin, which its children inherit, come in pieces, with its end: the
    ``whole`` of it when it has ended, else as it comes, and nothing of a terminal. Raises
    ``UserError`` if it cannot be read."""
    if os.isatty(0):
        if not whole:
            return
        tell_typist()
    with file_access("read", "stdin"):
        source = os.dup(0)
        pieces = iter([*_pieces_of(source)]) if whole else _pieces_until_a_fault(source)
    read, write = os.pipe()
    os.dup2(read, 0)
    os.close(read)
    threading.Thread(target=_send, args=(pieces, write), daemon=True).start()


def tell_typist() -> None:
    """Say at a terminal how what is typed there ends."""
    print("shardmlx: reads what you type, until Ctrl-D", file=sys.stderr, flush=True)


def _pieces_of(fd: int) -> Iterator[bytes]:
    while piece := os.read(fd, MOST):
        yield piece


def _pieces_until_a_fault(fd: int) -> Iterator[bytes]:
    """Yield what can be read; a fault is the end, and is said."""
    try:
        yield from _pieces_of(fd)
    except OSError as error:
        print(f"shardmlx: cannot read stdin: {error.strerror}", file=sys.stderr, flush=True)


def _send(pieces: Iterator[bytes], fd: int) -> None:
    with os.fdopen(fd, "wb", buffering=0) as file:
        try:
            _write(file.fileno(), MARK)
            for piece in pieces:
                _write(file.fileno(), len(piece).to_bytes(LENGTH_BYTES) + piece)
            _write(file.fileno(), bytes(LENGTH_BYTES))
        except BrokenPipeError:  # the job has ended
            return


def _write(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


class StdinReader:
    """Reads a file descriptor, by default stdin, as it is or as ``pass_stdin_on`` passes it on."""

    def __init__(self, fd: int = 0) -> None:
        self._fd = fd
        self._held = b""
        self._is_passed: bool | None = None
        # Where stdin is closed, another file may have its number.
        self._has_ended = fd == 0 and sys.stdin is None

    @property
    def tells_end(self) -> bool:
        """True if launch passes it on: silence is no end."""
        return bool(self._is_passed)

    def read(self, seconds: float | None = None) -> bytes | None:
        """Return what has come, b"" at the end; None if nothing comes within ``seconds``, which are
        without limit if None. Raises ``UserError`` if what is passed on breaks off."""
        limit = None if seconds is None else time.monotonic() + seconds
        while not self._has_ended:
            if (piece := self._take()) is not None:
                self._has_ended = not piece
                return piece
            left = None if limit is None else max(limit - time.monotonic(), 0.0)
            if not select.select([self._fd], [], [], left)[0]:
                return None
            data = os.read(self._fd, MOST)
            self._has_ended = not data
            self._held += data
            if self._has_ended and self._is_passed:
                raise UserError("stdin breaks off: launch has not passed its end on", "begin anew")
        # A text may begin like the mark.
        rest, self._held = self._held, b""
        return rest

    def _take(self) -> bytes | None:
        """Take the next piece from what is held; None if it has not come whole."""
        if self._is_passed is None and (len(self._held) >= len(MARK) or not self._may_be_mark):
            self._is_passed = self._may_be_mark
            self._held = self._held.removeprefix(MARK)
        if self._is_passed is None or not self._held:
            return None
        if not self._is_passed:
            piece, self._held = self._held, b""
            return piece
        stop = LENGTH_BYTES + int.from_bytes(self._held[:LENGTH_BYTES])
        if len(self._held) < stop:
            return None
        piece, self._held = self._held[LENGTH_BYTES:stop], self._held[stop:]
        return piece

    @property
    def _may_be_mark(self) -> bool:
        return MARK.startswith(self._held[: len(MARK)])
