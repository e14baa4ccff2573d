"""Attention and loss in pieces take less memory.

That they leave the losses as they are is in ``tests/unit/training/test_pieces.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.cgroups import memory_cgroups
from testbed.jobs import ranks_command
from testbed.runs import in_file
from testbed.small_models import small_directory
from tests.helpers.mpirun import mpirun

WHOLE = {"attention_chunk": "off", "loss_chunk": "off"}


@pytest.fixture
def long_run(small_tokenizer: Path, tmp_path: Path) -> list[str | Path]:
    model = small_directory(tmp_path / "model", small_tokenizer, max_position_embeddings=4096)
    text = " ".join(["The ship sails on"] * 700)
    for name in ("train", "valid"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{text}"}}\n' * 4)
    return [
        *("--model", model, "--data", tmp_path, "--max-seq-length", "2048", "--val-batches", "0"),
        *("--iters", "1", "--batch-size", "2", "--num-layers", "-1"),
        *("--adapter-path", tmp_path / "out", "--micro-batch-size", "1", "--recompute", "none"),
    ]


def test_long_sequences_fit_that_did_not(long_run: list[str | Path], tmp_path: Path) -> None:
    """Under the same limit: refused with pieces as the remedy, trained with them. Both ranks are in
    one memory cgroup, where the kernel ends who takes more."""
    nbytes = 720 << 20
    start = ("-m", "shardmlx.train", *long_run)
    with memory_cgroups(("both",), nbytes) as cgroups:
        both = cgroups["both"]
        whole = in_file(tmp_path / "whole.yaml", **WHOLE)
        line = mpirun(2, command=both.command(*ranks_command(2, *start, *whole))).failure(2)
        assert "the memory cgroup, shared by 2 ranks" in line
        assert "attention_chunk: auto and loss_chunk: auto" in line
        mpirun(2, command=both.command(*ranks_command(2, *start))).well()
        assert both.peak <= nbytes
