"""The common end of all commands: one line for bad input, and the exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from shardmlx.compat import QuietParser
from shardmlx.errors import UserError, one_line

BAD_INPUT = 2
INTERRUPTED = 130


class OneLineParser(QuietParser):
    """An argument parser that raises ``UserError`` instead of printing its usage and exiting.

    ``--help`` and ``--version`` end every rank, and only rank 0 prints.
    """

    def __init__(self, *, rank: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.prints = rank == 0

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{' '.join(message.split())} (see --help)")


def run_command(main: Callable[[], int]) -> int:
    """Return the exit status of ``main()``: 2 for bad input, after one line, and 130 for Ctrl-C.

    A reader that goes away, like ``head``, ends the command quietly.
    """
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
