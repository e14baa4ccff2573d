"""Re-export ``shardmlx.pipeline.stage_map``, as version 0.1 named it, for one more release."""

from shardmlx.pipeline.stage_map import Partition, StageMap, read_stage_map, write_stage_map

__all__ = ["Partition", "StageMap", "read_stage_map", "write_stage_map"]
