"""Divide decoder layers into stages, and put each stage on a pipeline rank. No MLX, no MPI."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from shardmlx.common.yaml_reader import check_keys, read_yaml
from shardmlx.errors import UserError, file_access


@dataclass(frozen=True, slots=True)
class Partition:
    """Contiguous half-open layer ranges in pipeline order: every layer once, no empty stage.

    Raises ``ValueError`` when built from anything else.
    """

    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        starts, ends = ([each[i] for each in self.ranges] for i in (0, 1))
        if not starts or starts != [0, *ends[:-1]] or min(self.sizes) < 1:
            raise ValueError(
                f"the ranges of layers {self.ranges} leave some out, or none for a stage"
            )

    @classmethod
    def from_sizes(cls, sizes: Iterable[int]) -> Partition:
        """Return the partition whose stages have these numbers of layers."""
        return cls(tuple(pairwise(accumulate(sizes, initial=0))))

    @property
    def num_layers(self) -> int:
        return self.ranges[-1][1]

    @property
    def num_stages(self) -> int:
        return len(self.ranges)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Layers in each stage."""
        return tuple(end - start for start, end in self.ranges)


@dataclass(frozen=True, slots=True)
class StageMap:
    """A partition with the pipeline rank, and perhaps the host, of each of its stages.

    ``placement`` and ``hosts`` have one entry a stage, in pipeline order; several stages may be on
    one rank. ``model`` and ``hosts`` are those that the map was written for, to be checked unless
    they are None. ``path`` is the file it was read from. Raises ``UserError`` if ranks are left
    out, or if one rank has stages on several hosts.
    """

    partition: Partition
    placement: tuple[int, ...]
    hosts: tuple[str | None, ...] = ()
    model: str | None = None
    path: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.hosts:
            object.__setattr__(self, "hosts", (None,) * self.num_stages)
        for what, entries in (("ranks", self.placement), ("hosts", self.hosts)):
            if len(entries) != self.num_stages:
                raise ValueError(f"{len(entries)} {what} for {self.num_stages} stages")
        if min(self.placement) < 0:
            raise ValueError(f"a stage on rank {min(self.placement)}")
        missing = sorted(set(range(max(self.placement) + 1)) - set(self.placement))
        if missing:
            raise UserError(
                f"{self}: no stage is on rank {missing[0]}, but one is on rank "
                f"{max(self.placement)}",
                "number the ranks from 0 without holes",
            )
        for rank in range(self.pp):
            names = {self.hosts[stage] for stage in self.stages_of(rank)} - {None}
            if len(names) > 1:
                raise UserError(
                    f"{self}: the stages of rank {rank} are on different hosts, "
                    f"{' and '.join(sorted(map(str, names)))}: a rank runs on one host"
                )

    @classmethod
    def from_sizes(cls, sizes: Iterable[int], placement: Iterable[int] | None = None) -> StageMap:
        """Return the map of stages with these numbers of layers, by default one on each rank."""
        partition = Partition.from_sizes(sizes)
        ranks = range(partition.num_stages) if placement is None else placement
        return cls(partition, tuple(ranks))

    def __str__(self) -> str:
        return f"stage map {self.path}" if self.path else "stage map"

    @property
    def num_stages(self) -> int:
        return self.partition.num_stages

    @property
    def pp(self) -> int:
        """Number of pipeline ranks."""
        return max(self.placement) + 1

    @property
    def virtual(self) -> int:
        """Number of stages on each rank. Raises ``UserError`` if the ranks have unequal numbers."""
        counts = [len(self.stages_of(rank)) for rank in range(self.pp)]
        if len(set(counts)) > 1:
            each = ", ".join(f"rank {rank} has {count}" for rank, count in enumerate(counts))
            raise UserError(f"{self}: unequal numbers of stages: {each}", "give every rank as many")
        return counts[0]

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank runs, ascending."""
        return tuple(stage for stage, rank in enumerate(self.placement) if rank == pipeline_rank)

    def host_of(self, pipeline_rank: int) -> str | None:
        """Return the host that the map names for a pipeline rank; None if it names none."""
        names = (self.hosts[stage] for stage in self.stages_of(pipeline_rank))
        return next((name for name in names if name is not None), None)

    def check_layers(self, num_layers: int) -> None:
        """Raise ``UserError`` unless the map divides a model of that many layers."""
        mapped = self.partition.num_layers
        if mapped != num_layers:
            sizes = " + ".join(map(str, self.partition.sizes))
            raise UserError(
                f"{self} divides {mapped} layers ({sizes}), but the model has {num_layers}",
                f"make its num_layers add up to {num_layers}",
            )

    def check_model(self, model: str, num_layers: int) -> None:
        """Raise ``UserError`` unless the map is for that model, of that many layers."""
        self.check_layers(num_layers)
        if self.model is not None and os.path.expanduser(self.model) != model:
            raise UserError(
                f"{self} is for the model {self.model}, not for {model}",
                "use a map of your model, or take the line out",
            )

    def check_pipeline(self, pipeline_stages: int | None) -> None:
        """Raise ``UserError`` if the command line was given another number than the map has."""
        if pipeline_stages not in (None, self.pp):
            raise UserError(
                f"--pipeline-stages is {pipeline_stages}, but {self} has {self.pp}",
                "leave --pipeline-stages out",
            )


def write_stage_map(stage_map: StageMap, path: str | Path) -> None:
    """Write the map as YAML, which ``read_stage_map`` reads. Raises ``UserError``."""
    # JSON strings are YAML strings, whatever they contain.
    lines = [f"model: {json.dumps(stage_map.model)}"] if stage_map.model is not None else []
    lines.append("stages:")
    stages = zip(stage_map.partition.ranges, stage_map.placement, stage_map.hosts, strict=True)
    for (start, end), rank, host in stages:
        layers = f"layer {start}" if end == start + 1 else f"layers {start}-{end - 1}"
        lines.append(f"  - num_layers: {end - start}  # {layers}")
        lines.append(f"    rank: {rank}")
        if host is not None:
            lines.append(f"    host: {json.dumps(host)}")
    with file_access("write", path):
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_stage_map(path: str | Path) -> StageMap:
    """Read a stage map. Raises ``UserError``, which names file, stage (from 0) and value.

    The file has ``stages``, a list with ``num_layers`` and perhaps ``rank`` and ``host`` in each
    entry, and perhaps ``model``. Ranks are given for every stage or for none: then in order.
    """
    content = read_yaml(path)
    where = f"stage map {path}"
    check_keys(content, ("model", "stages"), where, "it has stages, and perhaps model")
    stages = content.get("stages")
    if not isinstance(stages, list) or not stages:
        raise UserError(
            f"{where}: stages is {stages!r}", "list one '- num_layers: N' for each stage"
        )
    for i, entry in enumerate(stages):
        _check_entry(entry, f"{where}, stage {i}")
    ranks = [entry.get("rank") for entry in stages]
    has_ranks = any(rank is not None for rank in ranks)
    if has_ranks and None in ranks:
        raise UserError(
            f"{where}, stage {ranks.index(None)}: no rank, but other stages have one",
            "give every stage a rank, or none",
        )
    return StageMap(
        partition=Partition.from_sizes(entry["num_layers"] for entry in stages),
        placement=tuple(ranks if has_ranks else range(len(stages))),
        hosts=tuple(entry.get("host") for entry in stages),
        model=_text(content, "model", where),
        path=str(path),
    )


def _check_entry(entry: Any, where: str) -> None:
    if not isinstance(entry, dict):
        raise UserError(f"{where} is {entry!r}", "write '- num_layers: N'")
    known = ("num_layers", "rank", "host")
    check_keys(entry, known, where, "a stage has num_layers, rank and host")
    if "num_layers" not in entry:
        raise UserError(f"{where}: no num_layers", "write how many layers the stage has")
    _check_whole(entry, "num_layers", 1, where)
    _check_whole(entry, "rank", 0, where)
    _text(entry, "host", where)


def _check_whole(entry: dict[str, Any], key: str, minimum: int, where: str) -> None:
    value = entry.get(key, minimum)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise UserError(f"{where}: {key} is {value!r}", f"give a whole number from {minimum}")


def _text(entry: dict[str, Any], key: str, where: str) -> str | None:
    value = entry.get(key)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: {key} is {value!r}", "give a name")
    return value
