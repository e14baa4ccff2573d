"""Carry out ``shardmlx report``: read metrics, write a page or a picture. No MLX, no MPI."""

from __future__ import annotations

from shardmlx.config.report import ReportOptions
from shardmlx.errors import UserError
from shardmlx.runreport.metrics_file import Metrics, current, read_metrics
from shardmlx.runreport.page import render_page


def run(options: ReportOptions) -> int:
    """Write what the options ask for, and say where it is. Raises ``UserError``."""
    metrics = read_metrics(options.metrics)
    content = _picture(options, metrics) if options.is_picture else _page(options, metrics)
    try:
        options.file.write_bytes(content)
    except OSError as error:
        raise UserError(
            f"--output {options.file} cannot be written: {error.strerror or error}",
            "name another file",
        ) from None
    print(f"{options.file}: {_summary(metrics)}")
    return 0


def _page(options: ReportOptions, metrics: Metrics) -> bytes:
    page = render_page(
        current(metrics.events), title=options.metrics, unreadable=metrics.unreadable
    )
    return page.encode("utf-8")


def _picture(options: ReportOptions, metrics: Metrics) -> bytes:
    from shardmlx.runreport.picture import draw_curves

    if not metrics.has_reports:
        raise UserError(
            f"{options.metrics} has no loss to draw yet",
            "ask again after the first report, or for the page (.html)",
        )
    return draw_curves(current(metrics.events), options.file)


def _summary(metrics: Metrics) -> str:
    reports = sum(event["event"] == "train" for event in current(metrics.events))
    words = f"{reports} report{'s' * (reports != 1)} of training"
    if metrics.unreadable:
        words += (
            f"; {metrics.unreadable} line{'s' * (metrics.unreadable != 1)} of the file could not "
            "be read"
        )
    return words
