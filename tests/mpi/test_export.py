"""``shardmlx.export`` on two ranks, and what mlx-lm says with the model that comes out."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.models_and_batches import tensors
from tests.helpers.mpirun import mlx_lm
from tests.helpers.rank_pool import run_in_pool
from tests.helpers.shown import lacking

SAY = "--prompt", "What is the colour of the sea?", "--max-tokens", "24"


def export(ranks: int, model: Path, to: Path, *how: str | Path) -> Path:
    words = "-m", "shardmlx.export", model, "-o", to, *how
    job = run_in_pool(ranks, *words, "--verify", timeout=60.0).well()
    assert "tensors against the family llama: names, shapes, packing" in job.stdout
    if ranks == 1:
        here = {"smollm2": str(model), "pirate-4bit": str(to)}
        assert lacking("export.md", "fused", job.stdout, here) == set()
    return to


def generated(model: Path, *how: str | Path) -> str:
    words = "-m", "shardmlx.generate", "--model", model, *how, *SAY
    return run_in_pool(1, *words).answer.strip("\n")


def said(model: Path) -> str:
    return mlx_lm("--model", model, *SAY).strip("\n")


def test_mlx_lm_says_with_the_fused_model_what_was_said_with_its_adapters(
    small: Path, adapters: Path, tmp_path: Path
) -> None:
    fused = export(2, small, tmp_path / "fused", "--adapter-path", adapters)
    assert said(fused) == generated(small, "--adapter-path", adapters) != said(small)


def test_two_ranks_export_what_one_does_and_refuse_the_same(
    small: Path, adapters: Path, tmp_path: Path
) -> None:
    """A model of 4 bits, with which mlx-lm says what is said here."""
    how = "--adapter-path", adapters, "--quantize", "4:32"
    one, two = (export(number, small, tmp_path / str(number), *how) for number in (1, 2))
    assert tensors(one) == tensors(two)
    assert said(two) == generated(two)
    again = run_in_pool(2, "-m", "shardmlx.export", small, "-o", two, *how, timeout=60.0)
    assert again.failure(2) == f"shardmlx: error: -o {two} holds a model: name a new directory"
