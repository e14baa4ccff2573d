"""How long the parts of a model take: sums over stages, FLOPs at a speed, lines through samples."""

from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial

import pytest

from shardmlx.config.specs import COUNTED, FULL
from shardmlx.modelfiles.parts import read_shape
from shardmlx.partitioners import LayerCosts
from shardmlx.pipeline.actions import Kind
from shardmlx.planning.facts.profile_file import MachineProfile, Sample
from shardmlx.planning.time.parts import LEAST_SECONDS, ModelSeconds, Seconds, Speed
from testbed.tiny_models import tiny_config
from testbed.undeclared_configs import UNDECLARED
from tests.helpers.workloads import workload

SHAPE = read_shape(tiny_config(layers=4))

LAYER = Seconds(1.0, 2.0, 4.0, 0.5)
FOUR = ModelSeconds(
    layers=(LAYER,) * 4,
    embedding=Seconds(0.1, 0.0, -0.25, 0.0),
    head=Seconds(3.0, 5.0, 0.0, 0.0),
)


def test_a_stage_takes_what_its_layers_take_and_its_end() -> None:
    assert FOUR.stage(1, 3) == Seconds(2.0, 4.0, 8.0, 1.0)
    assert FOUR.stage(3, 4) == Seconds(4.0, 7.0, 4.0, 0.5)


def test_a_stage_that_is_measured_as_nothing_takes_some_time() -> None:
    noise = Seconds(-1.0, -1.0, -1.0, -1.0)
    stage = replace(FOUR, layers=(LAYER, LAYER, LAYER, noise), head=noise).stage(3, 4)
    assert stage == Seconds(LEAST_SECONDS)
    assert stage.costs.of(Kind.F) > 0


def test_the_first_stage_has_no_input_gradient_and_its_w_is_its_whole_backward() -> None:
    assert FOUR.stage(0, 2) == Seconds(2.1, 0.0, 11.75, 1.0)


def test_below_the_lowest_trained_layer_there_is_a_forward_only() -> None:
    half = replace(FOUR, first_trained=2, layers=(Seconds(1.0),) * 2 + (LAYER,) * 2)
    assert half.stage(0, 2) == Seconds(2.1)
    assert half.stage(0, 3) == Seconds(3.1, 0.0, 5.75, 0.5)
    assert half.stage(2, 4).input_gradient == 0.0
    assert half.stage(3, 4).input_gradient == 7.0


def test_checkpointing_computes_the_layers_again_and_all_gradients_at_once() -> None:
    again = replace(FOUR, recompute=FULL)
    assert again.stage(1, 3) == Seconds(2.0, 14.0, 0.0, 1.0)
    assert again.stage(0, 2) == Seconds(2.1, 0.0, 13.75, 1.0)
    assert again.stage(3, 4) == Seconds(4.0, 12.0, 0.0, 0.5)
    assert again.layer_costs.layers[1] == 8.0


def test_the_stages_of_any_partition_take_as_long_together() -> None:
    for cuts in ((4,), (1, 4), (2, 3, 4), (1, 2, 3, 4)):
        starts = (0, *cuts)
        whole = sum(FOUR.stage(a, b).microbatch for a, b in zip(starts, cuts, strict=False))
        assert whole == pytest.approx(4 * 7.0 + 8.0 - 0.15)


def test_speed_counts_the_flops_of_every_pass_that_is_needed() -> None:
    half = workload(SHAPE, fine_tune_type="full", num_layers=2)
    shape, seconds = half.shape, Speed(1e6).seconds(half, 2, 10)
    once = 20 * shape.layer(0).flops(10) / 1e6
    assert seconds.layers[1] == Seconds(once)
    assert seconds.layers[2] == Seconds(once, once, once)
    head = 20 * shape.head_flops() / 1e6
    assert seconds.head == Seconds(head, head)
    whole = workload(SHAPE, fine_tune_type="full", unfreeze_all=True)
    assert Speed(1e6).seconds(whole, 2, 10).head == Seconds(head, head, head)
    counted = replace(half, counted=0.25, batch=replace(half.batch, loss_chunk=COUNTED))
    assert Speed(1e6).seconds(counted, 2, 10).head == Seconds(head / 4, head / 4)


def test_a_partitioner_weighs_all_passes_of_each_part() -> None:
    assert FOUR.layer_costs == LayerCosts((7.0,) * 4, 0.0, 8.0)
    again = replace(FOUR, recompute=FULL, first_trained=2)
    assert again.layer_costs.layers[2:] == (8.0, 8.0)


def test_adapters_have_no_weight_gradient_to_speak_of() -> None:
    assert Speed(1e6).seconds(workload(SHAPE), 1, 8).layers[0].weight_gradient == 0.0


def test_tokens_of_a_recurrence_without_a_kernel_come_one_after_the_other() -> None:
    """90 us a token of a row, however many rows there are; the gradient takes three times as long,
    and packed rows are one long row."""
    text = {**UNDECLARED["qwen3_5"]["text_config"], "num_hidden_layers": 4}
    shape = read_shape({"model_type": "qwen3_5", "text_config": text})
    work = workload(shape, num_layers=2)
    with_kernel = Speed(1e12).seconds(work, 8, 100).layers
    layers = Speed(1e12, 90e-6).seconds(work, 8, 100).layers
    more = [
        (each.forward - own.forward, each.input_gradient - own.input_gradient)
        for each, own in zip(layers, with_kernel, strict=True)
    ]
    assert more[0] == pytest.approx((9e-3, 0.0))  # not trained
    assert more[1] == (0.0, 0.0)  # attention
    assert more[2] == pytest.approx((9e-3, 27e-3))
    packed = replace(work, batch=replace(work.batch, pack=True))
    one = Speed(1e12, 90e-6).seconds(packed, 8, 100).layers[0].forward
    assert one - Speed(1e12).seconds(packed, 8, 100).layers[0].forward == pytest.approx(72e-3)


def sample(length: int, seconds: float) -> Sample:
    part = Seconds(seconds, seconds, seconds, 0.25)
    return Sample(
        rows=1,
        length=length,
        layer=part,
        frozen=Seconds(seconds),
        embedding=Seconds(),
        head=part,
    )


def measured(*samples: Sample) -> Callable[[int, int], ModelSeconds]:
    """The times of micro-batches of a model of which all layers but the first are trained."""
    return partial(MachineProfile("mac", "M2", samples).seconds, workload(SHAPE, num_layers=3))


def test_between_two_samples_times_are_on_their_line() -> None:
    machine = measured(sample(100, 1.0), sample(200, 3.0))
    frozen, layer, *_ = machine(1, 150).layers
    assert astuple(layer) == (2.0, 2.0, 2.0, 0.25)
    assert frozen == Seconds(2.0)
    assert machine(3, 150).layers[1] == Seconds(6.0, 6.0, 6.0, 0.25)


def test_beyond_the_samples_the_line_goes_on() -> None:
    machine = measured(sample(100, 1.0), sample(200, 3.0), sample(400, 5.0))
    assert machine(1, 800).layers[1].forward == 9.0
    assert machine(1, 75).layers[1].forward == 0.5


def test_one_sample_is_proportional_but_for_the_update() -> None:
    layer = measured(sample(100, 1.0))(1, 200).layers[1]
    assert astuple(layer) == (2.0, 2.0, 2.0, 0.25)
