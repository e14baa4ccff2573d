"""An optimizer's state can be kept and gone on from: the same updates follow, to the bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from shardmlx.config.checks import OPTIMIZERS
from shardmlx.config.specs import FineTune
from shardmlx.engine.optimizer import (
    Updater,
    build_optimizer,
)
from shardmlx.engine.stage import Stage, layer_of
from shardmlx.errors import UserError
from shardmlx.models.runtime.slice import Slice
from tests.helpers.checkpoints import Bytes, as_bytes
from tests.helpers.models_and_batches import tiny_model

LAYERS = 3
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "adam": {"bias_correction": True},
    "adamw": {"weight_decay": 0.1},
    "muon": {},
    "sgd": {"momentum": 0.9, "nesterov": True, "dampening": 0.0},
    "adafactor": {"scale_parameter": False, "relative_step": False},
    "lars": {"trust_coefficient": 0.01},
    "lamb": {"weight_decay": 0.1},
}
COSINE = {"name": "cosine_decay", "arguments": [1e-2, 10], "warmup": 3}


class _Run:
    """A model whose gradients are drawn from the step and the name, in these stages."""

    def __init__(
        self, name: str, sizes: Sequence[int] = (LAYERS,), schedule: Any = None, **settings: Any
    ) -> None:
        model = tiny_model(layers=LAYERS)
        self.stages = []
        start = 0
        for index, size in enumerate(sizes):
            part = Slice(model, start, start + size)
            self.stages.append(Stage(index, part, needs_input_gradient=index > 0))
            start += size
        tune = FineTune(
            optimizer=name,
            learning_rate=1e-2,
            lr_schedule=schedule,
            optimizer_config={name: {**SETTINGS[name], **settings}},
        )
        self.updater = Updater(build_optimizer(tune), self.stages)

    def update(self, *steps: int) -> None:
        for step in steps:
            for stage in self.stages:
                for name in stage.names:
                    shape = stage.part[name].shape
                    random = np.random.RandomState([step, *name.encode()])
                    gradient = random.standard_normal(shape).astype(np.float32)
                    stage.gradients[name] = mx.array(gradient)
            self.updater.apply(0.5)

    @property
    def weights(self) -> dict[str, mx.array]:
        return {name: stage.part[name] for stage in self.stages for name in stage.names}

    def take(self, weights: Mapping[str, mx.array], state: Mapping[str, mx.array]) -> None:
        """Go on from what other runs had, as after reading a file: of new arrays."""
        for stage in self.stages:
            for name in stage.names:
                stage.part[name] = mx.array(np.array(weights[name]))
        mine = {
            name: mx.array(np.array(array))
            for name, array in state.items()
            if "." not in name or name.rpartition(".")[0] in self.weights
        }
        self.updater.restore(mine)

    def outcome(self) -> tuple[Bytes, Bytes]:
        return as_bytes(self.weights), as_bytes(self.updater.state())


CASES = [
    *((name, None, {}, 1) for name in OPTIMIZERS),
    *(("adamw", COSINE, {}, done) for done in (0, 1, 4)),
    ("sgd", None, {"momentum": 0.0, "nesterov": False}, 1),
    ("adafactor", None, {"relative_step": True, "scale_parameter": True}, 4),
    ("adafactor", None, {"beta_1": 0.9}, 0),
]


def learning_rate(run: _Run) -> float:
    return float(run.updater.optimizer.learning_rate.item())


@pytest.mark.parametrize(("name", "schedule", "settings", "done"), CASES)
def test_a_restored_optimizer_goes_on_to_the_bit(
    name: str, schedule: Any, settings: dict[str, Any], done: int
) -> None:
    whole = _Run(name, schedule=schedule, **settings)
    whole.update(*range(done))
    again = _Run(name, schedule=schedule, **settings)
    again.take(whole.weights, whole.updater.state())
    assert again.outcome() == whole.outcome()
    assert learning_rate(again) == learning_rate(whole)
    for run in (whole, again):
        run.update(*range(done, done + 3))
    assert again.outcome() == whole.outcome()
    assert learning_rate(again) == learning_rate(whole)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_may_be_cut_up_otherwise_than_it_was_made(name: str) -> None:
    whole = _Run(name, (LAYERS,))
    whole.update(0, 1)
    parts = _Run(name, (1, 2))
    parts.take(whole.weights, whole.updater.state())
    other = _Run(name, (2, 1))
    other.take(parts.weights, parts.updater.state())
    for run in (whole, other):
        run.update(2, 3)
    assert other.outcome() == whole.outcome()


def test_a_rank_that_trains_nothing_keeps_what_is_of_all_weights() -> None:
    run = _Run("adam", schedule=COSINE)
    for stage in run.stages:
        stage.names = ()
    run.update(0, 1)
    assert set(run.updater.state()) == {"step", "learning_rate"}
    again = _Run("adam", schedule=COSINE)
    for stage in again.stages:
        stage.names = ()
    again.take({}, run.updater.state())
    again.update(2)
    run.update(2)
    assert learning_rate(again) == learning_rate(run)


def test_the_state_is_named_for_its_weights() -> None:
    run = _Run("adam")
    run.update(0)
    per_weight = {f"{name}.{key}" for name in run.weights for key in ("m", "v")}
    assert set(run.updater.state()) == {"step", "learning_rate"} | per_weight


def test_what_was_kept_does_not_change_with_later_updates() -> None:
    run = _Run("adamw")
    run.update(0)
    kept = run.updater.state()
    before = as_bytes(kept)
    run.update(1, 2)
    assert as_bytes(kept) == before


def test_float32_copies_keep_what_bfloat16_cannot() -> None:
    """Updates of 0.0015 of a weight: all of them together are seen, each alone is not."""
    short, kept = (_Run("sgd", momentum=0.0, nesterov=False) for _ in range(2))
    for run, masters in ((short, False), (kept, True)):
        run.updater = Updater(run.updater.optimizer, run.stages, masters=masters)
        for stage in run.stages:
            for name in stage.names:
                stage.part[name] = mx.ones(stage.part[name].shape, mx.bfloat16)
        for _ in range(10):
            for stage in run.stages:
                for name in stage.names:
                    stage.gradients[name] = mx.full(stage.part[name].shape, 0.15)
            run.updater.apply()
    assert all(mx.all(weight == 1).item() for weight in short.weights.values())
    assert all(mx.all(weight == 0.984375).item() for weight in kept.weights.values())
    assert all(weight.dtype == mx.bfloat16 for weight in kept.weights.values())
    masters_of = {name: array for name, array in kept.updater.state().items() if ".master" in name}
    assert {name.removesuffix(".master") for name in masters_of} == set(kept.weights)
    for array in masters_of.values():
        assert array.dtype == mx.float32
        assert mx.allclose(array, mx.array(0.985), atol=1e-6).item()


def test_float32_copies_begin_with_what_is_stored_in_float32() -> None:
    """0.9995 is 1 in bfloat16. Of an update by 0.0015 bfloat16's next number, 0.99609375, is seen
    from there, but not from 1."""
    run = _Run("sgd", momentum=0.0, nesterov=False)
    for stage in run.stages:
        for name in stage.names:
            shape = stage.part[name].shape
            stage.part[name] = mx.ones(shape, mx.bfloat16)
            stage.part.stored[name] = mx.full(shape, 0.9995)
    updater = Updater(run.updater.optimizer, run.stages, masters=True)
    assert not any(stage.part.stored for stage in run.stages)
    rounded = Updater(run.updater.optimizer, run.stages, masters=True)
    for each, expected in ((rounded, 1.0), (updater, 0.99609375)):
        for stage in run.stages:
            for name in stage.names:
                stage.gradients[name] = mx.full(stage.part[name].shape, 0.15)
        each.apply()
        assert all(mx.all(weight == expected).item() for weight in run.weights.values())


def test_restored_copies_replace_those_of_the_model() -> None:
    run = _Run("adam")
    for stage in run.stages:
        stage.part.stored |= {name: stage.part[name] for name in stage.names}
    updater = Updater(run.updater.optimizer, run.stages, masters=True)
    assert any(name.endswith(".master") for name in updater.state())
    updater.restore({"step": mx.array(0)})
    assert not any(name.endswith(".master") for name in updater.state())


def test_float32_weights_have_no_copies() -> None:
    run = _Run("adam")
    run.updater = Updater(run.updater.optimizer, run.stages, masters=True)
    run.update(0)
    assert not any(name.endswith(".master") for name in run.updater.state())


@pytest.mark.parametrize(
    ("schedule", "settings", "message"),
    [
        ({"name": "cosine"}, {}, "lr_schedule {'name': 'cosine'}: "),
        ({"arguments": [1]}, {}, "lr_schedule {'arguments': [1]}: "),
        (
            {"name": "cosine_decay", "arguments": ["a", 5]},
            {},
            "lr_schedule {'name': 'cosine_decay'",
        ),
        (
            {"name": "step_decay", "arguments": [1, 1, 9, 2]},
            {},
            "lr_schedule {'name': 'step_decay'",
        ),
        (None, {"momentum": 1}, "optimizer_config adam {'momentum': 1}: "),
        (None, {"betas": [0.9, 1]}, "optimizer_config adam {'betas': [0.9, 1]}: "),
        (None, {"eps": "small"}, "optimizer_config adam {'eps': 'small'}: "),
    ],
)
def test_what_makes_no_optimizer_is_named(
    schedule: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as refused:
        build_optimizer(FineTune(lr_schedule=schedule, optimizer_config={"adam": settings}))
    assert message in refused.value.problem


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_a_layer_of_a_text_model_in_a_wrapper_is_one_layer_too(prefix: str) -> None:
    names = ["layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.bias", "layers.11.norm.weight"]
    assert [layer_of(f"{prefix}model.{name}") for name in names] == [
        f"{prefix}model.layers.1",
        f"{prefix}model.layers.1",
        f"{prefix}model.layers.11",
    ]
