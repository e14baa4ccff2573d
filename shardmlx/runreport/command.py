"""Carry out ``shardmlx report``: read metrics, write a page or a picture. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence

from shardmlx.common.formatting import plural
from shardmlx.config.report import ReportOptions
from shardmlx.errors import UserError
from shardmlx.runreport.metrics_file import Event, Metrics, current, read_metrics
from shardmlx.runreport.page import render_page


def run(options: ReportOptions) -> int:
    """Write what the options ask for, and say where it is. Raises ``UserError``."""
    metrics = read_metrics(options.metrics)
    events = current(metrics.events)
    if options.is_picture:
        content = _picture(options, metrics, events)
    else:
        content = _page(options, metrics, events)
    try:
        options.file.write_bytes(content)
    except OSError as error:
        raise UserError(
            f"--output {options.file} cannot be written: {error.strerror or error}",
            "name another file",
        ) from None
    print(f"{options.file}: {_summary(metrics, events)}")
    return 0


def _page(options: ReportOptions, metrics: Metrics, events: Sequence[Event]) -> bytes:
    page = render_page(events, title=options.metrics, unreadable=metrics.unreadable)
    return page.encode("utf-8")


def _picture(options: ReportOptions, metrics: Metrics, events: Sequence[Event]) -> bytes:
    from shardmlx.runreport.picture import draw_curves

    if not metrics.has_reports:
        raise UserError(
            f"{options.metrics} has no loss to draw yet",
            "ask again after the first report, or for the page (.html)",
        )
    return draw_curves(events, options.file)


def _summary(metrics: Metrics, events: Sequence[Event]) -> str:
    words = f"{plural(sum(event['event'] == 'train' for event in events), 'report')} of training"
    if metrics.unreadable:
        words += f"; {plural(metrics.unreadable, 'line')} of the file could not be read"
    return words
