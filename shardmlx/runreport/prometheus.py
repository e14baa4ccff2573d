"""The metrics of a run in Prometheus's text format (version 0.0.4). No MLX, no MPI."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardmlx.common.yaml_reader import is_number

Sample = tuple[Mapping[str, str], float]
"""The labels and the value of a sample."""

_GAUGES = (
    ("iterations", "Steps that the run is to make", "start", "iters"),
    ("step", "Last step that was reported", "train", "step"),
    ("loss", "Training loss, mean of the steps of the last report", "train", "loss"),
    ("learning_rate", "Learning rate", "train", "learning_rate"),
    ("gradient_norm", "Global gradient norm of the last update", "train", "grad_norm"),
    (
        "tokens_per_second",
        "Tokens that counted in the loss, a second",
        "train",
        "tokens_per_second",
    ),
    ("step_seconds", "Seconds of the mean step of the last report", "train", "step_seconds"),
    ("bubble", "Part of a step in which a rank waits for another, mean", "train", "bubble"),
    ("skipped_updates", "Updates that were left out: not finite", "train", "skipped"),
    ("last_report_timestamp_seconds", "When the last report was made", "train", "time"),
    ("validation_loss", "Loss of the last validation", "val", "loss"),
    ("checkpoint_step", "Step of the last complete checkpoint", "checkpoint", "step"),
)
"""Name, help text, event and field of the gauges that have no labels."""

_COUNTERS = (
    ("tokens", "tokens", "Tokens that counted in the loss"),
    ("checkpoint", "checkpoints", "Complete checkpoints"),
    ("resume", "restarts", "Resumptions from a checkpoint"),
    ("straggler", "stragglers", "Ranks that became slow"),
)
"""Event, name and help text of the counters."""

_PARTS = {
    "compute": "compute_seconds",
    "exposed_communication": "exposed_comm_seconds",
    "bubble": "idle_seconds",
}


@dataclass(slots=True)
class Gauges:
    """The newest values of a run, taken from its events, and counts of some."""

    _newest: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, event: str, values: Mapping[str, Any]) -> None:
        """Take in an event of the run."""
        with self._lock:
            self._newest[event] = values
            self._counts[event] += 1
            if event == "train":
                self._counts["tokens"] += int(_number(values.get("tokens")) or 0)

    def exposition(self) -> bytes:
        """Return all metrics, in Prometheus's format."""
        with self._lock:
            newest, counts = dict(self._newest), Counter(self._counts)
        return "".join(_families(newest, counts)).encode()


def _families(newest: Mapping[str, Mapping[str, Any]], counts: Mapping[str, int]) -> Iterator[str]:
    yield _family("up", "1 while the run goes on", [({}, 1.0 - ("summary" in newest))])
    for name, text, event, key in _GAUGES:
        value = _number(newest.get(event, {}).get(key))
        yield _family(name, text, [] if value is None else [({}, value)])
    for event, name, text in _COUNTERS:
        yield _family(name, text, [({}, float(counts[event]))], kind="counter")
    yield from _ranks(newest.get("start", {}), newest.get("train", {}))


def _ranks(start: Mapping[str, Any], train: Mapping[str, Any]) -> Iterator[str]:
    """Yield the metrics that each rank has."""
    hosts = [each["host"] for each in start.get("layout", {}).get("ranks", [])]
    ranks = train.get("ranks", [])
    labels = [
        {"rank": str(rank), "host": hosts[rank] if rank < len(hosts) else ""}
        for rank in range(max(len(hosts), len(ranks)))
    ]
    yield _family(
        "rank_step_seconds",
        "Seconds of a rank's mean step in the last report, by what they went to",
        [
            ({**own, "part": part}, float(each[key]))
            for own, each in zip(labels, ranks, strict=False)
            for part, key in _PARTS.items()
        ],
    )
    limits = start.get("memory_limits", [])
    for name, text, values, key in (
        ("peak_memory_bytes", "Most memory that MLX's arrays have taken", ranks, None),
        ("planned_peak_memory_bytes", "Most memory that the plan expects", limits, "planned_peak"),
        ("memory_limit_bytes", "Memory that MLX's arrays may take", limits, "memory_limit"),
    ):
        field_name = f"{key}_bytes" if key else name
        yield _family(
            name,
            text,
            [
                (own, float(each[field_name]))
                for own, each in zip(labels, values, strict=False)
                if _number(each.get(field_name)) is not None
            ],
        )


def _number(value: Any) -> float | None:
    return float(value) if is_number(value) else None


def _family(name: str, text: str, samples: Sequence[Sample], kind: str = "gauge") -> str:
    """Return a metric with its samples; nothing without samples."""
    if not samples:
        return ""
    full = f"shardmlx_training_{name}" + "_total" * (kind == "counter")
    lines = [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
    lines += [f"{full}{_labels(labels)} {_value(value)}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _value(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
