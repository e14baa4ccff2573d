"""From a run's options to its mesh."""

import pytest

from shardmlx.errors import UserError
from shardmlx.pipeline.stage_map import Partition, StageMap
from shardmlx.planning.layout import make_mesh


def stage_map(*hosts: str) -> StageMap:
    return StageMap(Partition.from_sizes([1] * len(hosts)), tuple(range(len(hosts))), hosts)


def test_ranks_are_on_the_hosts_that_the_map_names() -> None:
    assert make_mesh(stage_map("Studio.local", "mini"), 2, ("studio", "Mini")).pp == 2
    with pytest.raises(UserError, match="wants rank 1 on host mini, but it runs on air"):
        make_mesh(stage_map("studio", "mini"), 2, ("studio", "air"))


def test_addresses_are_compared_whole() -> None:
    with pytest.raises(UserError, match=r"wants rank 1 on host 10\.0\.0\.2, but it runs on 10\.0"):
        make_mesh(stage_map("10.0.0.1", "10.0.0.2"), 2, ("10.0.0.1", "10.0.0.3"))
