"""Peaks of real stages, beside what a plan says of them that has a profile of this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardmlx.config.specs import FULL, NONE, SELECTIVE
from shardmlx.config.train import TrainConfig
from shardmlx.loading.build import unfreeze
from shardmlx.modelfiles.parts import read_shape
from shardmlx.planning.memory.measured import (
    MemorySample,
    StageBytes,
    sample_ranges,
    with_measurements,
)
from shardmlx.planning.memory.stages import stage_memory
from shardmlx.planning.memory.training_setup import TrainingSetup
from shardmlx.training.sample_model import SampleModel, build_sample_model
from tests.helpers.stage_memory import LENGTH, ROWS, Case, before_others, measure, weight_sizes

UNDER, OVER = 0.03, 0.05
"""Parts by which a prediction with a profile may lie under and over the measured peak: on a free
machine within 3%."""
MEASUREMENTS = 40
"""At most, until a peak comes near: beside other work MLX takes less memory."""
PROFILES = 12
"""At most, until one was measured while the machine was free: other tests run beside."""
REPEATS = 4
"""Fewer than in a profile of a user: each costs a second, and the tests profile again if a peak was
missed."""


CASES = [
    Case("full", 2, 4),
    Case("lora", length=128, pieces=32, recompute=SELECTIVE),
    Case("lora", 2, 4, recompute=FULL),
]


def sample_model(case: Case) -> SampleModel:
    pattern = read_shape(case.model_config).pattern
    dtype = {4: "float32", 2: "bfloat16"}[case.dtype_bytes]
    model = build_sample_model(case.model_config, dtype)
    tuned = TrainConfig.from_flat(
        fine_tune_type=case.mode, num_layers=-1, lora_parameters=case.lora_parameters
    )
    unfreeze(model, tuned.tune)
    return SampleModel(model, pattern, pattern, replace(case.savings, recompute=NONE), REPEATS)


@pytest.mark.parametrize("case", CASES, ids=str)
@before_others()
def test_with_a_profile_a_peak_is_known_to_three_per_cent(case: Case) -> None:
    model = sample_model(case)
    profiles = [model.memory(ROWS, case.length, case.recompute)]
    for _ in range(MEASUREMENTS):
        measured, sizes = measure(case)
        setup = with_measurements(case.setup(sizes), profiles)
        assert setup.measured is not None
        _, peak = case.predicted(setup)
        if peak < (1 - UNDER) * measured.peak:
            # The profile was measured while other work kept the scheduling thread from its core.
            assert len(profiles) < PROFILES
            profiles.append(model.memory(ROWS, case.length, case.recompute))
        elif peak <= (1 + OVER) * measured.peak:
            return
    pytest.fail(f"at most {measured.peak} of the predicted {peak} bytes were reached")


def test_a_layer_passes_what_was_measured_of_its_kind_alone() -> None:
    case = Case("lora", family="qwen3_5")
    by_rule = case.setup(weight_sizes(case.model()))
    pattern = by_rule.shape.pattern
    assert pattern == (0, 1, 0, 1)
    times = (2.0, 0.5)

    def passing(setup: TrainingSetup, start: int, stop: int) -> tuple[int, int]:
        stage = stage_memory(setup, start, stop)
        backward = stage.during_input if start > 0 else stage.during_weight
        return stage.during_forward, backward

    def measured(start: int, stop: int) -> StageBytes:
        (factor,) = {times[kind] for kind in pattern[start:stop]}
        stage = stage_memory(by_rule, start, stop)
        forward, backward = (round(factor * each) for each in passing(by_rule, start, stop))
        return StageBytes(stage.after_forward, stage.after_input, forward, backward)

    first, last, *kinds = (measured(*each) for each in sample_ranges(pattern))
    sample = MemorySample(
        rows=ROWS,
        length=LENGTH,
        savings=case.savings,
        first=first,
        last=last,
        kinds=tuple(kinds),
    )
    setup = with_measurements(by_rule, [[sample]])
    alone = [passing(setup, i, i + 1) for i in range(len(pattern))]
    for i, kind in enumerate(pattern):
        expected = [times[kind] * each for each in passing(by_rule, i, i + 1)]
        assert alone[i] == pytest.approx(expected, abs=1)
    # The upper layer's backward comes first, and is the greater here.
    assert passing(setup, 1, 3) == tuple(map(max, alone[1], alone[2]))


def test_between_and_beyond_its_samples_a_profile_grows_like_the_rule() -> None:
    case = Case("lora")
    samples = sample_model(case).memory(ROWS, LENGTH, NONE)
    _, sizes = measure(case)
    for length in (LENGTH // 2, 4 * LENGTH):
        longer = replace(case, length=length)
        by_rule = longer.setup(sizes)
        measured = with_measurements(by_rule, [samples])
        assert measured.measured == with_measurements(case.setup(sizes), [samples]).measured
        below, above = longer.predicted(measured)[1], longer.predicted(by_rule)[1]
        assert 0.8 * above < below < 1.03 * above
    for others in ({"recompute": FULL}, {"shares": (1, 1)}):
        other = replace(case, **others).setup(sizes)
        assert with_measurements(other, [samples]) == other
