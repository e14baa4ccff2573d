"""The chosen device computes what the CPU computes, within rounding: ``pytest --device gpu``.

Without a GPU the CPU stands for it, so that these tests themselves are checked everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load

from shardmlx.compat import gpu_fuses_attention
from shardmlx.config.specs import NO_SAVINGS, Savings
from shardmlx.engine.batches import pack, split
from shardmlx.engine.stage import Stage
from shardmlx.models.runtime.slice import Slice
from testbed.family_configs import CONFIGS
from testbed.jobs import Job
from testbed.runs import events
from testbed.tiny_models import build, tiny_config
from testbed.undeclared_configs import UNDECLARED
from tests.helpers.models_and_batches import (
    Result,
    check_same,
    move_trained,
    random_batch,
    through_stages,
    with_adapters,
)
from tests.helpers.mpirun import train_well
from tests.helpers.rank_pool import run_in_pool

CLOSE = 1e-3
"""Most difference, relative to the largest entry: a GPU sums in another order, in fewer bits."""

PIECES = Savings(attention_chunk=12, loss_chunk=20, recompute="selective")

KINDS = {
    "attention": tiny_config(layers=2),
    "tied, biases": {**CONFIGS["qwen2"], "tie_word_embeddings": True},
    "windows, softcaps": CONFIGS["gemma2"],
    "sinks, experts": CONFIGS["gpt_oss"],
    "latent attention, groups of experts": CONFIGS["deepseek_v3"],
    "gated delta": UNDECLARED["qwen3_5"],
    "short convolutions": UNDECLARED["lfm2"],
    "Mamba 2": UNDECLARED["mamba2"],
}

DEVICE = mx.default_device()
"""The device under test, which tests/conftest.py has set."""


ON_CPU = mx.Device(mx.cpu) == DEVICE

CASES = [
    *((kind, NO_SAVINGS) for kind in (["attention"] if ON_CPU else KINDS)),
    *((kind, PIECES) for kind in KINDS),
]
"""Each kind of layer, whole and in pieces. A CPU is compared with itself, whole, once."""


def model_of(config: dict[str, Any], bits: int | None = None) -> nn.Module:
    """A model with the same weights wherever it is made: of ``bits``, with LoRA on all layers."""
    quantisation = {} if bits is None else {"quantization": {"group_size": 32, "bits": bits}}
    with mx.stream(mx.cpu):
        model = build(config | quantisation, seed=3)
        if bits is not None:
            move_trained(with_adapters(model))
        mx.eval(model.parameters())
    return model


def trained(
    model: nn.Module, device: mx.Device, savings: Savings, *, packs: bool = False
) -> Result:
    """Losses and gradients of two stages, which ``device`` computes."""
    batch = random_batch(2, longest=30)
    parts = pack(batch, 1) if packs else split(batch, dp=1, replica=0, micro_batch_rows=2)
    layers = len(model.layers)
    with mx.stream(device):
        return through_stages(
            model, [(0, layers // 2), (layers // 2, layers)], parts, savings=savings
        )


def check(ours: Result, theirs: Result) -> None:
    check_same(ours, theirs, CLOSE, CLOSE)


@pytest.mark.parametrize(
    ("kind", "savings"),
    CASES,
    ids=[f"{'in pieces' if savings == PIECES else 'whole'}-{kind}" for kind, savings in CASES],
)
def test_loss_and_gradients_of_each_kind_of_layer(kind: str, savings: Savings) -> None:
    model = model_of(KINDS[kind])
    check(trained(model, DEVICE, savings), trained(model, mx.Device(mx.cpu), NO_SAVINGS))


@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_of_quantised_layers(bits: int) -> None:
    model = model_of(KINDS["attention"], bits)
    check(trained(model, DEVICE, PIECES), trained(model, mx.Device(mx.cpu), NO_SAVINGS))


def test_packed_rows_are_padded_rows() -> None:
    model = model_of(KINDS["attention"])
    padded = trained(model, DEVICE, PIECES)
    check(trained(model, DEVICE, PIECES, packs=True), padded)


def test_a_compiled_stage_is_one_that_is_not() -> None:
    model = model_of(KINDS["attention"])
    batch = random_batch(2, longest=30)
    (microbatch,) = split(batch, dp=1, replica=0, micro_batch_rows=2)
    found = []
    for compiled in (True, False):
        stage = Stage(
            0,
            Slice(model, 0, len(model.layers)),
            needs_input_gradient=False,
            savings=NO_SAVINGS,
            compiled=compiled,
        )
        loss = stage.forward(0, microbatch, None, scale=1.0)
        stage.backward_weight(0)
        gradients = {name: np.array(array) for name, array in stage.gradients.items()}
        found.append(([float(np.array(loss))], gradients))
    check(*found)


@pytest.mark.skipif(
    ON_CPU or not mx.metal.is_available(),
    reason="MLX fuses the gradient of attention on Metal alone",
)
def test_attention_has_a_gradient_that_is_linear_in_memory() -> None:
    """Since MLX 0.32.4; where it fails, pieces of attention save what it would take."""
    assert gpu_fuses_attention()


on_ranks = pytest.mark.skipif(ON_CPU, reason="tests/mpi does it on a CPU")


def run(model: Path, data: Path, out: Path, *more: str | Path, ranks: int = 2) -> list[float]:
    """Losses of a run on ranks of this machine."""
    metrics = out / "metrics"
    train_well(
        ranks,
        *("--model", model, "--data", data, "--adapter-path", out, "--metrics-file", metrics),
        *("--num-layers", "-1", "--batch-size", "4", "--learning-rate", "1e-2", "--iters", "8"),
        *("--steps-per-report", "1", "--val-batches", "0", "--schedule", "1f1b"),
        *more,
    )
    return [each["loss"] for each in events(metrics, "train")]


def answer(n: int, model: Path, *more: str | Path) -> Job:
    flags = ("--prompt", "Ahoy", "--max-tokens", "12", "--temp", "0", "--no-verbose")
    return run_in_pool(n, "-m", "shardmlx.generate", "--model", model, *flags, *more)


@on_ranks
def test_two_ranks_learn_resume_and_answer_as_one(
    small: Path, pirate: Path, tmp_path: Path
) -> None:
    saved = ("--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-every", "4")
    whole = run(small, pirate, tmp_path / "whole", *saved)
    assert whole[-1] < whole[0]
    step = tmp_path / "checkpoints" / "step-0000004"
    resumed = run(small, pirate, tmp_path / "again", *saved, "--resume", step)
    assert resumed == pytest.approx(whole[4:], rel=CLOSE)
    one = answer(1, small, "--adapter-path", tmp_path / "whole")
    two = answer(2, small, "--adapter-path", tmp_path / "whole")
    assert one.returncode == two.returncode == 0, two.output
    assert one.stdout == two.stdout != ""


@on_ranks
def test_mlx_lm_loads_what_is_exported(small: Path, pirate: Path, tmp_path: Path) -> None:
    run(small, pirate, tmp_path / "out")
    fused = tmp_path / "fused"
    flags = ("--adapter-path", tmp_path / "out", "--output-dir", fused)
    run_in_pool(1, "-m", "shardmlx.export", small, *flags).well()
    model, *_ = load(str(fused))
    tokens = mx.array([[3, 4, 5]])
    adapted, *_ = load(str(small), adapter_path=str(tmp_path / "out"))
    expected = np.array(adapted(tokens).astype(mx.float32))
    found = np.array(model(tokens).astype(mx.float32))
    assert np.abs(found - expected).max() < CLOSE * np.abs(expected).max()
