"""The common end of all commands: one line for bad input, and the exit status."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from shardmlx.common.hang_up import OutputLost, say_line, send_nowhere, tell_losses
from shardmlx.errors import Stopped, UserError, one_line

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130
READER_GONE = 128 + signal.SIGPIPE
"""Status of a program whose output nobody reads to its end: it has not done its work."""


def run_command(main: Callable[[], int]) -> int:
    """Return the exit status of ``main()``: 2 for bad input, after one line, 130 for Ctrl-C, 143
    and 129 for SIGTERM and a closed terminal. Exits as ``whole_output`` says."""
    try:
        with whole_output(), _signals_raised():
            return main()
    except UserError as error:
        with contextlib.suppress(OSError):  # a closed terminal
            print(f"shardmlx: error: {one_line(error)}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except Stopped as stop:
        return 128 + stop.signal


@contextlib.contextmanager
def whole_output() -> Iterator[None]:
    """Exit unless all that the block prints is written, also what a buffer holds at its end, or as
    it exits: with 1 after one line, for instance of a full disk, and with 141 if the reader has
    gone (``| head -3``)."""
    before = sys.stdout
    tell_losses()
    ours = sys.stdout
    try:
        try:
            yield
        except SystemExit:
            _flush()
            raise
        _flush()
    except OutputLost as error:
        say_line(f"shardmlx: failed: {error.strerror}")
        send_nowhere(ours.fileno())  # Python flushes stdout once more at its end
        raise SystemExit(FAILED) from None
    except BrokenPipeError:
        send_nowhere(ours.fileno())
        raise SystemExit(READER_GONE) from None
    finally:
        if sys.stdout is ours:
            sys.stdout = before


def _flush() -> None:
    if sys.stdout is not None:  # closed by the caller
        sys.stdout.flush()


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
