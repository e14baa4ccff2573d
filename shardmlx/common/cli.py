"""The common end of all commands: one line for bad input, and the exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable

from shardmlx.errors import UserError, one_line

BAD_INPUT = 2
INTERRUPTED = 130
READER_GONE = 128 + signal.SIGPIPE
"""Status of a program whose output nobody reads to its end: it has not done its work."""


def run_command(main: Callable[[], int]) -> int:
    """Return the exit status of ``main()``: 2 for bad input, after one line, 130 for Ctrl-C, and
    141 if the reader of its output has gone (``| head -3``)."""
    try:
        status = main()
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
    except UserError as error:
        with contextlib.suppress(OSError):  # a closed terminal
            print(f"shardmlx: error: {one_line(error)}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_GONE
    return status
