"""The optimizers and learning-rate schedules of mlx-lm, with LARS and LAMB, over the weights of one
rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, signature
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, cast

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from shardmlx.compat import begin_evaluation
from shardmlx.config.checks import OPTIMIZERS, OptimizerFacts
from shardmlx.config.specs import FineTune
from shardmlx.engine.buffers import UPDATE_BYTES, ahead_of_gpu, in_buckets
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
    """Trained weights, by name with their float32 bytes: ``nbytes`` in all. Where it ``has_room``,
    one wait is enough, so that a fast device computes without waiting for the host. Elsewhere one
    kind of arrays is waited for after the other. Replicas exchange weights when no other piece of
    the layer ``follows``."""

    sizes: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0
    largest: int = 0
    has_room: bool = True
    follows: bool = False

    def most_with(self, nbytes: int, facts: OptimizerFacts, given: int) -> int:
        """Return the most bytes that one wait for these weights and one more takes. MLX allocates
        arrays for a few weights ahead; those that a GPU is ``given`` may be more."""
        ahead = max(facts.ahead * max(self.largest, nbytes), given)
        return min(facts.at_once * (self.nbytes + nbytes), ahead)

    def add(self, name: str, nbytes: int) -> None:
        """Add a weight."""
        self.sizes[name] = nbytes
        self.nbytes += nbytes
        self.largest = max(self.largest, nbytes)

    def groups(self, small: int) -> list[list[str]]:
        """Return the names of the weights that are begun together, one group after the other: all
        if they have no more than ``small`` bytes, or as many as have no more than the largest."""
        together = small if self.nbytes <= small else self.largest
        return in_buckets(self.sizes, lambda name: self.sizes[name] // FLOAT32, together)


def pieces_of(
    layers: Sequence[Mapping[str, int]],
    ends: Sequence[Mapping[str, int]],
    facts: OptimizerFacts,
    small: int = UPDATE_BYTES,
    *,
    given: int = 0,
    by_layer: bool = False,
) -> list[UpdatePiece]:
    """Return the weights of ``layers`` and of the ``ends`` of the model in pieces: as few as take
    no more memory than the plan counts for the largest layer.

    Layers and ends have the float32 bytes of each weight; ``given`` bytes of arrays may wait for a
    GPU. Pieces free their gradients, so that later ones have more room: the smallest weights come
    first. Pieces ``by_layer`` are at most a layer, in their order, or several of up to ``small``
    bytes.
    """
    of_layers = [facts.passing * sum(layer.values()) for layer in layers]
    room = max([*of_layers, *(nbytes for end in ends for nbytes in end.values())], default=0)
    parts = enumerate((*layers, *ends))
    weights = [(number, name, nbytes) for number, part in parts for name, nbytes in part.items()]
    if not by_layer:
        weights.sort(key=itemgetter(2))
    piece = UpdatePiece()
    pieces = [piece]
    last = 0
    for number, name, nbytes in weights:
        goes_on = piece.has_room and piece.most_with(nbytes, facts, given) <= room
        if by_layer and number != last:
            goes_on = False
        if piece.sizes and not (goes_on or piece.nbytes + nbytes <= small):
            room += piece.nbytes
            piece.follows = by_layer and number == last
            piece = UpdatePiece()
            pieces.append(piece)
        fits = piece.most_with(nbytes, facts, given) <= room
        piece.add(name, nbytes)
        piece.has_room = fits or piece.nbytes <= small
        last = number
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


class _Graphs(NamedTuple):
    """Lazy arrays of an update, by the names of weights, each until it is begun, so that its memory
    is used again: the gradients, the updated weights or their float32 copies, the weights as they
    are stored, and whether they stay as they were, until one has changed."""

    gradients: dict[str, mx.array]
    updated: dict[str, mx.array]
    new: dict[str, mx.array]
    unchanged: dict[str, mx.array]


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
        graphs = self._graphs(scale)
        updated: list[str] = []
        for piece in self._pieces:
            mine = [name for name in piece.sizes if name in graphs.new]
            if not piece.has_room:
                mx.eval([graphs.gradients.pop(name) for name in mine])
                mx.eval([self.optimizer.state.get(name, {}) for name in mine])
            for group in piece.groups(self.piece_bytes):
                self._begin([name for name in group if name in graphs.new], graphs)
            unchanged = [graphs.unchanged.pop(name) for name in mine if name in graphs.unchanged]
            mx.eval([graphs.new.pop(name) for name in mine], unchanged)
            self.has_moved |= not all(each.item() for each in unchanged)
            if self.has_moved:
                graphs.unchanged.clear()
            updated += piece.sizes
            if self.shards is not None and not piece.follows:
                self.shards.start_gather(updated)
                updated = []
        if self.shards is not None:
            self.shards.finish_gather()

    def _graphs(self, scale: float) -> _Graphs:
        """Set the stages' weights to updated ones that are still lazy."""
        gradients, weights = self._gradients_and_weights(scale)
        # Needed without trained weights too: it advances the learning rate that rank 0 reports.
        updated = self.optimizer.apply_gradients(gradients, weights)
        common = [each for each in self.optimizer.state.values() if isinstance(each, mx.array)]
        begin_evaluation(common)
        graphs = _Graphs(gradients, updated, {}, {})
        for stage in self.stages:
            for name in filter(self.updates, stage.names):
                old = stage.part[name]
                if name in self._masters:
                    self._masters[name] = updated[name]
                stage.part[name] = graphs.new[name] = updated[name].astype(old.dtype)
                if not self.has_moved:
                    graphs.unchanged[name] = mx.array_equal(old, graphs.new[name])
        return graphs

    def _begin(self, names: Sequence[str], graphs: _Graphs) -> None:
        """Let the device update these weights."""
        for name in names:
            graphs.gradients.pop(name, None)
        begin_evaluation(
            [self.optimizer.state.get(name, {}) for name in names],
            [graphs.updated.pop(name) for name in names],
            [graphs.new[name] for name in names],
        )
        # Apart: not all ranks ask for these, and all must sum the norms of pieces in one order.
        begin_evaluation([graphs.unchanged[name] for name in names if name in graphs.unchanged])

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
        """Return the trained weights in pieces."""
        sizes = {
            name: self._size_in_pieces(stage.part, name)
            for stage in self.stages
            for name in stage.names
        }
        layers: list[Mapping[str, int]] = []
        ends: list[Mapping[str, int]] = []
        for place, names in groupby(sizes, layer_of):
            is_layer = place.rpartition(".")[2].isdigit()
            (layers if is_layer else ends).append({name: FLOAT32 * sizes[name] for name in names})
        facts = next(
            each for each in OPTIMIZERS.values() if each.class_name == type(self.optimizer).__name__
        )
        divides = self.shards is not None and self.shards.divides
        given = ahead_of_gpu(FLOAT32) if mx.default_device() == mx.gpu else 0
        return pieces_of(layers, ends, facts, self.piece_bytes, given=given, by_layer=divides)

    def _size_in_pieces(self, part: Slice, name: str) -> int:
        """Return the numbers of a weight; of the whole one where ranks that have pieces of it sum
        its norm in the update. They must begin weights in the same order and groups, and their
        pieces may be unequal."""
        size: int = part[name].size
        if not (isinstance(self.optimizer, LayerwiseOptimizer) and self.optimizer.sums(name)):
            return size
        piece = part.pieces[name]
        return size // piece.size * piece.whole

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
