"""Replicas that divide the optimizer make the updates of those that do not, to the bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from shardmlx.config.checks import OPTIMIZERS
from shardmlx.config.specs import FineTune
from shardmlx.distributed.exchanges import Exchange
from shardmlx.distributed.sums import Sums
from shardmlx.engine import gradient_reducer
from shardmlx.engine.optimizer import Updater, build_optimizer
from shardmlx.engine.owners import owners
from tests.helpers.checkpoints import Bytes
from tests.helpers.divided_training import Trained, tiny_models, train
from tests.helpers.engines import NOTHING, OPTIMIZER, engine_of, train_on
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.models_and_batches import Layout, random_batch

TWO, THREE = Layout("1f1b", 1, 1, 2), Layout("1f1b", 1, 1, 3)


def trained(
    layout: Layout, optimizer: str, divided: int, *, tied: bool = False, **how: Any
) -> list[Trained]:
    models = tiny_models(layout, tied=tied, layers=layout.pp * layout.virtual)
    return train(layout, models, divided, optimizer=optimizer, **how)


def of_weights(state: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in state.items() if "." in name}


def check_same(layout: Layout, optimizer: str, **how: Any) -> None:
    whole, parts = (trained(layout, optimizer, each, **how) for each in (NOTHING, OPTIMIZER))
    for one, other in zip(whole, parts, strict=True):
        assert other.weights == one.weights
        assert (other.losses, other.norms) == (one.losses, one.norms)
    for pipeline_rank in range(layout.pp):
        state: Bytes = {}
        for part in parts[pipeline_rank :: layout.pp]:
            kept = of_weights(part.state)
            assert not state.keys() & kept.keys(), "each weight has its state once"
            state |= kept
        assert state == of_weights(whole[pipeline_rank].state)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(optimizer: str) -> None:
    settings = {"relative_step": False} if optimizer == "adafactor" else {}
    check_same(TWO, optimizer, settings=settings)


def test_large_weights_of_several_owners_are_summed_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By themselves they would all go to one replica, and the links of the others be idle."""
    scatter, shares = Sums.reduce_scatter, []

    def recorded(
        sums: Sums, arrays: Any, group: Sequence[int], bounds: Any, errors: Any
    ) -> Exchange:
        gets = [sum(ends[member + 1] - ends[member] for ends in bounds) for member in group]
        shares.append(max(gets) / sum(gets))
        return scatter(sums, arrays, group, bounds, errors)

    monkeypatch.setattr(Sums, "reduce_scatter", recorded)
    monkeypatch.setattr(gradient_reducer, "BUCKET_BYTES", 1)
    check_same(TWO, "sgd")
    assert max(shares) < 1
    assert median(shares) < 0.72


def test_gradients_that_travel_in_bfloat16() -> None:
    check_same(THREE, "adam", sum_dtype="bfloat16")
    short = trained(TWO, "sgd", OPTIMIZER, sum_dtype="bfloat16")[0].norms
    whole = trained(TWO, "sgd", OPTIMIZER)[0].norms
    assert short != whole
    assert short == pytest.approx(whole, rel=1e-2)


def test_gradients_that_travel_in_int8() -> None:
    """Blocks begin with the parts, so that who owns what changes bits; replicas stay equal."""
    short = trained(THREE, "sgd", OPTIMIZER, sum_dtype="int8")
    whole = trained(THREE, "sgd", OPTIMIZER)
    assert all(each.weights == short[0].weights for each in short)
    assert short[0].norms != whole[0].norms
    assert short[0].norms == pytest.approx(whole[0].norms, rel=1e-2)


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        (THREE, True),
        (Layout("zb-v", 2, 2, 2), True),
        (Layout("interleaved-1f1b", 2, 2, 2), False),
    ],
)
def test_every_layout(layout: Layout, tied: bool) -> None:
    check_same(layout, "adamw", tied=tied)


def test_updated_weights_go_layer_by_layer_while_the_next_layer_is_updated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []

    def noted(name: str) -> None:
        method = getattr(Sums, name)

        def wrapped(sums: Sums, *args: Any) -> Any:
            if sums._transport.rank == 0:
                called.append(name)
            return method(sums, *args)

        monkeypatch.setattr(Sums, name, wrapped)

    def updates(transport: LocalTransport) -> None:
        plan = TWO.plan(layers, 2)
        engine = engine_of(transport, plan, models[transport.rank], OPTIMIZER)
        adam = build_optimizer(FineTune(learning_rate=1e-2))
        updater = Updater(adam, list(engine.stages.values()), engine.shards, piece_bytes=1)
        train_on(engine, random_batch(4, 0))
        transport.barrier("updating")
        if transport.rank == 0:
            called.clear()
        updater.apply()

    layers = 4
    models = tiny_models(TWO, layers=layers)
    noted("all_gather")
    noted("wait")
    LocalNetwork(2).run(updates)
    groups = layers + 3  # embedding, norm and lm_head
    assert called == ["all_gather"] * groups + ["wait"] * groups


def test_of_each_layer_all_own_something_and_a_large_matrix_goes_as_one() -> None:
    sizes = {
        f"model.layers.{layer}.{name}": size
        for layer in range(12)
        for name, size in (("down", 90), ("up", 90), ("gate", 90), ("q", 30), ("k", 10), ("v", 10))
    }
    sizes["model.embed_tokens.weight"] = 1200
    found = owners(sizes, 2)
    loads = [sum(sizes[name] for name in sizes if found[name] == member) for member in (0, 1)]
    assert loads == pytest.approx([sum(sizes.values()) / 2] * 2, rel=0.02)
    for layer in range(12):
        assert {found[name] for name in sizes if name.startswith(f"model.layers.{layer}.")} == {
            0,
            1,
        }


def test_more_replicas_than_weights_leave_some_without() -> None:
    assert sorted(owners({"a": 5, "b": 3}, 4).values()) in ([0, 1], [0, 2], [0, 3], [1, 2])


def test_a_bucket_is_there_beside_its_gradients_once_and_not_twice() -> None:
    """Those of matrices come transposed, and are put in a row one after the other."""
    gradients = [mx.random.normal((300, 200 + i)).T for i in range(8)]
    mx.eval(gradients)
    expected = np.concatenate([np.array(each).reshape(-1) for each in gradients])
    nbytes, largest = sum(each.nbytes for each in gradients), max(each.nbytes for each in gradients)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    total = gradient_reducer._in_one(gradients)
    assert mx.get_peak_memory() - before <= max(nbytes, largest) + 8 * 4096
    assert not gradients
    assert np.array_equal(np.array(total), expected)
