"""A rank that becomes slow is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from testbed.jobs import Job
from testbed.runs import events
from tests.helpers.programs import PROGRAMS
from tests.helpers.rank_pool import run_in_pool


def flags(model: Path, data: Path, tmp_path: Path, steps: int) -> list[str | Path]:
    flags: list[str | Path] = ["--model", model, "--data", data, "--val-batches", "0"]
    flags += ["--schedule", "1f1b", "--no-pack"]
    flags += ["--num-layers", "-1", "--micro-batch-size", "1", "--steps-per-report", "3"]
    flags += ["--iters", str(steps), "--adapter-path", tmp_path / "out"]
    return [*flags, "--metrics-file", tmp_path / "metrics.jsonl"]


def of_rank_1(directory: Path) -> dict[str, Any]:
    """Return the one straggler that rank 1 is said to be. On a busy machine the other rank may be
    slow for a moment, too."""
    found = events(directory / "metrics.jsonl", "straggler")
    (event,) = [each for each in found if each["rank"] == 1]
    return event


def lines_of_rank_1(job: Job) -> list[str]:
    return [each for each in job.stdout.splitlines() if each.startswith("warning: rank 1 on ")]


@pytest.mark.parametrize(
    ("stages", "remedy"), [("1", "give --replica-rows 3,1"), ("2", "measure the machines with")]
)
def test_one_that_is_slow_from_its_first_step_is_named_with_what_to_do(
    stages: str, remedy: str, small: Path, pirate: Path, tmp_path: Path
) -> None:
    layout = "--pipeline-stages", stages
    job = run_in_pool(
        2, PROGRAMS / "slow_rank.py", "0", *flags(small, pirate, tmp_path, 18), *layout
    ).well()
    event = of_rank_1(tmp_path)
    assert event["step"] <= 18
    assert event["compute_seconds"] > 1.25 * event["expected_seconds"]
    (line,) = [line for line in lines_of_rank_1(job) if "would keep up with the other" in line]
    assert remedy in line


def test_a_rank_that_becomes_slow_is_named_once(small: Path, pirate: Path, tmp_path: Path) -> None:
    job = run_in_pool(
        2, PROGRAMS / "slow_rank.py", "40", *flags(small, pirate, tmp_path, 27)
    ).well()
    event = of_rank_1(tmp_path)
    assert event["compute_seconds"] > 1.25 * event["expected_seconds"]
    (line,) = lines_of_rank_1(job)
    # On a busy machine it may have been slow beside the other stage for a report before.
    assert re.search("the others, as it did at first: .*slows it down|other stages, layer by", line)
