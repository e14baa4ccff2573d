"""Attention and loss in pieces under MPI: the same losses, less memory, and they may change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from testbed.cgroups import memory_cgroups
from testbed.jobs import ranks_command
from testbed.runs import events, in_file
from tests.helpers.mpirun import mpirun, train_well

WHOLE = {"attention_chunk": "off", "loss_chunk": "off"}
PIECES = {"attention_chunk": "auto", "loss_chunk": "counted"}


def run(
    directory: Path, name: str, pieces: dict[str, str], *more: str | Path
) -> list[dict[str, float]]:
    metrics = directory / f"{name}.jsonl"
    train_well(
        2,
        *("--iters", "2", "--batch-size", "4", "--micro-batch-size", "2", "--num-layers", "-1"),
        *("--learning-rate", "1e-3", "--steps-per-report", "1", "--schedule", "1f1b"),
        *("--metrics-file", metrics, "--adapter-path", directory / name, *more),
        *in_file(directory / f"{name}.yaml", **pieces),
    )
    return events(metrics, "train")


def losses(reports: list[dict[str, float]]) -> list[float]:
    return [report["loss"] for report in reports]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Data whose sequences are longer than a piece of attention."""
    texts = [" ".join(["The ship sails on"] * number) for number in (15, 20, 17, 12)]
    for name in ("train", "valid"):
        rows = "\n".join(json.dumps({"text": text}) for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(rows)
    return tmp_path


def test_the_loss_curve_is_that_without_pieces(small: Path, texts: Path, tmp_path: Path) -> None:
    given = ("--model", small, "--data", texts, "--val-batches", "1", "--pack")
    whole = run(tmp_path, "whole", WHOLE, *given, "--recompute", "none")
    validated = [event["loss"] for event in events(tmp_path / "whole.jsonl", "val")]
    ours = run(tmp_path, "pieces", PIECES, *given, "--recompute", "selective")
    assert losses(ours) == pytest.approx(losses(whole), rel=1e-5)
    assert losses(ours)[0] == pytest.approx(losses(whole)[0], rel=1e-6)
    found = [event["loss"] for event in events(tmp_path / "pieces.jsonl", "val")]
    assert found == pytest.approx(validated, rel=1e-5)


@pytest.fixture
def long_run(small: Path, tmp_path: Path) -> list[str | Path]:
    model = tmp_path / "model"
    shutil.copytree(small, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
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
