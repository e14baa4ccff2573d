"""Carry out ``shardmlx report``: read metrics, write a page. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence

from shardmlx.common.formatting import plural
from shardmlx.config.report import LINE
from shardmlx.errors import UserError
from shardmlx.runreport.metrics_file import Event, Metrics, current, read_metrics
from shardmlx.runreport.page import render_page


def run(words: Sequence[str]) -> int:
    """Write the requested page, and print where it is. Raises ``UserError``."""
    options = LINE.load(words)
    metrics = read_metrics(options.metrics)
    events = current(metrics.events)
    page = render_page(events, title=options.metrics, unreadable=metrics.unreadable)
    try:
        options.file.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--output {options.file} cannot be written: {error.strerror or error}",
            "name another file",
        ) from None
    print(f"{options.file}: {_summary(metrics, events)}")
    return 0


def _summary(metrics: Metrics, events: Sequence[Event]) -> str:
    words = f"{plural(sum(event['event'] == 'train' for event in events), 'report')} of training"
    if metrics.unreadable:
        words += f"; {plural(metrics.unreadable, 'line')} of the file could not be read"
    return words
