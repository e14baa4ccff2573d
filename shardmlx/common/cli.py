"""The common end of all commands: one line for bad input, and the exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from shardmlx.errors import Stopped, UserError, one_line

BAD_INPUT = 2
INTERRUPTED = 130
READER_GONE = 128 + signal.SIGPIPE
"""Status of a program whose output nobody reads to its end: it has not done its work."""


def run_command(main: Callable[[], int]) -> int:
    """Return the exit status of ``main()``: 2 for bad input, after one line, 130 for Ctrl-C, 143
    and 129 for SIGTERM and a closed terminal, and 141 if the reader of its output has gone
    (``| head -3``)."""
    try:
        with _signals_raised():
            status = main()
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
    except UserError as error:
        with contextlib.suppress(OSError):  # a closed terminal
            print(f"shardmlx: error: {one_line(error)}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except Stopped as stop:
        return 128 + stop.signal
    except BrokenPipeError:
        # Python flushes stdout once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    return status


@contextlib.contextmanager
def _signals_raised() -> Iterator[None]:
    """Raise ``Stopped`` at SIGTERM and SIGHUP, so that a command ends what it has started."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP) if is_main else ()
    caught = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in caught:
        signal.signal(number, _raise_stopped)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    raise Stopped(number, f"stopped by {signal.Signals(number).name}")
