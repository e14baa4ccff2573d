"""Slices and stages: what they hold, and the two halves of a backward that recomputes nothing."""

import gc
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from shardmlx.engine.batches import MicroBatch, split
from shardmlx.engine.loss import token_loss
from shardmlx.engine.stage import Stage
from shardmlx.models.runtime.slice import Slice
from testbed.family_configs import CONFIGS
from testbed.tiny_models import VOCABULARY, build
from testbed.undeclared_configs import UNDECLARED
from tests.helpers.models_and_batches import (
    all_answers,
    backward,
    check_same,
    logits_of,
    random_batch,
    reference,
    saving,
    tiny_model,
    with_adapters,
)

BATCH = random_batch(6)
SCALE = 1 / BATCH.valid_tokens
MICROBATCHES = split(BATCH, dp=1, replica=0, micro_batch_rows=2)


def stage_of(model: nn.Module, start: int, stop: int, *, checkpoint: bool = False) -> Stage:
    trains_below = start > 0 and bool(Slice(model, 0, start).trainable)
    return Stage(
        start,
        Slice(model, start, stop),
        needs_input_gradient=trains_below,
        savings=saving(checkpoint),
    )


def hidden_states(microbatch: MicroBatch, width: int = 32, seed: int = 5) -> mx.array:
    x = mx.random.normal((*microbatch.shape, width), key=mx.random.key(seed))
    mx.eval(x)
    return x


# What a slice holds.


def test_a_slice_holds_its_own_layers_and_ends_only() -> None:
    model = tiny_model(layers=3)

    def modules(start: int, stop: int) -> set[str]:
        names = Slice(model, start, stop).parameters()
        return {".".join(name.split(".")[:3]).removesuffix(".weight") for name in names}

    assert modules(0, 1) == {"model.embed_tokens", "model.layers.0"}
    assert modules(1, 2) == {"model.layers.1"}
    assert modules(2, 3) == {"model.layers.2", "model.norm", "lm_head"}
    assert modules(0, 3) == modules(0, 1) | modules(1, 2) | modules(2, 3)


def test_a_tied_embedding_is_held_by_the_first_and_the_last_slice() -> None:
    model = tiny_model(layers=3, tied=True)
    parts = [Slice(model, i, i + 1) for i in range(3)]
    name = "model.embed_tokens.weight"
    assert [name in part.parameters() for part in parts] == [True, False, True]
    assert [part.shares(name) for part in (parts[0], parts[2])] == [True, True]
    assert not parts[2].shares("model.norm.weight")
    assert not Slice(model, 0, 3).shares(name)
    assert not Slice(tiny_model(layers=2), 0, 1).shares(name)


def test_trained_names_come_in_the_order_of_their_gradients() -> None:
    keys = ["self_attn.q_proj", "self_attn.v_proj"]
    part = Slice(with_adapters(tiny_model(layers=12), 3, keys=keys), 8, 12)
    assert part.trainable == tuple(
        f"model.layers.{layer}.self_attn.{projection}.{leaf}"
        for layer in (11, 10, 9)
        for projection in ("q_proj", "v_proj")
        for leaf in ("lora_a", "lora_b")
    )
    names = Slice(tiny_model(layers=2), 0, 2).trainable
    assert names[:2] == ("lm_head.weight", "model.norm.weight")
    assert names[-1] == "model.embed_tokens.weight"
    layers = [name.split(".")[2] for name in names if name.startswith("model.layers.")]
    assert layers == ["1"] * 9 + ["0"] * 9


def test_a_parameter_that_is_set_is_the_one_that_computes() -> None:
    part = Slice(tiny_model(layers=2), 1, 2)
    x = hidden_states(MICROBATCHES[0])
    part["model.norm.weight"] = mx.zeros(32)
    assert not part.norm(part(x)).any()
    assert not part.parameters()["model.norm.weight"].any()


def test_parameters_come_back_even_after_an_error() -> None:
    part = Slice(tiny_model(layers=2), 0, 2)
    names = part.trainable
    before = part.parameters()

    def fail() -> mx.array:
        assert not part[names[0]].any()
        raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        part.with_parameters(names, [mx.zeros_like(part[name]) for name in names], fail)

    assert all(part[name] is before[name] for name in before)


@pytest.mark.parametrize(
    ("dtype_of_norms", "between"), [(mx.bfloat16, mx.bfloat16), (mx.float32, mx.float32)]
)
def test_hidden_states_have_the_type_the_layers_make_of_them(
    dtype_of_norms: mx.Dtype, between: mx.Dtype
) -> None:
    model = tiny_model(layers=3)
    model.set_dtype(mx.bfloat16)
    for layer in model.layers:
        layer.input_layernorm.set_dtype(dtype_of_norms)
    parts = [Slice(model, 0, 1), Slice(model, 1, 3)]

    hidden = parts[0](mx.array(BATCH.tokens[:, :-1]))

    assert hidden.dtype == parts[0].dtype == parts[1].dtype == between


# Forward and backward of a stage.


def run_all(stages: Sequence[Stage], order: Callable[[int], Sequence[int]]) -> list[float]:
    """All forwards, then I in ``order``, then W; the summed losses."""
    losses = []
    for j, microbatch in enumerate(MICROBATCHES):
        out = None
        for stage in stages:
            out = stage.forward(j, microbatch, out, scale=SCALE)
        assert out is not None
        losses.append(float(np.array(out)))
    for j in order(len(MICROBATCHES)):
        gradient = None
        for stage in reversed(stages):
            if gradient is not None:
                stage.fill_cotangent(j, gradient)
            if stage.needs_input_gradient:
                gradient = stage.backward_input(j)
    for j in range(len(MICROBATCHES)):
        for stage in stages:
            stage.backward_weight(j)
    return losses


@pytest.mark.parametrize("order", [range, lambda m: range(m - 1, -1, -1)], ids=["first", "last"])
def test_micro_batches_in_flight_keep_their_gradients_apart(
    order: Callable[[int], Sequence[int]],
) -> None:
    model = tiny_model(layers=4)
    stages = [stage_of(model, 0, 1), stage_of(model, 1, 3), stage_of(model, 3, 4)]

    losses = run_all(stages, order)

    expected = reference(model, MICROBATCHES)
    assert losses == expected[0]
    gradients = {k: np.array(v) for stage in stages for k, v in stage.gradients.items()}
    check_same((losses, gradients), expected)


def test_a_gradient_that_lies_across_in_memory_is_filled_in_the_right_order() -> None:
    stage = stage_of(tiny_model(layers=3), 1, 2)
    stage.forward(0, MICROBATCHES[0], hidden_states(MICROBATCHES[0]), scale=SCALE)
    rows, length, width = stage.cotangent(0).shape
    gradient = mx.arange(rows * length * width, dtype=mx.float32)
    across = gradient.reshape(width, length, rows).transpose(2, 1, 0)
    mx.eval(across)

    stage.fill_cotangent(0, across)

    assert mx.array_equal(stage.cotangent(0), across)


@pytest.mark.parametrize("family", ["mixtral", "gemma2", "deepseek_v3", "stablelm", "gpt2"])
def test_in_a_limited_cache_a_token_sees_what_it_would_see_alone(family: str) -> None:
    """The first four tokens and the last twelve, whatever comes in the same chunk."""
    part = Slice(build((CONFIGS | UNDECLARED)[family], seed=3), 0, 4)
    tokens = mx.array([np.random.RandomState(0).randint(1, VOCABULARY, size=50).tolist()])

    def states(chunk: int) -> np.ndarray:
        caches = part.new_caches(16)
        pieces = [part.extend(tokens[:, s : s + chunk], caches) for s in range(0, 50, chunk)]
        return np.array(mx.concatenate(pieces, axis=1))

    alone = states(1)
    for chunk in (3, 16, 17, 50):
        np.testing.assert_allclose(states(chunk), alone, atol=1e-5 * np.abs(alone).max())


def test_weights_in_parts_come_one_part_after_the_other() -> None:
    microbatch = MICROBATCHES[0]
    whole, in_parts = (stage_of(tiny_model(layers=3), 0, 3) for _ in range(2))
    parts = [in_parts.names[:4], in_parts.names[4:5], in_parts.names[5:]]
    for stage in (whole, in_parts):
        stage.forward(0, microbatch, None, scale=SCALE)
    whole.backward_weight(0)

    steps = in_parts.backward_weight_in_parts(0, parts)

    done: list[str] = []
    for part, expected_part in zip(steps, parts, strict=True):
        assert part == expected_part
        done += part
        assert all(mx.array_equal(in_parts.gradients[name], whole.gradients[name]) for name in done)
    assert tuple(done) == whole.names


def test_evaluation_gives_the_loss_of_the_forward_and_keeps_nothing() -> None:
    stage = stage_of(tiny_model(layers=2), 0, 2)
    loss = stage.evaluate(MICROBATCHES[0], None)
    with pytest.raises(KeyError):
        stage.cotangent(0)
    assert loss.item() == stage.forward(0, MICROBATCHES[0], None, scale=SCALE).item()


# Nothing is computed twice, nothing is kept without need.


def products(tmp_path: Path, *arrays: mx.array) -> int:
    """Matrix products that are still to be computed before ``arrays`` are known."""
    path = tmp_path / "graph.dot"
    mx.export_to_dot(str(path), *arrays)
    return len(re.findall(r'label *= *"Matmul"', path.read_text()))


def test_after_the_forward_only_the_products_of_the_backward_are_left(tmp_path: Path) -> None:
    microbatch, x = MICROBATCHES[0], hidden_states(MICROBATCHES[0])
    stage = stage_of(tiny_model(layers=4), 1, 4)

    def loss(*weights: mx.array) -> mx.array:
        return stage.part.with_parameters(
            stage.names,
            weights,
            lambda: token_loss(logits_of(stage.part, x), *all_answers(microbatch)),
        )

    weights = [stage.part[name] for name in stage.names]
    forward = products(tmp_path, loss(*weights))
    _, gradients = mx.vjp(loss, weights, [mx.array(SCALE)])
    both = products(tmp_path, *gradients)

    stage.forward(0, microbatch, x, scale=SCALE)
    list(stage.backward_weight_in_parts(0, []))  # adds the gradients up, and computes none

    assert forward == 3 * 9 + 1  # 7 projections and 2 of attention in each layer, and the head
    assert products(tmp_path, *stage.gradients.values()) == both - forward


def test_the_weights_gradients_reuse_what_the_input_gradient_computed(tmp_path: Path) -> None:
    stage = stage_of(tiny_model(layers=4), 1, 4)
    stage.forward(0, MICROBATCHES[0], hidden_states(MICROBATCHES[0]), scale=SCALE)
    stage.backward_input(0)
    list(stage.backward_weight_in_parts(0, []))
    # One product for each matrix that is trained.
    assert products(tmp_path, *stage.gradients.values()) == 3 * 7 + 1


def test_a_frozen_stage_above_trained_ones_passes_the_gradient_on() -> None:
    model = tiny_model(layers=4)
    model.freeze()
    model.layers[0].unfreeze()
    stage = stage_of(model, 1, 3)
    assert not stage.names
    x = hidden_states(MICROBATCHES[0])
    stage.forward(0, MICROBATCHES[0], x, scale=SCALE)
    cotangent = hidden_states(MICROBATCHES[0], seed=8)
    stage.fill_cotangent(0, cotangent)

    gradient = stage.backward_input(0)

    _, (expected,) = mx.vjp(lambda x: [stage.part(x)], [x], [cotangent])
    assert mx.array_equal(gradient, expected)
    with pytest.raises(KeyError):
        stage.cotangent(0)


def test_nothing_is_held_once_the_backward_is_done() -> None:
    stage = stage_of(tiny_model(layers=4, hidden_size=64), 0, 4)

    def step(j: int) -> int:
        mx.clear_cache()
        stage.forward(j, MICROBATCHES[0], None, scale=SCALE)
        backward(stage, j)
        gc.collect()
        mx.synchronize()
        return int(mx.get_active_memory())

    assert step(0) == step(1) == step(2)


# Checkpointing.


def peak_of_a_step(layers: int, *, checkpoint: bool) -> tuple[int, int]:
    """Bytes held between forward and backward, and bytes at the peak of the backward."""
    long = random_batch(2, longest=400)
    stage = stage_of(tiny_model(layers=layers), 0, layers, checkpoint=checkpoint)
    gc.collect()
    mx.clear_cache()  # MLX would reuse buffers that are larger than what they hold
    before = mx.get_active_memory()
    stage.forward(0, long, None, scale=SCALE)
    held = mx.get_active_memory() - before
    mx.reset_peak_memory()
    stage.backward_weight(0)
    return held, mx.get_peak_memory() - before


def test_with_checkpointing_the_peak_is_that_of_one_layer() -> None:
    _, shallow = peak_of_a_step(4, checkpoint=True)
    whole_held, whole_peak = peak_of_a_step(12, checkpoint=False)
    held, peak = peak_of_a_step(12, checkpoint=True)
    assert held < whole_held / 10
    assert peak < whole_peak / 3
    assert peak < 1.2 * shallow
