"""The optimizers and learning-rate schedules of mlx-lm, with LARS and LAMB, over the weights of one
rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from itertools import groupby
from typing import Any, cast

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from shardmlx.compat import begin_evaluation
from shardmlx.config.checks import OPTIMIZERS, OptimizerFacts
from shardmlx.config.specs import FineTune
from shardmlx.engine.buffers import UPDATE_BYTES
from shardmlx.engine.divided_weights import Shards
from shardmlx.engine.large_batch_optimizers import LAMB, LARS, LayerwiseOptimizer
from shardmlx.engine.stage import Stage, layer_of
from shardmlx.errors import refusing
from shardmlx.models.runtime.slice import Slice
from shardmlx.models.runtime.tuner import build_schedule

MASTER = "master"
"""Name of a weight's float32 copy in the optimizer's state."""


FLOAT32 = 4
"""Bytes of a number of an update."""


@dataclass(slots=True)
class UpdatePiece:
    """Trained weights that are updated together, by ``names``. Where it ``has_room``, one wait is
    enough: the temporary arrays of all kinds may exist together, which a fast device computes
    without waiting for the host. Elsewhere one kind of arrays is waited for after the other."""

    names: list[str] = field(default_factory=list)
    nbytes: int = 0
    has_room: bool = True


def pieces_of(
    layers: Sequence[Mapping[str, int]],
    ends: Sequence[Mapping[str, int]],
    facts: OptimizerFacts,
    small: int = UPDATE_BYTES,
    *,
    by_layer: bool = False,
) -> list[UpdatePiece]:
    """Return the weights of ``layers``, and then of the ``ends`` of the model, in pieces: as few as
    take no more memory than the plan counts, the passing arrays of the largest layer.

    ``layers`` have the float32 bytes of each weight. Pieces free their gradients, so that later
    ones have more room. A piece ``by_layer`` is a layer, or several of up to ``small`` bytes.
    """
    of_layers = [facts.passing * sum(layer.values()) for layer in layers]
    room = max([*of_layers, *(nbytes for end in ends for nbytes in end.values())], default=0)
    pieces = [UpdatePiece()]
    for layer in (*layers, *ends):
        for part in [layer] if by_layer else [{name: layer[name]} for name in layer]:
            piece = pieces[-1]
            together = piece.nbytes + sum(part.values())
            goes_on = piece.has_room and facts.at_once * together <= room and not by_layer
            if piece.names and not (goes_on or together <= small):
                room += piece.nbytes
                piece = UpdatePiece()
                pieces.append(piece)
            piece.names.extend(part)
            piece.nbytes += sum(part.values())
            piece.has_room = piece.nbytes <= max(small, room // facts.at_once)
    return pieces


def build_optimizer(tune: FineTune, parts: Sequence[Slice] = ()) -> optim.Optimizer:
    """Build the optimizer that ``mlx_lm.lora`` would build from the same options, or one of ours,
    for the weights of ``parts``.

    Raises ``UserError`` for options with which it makes no update: one is tried.
    """
    schedule, kind = dict(tune.lr_schedule or {}), OPTIMIZERS[tune.optimizer].class_name
    remedy = "give the arguments of this schedule in mlx.optimizers"
    with refusing(f"lr_schedule {schedule}", remedy):
        rate = build_schedule(schedule) if schedule else tune.learning_rate
        if callable(rate):
            mx.eval(rate(mx.array(1)))
    settings = dict(tune.optimizer_settings)
    make = _class_of(tune.optimizer)
    remedy = f"give settings that {kind} takes: {', '.join(usual_settings(tune.optimizer))}"
    with refusing(f"optimizer_config {tune.optimizer} {settings}", remedy):
        made, tried = (make(learning_rate=rate, **settings) for _ in range(2))
        mx.eval(tried.apply_gradients({"tried": mx.ones((2, 2))}, {"tried": mx.ones((2, 2))}))
    if isinstance(made, LayerwiseOptimizer):
        made.share(parts)
    return made


def usual_settings(name: str) -> dict[str, Any]:
    """Return the settings that an optimizer of ``OPTIMIZERS`` has where none are given."""
    parameters = signature(_class_of(name)).parameters
    return {
        each: parameter.default
        for each, parameter in parameters.items()
        if parameter.default is not Parameter.empty and each != "learning_rate"
    }


def _class_of(name: str) -> Callable[..., optim.Optimizer]:
    """Return the class of an optimizer of ``OPTIMIZERS``: ours, or that of MLX."""
    kind = OPTIMIZERS[name].class_name
    ours = {"LARS": LARS, "LAMB": LAMB}
    return ours.get(kind) or cast(Callable[..., optim.Optimizer], getattr(optim, kind))


@dataclass(eq=False)
class Updater:
    """The optimizer for all trained weights on this rank, shared ones counted once.

    Optimizers of MLX keep their state for each weight apart, so every rank's part of it is what one
    process would hold for the same weights. It updates this replica's weights in ``shards``, and
    gets the others from their owners. With ``masters`` it updates a float32 copy of each shorter
    weight: bfloat16 loses updates below 1/256 of a weight. Copies begin with the values in
    ``Slice.stored``, which are taken from there: the copy of a rounded weight must move by half of
    its last bit before the weight does.
    """

    optimizer: optim.Optimizer
    stages: Sequence[Stage]
    shards: Shards | None = None
    masters: bool = False
    piece_bytes: int = UPDATE_BYTES
    """Bytes of float32 up to which layers are updated together in any case."""
    has_moved: bool = field(default=False, init=False)
    """True once an update has changed a weight on this rank, as it is stored."""
    _masters: dict[str, mx.array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for stage in self.stages if self.masters else ():
            for name in filter(self.updates, stage.part.stored):
                self._masters[name] = stage.part.stored[name]
            stage.part.stored.clear()
        self._pieces = self._in_pieces()

    def updates(self, name: str) -> bool:
        """Tell whether this rank updates a weight of its stages, and holds the state for it."""
        return self.shards is None or self.shards.is_mine(name)

    def trained(self, name: str) -> mx.array:
        """Return a weight as it is trained: its float32 copy if it has one."""
        holders = (stage.part for stage in self.stages if name in stage.names)
        return self._masters.get(name, next(holders)[name])

    def replace(self, name: str, array: mx.array) -> None:
        """Set a weight to a float32 array, on each rank that holds it."""
        for part in (stage.part for stage in self.stages if name in stage.names):
            if self.masters and part[name].dtype != mx.float32 and self.updates(name):
                self._masters[name] = array
            part[name] = array.astype(part[name].dtype)
            mx.eval(array, part[name])

    def apply(self, scale: float = 1.0) -> None:
        """Update the weights with the gradients times ``scale``, and forget the gradients.

        Replicas that divide the weights must all call it.
        """
        gradients, weights = self._gradients_and_weights(scale)
        # Needed without trained weights too: it advances the learning rate that rank 0 reports.
        updated = self.optimizer.apply_gradients(gradients, weights)
        # Drop the old weights before anything is evaluated, so that their memory is used again.
        weights.clear()
        old: dict[str, mx.array] = {}
        new: dict[str, mx.array] = {}
        for stage in self.stages:
            for name in filter(self.updates, stage.names):
                if name in self._masters:
                    self._masters[name] = updated[name]
                if not self.has_moved:
                    old[name] = stage.part[name]
                stage.part[name] = new[name] = updated[name].astype(stage.part[name].dtype)
        for piece in self._pieces:
            mine = [name for name in piece.names if name in updated]
            compute = begin_evaluation if piece.has_room else mx.eval
            compute([gradients.pop(name) for name in mine])
            compute([self.optimizer.state.get(name, {}) for name in mine])
            mx.eval([updated.pop(name) for name in mine], [new[name] for name in mine])
            self._compare(old, {name: new.pop(name) for name in mine})
            if self.shards is not None:
                self.shards.start_gather(piece.names)
        mx.eval(self.optimizer.state)
        if self.shards is not None:
            self.shards.finish_gather()

    def _compare(self, old: dict[str, mx.array], new: Mapping[str, mx.array]) -> None:
        """Note whether any ``new`` weight differs from its ``old`` one, and drop the old ones."""
        pairs = [(old.pop(name), array) for name, array in new.items() if name in old]
        self.has_moved |= any(not mx.array_equal(*pair).item() for pair in pairs)
        if self.has_moved:
            old.clear()

    def _gradients_and_weights(
        self, scale: float
    ) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
        """Take the gradients of this rank's updates; return them and the arrays to update: weights,
        or their float32 copies."""
        gradients: dict[str, mx.array] = {}
        weights: dict[str, mx.array] = {}
        for stage in self.stages:
            for name in filter(self.updates, stage.names):
                weight = stage.part[name]
                # Gradients of matrices are transposed, and the optimizer reads them several times.
                gradient = mx.contiguous(stage.gradients[name])
                if scale != 1.0:
                    gradient = gradient * scale
                if self.masters and weight.dtype != mx.float32:
                    weight = self._masters.setdefault(name, weight.astype(mx.float32))
                weights[name], gradients[name] = weight, gradient.astype(weight.dtype)
            stage.gradients.clear()
        return gradients, weights

    def _in_pieces(self) -> list[UpdatePiece]:
        """Return the trained weights in pieces. Matrices at the ends of the model, the largest,
        come last, when the gradients of all layers are gone."""
        sizes = {name: stage.part[name].size for stage in self.stages for name in stage.names}
        layers: list[Mapping[str, int]] = []
        ends: list[Mapping[str, int]] = []
        for place, names in groupby(sizes, layer_of):
            is_layer = place.rpartition(".")[2].isdigit()
            (layers if is_layer else ends).append({name: FLOAT32 * sizes[name] for name in names})
        facts = next(
            each for each in OPTIMIZERS.values() if each.class_name == type(self.optimizer).__name__
        )
        divides = self.shards is not None and self.shards.divides
        return pieces_of(layers, ends, facts, self.piece_bytes, by_layer=divides)

    def state(self) -> dict[str, mx.array]:
        """Return the optimizer's state: a weight's as ``WEIGHT.KEY``, the common one as ``KEY``,
        and float32 copies as ``WEIGHT.master``."""
        masters = {f"{name}.{MASTER}": array for name, array in self._masters.items()}
        return masters | dict(tree_flatten(self.optimizer.state))

    def restore(self, state: Mapping[str, mx.array]) -> None:
        """Restore ``state``, in whatever layout it was made."""
        tree: dict[str, Any] = {}
        self._masters.clear()
        for name, array in state.items():
            weight, _, key = name.rpartition(".")
            if key == MASTER:
                self._masters[weight] = array
            elif weight:
                tree.setdefault(weight, {})[key] = array
            else:
                tree[key] = array
        self.optimizer.state = tree
