"""What mlx-lm says with the model that ``shardmlx.export`` writes."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.mpirun import mlx_lm
from tests.helpers.rank_pool import run_in_pool
from tests.helpers.shown import lacking

SAY = "--prompt", "What is the colour of the sea?", "--max-tokens", "24"


def export(model: Path, to: Path, *how: str | Path) -> Path:
    words = "-m", "shardmlx.export", model, "-o", to, *how
    job = run_in_pool(1, *words, "--verify", timeout=60.0).well()
    assert "tensors against the family llama: names, shapes, packing" in job.stdout
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
    fused = export(small, tmp_path / "fused", "--adapter-path", adapters)
    assert said(fused) == generated(small, "--adapter-path", adapters) != said(small)


def test_mlx_lm_says_with_a_model_of_4_bits_what_is_said_here(
    small: Path, adapters: Path, tmp_path: Path
) -> None:
    how = "--adapter-path", adapters, "--quantize", "4:32"
    packed = export(small, tmp_path / "packed", *how)
    assert said(packed) == generated(packed)
    again = run_in_pool(1, "-m", "shardmlx.export", small, "-o", packed, *how, timeout=60.0)
    assert again.failure(2) == f"shardmlx: error: -o {packed} holds a model: name a new directory"
