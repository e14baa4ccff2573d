"""Replicas that divide the weights train as those that hold all of them, and hold little more than
their part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import pytest

from shardmlx.config.specs import FULL, NO_SAVINGS, NONE, SELECTIVE, Savings
from shardmlx.distributed.messages import TransportTimeout
from shardmlx.engine.batches import split
from shardmlx.engine.divided_weights import DividedWeights
from shardmlx.models.runtime.slice import Slice
from testbed.tiny_models import build, tiny_config
from tests.helpers.checkpoints import Bytes
from tests.helpers.divided_training import tiny_models, train
from tests.helpers.engines import OPTIMIZER, WEIGHTS, engine_of, train_on
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.models_and_batches import Layout, random_batch, tiny_model, with_adapters

TWO, THREE = Layout("1f1b", 1, 1, 2), Layout("1f1b", 1, 1, 3)


@pytest.mark.parametrize(
    ("layout", "tied", "savings"),
    [
        (TWO, False, NO_SAVINGS),
        (THREE, True, Savings(recompute=FULL)),
        (TWO, False, Savings(recompute=SELECTIVE, attention_chunk=8, loss_chunk=16)),
    ],
)
def test_with_one_micro_batch_losses_and_weights_are_equal_to_the_bit(
    layout: Layout, tied: bool, savings: Savings
) -> None:
    whole, parts = (
        train(layout, tiny_models(layout, tied=tied), divided, savings=savings)
        for divided in (OPTIMIZER, WEIGHTS)
    )
    every: Bytes = {}
    for one, other in zip(whole, parts, strict=True):
        assert (other.losses, other.norms) == (one.losses, one.norms)
        assert not every.keys() & other.weights.keys(), "each weight is held once"
        every |= other.weights
    assert every == whole[0].weights


@pytest.mark.parametrize(
    ("layout", "tied", "accumulated"),
    [
        (Layout("1f1b", 2, 1, 2), True, 1),
        (Layout("gpipe", 2, 1, 2), False, 2),
        (Layout("zb-v", 2, 2, 2), True, 1),
        (Layout("interleaved-1f1b", 2, 2, 2), False, 1),
        (TWO, True, 3),
    ],
)
def test_in_every_schedule_sums_of_several_micro_batches_differ_by_rounding(
    layout: Layout, tied: bool, accumulated: int
) -> None:
    """They are added up over replicas first: no replica holds those of all weights."""
    whole, parts = (
        train(layout, tiny_models(layout, tied=tied), divided, accumulated=accumulated)
        for divided in (OPTIMIZER, WEIGHTS)
    )
    for one, other in zip(whole, parts, strict=True):
        assert other.norms == pytest.approx(one.norms, rel=2e-6)
        for mine, theirs in zip(other.losses, one.losses, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)


def test_adapters_and_frozen_weights_are_divided_and_dropout_is_the_same() -> None:
    """The weights are quantised; layers below the adapters have a forward pass only."""

    def models() -> list[nn.Module]:
        made = tiny_models(TWO)
        for model in made:
            nn.quantize(model, group_size=32, bits=4)
            mx.random.seed(3)
            with_adapters(model, 2, scale=10.0, dropout=0.3)
        return made

    whole = train(TWO, models(), OPTIMIZER, accumulated=2)
    parts = train(TWO, models(), WEIGHTS, accumulated=2)
    for one, other in zip(whole, parts, strict=True):
        assert other.losses[:2] == one.losses[:2]
        assert other.norms == pytest.approx(one.norms, rel=2e-6)
        assert 0 < len(other.weights) < len(one.weights)


def largest_share(part: Slice, names: Sequence[str], members: int) -> float:
    """Return how much of these weights one replica owns at most."""
    owned, sizes = DividedWeights(0, range(members), [part]).owners, [0] * members
    for name in names:
        sizes[owned[name]] += part[name].nbytes
    return max(sizes) / sum(sizes)


@pytest.mark.parametrize(("members", "most"), [(2, 0.56), (3, 0.36), (4, 0.29)])
def test_each_replica_updates_and_sends_about_as_much_as_the_others(
    members: int, most: float
) -> None:
    """Also where embedding and lm_head are large and frozen. A gather of a layer takes as long as
    its largest part."""
    model = build(tiny_config(layers=12, vocab_size=2000))
    model.freeze()
    for layer in model.layers:
        layer.unfreeze()
    part = Slice(model, 0, 12)
    assert largest_share(part, part.trainable, members) <= 1.1 / members
    for names in part.groups[1:-1]:
        assert largest_share(part, names, members) <= most


@pytest.mark.parametrize("layout", [TWO, THREE])
def test_a_replica_holds_its_part_two_layers_and_an_end(layout: Layout) -> None:
    whole, parts = (
        train(layout, tiny_models(layout, layers=12), divided) for divided in (OPTIMIZER, WEIGHTS)
    )
    model = tiny_model(layers=12)
    layer = Slice(model, 1, 2).nbytes
    end = model.lm_head.weight.nbytes
    for one, other in zip(whole, parts, strict=True):
        assert other.held <= 1.1 * one.held / layout.dp + 2 * layer + end
        assert other.held < 0.75 * one.held


@pytest.mark.parametrize("recompute", [NONE, FULL])
def test_the_next_layer_is_on_its_way_while_one_computes(
    recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the forward pass, and down again in the backward pass."""
    gather, under_way = DividedWeights.use, []

    def use(weights: DividedWeights, part: Slice, group: int, following: int | None = None) -> None:
        gather(weights, part, group, following)
        if weights._member == 0:
            others = weights._under_way or ()
            under_way.append((part.name_of(group), *others[:1]))

    def step(transport: LocalTransport) -> None:
        plan = TWO.plan(3, 1)
        savings = Savings(recompute=recompute)
        engine = engine_of(transport, plan, models[transport.rank], WEIGHTS, savings=savings)
        train_on(engine, random_batch(2, 0))

    models = tiny_models(TWO, layers=3)
    monkeypatch.setattr(DividedWeights, "use", use)
    LocalNetwork(2).run(step)
    up = ["the embedding", "layer 0", "layer 1", "layer 2", "lm_head"]
    first = [("the embedding",)]  # its own graph, before anything computes
    forward = [*pairwise(up), ("lm_head",)]
    # The room of layers 1 and 2 still has them.
    backward = [("lm_head",), ("layer 2",), ("layer 1", "layer 0"), ("layer 0", "the embedding")]
    backward += [("the embedding",)]
    assert under_way == [*first, *forward, *backward]


def test_a_replica_that_stays_away_is_named_with_what_is_gathered() -> None:
    models = tiny_models(TWO)
    plan = TWO.plan(4, 1)

    def work(transport: LocalTransport) -> str:
        engine = engine_of(transport, plan, models[transport.rank], WEIGHTS)
        if engine.replica == 1:
            return ""
        batch = random_batch(4, 0)
        transport.set_timeout(2.0)  # the thread of the exchange has asked by then
        with pytest.raises(TransportTimeout) as caught:
            engine.evaluate(split(batch, 2, 0, 2))
        return str(caught.value)

    said = LocalNetwork(2).run(work)[0]
    assert "gathering the weights of the embedding" in said
    assert "waiting for rank 1" in said
