"""Metrics of the server, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from shardmlx.inference.drafts import NO_DRAFTS, DraftCounts
from shardmlx.server.request_queue import Delta, RequestQueue

COUNTERS = (
    (("texts", "Answers by how they ended: stop, length, cancelled, error"), ("end",)),
    (("prompt_tokens", "Tokens of the prompts of all answers"), ()),
    (("cached_tokens", "Tokens of prompts that came from the prefix cache"), ()),
    (("generated_tokens", "Tokens generated"), ()),
    (("draft_rounds", "Steps that verified drafts"), ()),
    (("drafted_tokens", "Tokens that were drafted"), ()),
    (("accepted_tokens", "Drafts that were right; with one more a round they came together"), ()),
)
"""Name, help text and labels of the counters."""

HISTOGRAMS = (
    (
        ("time_to_first_token", "From a request to the first token of its answer"),
        (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200),
    ),
    (
        ("time_between_tokens", "Between two tokens of an answer"),
        (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
    ),
)
"""Name, help text and upper bounds of the buckets of the histograms, in seconds."""


class Metrics:
    """The counters, histograms and gauges of one server, in a registry of its own; the
    ``peak_memory`` is that of this rank, in bytes."""

    def __init__(self, queue: RequestQueue, peak_memory: Callable[[], int] = int) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.counters = {
            name: Counter(f"shardmlx_{name}", text, labels, registry=self.registry)
            for (name, text), labels in COUNTERS
        }
        self.histograms = {
            name: Histogram(
                f"shardmlx_{name}_seconds", text, buckets=buckets, registry=self.registry
            )
            for (name, text), buckets in HISTOGRAMS
        }
        for name, text, value in (
            ("texts_under_way", "Answers being generated", lambda: queue.load[0]),
            ("texts_waiting", "Requests that wait for their turn", lambda: queue.load[1]),
            ("kept_tokens", "Tokens in the prefix cache", lambda: queue.kept_tokens),
            ("up", "1 while requests are taken", lambda: queue.unavailable_reason is None),
            ("peak_memory_bytes", "Most that MLX's arrays have taken, on rank 0", peak_memory),
        ):
            Gauge(f"shardmlx_{name}", text, registry=self.registry).set_function(value)


@dataclass(slots=True)
class RequestMeter:
    """The measurements of one answer."""

    metrics: Metrics
    prompt_tokens: int
    generated: int = 0
    drafts: DraftCounts = NO_DRAFTS
    has_ended: bool = False
    last: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.metrics.counters["prompt_tokens"].inc(self.prompt_tokens)

    def add(self, delta: Delta, now: float) -> None:
        """Count the tokens of a delta that was made ``now``, and the time since the last one."""
        more = delta.generated - self.generated
        if more > 0 and self.generated == 0:
            self.metrics.histograms["time_to_first_token"].observe(now - self.last)
            self.metrics.counters["cached_tokens"].inc(delta.cached)
        elif more > 0:
            for _ in range(more):
                self.metrics.histograms["time_between_tokens"].observe((now - self.last) / more)
        self.metrics.counters["generated_tokens"].inc(more)
        drafts = delta.drafts
        before = self.drafts
        if drafts != before:
            self.metrics.counters["draft_rounds"].inc(drafts.rounds - before.rounds)
            self.metrics.counters["drafted_tokens"].inc(drafts.drafted - before.drafted)
            self.metrics.counters["accepted_tokens"].inc(drafts.accepted - before.accepted)
        self.generated = delta.generated
        self.drafts = drafts
        self.last = now
        if delta.finish_reason is not None:
            self.end(delta.finish_reason)

    def end(self, how: str) -> None:
        """Count how the answer ended. Only the first call counts."""
        if not self.has_ended:
            self.has_ended = True
            self.metrics.counters["texts"].labels(how).inc()
