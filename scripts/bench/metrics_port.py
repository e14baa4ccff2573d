"""What --metrics-port costs a run: python scripts/bench/metrics_port.py

CPU time of the process for each report, for an open page that sees it, and for each scrape. The
client's part is in them: both ends are in one process.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.request import urlopen

from shardmlx.common.formatting import columns
from shardmlx.common.http_listener import bind
from shardmlx.runreport.live import LivePage

SCRAPE_EVERY = 15.0
"""Seconds between two scrapes: Prometheus's default is a minute, many take 15."""

STEPS_PER_REPORT = 10
"""The default of --steps-per-report."""

STEP_SECONDS = 1.0
"""A short step for a model that is divided among machines."""


@dataclass(frozen=True)
class Costs:
    """CPU seconds of the process: of an event, of a scrape, of a page that sees an event, and of
    each second in which nobody asks."""

    event: float
    scrape: float
    page: float
    idle: float

    @property
    def share(self) -> float:
        """Part of a step that they take together, with one scraper and one open page."""
        of_reports = (self.event + self.page) / (STEPS_PER_REPORT * STEP_SECONDS)
        return of_reports + self.scrape / SCRAPE_EVERY + self.idle


def report(step: int, ranks: int) -> dict[str, Any]:
    """Return a report of training as a run makes them."""
    parts = {"compute_seconds": 0.812345, "exposed_comm_seconds": 0.012345, "idle_seconds": 0.1}
    memory = {"peak_memory_bytes": 5 << 30, "process_peak_bytes": 6 << 30}
    return {
        "step": step,
        "loss": 2.123456789,
        "tokens": 12345,
        "tokens_per_second": 1234.56789,
        "learning_rate": 1e-5,
        "grad_norm": 1.23456789,
        "skipped": 0,
        "step_seconds": 1.0,
        "bubble": 0.1,
        "ranks": [{"rank": rank, **parts, **memory} for rank in range(ranks)],
    }


def cpu_seconds(work: Callable[[], object], count: int) -> float:
    """Return the CPU seconds of this process, all threads together, for one of ``count`` calls."""
    start = time.process_time()
    for _ in range(count):
        work()
    return (time.process_time() - start) / count


def measure(ranks: int, count: int) -> Costs:
    """Measure a run of ``count`` reports on so many ranks. The client's part is in the costs."""
    layout = {"ranks": [{"rank": rank, "host": f"mac{rank}.local"} for rank in range(ranks)]}
    page = LivePage(bind("127.0.0.1", 0))
    page.take("start", {"step": 0, "layout": layout, "memory_limits": []})
    idle = cpu_seconds(lambda: time.sleep(1.0), 1 + count // 200)
    steps = iter(range(1, 10 * count))
    event = cpu_seconds(lambda: page.take("train", report(next(steps), ranks)), count)
    scrape = cpu_seconds(lambda: ask(f"{page.address}/metrics"), count)
    seen = [count + 1]
    watcher = threading.Thread(target=watch, args=(page, seen, 2 * count))
    watcher.start()
    seconds = cpu_seconds(lambda: say_when_seen(page, seen, next(steps), ranks), count - 1)
    page.close()
    watcher.join()
    return Costs(event, scrape, max(0.0, seconds - event), idle)


def ask(url: str) -> bytes:
    with urlopen(url) as answer:
        found: bytes = answer.read()
    return found


def watch(page: LivePage, seen: list[int], until: int) -> None:
    """Ask for events as an open page does."""
    while seen[0] < until:
        text = ask(f"{page.address}/events?after={seen[0]}")
        seen[0] = int(text.partition(b'"last": ')[2].partition(b",")[0])


def say_when_seen(page: LivePage, seen: list[int], step: int, ranks: int) -> None:
    """Make a report, and wait until the page has it."""
    page.take("train", report(step, ranks))
    while seen[0] < step + 1:
        time.sleep(0.0005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it runs")
    count = 20 if parser.parse_args().quick else 1000
    rows = []
    for ranks in (1, 2, 8, 64):
        costs = measure(ranks, count)
        each_of = (costs.event, costs.page, costs.scrape, costs.idle)
        micro = (f"{1e6 * each:.0f} us" for each in each_of)
        rows.append((str(ranks), *micro, f"{100 * costs.share:.4f}%"))
    header = ("ranks", "a report", "an open page", "a scrape", "a second", "of a step")
    print(columns(header, rows))
    print(
        "CPU time; of a second in which nobody asks; and of a step of "
        f"{STEP_SECONDS:g} s, with a report every {STEPS_PER_REPORT} steps, one open page, and a "
        f"scrape every {SCRAPE_EVERY:g} s."
    )


if __name__ == "__main__":
    main()
