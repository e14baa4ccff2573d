"""The engine on threads: whatever the layout, a step is the step of one process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest

from shardmlx.config.specs import NO_SAVINGS, NONE, RECOMPUTE, FineTune, Savings
from shardmlx.distributed.messages import PeerLost, TransportTimeout
from shardmlx.engine.batches import split
from shardmlx.engine.optimizer import Updater, build_optimizer
from shardmlx.engine.trace import Span, rank_times
from shardmlx.errors import EngineError
from shardmlx.pipeline.actions import COMPUTE, Kind
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.stage_map import Partition, StageMap
from testbed.jobs import patience
from tests.helpers.engines import (
    Expected,
    check_outcome,
    engine_of,
    gradients_of,
    run_engine,
    train_on,
)
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.models_and_batches import (
    Gradients,
    Layout,
    largest_difference,
    random_batch,
    reference,
    tiny_model,
    with_adapters,
)

LAYERS = 8

SCHEDULES = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "interleaved-1f1b": 2, "zb-v": 2}
"""Of each schedule the stages a rank."""

CASES = [
    *((name, pp, 1, count) for name in SCHEDULES for pp, count in ((2, 2), (3, 6), (4, 3))),
    *((name, 2, 2, 3) for name in SCHEDULES),
    *((name, pp, dp, 1) for name in ("1f1b", "zb-v") for pp, dp in ((1, 1), (1, 2), (4, 2))),
]
"""(Schedule, pipeline ranks, replicas, micro-batches): fewer micro-batches than ranks, as many, and
more. A second replica runs the same actions; its sums do not depend on how many there were."""

TIED = [
    *((name, pp, dp) for name in SCHEDULES for pp, dp in ((2, 2), (3, 1))),
    *((name, 1, dp) for name in ("1f1b", "zb-v") for dp in (1, 2)),
]

PIECES = [Savings(recompute=each, attention_chunk=20, loss_chunk=15) for each in RECOMPUTE]


def layout_of(schedule: str, pp: int, dp: int) -> Layout:
    return Layout(schedule, pp, SCHEDULES[schedule], dp)


def layers_of(layout: Layout) -> int:
    return 4 if layout.pp * layout.virtual <= 4 else LAYERS


@cache
def models(tied: bool, recompute: str = NONE, layers: int = LAYERS) -> list[nn.Module]:
    """The same model for each rank. Threads must not share one: tracing swaps its weights; nor must
    stages, of which one lets its modules compute something again."""
    return [tiny_model(tied=tied, layers=layers) for _ in range(8)]


@cache
def one_process(
    layers: int, dp: int, rows: int, size: int, tied: bool, savings: Savings
) -> Expected:
    """The run that all layouts of so many replicas must agree with: their stages change nothing."""
    plan = Layout("gpipe", 1, 1, dp).plan(layers, rows, size)
    return Expected(plan, tiny_model(tied=tied, layers=layers), random_batch(rows * dp), savings)


def check(
    layout: Layout,
    rows: int,
    *,
    tied: bool = False,
    size: int = 1,
    savings: Savings = NO_SAVINGS,
) -> None:
    layers = layers_of(layout)
    plan = layout.plan(layers, rows, size)
    expected = one_process(layers, layout.dp, rows, size, tied, savings).for_plan(plan)
    check_ranks(expected, models(tied, savings.recompute, layers))


def check_ranks(expected: Expected, each: Sequence[nn.Module]) -> None:
    """Check a step of ranks that have a model each."""
    outcomes = LocalNetwork(expected.plan.mesh.size).run(
        lambda transport: run_engine(
            transport,
            expected.plan,
            each[transport.rank],
            expected.batch,
            savings=expected.savings,
        )
    )
    for rank, outcome in enumerate(outcomes):
        check_outcome(outcome, expected, rank)


@pytest.mark.parametrize(("schedule", "pp", "dp", "microbatches"), CASES)
def test_loss_and_gradients_are_those_of_one_process(
    schedule: str, pp: int, dp: int, microbatches: int
) -> None:
    check(layout_of(schedule, pp, dp), microbatches)


@pytest.mark.parametrize(("schedule", "pp", "dp"), TIED)
def test_tied_embeddings_sum_over_first_and_last_stage(schedule: str, pp: int, dp: int) -> None:
    check(layout_of(schedule, pp, dp), 4 if dp == 1 else 1, tied=True)


@pytest.mark.parametrize("layout", [Layout("1f1b", 2), Layout("zb-v", 2, 2, 2)], ids=str)
def test_the_last_microbatch_may_be_smaller(layout: Layout) -> None:
    check(layout, rows=5, size=2)


@pytest.mark.parametrize(
    ("layout", "rows"), [(Layout("1f1b", 1, 1, 3), (1, 4, 2)), (Layout("zb-v", 2, 2, 2), (5, 2))]
)
def test_replicas_may_have_unequal_rows(layout: Layout, rows: tuple[int, ...]) -> None:
    """Of a batch that does not divide, too: loss and gradients are those of one process."""
    equal = layout.plan(LAYERS, max(rows), 2)
    plan = replace(equal, replica_rows=rows)
    check_ranks(Expected(plan, tiny_model(layers=LAYERS), random_batch(sum(rows))), models(False))


@pytest.mark.parametrize(
    ("layout", "savings", "tied"),
    [
        (Layout("1f1b", 2), Savings(recompute="full"), False),
        (Layout("zb-h1", 4, 1, 2), Savings(recompute="full"), False),
        *((Layout("1f1b", 2), pieces, False) for pieces in PIECES),
        (Layout("zb-v", 2, 2, 2), PIECES[-1], True),
        (Layout("zb-v", 2, 2, 2), PIECES[0], True),
    ],
    ids=str,
)
def test_recomputing_and_pieces_of_attention_and_loss_change_nothing(
    layout: Layout, savings: Savings, tied: bool
) -> None:
    check(layout, rows=4, tied=tied, savings=savings)


def test_a_stage_map_may_number_the_ranks_freely() -> None:
    stage_map = StageMap(Partition.from_sizes([3, 2, 3]), placement=(2, 0, 1))
    plan = Plan(Mesh(1, 3), stage_map, "1f1b", 4, 1, (True,) * 3)
    check_ranks(Expected(plan, tiny_model(layers=LAYERS), random_batch(4)), models(False))


@pytest.mark.parametrize("layout", [Layout("1f1b", 4), Layout("zb-v", 2, 2), Layout("zb-h1", 4)])
def test_frozen_stages_compute_no_backward_and_receive_no_gradient(layout: Layout) -> None:
    plan = layout.plan(LAYERS, 4)
    trainable = (stop > LAYERS - 3 for _, stop in plan.stage_map.partition.ranges)
    plan = replace(plan, trainable=tuple(trainable))
    whole, *each = (with_adapters(tiny_model(layers=LAYERS), 3) for _ in range(layout.ranks + 1))
    check_ranks(Expected(plan, whole, random_batch(4)), each)
    lowest = plan.trainable.index(True)
    for actions in plan.actions:
        for action in actions:
            if action.stage < lowest:
                assert action.kind in (Kind.F, Kind.SEND_F, Kind.RECV_F)
            if action.stage == lowest:
                assert action.kind not in (Kind.I, Kind.SEND_B)


@pytest.mark.parametrize("layout", [Layout("1f1b", 2), Layout("1f1b", 2, 1, 2)], ids=str)
def test_gradients_add_up_over_steps_until_they_are_reduced(layout: Layout) -> None:
    plan = layout.plan(LAYERS, 2)
    batches = [random_batch(2 * layout.dp, seed) for seed in (1, 2)]

    def work(transport: LocalTransport) -> Gradients:
        engine = engine_of(transport, plan, models(False)[transport.rank])
        for batch, last in zip(batches, (False, True), strict=True):
            train_on(engine, batch, reduce=last)
        return gradients_of(engine)

    model = tiny_model(layers=LAYERS)
    parts = [reference(model, split(batch, 1, 0, 1))[1] for batch in batches]
    total = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    for gradients in LocalNetwork(layout.ranks).run(work):
        assert largest_difference(gradients, total)[0] <= 1e-6


def test_forgotten_gradients_leave_no_trace() -> None:
    """Nor does what was rounded off of their sums."""
    layout = Layout("1f1b", 1, 1, 2)
    plan = layout.plan(LAYERS, 2)
    batch = random_batch(4)

    def work(transport: LocalTransport) -> list[dict[str, bytes]]:
        engine = engine_of(transport, plan, models(False)[transport.rank], sum_dtype="int8")
        seen = []
        for _ in range(2):
            train_on(engine, batch)
            seen.append({name: bytes(array) for name, array in gradients_of(engine).items()})
            engine.forget_gradients()
            assert not gradients_of(engine)
        return seen

    for first, second in LocalNetwork(2).run(work):
        assert first == second


@pytest.mark.parametrize("tied", [False, True])
def test_replicas_and_holders_of_tied_weights_stay_equal_to_the_bit(tied: bool) -> None:
    layout = Layout("1f1b", 2, 1, 2)
    plan = layout.plan(LAYERS, 2)
    fresh = [tiny_model(tied=tied, layers=LAYERS) for _ in range(layout.ranks)]

    def work(transport: LocalTransport) -> dict[str, np.ndarray]:
        engine = engine_of(transport, plan, fresh[transport.rank])
        stages = [*engine.stages.values()]
        updater = Updater(build_optimizer(FineTune(optimizer="adamw", learning_rate=1e-2)), stages)
        for step in range(3):
            train_on(engine, random_batch(4, step))
            updater.apply()
        return {name: np.array(stage.part[name]) for stage in stages for name in stage.names}

    seen: dict[str, np.ndarray] = {}
    for weights in LocalNetwork(layout.ranks).run(work):
        for name, weight in weights.items():
            assert np.array_equal(seen.setdefault(name, weight), weight), name


def test_a_failing_action_is_named_with_rank_host_and_stage() -> None:
    plan = Layout("1f1b", 2).plan(LAYERS, 2)

    def work(transport: LocalTransport) -> None:
        engine = engine_of(transport, plan, models(False)[transport.rank])
        if transport.rank == 1:
            engine.stages[1].backward_input = None  # type: ignore[assignment,method-assign]
        train_on(engine, random_batch(2))

    what = "rank 1 on localhost, stage 1, input gradient of micro-batch 0 (1I0): TypeError: "
    with pytest.raises(EngineError, match=f"^{re.escape(what)}"):
        LocalNetwork(2).run(work)


def test_a_rank_that_is_lost_in_sums_of_parts_of_gradients_is_named() -> None:
    plan = Layout("gpipe", 1).plan(2, rows=1)
    plan = replace(plan, mesh=replace(plan.mesh, tp=2))

    def lost(handle: Any, seconds: float) -> bool:
        raise PeerLost("rank 1 on localhost died")

    def broken(array: Any) -> Any:
        raise RuntimeError("[ring] Receiving from socket 5 failed")

    def step(transport: LocalTransport) -> None:
        engine = engine_of(transport, plan, tiny_model(layers=2))
        if transport.rank == 0:
            part = engine.stages[0].part
            part.partial, part.all_sum = part.trainable[:1], broken
            transport.progress = lost  # type: ignore[method-assign]
            train_on(engine, random_batch(1))

    what = "rank 0 on localhost, summing gradients: rank 1 on localhost died"
    with pytest.raises(PeerLost, match=f"^{re.escape(what)}"):
        LocalNetwork(2).run(step)


def test_a_wait_that_times_out_names_action_and_peer() -> None:
    plan = Layout("1f1b", 2).plan(LAYERS, 2)

    def work(transport: LocalTransport) -> None:
        engine = engine_of(transport, plan, models(False)[transport.rank])
        if transport.rank == 1:
            train_on(engine, random_batch(2))

    network = LocalNetwork(2, timeout=patience(0.2))
    what = (
        "rank 1 on localhost, stage 1, waiting for the hidden states of micro-batch 0 from "
        f"rank 0 on localhost (1RECV_F0): nothing came for {network.timeout:g} s (see --timeout)"
    )
    with pytest.raises(TransportTimeout, match=f"^{re.escape(what)}$"):
        network.run(work)


def test_the_events_of_a_step_tell_where_its_time_went() -> None:
    plan = Layout("1f1b", 2).plan(LAYERS, 4)

    def work(transport: LocalTransport) -> list[Any]:
        engine = engine_of(transport, plan, models(False)[transport.rank])
        with engine.recorder.span(Span.STEP, "step 1"):
            train_on(engine, random_batch(4))
        return engine.recorder.take()

    events = LocalNetwork(2).run(work)
    for rank, mine in enumerate(events):
        computed = [e.label for e in mine if e.span is Span.COMPUTE]
        assert computed == [str(a) for a in plan.actions[rank] if a.kind in COMPUTE]
    for times in rank_times(events, [0.0, 0.0]):
        parts = times.compute_seconds + times.exposed_comm_seconds + times.idle_seconds
        assert parts == pytest.approx(times.step_seconds)
        assert times.compute_seconds > 0
        assert 0 <= times.bubble < 1
