"""What cannot be saved: that of the save before stays, and the job ends by name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from shardmlx.checkpoint.store import Store
from tests.helpers.jobs import PROGRAMS
from tests.helpers.models_and_batches import load_weights
from tests.helpers.mpirun import mpirun, train, train_well


@pytest.fixture
def flags(small: Path, pirate: Path, tmp_path: Path) -> list[str | Path]:
    flags: list[str | Path] = ["--model", small, "--data", pirate, "--val-batches", "0"]
    flags += ["--schedule", "1f1b", "--no-pack"]
    flags += ["--iters", "9", "--steps-per-report", "1", "--adapter-path", tmp_path / "out"]
    flags += ["--num-layers", "-1", "--timeout", "3", "--checkpoint-every", "3"]
    return [*flags, "--metrics-file", tmp_path / "metrics.jsonl"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a few checkpoints."""
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


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_rank_is_lost_while_it_saves(how: str, flags: list[str | Path], tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    flags += ["--checkpoint-dir", store.directory]
    job = mpirun(2, PROGRAMS / "failing_save.py", how, *flags)
    assert job.returncode != 0
    assert len(job.error_lines) == 1, job.output
    assert "rank 1 on" in job.error_lines[0]
    assert sound_steps(store) == [3]
    job = train(2, *flags)
    assert job.returncode == 0, job.output
    assert "step-0000003: 6 of 9 steps are left" in job.stdout
    assert sound_steps(store) == [6, 9]
    assert not list(store.directory.glob("partial-*"))


@pytest.mark.parametrize("storage", ["shared", "rank0"])
def test_a_full_disk(
    storage: str, flags: list[str | Path], small_disk: Path, tmp_path: Path
) -> None:
    store = Store(small_disk / "checkpoints")
    flags += ["--checkpoint-dir", store.directory, "--checkpoint-storage", storage]
    job = train(2, *flags, "--iters", "1000", "--keep-checkpoints", "100")
    assert job.returncode == 1
    (line,) = job.error_lines
    assert "writing the checkpoint of step" in line
    assert f"to {store.directory}: the disk is full: free some of it" in line
    steps = sound_steps(store)
    assert steps
    # With room it goes on.
    for step in steps[:-1]:
        shutil.rmtree(store.path(step))
    last = steps[-1] + 1
    job = train(2, *flags, "--iters", str(last), "--keep-checkpoints", "1")
    assert job.returncode == 0, job.output
    assert f"step-{steps[-1]:07d}: 1 of {last} steps are left" in job.stdout


def test_saving_at_every_step_waits_for_itself(flags: list[str | Path], tmp_path: Path) -> None:
    store = Store(tmp_path / "checkpoints")
    flags += ["--checkpoint-dir", store.directory, "--keep-checkpoints", "100"]
    job = train(2, *flags, "--checkpoint-every", "1")
    assert job.returncode == 0, job.output
    assert sound_steps(store) == list(range(1, 10))


FULL = (
    r"shardmlx: failed: rank 0 on \S+, saving {path}: the disk is full \(\S+ [MK]iB are to be "
    r"written, and \S+ [KM]?i?B are free\): free some of it, or name another --adapter-path; what "
    "was there before is unchanged"
)


def test_adapters_that_find_the_disk_full(flags: list[str | Path], small_disk: Path) -> None:
    """Every step leaves a copy. The last of them are whole, and nothing stands half beside them."""
    out = small_disk / "out"
    job = train(2, *flags, "--iters", "1000", "--save-every", "1", "--adapter-path", out)
    assert job.returncode == 1
    (line,) = job.error_lines
    assert re.fullmatch(FULL.format(path=rf"{out}/(\d{{7}}_)?adapters.safetensors"), line)
    copies = sorted(out.glob("0*_adapters.safetensors"))
    assert len(copies) > 5
    assert {path.name for path in out.iterdir()} == {
        "adapter_config.json",
        "adapters.safetensors",
        *(path.name for path in copies),
    }
    whole = load_weights(out).keys()
    assert all(mx.load(str(path)).keys() == whole for path in copies)  # type: ignore[union-attr]
    # With room the next run saves there.
    copies[0].unlink()
    train_well(2, *flags, "--iters", "1", "--adapter-path", out)
