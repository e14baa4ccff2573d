"""Predict a rank's peak memory in training. No MLX, no MPI.

Resident arrays are parameters and optimizer state. Held arrays of a micro-batch live from F to its
I, and from I to its W; they are counted from shapes. Passing arrays exist only while an action
runs; they are bounded, or measured (``planning.memory.layers``). This module adds the ends of the
model, messages, gradients and the order of actions.

"metal" differs from the CPU as in MLX's source: RMSNorm is one kernel there, which keeps only its
input. The GPU gets operations by the command buffer, not one by one. Attention of plain causal rows
holds no scores there (``TrainingSetup.fuses_attention``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardmlx.config.checks import OPTIMIZERS
from shardmlx.engine.buffers import BUCKET_BYTES, ahead_of_gpu, positions_of_piece
from shardmlx.planning.memory.divided import divided
from shardmlx.planning.memory.layers import LayerMemory, layer_memory, shapes_of_layer
from shardmlx.planning.memory.training_setup import FLOAT32, Ratios, TrainingSetup

HEAD_ARRAYS = 8
"""Arrays of hidden states that pass in the norm and the loss beside the logits."""

LOGITS_OF_PIECE = 4
"""Float32 arrays of the logits of a piece of the loss. Three exist at a time. On a CPU a loop's
loss may be one piece of a whole chunk, with two arrays, which are four of half a chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one stage: held arrays of each micro-batch, temporary ones of one action."""

    weights: int
    """Parameters; with divided weights, the replica's own and buffers for others."""
    room: int
    """Part of ``weights`` in buffers for others' weights, which all stages of a rank share."""
    optimizer: int
    """Optimizer state from the first update on, of the fullest replica, rounding errors, and copies
    of trained weights."""
    gradients: int
    """Float32 sums of the replica's gradients, from the first W to the update."""
    after_forward: int
    """Arrays held from F to I, or to W where there is no I."""
    after_input: int
    """Arrays held from I to W, where there is an I."""
    during_forward: int
    """Temporary arrays in F, above ``after_forward``."""
    during_input: int
    """Temporary arrays in I, above those held when it begins."""
    during_weight: int
    """Temporary arrays in W, above those held when it begins."""
    during_update: int
    """Temporary arrays in the update, above all sums of gradients."""
    message: int
    """Hidden states of a micro-batch between two stages."""
    tied: int
    """Part of ``resident`` that the stages at both ends share if they are on one rank."""
    is_trained: bool
    has_input_gradient: bool

    @property
    def resident(self) -> int:
        """Bytes that stay for the whole run."""
        return self.weights + self.optimizer


@dataclass(frozen=True)
class _Stage:
    setup: TrainingSetup
    start: int
    stop: int
    kinds: tuple[LayerMemory, ...]

    @property
    def is_last(self) -> bool:
        """True if the stage has the lm_head."""
        return self.stop == self.setup.shape.num_layers

    @property
    def ends(self) -> list[float]:
        """Bytes of embedding and lm_head; a stage that has both counts a tied matrix once."""
        sizes = self.setup.workload.weight_sizes
        ends = []
        if self.start == 0 or (self.is_last and self.setup.shape.tied):
            ends.append(sizes.embedding)
        if self.is_last:
            ends.append(sizes.head)
        return ends

    def each_layer(self, start: int) -> list[LayerMemory]:
        """Return the memory of each layer of the stage from ``start`` on."""
        return [self.kinds[kind] for kind in self.setup.shape.pattern[start : self.stop]]

    @property
    def ratios(self) -> list[Ratios]:
        """Measured ratios of each layer with a backward pass: of the model's last one those with
        the head, of layers like its first those without a gradient for their input if none is."""
        measured, (first, *_) = self.setup.measured, self.setup.shape.pattern
        pattern = self.setup.shape.pattern[self.first_backward : self.stop]
        if measured is None:
            return [Ratios()] * len(pattern)
        kinds = list(measured.kinds)
        if not self.has_input_gradient:
            backward = measured.first.during_backward
            kinds[first] = kinds[first]._replace(during_backward=backward)
        found = [kinds[kind] for kind in pattern]
        return [*found[:-1], measured.last] if self.is_last else found

    @property
    def trained_layers(self) -> list[int]:
        """Number of parameters of each trained layer."""
        return [layer.parameters for layer in self.each_layer(self.lowest_trained)]

    @property
    def lowest_trained(self) -> int:
        """Lowest layer with trained weights."""
        return max(self.start, self.setup.workload.first_trained_layer)

    @property
    def trained_ends(self) -> list[int]:
        """Number of parameters of each trained matrix at an end."""
        ends = self.ends if self.setup.tune.unfreeze_all else []
        return [round(end / self.setup.dtype_bytes) for end in ends]

    @property
    def trained(self) -> list[int]:
        """Number of parameters of each trained layer and matrix."""
        return self.trained_layers + self.trained_ends

    @property
    def has_input_gradient(self) -> bool:
        """True if a stage below has trained weights."""
        return self.setup.workload.first_trained < self.start

    @property
    def first_backward(self) -> int:
        """Lowest layer with a backward pass; all layers, for a gradient to stages below."""
        return min(max(self.start, self.setup.workload.first_trained), self.stop)

    @property
    def tied(self) -> float:
        """Bytes of a tied matrix that another stage holds too, with its optimizer state."""
        if not self.setup.shape.tied or (self.start == 0) == self.is_last:
            return 0.0
        embedding = self.setup.workload.weight_sizes.embedding
        if self.setup.divides_weights:
            return embedding / self.setup.dp
        if not self.setup.tune.unfreeze_all or self.setup.tune.divides_optimizer:
            return embedding
        return embedding * (1 + _state_bytes(self.setup) / self.setup.dtype_bytes)


def trained_shapes(setup: TrainingSetup) -> list[tuple[int, ...]]:
    """Return the shapes of all trained weights of the model."""
    shape = setup.shape
    work = setup.workload
    layers = range(work.first_trained_layer, shape.num_layers)
    found = [each for i in layers for each in shapes_of_layer(setup, shape.layer(i))]
    whole = _Stage(setup, 0, shape.num_layers, _kinds(setup))
    width = shape.hidden_size
    return found + [(end // width, width) for end in whole.trained_ends]


@lru_cache(maxsize=64)
def _kinds(setup: TrainingSetup) -> tuple[LayerMemory, ...]:
    kinds = tuple(layer_memory(setup, kind) for kind in setup.shape.kinds)
    if setup.measured is None:
        return kinds
    return tuple(
        kind._replace(
            after_forward=round(ratios.after_forward * kind.after_forward),
            after_input=round(ratios.after_input * kind.after_input),
        )
        for kind, ratios in zip(kinds, setup.measured.kinds, strict=True)
    )


def stage_memory(setup: TrainingSetup, start: int, stop: int) -> StageMemory:
    """Return the bytes of layers ``start`` to ``stop`` as a stage, with the model's ends there."""
    stage = _Stage(setup, start, stop, _kinds(setup))
    trained = stage.trained
    parameters = sum(trained)
    largest = FLOAT32 * max(trained, default=0)
    summed = _updated(stage, parameters) if setup.divides_weights else parameters
    after_forward, after_input = _held(stage)
    during_forward, during_input = _passing(stage)
    during_weight = _during_weight(stage, during_input, parameters, largest)
    if setup.divides_weights:
        after_input, during_input = 0, during_weight  # W comes with I
    weights, room = _weights(stage, parameters)
    return StageMemory(
        weights=round(weights),
        room=round(room),
        optimizer=_updated(stage, parameters) * _state_bytes(setup)
        + FLOAT32 * setup.workload.error_copies * _in_sums(stage, parameters)
        + FLOAT32 * setup.workload.copies * summed,
        gradients=FLOAT32 * summed,
        after_forward=after_forward,
        after_input=after_input if stage.has_input_gradient else 0,
        during_forward=round(during_forward),
        during_input=round(during_input),
        during_weight=round(during_weight),
        during_update=_during_update(stage, summed),
        message=setup.message,
        tied=round(stage.tied),
        is_trained=parameters > 0,
        has_input_gradient=stage.has_input_gradient,
    )


def _weights(stage: _Stage, parameters: int) -> tuple[float, float]:
    """Return the bytes of a stage's weights, and how many of these are buffers for others'."""
    setup = stage.setup
    layers = stage.setup.workload.weight_sizes.layers[stage.start : stage.stop]
    if not setup.divides_weights:
        return sum(layers) + sum(stage.ends) + FLOAT32 * parameters * (not setup.tune.is_full), 0.0
    most = divided(setup, stage.start, stage.stop, stage.ends).most
    if setup.tune.is_full:
        return most.weights, most.room
    # Two layers of other replicas' adapters have buffers, too.
    of_two = FLOAT32 * 2 * max(stage.trained_layers, default=0) * (setup.dp - 1) / setup.dp
    return most.weights + FLOAT32 * parameters / setup.dp + of_two, most.room + of_two


def held_once(stages: Collection[StageMemory]) -> int:
    """Return the excess bytes of weights that several stages of a rank count but share."""
    rooms = [each.room for each in stages]
    tied = [each.tied for each in stages if each.tied]
    return sum(rooms) - max(rooms, default=0) + sum(tied[1:])


def _in_sums(stage: _Stage, parameters: int) -> int:
    """Return how many of a stage's ``parameters`` have gradients that several ranks sum."""
    if stage.setup.dp > 1:
        return parameters
    is_shared = stage.tied > 0 and stage.setup.tune.unfreeze_all
    return is_shared * round(stage.setup.workload.weight_sizes.embedding / stage.setup.dtype_bytes)


def _updated(stage: _Stage, parameters: int) -> int:
    """Return how many ``parameters`` the busiest replica updates: each weight has one owner."""
    setup = stage.setup
    if not setup.tune.divides_optimizer or not parameters:
        return parameters
    if setup.divides_weights and setup.tune.is_full:
        most = divided(setup, stage.start, stage.stop, stage.ends).most
        return most.trained // setup.dtype_bytes
    return max([-(-parameters // setup.dp), *stage.trained_ends])


def _state_bytes(setup: TrainingSetup) -> int:
    """Return the bytes of the optimizer's state for a parameter, with its float32 copy."""
    settings = setup.tune.optimizer_settings
    has_moment = setup.tune.optimizer == "adafactor" and settings.get("beta_1") is not None
    states = OPTIMIZERS[setup.tune.optimizer].states + has_moment
    if setup.tune.master_weights:
        return FLOAT32 * (1 + states)
    return states * (FLOAT32 if not setup.tune.is_full else setup.dtype_bytes)


def _logits(stage: _Stage) -> int:
    """Return the bytes of the logits of all tokens, if they are held."""
    setup = stage.setup
    if not stage.is_last or setup.loss_piece is not None:
        return 0
    return setup.dtype_bytes * setup.tokens * setup.shape.vocab_size


def _loss_piece(stage: _Stage) -> int:
    """Return the temporary bytes of a piece of the loss."""
    setup = stage.setup
    if not stage.is_last or setup.loss_piece is None:
        return 0
    logits = positions_of_piece(setup.loss_piece) * setup.shape.vocab_size
    return LOGITS_OF_PIECE * logits * FLOAT32


def _held(stage: _Stage) -> tuple[int, int]:
    """Return the bytes that a micro-batch holds from F to I, and from I to W."""
    setup = stage.setup
    message = stage.setup.message
    live = stage.each_layer(stage.first_backward)
    logits = _logits(stage)
    if not live and not stage.trained:
        return 0, 0
    # Beyond the layers, the last stage holds its norm's input, others a buffer for the gradient.
    after_forward = logits + message
    after_input = 0 if stage.is_last else message
    if stage.is_last and setup.loss_piece is not None:
        after_forward += message  # input and gradient
        after_input += message
    if live and setup.attention_piece is None:
        # Packed rows have masks that all layers share, and so have recomputed layers with windows.
        shared = setup.grad_checkpoint and any(setup.shape.windows)
        after_forward += max(setup.masks, shared) * setup.length**2
    if not setup.grad_checkpoint:
        after_forward += sum(layer.after_forward for layer in live)
        after_input += sum(layer.after_input for layer in live)
    elif live:
        # Layers hold their inputs. The last stage's output is counted above, as the norm's input.
        after_forward += message * (len(live) + (not stage.is_last))
    if stage.is_last and setup.tune.unfreeze_all:
        after_forward += 2 * message
        after_input += logits + 3 * message
    return after_forward, after_input


def _passing(stage: _Stage) -> tuple[float, float]:
    """Return the bytes that pass in F, and in I, or in W if there is no I."""
    layers = stage.each_layer(stage.first_backward)
    if layers:
        return _passing_forward(stage, layers), _passing_backward(stage, layers)
    frozen = max(each.during_forward for each in stage.each_layer(stage.start))
    of_head = HEAD_ARRAYS * stage.setup.message * stage.is_last
    return max(frozen + 2 * _logits(stage), of_head + _loss_piece(stage)), 0.0


def _passing_forward(stage: _Stage, layers: Sequence[LayerMemory]) -> float:
    """Return the bytes that pass in F: in the head, or in the largest of the ``layers``."""
    setup = stage.setup
    logits = _logits(stage)
    ratios = stage.ratios
    of_head: float = HEAD_ARRAYS * setup.message * stage.is_last
    if setup.grad_checkpoint and logits:
        of_head = max(layer.during_forward for layer in layers)  # it is not held, but passes
    of_head += max(logits, _loss_piece(stage))
    passing = [ratios[-1].during_forward * of_head]
    for layer, ratio in zip(layers, ratios, strict=True):
        passing.append(ratio.during_forward * layer.during_forward)
    waiting = _given_to_gpu(setup, [layer.during_forward for layer in layers])
    return max(passing) + ratios[-1].during_forward * waiting


def _passing_backward(stage: _Stage, layers: Sequence[LayerMemory]) -> float:
    """Return the bytes that pass in the backward of ``layers``, above those held when it begins."""
    setup = stage.setup
    logits = _logits(stage)
    ratios = stage.ratios
    joins = setup.joins_weights or not stage.has_input_gradient
    # Logits go before all layers' passes but the last one's, unless the head waits for its W.
    gone = 0 if setup.tune.unfreeze_all else logits
    most = freed = 0.0
    for layer, ratio in zip(reversed(layers), reversed(ratios), strict=True):
        passing = layer.during_joined if joins else layer.during_backward
        most = max(most, ratio.during_backward * passing - freed)
        freed = max(freed, gone)
        if not setup.grad_checkpoint:
            freed += layer.after_forward - layer.after_input
    beside = _given_to_gpu(setup, [layer.during_backward for layer in layers])
    if setup.backend != "cpu" or setup.dtype_bytes < FLOAT32:
        beside += logits  # our own loss, used for float32 on a CPU, needs no more than are held
    return most + ratios[-1].during_backward * beside


def _given_to_gpu(setup: TrainingSetup, passing: Collection[float]) -> float:
    """Return the bytes of other layers that wait for a GPU beside the largest layer's."""
    if setup.backend == "cpu":
        return 0.0
    return min(ahead_of_gpu(setup.dtype_bytes), sum(passing) - max(passing))


def _during_weight(stage: _Stage, during_input: float, parameters: int, largest: int) -> float:
    """Return the bytes of gradients on their way to the sums; ``largest`` of a layer or matrix."""
    setup = stage.setup
    if setup.divides_weights:
        # The buffer for the gradient between two layers, one layer's gradients, and the previous
        # layer's in a bucket under way.
        return setup.message + max(during_input, float(largest)) + largest
    passing = 0.0 if setup.grad_checkpoint else float(largest)
    if not stage.has_input_gradient:
        passing = max(passing, during_input)  # I and W are one action
    if setup.tune.unfreeze_all and stage.is_last and setup.loss_piece is not None:
        # A piece's gradient of the head, and the sum of the pieces before it.
        passing = max(passing, _loss_piece(stage) + 2 * largest)
    if setup.dp > 1:
        bucket = max(BUCKET_BYTES, largest)
        passing = max(passing, min(bucket, FLOAT32 * parameters))
    return passing


def _during_update(stage: _Stage, summed: int) -> int:
    """Return the temporary bytes of the update, above the gradients of ``summed`` parameters.

    The norm squares a bucket of gradients, or the largest matrix. An update has room for what a
    layer takes (``engine.optimizer.pieces_of``). Small matrices free their gradients before large
    ones, as those at the ends, are updated.
    """
    layers = stage.each_layer(stage.lowest_trained)
    ends = stage.trained_ends
    of_end = max(ends, default=0)
    optimizer = OPTIMIZERS[stage.setup.tune.optimizer]
    gone = max(0, summed - sum(ends))
    return max(
        max(FLOAT32 * of_end, min(BUCKET_BYTES, FLOAT32 * summed)),
        max((layer.during_update for layer in layers), default=0),
        FLOAT32 * (optimizer.passing_alone * of_end - gone),
    )
