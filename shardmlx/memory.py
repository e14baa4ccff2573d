"""What a rank's memory peaks at, from arithmetic: which arrays live when. No MLX, no MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardmlx.actions import Action, Kind
from shardmlx.models.shape import ModelShape
from shardmlx.partitioners import LayerCosts

FLOAT32 = 4
"""Bytes. Sums of gradients, and the weights of adapters, are in float32."""

PREPOSTED = 2
"""Inputs that the engine receives ahead."""

STATES: Mapping[str, float] = {"adam": 2, "adamw": 2, "sgd": 1, "muon": 1, "adafactor": 0}
"""Copies of the trained weights that an optimizer keeps; Adafactor's rows and columns are few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """What decides the memory of training.

    ``weight_sizes`` are bytes of parameters in memory, a tied matrix in ``embedding``;
    ``dtype_bytes`` of an activation; ``rows`` x ``length`` the tokens of a micro-batch;
    ``lora_keys`` None means all linear layers, as in mlx-lm. ``backend`` is "cpu" or "metal".
    """

    shape: ModelShape
    weight_sizes: LayerCosts
    dtype_bytes: int
    rows: int
    length: int
    fine_tune_type: str = "lora"
    first_trained_layer: int = 0
    lora_rank: int = 8
    lora_keys: tuple[str, ...] | None = None
    unfreeze_all: bool = False
    optimizer: str = "adam"
    grad_checkpoint: bool = False
    dp: int = 1
    backend: str = "metal"

    def __post_init__(self) -> None:
        layers = self.shape.num_layers
        if len(self.weight_sizes.layers) != layers:
            raise ValueError(f"weights of {len(self.weight_sizes.layers)} layers for {layers}")
        if not 0 <= self.first_trained_layer <= layers:
            raise ValueError(f"first trained layer {self.first_trained_layer} of {layers}")
        if self.optimizer not in STATES:
            raise ValueError(f"optimizer {self.optimizer!r}")
        if self.fine_tune_type not in ("lora", "dora", "full"):
            raise ValueError(f"fine-tune type {self.fine_tune_type!r}")
        if self.backend not in ("cpu", "metal"):
            raise ValueError(f"backend {self.backend!r}")
        if min(self.dtype_bytes, self.rows, self.length, self.dp) < 1:
            raise ValueError("sizes start at 1")

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.rows * self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of one stage. ``after_forward`` and ``after_input`` are of each micro-batch."""

    weights: int  # parameters, frozen and trained
    optimizer: int  # its state
    gradients: int  # float32 sums, from the first W to the update
    after_forward: int  # held from F to I
    after_input: int  # held from I to W
    during_forward: int  # above what is held, while F runs
    during_input: int
    during_weight: int
    during_update: int
    message: int  # hidden states between two stages
    has_input_gradient: bool
    is_trained: bool

    @property
    def resident(self) -> int:
        """What stays for the whole run."""
        return self.weights + self.optimizer


def stage_memory(setup: TrainingSetup, start: int, stop: int) -> StageMemory:
    """Of the stage with layers ``start`` to ``stop``."""
    shape, size = setup.shape, setup.dtype_bytes
    is_first, is_last = start == 0, stop == shape.num_layers
    weights = sum(setup.weight_sizes.layers[start:stop])
    ends = is_first * setup.weight_sizes.embedding
    if is_last:
        ends += setup.weight_sizes.head
        if shape.tied and not is_first:
            ends += setup.weight_sizes.embedding
    trained_layers = range(max(start, setup.first_trained_layer), stop)
    full = setup.fine_tune_type == "full"
    if full:
        trained = sum(setup.weight_sizes.layers[i] for i in trained_layers)
        trained += ends * setup.unfreeze_all
        trained_bytes, parameters = trained, trained / size
        adapters = 0.0
    else:
        parameters = len(trained_layers) * _lora_parameters(setup)
        trained_bytes = adapters = FLOAT32 * parameters
    first = 0 if setup.unfreeze_all else setup.first_trained_layer
    needs_input = first < start
    live = range(start, stop) if needs_input else trained_layers
    hidden, tokens = shape.hidden_size, setup.tokens
    message = size * tokens * hidden
    token = _Token(setup)
    layer_f, layer_i = token.after_forward(full), token.after_input(full)
    after_f, after_i = len(live) * layer_f, len(live) * layer_i
    if setup.grad_checkpoint:
        after_f, after_i = len(live) * message, 0.0
    head_f = head_i = 0.0
    if is_last and live:
        head_f = size * tokens * (shape.vocab_size + hidden)
        head_i = size * tokens * (shape.vocab_size + 2 * hidden) * setup.unfreeze_all
    cotangent = 0 if is_last or not live else message
    recomputed = layer_f if setup.grad_checkpoint and live else 0.0
    gradients = FLOAT32 * parameters
    head = size * tokens * shape.vocab_size * is_last
    return StageMemory(
        weights=round(weights + ends + adapters),
        optimizer=round(STATES[setup.optimizer] * trained_bytes),
        gradients=round(gradients),
        after_forward=round(after_f + head_f + cotangent),
        after_input=round(after_i + head_i),
        during_forward=round(token.during_forward(full)),
        during_input=round(max(token.during_input(full) + recomputed, 3 * head)),
        during_weight=round(gradients + (0 if needs_input else token.during_input(full))),
        during_update=round(2 * trained_bytes),
        message=message,
        has_input_gradient=needs_input,
        is_trained=bool(trained_layers) or (setup.unfreeze_all and (is_first or is_last)),
    )


def rank_peak(
    actions: Sequence[Action], stages: Mapping[int, StageMemory], setup: TrainingSetup
) -> int:
    """Peak bytes of a rank that runs these lowered actions, then the optimizer's update."""
    base = sum(stage.resident for stage in stages.values())
    summed: set[int] = set()
    held: dict[tuple[int, int], int] = {}
    inputs = sum(action.kind is Kind.RECV_F for action in actions)
    posted, outbox, peak = min(PREPOSTED, inputs), 0, base
    inputs -= posted
    message = next(iter(stages.values())).message if stages else 0

    def now() -> int:
        sums = sum(stages[s].gradients for s in summed)
        return base + sums + sum(held.values()) + posted * message + outbox

    for action in actions:
        stage, key = stages[action.stage], (action.stage, action.microbatch)
        match action.kind:
            case Kind.F:
                if stage.is_trained or stage.has_input_gradient:
                    held[key] = stage.after_forward
                peak = max(peak, now() + stage.during_forward)
            case Kind.I:
                peak = max(peak, now() + stage.during_input)
                held[key] = stage.after_input
                if not stage.is_trained:
                    del held[key]
            case Kind.W:
                peak = max(peak, now() + stage.during_weight)
                held.pop(key, None)
                summed.add(action.stage)
            case Kind.SEND_F | Kind.SEND_B:
                outbox = message
            case Kind.RECV_F:
                posted -= inputs <= 0
                inputs -= inputs > 0
            case _:
                pass
        peak = max(peak, now())
    update = sum(stage.gradients + stage.during_update for stage in stages.values())
    return max(peak, base + update)


def inference_memory(
    shape: ModelShape,
    weight_sizes: LayerCosts,
    start: int,
    stop: int,
    rows: int,
    context: int,
    dtype_bytes: int,
) -> int:
    """Bytes of a stage that generates: weights, keys and values of ``context`` tokens, and more."""
    weights = sum(weight_sizes.layers[start:stop]) + (start == 0) * weight_sizes.embedding
    if stop == shape.num_layers:
        weights += weight_sizes.head + (shape.tied and start > 0) * weight_sizes.embedding
    seen = sum(min(context, shape.windows[i] or context) for i in range(start, stop))
    cache = 2 * shape.num_kv_heads * shape.head_dim * seen * rows * dtype_bytes
    passing = 4 * max(shape.intermediate_size, shape.hidden_size) * rows * dtype_bytes
    return round(weights + cache + passing)


@dataclass(frozen=True, slots=True)
class _Token:
    """Bytes of a layer's arrays for one micro-batch."""

    setup: TrainingSetup

    def _sizes(self) -> tuple[int, int, int, int, int]:
        shape = self.setup.shape
        return (
            shape.hidden_size,
            shape.intermediate_size * max(1, shape.experts_per_token),
            shape.num_heads * shape.head_dim,
            shape.num_kv_heads * shape.head_dim,
            shape.num_heads * self.setup.length,
        )

    def _bytes(self, elements: float) -> float:
        return elements * self.setup.tokens * self.setup.dtype_bytes

    def after_forward(self, full: bool) -> float:
        h, f, q, k, s = self._sizes()
        norms = 2 if full and self.setup.backend == "cpu" else 0
        return self._bytes((4 + norms) * h + 5 * f + 2 * q + 2 * k + s)

    def after_input(self, full: bool) -> float:
        h, f, q, k, _ = self._sizes()
        norms = 4 if full and self.setup.backend == "cpu" else 0
        return self._bytes((4 + norms) * h + 3 * f + 2 * q + 2 * k)

    def during_forward(self, full: bool) -> float:
        h, f, q, k, _ = self._sizes()
        return self._bytes(2 * h + 5 * q + k if full else 4 * h + 2 * f + 2 * q)

    def during_input(self, full: bool) -> float:
        h, f, q, k, s = self._sizes()
        return self._bytes(8 * h + 3 * f + 6 * q + k + 2 * s)


def _lora_parameters(setup: TrainingSetup) -> int:
    shape = setup.shape
    h, f = shape.hidden_size, shape.intermediate_size
    q, k = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    modules = {
        "self_attn.q_proj": h + q,
        "self_attn.k_proj": h + k,
        "self_attn.v_proj": h + k,
        "self_attn.o_proj": q + h,
        "mlp.gate_proj": h + f,
        "mlp.up_proj": h + f,
        "mlp.down_proj": f + h,
    }
    keys = modules if setup.lora_keys is None else setup.lora_keys
    return setup.lora_rank * sum(modules.get(key, 0) for key in keys)
