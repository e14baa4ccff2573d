"""Tiny models, random batches, and the run of one process that every pipeline must agree with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import make_prompt_cache

from shardmlx.config.specs import NO_SAVINGS, Savings
from shardmlx.engine.batches import Batch, MicroBatch, make_batch
from shardmlx.engine.gathered_stage import build_stages
from shardmlx.engine.loss import token_loss
from shardmlx.engine.stage import Stage
from shardmlx.modelfiles.model_files import open_model
from shardmlx.models.runtime.activations import swiglu, use_swiglu
from shardmlx.models.runtime.slice import Slice
from shardmlx.models.runtime.tuner import linear_to_lora_layers
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.schedules import get_schedule
from shardmlx.pipeline.stage_map import StageMap
from testbed.tiny_models import VOCABULARY, build, save_model_directory, tiny_config

Gradients = dict[str, np.ndarray]
Result = tuple[list[Any], Gradients]
"""The summed loss of each micro-batch, or log-probabilities, and gradients by name."""


def tiny_model(
    family: str = "llama", *, layers: int = 8, tied: bool = False, seed: int = 1, **overrides: Any
) -> nn.Module:
    """Return the same model for the same arguments; all its weights can be trained."""
    return build(tiny_config(family, layers=layers, tied=tied, **overrides), seed)


def with_adapters(
    model: nn.Module, layers: int | None = None, *, dora: bool = False, **parameters: Any
) -> nn.Module:
    """Freeze a model, and train LoRA of rank 4 on its last ``layers``, or on all."""
    model.freeze()
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0, **parameters}
    linear_to_lora_layers(model, layers or len(model.layers), parameters, use_dora=dora)
    mx.eval(model.parameters())
    return model


def move_trained(model: nn.Module, scale: float = 0.05) -> nn.Module:
    """Add noise to all that is trained: where a weight is zero, as lora_b is at first, or one,
    gradients would hide mistakes."""
    random = np.random.RandomState(3)
    model.update(
        tree_map(
            lambda w: w + mx.array(random.normal(0, scale, w.shape)).astype(w.dtype),
            model.trainable_parameters(),
        )
    )
    mx.eval(model.parameters())
    return model


def tensors(directory: Path) -> dict[str, bytes]:
    """Return the bytes of a model's tensors, in whatever files they lie."""
    return {
        name: (directory / place.file).read_bytes()[place.start : place.end]
        for name, place in open_model(str(directory)).tensors.items()
    }


def save_in_two_files(path: Path, config: Mapping[str, Any], seed: int = 1) -> Path:
    """Write the same with every other tensor in another file."""
    whole = save_model_directory(path, config, seed) / "model.safetensors"
    arrays = [*load_arrays(whole).items()]
    for number in (1, 2):
        half = dict(arrays[number - 1 :: 2])
        mx.save_safetensors(str(path / f"model-0000{number}-of-00002.safetensors"), half)
    whole.unlink()
    return path


def load_arrays(*files: Path) -> dict[str, mx.array]:
    """Return the tensors of safetensors files, of which each has others."""
    arrays: dict[str, mx.array] = {}
    for file in files:
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        assert not loaded.keys() & arrays.keys()
        arrays |= loaded
    return arrays


def load_weights(directory: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a directory's safetensors files, in float32: NumPy has no bfloat16."""
    arrays = load_arrays(*sorted(directory.glob("*.safetensors")))
    return {name: np.array(array.astype(mx.float32)) for name, array in arrays.items()}


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


def scale_of(microbatches: Sequence[MicroBatch]) -> float:
    return 1 / max(sum(each.valid_tokens for each in microbatches), 1)


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


def reference(
    model: nn.Module, microbatches: Sequence[MicroBatch], scale: float | None = None
) -> Result:
    """Return what ``through_stages`` does, of one process without stages.

    mlx-lm's own forward over the whole model, one micro-batch after the other, with the stages'
    SwiGLU.
    """
    use_stage_activations(model)
    scale = scale_of(microbatches) if scale is None else scale

    def loss(model: nn.Module, microbatch: MicroBatch) -> tuple[mx.array, mx.array]:
        # Without caches, layers of gemma3n that share keys and values compute others of their own.
        caches = make_prompt_cache(model) if model.model_type == "gemma3n" else None
        logits = model(mx.array(microbatch.tokens[:, :-1]), cache=caches)
        total = token_loss(logits, *all_answers(microbatch))
        return scale * total, total

    losses: list[float] = []
    totals: dict[str, mx.array] = {}
    for microbatch in microbatches:
        (_, value), gradients = nn.value_and_grad(model, loss)(model, microbatch)
        for name, gradient in tree_flatten(gradients):
            totals[name] = totals[name] + gradient if name in totals else gradient
        mx.eval(value, totals)
        losses.append(value.item())
    return losses, {name: np.array(total.astype(mx.float32)) for name, total in totals.items()}


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
            micro_batch_rows=micro_batch_size,
            trainable=(True,) * stages,
            pack=pack,
        )


def backward(stage: Stage, j: int) -> mx.array | None:
    """I, then W, of one micro-batch, as far as the stage has them; the gradient for its input."""
    gradient = stage.backward_input(j) if stage.needs_input_gradient else None
    if stage.names:
        stage.backward_weight(j)
    return gradient


def through_stages(
    model: nn.Module,
    ranges: Sequence[tuple[int, int]],
    microbatches: Sequence[MicroBatch],
    *,
    scale: float | None = None,
    key: tuple[int, ...] = (0,),
    savings: Savings = NO_SAVINGS,
) -> Result:
    """Return losses and gradients, through stages of these layers in one process.

    One micro-batch passes after the other. The gradients are those of the mean over all tokens, or
    of the sum times ``scale``.
    """
    scale = scale_of(microbatches) if scale is None else scale
    slices = [Slice(model, start, stop) for start, stop in ranges]
    stages = build_stages(slices, savings=savings)
    losses: list[Any] = []
    for j, microbatch in enumerate(microbatches):
        out = None
        for stage in stages:
            out = stage.forward(j, microbatch, out, scale=scale, key=key)
        assert out is not None
        losses.append(out.item() if out.ndim == 0 else np.array(out))
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
        assert np.isfinite(expected).all(), name
        scale = max(float(np.abs(expected).max()), 1e-30)
        worst = max(worst, (float(np.abs(gradient - expected).max()) / scale, name))
    return worst


def check_same(
    found: Result, expected: Result, most: float = 0.0, most_of_losses: float = 1e-6
) -> None:
    """Raise ``AssertionError`` if gradients, or the sum of losses, differ by more, relative to the
    largest entry; with 0 gradients are equal to the bit."""
    assert sum(found[0]) == pytest.approx(sum(expected[0]), rel=most_of_losses)
    assert set(found[1]) == set(expected[1])
    difference, name = largest_difference(found[1], expected[1])
    assert difference <= most, name
