"""Every family, by the same tests: planned, cut, trained and generated with as mlx-lm's own model.

A new row in ``models.families`` is tested by all of these once ``CONFIGS`` has a tiny config of it.
"""

from __future__ import annotations

import json
from copy import deepcopy
from functools import cache
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from shardmlx.config.specs import Savings
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.transport import Transport
from shardmlx.engine.batches import pack
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.modelfiles.parts import read_shape
from shardmlx.modelfiles.tensors import expected_tensors, modules
from shardmlx.models.families import FAMILIES
from shardmlx.models.runtime.slice import Slice
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.pipeline.plan import Plan
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.training_plan import plan_training
from testbed.family_configs import CONFIGS, LAYERS, has_experts
from testbed.tiny_models import build
from tests.helpers.cut_models import check_continued, check_logits, check_pairs
from tests.helpers.engines import NOTHING, WEIGHTS, engine_of, gradients_of, train_on
from tests.helpers.generation import by_mlx_lm, run_pipeline
from tests.helpers.local_transport import LocalNetwork
from tests.helpers.models_and_batches import (
    Gradients,
    Layout,
    Result,
    check_same,
    move_trained,
    random_batch,
    reference,
    saving,
    through_stages,
    with_adapters,
)

BATCH = random_batch(2, longest=30)
TOKENS = mx.array(BATCH.tokens[:, :-1])
CUTS = [[(0, LAYERS)], [(0, 1), (1, 3), (3, LAYERS)]]
families = pytest.mark.parametrize("family", CONFIGS)
# mlx-lm has no DoRA for experts.
DENSE = [family for family, config in CONFIGS.items() if not has_experts(config)]
FULL = [(family, "full") for family in CONFIGS]
ADAPTED = [(family, "lora") for family in CONFIGS] + [(family, "dora") for family in DENSE]
SOME = (FULL + ADAPTED)[::8]


@cache
def _built(family: str, adapters: str, bits: int | None = None) -> nn.Module:
    quantisation = {} if bits is None else {"quantization": {"group_size": 32, "bits": bits}}
    model = build(CONFIGS[family] | quantisation, seed=3)
    if adapters != "full":
        with_adapters(model, dora=adapters == "dora")
    return move_trained(model)


def own_model(family: str, adapters: str, bits: int | None = None) -> nn.Module:
    """The model of mlx-lm with random weights; what is trained of it is unfrozen. To copy it takes
    a third of the time of building it again."""
    model = deepcopy(_built(family, adapters, bits))
    mx.eval(model.parameters())
    return model


@cache
def model_of(family: str, adapters: str = "full", bits: int | None = None) -> nn.Module:
    """The same, shared by all tests that train nothing."""
    return own_model(family, adapters, bits)


@cache
def shape_of(family: str) -> ModelShape:
    return read_shape(CONFIGS[family])


@cache
def expected_of(family: str, adapters: str) -> Result:
    return reference(model_of(family, adapters), [BATCH])


def test_every_family_has_a_tiny_config() -> None:
    assert set(CONFIGS) > set(FAMILIES)


@families
def test_tensors_are_those_of_mlx_lm(family: str) -> None:
    shape = shape_of(family)
    ours = expected_tensors(modules(shape), lambda path, module: None)
    theirs = dict(tree_flatten(model_of(family).parameters()))
    assert ours == {name: array.shape for name, array in theirs.items()}
    assert shape.parameters() == sum(array.size for array in theirs.values())
    assert any(each.experts for each in shape.kinds) == has_experts(CONFIGS[family])


@families
def test_a_run_can_be_planned_from_the_config_alone(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[family]))
    config = TrainConfig.from_flat(
        model=str(tmp_path), num_layers=2, pipeline_stages=2, schedule="1f1b", batch_size=2
    )
    machines = [Machine(host=f"mac{i}", memory=2**34, flops=1e12, link=1e9) for i in range(2)]
    plan = plan_training(config, machines)
    assert plan.prediction.plan.mesh.pp == 2
    assert all(rank.peak > 0 for rank in plan.prediction.ranks)


BY_PLACE = {"exaone4", "exaone_moe", "llama4_text", "smollm3"}
"""Families some of whose layers have no rotary embedding."""


@families
def test_answers_are_as_likely_with_the_prompt_of_a_pair_once(family: str) -> None:
    """Where the family takes packed rows in pieces."""
    shape = shape_of(family)
    if shape.takes_packed and shape.family.takes_pieces:
        check_pairs(model_of(family), CUTS[1], shares_prompts=family not in BY_PLACE)


PIECES = Savings(attention_chunk=12, loss_chunk=20, recompute="selective")


@pytest.mark.parametrize(
    ("family", "adapters", "savings", "most"),
    [
        *((family, "lora", PIECES, 1e-5) for family in CONFIGS),
        # With adapters each family computes its products again too.
        *((family, "full", Savings(recompute="selective"), 2e-5) for family in [*CONFIGS][::3]),
        # A layer that is computed again is the family's own code, which the others run too.
        *((family, "lora", saving(checkpoint=True), 1e-6) for family in [*CONFIGS][::4]),
    ],
)
def test_neither_packing_nor_pieces_nor_recomputation_change_them(
    family: str, adapters: str, savings: Savings, most: float
) -> None:
    expected = expected_of(family, adapters)
    assert all(np.isfinite(gradient).all() for gradient in expected[1].values())
    is_packed = bool(savings.attention_chunk) and shape_of(family).takes_packed
    # A model of its own: selective recomputation changes modules.
    model, parts = own_model(family, adapters), pack(BATCH, 1) if is_packed else [BATCH]
    check_same(through_stages(model, CUTS[1], parts, savings=savings), expected, most)


@families
def test_with_caches_stages_continue_a_text_as_the_whole_model(family: str) -> None:
    """In four bits; chunks of a prompt, longer than the window, then token by token."""
    model = model_of(family, bits=4)
    assert Slice(model, 0, 1).chooses_caches == shape_of(family).chooses_caches
    check_continued(model, CUTS[1], [9, 20, 21, 22])


@pytest.mark.parametrize(
    ("family", "adapters", "schedule"),
    # Adapters of each family are trained in the stages above, where I and W are together.
    [(*each, "zb-h1") for each in FULL] + [(*each, "1f1b") for each in SOME],
)
def test_schedules_give_the_gradients_of_the_whole_model(
    family: str, adapters: str, schedule: str
) -> None:
    """Two micro-batches on two ranks, with I and W apart, and together."""
    check_step(family, adapters, Layout(schedule, pp=2).plan(LAYERS, len(BATCH.tokens)), NOTHING)


def check_step(family: str, adapters: str, plan: Plan, divided: int) -> None:
    # A model for each rank: while gradients are traced, a tied matrix holds one rank's lazy arrays,
    # and a replica puts others in the place of weights that it does not own.
    models = [own_model(family, adapters) for _ in range(2)]
    for model in models:
        # Modules keep lazy arrays beside their parameters, which belong to this thread.
        mx.eval(model(TOKENS[:1, :4]))
    _, expected = expected_of(family, adapters)

    def step(transport: Transport) -> Gradients:
        engine = engine_of(transport, plan, models[transport.rank], divided)
        train_on(engine, BATCH)
        return gradients_of(engine)

    found = {k: v for each in LocalNetwork(2).run(step) for k, v in each.items()}
    assert set(found) == set(expected)
    # Sums over micro-batches are rounded otherwise than those over the batch. Some cancel: that of
    # a bias of all keys is rounding alone.
    rounding = 1e-6 * max(abs(gradient).max() for gradient in expected.values())
    for name, gradient in expected.items():
        difference = abs(found[name] - gradient).max()
        assert difference <= 1e-5 * abs(gradient).max() + rounding, name


@pytest.mark.parametrize(("family", "adapters"), SOME)
def test_replicas_that_divide_the_weights_have_the_same_gradients(
    family: str, adapters: str
) -> None:
    check_step(family, adapters, Layout("1f1b", pp=1, dp=2).plan(LAYERS, 1), WEIGHTS)


@families
def test_texts_of_a_batch_and_after_a_common_beginning_are_those_of_each_alone(
    family: str,
) -> None:
    """Two prompts in one group, if the family can; then one that begins as the first, and one that
    goes on with it."""
    model, count = model_of(family), 2
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
    check_logits(model, CUTS[1], TOKENS)
