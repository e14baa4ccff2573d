"""The planner: the fastest plan that fits, what it predicts, and what it says when nothing fits."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardmlx.config.common_options import OFF
from shardmlx.config.specs import RECOMPUTE, BatchOptions, FineTune
from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.hostfile import Machine
from shardmlx.costmodel.predict import predict
from shardmlx.costmodel.profile_file import MachineProfile, Profile, work_of
from shardmlx.costmodel.timing import Sample, Seconds
from shardmlx.costmodel.workload import Workload
from shardmlx.errors import UserError
from shardmlx.modelfiles.model_files import open_model
from shardmlx.partitioners import DoesNotFitError
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.stage_map import Partition, StageMap
from shardmlx.planning.advice import other_way
from shardmlx.planning.partition_problem import Candidate, plan_of
from shardmlx.planning.replica_rows import with_replica_rows
from shardmlx.planning.search import (
    ChosenPlan,
    Limits,
    candidates,
    choose,
    predict_candidate,
)
from shardmlx.planning.suggestions import quantised, remedies
from tests.helpers.fake_models import MISTRAL_7B

GIB = 2**30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Mistral-7B, of which nothing but config.json is here."""
    path = tmp_path_factory.mktemp("mistral")
    (path / "config.json").write_text(json.dumps(MISTRAL_7B))
    return path


def work(model: Path, **options: object) -> Workload:
    config = TrainConfig(model=str(model), **{"num_layers": -1, **options})  # type: ignore[arg-type]
    return Workload.of(open_model(str(model)), FineTune.of(config), BatchOptions.of(config))


def macs(*machines: tuple[float, float], link: float = 5e9) -> Cluster:
    """One for each (GiB, TFLOP/s)."""
    return Cluster(
        machines=tuple(
            Machine(
                host=f"mac{i}",
                memory=round(memory * GIB),
                flops=tera * 1e12,
                link=link,
                latency=30e-6,
            )
            for i, (memory, tera) in enumerate(machines)
        ),
        memory_fraction=0.75,
        efficiency=0.5,
    )


LIMITS = Limits(batch_size=8, length=512)
ONE_STAGE_EACH = replace(LIMITS, schedule="1f1b", data_parallel=1)


def sizes(choice: ChosenPlan) -> tuple[int, ...]:
    return choice.prediction.plan.stage_map.partition.sizes


def fits(choice: ChosenPlan) -> bool:
    return all(rank.fits for rank in choice.prediction.ranks)


# What may be chosen


def test_every_mesh_schedule_and_micro_batch_is_a_candidate() -> None:
    ways = candidates(LIMITS, 4, 32)
    assert {way.mesh for way in ways} == {Mesh(1, 4), Mesh(2, 2), Mesh(4, 1)}
    pipeline = [way for way in ways if way.mesh == Mesh(1, 4)]
    assert {way.micro_batch_size for way in pipeline} == {1, 2, 4, 8}
    assert {way.schedule for way in pipeline} == {"1f1b", "interleaved-1f1b", "zb-h1", "zb-v"}
    assert {way.recompute for way in pipeline} == set(RECOMPUTE)
    alone = [way for way in ways if way.mesh == Mesh(4, 1)]
    assert {(way.schedule, way.micro_batch_size) for way in alone} == {("1f1b", 1), ("1f1b", 2)}


def test_one_machine_takes_its_batch_in_parts_where_memory_wants_it(model: Path) -> None:
    limits = Limits(batch_size=64, length=512, recompute="none")
    choice = choose(work(model), macs((32, 10)), limits)
    assert choice.candidate.micro_batch_size < 64


def test_what_the_user_settled_stays() -> None:
    limits = Limits(
        batch_size=8, length=512, data_parallel=2, schedule="zb-h1", micro_batch_size=2,
        recompute="full", divides_weights=False,
    )  # fmt: skip
    assert candidates(limits, 4, 32) == [Candidate(Mesh(2, 2), "zb-h1", 1, 4, 2, "full")]


@pytest.mark.parametrize(
    ("limits", "ranks", "layers", "message"),
    [
        (replace(LIMITS, data_parallel=3), 4, 32, "--data-parallel 3 does not divide 4 ranks"),
        (
            replace(LIMITS, batch_size=3, data_parallel=2),
            4,
            32,
            "--batch-size 3 cannot be divided among 2 replicas: use a multiple of 2",
        ),
        (
            replace(LIMITS, data_parallel=1),
            4,
            3,
            "4 machines, but the model has 3 layers: use at most 3",
        ),
    ],
)
def test_what_leaves_nothing_to_choose_is_named(
    limits: Limits, ranks: int, layers: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        candidates(limits, ranks, layers)


def test_the_weights_of_a_quantised_model_cannot_be_trained_themselves(tmp_path: Path) -> None:
    packed = {**MISTRAL_7B, "quantization": {"group_size": 64, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(packed))
    with pytest.raises(UserError, match="MLX has no gradients for quantised weights"):
        work(tmp_path, fine_tune_type="full")
    assert choose(work(tmp_path), macs((16, 10)), LIMITS).prediction.ranks[0].weights < 5e9


# What is chosen


def test_equal_machines_get_equal_parts(model: Path) -> None:
    choice = choose(work(model), macs((64, 10), (64, 10)), ONE_STAGE_EACH)
    assert sizes(choice) in ((16, 16), (17, 15))
    assert choice.unlimited is None


def test_a_machine_twice_as_fast_gets_twice_as_many_layers(model: Path) -> None:
    choice = choose(work(model), macs((64, 20), (64, 10)), ONE_STAGE_EACH)
    fast, slow = (
        size
        for _, size in sorted(
            zip(choice.prediction.plan.stage_map.placement, sizes(choice), strict=True)
        )
    )
    assert fast / slow == pytest.approx(2, rel=0.15)


def test_what_does_not_fit_on_a_small_machine_goes_to_a_large_one(model: Path) -> None:
    choice = choose(work(model), macs((64, 10), (8, 10)), ONE_STAGE_EACH)
    assert all(rank.fits for rank in choice.prediction.ranks)
    assert max(sizes(choice)) > 20
    assert choice.unlimited is not None
    assert choice.unlimited.step_seconds < choice.prediction.step_seconds


def test_activations_are_computed_again_only_where_that_pays(model: Path) -> None:
    roomy = choose(work(model), macs((64, 10), (64, 10)), LIMITS)
    assert roomy.candidate.recompute == "none"
    long = Limits(batch_size=8, length=4096)
    tight = choose(work(model), macs((24, 10), (24, 10)), long)
    assert tight.candidate.recompute


def test_no_other_candidate_is_faster_and_fits(model: Path) -> None:
    workload, cluster = work(model), macs((32, 10), (16, 5), (24, 8))
    choice = choose(workload, cluster, LIMITS)
    for way in candidates(LIMITS, 3, 32):
        try:
            other = predict_candidate(way, workload, cluster, LIMITS)
        except DoesNotFitError:
            continue
        assert choice.prediction.step_seconds <= other.step_seconds * 1.01


# What is predicted


def test_a_step_on_one_machine_is_its_flops_at_its_speed(model: Path) -> None:
    workload = work(model)
    choice = choose(workload, macs((96, 10)), LIMITS)
    shape = workload.shape
    forward = 32 * shape.layer(0).flops(512) + shape.head_flops()
    expected = 8 * 512 * 2 * forward / (10e12 * 0.5)  # F and I; adapters have no W to speak of
    assert choice.prediction.step_seconds == pytest.approx(expected)
    assert choice.prediction.tokens_per_second == pytest.approx(8 * 512 / expected)
    assert choice.prediction.simulation.bubble == 0


def test_a_slow_link_shows_as_exposed_communication(model: Path) -> None:
    workload = work(model)
    stage_map = StageMap(Partition.from_sizes((16, 16)), (0, 1))
    plan = plan_of(Candidate(Mesh(1, 2), "1f1b", 1, 8, 1, "none"), stage_map, workload)
    fast, slow = (
        predict(plan, workload, macs((64, 10), (64, 10), link=link), 512) for link in (5e9, 1e6)
    )
    assert slow.step_seconds > fast.step_seconds + 4
    assert max(rank.exposed for rank in fast.ranks) < 0.02 * fast.step_seconds
    assert max(rank.exposed for rank in slow.ranks) > 0.5 * slow.step_seconds


def test_replicas_sum_their_gradients_over_the_slowest_link(model: Path) -> None:
    """Those that divide the optimizer send updated weights back, of 16 bits, instead of sums. What
    is rounded takes time as well, there and back."""
    stage_map = StageMap(Partition.from_sizes((32,)), (0,))
    ways = (
        ({"zero": 0}, 4, 0.0),
        ({"zero": 1}, (4 + 2) / 2, 0.0),
        ({"zero": 0, "sum_dtype": "bfloat16"}, 2, 4.2e-9),
        ({"zero": 1, "sum_dtype": "int8"}, (1 + 4 / 256 + 2) / 2, 5e-9 / 2),
    )
    for options, nbytes, rounding in ways:
        workload = work(model, fine_tune_type="full", **options)
        plan = plan_of(Candidate(Mesh(2, 1), "1f1b", 1, 4, 4, "none"), stage_map, workload)
        prediction = predict(plan, workload, macs((999, 10), (999, 10), link=1e9), 512)
        parameters = 32 * workload.shape.layer(0).parameters
        assert prediction.reduce_seconds == pytest.approx(parameters * (nbytes / 1e9 + rounding))


def test_replicas_of_one_host_use_its_link_once(model: Path) -> None:
    """Four on two hosts send as much over a link as two: sums within a host come first."""
    workload = work(model, fine_tune_type="full", zero=0)
    stage_map = StageMap(Partition.from_sizes((32,)), (0,))
    two = macs((999, 10), (999, 10), link=1e9)
    four = replace(two, machines=tuple(each for each in two.machines for _ in range(2)))
    seconds = [
        predict(
            plan_of(Candidate(Mesh(dp, 1), "1f1b", 1, 4, 4, "none"), stage_map, workload),
            workload, cluster, 512,
        ).reduce_seconds
        for dp, cluster in ((2, two), (4, four))
    ]  # fmt: skip
    assert seconds[0] == seconds[1] > 0


def test_measured_times_win_over_flops(model: Path) -> None:
    workload = work(model)
    part = Seconds(1.0, 1.0, 0.5, 0.25)
    sample = Sample(
        rows=1, length=512, layer=part, frozen=Seconds(1.0), embedding=Seconds(), head=Seconds()
    )
    profile = Profile(
        work_of(workload.fine_tune, workload.shape, "bfloat16"),
        (MachineProfile("mac0", "M2", (sample,)),),
    )
    cluster = replace(macs((96, 10)), profile=profile)
    choice = choose(workload, cluster, replace(LIMITS, micro_batch_size=1))
    assert choice.prediction.step_seconds == pytest.approx(8 * 32 * 2.5 + 32 * 0.25)
    with pytest.raises(UserError, match="dtype 'bfloat16', not 'float32'"):
        choose(work(model, dtype="float32"), cluster, LIMITS)


def test_unknown_memory_is_unlimited_and_unknown_speed_counts_flops(model: Path) -> None:
    cluster = Cluster(machines=(Machine(host="a"), Machine(host="b")))
    assert cluster.unit == "FLOPs"
    assert cluster.capacity(0) == math.inf
    with pytest.raises(UserError, match="not known how fast a is: write flops=27T"):
        cluster.check_speeds()
    assert fits(choose(work(model), cluster, ONE_STAGE_EACH))


# When nothing fits


def test_what_does_not_fit_says_by_how_much_and_what_would_help(model: Path) -> None:
    workload, cluster = work(model), macs((12, 10))
    with pytest.raises(DoesNotFitError, match=r"does not fit: .*mac0.* 9.0\d? GiB .* too much"):
        choose(workload, cluster, LIMITS)
    found = remedies(workload, cluster, LIMITS)
    assert found == ["the model quantised to 4 bits", "1 more machine like mac0"]


def test_a_full_fine_tune_may_become_one_of_adapters(model: Path) -> None:
    found = remedies(work(model, fine_tune_type="full"), macs((32, 10)), LIMITS)
    assert found[0] == "--fine-tune-type lora"


def test_long_sequences_may_be_made_shorter(model: Path) -> None:
    limits = Limits(batch_size=1, length=32768)
    found = remedies(work(model), macs((28, 10)), limits)
    (shorter,) = (each for each in found if each.startswith("--max-seq-length"))
    length = int(shorter.split()[1])
    assert 128 <= length < 32768
    assert fits(choose(work(model), macs((28, 10)), replace(limits, length=length)))


def test_what_the_user_settled_may_be_the_trouble(model: Path) -> None:
    limits = replace(LIMITS, batch_size=64, micro_batch_size=64, recompute="none", schedule="1f1b")
    found = remedies(work(model), macs((32, 10)), limits)
    assert "--micro-batch-size 1" in found
    tight = replace(limits, micro_batch_size=1)
    assert fits(choose(work(model), macs((32, 10)), tight))


def test_pieces_are_a_remedy_before_recomputation(model: Path) -> None:
    limits = Limits(batch_size=1, length=4096, recompute="none")
    whole = work(model, attention_chunk=OFF, loss_chunk=OFF)
    cluster = macs((72, 10))
    with pytest.raises(DoesNotFitError):
        choose(whole, cluster, limits)
    assert fits(choose(work(model), cluster, limits))
    assert remedies(whole, cluster, limits)[0] == "--attention-chunk auto --loss-chunk auto"


def test_a_machine_too_small_for_anything_may_be_left_out(model: Path) -> None:
    cluster = macs((64, 10), (0.001, 10))
    with pytest.raises(DoesNotFitError):
        choose(work(model), cluster, LIMITS)
    assert "mac1 left out" in remedies(work(model), cluster, LIMITS)


def test_a_partitioner_that_cannot_serve_a_schedule_leaves_the_others(model: Path) -> None:
    choice = choose(work(model), macs((64, 10), (64, 5)), replace(LIMITS, partitioner="hetero"))
    assert choice.prediction.plan.stage_map.virtual == 1
    by_memory = choose(work(model), macs((64, 10), (64, 5)), replace(LIMITS, partitioner="memory"))
    assert by_memory.unlimited is None


def test_gradients_of_several_steps_share_sums_and_update(model: Path) -> None:
    once, eighth = (
        choose(
            work(model, fine_tune_type="full", grad_accumulation_steps=steps),
            macs((999, 10), (999, 10)),
            replace(LIMITS, data_parallel=2),
        ).prediction
        for steps in (1, 8)
    )
    assert eighth.reduce_seconds == pytest.approx(once.reduce_seconds / 8)


def test_replicas_must_be_a_number_from_1(model: Path) -> None:
    for count in (0, -1):
        with pytest.raises(UserError, match=f"--data-parallel {count}: give 1 or more"):
            candidates(replace(LIMITS, data_parallel=count), 4, 32)


TIGHT, LONG = ((16, 5.2), (16, 5.2)), Limits(batch_size=4, length=1024)
"""Macs that hold no whole Mistral-7B, and a step long enough for weights to be gathered in it."""


HALF = 7 / 13
"""Part of a layer that one of two replicas owns: two of three matrices of the MLP, or one and all
others."""


def test_replicas_divide_the_weights_where_that_is_faster_than_a_pipeline(model: Path) -> None:
    fast = choose(work(model), macs(*TIGHT, link=2.5e9), LONG)
    assert fast.candidate.divides_weights
    assert fast.candidate.mesh == Mesh(2, 1)
    assert fits(fast)
    slow = choose(work(model), macs(*TIGHT, link=0.1e9), LONG)
    assert slow.candidate.mesh == Mesh(1, 2)
    asked = replace(LONG, data_parallel=2)
    forced = choose(work(model), macs(*TIGHT, link=0.1e9), asked)
    assert forced.candidate.divides_weights
    seconds = forced.prediction.step_seconds
    sizes = work(model).weight_sizes
    # Of each pass the first two layers are there from the one before. Each replica sends about a
    # half of the others, and one the whole of a matrix at an end.
    sent = 2 * sum(sizes.layers[2:]) * HALF + sizes.embedding + sizes.head
    assert seconds == pytest.approx(sent / 0.1e9, rel=0.01)


@pytest.mark.parametrize(("num_layers", "lowest"), [(16, 16), (-1, 0)])
def test_weights_are_gathered_down_to_the_lowest_layer_that_is_trained(
    model: Path, num_layers: int, lowest: int
) -> None:
    workload = work(model, zero=3, num_layers=num_layers)
    way = Candidate(Mesh(2, 1), "1f1b", 1, 2, 2, "none", divides_weights=True)
    plan = plan_of(way, StageMap(Partition.from_sizes([32]), (0,)), workload)
    sizes = workload.weight_sizes
    # The lowest layers are still there only where the backward pass came down to them.
    upwards, down = sizes.layers[0 if lowest else 2 :], sizes.layers[lowest:-2]
    sent = (sum(upwards) + sum(down)) * HALF + sizes.embedding + sizes.head
    seconds = predict(plan, workload, macs(*TIGHT, link=0.1e9), 1024).step_seconds
    assert seconds == pytest.approx(sent / 0.1e9, rel=0.01)


def test_nobody_divides_weights_of_which_each_machine_holds_all(model: Path) -> None:
    choice = choose(work(model), macs((64, 10), (64, 10)), LONG)
    assert choice.candidate.mesh == Mesh(2, 1)
    assert not choice.candidate.divides_weights


def test_where_links_are_not_known_weights_are_divided_only_if_nothing_else_fits(
    model: Path,
) -> None:
    cluster = macs(*TIGHT)
    unknown = tuple(replace(each, link=None) for each in cluster.machines)
    cluster = replace(cluster, machines=unknown)
    assert choose(work(model), cluster, LONG).candidate.mesh == Mesh(1, 2)
    asked = replace(LONG, data_parallel=2)
    assert choose(work(model), cluster, asked).candidate.divides_weights


def test_the_plan_says_what_the_other_way_would_take(model: Path) -> None:
    def line(link: float, limits: Limits = LONG, *machines: tuple[float, float]) -> list[str]:
        cluster = macs(*(machines or TIGHT), link=link)
        choice = choose(work(model), cluster, limits)
        return other_way(choice.candidate.of(work(model)), cluster, limits, choice)

    (pipeline,) = line(2.5e9)
    assert re.fullmatch(
        r"layers divided instead: step 3\d\.\d+ s, 1\.\d\d times as long, with a peak of 8.\d+ GiB",
        pipeline,
    )
    (divided,) = line(0.1e9)
    assert divided.startswith("weights divided among 2 replicas (--zero 3) instead: step 1")
    assert line(0.1e9, replace(LONG, data_parallel=1)) == []
    assert line(0.1e9, replace(LONG, batch_size=1)) == []
    assert line(5e9, LONG, (64, 10), (64, 10)) == []
    (neither,) = line(0.1e9, LONG, (11.5, 5.2), (11.5, 5.2))
    assert neither == "weights divided among 2 replicas (--zero 3) instead: does not fit"


def test_dividing_the_weights_is_a_remedy(model: Path) -> None:
    workload, cluster = work(model, zero=0), macs(*TIGHT)
    limits = replace(LONG, data_parallel=2, divides_weights=False)
    with pytest.raises(DoesNotFitError):
        choose(workload, cluster, limits)
    assert "--zero 3" in remedies(workload, cluster, limits)


def test_replicas_that_gather_together_have_as_many_micro_batches(model: Path) -> None:
    workload = work(model, zero=3, batch_size=4, replica_rows="3,1", micro_batch_size=1)
    way = Candidate(Mesh(2, 1), "1f1b", 1, 3, 1, "none")
    stage_map = StageMap(Partition.from_sizes([32]), (0,))
    with pytest.raises(UserError, match=r"would have 3, 1 micro-batches of 1, .* all gather") as no:
        with_replica_rows(plan_of(way, stage_map, workload), workload, macs(*TIGHT), 512)
    assert "give --micro-batch-size 3" in str(no.value)


def test_each_remedy_was_tried(model: Path) -> None:
    workload, cluster = work(model), macs((12, 10))
    packed = quantised(workload)
    assert packed is not None
    assert fits(choose(packed, cluster, LIMITS))
    assert quantised(packed) is None
    two = replace(cluster, machines=(*cluster.machines, replace(cluster.machines[0], host="b")))
    assert fits(choose(workload, two, LIMITS))
