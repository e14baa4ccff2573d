"""Islands as threads, and the same training in a row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from shardmlx.common.reporter import Reporter
from shardmlx.config.train import TrainConfig
from shardmlx.islands import client, hub_api
from shardmlx.islands.client import Hub
from shardmlx.islands.store import PUBLISHED
from shardmlx.training.command import prepare_training, train_model
from shardmlx.training.trainer import Trainer
from tests.helpers.island_hub import RunningHub
from tests.helpers.local_transport import LocalNetwork

Options = Mapping[str, Any]
Weights = dict[str, np.ndarray]


def weights_of(hub: RunningHub) -> Weights:
    """Return the weights that islands take."""
    found: Weights = {}
    for fragment in hub.rounds.run.fragments:
        data = fragment.path(PUBLISHED, fragment.version or 0).read_bytes()
        numbers, start = np.frombuffer(data, np.float32), 0
        for tensor in fragment.fragment.tensors:
            end = start + tensor.nbytes // 4
            found[tensor.name] = numbers[start:end].reshape(tensor.shape)
            start = end
    return found


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> Callable[[RunningHub], None]:
    """Let islands that are threads have tokens of their own; they would share an environment."""

    def use(hub: RunningHub) -> None:
        def of(cls: type[Hub], url: str, name: str, say: Any) -> Hub:
            return cls(url, hub.tokens[name], say)

        monkeypatch.setattr(Hub, "of", classmethod(of))
        monkeypatch.setattr(client, "PAUSES", (0.05, 0.1))
        monkeypatch.setattr(hub_api, "SECONDS_TO_LOOK", 0.02)

    return use


def train_islands(
    hub: RunningHub, islands: Mapping[str, Options], ranks: Mapping[str, int], *, meet: bool = True
) -> dict[str, list[tuple[str, Mapping[str, Any]]]]:
    """Train islands at a time, each on so many ranks, and return the events of each. They ``meet``
    at their first validation, before any reports."""
    barrier = threading.Barrier(len(islands), timeout=60)
    events: dict[str, list[tuple[str, Mapping[str, Any]]]] = {name: [] for name in islands}

    def train(name: str) -> None:
        def listen(event: str, values: Mapping[str, Any]) -> None:
            events[name].append((event, values))
            if meet and event == "val" and values["step"] == 1:
                barrier.wait()

        config = TrainConfig(**{**islands[name], "island": hub.url, "name": name})
        network = LocalNetwork(ranks.get(name, 1), timeout=60)
        try:
            network.run(lambda rank: train_model(config, rank, on_event=listen))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(islands)) as pool:
        for _ in pool.map(train, islands):
            pass
    return events


class Simulated:
    """Islands that train in turn, in one process and without a hub."""

    def __init__(self, islands: Mapping[str, Options], run: Callable[[Simulated], None]) -> None:
        self._islands = islands

        def simulate(transport: Any) -> None:
            self._trainers = {
                name: Trainer(
                    prepare_training(TrainConfig(**options), transport, Reporter(quiet=True))
                )
                for name, options in islands.items()
            }
            self._runs = {name: trainer.steps() for name, trainer in self._trainers.items()}
            self._next = {name: run.send(None) for name, run in self._runs.items()}
            run(self)

        LocalNetwork(1, timeout=60).run(simulate)

    def step(self, name: str) -> None:
        """Make a step of an island, with its update."""
        step = self._next[name]
        (results,) = step.engine.train_steps([step])
        self._next[name] = self._runs[name].send(results)

    def weights(self, name: str) -> Weights:
        (stage,) = self._trainers[name]._job.stages
        return {each: np.array(stage.part[each]) for each in stage.names}

    def set(self, name: str, weights: Weights) -> None:
        (stage,) = self._trainers[name]._job.stages
        for each, array in weights.items():
            stage.part[each] = mx.array(array)
