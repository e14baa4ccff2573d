"""``shardmlx.pipeline.stage_map`` under the name that it had in 0.1; it goes with the next release."""

from shardmlx.pipeline.stage_map import Partition, StageMap, read_stage_map, write_stage_map

__all__ = ["Partition", "StageMap", "read_stage_map", "write_stage_map"]
