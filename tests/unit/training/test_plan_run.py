"""What a run needs is checked before its weights are loaded."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmlx.common.units import MIB
from shardmlx.config.train import REPORTERS, TrainConfig
from shardmlx.engine.batches import MOST_WIDTHS, few_widths
from shardmlx.errors import UserError
from shardmlx.modelfiles.safetensors_header import INDEX_FILE
from shardmlx.planning.facts.cluster import Cluster
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.think import check_layout
from shardmlx.training import plan_run
from shardmlx.training.datasets import read_data
from testbed.rows import write
from testbed.small_models import small_directory
from tests.helpers.letters import Letters
from tests.helpers.plans import facts_of, planned_for


@pytest.mark.parametrize(
    ("services", "line"),
    [
        ("wandb", "--report-to wandb is not installed: pip install wandb"),
        ("SwanLab, wandb", "--report-to swanlab is not installed: pip install swanlab"),
        ("tensorboard", "--report-to tensorboard is not installed: pip install tensorboard"),
    ],
)
def test_a_service_without_its_package_says_what_to_install(
    services: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in REPORTERS:
        monkeypatch.setitem(sys.modules, each, None)
    config = TrainConfig.from_flat(report_to=services, adapter_path=str(tmp_path))
    with pytest.raises(UserError) as refused:
        plan_run.check_output(config, tmp_path / "model")
    assert str(refused.value).startswith(line)


def test_a_full_fine_tune_writes_over_no_model_that_is_not_its_own(tmp_path: Path) -> None:
    """Neither over the one that it starts from, also as the last beside the best, nor beside
    another's weights, which a loader would take with the new ones."""
    start, output = tmp_path / "out" / "last", tmp_path / "out"
    start.mkdir(parents=True)
    how: dict[str, Any] = {"fine_tune_type": "full", "adapter_path": str(output)}
    plan_run.check_output(TrainConfig.from_flat(**how), start)
    with pytest.raises(UserError) as refused:
        plan_run.check_output(TrainConfig.from_flat(**how, keep="best"), start)
    assert str(start) in refused.value.problem
    file = output / "model-00001-of-00001.safetensors"
    file.touch()
    with pytest.raises(UserError) as refused:
        plan_run.check_output(TrainConfig.from_flat(**how), tmp_path)
    assert file.name in refused.value.problem
    plan_run.check_output(TrainConfig.from_flat(adapter_path=str(output)), tmp_path)
    # What an earlier run has written there is replaced.
    (output / INDEX_FILE).write_text(json.dumps({"weight_map": {"weight": file.name}}))
    plan_run.check_output(TrainConfig.from_flat(**how), tmp_path)


@pytest.mark.parametrize("place", ["out/last", "file"])
def test_a_full_fine_tune_takes_no_place_of_a_file(place: str, tmp_path: Path) -> None:
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    output = tmp_path / place.removesuffix("/last")
    config = TrainConfig.from_flat(fine_tune_type="full", keep="best", adapter_path=str(output))
    with pytest.raises(UserError) as refused:
        plan_run.check_output(config, tmp_path / "model")
    assert f"--adapter-path {path}" in refused.value.problem
    assert path.read_text() == "mine"


def test_a_trace_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "trace"
    with pytest.raises(UserError) as refused:
        plan_run.check_output(TrainConfig.from_flat(trace=str(path)), tmp_path)
    assert f"--trace {path}" in refused.value.problem


def test_trace_and_metrics_are_two_files(tmp_path: Path) -> None:
    there = str(tmp_path / "run.json")
    with pytest.raises(UserError) as refused:
        plan_run.check_output(
            TrainConfig.from_flat(
                trace=there, metrics_file=str(tmp_path / "x" / ".." / "run.json")
            ),
            tmp_path,
        )
    assert there in refused.value.problem


def two_macs(mib_0: float, mib_1: float, host: str = "mac-{}") -> Cluster:
    """Two ranks that may take so much memory, of whose speed nothing is known."""
    machines = tuple(
        Machine(host=host.format(rank), memory=round(mib * MIB))
        for rank, mib in enumerate((mib_0, mib_1))
    )
    return Cluster(machines=machines, memory_fraction=1.0, backend="cpu")


def test_each_rank_is_planned_for_its_share(small_tokenizer: Path, tmp_path: Path) -> None:
    """Three quarters of the MLP are on rank 0: no other rank needs memory for so much."""
    model = small_directory(tmp_path / "model", small_tokenizer, intermediate_size=16384)
    config = TrainConfig.from_flat(
        model=str(model),
        fine_tune_type="full",
        num_layers=-1,
        batch_size=1,
        max_seq_length=16,
        recompute="full",
        tensor_parallel=2,
        tensor_shares="3,1",
    )
    enough = [each.planned.peak for each in planned_for(config, two_macs(900, 900)).limits]
    assert enough[0] > enough[1] + 32 * MIB
    first, second = (each / MIB for each in enough)
    planned_for(config, two_macs(first + 1, second + 1))
    for rank, less in enumerate([(first - 1, second + 1), (first + 1, second - 1)]):
        with pytest.raises(UserError) as refused:
            planned_for(config, two_macs(*less))
        assert f"(mac-{rank}) would take" in refused.value.problem


@pytest.mark.parametrize(
    ("options", "problem", "remedy"),
    [
        pytest.param(
            {"pipeline_stages": 1, "batch_size": 3},
            "--batch-size 3 cannot be divided among 2 replicas",
            "--replica-rows auto",
            id="rows for two replicas",
        ),
        pytest.param({"num_layers": 6}, "--num-layers 6: the model has 5 layers", "", id="layers"),
        pytest.param(
            {"partitioner": "hetero", "schedule": "zb-v"},
            "hetero",
            "one stage",
            id="a V with an order",
        ),
        pytest.param(
            {"data_parallel": 1, "memory_limit": "0.1MiB"},
            r"rank \d \(mac-\d\) would take ",
            r"--memory-limit \d+MiB or more",
            id="a limit below what it takes",
        ),
    ],
)
def test_options_that_do_not_fit_the_run_are_named(
    options: dict[str, Any], problem: str, remedy: str, small: Path
) -> None:
    config = TrainConfig.from_flat(model=str(small), **{"num_layers": -1, **options})
    with pytest.raises(UserError) as refused:
        planned_for(config, two_macs(900, 900))
    assert re.search(problem, refused.value.problem)
    assert re.search(remedy, refused.value.remedy or refused.value.problem)


def test_a_stage_map_of_other_layers_is_named(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "stages.yaml"
    path.write_text("stages:\n  - num_layers: 2\n  - num_layers: 2\n")
    config = TrainConfig.from_flat(model=str(small), num_layers=-1, stage_map=str(path))
    with pytest.raises(UserError) as refused:
        planned_for(config, two_macs(900, 900))
    assert str(path) in refused.value.problem
    assert "4 layers (2 + 2)" in refused.value.problem
    assert "the model has 5" in refused.value.problem


def test_no_rows_are_packed_where_a_layer_depends_on_a_tokens_place_in_its_row(
    small: Path,
) -> None:
    config = TrainConfig.from_flat(model=str(small), num_layers=-1, pack=True)
    facts = facts_of(config, two_macs(900, 900))
    check_layout(config.spec, facts)
    shape = replace(facts.to_train.workload.shape, has_dynamic_rope=True)
    training = replace(facts.to_train, workload=replace(facts.to_train.workload, shape=shape))
    with pytest.raises(UserError) as refused:
        check_layout(config.spec, replace(facts, training=training))
    assert "--pack" in refused.value.problem


@pytest.mark.parametrize("options", [{"keep": "best"}, {"early_stop": 3}])
def test_without_a_validation_set_there_is_no_best(options: dict[str, Any]) -> None:
    config = TrainConfig.from_flat(train=True, data="my/rows", **options)
    with pytest.raises(UserError) as refused:
        plan_run.check_valid(config, {"train": 8, "valid": 0, "test": 0})
    assert "my/rows has no validation set" in refused.value.problem
    plan_run.check_valid(config, {"train": 8, "valid": 1, "test": 0})


def test_a_run_that_trains_has_few_widths_for_rows_of_many_lengths(tmp_path: Path) -> None:
    """That they change no loss is in ``tests/unit/engine/test_batches.py``."""
    rows = [{"text": "a" * length} for length in range(10, 1400, 30)]
    data = write(tmp_path / "rows", train=rows, test=rows)
    letters: Any = Letters()
    for train in (True, False):
        config = TrainConfig.from_flat(data=data, train=train, test=True, val_batches=0)
        sets = read_data(config.wanted_data, letters, None)
        lengths = plan_run.lengths_of(config, sets)
        assert lengths.widths == (few_widths(sets.test.lengths, 2048) if train else ())
        assert len(lengths.widths) == (MOST_WIDTHS if train else 0)
