"""Losses as mlx-lm computes them, in one process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from mlx_lm import load
from mlx_lm.tuner.datasets import CacheDataset, load_dataset
from mlx_lm.tuner.trainer import evaluate


def loss_in_mlx_lm(model: Path, adapters: Path | None, data: Path) -> float:
    """Return that of the test set, with adapters if there are any, and 64 tokens a row at most."""
    loaded, tokenizer = load(str(model), adapter_path=adapters and str(adapters))
    options = SimpleNamespace(data=str(data), train=False, test=True)
    _, _, test = load_dataset(options, tokenizer)
    loss = evaluate(loaded, CacheDataset(test), batch_size=4, num_batches=-1, max_seq_length=64)
    return float(loss)
