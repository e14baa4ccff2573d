"""What ``planning.memory.stages`` predicts, beside what real stages take, measured on this host."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest

from shardmlx.config.specs import FULL, RECOMPUTE, SELECTIVE
from shardmlx.engine.stage import Stage
from shardmlx.models.runtime.activations import RecomputedMLP
from shardmlx.models.runtime.slice import Slice
from shardmlx.planning.facts.workload import ModelSizes
from shardmlx.planning.memory.generation import GenerationSetup, inference_memory
from shardmlx.planning.memory.layers import layer_arrays
from testbed.family_configs import CONFIGS, LAYERS
from testbed.tiny_models import build
from tests.helpers.stage_memory import (
    BACKEND,
    LENGTH,
    ROWS,
    Case,
    measure,
    microbatch,
    weight_sizes,
)

HELD_WITHIN = 0.05
"""Part by which what is held between two actions may differ from the prediction: nothing is left to
chance there, but for small arrays that are not counted."""
UNDER, OVER = 0.03, 0.15
"""Parts by which a prediction without a profile may lie under and over the measured peak."""
FURTHER_OVER = 0.3
"""The same for a few layers that let MLX's scheduler get less far ahead."""
MEASUREMENTS = 30
"""At most: beside other work MLX's scheduling thread gets less far ahead, and takes less memory."""

DROPS = ("dropout", 0.1)
ATTENTION = ("keys", ["self_attn.q_proj", "self_attn.v_proj"])
QUANTISED = ("quantization", {"group_size": 32, "bits": 4})
MANY = (("num_local_experts", 16), ("num_experts_per_tok", 8))
LOGITS = (("vocab_size", 5000),)
DELTA = (("layer_types", ["linear_attention"] * 3 + ["full_attention"]),)
CONVOLUTION = (("full_attn_idxs", [3]), ("block_dim", 128))
STATE_SPACE = (("num_heads", 8), ("head_dim", 32), ("state_size", 16), ("intermediate_size", 256))

FAR_OVER_WITH_ADAPTERS = ("gemma2", "gemma3", "gemma3_text")
"""Families of long activations between four norms."""
FAR_OVER = [
    *(Case("lora", family=each) for each in FAR_OVER_WITH_ADAPTERS),
    Case("lora", length=256, pieces=32, lora=(ATTENTION,)),
    Case("lora", length=256, pieces=32, recompute=SELECTIVE, dtype_bytes=2),
    Case("full", length=256, pieces=32, recompute=SELECTIVE),
    # Of a piece of the loss four arrays are planned, one of which a loop's loss alone may take.
    Case("lora", 2, 4, changes=LOGITS, pieces=ROWS * LENGTH, counted_only=True),
]
CASES = [
    Case("lora", 0, 4),
    Case("full", 0, 4),
    Case("full", dtype_bytes=2),
    *(Case("lora", lora=(each,)) for each in (ATTENTION, DROPS)),
    Case("lora", changes=(QUANTISED,)),
    Case("dora"),
    *(Case(mode, shares=each) for mode, each in (("lora", (1, 1)), ("full", (2, 1)))),
    Case("lora", length=256, pieces=32, recompute=SELECTIVE, shares=(1, 1)),
    Case("full", recompute=SELECTIVE, shares=(1, 1)),
    *(Case(mode, 0, 4, family="mixtral", shares=(1, 1)) for mode in ("lora", "full")),
    Case("full", recompute=FULL),
    Case("lora", 2, 4, recompute=FULL, changes=LOGITS),
    Case("full", 2, 4, changes=LOGITS, dtype_bytes=2),
    *(Case("lora", length=256, pieces=32, recompute=each) for each in RECOMPUTE),
    Case("dora", length=256, pieces=32, recompute=SELECTIVE, lora=(DROPS,)),
    Case("lora", 2, 4, packed=True),
    # Every family, in both ways of training by turns.
    *(Case(("lora", "full")[i % 2], family=each) for i, each in enumerate(CONFIGS)),
    Case("lora", family="mixtral", changes=MANY, recompute=SELECTIVE),
    *(Case("lora", family=each) for each in ("gemma2", "deepseek_v3", "qwen2_moe")),
    *(Case(mode, family="lfm2", changes=CONVOLUTION) for mode in ("lora", "full")),
    *(Case(mode, family="mamba2", changes=STATE_SPACE) for mode in ("lora", "full")),
    Case("lora", family="olmo_hybrid", changes=DELTA, length=256),
    Case("full", family="qwen3_5"),
    # Attention below a gated delta layer, states from token to token, and a long MLP.
    Case("lora", family="qwen3_5", length=256),
    *(Case("lora", family=each) for each in ("rwkv7", "afmoe")),
    *FAR_OVER[len(FAR_OVER_WITH_ADAPTERS) :],
]


@pytest.mark.parametrize("case", {str(each): each for each in CASES}.values(), ids=str)
def test_a_real_stage_holds_what_is_predicted_and_reaches_the_peak(case: Case) -> None:
    over = FURTHER_OVER if case in FAR_OVER else OVER
    for _ in range(MEASUREMENTS):
        measured, sizes = measure(case)
        stage, peak = case.predicted(case.setup(sizes))
        assert stage.weights == measured.weights
        assert stage.after_forward == pytest.approx(measured.after_forward, rel=HELD_WITHIN)
        if case.start > 0:
            held = pytest.approx(measured.after_input, rel=HELD_WITHIN, abs=64)
            assert stage.after_input == held
        assert peak >= (1 - UNDER) * measured.peak
        if peak <= (1 + over) * measured.peak:
            return
    pytest.fail(f"at most {measured.peak} of the predicted {peak} bytes were reached")


@pytest.mark.parametrize("family", CONFIGS)
def test_the_plan_knows_whose_mlp_computes_its_product_again(family: str) -> None:
    case = Case("full", 0, LAYERS, family=family, recompute=SELECTIVE)
    model = case.model()
    setup = case.setup(weight_sizes(model))
    Slice(model, 0, LAYERS).prepare_training(is_selective=True)
    for layer, kind in zip(model.layers, setup.shape.pattern, strict=True):
        arrays = layer_arrays(setup, setup.shape.kinds[kind])
        (product,) = (each for each in arrays if each.name == "recomputed product of the MLP")
        recomputes = isinstance(layer.get("mlp"), RecomputedMLP)
        assert recomputes == (product.nbytes > 0)


@pytest.mark.parametrize(("chunk", "shares"), [(128, (1,)), (1024, (1,)), (1024, (1, 1))])
def test_prefill_of_a_long_prompt_holds_the_scores_of_a_chunk(
    chunk: int, shares: tuple[int, ...]
) -> None:
    case, length = Case("lora", 0, 3, shares=shares), 1024
    model = build(case.model_config)
    mx.eval(model.parameters())
    (shape, sizes), part = case.share(weight_sizes(model)), Slice(model, 0, 3)
    case.take_share(part)
    del model
    setup = GenerationSetup(
        model=ModelSizes(shape=shape, weight_sizes=sizes, dtype="float32"),
        sequences=1,
        context=length,
        chunk=chunk,
        backend=BACKEND,
    )
    gc.collect()  # what earlier tests left
    outside = mx.get_active_memory() - part.nbytes
    mx.reset_peak_memory()
    tokens, caches = mx.zeros((1, length), mx.int32), part.new_caches()
    for start in range(0, length, chunk):
        hidden = part.extend(tokens[:, start : start + chunk], caches)
        mx.eval(hidden, [(cache.keys, cache.values) for cache in caches])
    peak = mx.get_peak_memory() - outside
    predicted = inference_memory(setup, 0, 3)
    assert predicted / 2 <= peak <= (1 + UNDER) * predicted


def test_mlx_has_no_gradient_for_packed_weights() -> None:
    """Why a ``TrainingSetup`` refuses to train them."""
    case = Case("full", 0, 2, changes=(QUANTISED,))
    stage = Stage(0, Slice(case.model(), 0, 2), needs_input_gradient=False)
    with pytest.raises(RuntimeError, match="no gradient wrt the quantized weights"):
        stage.forward(0, microbatch(0, case), None, scale=1e-3)
