"""A job is thought out on rank 0 from options and facts, and is plain data for all ranks."""

import pickle
from dataclasses import replace
from typing import Any

import pytest

from shardmlx.common.units import GIB, MIB
from shardmlx.config.inference import GenerateConfig
from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.modelfiles.parts import read_shape
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.job_facts import Facts, GenerationFacts, GenerationLoad, TrainingFacts
from shardmlx.planning.facts.plan_facts import SequenceLengths
from shardmlx.planning.facts.profile_file import MachineProfile, Profile, work_of
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.job import Job
from shardmlx.planning.memory.generation import beside_weights, kv_cache_memory
from shardmlx.planning.memory.limits import ProcessMemory, budgets_of
from shardmlx.planning.think import JobOptions, check_layout, think
from testbed.tiny_models import tiny_config
from tests.helpers.refusals import refusal
from tests.helpers.workloads import workload

LAYERS = 8
LENGTH = 64
SHAPE = read_shape(tiny_config(layers=LAYERS, vocab_size=2000, hidden_size=256))
LOAD = GenerationLoad(sequences=4, prompt=64, answer=64, context=128, capacity=4096)


def machines(*memories: int, **machine: Any) -> Cluster:
    return Cluster(
        machines=tuple(
            Machine(host=f"mac{i}", memory=memory, **machine) for i, memory in enumerate(memories)
        )
    )


def facts(cluster: Cluster, **options: Any) -> Facts:
    work = workload(SHAPE, **options)
    return Facts(
        model=work,
        machines=cluster,
        digest="of the model",
        training=TrainingFacts(work, SequenceLengths.full(LENGTH)),
        generation=GenerationFacts(LOAD),
    )


def asked(**options: Any) -> JobOptions:
    return JobOptions(training=TrainConfig.from_flat(num_layers=-1, **options).spec)


def generating(**options: Any) -> GenerateConfig:
    return GenerateConfig.from_flat(model="m", batch_size=4, **options)


def both(cluster: Cluster, **options: Any) -> Job:
    return think(replace(asked(**options), generation=generating()), facts(cluster, **options))


def test_a_job_is_plain_data() -> None:
    job = both(machines(GIB, GIB))
    sent = pickle.loads(pickle.dumps(job))
    assert (sent.mesh, sent.stage_map, sent.trained.plan) == (
        job.mesh,
        job.stage_map,
        job.trained.plan,
    )
    assert sent.memory == job.memory
    assert sent.model == "of the model"


def test_the_weights_of_a_job_that_trains_and_generates_count_once() -> None:
    """Beside what is trained a rank has KV caches, and the arrays of a chunk."""
    cluster = machines(GIB, GIB)
    job = both(cluster)
    known = facts(cluster)
    parts = JobOptions(generation=generating())
    given = replace(known, stage_map=job.stage_map)
    alone = think(parts, given)
    for rank in range(2):
        (ends,) = job.layers(rank)
        weights = sum(known.model.weight_sizes.layers[slice(*ends)])
        weights += known.model.weight_sizes.embedding if rank == 0 else 0
        weights += known.model.weight_sizes.head if rank == 1 else 0
        trained = job.trained.memory(job.cluster, (LENGTH, 0))[rank]
        assert job.memory[rank].peak == trained.peak + alone.memory[rank].peak - weights
        assert job.memory[rank].resident == trained.resident + alone.memory[rank].resident - weights
        assert alone.caches[rank] > 0
    assert job.caches == alone.caches


def test_a_rank_that_generates_has_one_stage_of_one_pipeline() -> None:
    timed: dict[str, Any] = {"flops": 1e12, "link": 1e9, "latency": 1e-5}
    cluster = machines(GIB, GIB, GIB, GIB, **timed)
    alone = think(asked(batch_size=8), facts(cluster, batch_size=8))
    job = both(cluster, batch_size=8)
    assert alone.mesh.dp > 1, "replicas are faster"
    assert (job.mesh.dp, job.mesh.pp) == (1, 4)
    assert job.stage_map.placement == (0, 1, 2, 3)


def test_text_is_generated_by_all_stages_of_a_rank() -> None:
    job = both(machines(GIB, GIB), batch_size=8, schedule="zb-v")
    assert job.stage_map.placement == (0, 1, 1, 0)
    alone = replace(job, generation=None)
    setup = job.generated.setup
    for rank in range(2):
        more = sum(beside_weights(setup, *ends) for ends in job.layers(rank))
        assert job.memory[rank].peak - alone.memory[rank].peak == more
    whole = kv_cache_memory(setup, 0, LAYERS)
    assert sum(job.caches) == whole


def test_of_replicas_the_first_generates() -> None:
    cluster = machines(GIB, GIB, GIB, GIB)
    job = both(cluster, batch_size=8, data_parallel=2)
    trained = job.trained.memory(job.cluster, (LENGTH, 0))
    assert (job.mesh.dp, job.mesh.pp) == (2, 2)
    assert all(each > 0 for each in job.caches[:2])
    assert job.caches[2:] == (0, 0)
    assert [each.peak for each in job.memory[2:]] == [each.peak for each in trained[2:]]
    assert job.memory[0].peak > trained[0].peak


def test_what_is_generated_counts_before_anything_loads() -> None:
    """Memory that is enough to train is not enough to generate too."""
    job = think(asked(), facts(machines(GIB, GIB)))
    enough = [round(each.peak / 0.75) + MIB for each in job.memory]
    assert think(asked(), facts(machines(*enough))).mesh.pp == 2
    with pytest.raises(UserError):
        both(machines(*enough))


def test_layers_move_away_from_a_rank_that_has_no_memory_for_caches() -> None:
    wide = GenerationLoad(sequences=4, prompt=64, answer=64, context=128, capacity=60_000)
    options = replace(asked(), generation=generating())
    known = replace(facts(machines(GIB, GIB)), generation=GenerationFacts(wide))
    even = think(options, known)
    less = round(0.7 * even.memory[0].peak / 0.75)
    moved = think(options, replace(known, machines=machines(less, GIB)))
    assert moved.stage_map.partition.sizes[0] < even.stage_map.partition.sizes[0]
    assert moved.memory[0].peak <= 0.75 * less


def test_limits_are_known_once_the_ranks_run() -> None:
    cluster = machines(GIB, GIB)
    named = think(asked(), facts(cluster))
    assert named.limits == ()
    budgets = budgets_of(cluster, GIB // 2, [ProcessMemory(outside=MIB)] * 2)
    job = think(asked(), replace(facts(cluster), budgets=budgets))
    assert [each.budget for each in job.limits] == list(budgets)
    assert [each.planned for each in job.limits] == list(job.memory)


def test_the_model_says_which_stages_train() -> None:
    known = facts(machines(GIB, GIB))
    trained = [False] * 7 + [True]
    of_model = replace(known, training=replace(known.to_train, trained=trained))
    assert think(asked(), known).trained.plan.trainable == (True, True)
    assert think(asked(), of_model).trained.plan.trainable == (False, True)
    nothing = replace(known, training=replace(known.to_train, trained=[False] * LAYERS))
    assert "nothing is left to train" in refusal(think, asked(), nothing).problem


def test_a_profile_of_other_work_is_refused_before_data_is_read() -> None:
    other: Workload = workload(SHAPE, "bfloat16")
    profile = Profile(work_of(other), (MachineProfile("mac0", "M2", ()),))
    known = facts(replace(machines(GIB), profile=profile))
    run = asked().training
    assert run is not None
    with pytest.raises(UserError, match="bfloat16"):
        check_layout(run, known)


def test_a_job_does_something() -> None:
    with pytest.raises(ValueError, match="trains or generates"):
        think(JobOptions(), facts(machines(GIB)))
