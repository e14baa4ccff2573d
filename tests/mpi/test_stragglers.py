"""A rank that becomes slow is named, and the layers can be divided by what was measured."""

from __future__ import annotations

from pathlib import Path

from shardmlx.pipeline.stage_map import Partition, StageMap, read_stage_map, write_stage_map
from tests.helpers.jobs import PROGRAMS
from tests.helpers.mpirun import events, mpirun, train_well
from tests.helpers.rank_pool import run_in_pool


def flags(model: Path, data: Path, tmp_path: Path, steps: int) -> list[str | Path]:
    flags: list[str | Path] = ["--model", model, "--data", data, "--val-batches", "0"]
    flags += ["--schedule", "1f1b", "--no-pack"]
    flags += ["--num-layers", "-1", "--micro-batch-size", "1", "--steps-per-report", "3"]
    flags += ["--iters", str(steps), "--adapter-path", tmp_path / "out"]
    return [*flags, "--metrics-file", tmp_path / "metrics.jsonl"]


def test_a_rank_that_becomes_slow_is_named_once(small: Path, pirate: Path, tmp_path: Path) -> None:
    job = run_in_pool(2, PROGRAMS / "slow_rank.py", "40", *flags(small, pirate, tmp_path, 27))
    assert job.returncode == 0, job.output
    (event,) = events(tmp_path / "metrics.jsonl", "straggler")
    assert event["rank"] == 1
    assert event["compute_seconds"] > 1.25 * event["expected_seconds"]
    (line,) = [line for line in job.stdout.splitlines() if "something slows it down" in line]
    assert line.startswith("warning: rank 1 on ")
    assert "were usual beside the others" in line


def test_the_map_that_the_measured_times_want(small: Path, pirate: Path, tmp_path: Path) -> None:
    """Rank 1 is so slow, from its first forward on, that the machine's load does not matter."""
    present = tmp_path / "present.yaml"
    write_stage_map(StageMap(Partition.from_sizes([1, 4]), (0, 1)), present)
    wanted = tmp_path / "wanted.yaml"
    same = flags(small, pirate, tmp_path, 6)
    rebalance: list[str | Path] = ["--stage-map", present, "--rebalance", wanted]
    job = run_in_pool(2, PROGRAMS / "slow_rank.py", "0", *same, *rebalance)
    assert job.returncode == 0, job.output
    assert f"{wanted}: layers " in job.stdout
    found = read_stage_map(wanted)
    assert 1 < found.partition.sizes[0] < 5
    train_well(2, *same, "--stage-map", wanted)


def test_a_map_that_cannot_be_written_is_found_before_the_run(
    small: Path, pirate: Path, tmp_path: Path
) -> None:
    job = mpirun(
        1, "-m", "shardmlx.train", *flags(small, pirate, tmp_path, 6), "--rebalance", tmp_path
    )
    assert job.returncode == 2
    assert "--rebalance" in job.error_lines[0]
