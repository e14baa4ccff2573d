"""The arithmetic of a rank's peak memory. What real stages hold: test_memory_measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmlx.common.units import GIB
from shardmlx.config.specs import FULL, NO_SAVINGS, Savings
from shardmlx.engine.buffers import SUM_BUFFER_BYTES
from shardmlx.islands.protocol import Terms
from shardmlx.modelfiles.parts import read_shape
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.pipeline.actions import Grid, Kind
from shardmlx.pipeline.lowering import gradient_kinds, lower
from shardmlx.pipeline.mesh import Mesh
from shardmlx.pipeline.plan import Plan
from shardmlx.pipeline.schedules import SCHEDULES, compute_actions
from shardmlx.pipeline.stage_map import StageMap
from shardmlx.planning.facts.workload import ModelSizes
from shardmlx.planning.memory.generation import GenerationSetup, inference_memory
from shardmlx.planning.memory.layers import (
    layer_arrays,
    layer_memory,
    passing_in_fused_attention,
)
from shardmlx.planning.memory.ranks import PeakOfActions, PeaksOfLayers, multiples
from shardmlx.planning.memory.stages import StageMemory, stage_memory
from shardmlx.planning.memory.training_setup import TrainingSetup
from testbed.family_configs import CONFIGS
from tests.helpers.grids import parse_grid
from tests.helpers.workloads import parameter_bytes, workload

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}
SHAPE = read_shape(CONFIG)
# q, k, v, o; gate, up, down; two norms.
LAYER = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 16 + 2 * 8

CHECKPOINT = Savings(recompute=FULL)
OF_ATTENTION = {
    "rank": 2,
    "scale": 20.0,
    "dropout": 0.0,
    "keys": ["self_attn.q_proj", "self_attn.v_proj"],
}


def setup(
    shape: ModelShape = SHAPE,
    *,
    rows: int = 1,
    length: int = 10,
    dtype: str = "float32",
    dp: int = 1,
    backend: str = "metal",
    savings: Savings = NO_SAVINGS,
    **options: Any,
) -> TrainingSetup:
    """Micro-batches of one row of 10 tokens, float32, on Metal."""
    work = workload(shape, dtype, **{"fine_tune_type": "full", "zero": 0, **options})
    return TrainingSetup(
        workload=work, rows=rows, length=length, dp=dp, backend=backend, savings=savings
    )


def trained_from(first: int) -> dict[str, Any]:
    """The options that train the layers from ``first`` of four."""
    return {"num_layers": 4 - first} if first < 4 else {"test": True}


def of_stage(**sizes: Any) -> StageMemory:
    """A stage whose sizes are zero but for those given."""
    names = (
        "weights room optimizer gradients after_forward after_input during_forward during_input "
        "during_weight during_update message tied"
    )
    flags = {"is_trained": True, "has_input_gradient": True}
    return StageMemory(**{**dict.fromkeys(names.split(), 0), **flags, **sizes})


def a_rank(text: str) -> PeakOfActions:
    """A rank with these actions."""
    return PeakOfActions(*parse_grid(text))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_of_few_micro_batches_holds_what_one_of_many_does(name: str) -> None:
    """So that a plan's cost does not grow with the batch; GPipe holds all of them."""
    schedule = SCHEDULES[name]
    for pp in (1, 2, 3, 4):
        placement = schedule.placement(pp, schedule.default_virtual)
        for microbatches in (*range(4 * pp, 6 * pp), 9 * pp + 1, 15 * pp - 1):
            few = schedule.fewest_alike(pp, microbatches)
            assert few == microbatches if name == "gpipe" else few <= pp * (pp + 3) + 3
            whole, short = (
                lower(schedule.order(pp, count, schedule.default_virtual), placement)
                for count in (microbatches, few)
            )
            for rank in range(pp):
                needs = tuple((i, True, True) for i, own in enumerate(placement) if own == rank)
                for joins in (False, True):
                    there, here = (multiples(each[rank], needs, joins) for each in (whole, short))
                    assert there.tolist() == here.tolist(), (pp, microbatches)


def test_replicas_have_one_buffer_for_what_others_send_them() -> None:
    one, two = (
        a_rank("0F0 0W0").of({0: stage_memory(made, 0, made.shape.num_layers)}, made)
        for made in (setup(), setup(dp=2))
    )
    assert two - one == SUM_BUFFER_BYTES == 8 << 20


# What a layer holds, in floats a token.


@pytest.mark.parametrize(
    ("copies", "changes"),
    [
        (1, {}),
        (2, {"backend": "cpu"}),
        (2, {"lora_parameters": OF_ATTENTION | {"dropout": 0.1}}),
        (1, {"pack": True}),
    ],
)
def test_adapters_of_half_precision_share_a_float32_copy_of_their_input_if_compiled(
    copies: int, changes: Mapping[str, Any]
) -> None:
    options = {"fine_tune_type": "lora", "lora_parameters": OF_ATTENTION, **changes}
    layer = layer_memory(setup(dtype="bfloat16", **options), SHAPE.layer(0))
    inputs, outputs, low_rank = copies * 8, 8 + 4, 2 * 2
    assert layer.after_input == 4 * 10 * (inputs + outputs + 2 * low_rank)


# Attention that MLX fuses.

WIDE = CONFIG | {
    "hidden_size": 4096,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


@pytest.mark.parametrize(
    ("backend", "zero", "copies"), [("metal", 0, 4), ("metal", 3, 7), ("cpu", 0, 7), ("cpu", 3, 7)]
)
def test_compiled_adapters_share_a_float32_copy_of_their_input(
    backend: str, zero: int, copies: int
) -> None:
    """Four of seven inputs differ. Stages with divided weights are not compiled."""
    made = setup(dtype="bfloat16", backend=backend, dp=2, fine_tune_type="lora", zero=zero)
    held = {each.name: each for each in layer_arrays(made, made.shape.layer(0))}
    inputs = held["inputs of trained linear layers"]
    widths = [each.elements[0] for _, each in made.shape.layer(0).linears]
    sources = {each.source: each.elements[0] for _, each in made.shape.layer(0).linears}
    assert (len(widths), len(sources)) == (7, 4)
    counted = sum(widths) if copies == 7 else sum(sources.values())
    assert inputs.nbytes == 4 * made.tokens * counted


def attention_gib(length: int) -> float:
    """Memory of one attention and its gradient, of 32 heads of 128 and 8 of keys, in bfloat16."""
    made = setup(read_shape(WIDE), length=length, dtype="bfloat16")
    layer = made.shape.layer(0)
    held = {each.name: each.nbytes for each in layer_arrays(made, layer)}
    names = ("scaled queries", "keys", "values", "attention's outputs", "log-sum-exp of scores")
    passing = passing_in_fused_attention(made, layer.heads)
    return (sum(held[name] for name in names) + passing) / GIB


@pytest.mark.parametrize(
    ("length", "peak"), [(1024, 0.270), (2048, 0.329), (4096, 0.446), (8192, 0.682)]
)
def test_fused_attention_takes_what_was_measured_on_an_m1_max(length: int, peak: float) -> None:
    """As users of mlx 0.32.4 report it."""
    assert attention_gib(length) == pytest.approx(peak, rel=0.01)


def test_the_memory_of_fused_attention_is_linear_in_the_tokens() -> None:
    steps = [attention_gib(2 * length) - attention_gib(length) for length in (4096, 8192, 16384)]
    assert steps[1:] == pytest.approx([2 * steps[0], 4 * steps[0]])


def test_layers_hold_scores_on_a_cpu_and_where_a_row_is_not_causal_or_has_sinks() -> None:
    def holds(changes: dict[str, Any], **how: Any) -> bool:
        made = setup(read_shape(WIDE | changes), length=64, **how)
        layer = made.shape.layer(0)
        return "attention probabilities" in {each.name for each in layer_arrays(made, layer)}

    assert not holds({})
    assert not holds({}, savings=Savings(attention_chunk=16))
    assert holds({}, backend="cpu")
    assert holds({}, pack=True)
    assert holds({"head_dim": 40})
    windowed = {"layer_types": [*["sliding_attention"] * 3, "full_attention"]}
    assert [holds(windowed | {"sliding_window": each}) for each in (63, 64)] == [True, False]
    full = {"layer_types": [*["full_attention"] * 3, "sliding_attention"], "head_dim": 64}
    assert holds(CONFIGS["gpt_oss"] | full)


# What a stage holds.


def test_the_stages_together_hold_the_parameters_of_the_model() -> None:
    stages = [stage_memory(setup(), start, start + 1) for start in range(4)]
    assert sum(stage.weights for stage in stages) == 4 * SHAPE.parameters()
    assert stages[1].weights == 4 * LAYER
    assert stages[1].optimizer == 2 * 4 * LAYER
    assert stages[1].gradients == 4 * LAYER


def test_a_tied_matrix_is_held_at_both_ends_and_once_by_a_rank_that_has_both() -> None:
    tied = setup(replace(SHAPE, tied=True))
    matrix = 4 * SHAPE.vocab_size * SHAPE.hidden_size
    stages = {0: stage_memory(tied, 0, 2), 1: stage_memory(tied, 2, 4)}
    assert stages[0].weights == matrix + 2 * 4 * LAYER
    assert stages[1].weights == matrix + 2 * 4 * LAYER + 4 * 8
    assert stage_memory(tied, 0, 4).weights == stages[0].weights + stages[1].weights - matrix
    both = PeakOfActions(()).of(stages, tied)
    each = sum(PeakOfActions(()).of({index: stage}, tied) for index, stage in stages.items())
    assert both == each - matrix - stages[0].during_update


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_replicas_that_divide_the_weights_hold_the_gradients_of_their_part(mode: str) -> None:
    whole = stage_memory(setup(fine_tune_type=mode, dp=2), 0, 4)
    divided = setup(fine_tune_type=mode, dp=2, zero=3)
    part = stage_memory(divided, 0, 4)
    assert part.weights < whole.weights
    assert part.gradients == whole.gradients / 2
    assert part.after_forward == whole.after_forward


def test_what_is_rounded_off_of_sums_is_as_large_as_gradients_and_kept_for_checkpoints() -> None:
    def optimizer(dp: int, sum_dtype: str, checkpoint_dir: str | None) -> int:
        full = setup(dp=dp, sum_dtype=sum_dtype, checkpoint_dir=checkpoint_dir)
        return stage_memory(full, 0, 4).optimizer

    plain = optimizer(2, "bfloat16", "checkpoints")
    assert optimizer(1, "int8", "checkpoints") == plain
    copies = [optimizer(2, "int8", place) - plain for place in (None, "checkpoints")]
    assert copies == [4 * 4 * LAYER, 2 * 4 * 4 * LAYER]


def test_stages_at_both_ends_keep_what_is_rounded_off_of_a_tied_matrix() -> None:
    tied = read_shape({**CONFIG, "tie_word_embeddings": True})

    def kept(start: int, stop: int) -> int:
        full = setup(tied, unfreeze_all=True)
        with_errors = setup(tied, unfreeze_all=True, sum_dtype="int8", checkpoint_dir="c")
        of_both = [stage_memory(each, start, stop).optimizer for each in (full, with_errors)]
        return of_both[1] - of_both[0]

    matrix = 2 * 4 * tied.vocab_size * tied.hidden_size
    assert [kept(0, 2), kept(1, 3), kept(2, 4), kept(0, 4)] == [matrix, 0, matrix, 0]


@pytest.mark.parametrize(
    ("terms", "copies"),
    [
        ({}, 1),
        ({"encoding": "int8"}, 2),
        ({"encoding": "top-k:0.1", "overlap": 1}, 2),
    ],
)
def test_an_island_holds_copies_of_what_it_trains(terms: dict[str, Any], copies: int) -> None:
    assert Terms(**terms).copies == copies
    alone = setup(fine_tune_type="full", num_layers=2)
    island = replace(alone, workload=replace(alone.workload, copies=copies))
    more = [
        stage_memory(island, *each).resident - stage_memory(alone, *each).resident
        for each in ((0, 3), (3, 4))
    ]
    assert more == [4 * copies * LAYER, 4 * copies * LAYER]


def test_layers_below_the_first_trained_one_hold_nothing() -> None:
    partly = setup(num_layers=2)
    below, across, above = (stage_memory(partly, *ends) for ends in ((0, 2), (1, 3), (2, 4)))
    assert (below.after_forward, below.gradients, below.is_trained) == (0, 0, False)
    assert across.gradients == 4 * LAYER
    assert not above.has_input_gradient
    assert above.gradients == 2 * across.gradients


# What a rank holds at a time.


@pytest.mark.parametrize(
    ("text", "sizes", "peak"),
    [
        # Every forward waits for its input gradient, then for its weight gradient.
        ("0F0 0I0 0W0", {"after_forward": 100, "after_input": 60}, 100),
        ("0F0 0F1 0I0 0W0 0I1 0W1", {"after_forward": 100, "after_input": 60}, 200),
        ("0F0 0I0 0F1 0I1 0W0 0W1", {"after_forward": 100, "after_input": 60}, 160),
        # Passing arrays come on top of what is held and summed.
        ("0F0 0W0 0F1 0W1", {"after_forward": 100, "gradients": 10, "during_weight": 7}, 117),
        # Gradients grow while a first micro-batch is freed.
        ("0F0 0W0", {"after_forward": 100, "gradients": 300, "during_weight": 7}, 307),
        # The update finds gradients but no micro-batches.
        ("0F0 0W0", {"after_forward": 5, "gradients": 10, "during_update": 30}, 40),
    ],
)
def test_a_rank_holds_the_micro_batches_in_flight(
    text: str, sizes: Mapping[str, int], peak: int
) -> None:
    stages = {0: of_stage(weights=1000, **sizes)}
    assert a_rank(text).of(stages, setup()) == 1000 + peak


def test_actions_that_a_stage_does_not_need_count_for_nothing() -> None:
    has = {"after_forward": 100, "after_input": 60, "during_input": 50, "during_weight": 50}
    frozen = {0: of_stage(is_trained=False, has_input_gradient=False, **has)}
    assert a_rank("0F0 0I0 0SEND_B0 0W0").of(frozen, setup()) == 100


def test_messages_count_two_posted_receives_and_the_last_one_sent() -> None:
    made = setup()
    idle = {0: of_stage(), 1: of_stage()}
    received = "1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2 1RECV_F3 1F3"
    assert a_rank(received).of(idle, made) == 2 * made.message
    assert a_rank("1RECV_F0 1F0").of(idle, made) == 0
    assert a_rank("0F0 0SEND_F0 0F1").of(idle, made) == made.message


def lowered(schedule: str, microbatches: int) -> tuple[Grid, tuple[int, ...]]:
    chosen = SCHEDULES[schedule]
    placement = chosen.placement(2, chosen.default_virtual)
    grid = compute_actions(schedule, 2, microbatches, chosen.default_virtual)
    return lower(grid, placement), placement


def peaks(schedule: str, microbatches: int, **changes: Any) -> list[int]:
    grid, placement = lowered(schedule, microbatches)
    made = setup(**changes)
    count = 4 // len(placement)
    stages = [stage_memory(made, s * count, (s + 1) * count) for s in range(len(placement))]
    return [
        PeakOfActions(rank).of(
            {s: stages[s] for s, at in enumerate(placement) if at == index}, made
        )
        for index, rank in enumerate(grid)
    ]


USUAL = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 4),
        "length": st.integers(1, 64),
        "fine_tune_type": st.sampled_from(["lora", "dora", "full"]),
        "dtype": st.sampled_from(["bfloat16", "float32"]),
        "backend": st.sampled_from(["cpu", "metal"]),
        "savings": st.sampled_from([CHECKPOINT, NO_SAVINGS]),
    }
)


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(deadline=None, max_examples=30)
@given(microbatches=st.sampled_from([2, 4, 8]), usual=USUAL)
def test_more_of_anything_never_needs_less(
    schedule: str, microbatches: int, usual: dict[str, Any]
) -> None:
    rows, length = usual["rows"], usual["length"]
    here = peaks(schedule, microbatches, **usual)
    for more in (
        peaks(schedule, 2 * microbatches, **usual),
        peaks(schedule, microbatches, **usual | {"rows": rows + 1}),
        peaks(schedule, microbatches, **usual | {"length": length + 1}),
        peaks(schedule, microbatches, **usual | {"dp": 2}),
    ):
        assert all(a >= b for a, b in zip(more, here, strict=True))


@settings(deadline=None)
@given(first=st.integers(0, 4), usual=USUAL)
def test_more_layers_never_need_less(first: int, usual: dict[str, Any]) -> None:
    """Whatever is trained of them: partitioners rely on it."""
    made = setup(**trained_from(first), **usual)
    own = a_rank("0F0 0F1 0I0 0W0 0F2 0I1 0I2 0W1 0W2")

    def peak(start: int, stop: int) -> int:
        return own.of({0: stage_memory(made, start, stop)}, made)

    for start in range(4):
        for stop in range(start + 1, 5):
            assert start == 0 or peak(start - 1, stop) >= peak(start, stop)
            assert stop == 4 or peak(start, stop + 1) >= peak(start, stop)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"fine_tune_type": "full", "zero": 3}])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_peaks_of_any_layers_are_those_of_a_stage_of_them_alone(
    family: str, options: dict[str, Any]
) -> None:
    """Though stages alike are counted once."""
    shape = read_shape(CONFIGS[family])
    sizes = parameter_bytes(shape)
    unlike = tuple(size + 10 * place for place, size in enumerate(sizes.layers))
    work = workload(shape, sizes=replace(sizes, layers=unlike), **options)
    setup = TrainingSetup(workload=work, rows=2, length=64, dp=2)
    stages = StageMap.from_sizes([1, 1, 2])
    plan = Plan(Mesh(2, 3), stages, "1f1b", rows=16, micro_batch_rows=2, trainable=(True,) * 3)
    peaks = PeaksOfLayers(plan, setup)
    everywhere = range(5)
    for stage, actions in enumerate(plan.shortest_alike.actions):
        table = peaks.table(stage, everywhere, everywhere)
        for start, stop in combinations(everywhere, 2):
            alone = PeakOfActions(actions).of({stage: stage_memory(setup, start, stop)}, setup)
            assert peaks(stage, start, stop) == table[start, stop] == alone


def test_gpipe_holds_what_1f1b_lets_go() -> None:
    assert peaks("gpipe", 8)[1] > peaks("gpipe", 4)[1] > peaks("1f1b", 8)[1] == peaks("1f1b", 4)[1]


@pytest.mark.parametrize("unfreeze_all", [False, True])
@pytest.mark.parametrize("first_trained_layer", range(5))
def test_a_stage_has_the_gradients_that_lowering_gives_it(
    first_trained_layer: int, unfreeze_all: bool
) -> None:
    made = setup(**trained_from(first_trained_layer), unfreeze_all=unfreeze_all)
    for bounds in ((0, 4), (0, 1, 4), (0, 2, 3, 4), (0, 1, 2, 3, 4)):
        memories = [stage_memory(made, *ends) for ends in pairwise(bounds)]
        kinds = gradient_kinds([each.is_trained for each in memories])
        assert [each.has_input_gradient for each in memories] == [Kind.I in each for each in kinds]


# Inference.


def test_inference_keeps_keys_and_values_of_every_token_in_the_window() -> None:
    sizes = ModelSizes(shape=SHAPE, weight_sizes=parameter_bytes(SHAPE), dtype="bfloat16")
    generating = GenerationSetup(model=sizes, sequences=3, context=1)
    kinds = ["full_attention" if i in (0, 3) else "sliding_attention" for i in range(4)]
    windows = read_shape({**CONFIG, "layer_types": kinds, "sliding_window": 5})

    def grows(shape: ModelShape, start: int, stop: int) -> int:
        short, long = (
            inference_memory(
                replace(generating, model=replace(sizes, shape=shape), context=context), start, stop
            )
            for context in (4000, 5000)
        )
        return long - short

    keys_and_values = 2 * 1 * 4
    assert grows(SHAPE, 0, 2) == 3 * 2 * 1000 * 2 * keys_and_values
    assert grows(windows, 0, 2) == 3 * 2 * 1000 * keys_and_values
    assert grows(windows, 1, 3) == 0


def test_the_update_of_a_matrix_at_an_end_finds_no_gradients_of_layers() -> None:
    matrix = 4 * SHAPE.vocab_size * SHAPE.hidden_size
    layers = 2 * 4 * LAYER
    adam = stage_memory(setup(unfreeze_all=True), 0, 2)
    muon = stage_memory(setup(unfreeze_all=True, optimizer="muon"), 0, 2)
    the_squares_of_all = layers + matrix
    assert adam.during_update == the_squares_of_all
    assert muon.during_update == 9 * matrix - layers


def test_adafactor_keeps_a_copy_of_the_weights_for_its_first_moment_only() -> None:
    usual = stage_memory(setup(optimizer="adafactor"), 1, 2)
    with_moment = stage_memory(
        setup(optimizer="adafactor", optimizer_config={"adafactor": {"beta_1": 0.9}}), 1, 2
    )
    assert (usual.optimizer, with_moment.optimizer) == (0, 4 * LAYER)
