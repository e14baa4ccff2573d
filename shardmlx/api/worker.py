"""The part of one rank in a program's own training loop: the base, and the models that train on it.

A model is a LoRA: slices of its own, of which all that is frozen are the arrays of the base. Each
has gradients, an optimizer's state and a place in the schedule of its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from shardmlx.api.adapters import AdapterKeys, fine_tune_of
from shardmlx.api.plan import WAITING, LoopPlan
from shardmlx.api.requests import LoraOptions, OptimStep
from shardmlx.api.sampling import SamplingWorker
from shardmlx.checkpoint.export import (
    Collection,
    Collector,
    HeldWeights,
    TensorSpec,
    safetensors_pieces,
)
from shardmlx.common.durable_files import NewFiles, why_not_written
from shardmlx.common.reporter import Reporter
from shardmlx.distributed.crew import takes_long, together
from shardmlx.distributed.transport import Transport
from shardmlx.engine.batches import MicroBatch
from shardmlx.engine.engine import Engine, Results, Step
from shardmlx.engine.gathered_stage import build_stages
from shardmlx.engine.optimizer import Updater
from shardmlx.inference.adapters import Adapter
from shardmlx.loading.adapters import read_tensors
from shardmlx.loading.build import build_model, cut
from shardmlx.loading.rank_setup import ModelWorker
from shardmlx.models.runtime.divided_layers import take_share
from shardmlx.models.runtime.slice import Piece, Slice

OPTIMIZER = "optimizer/"
"""Beginning of the names of an optimizer's arrays in a saved state."""

STEP = "step"
"""Name of the number of updates in the optimizer's state, which has no weight."""

MOMENTS = ("m", "v")
"""Names of AdamW's moments there."""


@dataclass(frozen=True, slots=True, eq=False)
class LossOrder:
    """Micro-batches of a model, on one replica, of which only the forward may be computed."""

    model: str
    microbatches: Sequence[MicroBatch]
    forward_only: bool = False


class _OptimizerArrays:
    """The two moments of each trained weight as tensors of a ``Holder``."""

    def __init__(self, state: Mapping[str, Any], parts: Sequence[Slice]) -> None:
        self._state = state
        pieces = {name: piece for part in parts for name, piece in part.pieces.items()}
        weights = dict.fromkeys(name for part in parts for name in part.trainable)
        places = [(weight, moment) for weight in weights for moment in MOMENTS]
        self._places = {
            f"{OPTIMIZER}{weight}.{moment}": (weight, moment) for weight, moment in places
        }
        self.trainable: Sequence[str] = [*self._places]
        self.pieces: Mapping[str, Piece] = {
            name: pieces[weight] for name, (weight, _) in self._places.items() if weight in pieces
        }

    def parameters(self) -> Mapping[str, mx.array]:
        return {name: self[name] for name in self._places}

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> mx.array:
        weight, moment = self._places[name]
        array: mx.array = self._state[weight][moment]
        return array

    def __setitem__(self, name: str, array: mx.array) -> None:
        weight, moment = self._places[name]
        self._state[weight][moment] = array


class _Model:
    """A LoRA on one rank: its slices, and once it trains its engine."""

    def __init__(
        self, plan: LoopPlan, transport: Transport, lora: LoraOptions, slices: Sequence[Slice]
    ) -> None:
        self.lora = lora
        self._plan = plan
        self._transport = transport
        self.slices = slices
        own = plan.plan.stages_of(transport.rank)
        self.parts = [slices[index] for index in own]
        self.optimizer = optim.AdamW(1e-4, bias_correction=True)
        weights = {name: part[name] for part in self.parts for name in part.trainable}
        self.optimizer.init(weights)
        moments = _OptimizerArrays(self.optimizer.state, self.parts)
        self._weights = Collector(plan.plan, transport, self.parts)
        self._all = Collector(plan.plan, transport, [*self.parts, moments])
        self._engine: Engine | None = None
        self._updater: Updater | None = None

    def start(self) -> None:
        """Get ready to train, together with the other ranks."""
        trainable = tuple(bool(part.trainable) for part in self.slices)
        stages = build_stages(
            self.slices,
            self._plan.plan.stages_of(self._transport.rank),
            savings=self._plan.savings,
        )
        plan = replace(self._plan.plan, trainable=trainable)
        self._engine = Engine(plan, self._transport, stages)
        self._updater = Updater(self.optimizer, stages, self._engine.shards)
        mx.eval(self.optimizer.state)

    @property
    def engine(self) -> Engine:
        """The engine, once it was started."""
        assert self._engine is not None, "it was started"
        return self._engine

    def collector(self, *, with_optimizer: bool) -> Collector:
        """Return what collects its weights, with the optimizer's state or without."""
        return self._all if with_optimizer else self._weights

    def update(self, step: OptimStep) -> float:
        """Make an update unless the gradients are not finite; return their norm."""
        assert self._updater is not None, "it was started"
        engine = self.engine
        engine.sum_gradients()
        norm = engine.gradient_norm()
        if not math.isfinite(norm):
            engine.forget_gradients()
            return norm
        optimizer = self.optimizer
        optimizer.learning_rate = step.learning_rate
        optimizer.betas = [step.beta1, step.beta2]
        optimizer.eps = step.eps
        optimizer.weight_decay = step.weight_decay
        scale = 1.0
        if 0 < step.grad_clip_norm < norm:
            scale = step.grad_clip_norm / norm
        self._updater.apply(scale)
        return norm

    def restart_optimizer(self, steps: int) -> None:
        """Begin anew with moments of 0, after so many updates."""
        for part in self.parts:
            for name in part.trainable:
                for moment in MOMENTS:
                    self.optimizer.state[name][moment] = mx.zeros_like(part[name])
        self.optimizer.state[STEP] = mx.array(steps, mx.uint64)
        mx.eval(self.optimizer.state)


class LoopWorker(ModelWorker):
    """The part of one rank in a program's own training loop. Rank 0's service calls its methods on
    all ranks at once."""

    def __init__(self, transport: Transport, reporter: Reporter) -> None:
        super().__init__(transport, reporter)
        self.sampling: SamplingWorker | None = None
        """The part of this rank in sampling, if the first stage is on rank 0."""
        self._places: dict[LoraOptions, list[Slice]] = {}
        """Hops with places for the weights of snapshots, for each kind of LoRA."""
        self._plan: LoopPlan | None = None
        self._whole: nn.Module | None = None
        self._base: Sequence[Slice] = ()
        self._hops: Sequence[Slice] = ()
        """The layers of the base by the hops of samples, of the same arrays."""
        self._models: dict[str, _Model] = {}
        self._keys: AdapterKeys | None = None

    @property
    def plan(self) -> LoopPlan:
        """The plan, once the base was cut by it."""
        assert self._plan is not None, "the base was cut"
        return self._plan

    @property
    def keys(self) -> AdapterKeys:
        """The modules of the base that can have adapters."""
        assert self._keys is not None, "the base was cut"
        return self._keys

    # The base.

    def build_base(self, dtype: str | None) -> None:
        """Build the base lazily, and look where it can have adapters. Raises ``UserError``."""
        opened = self.opened
        self._whole, _ = build_model(
            opened.path, fine_tune_of(None, None, dtype), 0, opened.adapters
        )
        self._whole.eval()
        self._keys = AdapterKeys.of(self._whole)

    def cut_base(self, plan: LoopPlan) -> None:
        """Cut this rank's stages out of the base that was built."""
        assert self._whole is not None, "it was built"
        self._plan = plan
        self._base = self._own(cut(self._whole, plan.plan.stage_map.partition.ranges))
        self._hops = self._hops_of(self._whole)
        self._whole = None

    @takes_long
    def load_base(self) -> int:
        """Read this rank's weights; return their bytes. Raises ``UserError``."""
        self._share(self._base)
        for part in self._base:
            part.load()
        plan = self.plan
        if plan.route is not None:
            self.sampling = SamplingWorker(
                self.transport, self._hops, plan.route, plan.chunk, plan.random_state
            )
        self.transport.activity.begin(WAITING)
        return sum(part.nbytes for part in self._base)

    def _own(self, slices: Sequence[Slice]) -> list[Slice]:
        return [slices[index] for index in self.plan.plan.stages_of(self.transport.rank)]

    def _hops_of(self, model: nn.Module) -> list[Slice]:
        """Return the layers of a model that this rank has on the route of samples."""
        route = self.plan.route
        if route is None:
            return []
        hops = cut(model, self.plan.layers_of_hops)
        return [hops[number] for number in route.numbers(self.transport.rank)]

    def _share(self, parts: Sequence[Slice]) -> None:
        """Leave slices this rank's share of their layers."""
        if self.plan.plan.mesh.tp == 1:
            return
        rank = self.plan.plan.mesh.share(self.transport.rank)
        for part in parts:
            take_share(part, self.opened.shape, self.plan.shares, rank, self.all_sum)

    # Models.

    def build(self, model: str, lora: LoraOptions) -> int:
        """Build a new LoRA; return how many weights this rank trains of it. Raises
        ``UserError``."""
        slices = self._cut(self._whole_with(lora, trains=True))
        for part in self._own(slices):
            part.load()
        self._models[model] = made = _Model(self.plan, self.transport, lora, slices)
        return sum(part[name].size for part in made.parts for name in part.trainable)

    def _whole_with(self, lora: LoraOptions, *, trains: bool) -> nn.Module:
        """Build the base with a LoRA lazily."""
        tune = fine_tune_of(lora, self.keys.chosen(lora), self.plan.dtype)
        whole, _ = build_model(self.opened.path, tune, lora.seed, None)
        whole.train(trains)
        return whole

    def _cut(self, whole: nn.Module) -> list[Slice]:
        """Cut the slices of a LoRA. Frozen arrays of this rank are those of the base."""
        slices = cut(whole, self.plan.plan.stage_map.partition.ranges)
        parts = self._own(slices)
        self._share(parts)
        for part, base in zip(parts, self._base, strict=True):
            part.share_frozen(base)
        return slices

    @together
    def start(self, model: str) -> None:
        """Get ready to train a model that was built: ranks wait for each other."""
        self._models[model].start()

    def unload(self, model: str) -> None:
        """Forget a model, which need not be there."""
        self._models.pop(model, None)
        mx.clear_cache()

    @together
    def step(self, orders: Sequence[LossOrder]) -> list[Results]:
        """Compute micro-batches of several models, together where their stages have the same
        gradients; return the results of each order, on ranks of the last stage."""
        found: list[Results] = [{} for _ in orders]
        for numbers in self._alike(orders):
            steps = [
                Step(self._models[orders[i].model].engine, orders[i].microbatches, reduce=False)
                for i in numbers
            ]
            engine = steps[0].engine
            if orders[numbers[0]].forward_only:
                results = engine.evaluate_steps(steps)
            else:
                results = engine.train_steps(steps)
            engine.recorder.events.clear()
            for i, of_order in zip(numbers, results, strict=True):
                found[i] = of_order
        return found

    def _alike(self, orders: Sequence[LossOrder]) -> list[list[int]]:
        """Return the numbers of orders that can be carried out together."""
        groups: dict[tuple[object, ...], list[int]] = {}
        for number, order in enumerate(orders):
            plan = self._models[order.model].engine.plan
            groups.setdefault((order.forward_only, plan.trainable), []).append(number)
        return [*groups.values()]

    @together
    def update(self, model: str, step: OptimStep) -> float:
        """Update a model with its gradients; return their norm, the same on all ranks. Gradients
        that are not finite are dropped."""
        updated = self._models[model]
        norm = updated.update(step)
        updated.engine.recorder.events.clear()
        return norm

    # States.

    def held(self, model: str, with_optimizer: bool) -> HeldWeights:
        """Return what this rank has of a model."""
        collector = self._models[model].collector(with_optimizer=with_optimizer)
        return collector.held(trained_only=True)

    def steps_made(self, model: str) -> int:
        """Return how many updates a model has had."""
        return int(self._models[model].optimizer.state[STEP].item())

    def wanted(self, model: str, with_optimizer: bool) -> set[str]:
        """Return the names of the tensors that this rank keeps of a model."""
        return self._models[model].collector(with_optimizer=with_optimizer).wanted()

    @together
    @takes_long
    def save(
        self, model: str, collection: Collection, path: Path, metadata: Mapping[str, str]
    ) -> str | None:
        """Write a model as one file, on rank 0, which has its name once it is complete; return why
        it could not be written, if it could not."""
        collector = self._models[model].collector(with_optimizer=True)
        if self.transport.rank != 0:
            collector.send(collection.sent_by(self.transport.rank))
            return None
        return _write_state(collector, collection, path, metadata)

    @together
    @takes_long
    def take(
        self, model: str, path: Path, specs: Sequence[TensorSpec], wanted: Sequence[Set[str]]
    ) -> None:
        """Put tensors of a file of rank 0 into a model, of which rank r keeps ``wanted[r]``."""
        collector = self._models[model].collector(with_optimizer=True)
        if self.transport.rank == 0:
            collector.give(read_tensors([path]), wanted)
            return
        kept = wanted[self.transport.rank]
        collector.take([spec for spec in specs if spec.name in kept])

    def begin_optimizer(self, model: str, steps: int, is_new: bool) -> None:
        """Count so many updates of a model; with ``is_new`` its moments are 0 again."""
        found = self._models[model]
        if is_new:
            found.restart_optimizer(steps)
        found.optimizer.state[STEP] = mx.array(steps, mx.uint64)

    def forget_gradients(self, model: str) -> None:
        """Drop the gradients of a model."""
        self._models[model].engine.forget_gradients()

    # Snapshots.

    def take_snapshot(self, number: int, model: str) -> None:
        """Keep the weights that a model has now as the adapter of a ``number``. Its updates make
        new arrays."""
        assert self.sampling is not None, "ranks can sample"
        found = self._models[model]
        kind = replace(found.lora, seed=0)
        if kind not in self._places:
            whole = self._whole_with(kind, trains=False)
            self._places[kind] = self._hops_of(whole)
            self._cut(whole)
        weights = {name: part[name] for part in found.parts for name in part.trainable}
        adapters = [
            Adapter(place, {name: array for name, array in weights.items() if name in place})
            for place in self._places[kind]
        ]
        self.sampling.hold(number, adapters)

    def drop_snapshot(self, number: int) -> None:
        """Forget a snapshot."""
        assert self.sampling is not None, "ranks can sample"
        self.sampling.release(number)

    def keep_alive(self) -> None:
        """Do nothing: rank 0 lives."""


def _write_state(
    collector: Collector, collection: Collection, path: Path, metadata: Mapping[str, str]
) -> str | None:
    """Write the tensors of all ranks as one file; return why it could not be written."""
    arrays = chain.from_iterable(
        collector.receive(collection, owner) for owner, _ in collection.sources
    )
    specs = [spec for _, of_rank in collection.sources for spec in of_rank]
    files = NewFiles(path.parent)
    try:
        files.write(path.name, safetensors_pieces(specs, arrays, **metadata))
        files.publish()
    except OSError as error:
        files.discard()
        nbytes = sum(spec.nbytes for spec in specs)
        deque(arrays, maxlen=0)  # other ranks send to the end
        return why_not_written(error, path.parent, nbytes)
    return None
