"""What a run needs is checked before its weights are loaded."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from shardmlx.common.reporter import Reporter
from shardmlx.config.train import TrainConfig
from shardmlx.distributed.crew import Crew, lead
from shardmlx.errors import UserError
from shardmlx.loading import rank_setup
from shardmlx.training import plan_run
from shardmlx.training.worker import TrainWorker
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.small_models import small_directory


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
    config = TrainConfig(report_to=services, adapter_path=str(tmp_path))
    with pytest.raises(UserError) as refused:
        plan_run.check_output(config, tmp_path / "model")
    assert str(refused.value).startswith(line)


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
        config = TrainConfig(
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
