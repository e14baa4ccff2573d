"""Open the viewers of a run's events: its metrics file, its live page, TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shardmlx.common.http_listener import bind
from shardmlx.common.reporter import Listener, Reporter
from shardmlx.config.specs import Spec
from shardmlx.distributed.agreement import on_rank_0
from shardmlx.distributed.transport import Transport
from shardmlx.runreport.live import LivePage
from shardmlx.runreport.tensorboard import TensorBoardLog


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewerOptions(Spec):
    """The places to which the events of a run go."""

    metrics_file: str | None
    metrics_port: int | None
    metrics_host: str
    services: tuple[str, ...]
    adapter_path: str


@contextmanager
def open_reporter(
    options: ViewerOptions, transport: Transport, on_event: Listener | None
) -> Iterator[Reporter]:
    """Give out a reporter to all viewers, for the length of a block.

    All ranks must call it. Raises ``AgreedError`` if a port or a file cannot be opened.
    """
    with ExitStack() as stack:
        reporter = on_rank_0(
            transport, "opening the report", partial(_open, options, on_event, stack)
        )
        yield reporter or Reporter(quiet=True)


def _open(options: ViewerOptions, on_event: Listener | None, stack: ExitStack) -> Reporter:
    """Open all viewers, to be closed with the stack, and print where to see the run."""
    listeners = [] if on_event is None else [on_event]
    page = None
    if options.metrics_port is not None:
        listener = bind(options.metrics_host, options.metrics_port, "--metrics-")
        page = LivePage(listener, options.metrics_file)
        stack.callback(page.close)
        listeners.append(page.take)
    if "tensorboard" in options.services:
        board = TensorBoardLog(options.adapter_path)
        stack.callback(board.close)
        listeners.append(board.take)
    metrics = Path(options.metrics_file) if options.metrics_file else None
    reporter = Reporter(metrics, listeners=listeners)
    stack.callback(reporter.close)
    if page is not None:
        reporter.say(f"The run at {page.address}, for Prometheus at {page.address}/metrics")
    return reporter
