"""Write the events of a run for TensorBoard, with tensorboardX. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardmlx.common.units import GIB
from shardmlx.compat import EventFile
from shardmlx.config.objective import MEANS

_SETS = {"train": "training", "val": "validation", "test": "test"}
"""Data set of an event, by its name in TensorBoard."""

_OF_A_REPORT = ("learning_rate", "grad_norm", "tokens_per_second", "step_seconds", "bubble")
"""Fields of a report of training."""

_OF_A_RANK = ("compute_seconds", "exposed_comm_seconds", "idle_seconds")


class TensorBoardLog:
    """A run's event files in ``tensorboard`` beside its adapters, written once it begins."""

    def __init__(self, adapter_path: str) -> None:
        self._directory = Path(adapter_path) / "tensorboard"
        self._file: EventFile | None = None
        self._step = 0

    def take(self, event: str, values: Mapping[str, Any]) -> None:
        """Write an event: a listener of ``Reporter``."""
        if self._file is None:
            self._file = EventFile(self._directory)
        self._step = values.get("step", self._step)
        if event == "resume":
            self._file.begin_again(self._step + 1, values["time"])
        for summary in _summaries(event, values):
            self._file.write(summary, self._step, values["time"])
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _summaries(event: str, values: Mapping[str, Any]) -> Iterator[Any]:
    from tensorboardX.summary import scalar, text

    if event == "start":
        options = values["options"].items()
        # In code, no value is markup.
        rows = (f"| {name} | `{str(value).replace('`', ' ')}` |" for name, value in options)
        yield text("options", "\n".join(["| option | value |", "|---|---|", *rows]))
    elif event in _SETS:
        for name in ("loss", *MEANS):
            if values.get(name) is not None:
                yield scalar(f"{name}/{_SETS[event]}", values[name])
    if event == "train":
        for name in _OF_A_REPORT:
            if values[name] is not None:
                yield scalar(name, values[name])
        for each in values["ranks"]:
            rank = f"rank_{each['rank']}"
            for name in _OF_A_RANK:
                yield scalar(f"{rank}/{name}", each[name])
            yield scalar(f"{rank}/peak_memory_gib", each["peak_memory_bytes"] / GIB)
