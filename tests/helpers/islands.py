"""Islands as threads, and the same training in a row."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from shardmlx.common.reporter import Listener, Reporter
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.crew import Crew
from shardmlx.islands import client, hub_api
from shardmlx.islands.client import Hub
from shardmlx.islands.store import PUBLISHED
from shardmlx.training.command import prepare_training, train_model
from shardmlx.training.report import StepResult
from shardmlx.training.run_worker import RunWorker
from shardmlx.training.trainer import Trainer
from shardmlx.training.worker import TrainWorker
from testbed.rows import write
from tests.helpers.island_hub import RunningHub
from tests.helpers.local_transport import LocalNetwork
from tests.helpers.models_and_batches import load_arrays

Options = Mapping[str, Any]
Islands = dict[str, dict[str, Any]]
Weights = dict[str, np.ndarray]


def weights_of(hub: RunningHub) -> Weights:
    """Return the weights that islands take."""
    found: Weights = {}
    for fragment in hub.rounds.run.fragments:
        data = fragment.path(PUBLISHED, fragment.version or 0).read_bytes()
        numbers, start = np.frombuffer(data, np.float32), 0
        for tensor in fragment.tensors:
            end = start + tensor.nbytes // 4
            found[tensor.name] = numbers[start:end].reshape(tensor.shape)
            start = end
    return found


def use_tokens(monkeypatch: pytest.MonkeyPatch, hub: RunningHub) -> None:
    """Let islands that are threads have tokens of their own; they would share an environment."""

    def of(cls: type[Hub], url: str, name: str, say: Any) -> Hub:
        return cls(url, hub.tokens[name], say)

    monkeypatch.setattr(Hub, "of", classmethod(of))
    monkeypatch.setattr(client, "PAUSES", (0.05, 0.1))
    monkeypatch.setattr(hub_api, "SECONDS_TO_LOOK", 0.02)


def islands_of(model: Path, directory: Path, count: int, **options: Any) -> Islands:
    """Return the options of so many islands, each with data of its own."""
    made: Islands = {}
    for number, name in enumerate(("ann", "bob", "cem", "dia")[:count]):
        rows = [{"text": f"{name} says {'hello ' * (i % 5 + number)}"} for i in range(12)]
        data = write(directory / f"data-{name}", train=rows, valid=rows[:4])
        made[name] = {
            "model": str(model),
            "data": data,
            "adapter_path": str(directory / f"out-{name}"),
            "batch_size": 2,
            "micro_batch_size": 1,
            "schedule": "1f1b",
            "val_batches": 1,
            "steps_per_report": 1,
            "pack": False,
            **options,
        }
    return made


def train_island(
    hub: RunningHub, name: str, options: Options, ranks: int, on_event: Listener
) -> None:
    config = TrainConfig.from_flat(**{**options, "island": hub.url, "name": name})
    LocalNetwork(ranks, timeout=60).run(lambda rank: train_model(config, rank, on_event=on_event))


def train_islands(
    hub: RunningHub, islands: Mapping[str, Options], ranks: Mapping[str, int]
) -> dict[str, list[tuple[str, Mapping[str, Any]]]]:
    """Train islands at a time, each on so many ranks, and return the events of each. They meet at
    their first validation, before any reports."""
    barrier = threading.Barrier(len(islands), timeout=60)
    events: dict[str, list[tuple[str, Mapping[str, Any]]]] = {name: [] for name in islands}

    def train(name: str) -> None:
        def listen(event: str, values: Mapping[str, Any]) -> None:
            events[name].append((event, values))
            if event == "val" and values["step"] == 1:
                barrier.wait()

        try:
            train_island(hub, name, islands[name], ranks.get(name, 1), listen)
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
        self._crews: dict[str, Crew[TrainWorker]] = {}
        self._trainers: dict[str, Trainer] = {}

        def simulate(transport: Any) -> None:
            reporter = Reporter(quiet=True)
            for name, options in islands.items():
                crew = Crew(transport, TrainWorker(transport, reporter))
                prepare_training(TrainConfig.from_flat(**options), crew, reporter)
                self._crews[name] = crew
                self._trainers[name] = Trainer(crew.part(RunWorker, "runs", 0))
                self._trainers[name].start()
            run(self)

        LocalNetwork(1, timeout=60).run(simulate)

    def step(self, name: str) -> None:
        """Make a step of an island, with its update."""
        trainer, crew = self._trainers[name], self._crews[name]
        orders = trainer.next_order()
        assert orders is not None, "there are steps left"
        pending = crew.begin(TrainWorker.step, [(0, orders[0])])
        trainer.take(StepResult(pending, 0))

    def weights(self, name: str) -> Weights:
        (stage,) = self._crews[name].worker.runs[0].run.stages
        return {each: np.array(stage.part[each]) for each in stage.names}

    def set(self, name: str, weights: Weights) -> None:
        (stage,) = self._crews[name].worker.runs[0].run.stages
        for each, array in weights.items():
            stage.part[each] = mx.array(array)


def alone(made: Mapping[str, dict[str, Any]], tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Return the options of the same islands, simulated: their last update is followed by a step
    that is never made."""
    return {
        name: {**each, "iters": each["iters"] + 1, "adapter_path": str(tmp_path / f"sim-{name}")}
        for name, each in made.items()
    }


def mean(differences: Mapping[str, np.ndarray], weights: Mapping[str, int]) -> np.ndarray:
    total = np.zeros_like(next(iter(differences.values())))
    for name in sorted(differences):
        total += differences[name] * np.float32(weights[name])
    return total / np.float32(sum(weights.values()))


def simulated(
    made: Mapping[str, dict[str, Any]],
    tmp_path: Path,
    outer: Callable[[str, np.ndarray, np.ndarray], np.ndarray],
    *,
    every: int,
    weights: Mapping[str, int] | None = None,
    elastic: float = 1.0,
) -> Weights:
    """Return the weights after all rounds of ``outer`` steps, of (name, weights, difference)."""
    theta: Weights = {}

    def run(simulation: Simulated) -> None:
        theta.update(simulation.weights("ann"))
        for step in range(1, made["ann"]["iters"] + 1):
            for name in made:
                if step == 1:
                    simulation.set(name, theta)
                simulation.step(name)
            if step % every == 0:
                local = {name: simulation.weights(name) for name in made}
                for tensor in theta:
                    found = {name: theta[tensor] - local[name][tensor] for name in made}
                    mix = mean(found, weights or dict.fromkeys(made, 1))
                    theta[tensor] = outer(tensor, theta[tensor], mix)
                for name, own in local.items():
                    merged = dict(theta)
                    if elastic != 1:
                        share = np.float32(elastic)
                        merged = {
                            each: own[each] + share * (theta[each] - own[each]) for each in own
                        }
                    simulation.set(name, merged)

    Simulated(alone(made, tmp_path), run)
    return theta


class Nesterov:
    def __init__(self) -> None:
        self._momentum: Weights = {}

    def __call__(self, name: str, weights: np.ndarray, mix: np.ndarray) -> np.ndarray:
        rate, share = np.float32(0.7), np.float32(0.9)
        momentum = share * self._momentum.get(name, np.zeros_like(weights)) + mix
        self._momentum[name] = momentum
        return np.asarray(weights - rate * (mix + share * momentum))


def saved(made: Mapping[str, dict[str, Any]], name: str) -> Weights:
    files = Path(made[name]["adapter_path"]).glob("[am]*.safetensors")
    return {each: np.array(array.astype(mx.float32)) for each, array in load_arrays(*files).items()}


def check_equal(found: Weights, expected: Weights) -> None:
    assert found.keys() >= expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
