"""Prompts go by FLOP/s, answers by bandwidth, on unlike machines: a Spark and an M3 Ultra."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardmlx.config.inference import GenerateConfig
from shardmlx.modelfiles.parts import read_shape
from shardmlx.partitioners import LayerCosts
from shardmlx.planning.facts.chips import as_macs, machines_of
from shardmlx.planning.facts.cluster import EFFICIENCY, Cluster
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.job_facts import Facts, GenerationFacts, GenerationLoad
from shardmlx.planning.facts.workload import ModelSizes
from shardmlx.planning.generation_times import are_unlike, seconds_on
from shardmlx.planning.job import Job
from shardmlx.planning.memory.limits import budgets_of
from shardmlx.planning.think import JobOptions, think
from testbed.tiny_models import tiny_config
from testbed.undeclared_configs import UNDECLARED

LAYERS = 16
GB = 10**9
ULTRA, SPARK = as_macs(machines_of("M3 Ultra 96GB, DGX Spark 128GB"))
"""28.63 and 125 TFLOP/s, 819 and 273 GB/s."""


def model(**config: Any) -> ModelSizes:
    """Layers of 1 GB each, and ends of nothing."""
    shape = read_shape(tiny_config(layers=LAYERS, vocab_size=1, **config))
    return ModelSizes(shape=shape, weight_sizes=LayerCosts((GB,) * LAYERS), dtype="bfloat16")


def divided(load: GenerationLoad, *machines: Machine, sizes: ModelSizes | None = None) -> Job:
    cluster = Cluster(machines=machines)
    facts = Facts(
        model=sizes or model(),
        machines=cluster,
        budgets=budgets_of(cluster),
        generation=GenerationFacts(load),
    )
    options = GenerateConfig.from_flat(model="m")
    return think(JobOptions(generation=options), facts)


def layers(load: GenerationLoad, *machines: Machine) -> tuple[int, ...]:
    return divided(load, *machines).stage_map.partition.sizes


PROMPT = GenerationLoad(sequences=1, prompt=30_000, answer=0, context=30_000)
ANSWER = GenerationLoad(sequences=1, prompt=1, answer=1000, context=1001)


def test_a_long_prompt_is_divided_by_flops() -> None:
    """28.63 : 125 of 16 layers are 2.98 and 13.02."""
    assert layers(PROMPT, ULTRA, SPARK) == (3, 13)
    assert layers(PROMPT, SPARK, ULTRA) == (13, 3)


def test_one_answer_is_in_one_stage_at_a_time_and_has_all_it_can_where_memory_is_fast() -> None:
    assert layers(ANSWER, ULTRA, SPARK) == (15, 1)
    assert layers(ANSWER, SPARK, ULTRA) == (1, 15)
    small = replace(ULTRA, wired=int(10.5 * GB))  # 10 layers, and what a chunk needs
    assert layers(ANSWER, small, SPARK) == (10, 6)


def test_answers_of_many_texts_pass_all_stages_at_once_and_are_divided_by_bandwidth() -> None:
    """819 : 273 is 3 : 1."""
    many = replace(ANSWER, sequences=20)
    assert layers(many, ULTRA, SPARK) == (12, 4)
    assert layers(many, SPARK, ULTRA) == (4, 12)


def test_seconds_are_those_of_products_for_a_prompt_and_of_reading_for_an_answer() -> None:
    """A Spark reads 1 GB in 3.66 ms, of which each of four texts has a quarter."""
    sizes = model()
    load = GenerationLoad(sequences=4, prompt=100, answer=10, context=110)
    found = seconds_on(SPARK, sizes, load, 4)
    products = sizes.shape.layer(0).flops(110)
    assert found.prompt.layers[0] == pytest.approx(100 * products / (125e12 * EFFICIENCY))
    assert found.answer.layers[0] == pytest.approx(10 * 3.663e-3 / 4, rel=1e-3)
    assert found.both.layers[0] == found.prompt.layers[0] + found.answer.layers[0]


def test_experts_are_read_as_far_as_a_groups_tokens_use_them() -> None:
    shape = read_shape(tiny_config("mixtral", layers=LAYERS))
    sizes = ModelSizes(shape=shape, weight_sizes=LayerCosts((GB,) * LAYERS), dtype="bfloat16")
    load = GenerationLoad(sequences=1, prompt=1, answer=1, context=2)
    one, all_ = (seconds_on(ULTRA, sizes, load, rows).answer.layers[0] * rows for rows in (1, 999))
    layer = shape.layer(0)
    assert one / all_ == pytest.approx(layer.active_parameters / layer.parameters)


def test_machines_are_unlike_only_where_both_speeds_of_all_are_known() -> None:
    assert are_unlike([ULTRA, SPARK])
    assert not are_unlike([ULTRA, ULTRA])
    assert not are_unlike([ULTRA, replace(SPARK, flops=None)])
    assert not are_unlike([ULTRA, replace(SPARK, bandwidth=None, kind=None)])
    assert are_unlike([ULTRA, replace(SPARK, bandwidth=None)])  # known by its kind


def test_prompts_leave_the_machine_without_a_kernel_for_their_recurrence() -> None:
    """Products alone would give the Spark 13 of 16 layers, as above. Every second one loops, and
    the last does not: a Spark at the end has none that does, and at the start one, by name."""
    text = {**UNDECLARED["qwen3_5"]["text_config"], "num_hidden_layers": LAYERS}
    shape = read_shape({"model_type": "qwen3_5", "text_config": text})
    sizes = ModelSizes(shape=shape, weight_sizes=LayerCosts((GB,) * LAYERS), dtype="bfloat16")
    last = divided(PROMPT, ULTRA, SPARK, sizes=sizes)
    assert last.stage_map.partition.sizes == (15, 1)
    assert last.warnings == ()
    first = divided(PROMPT, SPARK, ULTRA, sizes=sizes)
    assert first.stage_map.partition.sizes == (1, 15)
    (warning,) = first.warnings
    assert "DGX Spark 128GB has layer 0, " in warning
    assert "30000 tokens take 2.70 s more" in warning
