"""The command ``shardmlx export``, on one machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from shardmlx.common.environment import keep_awake, launched_rank, prepare
from shardmlx.common.reporter import Reporter
from shardmlx.config.export import LINE
from shardmlx.errors import Stopped, one_line


def run(words: Sequence[str]) -> int:
    """Export as the words of the command line say, and return the exit status: 1 if ``--verify``
    finds a fault, 128 + its number after a signal. Raises ``UserError``."""
    options = LINE.load(words)
    reporter = Reporter()
    if launched_rank() != 0:  # rank 0 writes all
        return 0
    prepare()
    keep_awake()
    started = time.monotonic()

    from shardmlx.conversion.export import export, report
    from shardmlx.conversion.peft_export import export_peft

    try:
        if options.peft:
            export_peft(options, reporter)
            return 0
        export(options, reporter)
    except Stopped as stop:
        print(f"shardmlx: {one_line(stop)}", file=sys.stderr)
        return 128 + stop.signal
    return report(options, time.monotonic() - started, reporter)
