"""Models that no row of ``models.families`` declares: what runs, and what is refused."""

from __future__ import annotations

import pickle
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.loading.manifest import is_needed
from shardmlx.modelfiles.model_files import open_model
from shardmlx.modelfiles.parts import inspect_files, needed_shape, read_shape
from shardmlx.models.families import FAMILIES
from shardmlx.models.family import APPROXIMATE
from shardmlx.models.runtime.parts import find_parts
from shardmlx.models.runtime.slice import Slice
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.workload import model_sizes
from shardmlx.planning.inspection import run as inspect
from shardmlx.planning.report.plan_report import PlanReport, text
from shardmlx.planning.training_plan import plan_training
from testbed.family_configs import CONFIGS, LAYERS
from testbed.tiny_models import build, save_model_directory, tiny_config
from testbed.undeclared_configs import ATTENTIVE, LOOPING, RECURRENT, REFUSED, UNDECLARED
from tests.helpers.cut_models import check_continued
from tests.helpers.generation import by_mlx_lm, run_pipeline
from tests.helpers.models_and_batches import (
    check_same,
    random_batch,
    reference,
    through_stages,
    tiny_model,
    with_adapters,
)

BATCH = random_batch(3, longest=20)
TOKENS = mx.array(BATCH.tokens[:, :-1])
CUTS = [(0, 1), (1, 3), (3, LAYERS)]
STAGES = [(0, 2), (2, LAYERS)]
kinds_that_run = pytest.mark.parametrize("kind", [*ATTENTIVE, *RECURRENT, *LOOPING])
kinds_that_train = pytest.mark.parametrize("kind", [*ATTENTIVE, *RECURRENT])


@cache
def model_of(kind: str) -> nn.Module:
    return build(UNDECLARED[kind], seed=3)


def prompts_of(*lengths: int) -> list[list[int]]:
    return [np.random.RandomState(each).randint(1, 90, each).tolist() for each in lengths]


def shape_of(kind: str) -> ModelShape:
    return read_shape(UNDECLARED[kind])


def test_none_of_them_is_declared() -> None:
    assert not set(UNDECLARED) & set(FAMILIES)


def test_other_ranks_get_a_shape_that_mlx_lms_code_gave() -> None:
    shape = shape_of("qwen3_5")
    assert pickle.loads(pickle.dumps(shape)) == shape


@kinds_that_run
def test_with_caches_stages_continue_a_text_as_the_whole_model(kind: str) -> None:
    check_continued(model_of(kind), CUTS, [7, 14, 21, 22, 23, 24])


@kinds_that_train
def test_adapters_are_counted_and_have_the_gradients_of_the_whole_model(kind: str) -> None:
    model = with_adapters(build(UNDECLARED[kind], seed=3))
    shape = shape_of(kind)
    linears = [e for i in range(LAYERS) for _, e in shape.layer(i).linears if not e.applied]
    expected = reference(model, [BATCH])
    check_same(through_stages(model, CUTS, [BATCH]), expected, 2e-6)
    counted = sum(each.copies * 4 * (each.inputs + each.outputs) for each in linears)
    assert counted == sum(array.size for array in expected[1].values())


@kinds_that_run
def test_sizes_are_those_of_the_tensors(kind: str) -> None:
    model = model_of(kind)
    shape = shape_of(kind)
    arrays = dict(tree_flatten(model.parameters()))
    layers = find_parts(model).layers
    of_layers = sum(array.size for layer in layers for _, array in tree_flatten(layer.parameters()))
    assert sum(shape.layer(i).parameters for i in range(shape.num_layers)) == of_layers
    assert shape.num_layers == LAYERS
    assert (shape.hidden_size, shape.vocab_size) == (32, 97)
    assert bool(shape.untrained) == (kind in LOOPING)
    assert shape.tied == (not find_parts(model).heads)
    needed = [
        {name for name in arrays if is_needed(name, shape, start, stop)} for start, stop in CUTS
    ]
    for (start, stop), names in zip(CUTS, needed, strict=True):
        assert set(Slice(model, start, stop).parameters()) <= names


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("talkie", "it has numbers of its own beside those of its modules"),
        ("nanbeige", "its layers are not called once each, in order"),
        ("iquestloopcoder", "it does not call its layers one by one"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason_and_what_runs(
    kind: str, reason: str
) -> None:
    assert kind in REFUSED
    with pytest.raises(UserError) as error:
        find_parts(model_of(kind))
    assert f"{kind!r} cannot be cut into stages: {reason}" in str(error.value)


def test_a_plan_says_that_it_is_approximate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model_directory(tmp_path, UNDECLARED["qwen3_5"])
    config = TrainConfig.from_flat(model=str(tmp_path), num_layers=2, pipeline_stages=2)
    machines = [Machine(host=f"mac{i}", memory=2**34, flops=1e12, link=1e9) for i in range(2)]
    plan = plan_training(config, machines)
    assert APPROXIMATE in text(PlanReport(choice=plan, start=[]))
    assert inspect([str(tmp_path)]) == 0
    assert APPROXIMATE in capsys.readouterr().out


@pytest.mark.parametrize("kind", LOOPING)
def test_a_loop_over_tokens_is_not_trained(tmp_path: Path, kind: str) -> None:
    save_model_directory(tmp_path, UNDECLARED[kind])
    config = TrainConfig.from_flat(model=str(tmp_path), num_layers=2, pipeline_stages=1)
    with pytest.raises(UserError, match=f"{kind} models cannot be trained"):
        plan_training(config, [Machine(host="mac", memory=2**34, flops=1e12)])


ALONE = {"gpt2", "llama4", "plamo2"}
"""Models that generate one text at a time."""


@pytest.mark.parametrize("kind", ["gpt2", *RECURRENT, *LOOPING])
def test_texts_of_two_stages_are_those_of_mlx_lm(kind: str) -> None:
    """In groups, which texts of other lengths join and leave, unless the model takes no batches;
    then one that goes on with the first, and others that leave it, or a common beginning."""
    models = [build(UNDECLARED[kind], seed=3) for _ in STAGES]
    mx.eval([model(TOKENS) for model in models])  # also the numbers of ropes, on this thread
    shape = shape_of(kind)
    assert shape.takes_batches == (kind not in ALONE)
    prompts = dict(enumerate(prompts_of(5, 30, 1)))
    more = {9: [*prompts[0], *by_mlx_lm(models[0], prompts[0], 4), 9, 2]}
    # The first pays for its beginning where the end of a prompt lies behind, and marks it.
    leaving = {10 + i: [*prompts[1][:20], *own] for i, own in enumerate(prompts_of(8, 9))}
    again = {20: [*prompts[1], *prompts_of(7)[0]]}
    texts, cached = run_pipeline(
        models,
        STAGES,
        2 if shape.takes_batches else len(prompts),
        [prompts, more, *({number: each} for number, each in (leaving | again).items())],
        4,
        PrefixCache.of(shape, shortest=4),
    )
    every = {**prompts, **more, **leaving, **again}
    assert texts == {number: by_mlx_lm(models[0], each, 4) for number, each in every.items()}
    if any(shape.windows) and shape.family.takes_cuts:
        assert (cached[11], cached[20]) == (0, 0)
    else:
        assert (cached[11], cached[20]) == (20, 30 if shape.family.takes_cuts else 25)
    assert cached[9] == len(prompts[0]) + 3


@pytest.mark.parametrize("bits", [None, 4])
def test_an_embedding_with_adapters_knows_as_many_tokens(bits: int | None) -> None:
    model = tiny_model(layers=2)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
    plain = find_parts(model)
    adapted = find_parts(with_adapters(model, keys=["model.embed_tokens"]))
    assert hasattr(adapted.embedding, "lora_a")
    assert adapted.vocabulary == plain.vocabulary == tiny_config()["vocab_size"]


def test_a_spare_head_beside_a_tied_embedding_belongs_to_no_stage() -> None:
    model = build(CONFIGS["helium"] | {"tie_word_embeddings": True})
    assert "lm_head" in model
    assert find_parts(model).heads == {}


def test_published_names_are_those_that_mlx_lm_replaces(tmp_path: Path) -> None:
    """Qwen3.5 on the hub: beside vision, other names, and norms that mlx-lm adds 1 to."""
    config = UNDECLARED["qwen3_5"]
    save_model_directory(tmp_path, config)
    stored: Any = mx.load(str(tmp_path / "model.safetensors"))
    renamed = {
        name.replace("language_model.model.", "model.language_model.").removeprefix(
            "language_model."
        ): array.moveaxis(2, 1) if "conv1d" in name else array
        for name, array in stored.items()
    }
    vision = {"model.visual.blocks.0.proj.weight": mx.zeros((4, 4))}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), renamed | vision)
    files = open_model(str(tmp_path))
    shape = needed_shape(files)
    body = "model.language_model"
    assert shape.names == (f"{body}.layers.", f"{body}.embed_tokens", f"{body}.norm", "lm_head")
    assert model_sizes(files, None).dtype == "float32"
    inspection = inspect_files(files)
    assert [part.parameters for part in inspection.layers] == [
        shape.layer(i).parameters for i in range(LAYERS)
    ]
    assert [tensor.name for tensor in inspection.dropped.tensors] == [*vision]
    assert not is_needed(next(iter(vision)), shape, 0, LAYERS)
