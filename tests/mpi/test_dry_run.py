"""``train --dry-run``: the plan, the time and what would be written, and nothing else."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.helpers.mpirun import train_well


def test_a_dry_run_says_what_a_run_would_do_and_does_nothing(
    small: Path, pirate: Path, tmp_path: Path
) -> None:
    """Epochs are counted in steps of the data: 32 rows, of which four make a step."""
    (tmp_path / "hosts").write_text(f"{socket.gethostname()} slots=2  # flops=1T\n")
    before = set(tmp_path.iterdir())
    job = train_well(
        2,
        *("--model", small, "--data", pirate, "--num-layers", "4", "--epochs", "2.5", "--dry-run"),
        *("--hostfile", tmp_path / "hosts", "--adapter-path", tmp_path / "adapters"),
        *("--checkpoint-dir", tmp_path / "checkpoints", "--metrics-file", tmp_path / "metrics"),
    )
    lines = job.stdout.splitlines()
    assert "--epochs 2.5: 20 steps" in lines
    (header,) = (each for each in lines if "planned peak" in each)
    assert header.split() == ["rank", "host", "layers", "planned", "peak", "limit", "which", "is"]
    ranks = lines[lines.index(header) + 1 : lines.index(header) + 3]
    assert [each.split()[0] for each in ranks] == ["0", "1"]
    (time,) = (each for each in lines if each.startswith("Time of a step: "))
    assert "of 20 steps" in time
    assert "the FLOP/s of the hostfile, an estimate" in time
    assert f"Would write adapters to {tmp_path / 'adapters'}" in lines
    assert lines[-1] == "Dry run: nothing was loaded or written"
    assert set(tmp_path.iterdir()) == before


def test_without_mpirun_and_speeds_there_is_a_plan_too(small: Path, pirate: Path) -> None:
    job = train_well(1, "--model", small, "--data", pirate, "--num-layers", "4", "--dry-run")
    assert "Time of a step: not known: measure it with shardmlx profile" in job.stdout
