"""How a run is divided before it loads, and what is refused with numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardmlx.config.inference import GenerateConfig
from shardmlx.modelfiles.parts import read_shape
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.partitioners import LayerCosts
from shardmlx.pipeline.stage_map import read_stage_map
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.job_facts import Facts, GenerationFacts, GenerationLoad
from shardmlx.planning.facts.workload import ModelSizes
from shardmlx.planning.job import Job
from shardmlx.planning.memory.limits import budgets_of
from shardmlx.planning.think import JobOptions, think
from testbed.tiny_models import tiny_config
from testbed.undeclared_configs import UNDECLARED
from tests.helpers.refusals import refusal

LAYERS = 8
MB = 1 << 20


def workload(family: str = "llama", **shape: Any) -> ModelSizes:
    """Layers of 1 MiB, ends of 2 MiB; keys and values of 128 bytes a token and layer."""
    config = tiny_config(family, layers=LAYERS, vocab_size=20000, **shape)
    return ModelSizes(
        shape=read_shape(config),
        weight_sizes=LayerCosts((MB,) * LAYERS, 2 * MB, 2 * MB),
        dtype="float32",
    )


def cluster(*memories: int) -> Cluster:
    return Cluster(
        machines=tuple(Machine(host=f"mac{i}", memory=memory) for i, memory in enumerate(memories))
    )


def plan(
    load: GenerationLoad,
    *memories: int,
    work: ModelSizes | None = None,
    backend: str = "gpu",
    drafting: ModelSizes | None = None,
    head: int = 0,
    **options: Any,
) -> Job:
    config = GenerateConfig.from_flat(model="m", **options)
    given = None if config.stage_map is None else read_stage_map(config.stage_map)
    machines = replace(cluster(*memories), backend=backend)
    budgets = budgets_of(machines, config.memory_limit)
    facts = Facts(
        model=work or workload(),
        machines=machines,
        budgets=budgets,
        stage_map=given,
        generation=GenerationFacts(load, drafting, head),
    )
    return think(JobOptions(generation=config), facts)


def with_setup(job: Job, **changes: Any) -> Job:
    setup = replace(job.generated.setup, **changes)
    return replace(job, generation=replace(job.generated, setup=setup))


ONE = GenerationLoad(sequences=1, prompt=500, answer=100, context=600)
MANY = GenerationLoad(sequences=20, prompt=500, answer=100, context=600)
LONG = GenerationLoad(sequences=20, prompt=5000, answer=1000, context=6000)
ROOM = 1 << 30


def test_one_text_balances_its_prompt() -> None:
    """The head sees one position of it: it hardly counts."""
    made = plan(ONE, ROOM, ROOM)
    assert made.stage_map.partition.sizes == (4, 4)
    setup = made.generated.setup
    assert (made.generated.groups, setup.sequences, setup.chunk) == (1, 1, 128)


def test_many_texts_balance_the_head_too() -> None:
    made = plan(MANY, ROOM, ROOM)
    first, last = made.stage_map.partition.sizes
    assert first > last
    assert (made.generated.groups, made.generated.setup.sequences) == (2, 8)
    assert plan(MANY, ROOM, ROOM, ROOM, batch_size=2).generated.groups == 2


def test_a_single_gpu_takes_the_chunks_of_mlx_lm() -> None:
    assert plan(ONE, ROOM).generated.setup.chunk == 2048
    assert plan(ONE, ROOM, prefill_step_size=33).generated.setup.chunk == 33


@pytest.mark.parametrize("ranks", [1, 2])
def test_on_a_cpu_chunks_are_small_since_their_scores_are_held(ranks: int) -> None:
    long = GenerationLoad(sequences=1, prompt=8000, answer=100, context=8100)
    small = plan(long, *[ROOM] * ranks, backend="cpu")
    large = plan(long, *[ROOM] * ranks, backend="cpu", prefill_step_size=1024)
    assert small.generated.setup.chunk == 128
    heads = workload().shape.layer(0).heads.queries
    assert large.memory[0].peak - small.memory[0].peak > 2 * 4 * heads * (1024 - 128) * 8100


def test_limited_caches_are_not_merged() -> None:
    limited = plan(MANY, ROOM, ROOM, work=workload("qwen2"), max_kv_size=64, batch_size=6)
    assert limited.generated.groups == 6
    assert plan(MANY, ROOM, ROOM, max_kv_size=64, batch_size=6).generated.setup.max_kv_size is None


PACKED: dict[str, Any] = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 0}


def test_quantised_caches_take_less_and_are_not_merged() -> None:
    """An element takes half a byte, and for 32 of them there are two float32."""
    made = plan(LONG, ROOM, work=workload(head_dim=32), batch_size=6, **PACKED)
    assert made.generated.groups == 6
    plain = with_setup(made, quantisation=None)
    assert made != plain
    elements = 6 * LAYERS * (6000 + 256) * 2 * 2 * 32
    saved = plain.memory[0].resident - made.memory[0].resident
    assert saved == elements * 4 - elements * (1 / 2 + 2 * 4 / 32)


def test_of_a_recurrent_model_states_count_and_the_copies_in_a_prefix_cache() -> None:
    """Of eight sequences under way with five borders each, and of those that have ended."""
    recurrent = replace(
        workload(),
        shape=read_shape(UNDECLARED["mamba2"]),
        weight_sizes=LayerCosts((MB,) * 4, 2 * MB, 2 * MB),
    )
    more = [
        plan(replace(MANY, keeps_prefixes=True), ROOM, work=work).memory[0].resident
        - plan(MANY, ROOM, work=work).memory[0].resident
        for work in (workload(), recurrent)
    ]
    assert more == [0, (8 * 5 + 16) * 4 * 4 * (240 + 512)]


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("mamba2", read_shape(UNDECLARED["mamba2"])),
        ("llama", workload(rope_scaling={"rope_type": "dynamic", "factor": 2.0}).shape),
    ],
)
def test_drafts_are_refused_where_caches_cannot_give_them_back(
    kind: str, shape: ModelShape
) -> None:
    planned = partial(plan, work=replace(workload(), shape=shape))
    error = refusal(planned, ONE, ROOM, draft="lookup")
    assert error.problem.startswith("--draft lookup: ")
    assert kind in error.problem
    small = replace(workload(), shape=shape)
    error = refusal(plan, ONE, ROOM, draft="small", drafting=small)
    assert error.problem.startswith("--draft small: ")
    assert kind in error.problem


def test_drafts_take_their_logits_on_the_last_rank() -> None:
    plain, drafted = (
        plan(ONE, ROOM, ROOM, draft=draft, num_draft_tokens=5).memory
        for draft in ("none", "lookup")
    )
    more = [b.peak - a.peak for a, b in zip(plain, drafted, strict=True)]
    assert more == [0, 5 * 20000 * 4]


def test_a_models_own_head_is_on_the_last_rank_with_the_embedding_and_a_cache() -> None:
    work = workload()
    for memories in ((ROOM, ROOM), (ROOM,)):
        plain, drafted = (
            plan(ONE, *memories, draft=draft, head=head, num_draft_tokens=5)
            for draft, head in (("lookup", 0), ("mtp", 1000))
        )
        more = [b.peak - a.peak for a, b in zip(plain.memory, drafted.memory, strict=True)]
        keys_and_values = drafted.caches[-1] - plain.caches[-1]
        layers = plain.stage_map.partition.sizes[-1]
        assert keys_and_values == plain.caches[-1] // layers
        embedding = work.weight_sizes.embedding if len(memories) > 1 else 0
        assert more == [0] * (len(memories) - 1) + [1000 + keys_and_values + embedding]


def test_a_model_that_drafts_is_whole_on_rank_0_with_its_caches() -> None:
    small = workload()
    how: dict[str, Any] = {"num_draft_tokens": 5, "prefill_step_size": 64}
    alone = plan(ONE, ROOM, work=small, draft="lookup", **how).memory[0]
    plain, drafted = (
        plan(ONE, ROOM, ROOM, draft=draft, drafting=model, **how)
        for draft, model in (("lookup", None), ("small", small))
    )
    pairs = zip(plain.memory, drafted.memory, strict=True)
    assert [b.peak - a.peak for a, b in pairs] == [alone.peak, 0]
    assert plain != drafted
    windowed = workload("gemma3_text", sliding_window=40)
    assert plan(ONE, ROOM, draft="small", drafting=windowed).generated.cuttable == 40
    assert drafted.generated.cuttable > 10**9
    refused = refusal(plan, ONE, alone.peak, draft="small", drafting=small)
    assert refused.remedy.endswith("leave out --draft, or use more machines")


def test_a_context_that_does_not_fit_is_refused_with_numbers() -> None:
    """Capacity is three quarters of the memory. Where the machine has more than the limit allows,
    the limit is to be raised."""
    too_long = GenerationLoad(8, 500, 100_000, 100_500)
    error = refusal(plan, too_long, 64 * MB, 2000 * MB, partitioner="balanced")
    for fact in ("mac0", "0.39 GiB", "48.0 MiB", "0-3", "0.38 GiB", "8 sequences of 100500"):
        assert fact in error.problem
    for option in ("--max-tokens", "--batch-size", "--partitioner memory"):
        assert option in error.remedy
    limited = {"memory_limit": 48 * MB, "partitioner": "balanced"}
    assert "--memory-limit 401MiB" in refusal(plan, too_long, 500 * MB, 2000 * MB, **limited).remedy
    assert "--memory-limit" not in refusal(plan, too_long, 64 * MB, 2000 * MB, **limited).remedy
    nowhere = refusal(plan, too_long, 64 * MB, 64 * MB, memory_limit=48 * MB, partitioner="memory")
    assert "--memory-limit" in nowhere.remedy
    assert plan(ONE, 64 * MB, 2000 * MB).stage_map.num_stages == 2


def test_what_does_not_fit_when_divided_by_time_is_divided_by_memory() -> None:
    made = plan(GenerationLoad(8, 500, 20_000, 20_500), 100 * MB, 2000 * MB)
    first, last = made.stage_map.partition.sizes
    assert first < last


def test_of_what_is_planned_weights_and_caches_are_always_there() -> None:
    """Four layers of 1 MiB and an end of 2 MiB each; a tied matrix is at both ends."""
    made = plan(ONE, ROOM, ROOM)
    first, last = made.memory
    kept = 4 * 128 * (600 + 256)
    assert first.resident == 6 * MB + kept
    assert last.resident >= 6 * MB + kept
    assert first.peak > first.resident
    longer = with_setup(made, chunk=2 * made.generated.setup.chunk)
    assert longer.memory[0].peak - first.resident == 2 * (first.peak - first.resident)


@pytest.mark.parametrize(
    ("stages", "complaint"),
    [
        ("- num_layers: 8", "needs 1 ranks"),
        ("- num_layers: 4\n- num_layers: 3", "7 layers"),
        (
            "- {num_layers: 4, rank: 1}\n- {num_layers: 4, rank: 0}",
            "not have stage 0 alone on rank 0",
        ),
    ],
)
def test_maps_that_cannot_generate(stages: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "map.yaml"
    path.write_text(f"stages:\n{stages}\n")
    assert complaint in refusal(plan, ONE, ROOM, ROOM, stage_map=str(path)).problem


def test_ranks_that_share_a_stage_hold_their_heads_and_columns() -> None:
    whole, made = plan(ONE, ROOM, ROOM), plan(ONE, *[ROOM] * 4, tensor_parallel=2)
    assert made.stage_map.partition == whole.stage_map.partition
    assert [made.layers(rank) for rank in range(4)] == [
        whole.layers(stage) for stage in range(2) for _ in range(2)
    ]
    assert made.caches == tuple(each // 2 for each in whole.caches for _ in range(2))
    saved = whole.memory[0].resident - made.memory[0].resident
    assert saved == pytest.approx(whole.caches[0] / 2 + 4 * MB / 2, rel=0.02)  # norms are whole
    unequal = plan(ONE, *[ROOM] * 2, tensor_parallel=2, tensor_shares="3,1")
    assert unequal.memory[0].resident > unequal.memory[1].resident
    assert made.mesh.sharing(2) == (2, 3)


def test_shares_that_nobody_gives_go_by_memory_bandwidth() -> None:
    fast, slow = (
        Machine(host=name, memory=ROOM, kind=f"apple-{name}") for name in ("m2-max", "m2")
    )
    config = GenerateConfig.from_flat(model="m", tensor_parallel=2)
    machines = Cluster(machines=(fast, slow))
    facts = Facts(model=workload(), machines=machines, generation=GenerationFacts(ONE))
    assert think(JobOptions(generation=config), facts).shares.weights == (400, 100)


SHARED: dict[str, Any] = {"tensor_parallel": 2}


def test_the_machine_with_the_smaller_share_may_have_less() -> None:
    load = GenerationLoad(sequences=8, prompt=500, answer=100, context=6000)
    work = workload(num_attention_heads=8, num_key_value_heads=4)
    unequal = partial(plan, load, work=work, **SHARED, tensor_shares="3,1")
    room = [round(1.05 * each.peak / 0.75) for each in unequal(ROOM, ROOM).memory]
    assert unequal(*room).shares.weights == (3, 1)
    assert "rank 1" in str(refusal(partial(plan, load, *room, work=work, **SHARED)))


def test_ranks_with_whole_experts_hold_as_much_as_with_columns() -> None:
    mixture = partial(plan, ONE, ROOM, ROOM, work=workload("mixtral"), **SHARED)
    columns, experts = mixture(), mixture(expert_parallel=True)
    assert experts.shares.whole_experts
    assert experts.memory[1].resident == pytest.approx(columns.memory[1].resident, rel=1e-3)


def test_ranks_that_cannot_share_a_stage() -> None:
    said = str(refusal(plan, ONE, ROOM, ROOM, ROOM, **SHARED))
    assert "3 ranks are not stages of 2 each" in said
    said = str(refusal(plan, ONE, *[ROOM] * 4, tensor_parallel=4))
    assert "fewer heads of keys and values than ranks: 2" in said
    said = str(refusal(partial(plan, ONE, ROOM, ROOM, work=workload("cohere"), **SHARED)))
    assert "cohere" in said
