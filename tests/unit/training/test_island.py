"""Islands train alone, exchange their weights through a hub, and do what the formulas say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmlx.config.train import TrainConfig
from shardmlx.training.command import train_model
from tests.helpers.island_hub import RunningHub, running_hub
from tests.helpers.islands import Simulated, Weights, tokens, train_islands, weights_of
from tests.helpers.letters import write
from tests.helpers.local_transport import LocalNetwork
from tests.helpers.models_and_batches import load_arrays

__all__ = ["tokens"]

pytestmark = pytest.mark.usefixtures("limited_to_a_test")

NAMES = ("ann", "bob", "cem", "dia")
H, ROUNDS = 3, 2
LORA: dict[str, Any] = {"num_layers": -1, "learning_rate": 1e-2}
FULL: dict[str, Any] = {"fine_tune_type": "full", "num_layers": -1, "learning_rate": 1e-3}


@pytest.fixture
def islands(small: Path, tmp_path: Path) -> Callable[..., dict[str, dict[str, Any]]]:
    """Return the options of islands, each with data of its own."""

    def make(count: int, **options: Any) -> dict[str, dict[str, Any]]:
        made = {}
        for number, name in enumerate(NAMES[:count]):
            rows = [{"text": f"{name} says {'hello ' * (i % 5 + number)}"} for i in range(12)]
            data = write(tmp_path / f"data-{name}", train=rows, valid=rows[:4])
            made[name] = {
                "model": str(small),
                "data": data,
                "adapter_path": str(tmp_path / f"out-{name}"),
                "batch_size": 2,
                "micro_batch_size": 1,
                "schedule": "1f1b",
                "val_batches": 1,
                "iters": H * ROUNDS,
                "steps_per_report": 1,
                "pack": False,
                **options,
            }
        return made

    return make


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
    every: int = H,
    weights: Mapping[str, int] | None = None,
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
                for name in made:
                    simulation.set(name, theta)

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
    return {each: np.array(array) for each, array in load_arrays(*files).items()}


def check_equal(found: Weights, expected: Weights) -> None:
    assert found.keys() >= expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("count", "options"),
    [pytest.param(2, LORA, id="2, lora"), pytest.param(4, FULL, id="4, full")],
)
def test_diloco_is_the_simulation_to_the_bit(
    count: int,
    options: dict[str, Any],
    islands: Callable[..., dict[str, dict[str, Any]]],
    tokens: Callable[[RunningHub], None],
    tmp_path: Path,
) -> None:
    made = islands(count, **options)
    with running_hub(tmp_path / "hub", ",".join(made), inner_steps=H) as hub:
        tokens(hub)
        train_islands(hub, made, {"bob": 2})  # a pipeline
        assert hub.rounds.version == ROUNDS
        expected = simulated(made, tmp_path, Nesterov())
        check_equal(weights_of(hub), expected)
        for name in made:
            check_equal(saved(made, name), expected)


def test_fedavg_weighs_islands_by_their_rows(
    islands: Callable[..., dict[str, dict[str, Any]]],
    tokens: Callable[[RunningHub], None],
    tmp_path: Path,
) -> None:
    made = islands(2, **LORA)
    made["bob"]["batch_size"] = 4
    with running_hub(tmp_path / "hub", "ann,bob", inner_steps=H, mode="fedavg") as hub:
        tokens(hub)
        train_islands(hub, made, {})
        rows = {"ann": H * 2, "bob": H * 4}
        expected = simulated(made, tmp_path, lambda name, theta, mix: theta - mix, weights=rows)
        check_equal(weights_of(hub), expected)


def test_a_parameter_server_is_data_parallel(
    islands: Callable[..., dict[str, dict[str, Any]]],
    tokens: Callable[[RunningHub], None],
    tmp_path: Path,
) -> None:
    """Rows of one length weigh the same alone and together."""
    made = islands(2, optimizer="sgd", num_layers=-1, learning_rate=0.03)
    rows = {name: [{"text": f"{i} says {k}"} for i in (3, 8)] for k, name in enumerate(made)}
    for name, each in made.items():
        each["data"] = write(tmp_path / f"rows-{name}", train=rows[name], valid=rows[name])
    with running_hub(tmp_path / "hub", "ann,bob", mode="parameter-server") as hub:
        tokens(hub)
        train_islands(hub, made, {})
        assert hub.rounds.version == made["ann"]["iters"]
        found = weights_of(hub)
    both = [*rows["ann"], *rows["bob"]]
    whole = {**made["ann"], "batch_size": 4, "adapter_path": str(tmp_path / "whole")}
    whole["data"] = write(tmp_path / "both", train=both, valid=both)
    LocalNetwork(1).run(lambda rank: train_model(TrainConfig(**whole), rank))
    for name, array in saved({"whole": whole}, "whole").items():
        np.testing.assert_allclose(found[name], array, atol=1e-6, err_msg=name)


def test_async_takes_each_report_at_once(
    islands: Callable[..., dict[str, dict[str, Any]]],
    tokens: Callable[[RunningHub], None],
    tmp_path: Path,
) -> None:
    made = islands(2, **LORA)
    with running_hub(tmp_path / "hub", "ann,bob", inner_steps=H, mode="async") as hub:
        tokens(hub)
        train_islands(hub, made, {"ann": 2})
        assert hub.rounds.version == 2 * ROUNDS
        newest = weights_of(hub)
        is_newest = [
            all(np.array_equal(newest[each], array) for each, array in saved(made, name).items())
            for name in made
        ]
        assert any(is_newest)


@pytest.mark.parametrize("encoding", ["bfloat16", "int8", "top-k:0.1", "low-rank:2"])
def test_islands_that_send_less_have_the_hubs_weights_and_learn(
    encoding: str,
    islands: Callable[..., dict[str, dict[str, Any]]],
    tokens: Callable[[RunningHub], None],
    tmp_path: Path,
) -> None:
    made = islands(2, **LORA, iters=8 * H)
    options: dict[str, Any] = {"inner_steps": H, "encoding": encoding, "fragments": 2}
    with running_hub(tmp_path / "hub", "ann,bob", **options) as hub:
        tokens(hub)
        events = train_islands(hub, made, {"ann": 2})
        assert hub.rounds.version == 8
        newest = weights_of(hub)
    tensors = hub.rounds.run.fragments[1].fragment.tensors
    for name in made:
        check_equal(saved(made, name), {each.name: newest[each.name] for each in tensors})
        losses = [values["loss"] for event, values in events[name] if event == "train"]
        assert np.mean(losses[-3:]) < np.mean(losses[:3]) - 0.4
