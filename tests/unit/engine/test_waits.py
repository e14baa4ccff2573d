"""A fast device waits for nothing but what the host needs: the evaluations for which a step
waits, whatever the number of layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from shardmlx.config.checks import OPTIMIZERS
from shardmlx.config.specs import FULL, NONE, FineTune, Savings
from shardmlx.engine.batches import split
from shardmlx.engine.optimizer import Updater, build_optimizer, pieces_of
from shardmlx.engine.stage import Stage
from shardmlx.models.runtime.slice import Slice
from tests.helpers.engines import engine_of, train_on
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.models_and_batches import Layout, random_batch, tiny_model, with_adapters

MICROBATCHES = 4


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of evaluations that the host has waited for."""
    evaluate, counted = mx.eval, [0]

    def counting(*arrays: Any) -> None:
        counted[0] += 1
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", counting)
    return counted


@contextmanager
def at_most(waits: list[int], most: int) -> Iterator[None]:
    before = waits[0]
    yield
    assert 0 < waits[0] - before <= most


def a_step(model: nn.Module, waits: list[int], savings: Savings, *, step: int, update: int) -> None:
    plan = Layout("1f1b", 1).plan(len(model.layers), MICROBATCHES)

    def work(transport: LocalTransport) -> None:
        engine = engine_of(transport, plan, model, savings=savings)
        stages = list(engine.stages.values())
        updater = Updater(build_optimizer(FineTune(optimizer="adamw")), stages, engine.shards)
        for _ in range(2):
            with at_most(waits, step):
                train_on(engine, random_batch(MICROBATCHES), 1)
            norm = engine.gradient_norm()
            with at_most(waits, update):
                updater.apply(1 / norm)

    LocalNetwork(1).run(work)


@pytest.mark.parametrize("layers", [2, 8])
@pytest.mark.parametrize("recompute", [NONE, FULL])
def test_adapters_wait_once_for_each_forward_and_backward_and_for_the_update(
    waits: list[int], layers: int, recompute: str
) -> None:
    model = with_adapters(tiny_model(layers=layers))
    a_step(model, waits, Savings(recompute=recompute), step=2 * MICROBATCHES, update=1)


def test_a_loss_in_pieces_waits_once_for_each_piece(waits: list[int]) -> None:
    """The sum of the losses is ready with the last piece: here the only one."""
    savings = Savings(loss_chunk=10_000, counted_only=True)
    model = with_adapters(tiny_model(layers=2))
    a_step(model, waits, savings, step=3 * MICROBATCHES, update=1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_of_32_large_layers_waits_a_few_times(name: str) -> None:
    rows = {"q": 4, "k": 1, "v": 1, "o": 4, "gate": 14, "up": 14, "down": 14}
    layers = [{f"{i}.{n}": 4 * 4096 * 1024 * rows[n] for n in rows} for i in range(32)]
    facts = OPTIMIZERS[name]
    end = {"embedding": 4 * 4096 * 32_000}
    planned = facts.passing * sum(layers[0].values())
    pieces = pieces_of(layers, [end], facts)
    # Muon's temporary arrays are the most: its first large matrix has no room yet.
    assert sum(1 if piece.has_room else 3 for piece in pieces) <= (5 if name == "muon" else 4)
    in_order = [item for piece in pieces for item in piece.sizes.items()]
    assert dict(in_order) == {name: size for layer in layers for name, size in layer.items()} | end
    assert [size for _, size in in_order] == sorted(size for _, size in in_order)
    # Temporary arrays of a piece, without the gradients that are gone, are those of the plan.
    gone = 0
    for piece in pieces:
        alone = facts.passing_alone * piece.nbytes
        ahead = min(facts.at_once * piece.nbytes, facts.ahead * piece.largest)
        assert (ahead if piece.has_room else alone) - gone <= planned
        gone += piece.nbytes


def test_replicas_that_exchange_weights_update_a_layer_at_a_time() -> None:
    layers = [{f"{i}.a": 6 << 20, f"{i}.b": 6 << 20} for i in range(8)]
    pieces = pieces_of(layers, [], OPTIMIZERS["sgd"], by_layer=True)
    # No two matrices have room at first: then the gradients of others have gone.
    assert [list(piece.sizes) for piece in pieces] == [
        *(["0.a"], ["0.b"]),
        *([f"{i}.a", f"{i}.b"] for i in range(1, 8)),
    ]
    assert all(piece.has_room for piece in pieces)


def test_a_stage_in_the_middle_waits_once_for_each_of_f_i_and_w(waits: list[int]) -> None:
    part = Slice(tiny_model(layers=6), 2, 4)
    stage = Stage(1, part, needs_input_gradient=True)
    (microbatch,) = split(random_batch(1), 1, 0, 1)
    x = mx.random.normal((*microbatch.shape, part.hidden_size))
    mx.eval(x)
    with at_most(waits, 1):
        out = stage.forward(0, microbatch, x, scale=1.0)
    stage.fill_cotangent(0, mx.ones(out.shape))
    with at_most(waits, 1):
        stage.backward_input(0)
    with at_most(waits, 1):
        stage.backward_weight(0)
