"""What a replica holds of divided weights, as the plan has it and as the engine does it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn
import pytest

from shardmlx.engine.divided_weights import DividedWeights
from shardmlx.modelfiles.parts import read_shape
from shardmlx.models.runtime.slice import Slice
from shardmlx.planning.memory.stages import held_once, stage_memory
from shardmlx.planning.memory.training_setup import TrainingSetup
from testbed.tiny_models import build, tiny_config
from tests.helpers.models_and_batches import with_adapters
from tests.helpers.stage_memory import weight_sizes
from tests.helpers.workloads import workload

LORA_LAYERS = 5
ADAPTERS: dict[str, Any] = {"rank": 4, "scale": 20.0, "dropout": 0.0}


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
    with_adapters(model, LORA_LAYERS, **ADAPTERS)
    return layers - LORA_LAYERS


def planned(model: nn.Module, members: int, what: str, ranges: Sequence[tuple[int, int]]) -> int:
    layers = len(model.layers)
    config = tiny_config(layers=layers, tied=not hasattr(model, "lm_head"))
    work = workload(
        read_shape(config),
        sizes=weight_sizes(model),
        fine_tune_type="lora" if what == "adapters" else "full",
        lora_parameters=ADAPTERS,
        num_layers=layers - trained(model, what),
        unfreeze_all=what == "all",
        zero=3,
    )
    setup = TrainingSetup(workload=work, rows=1, length=8, dp=members)
    stages = [stage_memory(setup, *ends) for ends in ranges]
    return sum(stage.weights for stage in stages) - held_once(stages)


def held(model: nn.Module, members: int, ranges: Sequence[tuple[int, int]]) -> int:
    most = []
    for member in range(members):
        parts = [Slice(model, *ends) for ends in ranges]
        most.append(DividedWeights(member, range(members), parts).nbytes(parts))
    return max(most)


@pytest.mark.parametrize("what", ["all", "upper half", "adapters"])
@pytest.mark.parametrize("members", [2, 3, 4])
@pytest.mark.parametrize(("layers", "tied"), [(12, False), (13, True)])
def test_the_plan_counts_what_the_fullest_replica_holds(
    layers: int, tied: bool, members: int, what: str
) -> None:
    model = build(tiny_config(layers=layers, tied=tied))
    expected = planned(model, members, what, [(0, layers)])
    # Planned is the replica that needs the most with its gradients, and the last norm goes with
    # the lm_head.
    assert held(model, members, [(0, layers)]) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("members", [2, 4])
@pytest.mark.parametrize(
    "ranges", [[(0, 4), (8, 12)], [(2, 4), (6, 8), (10, 11)], [(0, 3), (9, 12)]]
)
def test_stages_of_one_rank_share_their_room(ranges: list[tuple[int, int]], members: int) -> None:
    model = build(tiny_config(layers=12))
    expected = planned(model, members, "all", ranges)
    assert held(model, members, ranges) == pytest.approx(expected, rel=0.07)
