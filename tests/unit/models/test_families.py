"""Every family, cut into stages, is the whole model of mlx-lm: forward and gradients."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import _get_classes

from shardmlx.common.reporter import Reporter
from shardmlx.config.specs import RECOMPUTE, Savings
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.local_transport import LocalNetwork
from shardmlx.engine.batches import MicroBatch, pack
from shardmlx.engine.gathered_stage import build_stages
from shardmlx.engine.stage import Stage
from shardmlx.errors import UserError
from shardmlx.models.families import FAMILIES
from shardmlx.models.shape import ModelShape
from shardmlx.models.slice import Slice
from shardmlx.training.command import prepare_training
from tests.helpers.models_and_batches import (
    Gradients,
    backward,
    largest_difference,
    logits_of,
    mean_loss,
    random_batch,
    through_stages,
    tiny_config,
    tiny_model,
)

SUPPORTED = ("mistral", "llama", "ministral3", "mixtral", "qwen2", "qwen3")
"""In every way that matters; tests/unit/models/test_conformance.py has all families."""

LAYERS = 5
CUTS = [
    [(0, 5)],
    [(0, 2), (2, 5)],
    [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)],
]
WINDOW = 8
BATCH = random_batch(3)
TOKENS = mx.array(BATCH.tokens[:, :-1])
SLIDING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention" if i in (0, 2, 3) else "full_attention" for i in range(5)],
}


@dataclass(frozen=True, eq=False)
class Case:
    """A small model of a family; the same one each time it is built."""

    family: str
    what: str = "untied"
    tied: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
    bits: int | None = None
    dtype: mx.Dtype = mx.float32

    def __str__(self) -> str:
        return f"{self.family}, {self.what}"

    def build(self) -> nn.Module:
        model = tiny_model(self.family, layers=LAYERS, tied=self.tied, **self.overrides)
        model.set_dtype(self.dtype)
        if self.bits is not None:
            nn.quantize(model, group_size=32, bits=self.bits)
            model.freeze()
            linear_to_lora_layers(model, LAYERS, {"rank": 4, "scale": 2.0, "dropout": 0.0})
        # No weight is zero, as lora_b is at first, or one: its gradients would hide mistakes.
        model.update(
            tree_map(
                lambda w: w + mx.random.normal(w.shape, w.dtype, scale=0.05),
                model.trainable_parameters(),
            )
        )
        mx.eval(model.parameters())
        return model


UNTIED = [Case(family) for family in SUPPORTED]
TIED = [Case(family, "tied", tied=True) for family in SUPPORTED]
QUANTISED = [Case(family, "4-bit base with LoRA", bits=4) for family in ("mistral", "mixtral")]
QUANTISED_TIED = [
    Case(family, "tied 4-bit base with LoRA", tied=True, bits=4) for family in SUPPORTED
]
HEAD_DIM = [
    Case(family, "head_dim 12, not 32 / 4", overrides={"head_dim": 12})
    for family in ("mistral", "llama", "ministral3", "qwen3")
]
WINDOWED = [
    Case(family, "sliding and full layers", overrides=SLIDING)
    for family in ("mistral", "llama", "ministral3")
]
OTHERS = [
    Case("llama", "biases", overrides={"attention_bias": True, "mlp_bias": True}),
    Case("llama", "all sliding but one", overrides={**SLIDING, "layer_types": [
        "full_attention", *["sliding_attention"] * 4]}),
    Case("mixtral", "3 of 8 experts", overrides={"num_local_experts": 8, "num_experts_per_tok": 3}),
]  # fmt: skip
# MLX multiplies experts on the CPU in float32 only.
BFLOAT16 = [
    Case(family, "bfloat16", dtype=mx.bfloat16)
    for family in SUPPORTED
    if family != "mixtral" or mx.default_device() == mx.gpu
]

EXACT = UNTIED + QUANTISED + QUANTISED_TIED + HEAD_DIM + WINDOWED + OTHERS


@cache
def whole_model(case: Case, batch: MicroBatch) -> tuple[float, Gradients]:
    """Loss and gradients of mlx-lm's model, in one process."""
    model = case.build()
    loss, gradients = nn.value_and_grad(model, mean_loss)(model, batch)
    return loss.item(), {
        name: np.array(gradient.astype(mx.float32)) for name, gradient in tree_flatten(gradients)
    }


def stages_of(model: nn.Module, ranges: Sequence[tuple[int, int]]) -> list[Stage]:
    return build_stages([Slice(model, start, stop) for start, stop in ranges])


def run_stages(
    stages: Sequence[Stage], batch: MicroBatch, *, split: bool = True
) -> tuple[float, Gradients]:
    """Loss and gradients of the stages in a row; ``split``: with I and W apart."""
    out = None
    for stage in stages:
        out = stage.forward(0, batch, out, scale=1 / batch.valid_tokens)
    gradient = None
    for stage in reversed(stages):
        if gradient is not None:
            stage.fill_cotangent(0, gradient)
        if not split:
            gradient = backward(stage, 0)
        elif stage.needs_input_gradient:
            gradient = stage.backward_input(0)
    if split:
        for stage in stages:
            stage.backward_weight(0)
    assert out is not None
    total: Gradients = {}
    for stage in stages:
        for name, array in stage.gradients.items():
            # A tied embedding is held by the first and the last stage.
            total[name] = total.get(name, np.float32(0)) + np.array(array)
    return float(np.array(out)) / batch.valid_tokens, total


def chain(slices: Sequence[Slice], tokens: mx.array) -> mx.array:
    x = tokens
    for part in slices[:-1]:
        x = part(x)
    return logits_of(slices[-1], x)


@pytest.mark.parametrize("family", SUPPORTED)
def test_models_under_test_are_those_mlx_lm_would_load(family: str) -> None:
    model_class, _ = _get_classes(tiny_config(family))
    assert type(tiny_model(family, layers=1)) is model_class


@pytest.mark.parametrize("case", [*EXACT, *TIED, *BFLOAT16], ids=str)
def test_logits_of_the_slices_in_a_row_are_those_of_the_whole_model(case: Case) -> None:
    model = case.build()
    expected = model(TOKENS)
    for ranges in CUTS[1:]:
        logits = chain([Slice(model, start, stop) for start, stop in ranges], TOKENS)
        assert logits.dtype == case.dtype
        assert mx.array_equal(logits, expected), ranges


@pytest.mark.parametrize("recompute", RECOMPUTE)
# test_conformance.py does it with each family's plain model.
@pytest.mark.parametrize(
    ("case", "is_packed"),
    [
        *((case, False) for case in (UNTIED[0], UNTIED[-1])),
        *((case, True) for case in QUANTISED_TIED[:1] + WINDOWED),
    ],
    ids=str,
)
def test_in_pieces_they_are_so_but_for_rounding(
    case: Case, is_packed: bool, recompute: str
) -> None:
    """Whatever the pieces: of attention, of the loss, what is computed again."""
    expected_loss, expected = whole_model(case, BATCH)
    parts = pack(BATCH, 1) if is_packed else [BATCH]
    savings = Savings(attention_chunk=6, loss_chunk=30, recompute=recompute)
    (loss,), gradients = through_stages(
        case.build(), CUTS[1], parts, scale=1 / BATCH.valid_tokens, savings=savings
    )
    assert loss / BATCH.valid_tokens == pytest.approx(expected_loss, rel=1e-6)
    assert set(gradients) == set(expected)
    assert largest_difference(gradients, expected)[0] < 1e-5


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_gradients_are_those_of_the_whole_model_to_the_bit(case: Case) -> None:
    """With I and W apart, and as one B."""
    expected_loss, expected = whole_model(case, BATCH)
    assert all(gradient.any() for gradient in expected.values())
    model = case.build()
    for ranges, split in ((CUTS[0], True), (CUTS[1], False), (CUTS[2], True)):
        loss, gradients = run_stages(stages_of(model, ranges), BATCH, split=split)
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert set(gradients) == set(expected)
        assert largest_difference(gradients, expected) == (0.0, ""), (ranges, split)


@pytest.mark.parametrize("case", TIED, ids=str)
def test_gradients_of_a_tied_embedding_add_up_over_its_two_holders(case: Case) -> None:
    expected_loss, expected = whole_model(case, BATCH)
    model = case.build()
    for ranges in CUTS:
        loss, gradients = run_stages(stages_of(model, ranges), BATCH)
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert set(gradients) == set(expected)
        difference, name = largest_difference(gradients, expected)
        assert difference <= 1e-6, (name, ranges)


@pytest.mark.parametrize("case", BFLOAT16, ids=str)
def test_gradients_in_bfloat16_are_close_and_add_up_in_float32(case: Case) -> None:
    _, expected = whole_model(case, BATCH)
    model = case.build()
    for ranges in CUTS:
        _, gradients = run_stages(stages_of(model, ranges), BATCH)
        assert all(gradient.dtype == np.float32 for gradient in gradients.values())
        assert set(gradients) == set(expected)
        difference, name = largest_difference(gradients, expected)
        assert difference <= 1e-3, (name, ranges)


def test_lora_reaches_experts_and_router_of_mixtral() -> None:
    names = Slice(Case("mixtral", bits=4).build(), 2, 3).trainable
    assert "model.layers.2.block_sparse_moe.switch_mlp.up_proj.lora_a" in names
    assert "model.layers.2.block_sparse_moe.gate.lora_b" in names


def test_norms_of_queries_and_keys_of_qwen3_are_trained() -> None:
    names = Slice(Case("qwen3").build(), 2, 3).trainable
    assert {"model.layers.2.self_attn.q_norm.weight", "model.layers.2.self_attn.k_norm.weight"} <= {
        *names
    }


@pytest.mark.parametrize("case", WINDOWED, ids=str)
def test_the_window_matters_at_this_length(case: Case) -> None:
    wide = Case(case.family, overrides={**SLIDING, "sliding_window": 1000}).build()
    assert not mx.array_equal(case.build()(TOKENS), wide(TOKENS))


def test_the_scale_of_queries_matters_at_this_length() -> None:
    config = tiny_config("ministral3")["rope_parameters"]
    constant = Case(
        "ministral3", overrides={"rope_parameters": {**config, "llama_4_scaling_beta": 0.0}}
    )
    assert not mx.array_equal(Case("ministral3").build()(TOKENS), constant.build()(TOKENS))


@pytest.mark.parametrize("case", [*UNTIED, WINDOWED[0]], ids=str)
def test_a_sequence_of_one_token_can_be_trained_on(case: Case) -> None:
    batch = MicroBatch(np.array([[3, 5]], np.int32), np.array([[0, 2]], np.int32), 0)
    _, expected = whole_model(case, batch)

    _, gradients = run_stages(stages_of(case.build(), CUTS[1]), batch)

    assert largest_difference(gradients, expected) == (0.0, "")


@pytest.mark.parametrize("model_type", ["mamba", "jamba", None])
def test_another_family_is_refused_by_name_without_its_tensors(model_type: str | None) -> None:
    with pytest.raises(UserError) as error:
        ModelShape.from_config({**tiny_config(), "model_type": model_type})
    assert str(error.value) == (
        f"model_type {model_type!r} is not declared: its sizes are known with its tensors only: "
        f"name a model with its weights, or of type {', '.join(FAMILIES)}"
    )


def test_another_family_without_weights_is_refused(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    config = TrainConfig(model=str(tmp_path), train=True)
    with pytest.raises(UserError, match="'mamba' is not declared"):
        LocalNetwork(1).run(
            lambda transport: prepare_training(config, transport, Reporter(quiet=True))
        )
