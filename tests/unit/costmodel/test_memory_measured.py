"""What ``costmodel.memory`` predicts is what real stages hold, measured with MLX on this host."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from shardmlx.config.specs import FULL, NONE, RECOMPUTE, SELECTIVE, Savings
from shardmlx.costmodel.generation_memory import GenerationSetup, inference_memory
from shardmlx.costmodel.memory import StageMemory, TrainingSetup, rank_peak, stage_memory
from shardmlx.engine.batches import MicroBatch, pack
from shardmlx.engine.optimizer import Updater, build_optimizer
from shardmlx.engine.stage import Stage
from shardmlx.models.parts import find_parts
from shardmlx.models.shape import ModelShape
from shardmlx.models.slice import Slice
from shardmlx.partitioners.costs import LayerCosts
from shardmlx.pipeline.actions import parse_grid
from tests.helpers.family_configs import CONFIGS
from tests.helpers.models_and_batches import build, tiny_config

LAYERS, ROWS, LENGTH = 4, 2, 96
MICRO_BATCHES = 2
HELD_WITHIN = 0.05
"""Part by which what is held between two actions may differ from the prediction: nothing is left to
chance there, but for small arrays that are not counted."""
ABOVE, BELOW = 0.03, 0.05
"""Parts by which a peak may lie above and below the prediction."""
MEASUREMENTS = 30
"""At most. How far MLX's scheduling thread gets ahead of the computing one is left to the system:
the predicted peak is that of a thread as far ahead as it may be. On a free machine nearly every
measurement reaches it, beside other work every second or third. None may pass it."""
BACKEND = "cpu" if mx.default_device() == mx.Device(mx.cpu) else "metal"


@dataclass(frozen=True)
class Case:
    """A family, what is trained of it, and the layers of the stage."""

    mode: str
    start: int
    stop: int
    family: str = "llama"
    lora: tuple[tuple[str, Any], ...] = ()
    recompute: str = NONE
    pieces: int | None = None
    dtype_bytes: int = 4
    packed: bool = False
    length: int = LENGTH
    config: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        special = [key for key, _ in (*self.lora, *self.config)] + [self.recompute] * (
            self.recompute != NONE
        )
        special += [f"pieces of {self.pieces}"] * (self.pieces is not None)
        special += ["bfloat16"] * (self.dtype_bytes == 2) + ["packed"] * self.packed
        special += [str(self.length)] * (self.length != LENGTH)
        return "-".join([self.family, self.mode, f"{self.start}to{self.stop}", *special])

    @property
    def savings(self) -> Savings:
        return Savings(
            recompute=self.recompute, attention_chunk=self.pieces, loss_chunk=self.pieces
        )

    @property
    def model_config(self) -> dict[str, Any]:
        return tiny_config(
            self.family,
            layers=LAYERS,
            **{
                "hidden_size": 128,
                "intermediate_size": 320,
                "num_attention_heads": 8,
                "head_dim": 16,
                "vocab_size": 1000,
                **dict(self.config),
            },
        )

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

    def predicted(self, sizes: LayerCosts) -> tuple[StageMemory, TrainingSetup]:
        keys = self.lora_parameters.get("keys")
        setup = TrainingSetup(
            shape=ModelShape.from_config(self.model_config),
            weight_sizes=sizes,
            dtype_bytes=self.dtype_bytes,
            rows=1 if self.packed else ROWS,
            length=ROWS * self.length if self.packed else self.length,
            fine_tune_type=self.mode,
            lora_keys=None if keys is None else tuple(keys),
            dropout=self.lora_parameters["dropout"] > 0,
            savings=self.savings,
            masks=int(self.packed),
            backend=BACKEND,
        )
        return stage_memory(setup, self.start, self.stop), setup


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
        size(parts.body[parts.embedding_name]),
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


def measure(case: Case) -> tuple[Measured, LayerCosts]:
    """A step of two micro-batches, after a step of one that made the optimizer's state."""
    model = case.model()
    sizes = weight_sizes(model)
    part = Slice(model, case.start, case.stop)
    del model
    stage = Stage(1, part, needs_input_gradient=case.start > 0, savings=case.savings)
    updater = Updater(build_optimizer("adam", 1e-4, None, {}), [stage])
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
            after_forward.append(mx.get_active_memory() - now)
            keep_computing_thread_busy()
            if case.start > 0:
                stage.backward_input(j)
                after_input.append(mx.get_active_memory() - now)
            stage.backward_weight(j)
        updater.apply()
        outside = before - part.nbytes - 2 * sum(part[name].nbytes for name in part.trainable)
    peak = mx.get_peak_memory() - outside
    return Measured(part.nbytes, after_forward[-1], (after_input or [0])[-1], peak), sizes


@dataclass(frozen=True)
class Mixture(Case):
    """A family whose tiny config stands with all others, widened."""

    @property
    def model_config(self) -> dict[str, Any]:
        wide = {"hidden_size": 128, "num_attention_heads": 8, "vocab_size": 1000}
        return {**CONFIGS[self.family], **wide, "intermediate_size": 320}


DROPS = ("dropout", 0.1)
ATTENTION = ("keys", ["self_attn.q_proj", "self_attn.v_proj"])
CASES = [
    *(Case(mode, *ends) for mode in ("lora", "full") for ends in ((0, 2), (1, 3), (2, 4), (0, 4))),
    Case("lora", 1, 3, lora=(ATTENTION,)),
    Case("lora", 1, 3, lora=(DROPS,)),
    Case("lora", 1, 3, config=(("quantization", {"group_size": 32, "bits": 4}),)),
    Case("lora", 1, 3, dtype_bytes=2),
    Case("full", 1, 3, dtype_bytes=2),
    Case("dora", 1, 3),
    Case("lora", 1, 3, family="mixtral"),
    Case("full", 1, 3, family="mixtral"),
    Case("full", 1, 3, family="qwen2"),
    Case("lora", 1, 3, family="qwen3"),
    Case("lora", 0, 2, recompute=FULL),
    Case("lora", 1, 3, recompute=FULL),
    Case("lora", 1, 3, recompute=FULL, length=256),
    Case("lora", 2, 4, recompute=FULL, config=(("vocab_size", 5000),)),
    Case("lora", 1, 3, recompute=FULL, dtype_bytes=2),
    Case("full", 1, 3, recompute=FULL),
    Case("full", 2, 4, recompute=FULL, config=(("vocab_size", 5000),)),
    Case("lora", 2, 4, config=(("vocab_size", 5000),)),
    Case("full", 2, 4, config=(("vocab_size", 5000),)),
    Case("full", 2, 4, config=(("vocab_size", 5000),), dtype_bytes=2),
    *(
        Case(mode, *ends, length=256, pieces=32, recompute=recompute)
        for mode in ("lora", "full")
        for recompute in RECOMPUTE
        for ends in ((1, 3), (2, 4))
    ),
    Case("lora", 1, 3, length=256, pieces=32, lora=(ATTENTION,)),
    Case("lora", 1, 3, length=256, pieces=32, lora=(ATTENTION,), recompute=SELECTIVE),
    *(
        Case("lora", 1, 3, length=256, pieces=32, dtype_bytes=2, recompute=recompute)
        for recompute in (NONE, SELECTIVE)
    ),
    *(Case("full", 1, 3, length=256, pieces=32, dtype_bytes=2, recompute=r) for r in RECOMPUTE),
    *(Case("dora", 1, 3, length=256, pieces=32, recompute=r) for r in RECOMPUTE),
    *(Case("lora", 1, 3, length=256, pieces=32, lora=(DROPS,), recompute=r) for r in RECOMPUTE),
    *(Case("dora", 1, 3, length=256, lora=(DROPS,), pieces=pieces) for pieces in (None, 32)),
    Case("lora", 1, 3, length=256, pieces=64, packed=True),
    *(Case("lora", *ends, packed=True) for ends in ((0, 2), (1, 3), (2, 4))),
    Case("full", 1, 3, packed=True, recompute=FULL),
]


@pytest.mark.parametrize("chunk", [128, 1024])
def test_prefill_of_a_long_prompt_holds_the_scores_of_a_chunk(chunk: int) -> None:
    case, length = Case("lora", 0, 3), 1024
    model = build(case.model_config)
    mx.eval(model.parameters())
    sizes, part = weight_sizes(model), Slice(model, 0, 3)
    del model
    setup = GenerationSetup(
        shape=ModelShape.from_config(case.model_config),
        weight_sizes=sizes,
        dtype_bytes=4,
        sequences=1,
        context=length,
        chunk=chunk,
        backend=BACKEND,
    )
    outside = mx.get_active_memory() - part.nbytes
    mx.reset_peak_memory()
    tokens, caches = mx.zeros((1, length), mx.int32), part.new_caches()
    for start in range(0, length, chunk):
        hidden = part.extend(tokens[:, start : start + chunk], caches)
        mx.eval(hidden, [(cache.keys, cache.values) for cache in caches])
    peak = mx.get_peak_memory() - outside
    predicted = inference_memory(setup, 0, 3)
    assert predicted / 2 <= peak <= (1 + ABOVE) * predicted


def test_mlx_has_no_gradient_for_packed_weights() -> None:
    """Why a ``TrainingSetup`` refuses to train them."""
    case = Case("full", 0, 2, config=(("quantization", {"group_size": 32, "bits": 4}),))
    stage = Stage(0, Slice(case.model(), 0, 2), needs_input_gradient=False)
    with pytest.raises(RuntimeError, match="no gradient wrt the quantized weights"):
        stage.forward(0, microbatch(0, case), None, scale=1e-3)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "mistral4", "glm4_moe"])
def test_a_mixture_holds_what_is_predicted(family: str) -> None:
    """With first dense layers, shared experts, sinks, clipped activations and latent attention."""
    case = Mixture("lora", 1, 3, family=family)
    measured, sizes = measure(case)
    stage, setup = case.predicted(sizes)
    assert stage.weights == measured.weights
    assert stage.after_forward == pytest.approx(measured.after_forward, rel=HELD_WITHIN)
    assert stage.after_input == pytest.approx(measured.after_input, rel=HELD_WITHIN)
    (own,) = parse_grid(" ".join(f"1F{j} 1I{j} 1W{j}" for j in range(MICRO_BATCHES)))
    # What passes while an activation is clipped, or queries and keys are joined of two parts each,
    # is counted as in the other families.
    assert measured.peak <= 1.1 * rank_peak(own, {1: stage}, setup)


@pytest.mark.parametrize(
    "family", ["gemma", "gemma2", "gemma3_text", "phi", "phi3", "starcoder2", "nemotron", "olmo2"]
)
def test_so_does_a_layer_of_another_activation_or_with_fused_projections(family: str) -> None:
    case = Mixture("lora", 1, 3, family=family)
    measured, sizes = measure(case)
    stage, _ = case.predicted(sizes)
    assert stage.weights == measured.weights
    assert stage.after_forward == pytest.approx(measured.after_forward, rel=HELD_WITHIN)
    assert stage.after_input == pytest.approx(measured.after_input, rel=HELD_WITHIN)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_real_stage_reaches_and_never_passes_what_is_predicted(case: Case) -> None:
    (own,) = parse_grid(" ".join(f"1F{j} 1I{j} 1W{j}" for j in range(MICRO_BATCHES)))
    for _ in range(MEASUREMENTS):
        measured, sizes = measure(case)
        stage, setup = case.predicted(sizes)
        assert stage.weights == measured.weights
        assert stage.after_forward == pytest.approx(measured.after_forward, rel=HELD_WITHIN)
        if case.start > 0:
            held = pytest.approx(measured.after_input, rel=HELD_WITHIN, abs=64)
            assert stage.after_input == held
        peak = rank_peak(own, {1: stage}, setup)
        assert measured.peak <= (1 + ABOVE) * peak
        if measured.peak >= (1 - BELOW) * peak:
            return
    pytest.fail(f"at most {measured.peak} of the predicted {peak} bytes were reached")
