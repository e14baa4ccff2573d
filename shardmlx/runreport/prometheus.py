"""The newest numbers of a run, for Prometheus, by the names of services. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shardmlx.runreport.services import scalars

CONTENT_TYPE = CONTENT_TYPE_LATEST

_OF_RANKS = (
    *("compute_seconds", "exposed_comm_seconds", "idle_seconds"),
    *("peak_memory_bytes", "process_peak_bytes", "active_memory_bytes"),
)
"""Numbers of each rank, in a report of the metrics file."""


class RunMetrics(Collector):
    """Gauges of a run: a listener of ``Reporter``."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._ranks: tuple[Mapping[str, Any], ...] = ()
        self._hosts: dict[int, str] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def take(self, event: str, values: Mapping[str, Any]) -> None:
        """Take in an event of the run, whose numbers replace earlier ones."""
        if event == "start":
            places = values["layout"]["ranks"]
            self._hosts = {each["rank"]: each["host"] for each in places}
            self._values = {"iters": values["iters"], "step": values["step"], "ended": 0}
        if event == "train":
            self._ranks = tuple(values.get("ranks", ()))
            self._values["step"] = values["step"]
        if event in ("stop", "summary"):
            self._values["ended"] = 1
        # A new dictionary: a request may be going over the old one.
        self._values = {**self._values, **scalars(event, values)}

    def text(self) -> bytes:
        """Return all gauges in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges: prometheus_client calls it."""
        for name, value in self._values.items():
            yield GaugeMetricFamily(f"shardmlx_{name}", f"{name} of the newest report", value)
        for name in _OF_RANKS:
            labels = ("rank", "host")
            of_ranks = GaugeMetricFamily(
                f"shardmlx_rank_{name}", f"{name} of each rank in the newest report", labels=labels
            )
            for each in self._ranks:
                rank = each["rank"]
                if name in each:
                    of_ranks.add_metric((str(rank), self._hosts.get(rank, "")), each[name])
            yield of_ranks
