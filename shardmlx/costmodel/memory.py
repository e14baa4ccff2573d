"""What a rank's memory peaks at while it trains: which arrays live when. No MLX, no MPI.

Three kinds of arrays. Resident: parameters and the optimizer's state. Held: what a micro-batch
leaves behind at F for its I, and at I for its W; ``costmodel.layer_memory`` counts these one by
one. Passing: what exists only while an action runs. MLX schedules operations ahead of their
execution and frees nothing before it has run, so that about one layer's intermediate arrays are
alive at a time; of these the numbers are fitted, within a fifth.

Measured with MLX 0.32 on the CPU. "metal" differs in what MLX's source says: there RMSNorm is one
kernel, which keeps its input alone. Attention goes through its scores on both: in training MLX
does not use its fused kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from shardmlx.config.inference import WHOLE_CHUNK
from shardmlx.costmodel.layer_memory import (
    BACKENDS,
    FLOAT32,
    LayerMemory,
    TrainingSetup,
    layer_memory,
)
from shardmlx.engine.buffers import BUCKET_BYTES, PREPOSTED
from shardmlx.models import kv_cache
from shardmlx.models.shape import ModelShape
from shardmlx.partitioners.costs import LayerCosts
from shardmlx.pipeline.actions import Action, Kind

__all__ = ["StageMemory", "TrainingSetup", "inference_memory", "rank_peak", "stage_memory"]

STATES: Mapping[str, int] = MappingProxyType(
    {"adam": 2, "adamw": 2, "sgd": 1, "muon": 1, "adafactor": 0}
)
"""Copies of the trained weights that an optimizer keeps; Adafactor's rows and columns are few,
but with a beta_1 it keeps one copy too."""

UPDATED_AT_ONCE: Mapping[str, int] = MappingProxyType(
    {"adam": 3, "adamw": 3, "sgd": 2, "muon": 5, "adafactor": 3}
)
"""Copies of a layer's trained weights that pass in an update, or in the norm before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one stage. What is held is of each micro-batch, what passes of one action."""

    weights: int
    """All parameters, frozen and trained."""
    optimizer: int
    """Its state, from the first update."""
    gradients: int
    """Their sums, in float32: from the first W to the update."""
    after_forward: int
    """Held from F to I, or to W where there is no I."""
    after_input: int
    """Held from I to W, where there is an I."""
    during_forward: int
    """Above ``after_forward``."""
    during_input: int
    """Above what is held when I begins."""
    during_weight: int
    """Above what is held when W begins."""
    during_update: int
    message: int
    """The hidden states of a micro-batch between two stages."""
    tied: int
    """Of ``resident``, what the stages at both ends hold together if they are on one rank."""
    is_trained: bool
    has_input_gradient: bool

    @property
    def resident(self) -> int:
        """What stays for the whole run."""
        return self.weights + self.optimizer


def stage_memory(setup: TrainingSetup, start: int, stop: int) -> StageMemory:
    """Of the stage with layers ``start`` to ``stop``, with the embedding if ``start`` is 0, and
    with norm and head if ``stop`` is the number of layers."""
    shape, sizes, size = setup.shape, setup.weight_sizes, setup.dtype_bytes
    if not 0 <= start < stop <= shape.num_layers:
        raise ValueError(f"layers {start} to {stop} of {shape.num_layers}")
    is_first, is_last = start == 0, stop == shape.num_layers
    layer = layer_memory(setup)
    num_trained = stop - min(stop, max(start, setup.first_trained_layer))

    # A stage that is first and last holds a tied matrix once.
    ends = [sizes.embedding] * (is_first or (is_last and shape.tied)) + [sizes.head] * is_last
    trained = [layer.parameters] * num_trained
    trained += [round(end / size) for end in ends] * setup.unfreeze_all
    parameters = sum(trained)
    weights: float = sum(sizes.layers[start:stop]) + sum(ends)
    weights += FLOAT32 * parameters * setup.has_adapters
    trained_bytes = FLOAT32 if setup.has_adapters else size

    states = STATES[setup.optimizer] + (setup.optimizer == "adafactor" and setup.first_moment)
    tied = sizes.embedding * (shape.tied and is_first != is_last)
    tied *= 1 + states * setup.unfreeze_all

    lowest = 0 if setup.unfreeze_all else setup.first_trained_layer
    has_input_gradient = lowest < start
    # A gradient for the embedding passes through all layers.
    live = stop - start if has_input_gradient or setup.unfreeze_all else num_trained
    message = setup.message
    logits = size * setup.tokens * shape.vocab_size * is_last
    after_forward, after_input, during_forward, during_input = _of_layers(
        setup, layer, live, stop - start, message
    )
    if live or parameters:
        # The input of the last norm; elsewhere the buffer for the gradient that is to come.
        after_forward += logits + message
        after_input += message * (not is_last)
    if is_last and setup.unfreeze_all:
        after_forward += 2 * message
        after_input += logits + 3 * message
    if setup.grad_checkpoint:
        # What a layer computes again comes after the logits have gone.
        during_forward, during_input = max(logits, during_forward), max(logits, during_input)
    else:
        during_forward, during_input = logits + during_forward, logits + during_input
    # The gradients of a layer or a matrix, on their way to the sums.
    during_weight = 0.0 if setup.grad_checkpoint else float(FLOAT32 * max(trained, default=0))
    if not has_input_gradient:
        during_weight = max(during_weight, during_input)  # I and W in one
    if setup.dp > 1:
        bucket = max(BUCKET_BYTES, FLOAT32 * max(trained, default=0))
        during_weight = max(during_weight, min(bucket, FLOAT32 * parameters))
    return StageMemory(
        weights=round(weights),
        optimizer=states * trained_bytes * parameters,
        gradients=FLOAT32 * parameters,
        after_forward=round(after_forward),
        after_input=round(after_input) * has_input_gradient,
        during_forward=round(during_forward),
        during_input=round(during_input),
        during_weight=round(during_weight),
        during_update=UPDATED_AT_ONCE[setup.optimizer] * FLOAT32 * max(trained, default=0),
        message=message,
        tied=round(tied),
        is_trained=parameters > 0,
        has_input_gradient=has_input_gradient,
    )


def _of_layers(
    setup: TrainingSetup, layer: LayerMemory, live: int, count: int, message: int
) -> tuple[float, float, float, float]:
    """(held after F, after I, passing in F, in I) of ``count`` layers, ``live`` with backward."""
    if setup.grad_checkpoint:
        # Inputs of layers, and the last output. In I a layer computes what it needs again, and
        # its W comes along.
        again = layer.after_forward + FLOAT32 * layer.parameters
        inputs = (message * (live + 1) + setup.masks * setup.length**2) * (live > 0)
        return inputs, 0.0, layer.during_checkpoint, layer.during_input + again
    held = live * layer.after_forward
    passing = layer.during_forward * (live > 0)
    if live < count:
        # Layers without a backward run before anything is held.
        passing = max(passing, layer.during_frozen - held)
    return held, live * layer.after_input, passing, layer.during_input


def rank_peak(
    actions: Sequence[Action], stages: Mapping[int, StageMemory], setup: TrainingSetup
) -> int:
    """Peak bytes of a rank that holds ``stages``, by index, in a step and its update.

    ``actions`` are the rank's lowered ones (``pipeline.lowering``): their order alone decides
    how many micro-batches are held at a time. Beside these there are the receives posted ahead,
    and the last message sent, which stays until the next one goes. An I that the stage does not
    need counts for nothing.
    """
    resident = sum(stage.resident for stage in stages.values())
    tied = [stage.tied for stage in stages.values() if stage.tied]
    resident -= sum(tied[1:])
    to_receive = sum(action.kind is Kind.RECV_F for action in actions)
    held: dict[tuple[int, int], int] = {}
    total = 0  # of what is held
    sums: dict[int, int] = {}
    sent = False
    peak = resident
    for action in actions:
        stage, key = stages[action.stage], (action.stage, action.microbatch)
        before = held.get(key, 0)
        passing, left = 0, before
        match action.kind:
            case Kind.F:
                before = stage.after_forward
                passing, left = stage.during_forward, stage.after_forward
            case Kind.I if stage.has_input_gradient:
                # Without W to come nothing is held for it.
                passing, left = stage.during_input, stage.after_input * stage.is_trained
            case Kind.W:
                passing, left = stage.during_weight, 0
            case Kind.RECV_F:
                to_receive -= 1
            case Kind.SEND_F | Kind.SEND_B:
                sent = True
        buffers = (min(PREPOSTED, to_receive) + sent) * setup.message
        summed = sum(sums.values())
        if action.kind is Kind.W:
            sums[action.stage] = stage.gradients
        total -= held.get(key, 0)
        most = total + max(summed + before, sum(sums.values()) + left)
        peak = max(peak, resident + most + passing + buffers)
        total += left
        held[key] = left
    gradients = sum(stage.gradients for stage in stages.values())
    updating = max((stage.during_update for stage in stages.values()), default=0)
    return max(peak, resident + gradients + updating)


def inference_memory(
    shape: ModelShape,
    weight_sizes: LayerCosts,
    start: int,
    stop: int,
    rows: int,
    context: int,
    dtype_bytes: int,
    *,
    chunk: int = WHOLE_CHUNK,
    max_kv_size: int | None = None,
    backend: str = BACKENDS[0],
    capacity: int | None = None,
) -> int:
    """Bytes of a stage that generates ``rows`` texts of ``context`` tokens, prompt included; with
    ``capacity`` it keeps no more tokens than these, of all texts together.

    Parameters; keys and values; logits; and a few arrays of one layer for ``chunk`` tokens of one
    prompt: on the CPU also the scores of its attention, which Metal's kernel does not keep.
    """
    is_first, is_last = start == 0, stop == shape.num_layers
    weights: float = sum(weight_sizes.layers[start:stop]) + is_last * weight_sizes.head
    weights += (is_first or (is_last and shape.tied)) * weight_sizes.embedding
    if capacity is None:
        caches = rows * cache_memory(shape, start, stop, context, dtype_bytes, max_kv_size)
    else:
        caches = kept_memory(shape, start, stop, capacity, dtype_bytes)
    chunk = min(context, chunk)
    width = 7 * shape.hidden_size + 2 * shape.intermediate_size * max(1, shape.experts_per_token)
    passing = chunk * (width + shape.num_heads * shape.head_dim)
    if backend == "cpu":
        passing += 2 * shape.num_heads * chunk * min(context, max_kv_size or context)
    logits = is_last * rows * shape.vocab_size
    return round(weights + caches + dtype_bytes * (passing + logits))


def cache_memory(
    shape: ModelShape,
    start: int,
    stop: int,
    context: int,
    dtype_bytes: int,
    max_kv_size: int | None = None,
) -> int:
    """Bytes of keys and values of one text of ``context`` tokens in layers ``start`` to ``stop``:
    those of a window in sliding layers, at most of ``max_kv_size`` tokens in all."""
    limit = min(context + kv_cache.STEP, max_kv_size or context + kv_cache.STEP)
    tokens = sum(min(limit, shape.windows[i] or limit) for i in range(start, stop))
    return 2 * dtype_bytes * shape.num_kv_heads * shape.head_dim * tokens


def kept_memory(shape: ModelShape, start: int, stop: int, tokens: int, dtype_bytes: int) -> int:
    """Bytes of keys and values of so many tokens, of whatever texts, in layers ``start`` to
    ``stop``. Of long texts sliding layers keep less."""
    return 2 * dtype_bytes * shape.num_kv_heads * shape.head_dim * tokens * (stop - start)
