"""The planner: the ways that options leave open, the fastest that fits, and what it says when
nothing fits."""

import cProfile
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmlx.common.units import GIB, MIB
from shardmlx.config.common_options import AUTO, OFF
from shardmlx.config.specs import COUNTED, RECOMPUTE, RunSpec
from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import open_model
from shardmlx.modelfiles.parts import read_shape
from shardmlx.partitioners import DoesNotFitError
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.stage_map import Partition, StageMap
from shardmlx.planning.choice import Choice, assess, choose
from shardmlx.planning.facts.chips import as_macs
from shardmlx.planning.facts.cluster import EFFICIENCY, Cluster
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.job_facts import Facts, TrainingFacts
from shardmlx.planning.facts.plan_facts import PlanFacts, SequenceLengths
from shardmlx.planning.facts.profile_file import MachineProfile, Profile, Sample, work_of
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.layout import trainable_stages, with_replica_rows
from shardmlx.planning.memory.limits import budgets_of
from shardmlx.planning.suggestions import remedies
from shardmlx.planning.think import JobOptions, think
from shardmlx.planning.time.parts import Seconds
from shardmlx.planning.time.predict import predict
from shardmlx.planning.training_plan import facts_for, plan_training
from shardmlx.planning.ways import ways
from testbed.tiny_models import tiny_config
from tests.helpers.fake_models import MISTRAL_7B, write_config
from tests.helpers.shown import lacking
from tests.helpers.workloads import workload

SIXTEEN: dict[str, Any] = {
    **tiny_config(layers=16, hidden_size=256, intermediate_size=1024),
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mistral-7B, of which nothing but config.json is here."""
    return write_config(tmp_path_factory.mktemp("mistral"), MISTRAL_7B)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only the configuration of a model of sixteen layers: enough to choose for it."""
    return write_config(tmp_path_factory.mktemp("small"), SIXTEEN)


def work(**options: Any) -> Workload:
    return workload(read_shape(MISTRAL_7B), "bfloat16", **options)


def macs(*machines: tuple[float, float], link: float | None = 5e9) -> Cluster:
    """One for each (GiB, TFLOP/s)."""
    how: dict[str, Any] = {"link": link, "latency": 30e-6}
    made = (
        Machine(host=f"mac{i}", memory=round(memory * GIB), flops=tera * 1e12, **how)
        for i, (memory, tera) in enumerate(machines)
    )
    return Cluster(machines=tuple(made), memory_fraction=0.75, efficiency=0.5)


def ranks(*memories: float, host: str = "mac", link: float | None = None) -> Cluster:
    """Ranks with so many bytes each, whose speed is not known; on one host, or ``{}`` in its name
    tells them apart."""
    return Cluster(
        machines=tuple(
            Machine(host=host.format(rank), memory=round(memory), link=link)
            for rank, memory in enumerate(memories)
        ),
        memory_fraction=1.0,
        backend="cpu",
    )


def asked(
    model: Path,
    cluster: Cluster,
    lengths: SequenceLengths | None = None,
    *,
    given: StageMap | None = None,
    **options: Any,
) -> tuple[RunSpec, PlanFacts]:
    """What is asked for, of rows of 512 tokens in batches of 8 where nothing else is said."""
    settings = {"num_layers": -1, "batch_size": 8, "max_seq_length": 512, **options}
    run = TrainConfig.from_flat(model=str(model), **settings).spec
    facts = PlanFacts(
        workload=Workload.of(open_model(str(model)), run.fine_tune, run.batch),
        cluster=cluster,
        lengths=lengths or SequenceLengths.full(run.batch.max_seq_length),
        stage_map=given,
    )
    return run, facts


def chosen(*question: Any, **options: Any) -> Choice:
    return choose(*asked(*question, **options))


def tried_remedies(*question: Any, **options: Any) -> list[str]:
    return remedies(*asked(*question, **options))


def a_plan(workload: Workload, mesh: Mesh, rows: int, size: int = 1) -> Plan:
    """32 layers in equal stages, by 1F1B."""
    stage_map = StageMap.from_sizes([32 // mesh.pp] * mesh.pp)
    return Plan(mesh, stage_map, "1f1b", rows, size, trainable_stages(workload, stage_map))


ONE_STAGE_EACH: dict[str, Any] = {"schedule": "1f1b", "data_parallel": 1}
ALIKE = SequenceLengths((96, 0), padded=96, exact=96)
PADDED = SequenceLengths((96, 0), padded=96, exact=60)
ROOM = (GIB, GIB)
SMALL = range(130 * MIB, 30 * MIB, -4 * MIB)


def sizes(choice: Choice) -> tuple[int, ...]:
    return choice.plan.stage_map.partition.sizes


def fits(choice: Choice) -> bool:
    return all(rank.peak <= rank.capacity for rank in choice.prediction.ranks)


# What may be chosen


def test_every_mesh_schedule_and_micro_batch_is_a_way(model: Path) -> None:
    found = ways(*asked(model, macs(*[(64, 10)] * 4)))
    stages = [way.layout.pipeline_stages for way in found]
    assert set(stages) == {4, 2, 1}
    pipeline = [way for way in found if way.layout.pipeline_stages == 4]
    assert {way.batch.micro_batch_size for way in pipeline} == {1, 2}
    names = {"1f1b", "interleaved-1f1b", "zb-h1", "zb-v"}
    assert {way.layout.schedule for way in pipeline} == names
    assert {way.batch.recompute for way in pipeline} == set(RECOMPUTE)
    alone = [way for way in found if way.layout.pipeline_stages == 1]
    assert {(way.layout.schedule, way.batch.micro_batch_size) for way in alone} == {
        ("1f1b", 1), ("1f1b", 2),
    }  # fmt: skip
    first = found[0]
    assert (first.layout.schedule, first.layout.pipeline_stages) == ("1f1b", 4)
    assert (first.batch.recompute, first.batch.pack) == ("none", False)


def test_a_way_leaves_nothing_open(model: Path) -> None:
    run, facts = asked(model, macs((64, 10), (64, 10)), PADDED, loss_chunk=OFF)
    for way in ways(run, facts):
        assert ways(way, facts) == [way]


@pytest.mark.parametrize(
    ("options", "count", "problem"),
    [
        ({"data_parallel": 3}, 4, "--data-parallel 3"),
        ({"batch_size": 3, "data_parallel": 2}, 4, "--batch-size 3"),
        ({"data_parallel": 1}, 33, "33 stages, but the model has 32 layers"),
    ],
)
def test_what_leaves_nothing_to_choose_is_named(
    options: dict[str, Any], count: int, problem: str, model: Path
) -> None:
    with pytest.raises(UserError, match=problem):
        ways(*asked(model, macs(*[(64, 10)] * count), **options))


def test_the_weights_of_a_quantised_model_cannot_be_trained_themselves(tmp_path: Path) -> None:
    packed = {**MISTRAL_7B, "quantization": {"group_size": 64, "bits": 4}}
    write_config(tmp_path, packed)
    with pytest.raises(UserError, match="MLX has no gradients for quantised weights"):
        asked(tmp_path, macs((16, 10)), fine_tune_type="full")
    assert chosen(tmp_path, macs((16, 10))).prediction.ranks[0].weights < 5e9


# What is chosen


def test_layers_are_divided_by_speed(model: Path) -> None:
    choice = chosen(model, macs((64, 10), (64, 10)), **ONE_STAGE_EACH)
    assert sizes(choice) in ((16, 16), (17, 15))
    choice = chosen(model, macs((64, 20), (64, 10)), **ONE_STAGE_EACH)
    placed = zip(choice.plan.stage_map.placement, sizes(choice), strict=True)
    fast, slow = (size for _, size in sorted(placed))
    assert fast / slow == pytest.approx(2, rel=0.15)


def test_what_does_not_fit_on_a_small_machine_goes_to_a_large_one(model: Path) -> None:
    choice = chosen(model, macs((64, 10), (8, 10)), **ONE_STAGE_EACH)
    assert fits(choice)
    assert max(sizes(choice)) > 20
    unlimited = chosen(model, macs((64, 10), (64, 10)), **ONE_STAGE_EACH)
    assert unlimited.prediction.step_seconds < choice.prediction.step_seconds


def test_no_other_way_is_faster_and_fits(model: Path) -> None:
    run, facts = asked(model, macs((32, 10), (16, 5), (24, 8)))
    best = choose(run, facts).assessment.seconds
    for way in ways(run, facts):
        try:
            other = assess(way, facts)
        except DoesNotFitError:
            continue
        assert best <= other.seconds * 1.01


def calls(*question: Any, **options: Any) -> Counter[str]:
    """How often a choice calls each function, by its name."""
    made = asked(*question, **options)
    with cProfile.Profile() as profile:
        choose(*made)
    found: Counter[str] = Counter()
    for each in profile.getstats():
        found[getattr(each.code, "co_name", str(each.code))] += each.callcount
    return found


def test_the_cost_of_a_choice_does_not_grow_with_the_batch(model: Path) -> None:
    """But for the chosen step, of which each action is shown, and a few more sizes to look at."""
    two = macs((12, 4), (12, 4))
    few, many = (calls(model, two, batch_size=size).total() for size in (64, 1024))
    assert many / few < 2


def test_a_choice_counts_stages_alike_once_and_times_what_it_looks_at(model: Path) -> None:
    unlike = macs((48, 27), (32, 14), (16, 10), (12, 4))
    found = calls(model, unlike, batch_size=512)
    assert found["lay_out"] > 30
    assert found["stage_memory"] < 24 * found["lay_out"]
    assert found["predict_seconds"] < found["lay_out"] / 3


def test_a_choice_for_many_machines_asks_for_few_peaks_and_divides_layers_seldom(
    model: Path,
) -> None:
    """Most ways are above their bound, or lack memory as one like them does."""
    eight = macs((192, 27), (64, 14), (64, 10), (48, 9), (24, 4), (64, 27), (48, 14), (32, 10))
    found = calls(model, eight, batch_size=500)
    assert found["lay_out"] < 50
    assert found["held"] < 40_000
    assert found["stage_memory"] < 1200
    assert found["prove"] == 1
    assert found["validate"] <= 1, "only the chosen plan is proved"


def test_replicas_are_taken_where_they_beat_the_longest_pipeline(model: Path) -> None:
    """And where nobody knows how fast machines or links are, the pipeline stays."""
    room = ((64, 10), (64, 10))
    fast = chosen(model, macs(*room))
    assert fast.plan.mesh == Mesh(2, 1)
    assert not divides(fast), "each machine holds all weights"
    assert str(fast).startswith("chosen: 2 replicas x 1 rank, 1f1b, ")
    assert chosen(model, macs(*room, link=None)).plan.mesh == Mesh(1, 2)
    unknown = (Machine(host="a"), Machine(host="a"))
    assert chosen(model, Cluster(machines=unknown)).plan.mesh == Mesh(1, 2)


# What is predicted


def test_a_step_on_one_machine_is_its_flops_at_its_speed(model: Path) -> None:
    choice = chosen(model, macs((96, 10)))
    shape = work().shape
    forward = 32 * shape.layer(0).flops(512) + shape.head_flops()
    expected = 8 * 512 * 2 * forward / (10e12 * 0.5)  # F and I; adapters have no W to speak of
    assert choice.prediction.step_seconds == pytest.approx(expected)
    assert choice.prediction.tokens_per_second == pytest.approx(8 * 512 / expected)
    assert choice.prediction.simulation.bubble == 0


def test_a_slow_link_shows_as_exposed_communication(model: Path) -> None:
    workload = work()
    plan = a_plan(workload, Mesh(1, 2), 8)
    fast, slow = (
        predict(plan, workload, macs((64, 10), (64, 10), link=link), 512) for link in (5e9, 1e6)
    )
    assert slow.step_seconds > fast.step_seconds + 4
    assert max(rank.exposed for rank in fast.ranks) < 0.02 * fast.step_seconds
    assert max(rank.exposed for rank in slow.ranks) > 0.5 * slow.step_seconds


def test_replicas_sum_their_gradients_over_the_slowest_link(model: Path) -> None:
    """Those that divide the optimizer send updated weights back, of 16 bits, instead of sums. What
    is rounded takes time as well, there and back."""
    ways = (
        ({"zero": 0}, 4, 0.0),
        ({"zero": 1}, (4 + 2) / 2, 0.0),
        ({"zero": 0, "sum_dtype": "bfloat16"}, 2, 4.2e-9),
        ({"zero": 1, "sum_dtype": "int8"}, (1 + 4 / 256 + 2) / 2, 5e-9 / 2),
    )
    for options, nbytes, rounding in ways:
        workload = work(fine_tune_type="full", **options)
        plan = a_plan(workload, Mesh(2, 1), 4, 4)
        prediction = predict(plan, workload, macs((999, 10), (999, 10), link=1e9), 512)
        parameters = 32 * workload.shape.layer(0).parameters
        assert prediction.reduce_seconds == pytest.approx(parameters * (nbytes / 1e9 + rounding))


def test_replicas_of_one_host_take_its_link_once(model: Path) -> None:
    """They add up first: over the link goes the sum, as that of one replica would."""
    workload = work(fine_tune_type="full", zero=0)
    two = macs((999, 10), (999, 10), link=1e9)
    four = replace(two, machines=tuple(each for each in two.machines for _ in range(2)))
    seconds = [
        predict(a_plan(workload, Mesh(dp, 1), 4, 4), workload, cluster, 512).reduce_seconds
        for dp, cluster in ((2, two), (4, four))
    ]
    assert seconds[1] == seconds[0] > 0


def test_measured_times_win_over_flops(model: Path) -> None:
    workload = work()
    part = Seconds(1.0, 1.0, 0.5, 0.25)
    sample = Sample(
        rows=1, length=512, layer=part, frozen=Seconds(1.0), embedding=Seconds(), head=Seconds()
    )
    profile = Profile(work_of(workload), (MachineProfile("mac0", "M2", (sample,)),))
    cluster = replace(macs((96, 10)), profile=profile)
    choice = chosen(model, cluster, micro_batch_size=1)
    assert choice.prediction.step_seconds == pytest.approx(8 * 32 * 2.5 + 32 * 0.25)
    with pytest.raises(UserError, match="dtype 'bfloat16', not 'float32'"):
        chosen(model, cluster, dtype="float32")


def test_unknown_memory_is_unlimited_and_unknown_speed_counts_flops(model: Path) -> None:
    cluster = Cluster(machines=(Machine(host="a"), Machine(host="b")))
    assert cluster.unit == "FLOPs"
    assert cluster.capacity(0) == math.inf
    with pytest.raises(UserError, match="how fast a is"):
        cluster.check_speeds()
    assert fits(chosen(model, cluster, **ONE_STAGE_EACH))


# When nothing fits


def test_what_does_not_fit_says_by_how_much_and_what_would_help(model: Path) -> None:
    with pytest.raises(DoesNotFitError, match=r"does not fit: .*mac0.* 9.0\d? GiB .* too much"):
        chosen(model, macs((12, 10)))
    assert tried_remedies(model, macs((12, 10))) == [
        "the model quantised to 4 bits", "1 more machine like mac0",
    ]  # fmt: skip


WHOLE = {"attention_chunk": OFF, "loss_chunk": OFF, "recompute": "none"}
LARGE = {"batch_size": 64, "recompute": "none", "schedule": "1f1b", "micro_batch_size": 64}


@pytest.mark.parametrize(
    ("machines", "options", "remedy"),
    [
        ([(32, 10)], {"fine_tune_type": "full"}, "--fine-tune-type lora"),
        ([(32, 10)], LARGE, "--micro-batch-size 1"),
        (
            [(78, 10)],
            {"batch_size": 1, "max_seq_length": 4096, "pack": True, **WHOLE},
            "attention_chunk: auto and loss_chunk: auto",
        ),
        ([(64, 10), (0.001, 10)], {}, "mac1 left out"),
        (
            [(16, 5.2), (16, 5.2)],
            {"batch_size": 4, "max_seq_length": 1024, "data_parallel": 2, "zero": 0},
            "--zero 3",
        ),
    ],
)
def test_a_remedy_is_named_for_what_does_not_fit(
    machines: list[tuple[float, float]], options: dict[str, Any], remedy: str, model: Path
) -> None:
    with pytest.raises(DoesNotFitError):
        chosen(model, macs(*machines), **options)
    assert remedy in tried_remedies(model, macs(*machines), **options)


def test_long_sequences_may_be_made_shorter(model: Path) -> None:
    one = {"batch_size": 1, "max_seq_length": 32768}
    found = tried_remedies(model, macs((28, 10)), **one)
    (shorter,) = (each for each in found if each.startswith("--max-seq-length"))
    length = int(shorter.split()[1])
    assert 128 <= length < 32768
    assert fits(chosen(model, macs((28, 10)), batch_size=1, max_seq_length=length))


def test_a_partitioner_that_cannot_serve_a_schedule_leaves_the_others(model: Path) -> None:
    choice = chosen(model, macs((64, 10), (64, 5)), partitioner="hetero", data_parallel=1)
    assert choice.plan.stage_map.virtual == 1


def test_a_model_far_too_large_is_refused_with_what_would_help(tmp_path: Path) -> None:
    """By its weights alone: no layer is divided for machines that cannot hold them."""
    large = {**MISTRAL_7B, "hidden_size": 16384, "num_hidden_layers": 126}
    write_config(tmp_path, large)
    cluster = macs((64, 10), (32, 6), (24, 5), (128, 20))
    with pytest.raises(DoesNotFitError) as error:
        chosen(tmp_path, cluster)
    assert error.value.shortage > 10 * GIB
    assert any("more machine" in each for each in tried_remedies(tmp_path, cluster))


# Weights divided among replicas


TIGHT, LONG = ((16, 5.2), (16, 5.2)), {"batch_size": 4, "max_seq_length": 1024}
"""Macs that hold no whole Mistral-7B, and a step long enough for weights to be gathered in it."""

HALF = 7 / 13
"""Part of a layer that one of two replicas owns: two of three matrices of the MLP, or one and all
others."""


def divides(choice: Choice) -> bool:
    return choice.run.fine_tune.divides_weights


def test_weights_are_divided_only_if_that_is_asked_for_or_nothing_else_fits(model: Path) -> None:
    """Even where a step is predicted to take an eighth less: no Mac has measured it."""
    pipeline = chosen(model, macs(*TIGHT, link=2.5e9), **LONG)
    assert pipeline.plan.mesh == Mesh(1, 2)
    assert not divides(pipeline)
    fast = chosen(model, macs(*TIGHT, link=2.5e9), zero=3, **LONG)
    assert divides(fast)
    assert fast.plan.mesh == Mesh(2, 1)
    assert fits(fast)
    assert fast.prediction.step_seconds < 0.89 * pipeline.prediction.step_seconds
    assert chosen(model, macs(*TIGHT, link=0.1e9), **LONG).plan.mesh == Mesh(1, 2)
    forced = chosen(model, macs(*TIGHT, link=0.1e9), data_parallel=2, **LONG)
    assert divides(forced)
    sizes = work().weight_sizes
    # Of each pass the first two layers are there from the one before. Each replica sends about a
    # half of the others, and one the whole of a matrix at an end.
    sent = 2 * sum(sizes.layers[2:]) * HALF + sizes.embedding + sizes.head
    assert forced.prediction.step_seconds == pytest.approx(sent / 0.1e9, rel=0.01)


@pytest.mark.parametrize(("num_layers", "lowest"), [(16, 16), (-1, 0)])
def test_weights_are_gathered_down_to_the_lowest_layer_that_is_trained(
    model: Path, num_layers: int, lowest: int
) -> None:
    workload = work(zero=3, num_layers=num_layers)
    plan = a_plan(workload, Mesh(2, 1), 2, 2)
    sizes = workload.weight_sizes
    # The lowest layers are still there only where the backward pass came down to them.
    upwards, down = sizes.layers[0 if lowest else 2 :], sizes.layers[lowest:-2]
    sent = (sum(upwards) + sum(down)) * HALF + sizes.embedding + sizes.head
    seconds = predict(plan, workload, macs(*TIGHT, link=0.1e9), 1024).step_seconds
    assert seconds == pytest.approx(sent / 0.1e9, rel=0.01)


def test_where_links_are_not_known_weights_are_divided_only_if_nothing_else_fits(
    model: Path,
) -> None:
    cluster = macs(*TIGHT, link=None)
    assert chosen(model, cluster, **LONG).plan.mesh == Mesh(1, 2)
    assert divides(chosen(model, cluster, data_parallel=2, **LONG))


def test_replicas_that_gather_together_have_as_many_micro_batches(model: Path) -> None:
    workload = work(zero=3, batch_size=4, replica_rows="3,1", micro_batch_size=1)
    with pytest.raises(UserError, match="3, 1 micro-batches of 1") as no:
        with_replica_rows(a_plan(workload, Mesh(2, 1), 3), workload, macs(*TIGHT), 512)
    assert "--micro-batch-size 3" in no.value.remedy


# Rows of real data


def test_rows_are_packed_where_that_saves_padding(small: Path) -> None:
    choice = chosen(small, ranks(*ROOM), PADDED)
    assert choice.plan.pack
    padded = chosen(small, ranks(*ROOM), PADDED, pack=False)
    assert choice.assessment.seconds / padded.assessment.seconds < 0.75
    assert not chosen(small, ranks(*ROOM), ALIKE, micro_batch_size=1).plan.pack
    run, facts = asked(small, ranks(*ROOM), PADDED)
    shape = replace(facts.workload.shape, has_dynamic_rope=True)
    workload = replace(facts.workload, shape=shape)
    assert not choose(run, replace(facts, workload=workload)).plan.pack


@pytest.mark.parametrize("are_alike", [True, False])
def test_short_rows_go_several_to_a_micro_batch(are_alike: bool, small: Path) -> None:
    """Since each micro-batch costs something whatever its size; each rank still has one at a time,
    and where the size is given it is taken. Packing rows of one length would make one long row of
    them, whose attention takes longer."""
    rows = {}
    for length in (16, 64, 2048):
        lengths = SequenceLengths((length, 0), length, length if are_alike else length * 3 // 4)
        plan = chosen(small, ranks(*ROOM), lengths).plan
        rows[length] = plan.micro_batch_rows
        assert plan.pack != are_alike
    assert rows[16] > rows[2048] == 1
    assert 4 >= rows[16] >= rows[64] > 1
    assert chosen(small, ranks(*ROOM), PADDED, micro_batch_size=1).plan.micro_batch_rows == 1


def test_a_schedule_with_a_smaller_bubble_is_taken(small: Path) -> None:
    choice = chosen(small, ranks(*ROOM), ALIKE, micro_batch_size=1)
    assert choice.plan.schedule != "1f1b"
    simplest = chosen(small, ranks(*ROOM), ALIKE, micro_batch_size=1, schedule="1f1b")
    assert simplest.assessment.seconds / choice.assessment.seconds > 1.05
    assert str(choice) == f"chosen: {choice.way}"
    assert lacking("training.md", "choice", str(choice)) == set()


def test_between_hosts_whose_links_are_not_known_messages_are_few(small: Path) -> None:
    apart = ranks(*ROOM, host="mac{}")
    assert chosen(small, apart, ALIKE).plan.schedule == "1f1b"
    fast = chosen(small, macs(*[(8, 1)] * 2), ALIKE, data_parallel=1)
    assert fast.plan.schedule != "1f1b"
    slow = chosen(small, macs(*[(8, 1)] * 2, link=1e5), ALIKE, data_parallel=1)
    assert slow.plan.schedule == "1f1b"


def test_what_is_given_is_taken(small: Path) -> None:
    settled = {"schedule": "zb-h1", "pack": False, "recompute": "full", "micro_batch_size": 1}
    options: dict[str, Any] = {"partitioner": "uniform", "data_parallel": 1, "zero": 0, **settled}
    choice = chosen(small, ranks(*ROOM), PADDED, **options)
    run = choice.run
    assert (choice.plan.schedule, choice.plan.pack) == ("zb-h1", False)
    assert (run.batch.recompute, run.batch.micro_batch_size) == ("full", 1)
    assert (run.layout.partitioner, run.fine_tune.zero) == ("uniform", 0)


def test_a_stage_map_leaves_the_schedules_that_it_suits(small: Path) -> None:
    given = StageMap(Partition.from_sizes([4, 4, 4, 4]), (0, 1, 1, 0))
    choice = chosen(small, ranks(*ROOM), ALIKE, given=given)
    assert choice.plan.schedule == "zb-v"
    assert choice.plan.stage_map == given


def test_what_does_not_fit_as_fast_as_can_be_is_made_to_fit(small: Path) -> None:
    """By smaller micro-batches and by recomputing, as it gets tighter; what is slower never leaves
    more than what is faster."""
    seen, seconds = set(), []
    for nbytes in SMALL:
        try:
            choice = chosen(small, ranks(nbytes, nbytes), ALIKE, schedule="1f1b", pack=False)
        except DoesNotFitError:
            break
        seen.add(choice.run.batch.recompute)
        seconds.append(choice.assessment.seconds)
    else:
        pytest.fail("there was always a way")
    assert seen == set(RECOMPUTE)
    assert seconds == pytest.approx(sorted(seconds), rel=0.011)
    with pytest.raises(DoesNotFitError):
        chosen(small, ranks(100 * MIB, 8 * MIB), ALIKE, recompute="none")


def test_one_rank_orders_nothing(small: Path) -> None:
    choice = chosen(small, ranks(GIB), ALIKE)
    assert (choice.plan.schedule, choice.plan.micro_batch_rows) == ("1f1b", 8)
    assert str(choice) == "chosen: 1 rank, 1f1b, 1 micro-batch of 8"


def test_logits_are_computed_where_tokens_count_if_that_is_faster(tmp_path: Path) -> None:
    """And the last rank, which has the head, gets more layers. A head that takes little is computed
    as in mlx-lm."""

    def of(counted: float, vocabulary: int, **options: Any) -> Choice:
        write_config(tmp_path, SIXTEEN | {"vocab_size": vocabulary})
        return chosen(tmp_path, ranks(*ROOM), replace(ALIKE, counted=counted), **options)

    some, all_of_them = of(0.3, 16384), of(1.0, 16384)
    assert some.run.batch.loss_chunk == COUNTED
    assert "logits only where a token counts" in str(some)
    assert all_of_them.run.batch.loss_chunk == AUTO
    with_head = some.plan.stage_map.partition.sizes[-1]
    assert with_head >= all_of_them.plan.stage_map.partition.sizes[-1]
    assert of(0.3, 64).run.batch.loss_chunk == AUTO
    assert of(0.3, 16384, loss_chunk=OFF).run.batch.loss_chunk == OFF


# One planner

CLUSTERS = [
    *([(8, 4)] * 2, [(16, 4)] * 3, [(24, 8)] * 2 + [(32, 8)], [(64, 27)] * 2 + [(16, 4)]),
    *([(16, 4)] * 8, [(16, 4)] * 4, [(128, 27)] * 2, [(24, 8)] * 2),
]
SHAPES = {
    "narrow": {"num_hidden_layers": 4, "hidden_size": 2048, "intermediate_size": 6144},
    "wide": {"num_hidden_layers": 5, "hidden_size": 8192, "intermediate_size": 28672},
    "large": {"num_hidden_layers": 6, "hidden_size": 12288, "intermediate_size": 28672},
}


@pytest.mark.parametrize(
    ("shape", "link", "shared"),
    [
        *(("narrow", 2.5e9, 0), ("narrow", 1.2e8, 0), ("wide", 2.5e9, 1)),
        *(("wide", 1.2e8, 0), ("large", 2.5e9, 2), ("large", 1.2e8, 0)),
    ],
)
def test_plan_and_a_run_choose_the_same_way_from_the_same_facts(
    shape: str, link: float, shared: int, tmp_path: Path
) -> None:
    """On eight clusters; on so many of them tensor shares, which nobody asked for."""
    write_config(tmp_path, MISTRAL_7B | SHAPES[shape])
    given = TrainConfig.from_flat(
        model=str(tmp_path), num_layers=-1, batch_size=8, max_seq_length=512
    )
    run = given.spec
    workload = Workload.of(open_model(str(tmp_path)), run.fine_tune, run.batch)
    across = []
    for machines in CLUSTERS:
        cluster = macs(*machines, link=link)
        wiring = as_macs(cluster.machines)
        cluster = replace(cluster, machines=wiring, efficiency=EFFICIENCY)
        # The ranks of a run measure their budgets; here each has what its machine usually has.
        facts = Facts(
            model=workload,
            machines=cluster,
            digest="of the model",
            training=TrainingFacts(workload, SequenceLengths.full(512)),
        )
        try:
            planned = plan_training(run, cluster.machines)
        except UserError:
            with pytest.raises(UserError):
                think(JobOptions(training=run), facts)
            continue
        of_run = think(JobOptions(training=run), facts).trained.choice
        assert (of_run.asked, of_run.facts) == (planned.asked, planned.facts)
        assert (of_run.way, of_run.plan) == (planned.way, planned.plan)
        assert of_run.prediction.step_seconds == planned.prediction.step_seconds
        across.append(planned.run.layout.across)
        if across[-1] > 1:
            (alone, *_) = planned.beside
            ratio = alone.prediction.step_seconds / planned.prediction.step_seconds
            assert alone.run.layout.across == 1
            assert ratio >= 1.1, "what was never measured on Macs promises ten percent"
    assert sum(each > 1 for each in across) == shared


@pytest.mark.parametrize("speed", [{}, {"flops": 4e12, "bandwidth": 1.2e11, "latency": 5e-5}])
def test_a_layer_that_no_machine_holds_is_shared(speed: dict[str, Any], tmp_path: Path) -> None:
    """Four layers of ten GiB on eight ranks: no stage fits, and nobody asked for shares."""
    wide = {"num_hidden_layers": 4, "hidden_size": 8192, "intermediate_size": 229376}
    write_config(tmp_path, MISTRAL_7B | wide)
    run = TrainConfig.from_flat(model=str(tmp_path), num_layers=-1, max_seq_length=512).spec
    macs = [Machine(host=f"mac{i}", memory=16 * GIB, **speed) for i in range(8)]
    choice = plan_training(run, macs)
    across = choice.run.layout.across
    assert across > 1
    assert all(each.run.layout.across > 1 for each in choice.beside)
    assert all(
        choice.prediction.step_seconds <= each.prediction.step_seconds for each in choice.beside
    )
    with pytest.raises(UserError):
        plan_training(run.with_shares(1), macs)
    facts = facts_for(run, macs, "metal")
    job = think(JobOptions(training=run), replace(facts, budgets=budgets_of(facts.machines)))
    assert (job.mesh.tp, job.stage_map) == (across, choice.plan.stage_map)
