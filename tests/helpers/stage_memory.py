"""Stages of a micro-batch or two, and the memory that they take on this host."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from shardmlx.config.specs import NONE, FineTune, Savings
from shardmlx.engine.batches import MicroBatch, pack
from shardmlx.engine.optimizer import Updater, build_optimizer
from shardmlx.engine.stage import Stage
from shardmlx.modelfiles.parts import read_shape
from shardmlx.models.runtime.divided_layers import take_share
from shardmlx.models.runtime.parts import find_parts
from shardmlx.models.runtime.slice import Slice
from shardmlx.models.runtime.tuner import linear_to_lora_layers
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.models.sizes.shares import TensorShares
from shardmlx.partitioners import LayerCosts
from shardmlx.planning.facts.workload import shared
from shardmlx.planning.memory.ranks import PeakOfActions
from shardmlx.planning.memory.stages import StageMemory, stage_memory
from shardmlx.planning.memory.training_setup import TrainingSetup
from testbed.family_configs import CONFIGS, LAYERS
from testbed.further_configs import FURTHER
from testbed.tiny_models import build
from testbed.undeclared_configs import UNDECLARED
from tests.helpers.grids import parse_grid
from tests.helpers.workloads import workload

ROWS, LENGTH = 2, 96
MICRO_BATCHES = 2
BACKEND = "cpu" if mx.default_device() == mx.Device(mx.cpu) else "metal"

_WIDE = {
    "hidden_size": 128,
    "vocab_size": 1000,
    "num_attention_heads": 8,
    "head_dim": 16,
    "intermediate_size": 320,
    "intermediate_size_mlp": 320,
    "shared_expert_intermediate_size": 320,
    "moe_intermediate_size": 160,
    "linear_num_key_heads": 4,
    "linear_value_head_dim": 32,
}


def widened(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tiny config whose arrays are large beside what is not counted."""
    wide: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            wide[key] = widened(value)
        elif key == "num_key_value_heads":
            wide[key] = 8 if value == config.get("num_attention_heads") else 2
        else:
            wide[key] = _WIDE.get(key, value)
    return wide


@dataclass(frozen=True)
class Case:
    """A family, what is trained of it, and the layers of the stage.

    ``changes`` are fields of its widened config. Of ``shares`` the stage has the first.
    """

    mode: str
    start: int = 1
    stop: int = 3
    family: str = "llama"
    lora: tuple[tuple[str, Any], ...] = ()
    recompute: str = NONE
    pieces: int | None = None
    counted_only: bool = False
    dtype_bytes: int = 4
    packed: bool = False
    length: int = LENGTH
    changes: tuple[tuple[str, Any], ...] = ()
    shares: tuple[int, ...] = (1,)

    def __str__(self) -> str:
        special = [key for key, _ in self.lora] + [f"{key} {value}" for key, value in self.changes]
        special += [self.recompute] * (self.recompute != NONE)
        special += [f"pieces of {self.pieces}"] * (self.pieces is not None)
        special += ["counted"] * self.counted_only
        special += ["share of " + ":".join(map(str, self.shares))] * (len(self.shares) > 1)
        special += ["bfloat16"] * (self.dtype_bytes == 2) + ["packed"] * self.packed
        special += [str(self.length)] * (self.length != LENGTH)
        return "-".join([self.family, self.mode, f"{self.start}to{self.stop}", *special])

    @property
    def savings(self) -> Savings:
        return Savings(
            recompute=self.recompute,
            attention_chunk=self.pieces,
            loss_chunk=self.pieces,
            counted_only=self.counted_only,
        )

    @property
    def model_config(self) -> dict[str, Any]:
        return {**widened({**FURTHER, **UNDECLARED, **CONFIGS}[self.family]), **dict(self.changes)}

    @property
    def lora_parameters(self) -> dict[str, Any]:
        return {"rank": 8, "scale": 20.0, "dropout": 0.0, **dict(self.lora)}

    def model(self) -> nn.Module:
        model = build(self.model_config)
        if self.dtype_bytes == 2:
            model.set_dtype(mx.bfloat16)
        model.freeze()
        if self.mode == "full":
            for layer in model.layers:
                layer.unfreeze()
        else:
            linear_to_lora_layers(model, LAYERS, self.lora_parameters, use_dora=self.mode == "dora")
        mx.eval(model.parameters())
        return model

    def share(self, sizes: LayerCosts) -> tuple[ModelShape, LayerCosts]:
        """Return the shape of the stage's share of the model, and the bytes of its weights."""
        return shared(read_shape(self.model_config), sizes, TensorShares(self.shares), 0)

    def take_share(self, part: Slice) -> None:
        """Leave the stage its share. Sums are of one rank, and take no memory, as MLX's."""
        if len(self.shares) > 1:
            shape = read_shape(self.model_config)
            take_share(part, shape, TensorShares(self.shares), 0, lambda x: x)
            mx.eval(part.parameters())

    def setup(self, sizes: LayerCosts) -> TrainingSetup:
        shape, sizes = self.share(sizes)
        work = workload(
            shape,
            {2: "bfloat16", 4: "float32"}[self.dtype_bytes],
            sizes,
            fine_tune_type=self.mode,
            lora_parameters=self.lora_parameters,
            pack=self.packed,
        )
        rows, length = work.micro_batch(ROWS, self.length)
        return TrainingSetup(
            workload=work, rows=rows, length=length, savings=self.savings, backend=BACKEND
        )

    def predicted(self, setup: TrainingSetup) -> tuple[StageMemory, int]:
        """Return the memory of the stage, and the peak of ``measure``."""
        (own,) = parse_grid(" ".join(f"1F{j} 1I{j} 1W{j}" for j in range(MICRO_BATCHES)))
        stage = stage_memory(setup, self.start, self.stop)
        return stage, PeakOfActions(own).of({1: stage}, setup)


@dataclass
class Measured:
    """Bytes above what was there before the stage, with its input, saw its micro-batch."""

    weights: int
    after_forward: int
    after_input: int
    peak: int


def weight_sizes(model: nn.Module) -> LayerCosts:
    """Of the parameters that the model had before any adapters."""

    def size(module: nn.Module) -> float:
        named = tree_flatten(module.parameters())
        adapters = ("lora_a", "lora_b", "m")
        return float(sum(a.nbytes for name, a in named if name.split(".")[-1] not in adapters))

    parts = find_parts(model)
    return LayerCosts(
        tuple(map(size, model.layers)),
        size(parts.embedding),
        sum(map(size, parts.ends.values())),
    )


def microbatch(seed: int, case: Case) -> MicroBatch:
    tokens = np.random.RandomState(seed).randint(1, 1000, size=(ROWS, case.length + 1))
    spans = np.array([[0, case.length + 1]] * ROWS, np.int32)
    padded = MicroBatch(tokens.astype(np.int32), spans, 0)
    return pack(padded, 1)[0] if case.packed else padded


def keep_computing_thread_busy() -> None:
    """Give the scheduling thread some milliseconds to get ahead; takes no memory."""
    mx.async_eval(mx.broadcast_to(mx.array(1.0), (3000, 1000)).sum())  # type: ignore[no-untyped-call]


@contextmanager
def before_others() -> Iterator[None]:
    """Let this thread, which schedules, go before other work, and before the computing one, where
    that is allowed: a thread that waits for a core gets less far ahead."""
    thread = threading.get_native_id()
    try:
        usual = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, usual - 10)
    except OSError:  # not root, or not on Linux
        yield
        return
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, thread, usual)


@before_others()
def measure(case: Case) -> tuple[Measured, LayerCosts]:
    """A step of two micro-batches, after a step of one that made the optimizer's state."""
    model = case.model()
    sizes = weight_sizes(model)
    part = Slice(model, case.start, case.stop)
    case.take_share(part)
    del model
    stage = Stage(1, part, needs_input_gradient=case.start > 0, savings=case.savings)
    updater = Updater(build_optimizer(FineTune(learning_rate=1e-4)), [stage])
    after_forward: list[int] = []
    after_input: list[int] = []
    outside = 0
    for microbatches in (1, MICRO_BATCHES):
        gc.collect()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for j in range(microbatches):
            now = mx.get_active_memory()
            x, given = None, microbatch(j, case)
            if case.start > 0:
                x = mx.random.normal((*given.shape, part.hidden_size)).astype(part.dtype)
                mx.eval(x)
            stage.forward(j, given, x, scale=1e-3)
            del x
            mx.synchronize()
            after_forward.append(mx.get_active_memory() - now)
            keep_computing_thread_busy()
            if case.start > 0:
                stage.backward_input(j)
                mx.synchronize()
                after_input.append(mx.get_active_memory() - now)
            stage.backward_weight(j)
        updater.apply()
        outside = before - part.nbytes - 2 * sum(part[name].nbytes for name in part.trainable)
    peak = mx.get_peak_memory() - outside
    return Measured(part.nbytes, after_forward[-1], (after_input or [0])[-1], peak), sizes
