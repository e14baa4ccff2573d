"""Every family, by the same tests: planned, cut, trained and generated with as mlx-lm's own model.

A new row in ``models/families`` is tested by all of these once ``CONFIGS`` has a tiny config of it.
"""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from shardmlx.config.specs import Savings
from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.hostfile import Machine
from shardmlx.distributed.transport import Transport
from shardmlx.engine.batches import pack, split
from shardmlx.engine.divided_weights import DividedWeights
from shardmlx.engine.engine import Engine
from shardmlx.engine.gathered_stage import build_stages
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.modelfiles.parts import read_shape
from shardmlx.models.families import FAMILIES
from shardmlx.models.shape import ModelShape
from shardmlx.models.slice import Slice
from shardmlx.models.tensors import expected_tensors, modules
from shardmlx.pipeline.plan import Plan
from shardmlx.planning.training_plan import plan_training
from tests.helpers.family_configs import CONFIGS, LAYERS
from tests.helpers.generation import by_mlx_lm, run_pipeline
from tests.helpers.local_transport import LocalNetwork
from tests.helpers.models_and_batches import (
    Gradients,
    Layout,
    build,
    largest_difference,
    logits_of,
    mean_loss,
    move_trained,
    random_batch,
    saving,
    stages_of,
    through_stages,
)

BATCH = random_batch(2, longest=30)
TOKENS = mx.array(BATCH.tokens[:, :-1])
CUTS = [[(0, LAYERS)], [(0, 1), (1, 3), (3, LAYERS)]]
families = pytest.mark.parametrize("family", CONFIGS)
# mlx-lm has no DoRA for experts.
DENSE = [
    family
    for family, config in CONFIGS.items()
    if not any(each.experts for each in read_shape(config).kinds)
]
FULL = [(family, "full") for family in CONFIGS]
ADAPTED = [(family, "lora") for family in CONFIGS] + [(family, "dora") for family in DENSE]
SOME = (FULL + ADAPTED)[::8]


@cache
def model_of(family: str, adapters: str = "full", bits: int | None = None) -> nn.Module:
    """The model of mlx-lm with random weights; what is trained of it is unfrozen."""
    config = CONFIGS[family]
    quantisation = {} if bits is None else {"quantization": {"group_size": 32, "bits": bits}}
    model = build(config | quantisation, seed=3)
    if adapters != "full":
        model.freeze()
        settings = {"rank": 4, "scale": 2.0, "dropout": 0.0}
        linear_to_lora_layers(model, LAYERS, settings, use_dora=adapters == "dora")
    move_trained(model)
    mx.eval(model.parameters())
    return model


@cache
def shape_of(family: str) -> ModelShape:
    return read_shape(CONFIGS[family])


@cache
def reference(family: str, adapters: str) -> tuple[float, Gradients]:
    model = model_of(family, adapters)
    loss, gradients = nn.value_and_grad(model, mean_loss)(model, BATCH)
    return loss.item(), {name: np.array(array) for name, array in tree_flatten(gradients)}


def test_every_family_has_a_tiny_config() -> None:
    assert set(CONFIGS) > set(FAMILIES)


@families
def test_tensors_are_those_of_mlx_lm(family: str) -> None:
    shape = shape_of(family)
    ours = expected_tensors(modules(shape), lambda path, module: None)
    theirs = dict(tree_flatten(model_of(family).parameters()))
    assert ours == {name: array.shape for name, array in theirs.items()}
    assert shape.parameters() == sum(array.size for array in theirs.values())


@families
def test_a_run_can_be_planned_from_the_config_alone(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[family]))
    config = TrainConfig(
        model=str(tmp_path), num_layers=2, pipeline_stages=2, schedule="1f1b", batch_size=2
    )
    machines = [Machine(host=f"mac{i}", memory=2**34, flops=1e12, link=1e9) for i in range(2)]
    plan = plan_training(config, machines)
    assert plan.prediction.plan.mesh.pp == 2
    assert all(rank.peak > 0 for rank in plan.prediction.ranks)


@families
def test_logits_of_stages_are_those_of_the_whole_model(family: str) -> None:
    model = model_of(family, bits=4)
    slices = [Slice(model, start, stop) for start, stop in CUTS[1]]
    x = TOKENS
    for part in slices[:-1]:
        x = part(x)
    assert mx.array_equal(logits_of(slices[-1], x), model(TOKENS))


PIECES = Savings(attention_chunk=12, loss_chunk=20, recompute="selective")


@pytest.mark.parametrize(
    ("family", "adapters", "savings", "most"),
    [
        *((family, "lora", PIECES, 1e-5) for family in CONFIGS),
        *((family, "full", Savings(recompute="selective"), 2e-5) for family in CONFIGS),
        # A layer that is computed again is the family's own code, which the others run too.
        *((family, "lora", saving(checkpoint=True), 1e-6) for family in [*CONFIGS][::4]),
    ],
)
def test_neither_packing_nor_pieces_nor_recomputation_change_them(
    family: str, adapters: str, savings: Savings, most: float
) -> None:
    expected_loss, expected = reference(family, adapters)
    assert all(np.isfinite(gradient).all() for gradient in expected.values())
    is_packed = bool(savings.attention_chunk) and shape_of(family).takes_packed
    (loss,), gradients = through_stages(
        # A model of its own: selective recomputation changes modules.
        model_of.__wrapped__(family, adapters),
        CUTS[1],
        pack(BATCH, 1) if is_packed else [BATCH],
        scale=1 / BATCH.valid_tokens,
        savings=savings,
    )
    assert loss / BATCH.valid_tokens == pytest.approx(expected_loss, rel=1e-6)
    assert set(gradients) == set(expected)
    assert largest_difference(gradients, expected)[0] <= most


@families
def test_with_caches_stages_continue_a_text_as_the_whole_model(family: str) -> None:
    """Chunks of a prompt, longer than the window, then token by token."""
    model = model_of(family)
    tokens = mx.array(np.random.RandomState(5).randint(1, 90, (1, 22)))
    cuts = [0, 9, 20, 21, 22]
    theirs = make_prompt_cache(model)
    slices = [Slice(model, start, stop) for start, stop in CUTS[1]]
    ours = [part.new_caches() for part in slices]
    assert slices[0].chooses_caches == shape_of(family).chooses_caches
    for start, stop in pairwise(cuts):
        x = tokens[:, start:stop]
        expected = model(x, cache=theirs)[:, -1]
        for part, caches in zip(slices, ours, strict=True):
            x = part.extend(x, caches)
        assert mx.array_equal(slices[-1].last_logits(x), expected), (start, stop)


@pytest.mark.parametrize(
    ("family", "adapters", "schedule"),
    # Adapters of each family are trained in the stages above, where I and W are together.
    [(*each, "zb-h1") for each in FULL + ADAPTED[::8]] + [(*each, "1f1b") for each in SOME],
)
def test_schedules_give_the_gradients_of_the_whole_model(
    family: str, adapters: str, schedule: str
) -> None:
    """Two micro-batches on two ranks, with I and W apart, and together."""
    # A model for each rank: while gradients are traced, a tied matrix holds one rank's lazy arrays.
    models = [model_of.__wrapped__(family, adapters) for _ in range(2)]
    for model in models:
        # Modules keep lazy arrays beside their parameters, which belong to this thread.
        mx.eval(model(TOKENS[:1, :4]))
    _, expected = reference(family, adapters)
    plan = Layout(schedule, pp=2).plan(LAYERS, len(BATCH.tokens))

    def step(transport: Transport) -> Gradients:
        return one_step(plan, models[transport.rank], transport)

    check_same({k: v for each in LocalNetwork(2).run(step) for k, v in each.items()}, expected)


def check_same(found: Gradients, expected: Gradients) -> None:
    assert set(found) == set(expected)
    # Sums over micro-batches are rounded otherwise than those over the batch. Some cancel: that of
    # a bias of all keys is rounding alone.
    rounding = 1e-6 * max(abs(gradient).max() for gradient in expected.values())
    for name, gradient in expected.items():
        difference = abs(found[name] - gradient).max()
        assert difference <= 1e-5 * abs(gradient).max() + rounding, name


def one_step(plan: Plan, model: nn.Module, transport: Transport) -> Gradients:
    stages = stages_of(transport, plan, model)
    engine = Engine(plan, transport, stages)
    engine.train_step(split(BATCH, 1, 0, 1), scale=1 / BATCH.valid_tokens)
    return {name: np.array(array) for stage in stages for name, array in stage.gradients.items()}


@pytest.mark.parametrize(("family", "adapters"), SOME)
def test_replicas_that_divide_the_weights_have_the_same_gradients(
    family: str, adapters: str
) -> None:
    # A replica puts others in the place of weights that it does not own.
    models = [model_of.__wrapped__(family, adapters) for _ in range(2)]
    for model in models:
        mx.eval(model(TOKENS[:1, :4]))
    _, expected = reference(family, adapters)
    plan = Layout("1f1b", pp=1, dp=2).plan(LAYERS, 1)

    def step(transport: Transport) -> Gradients:
        part = Slice(models[transport.rank], 0, LAYERS)
        weights = DividedWeights(transport.rank, plan.mesh.replicas_of(0), [part])
        (stage,) = build_stages([part], weights=weights)
        engine = Engine(plan, transport, [stage], weights=weights)
        rows = split(BATCH, 2, engine.replica, len(BATCH.tokens) // 2)
        engine.train_step(rows, scale=1 / BATCH.valid_tokens)
        return {name: np.array(array) for name, array in stage.gradients.items()}

    check_same({k: v for each in LocalNetwork(2).run(step) for k, v in each.items()}, expected)


@families
def test_texts_of_a_batch_and_after_a_common_beginning_are_those_of_each_alone(
    family: str,
) -> None:
    """Two prompts in one group, if the family can; then one that begins as the first, and one that
    goes on with it."""
    model, count = model_of(family), 3
    first, second, more = (
        np.random.RandomState(seed).randint(1, 90, length).tolist()
        for seed, length in ((6, 12), (7, 6), (8, 5))
    )
    answer = by_mlx_lm(model, first, count)
    again = {2: [*first[:6], *more], 3: [*first, *answer, *more]}
    shape = shape_of(family)
    texts, cached = run_pipeline(
        [model],
        CUTS[0],
        1 if shape.takes_batches else 4,
        [{0: first, 1: second}, again],
        count,
        PrefixCache.of(shape, shortest=4),
    )
    prompts = {0: first, 1: second, **again}
    others = {each: by_mlx_lm(model, prompts[each], count) for each in (1, 2, 3)}
    assert texts == {0: answer, **others}
    # All but the last token of the answer; a window may have forgotten the beginning.
    assert cached[3] == (0 if shape.has_dynamic_rope else len(first) + count - 1)
    assert cached[2] == (0 if shape.has_dynamic_rope or any(shape.windows) else 6)


def test_a_wrapper_takes_each_text_model_that_mlx_lm_takes() -> None:
    """Beside the one of its tiny config: latent attention and experts behind images."""
    config = {"model_type": "mistral3", "text_config": CONFIGS["mistral4"]}
    model = build(config, seed=3)
    shape = read_shape(config)
    theirs = {name: array.shape for name, array in tree_flatten(model.parameters())}
    assert expected_tensors(modules(shape), lambda path, module: None) == theirs
    x = TOKENS
    slices = [Slice(model, start, stop) for start, stop in CUTS[1]]
    for part in slices[:-1]:
        x = part(x)
    assert mx.array_equal(logits_of(slices[-1], x), model(TOKENS))
