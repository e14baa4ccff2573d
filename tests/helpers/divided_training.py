"""Training on threads whose replicas divide nothing, the optimizer, or all weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.nn as nn

from shardmlx.config.specs import FineTune
from shardmlx.engine.batches import split
from shardmlx.engine.optimizer import Updater, build_optimizer
from tests.helpers.checkpoints import Bytes, as_bytes
from tests.helpers.engines import engine_of, train_on
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.models_and_batches import Layout, random_batch, tiny_model

STEPS = 2


class Trained(NamedTuple):
    """What one rank has after a few steps: ``weights`` that it keeps; ``held``, bytes of all."""

    weights: Bytes
    state: Bytes
    losses: list[dict[int, float]]
    norms: list[float]
    held: int


def tiny_models(layout: Layout, *, tied: bool = False, layers: int = 4) -> list[nn.Module]:
    return [tiny_model(tied=tied, layers=layers) for _ in range(layout.ranks)]


def train(
    layout: Layout,
    models: Sequence[nn.Module],
    divided: int,
    *,
    optimizer: str = "adamw",
    settings: Mapping[str, Any] | None = None,
    accumulated: int = 1,
    **how: Any,
) -> list[Trained]:
    """Train with two rows in each of a replica's micro-batches, as many as the pipeline is deep;
    ``how`` the engine works."""
    plan = layout.plan(len(models[0].layers), layout.pp)

    def work(transport: LocalTransport) -> Trained:
        engine = engine_of(transport, plan, models[transport.rank], divided, **how)
        stages, shards = list(engine.stages.values()), engine.shards
        tune = FineTune(
            optimizer=optimizer, learning_rate=1e-2, optimizer_config={optimizer: settings or {}}
        )
        updater = Updater(build_optimizer(tune), stages, shards)
        losses, norms = [], []
        for step in range(STEPS):
            for part in range(accumulated):
                batch = random_batch(2 * layout.pp * layout.dp, 7 * step + part, longest=30)
                key, last = (step, part), part == accumulated - 1
                losses.append(train_on(engine, batch, 2, key=key, reduce=last))
            norms.append(engine.gradient_norm())
            updater.apply(1 / norms[-1])
            losses.append(engine.evaluate(split(batch, layout.dp, engine.replica, 2)))
        parts, weights = [stage.part for stage in stages], shards.weights
        trained = {name: stage.part[name] for stage in stages for name in stage.names}
        kept = {name: array for name, array in trained.items() if shards.holds(name)}
        held = sum(part.nbytes for part in parts) if weights is None else weights.nbytes(parts)
        return Trained(as_bytes(kept), as_bytes(updater.state()), losses, norms, held)

    return LocalNetwork(layout.ranks).run(work)
