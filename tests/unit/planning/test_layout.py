"""From a run's options to its mesh, and to the stages that are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.loading.build import build_model
from shardmlx.modelfiles.model_files import open_model
from shardmlx.models.runtime.slice import Slice
from shardmlx.pipeline.stage_map import Partition, StageMap
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.layout import make_mesh, trainable_stages
from testbed.tiny_models import save_model_directory, tiny_config

SIZES = ([8], [4, 4], [1, 3, 4], [2, 2, 2, 2])


def stage_map(*hosts: str) -> StageMap:
    return StageMap(Partition.from_sizes([1] * len(hosts)), tuple(range(len(hosts))), hosts)


def test_ranks_are_on_the_hosts_that_the_map_names() -> None:
    assert make_mesh(stage_map("Studio.local", "mini"), 2, ("studio", "Mini")).pp == 2
    with pytest.raises(UserError, match="wants rank 1 on host mini, but it runs on air"):
        make_mesh(stage_map("studio", "mini"), 2, ("studio", "air"))


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": -1},
        {"num_layers": 3},
        {"num_layers": 4, "fine_tune_type": "dora"},
        {"num_layers": 1, "fine_tune_type": "full"},
        {"num_layers": 5, "fine_tune_type": "full"},
        {"num_layers": 2, "fine_tune_type": "full", "unfreeze_all": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_stage_is_trained_in_the_plan_if_its_slice_has_trained_weights(
    options: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    """What planning knows from the headers alone is what is found once the model is built."""
    save_model_directory(tmp_path, tiny_config(layers=8, tied=tied))
    run = TrainConfig.from_flat(model=str(tmp_path), **options).spec
    workload = Workload.of(open_model(run.model), run.fine_tune, run.batch)
    model, _ = build_model(tmp_path, run.fine_tune, 0, None)
    for sizes in SIZES:
        stage_map = StageMap.from_sizes(sizes)
        slices = [Slice(model, *ends) for ends in stage_map.partition.ranges]
        found = tuple(bool(part.trainable) for part in slices)
        assert trainable_stages(workload, stage_map) == found
