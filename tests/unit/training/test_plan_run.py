"""What a run needs is checked before its weights are loaded."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shardmlx.common.reporter import Reporter
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.crew import Crew, lead
from shardmlx.errors import UserError
from shardmlx.loading import rank_setup
from shardmlx.modelfiles.safetensors_header import INDEX_FILE
from shardmlx.training import plan_run
from shardmlx.training.worker import TrainWorker
from testbed.small_models import small_directory
from tests.helpers.local_transport import LocalNetwork, LocalTransport


@pytest.mark.parametrize(
    ("services", "line"),
    [
        ("wandb", "--report-to wandb is not installed: pip install wandb"),
        ("SwanLab, wandb", "--report-to swanlab is not installed: pip install swanlab"),
    ],
)
def test_a_service_without_its_package_says_what_to_install(
    services: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_run, "find_spec", lambda name: None)
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


def test_each_rank_is_planned_for_its_share(
    small_tokenizer: Path, pirate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three quarters of the MLP are on rank 0: no other rank needs memory for so much."""
    monkeypatch.setattr(rank_setup, "set_limits", lambda limits: None)
    monkeypatch.setattr(rank_setup, "resident_bytes", lambda: 0)  # earlier tests' is here too
    model = small_directory(tmp_path / "model", small_tokenizer, intermediate_size=16384)

    def processes(mib_0: float, mib_1: float) -> list[int]:
        hostfile = tmp_path / "hosts"
        memory = {"mac-0": mib_0, "mac-1": mib_1}
        lines = [f"{host} slots=1 # memory={mib / 0.75:.3f}MiB\n" for host, mib in memory.items()]
        hostfile.write_text("".join(lines))
        config = TrainConfig.from_flat(
            model=str(model),
            data=str(pirate),
            adapter_path=str(tmp_path / "out"),
            fine_tune_type="full",
            num_layers=-1,
            batch_size=1,
            max_seq_length=16,
            recompute="full",
            tensor_parallel=2,
            tensor_shares="3,1",
            hostfile=str(hostfile),
        )

        def plan(transport: LocalTransport) -> list[int] | None:
            transport.hosts = tuple(memory)

            def work(crew: Crew[TrainWorker]) -> list[int]:
                reporter = Reporter(quiet=True)
                plan_run.open_for_training(config, crew, reporter)
                run, _ = plan_run.plan_run(config, crew, reporter)
                return [each.planned.peak + each.budget.outside for each in run.limits]

            with closing(TrainWorker(transport, Reporter(quiet=True))) as worker:
                return lead(transport, worker, work)

        first: list[int]
        first, _ = LocalNetwork(2).run(plan)
        return first

    enough = processes(900, 900)
    assert enough[0] > enough[1] + 2**25
    first, second = (each / 2**20 for each in enough)
    processes(first + 9, second + 9)
    for rank, less in enumerate([(first - 9, second + 9), (first + 9, second - 9)]):
        with pytest.raises(UserError) as refused:
            processes(*less)
        assert f"(mac-{rank}) would take" in refused.value.problem
