"""LARS and LAMB make the updates of their papers' formulas, written here in NumPy in float64, from
the gradients that the engine has summed, in every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten

from shardmlx.config.specs import FineTune
from shardmlx.engine.optimizer import Updater, build_optimizer
from tests.helpers.engines import NOTHING, OPTIMIZER, WEIGHTS, engine_of, gradients_of, train_on
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.models_and_batches import Layout, random_batch, tiny_model

Doubles = npt.NDArray[np.float64]
UPDATES = 6
RATES = {"lars": 2.0, "lamb": 1e-3}
SCHEDULE = {"name": "cosine_decay", "arguments": [1.0, 40]}
"""Shares of the rate: LARS keeps the rate of an earlier step in its momentum."""


def lars(weight: Doubles, gradients: Sequence[Doubles], rates: Sequence[float]) -> Doubles:
    """With momentum 0.9, weight decay 1e-4, and a coefficient of 0.001."""
    velocity = np.zeros_like(weight)
    for gradient, rate in zip(gradients, rates, strict=True):
        local, decay = 1.0, 0.0
        if weight.ndim > 1:
            decay = 1e-4
            norm = float(np.linalg.norm(weight))
            local = 0.001 * norm / (float(np.linalg.norm(gradient)) + decay * norm)
        velocity = 0.9 * velocity + rate * local * (gradient + decay * weight)
        weight = weight - velocity
    return weight


def lamb(weight: Doubles, gradients: Sequence[Doubles], rates: Sequence[float]) -> Doubles:
    """With betas of 0.9 and 0.999, epsilon 1e-6, and weight decay 0.01."""
    m, v = np.zeros_like(weight), np.zeros_like(weight)
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        m = 0.9 * m + 0.1 * gradient
        v = 0.999 * v + 0.001 * gradient**2
        move = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-6)
        trust = 1.0
        if weight.ndim > 1:
            move = move + 0.01 * weight
            trust = float(np.linalg.norm(weight) / np.linalg.norm(move))
        weight = weight - rate * trust * move
    return weight


FORMULAS: Mapping[str, Callable[..., Doubles]] = {"lars": lars, "lamb": lamb}


def rates_of(name: str) -> list[float]:
    return [RATES[name] * (1 + np.cos(np.pi * step / 40)) / 2 for step in range(UPDATES)]


def in_doubles(arrays: Mapping[str, Any]) -> dict[str, Doubles]:
    return {
        name: np.array(mx.array(each).astype(mx.float32)).astype(np.float64)
        for name, each in arrays.items()
    }


def check(name: str, layout: Layout, divided: int, *, masters: bool = False) -> None:
    layers = layout.pp * layout.virtual
    models = [tiny_model(layers=layers) for _ in range(layout.ranks)]
    if masters:
        for model in models:
            model.set_dtype(mx.bfloat16)
            mx.eval(model.parameters())
    plan = layout.plan(layers, layout.pp)
    schedule = {**SCHEDULE, "arguments": [RATES[name], 40]}

    def work(transport: LocalTransport) -> set[str]:
        engine = engine_of(transport, plan, models[transport.rank], divided)
        stages = list(engine.stages.values())
        tune = FineTune(optimizer=name, lr_schedule=schedule)
        optimizer = build_optimizer(tune, [stage.part for stage in stages])
        updater = Updater(optimizer, stages, engine.shards, masters=masters)
        mine = [each for stage in stages for each in stage.names if updater.updates(each)]
        before = in_doubles({each: updater.trained(each) for each in mine})
        history: dict[str, list[Doubles]] = {each: [] for each in mine}
        for step in range(UPDATES):
            batch = random_batch(2 * layout.pp * layout.dp, step, longest=12)
            train_on(engine, batch, 2, key=(step, 0))
            engine.gradient_norm()
            for each, gradient in in_doubles(gradients_of(engine)).items():
                history[each].append(0.5 * gradient)
            updater.apply(0.5)
        for each in mine:
            expected = FORMULAS[name](before[each], history[each], rates_of(name))
            trained = updater.trained(each)
            assert trained.dtype == mx.float32
            found = np.array(trained)
            assert np.abs(expected - before[each]).max() > 1e-4, "it was trained"
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6, err_msg=each)
        return set(mine)

    of_ranks = LocalNetwork(layout.ranks).run(work)
    assert set.union(*of_ranks) == dict(tree_flatten(models[0].trainable_parameters())).keys()


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize(
    ("layout", "divided"),
    [
        (Layout("1f1b", 1), NOTHING),
        (Layout("1f1b", 2, 1, 2), NOTHING),
        (Layout("1f1b", 2, 1, 2), OPTIMIZER),
        (Layout("1f1b", 2, 1, 2), WEIGHTS),
        (Layout("zb-v", 2, 2), NOTHING),
    ],
    ids=str,
)
def test_six_updates_are_those_of_the_formula(name: str, layout: Layout, divided: int) -> None:
    check(name, layout, divided)


@pytest.mark.parametrize("name", FORMULAS)
def test_float32_copies_are_updated_by_the_formula(name: str) -> None:
    check(name, Layout("1f1b", 1, 1, 2), OPTIMIZER, masters=True)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_matrix_of_zeros_moves_without_a_scale(name: str) -> None:
    """As LoRA's second matrix does in the first step; neither does a gradient of zeros divide."""
    tune = FineTune(optimizer=name, learning_rate=0.5)
    weights = {"b": mx.zeros((2, 3)), "still": mx.ones((2, 2)), "bias": mx.ones(3)}
    gradients = {"b": mx.full((2, 3), 0.1), "still": mx.zeros((2, 2)), "bias": mx.zeros(3)}
    updated = build_optimizer(tune).apply_gradients(gradients, weights)
    moved = {"lars": -0.05, "lamb": -0.5}[name]
    assert np.allclose(np.array(updated["b"]), moved, atol=1e-5)
    assert np.isfinite(np.array(updated["still"])).all()
    assert (np.array(updated["bias"]) == 1).all(), "no weight decay"


@pytest.mark.parametrize("name", FORMULAS)
def test_float16_norms_do_not_overflow(name: str) -> None:
    """The norm of 300 x 300 times 300 is 90000, and float16 ends at 65504."""
    weights = {"wide": mx.full((300, 300), 300.0, mx.float16)}
    gradients = {"wide": mx.full((300, 300), 300.0, mx.float16)}
    tune = FineTune(optimizer=name, learning_rate=0.1)
    updated = build_optimizer(tune).apply_gradients(gradients, weights)["wide"]
    share = {"lars": 0.0001, "lamb": 0.1}[name]
    assert updated.dtype == mx.float16
    assert np.allclose(np.array(updated, np.float32), 300 * (1 - share), rtol=1e-3)
