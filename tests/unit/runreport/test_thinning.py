"""The reports of a long run that its page shows: extremes stay, and means are of all."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from shardmlx.runreport.live import EventLog
from shardmlx.runreport.metrics_file import MetricsFile
from shardmlx.runreport.page import render_page
from shardmlx.runreport.thinning import MOST, thinned
from tests.helpers.stories import write_metrics

START: dict[str, Any] = {"event": "start", "step": 0, "iters": 20_000}


def report(step: int, rng: random.Random, ranks: int = 2) -> dict[str, Any]:
    part = {
        "host": "mac.local",
        "step_seconds": rng.random(),
        "compute_seconds": rng.random(),
        "exposed_comm_seconds": rng.random(),
        "idle_seconds": rng.random(),
        "bubble": rng.random(),
        "peak_memory_bytes": 123456789,
        "active_memory_bytes": 12345678,
        "process_peak_bytes": 223456789,
    }
    return {
        "event": "train",
        "step": step,
        "loss": rng.random(),
        "tokens": 512,
        "tokens_per_second": rng.random(),
        "learning_rate": 1e-5,
        "grad_norm": rng.random(),
        "skipped": 0,
        "step_seconds": rng.random(),
        "bubble": 0.1,
        "shapes": 3,
        "ranks": [{"rank": rank, **part} for rank in range(ranks)],
    }


def run(reports: int, every: int = 1, ranks: int = 2) -> list[dict[str, Any]]:
    rng = random.Random(5)
    steps = range(every, every * reports + 1, every)
    return [{**START}, *(report(step, rng, ranks) for step in steps)]


def trains(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in events if each["event"] == "train"]


def mean_of(events: list[dict[str, Any]], rank: int, name: str) -> float:
    """What the page shows of a rank."""
    (gone,) = [each for each in events if each["event"] == "left_out"]
    (part,) = [each for each in gone["ranks"] if each["rank"] == rank]
    total = part[name] + sum(each["steps"] * each["ranks"][rank][name] for each in trains(events))
    steps = part[f"{name}_steps"] + sum(each["steps"] for each in trains(events))
    return float(total / steps)


def test_a_page_of_20_000_reports_has_some_2_000_and_3_mb_at_most() -> None:
    whole = run(20_000)
    shown = thinned(whole)
    assert MOST / 2 < len(trains(shown)) <= MOST
    assert len(render_page(whole, title="run")) < 3_000_000
    assert len(json.dumps(whole)) > 13_000_000
    (gone,) = [each for each in shown if each["event"] == "left_out"]
    assert gone["reports"] + len(trains(shown)) == 20_000


@pytest.mark.parametrize(("name", "extreme"), [
    ("loss", min), ("loss", max), ("grad_norm", max), ("step_seconds", max),
])  # fmt: skip
def test_extremes_of_the_run_and_of_each_of_its_tenths_stay(name: str, extreme: Any) -> None:
    whole = run(20_000)
    shown = thinned(whole)
    for first in range(0, 20_000, 2000):
        both = (
            [e[name] for e in trains(of) if first < e["step"] <= first + 2000]
            for of in (whole, shown)
        )
        assert extreme(next(both)) == extreme(next(both))
    assert [shown[0], trains(shown)[0]["step"], trains(shown)[-1]["step"]] == [START, 1, 20_000]


def test_means_are_of_all_steps_however_often_events_are_thinned() -> None:
    whole = run(5000, every=3)
    log = EventLog()
    for each in whole:
        log.add(each)
    for shown in (thinned(whole), thinned(log.events)):
        for name in ("compute_seconds", "idle_seconds"):
            expected = sum(each["ranks"][1][name] for each in trains(whole)) / 5000
            assert math.isclose(mean_of(shown, 1, name), expected, rel_tol=1e-9)
    assert len(log.events) <= 3 * MOST


def test_a_file_of_four_times_the_reports_takes_hardly_more_memory(tmp_path: Path) -> None:
    def peak(reports: int) -> int:
        rng = random.Random(5)
        told = ({"event": "train", "step": n, "loss": rng.random()} for n in range(reports))
        path = write_metrics(tmp_path / "metrics.jsonl", *told)
        tracemalloc.start()
        try:
            thinned(MetricsFile(path))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(16_000) <= 1.5 * peak(4000)


def test_of_many_ranks_fewer_reports_are_shown() -> None:
    shown = thinned(run(4000, ranks=16))
    assert len(trains(shown)) <= 500


def test_validations_and_checkpoints_are_thinned_too_and_other_events_stay() -> None:
    rng = random.Random(3)
    vals = [{"event": "val", "step": step, "loss": rng.random()} for step in range(1, 9001)]
    saves = [
        {"event": "checkpoint", "step": step, "exposed_seconds": rng.random()}
        for step in range(1, 9001)
    ]
    late = [{"event": "straggler", "step": 9000, "rank": 1}, {"event": "summary", "steps": 9000}]
    shown = thinned([START, *vals, *saves, *late])
    of_kind = {kind: [e for e in shown if e["event"] == kind] for kind in ("val", "checkpoint")}
    assert all(len(of_kind[kind]) <= MOST for kind in of_kind)
    assert min(vals, key=lambda each: float(str(each["loss"]))) in of_kind["val"]
    assert [each for each in shown if each in late] == late


def test_a_gap_where_no_loss_is_finite_stays_a_gap() -> None:
    whole = run(6000)
    for each in whole[3000:3500]:
        each["loss"] = None
    assert any(each["loss"] is None for each in trains(thinned(whole)))


def test_a_run_that_is_not_long_is_shown_as_it_is() -> None:
    whole = run(MOST)
    assert thinned(whole) == whole
