"""The metrics of a run for Prometheus. No MLX, no MPI."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from shardmlx.common.yaml_reader import is_number
from shardmlx.config.objective import MEANS
from shardmlx.runreport.metrics_file import Event

_PREFIX = "shardmlx_training_"

_GAUGES = (
    ("iterations", "Steps that the run is to make", "start", "iters"),
    ("step", "Last step that was reported", "train", "step"),
    ("loss", "Training loss, mean of the steps of the last report", "train", "loss"),
    ("learning_rate", "Learning rate", "train", "learning_rate"),
    ("gradient_norm", "Global gradient norm of the last update", "train", "grad_norm"),
    ("tokens_per_second", "Tokens a second that count in the loss", "train", "tokens_per_second"),
    ("step_seconds", "Seconds of the mean step of the last report", "train", "step_seconds"),
    ("bubble", "Part of a step in which a rank waits for another, mean", "train", "bubble"),
    ("skipped_updates", "Updates that were left out: not finite", "train", "skipped"),
    ("last_report_timestamp_seconds", "When the last report was made", "train", "time"),
    ("validation_loss", "Loss of the last validation", "val", "loss"),
    ("checkpoint_step", "Step of the last complete checkpoint", "checkpoint", "step"),
    *((name, f"{text}, in the last report", "train", name) for name, text in MEANS.items()),
    *(
        (f"validation_{name}", f"{text}, in the last validation", "val", name)
        for name, text in MEANS.items()
    ),
)
"""Name, help text, event and field of the gauges that have no labels."""

_COUNTERS = (
    ("tokens", "tokens", "Tokens that counted in the loss"),
    ("checkpoint", "checkpoints", "Complete checkpoints"),
    ("resume", "restarts", "Resumptions from a checkpoint"),
    ("straggler", "stragglers", "Ranks that became slow"),
)
"""Event, name and help text of the counters."""

_OF_RANKS = (
    ("peak_memory_bytes", "Most memory that MLX's arrays have taken", "peak_memory_bytes"),
    ("planned_peak_memory_bytes", "Most memory that the plan expects", "planned_peak_bytes"),
    ("memory_limit_bytes", "Memory that MLX's arrays may take", "memory_limit_bytes"),
)
"""Name, help text and field of the gauges of a rank: of its part of a report, or of its limits."""

_PARTS = {
    "compute": "compute_seconds",
    "exposed_communication": "exposed_comm_seconds",
    "bubble": "idle_seconds",
}


class Gauges(Collector):
    """The newest values of a run, taken from its events, and counts of some."""

    def __init__(self) -> None:
        self._newest: dict[str, Event] = {}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, events: Iterable[Event], *, anew: bool = False) -> None:
        """Take in events of the run; ``anew`` in the place of all before."""
        with self._lock:
            if anew:
                self._newest.clear()
                self._counts.clear()
            for event in events:
                self._newest[event["event"]] = event
                self._counts[event["event"]] += 1
                if event["event"] == "train" and is_number(event.get("tokens")):
                    self._counts["tokens"] += event["tokens"]

    def exposition(self) -> bytes:
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            newest, counts = dict(self._newest), Counter(self._counts)
        yield _gauge("up", "1 while the run goes on", [((), 1 - ("summary" in newest))])
        for name, text, event, key in _GAUGES:
            yield _gauge(name, text, [((), newest.get(event, {}).get(key))])
        for event, name, text in _COUNTERS:
            yield CounterMetricFamily(f"{_PREFIX}{name}", text, value=counts[event])
        start, ranks = newest.get("start", {}), newest.get("train", {}).get("ranks", [])
        hosts = [each["host"] for each in start.get("layout", {}).get("ranks", [])]
        labels = [(str(rank), host) for rank, host in enumerate(hosts)]
        yield _gauge(
            "rank_step_seconds",
            "Seconds of a rank's mean step in the last report, by what they went to",
            [
                ((*own, part), each[key])
                for own, each in zip(labels, ranks, strict=False)
                for part, key in _PARTS.items()
            ],
            ("rank", "host", "part"),
        )
        limits = start.get("memory_limits", [])
        for name, text, key in _OF_RANKS:
            values = ranks if key == "peak_memory_bytes" else limits
            samples = [(own, each.get(key)) for own, each in zip(labels, values, strict=False)]
            yield _gauge(name, text, samples, ("rank", "host"))


def _gauge(
    name: str, text: str, samples: Iterable[tuple[Sequence[str], Any]], labels: Sequence[str] = ()
) -> Metric:
    """Return a gauge with those of the ``samples`` that are numbers."""
    family = GaugeMetricFamily(f"{_PREFIX}{name}", text, labels=labels)
    for values, value in samples:
        if is_number(value):
            family.add_metric(values, value)
    return family
