"""What an update takes, measured, beside what the cost model says of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import pytest

from shardmlx.config.checks import OPTIMIZERS
from shardmlx.config.specs import FineTune
from shardmlx.engine.buffers import UPDATE_BYTES
from shardmlx.engine.optimizer import Updater, build_optimizer
from shardmlx.engine.stage import Stage
from tests.helpers.stage_memory import before_others

UPDATES = 5
"""Updates of which the largest counts: on a busy machine MLX allocates less far ahead."""

WIDTH = 128
ROWS = {"self_attn.q_proj": 1, "self_attn.k_proj": 1, "self_attn.v_proj": 1, "self_attn.o_proj": 1}
ROWS |= {"mlp.gate_proj": 3, "mlp.up_proj": 3, "mlp.down_proj": 3}
SQUARE = {"self_attn.o_proj": 1}
FUSED = {"self_attn.qkv_proj": 1, "mlp.gate_up_proj": 8, "mlp.down_proj": 4}
LAYER = 4 * WIDTH**2 * sum(ROWS.values())
VOCABULARY = 64 * WIDTH
MATRIX = 4 * VOCABULARY * WIDTH
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "adafactor": {"relative_step": False, "beta_1": 0.9},
}


ALL_MINE = SimpleNamespace(
    divides=True, is_mine=lambda _: True, start_gather=lambda _: None, finish_gather=lambda: None
)
"""Shards as if replicas divided the optimizer, so that updates are made layer by layer."""


def shapes_of(layers: int, ends: int, of_layer: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    shapes = {
        f"model.layers.{layer}.{name}.weight": (rows * WIDTH, WIDTH)
        for layer in range(layers)
        for name, rows in of_layer.items()
    }
    return shapes | dict.fromkeys(["model.embed_tokens.weight"][:ends], (VOCABULARY, WIDTH))


@before_others()
def bytes_above_gradients(
    optimizer: str,
    layers: int,
    ends: int,
    piece_bytes: int = 0,
    of_layer: Mapping[str, int] = ROWS,
    shards: Any = None,
) -> int:
    """Return what an update takes above all gradients, of layers and matrices as large pieces where
    nothing else is said. Another before it makes the state."""
    shapes = shapes_of(layers, ends, of_layer)
    part = {name: mx.random.normal(shape) for name, shape in shapes.items()}
    stage = SimpleNamespace(names=list(reversed(shapes)), part=part, gradients={})
    made = build_optimizer(FineTune(optimizer=optimizer, optimizer_config=SETTINGS))
    updater = Updater(made, [cast(Stage, stage)], shards, piece_bytes=piece_bytes)
    most = 0
    for update in range(1 + UPDATES):
        # Gradients of matrices come transposed.
        stage.gradients |= {name: mx.random.normal(shape[::-1]).T for name, shape in shapes.items()}
        mx.eval(part, stage.gradients)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        updater.apply(0.5)
        mx.synchronize()
        if update > 0:
            most = max(most, mx.get_peak_memory() - before)
    return most


def planned_copies(optimizer: str, of_layer: Mapping[str, int]) -> float:
    facts = OPTIMIZERS[optimizer]
    alone = [facts.alone((rows * WIDTH, WIDTH)) * rows for rows in of_layer.values()]
    return max(facts.passing, max(alone) / sum(of_layer.values()))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_small_layers_together_take_no_more_than_a_bucket(optimizer: str) -> None:
    """Which the plan counts, or all gradients if they are less."""
    assert bytes_above_gradients(optimizer, 6, 0, UPDATE_BYTES) <= 6.2 * LAYER


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_layer_takes_the_copies_that_the_plan_counts(optimizer: str) -> None:
    copies = planned_copies(optimizer, FUSED)
    layer = 4 * WIDTH**2 * sum(FUSED.values())
    taken = bytes_above_gradients(optimizer, 1, 0, of_layer=FUSED) / layer
    assert copies - 1 < taken <= copies + 0.2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_layers_of_replicas_that_exchange_them_take_no_more(optimizer: str) -> None:
    copies = bytes_above_gradients(optimizer, 8, 0, shards=ALL_MINE) / LAYER
    assert copies <= planned_copies(optimizer, ROWS) + 0.2


@pytest.mark.parametrize("of_layer", [ROWS, SQUARE, FUSED], ids=["usual", "square", "fused"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_many_layers_take_no_more_than_the_plan_counts_for_one(
    optimizer: str, layers: int, of_layer: Mapping[str, int]
) -> None:
    layer = 4 * WIDTH**2 * sum(of_layer.values())
    taken = bytes_above_gradients(optimizer, layers, 0, of_layer=of_layer) / layer
    assert taken <= planned_copies(optimizer, of_layer) + 0.2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_matrix_at_an_end_takes_the_copies_that_the_plan_counts(optimizer: str) -> None:
    copies = bytes_above_gradients(optimizer, layers=0, ends=1) / MATRIX
    assert copies == pytest.approx(OPTIMIZERS[optimizer].passing_alone, abs=0.2)
