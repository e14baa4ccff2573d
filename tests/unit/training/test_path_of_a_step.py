"""A micro-batch passes through few files, and never back up, on its way to a stage."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from shardmlx.config.train import TrainConfig
from shardmlx.distributed.transport import Transport
from shardmlx.engine.batches import split
from shardmlx.engine.stage import Stage
from shardmlx.training.command import train_model
from shardmlx.training.rows import rows_of_ranks
from tests.helpers.local_transport import LocalNetwork
from tests.helpers.sources import ROOT

STOPS = {each.__code__: each.__name__ for each in (rows_of_ranks, split, Stage.forward)}
"""Functions that have a micro-batch in their hands: as rows of a batch, cut out, and computed."""

LOOP = "shardmlx/training/train.py"
"""The file whose loop asks for a step."""


def way_to(frame: FrameType | None) -> list[str]:
    """Return the project's files from the loop to a call, as they call each other."""
    files = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and "tests" not in path.parts:
            files.append(path.relative_to(ROOT).as_posix())
        frame = frame.f_back
    files.reverse()
    return [file for file, _ in groupby(files[files.index(LOOP) :])]


def ways(config: TrainConfig) -> dict[str, list[str]]:
    """Return the way to each stop in a run of one rank."""
    found: dict[str, list[str]] = {}

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in STOPS:
            found.setdefault(STOPS[frame.f_code], way_to(frame))

    def work(transport: Transport) -> None:
        sys.setprofile(hook)
        try:
            train_model(config, transport)
        finally:
            sys.setprofile(None)

    LocalNetwork(1, timeout=60).run(work)
    return found


@pytest.mark.usefixtures("limited_to_a_test")
def test_a_micro_batch_passes_through_few_files_and_never_back_up(
    small: Path, pirate: Path, tmp_path: Path
) -> None:
    config = TrainConfig.from_flat(
        model=str(small),
        data=str(pirate),
        adapter_path=str(tmp_path / "out"),
        num_layers=-1,
        batch_size=2,
        micro_batch_size=1,
        max_seq_length=32,
        iters=1,
        val_batches=0,
        pack=False,
    )
    found = ways(config)
    assert found.keys() == {*STOPS.values()}
    for way in found.values():
        assert len(set(way)) == len(way), "it comes back to a file that it has left"
    passed = {file for way in found.values() for file in way}
    assert len(passed) <= 11, passed
