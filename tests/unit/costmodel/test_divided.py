"""What a replica holds of divided weights, as the plan has it and as the engine does it."""

from __future__ import annotations

import mlx.nn as nn
import pytest
from mlx_lm.tuner.utils import linear_to_lora_layers

from shardmlx.costmodel.memory import TrainingSetup, stage_memory
from shardmlx.engine.divided_weights import DividedWeights
from shardmlx.models.shape import ModelShape
from shardmlx.models.slice import Slice
from tests.helpers.models_and_batches import build, tiny_config
from tests.helpers.stage_memory import weight_sizes

LORA_LAYERS = 5


def trained(model: nn.Module, what: str) -> int:
    """Unfreeze what is trained, and return the first layer that is."""
    layers = len(model.layers)
    if what == "all":
        return 0
    model.freeze()
    if what == "upper half":
        for layer in model.layers[layers // 2 :]:
            layer.unfreeze()
        return layers // 2
    parameters = {"rank": 4, "scale": 20.0, "dropout": 0.0}
    linear_to_lora_layers(model, LORA_LAYERS, parameters)
    return layers - LORA_LAYERS


@pytest.mark.parametrize("what", ["all", "upper half", "adapters"])
@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize(("layers", "tied"), [(12, False), (13, True)])
def test_the_plan_counts_what_the_fullest_replica_holds(
    layers: int, tied: bool, members: int, what: str
) -> None:
    config = tiny_config(layers=layers, tied=tied)
    model = build(config)
    first = trained(model, what)
    parts = [Slice(model, 0, layers)]
    held = []
    for member in range(members):
        weights = DividedWeights(member, range(members), [Slice(model, 0, layers)])
        held.append(weights.nbytes(parts))
    setup = TrainingSetup(
        shape=ModelShape.from_config(config),
        weight_sizes=weight_sizes(model),
        dtype_bytes=4,
        rows=1,
        length=8,
        fine_tune_type="lora" if what == "adapters" else "full",
        lora_rank=4,
        first_trained_layer=first,
        unfreeze_all=what == "all",
        dp=members,
        divides_optimizer=True,
        divides_weights=True,
    )
    planned = stage_memory(setup, 0, layers).weights
    # Planned is the replica that needs the most with its gradients, and the last norm goes with
    # the lm_head.
    assert 0.98 * planned <= max(held) <= 1.02 * planned


def test_two_replicas_need_room_for_one_layer_in_all() -> None:
    """Each owns about a half of the matrices of even layers, and the other half of odd ones."""
    model = build(tiny_config(layers=16))
    model.freeze()
    part = Slice(model, 0, 16)
    weights = DividedWeights(0, (0, 1), [part])
    layer, end = Slice(model, 1, 2).nbytes, model.lm_head.weight.nbytes
    room = weights.nbytes([part]) - sum(
        part[name].nbytes for name in part.parameters() if weights.is_mine(name)
    )
    assert room == pytest.approx(layer + end, rel=0.05)
