"""The common end of all commands: one line for bad input, and the exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from shardmlx.errors import UserError, one_line

BAD_INPUT = 2
INTERRUPTED = 130


def run_command(main: Callable[[], int]) -> int:
    """Return the exit status of ``main()``: 2 for bad input, after one line, and 130 for Ctrl-C."""
    try:
        status = main()
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
    except UserError as error:
        print(f"shardmlx: error: {one_line(error)}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status
