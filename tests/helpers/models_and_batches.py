"""Tiny models, random batches, and the run of one process that every pipeline must agree with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import _get_classes

from shardmlx.config.specs import FULL, NO_SAVINGS, NONE, Savings
from shardmlx.distributed.transport import Transport
from shardmlx.engine.batches import Batch, MicroBatch, make_batch, pack, split
from shardmlx.engine.engine import Engine
from shardmlx.engine.gathered_stage import build_stages
from shardmlx.engine.loss import token_loss
from shardmlx.engine.stage import Stage
from shardmlx.modelfiles.model_files import open_model
from shardmlx.models.activations import swiglu, use_swiglu
from shardmlx.models.families import FAMILIES
from shardmlx.models.shape import ModelShape
from shardmlx.models.slice import Slice
from shardmlx.models.tensors import is_dropped
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.schedules import get_schedule
from shardmlx.pipeline.stage_map import StageMap

VOCABULARY = 97

_ROPE = {"rope_theta": 10000.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16}
_OF_FAMILY: Mapping[str, Mapping[str, Any]] = {
    "ministral3": {"rope_parameters": {"rope_type": "default", "type": "default", **_ROPE}},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3": {"head_dim": 16},
}

Gradients = dict[str, np.ndarray]


def tiny_config(
    family: str = "llama", *, layers: int = 8, tied: bool = False, **overrides: Any
) -> dict[str, Any]:
    """Return what config.json would say of a tiny model of that family."""
    return {
        "model_type": family,
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        **_OF_FAMILY.get(family, {}),
        **overrides,
    }


def build(config: Mapping[str, Any], seed: int = 1) -> nn.Module:
    """mlx-lm's model of a configuration, quantised if that says so, with random weights."""
    kind, args = _get_classes(dict(config))
    mx.random.seed(seed)
    model: nn.Module = kind(args.from_dict(deepcopy(dict(config))))
    if hasattr(model, "sanitize") and config["model_type"] in FAMILIES:
        # Of some families mlx-lm looks at the tensors to know whether there is an lm_head.
        shape, weights = ModelShape.from_config(config), tree_flatten(model.parameters())
        kept = {name: array for name, array in weights if not is_dropped(name, shape)}
        assert set(model.sanitize(dict(kept))) == set(kept)
    if (quantisation := config.get("quantization")) is not None:
        nn.quantize(model, **quantisation)
    mx.eval(model.parameters())
    return model


def tiny_model(
    family: str = "llama", *, layers: int = 8, tied: bool = False, seed: int = 1, **overrides: Any
) -> nn.Module:
    """Return the same model for the same arguments; all its weights can be trained."""
    return build(tiny_config(family, layers=layers, tied=tied, **overrides), seed)


def move_trained(model: nn.Module) -> None:
    """Add noise to all that is trained: where a weight is zero, as lora_b is at first, or one,
    gradients would hide mistakes."""
    random = np.random.RandomState(3)
    model.update(
        tree_map(
            lambda w: w + mx.array(random.normal(0, 0.05, w.shape).astype(np.float32)),
            model.trainable_parameters(),
        )
    )


def tensors(directory: Path) -> dict[str, bytes]:
    """Return the bytes of a model's tensors, in whatever files they lie."""
    return {
        name: (directory / place.file).read_bytes()[place.start : place.end]
        for name, place in open_model(str(directory)).tensors.items()
    }


def save_model_directory(path: Path, config: Mapping[str, Any], seed: int = 1) -> nn.Module:
    """Write a model with random weights where mlx-lm loads it from; returns it."""
    path.mkdir(parents=True, exist_ok=True)
    model = build(config, seed)
    mx.save_safetensors(
        str(path / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    (path / "config.json").write_text(json.dumps(dict(config)))
    return model


def load_weights(directory: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a directory's safetensors files, in float32: NumPy has no bfloat16."""
    weights: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("*.safetensors")):
        arrays = mx.load(str(path))
        assert isinstance(arrays, dict)
        weights |= {name: np.array(array.astype(mx.float32)) for name, array in arrays.items()}
    return weights


def random_batch(rows: int, seed: int = 0, vocab: int = VOCABULARY, longest: int = 60) -> Batch:
    """Return a global batch of random tokens in sequences of different lengths."""
    random = np.random.RandomState(seed)
    samples = [
        ([int(token) for token in random.randint(1, vocab, size=random.randint(5, longest))], 0)
        for _ in range(rows)
    ]
    return make_batch(samples, max_seq_length=2048)


def saving(checkpoint: bool) -> Savings:
    """Return what a stage saves with gradient checkpointing, or without."""
    return Savings(recompute="full") if checkpoint else NO_SAVINGS


def all_answers(microbatch: MicroBatch) -> tuple[mx.array, mx.array]:
    """Return the tokens that should come next, and which of them count: both (rows, T)."""
    return mx.array(microbatch.targets), mx.array(microbatch.counts)


def logits_of(part: Slice, x: mx.array, **how: Any) -> mx.array:
    """Return all logits (rows, T, V) of the last slice."""
    return part.logits(part.norm(part(x, **how)))


def use_stage_activations(model: nn.Module) -> None:
    """Let a model of mlx-lm compute SwiGLU as stages do in training, from now on."""
    for layer in model.layers:
        use_swiglu(layer, swiglu)


def mean_loss(model: nn.Module, batch: MicroBatch) -> mx.array:
    """Return the mean loss, in one process: of mlx-lm's model, as the engine computes it."""
    use_stage_activations(model)
    logits = model(mx.array(batch.tokens[:, :-1]))
    return token_loss(logits, *all_answers(batch)) / batch.valid_tokens


def reference(
    model: nn.Module, microbatches: Sequence[MicroBatch], scale: float
) -> tuple[list[float], Gradients]:
    """Return (summed loss of each micro-batch, gradients by name) of one process without stages.

    mlx-lm's own forward over the whole model, one micro-batch after the other, with the stages'
    SwiGLU.
    """
    whole = Slice(model, 0, len(model.layers))
    use_stage_activations(model)
    names = whole.trainable
    losses: list[float] = []
    totals: list[mx.array] | None = None
    for microbatch in microbatches:

        def loss(*weights: mx.array, microbatch: MicroBatch = microbatch) -> mx.array:
            return whole.with_parameters(
                names,
                weights,
                lambda: token_loss(
                    model(mx.array(microbatch.tokens[:, :-1])), *all_answers(microbatch)
                ),
            )

        weights = [whole[name] for name in names]
        (value,), gradients = mx.vjp(loss, weights, [mx.array(scale)])
        totals = gradients if totals is None else [a + b for a, b in zip(totals, gradients)]  # noqa: B905
        mx.eval(value, totals)
        losses.append(float(np.array(value)))
    return losses, {name: np.array(total) for name, total in zip(names, totals or (), strict=True)}


@dataclass(frozen=True)
class Layout:
    """A schedule on so many pipeline ranks, stages a rank, and replicas."""

    schedule: str
    pp: int
    virtual: int = 1
    dp: int = 1

    def __str__(self) -> str:
        return f"{self.schedule}-p{self.pp}-v{self.virtual}-dp{self.dp}"

    @property
    def ranks(self) -> int:
        return self.pp * self.dp

    def plan(
        self, layers: int, rows: int, micro_batch_size: int = 1, *, pack: bool = False
    ) -> Plan:
        """Return a plan for so many layers, all trained, and ``rows`` rows in each replica."""
        stages = self.pp * self.virtual
        sizes = [layers // stages + (stage < layers % stages) for stage in range(stages)]
        placement = get_schedule(self.schedule).placement(self.pp, self.virtual)
        return Plan(
            mesh=Mesh(self.dp, self.pp),
            stage_map=StageMap.from_sizes(sizes, placement),
            schedule=self.schedule,
            rows=rows,
            micro_batch_size=micro_batch_size,
            trainable=(True,) * stages,
            pack=pack,
        )


@dataclass(frozen=True)
class Outcome:
    """Results of one step on one rank.

    ``losses`` of this rank's replica, by micro-batch, on the rank of the last stage only;
    ``gradients`` of this rank's stages; ``evaluated`` as ``losses``, from a forward-only run.
    """

    replica: int
    losses: dict[int, float]
    evaluated: dict[int, float]
    gradients: Gradients
    norm: float


def backward(stage: Stage, j: int) -> mx.array | None:
    """I, then W, of one micro-batch, as far as the stage has them; the gradient for its input."""
    gradient = stage.backward_input(j) if stage.needs_input_gradient else None
    if stage.is_trained:
        stage.backward_weight(j)
    return gradient


def through_stages(
    model: nn.Module,
    ranges: Sequence[tuple[int, int]],
    microbatches: Sequence[MicroBatch],
    *,
    scale: float = 1.0,
    key: tuple[int, ...] = (0,),
    savings: Savings = NO_SAVINGS,
) -> tuple[list[float], Gradients]:
    """Return (summed loss of each micro-batch, gradients by name), through stages in one process.

    One micro-batch passes after the other through stages of these layers.
    """
    slices = [Slice(model, start, stop) for start, stop in ranges]
    stages = build_stages(slices, savings=savings)
    losses = []
    for j, microbatch in enumerate(microbatches):
        out = None
        for stage in stages:
            out = stage.forward(j, microbatch, out, scale=scale, key=key)
        assert out is not None
        losses.append(float(np.array(out)))
        gradient = None
        for stage in reversed(stages):
            if gradient is not None:
                stage.fill_cotangent(j, gradient)
            gradient = backward(stage, j)
    gradients: Gradients = {}
    for stage in stages:
        for name, array in stage.gradients.items():
            gradients[name] = gradients.get(name, np.float32(0)) + np.array(array)
    return losses, gradients


def stages_of(
    transport: Transport, plan: Plan, model: nn.Module, *, savings: Savings = NO_SAVINGS
) -> list[Stage]:
    slices = [Slice(model, start, stop) for start, stop in plan.stage_map.partition.ranges]
    return build_stages(slices, plan.stages_of(transport.rank), savings=savings)


def run_engine(
    transport: Transport,
    plan: Plan,
    model: nn.Module,
    batch: Batch,
    *,
    savings: Savings = NO_SAVINGS,
) -> Outcome:
    """Make one training step of the engine on this rank, then evaluate the same batch."""
    replica, _ = plan.mesh.coordinates(transport.rank)
    stages = stages_of(transport, plan, model, savings=savings)
    engine = Engine(plan, transport, stages)
    part = batch.rows(*plan.starts[replica : replica + 2])
    if plan.pack:
        microbatches = pack(part, plan.microbatches_of(replica))
    else:
        microbatches = split(part, 1, 0, plan.micro_batch_size)
    losses = engine.train_step(microbatches, scale=1 / batch.valid_tokens)
    norm = engine.gradient_norm()
    gradients = {
        name: np.array(gradient) for stage in stages for name, gradient in stage.gradients.items()
    }
    return Outcome(replica, losses, engine.evaluate(microbatches), gradients, norm)


@dataclass(frozen=True)
class Expected:
    """The run of one process that ``plan`` must agree with, on the same model and batch.

    mlx-lm's own; with pieces, which add up in another order, one stage of the same pieces.
    """

    plan: Plan
    model: nn.Module
    batch: Batch
    savings: Savings = NO_SAVINGS

    def for_plan(self, plan: Plan) -> Expected:
        """Return the same for a plan that cuts the batch into the same micro-batches."""
        cut = plan.starts, plan.micro_batch_size
        assert cut == (self.plan.starts, self.plan.micro_batch_size)
        other = replace(self, plan=plan)
        vars(other)["_run"] = self._run  # computed once for all of them
        return other

    @cached_property
    def _run(self) -> tuple[list[float], Gradients]:
        microbatches = [
            each
            for ends in pairwise(self.plan.starts)
            for each in split(self.batch.rows(*ends), 1, 0, self.plan.micro_batch_size)
        ]
        scale, pieces = 1 / self.batch.valid_tokens, self.savings
        if pieces.recompute == FULL:
            pieces = replace(pieces, recompute=NONE)
        if pieces == NO_SAVINGS:
            return reference(self.model, microbatches, scale)
        whole = [(0, len(self.model.layers))]
        return through_stages(self.model, whole, microbatches, scale=scale, savings=pieces)

    @property
    def gradients(self) -> Gradients:
        return self._run[1]

    def losses(self, replica: int) -> dict[int, float]:
        plan = self.plan
        start = sum(plan.microbatches_of(before) for before in range(replica))
        return dict(enumerate(self._run[0][start : start + plan.microbatches_of(replica)]))

    @property
    def norm(self) -> float:
        squares = (float(np.square(g, dtype=np.float64).sum()) for g in self.gradients.values())
        return float(np.sqrt(sum(squares)))


def largest_difference(ours: Gradients, theirs: Gradients) -> tuple[float, str]:
    """Return (difference, name) of the tensor that differs most, relative to its largest entry.

    0.0 means equal to the bit. ``ours`` may be some of ``theirs``.
    """
    worst = (0.0, "")
    for name, gradient in ours.items():
        expected = theirs[name]
        assert gradient.shape == expected.shape, name
        if np.array_equal(gradient, expected):
            continue
        scale = max(float(np.abs(expected).max()), 1e-30)
        worst = max(worst, (float(np.abs(gradient - expected).max()) / scale, name))
    return worst


def check_outcome(outcome: Outcome, expected: Expected, rank: int) -> None:
    """Raise ``AssertionError`` unless one rank's outcome is that of one process.

    To the bit for one replica without tied embeddings, else within 1e-6, relative.
    """
    plan = expected.plan
    _, pipeline_rank = plan.mesh.coordinates(rank)
    stages = plan.stage_map.stages_of(pipeline_rank)
    has_last = plan.stage_map.num_stages - 1 in stages
    losses = expected.losses(outcome.replica) if has_last else {}
    assert outcome.losses == losses
    assert outcome.evaluated == losses
    parts = [Slice(expected.model, *plan.stage_map.partition.ranges[stage]) for stage in stages]
    assert set(outcome.gradients) == {name for part in parts for name in part.trainable}
    difference, name = largest_difference(outcome.gradients, expected.gradients)
    exact = plan.mesh.dp == 1 and not parts[0].tied
    assert difference <= (0.0 if exact else 1e-6), (name, difference)
    assert abs(outcome.norm - expected.norm) <= 1e-6 * expected.norm
