"""What ``costmodel.memory`` predicts is what real stages hold, measured with MLX on this host."""

from __future__ import annotations

import mlx.core as mx
import pytest

from shardmlx.config.specs import FULL, NONE, RECOMPUTE, SELECTIVE
from shardmlx.costmodel.generation_memory import GenerationSetup, inference_memory
from shardmlx.costmodel.memory import rank_peak
from shardmlx.engine.stage import Stage
from shardmlx.models.shape import ModelShape
from shardmlx.models.slice import Slice
from shardmlx.pipeline.actions import parse_grid
from tests.helpers.models_and_batches import build
from tests.helpers.stage_memory import (
    BACKEND,
    LENGTH,
    MICRO_BATCHES,
    ROWS,
    Case,
    measure,
    microbatch,
    weight_sizes,
)

HELD_WITHIN = 0.05
"""Part by which what is held between two actions may differ from the prediction: nothing is left to
chance there, but for small arrays that are not counted."""
ABOVE, BELOW = 0.03, 0.05
"""Parts by which a peak may lie above and below the prediction."""
MEASUREMENTS = 30
"""At most. How far MLX's scheduling thread gets ahead of the computing one is left to the system:
the predicted peak is that of a thread as far ahead as it may be. On a free machine nearly every
measurement reaches it, beside other work every second or third. None may pass it."""

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
        Case(mode, 2, 4, config=(("vocab_size", 5000),), pieces=ROWS * LENGTH, counted_only=True)
        for mode in ("lora", "full")
    ),
    *(
        Case(mode, *ends, length=256, pieces=32, recompute=recompute)
        for mode in ("lora", "full")
        for recompute in RECOMPUTE
        for ends in ((1, 3), (2, 4))
    ),
    Case("full", 0, 2, length=256, pieces=32, recompute=SELECTIVE),
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
