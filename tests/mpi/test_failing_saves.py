"""What cannot be saved: that of the save before stays, and the job ends by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmlx.checkpoint.store import Store
from testbed.jobs import AFTER_A_KILL
from testbed.runs import in_file
from tests.helpers.mpirun import mpirun, train, train_well
from tests.helpers.programs import PROGRAMS


@pytest.fixture
def flags(small: Path, pirate: Path, tmp_path: Path) -> list[str | Path]:
    return [
        *("--model", small, "--data", pirate, "--val-batches", "0", "--schedule", "1f1b"),
        *("--iters", "9", "--steps-per-report", "1", "--adapter-path", tmp_path / "out"),
        *("--num-layers", "-1", "--timeout", "15", "--checkpoint-every", "3", "--no-pack"),
        *("--metrics-file", tmp_path / "metrics.jsonl"),
    ]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("a small file system is mounted by root on Linux only")
    path = tmp_path / "disk"
    path.mkdir()
    mount: list[str | Path] = ["mount", "-t", "tmpfs", "-o", "size=2m", "shardmlx", path]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small file system: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


def sound_steps(store: Store) -> list[int]:
    steps = store.steps()
    for step in steps:
        assert [store.fault(step, file) for file in store.manifest(step).files] == [None] * 4
    return steps


def test_a_rank_is_lost_while_it_saves(flags: list[str | Path], tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    flags += ["--checkpoint-dir", store.directory]
    line = mpirun(2, PROGRAMS / "failing_save.py", *flags).failure(*AFTER_A_KILL)
    assert "rank 1 on" in line
    assert sound_steps(store) == [3]
    job = train_well(2, *flags)
    assert "step-0000003: 6 of 9 steps are left" in job.stdout
    assert sound_steps(store) == [6, 9]
    assert not list(store.directory.glob("partial-*"))


def test_a_full_disk(flags: list[str | Path], small_disk: Path, tmp_path: Path) -> None:
    store = Store(small_disk / "checkpoints")
    flags += ["--checkpoint-dir", store.directory]
    many = in_file(tmp_path / "many", keep_checkpoints=100)
    line = train(2, *flags, "--iters", "1000", *many).failure(1)
    assert "writing the checkpoint of step" in line
    assert f"to {store.directory}: the disk is full: free some of it" in line
    steps = sound_steps(store)
    assert steps
    # With room it goes on.
    for step in steps[:-1]:
        shutil.rmtree(store.path(step))
    last = steps[-1] + 1
    one = in_file(tmp_path / "one", keep_checkpoints=1)
    job = train_well(2, *flags, "--iters", str(last), *one)
    assert f"step-{steps[-1]:07d}: 1 of {last} steps are left" in job.stdout
