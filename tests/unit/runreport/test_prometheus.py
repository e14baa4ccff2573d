"""The newest numbers of a run, as prometheus_client itself reads them."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from shardmlx.runreport.metrics_file import MetricsFile
from shardmlx.runreport.prometheus import RunMetrics

STORY = Path(__file__).parents[2] / "helpers/story.jsonl"


def numbers(metrics: RunMetrics) -> dict[tuple[str, str], float]:
    """Return the gauges by name and rank."""
    return {
        (sample.name, sample.labels.get("rank", "")): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def test_gauges_are_the_newest_of_the_run() -> None:
    metrics = RunMetrics()
    assert numbers(metrics) == {}
    events = list(MetricsFile(STORY))
    for event in events:
        metrics.take(event["event"], event)
        if event["event"] == "start":
            assert numbers(metrics)["shardmlx_ended", ""] == 0
    last = next(event for event in reversed(events) if event["event"] == "train")
    found = numbers(metrics)
    assert found["shardmlx_train_loss", ""] == last["loss"]
    assert found["shardmlx_step", ""] == last["step"]
    assert found["shardmlx_iters", ""] == 60
    assert found["shardmlx_ended", ""] == 1
    for rank in last["ranks"]:
        number = str(rank["rank"])
        assert found["shardmlx_rank_idle_seconds", number] == rank["idle_seconds"]
        assert found["shardmlx_rank_peak_memory_bytes", number] == rank["peak_memory_bytes"]
