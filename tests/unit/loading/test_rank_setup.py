"""What all runs set up before they load: the same on all ranks, or the same error on all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from shardmlx.common.reporter import Reporter
from shardmlx.config.specs import BatchOptions, FineTune, MachineOptions, ModelSource
from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.cluster import Cluster
from shardmlx.costmodel.workload import ModelSizes, Workload, model_sizes
from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.loading import rank_setup
from shardmlx.loading.rank_setup import PlanInputs, gather_plan_inputs, open_on_all_ranks
from shardmlx.modelfiles.model_files import open_model
from tests.helpers.local_transport import LocalNetwork
from tests.helpers.models_and_batches import save_model_directory, tiny_config

GIB = 1 << 30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model_directory(tmp_path / "model", tiny_config(layers=2, eos_token_id=1))


def on_two_ranks(work: Callable[[Transport], Any]) -> list[Any]:
    """The results of two ranks, or the messages of the errors that both raise."""

    def rank(transport: Transport) -> Any:
        try:
            return work(transport)
        except AgreedError as error:
            return str(error)

    return LocalNetwork(2, timeout=10).run(rank)


def opened(model: Path, transport: Transport) -> Any:
    source = ModelSource(model=str(model), revision=None, weights="auto", weight_cache=None)
    with open_on_all_ranks(transport, Reporter(quiet=True), source, "") as found:
        return found.path, found.adapters, found.shape.num_layers, found.config, found.digest


def inputs(
    model: Path, transport: Transport, stage_map: str | None = None, **options: Any
) -> PlanInputs[ModelSizes]:
    machines = MachineOptions(**{"hostfile": None, "memory_limit": None, **options})
    read = partial(model_sizes, open_model(str(model)), None)
    return gather_plan_inputs(transport, read, machines, stage_map)


def test_every_rank_opens_the_same_model(model: Path) -> None:
    first, second = on_two_ranks(partial(opened, model))
    assert first == second
    assert first[:3] == (model, "", 2)


@pytest.mark.parametrize(("text", "fault"), [("{", "config.json"), ("{}", "type None")])
def test_a_bad_configuration_is_the_error_of_all_ranks(model: Path, text: str, fault: str) -> None:
    (model / "config.json").write_text(text)
    first, second = on_two_ranks(partial(opened, model))
    assert first == second
    assert fault in first


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="there is a GPU")
def test_a_device_that_a_rank_lacks_is_the_error_of_all_ranks(model: Path) -> None:
    source = ModelSource(model=str(model), device="gpu")

    def work(transport: Transport) -> None:
        with open_on_all_ranks(transport, Reporter(quiet=True), source, None):
            pass

    first, second = on_two_ranks(work)
    assert first == second
    assert "--device gpu" in first
    assert "--device auto" in first


def test_what_a_run_is_planned_from_is_the_same_on_all_ranks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process holds what other tests left in it.
    monkeypatch.setattr(rank_setup, "resident_bytes", lambda: GIB // 2)
    (tmp_path / "hosts").write_text("localhost slots=2 # memory=8GiB\n")
    (tmp_path / "map.yaml").write_text("stages:\n- {num_layers: 1}\n- {num_layers: 1}\n")
    first, second = on_two_ranks(
        partial(
            inputs,
            model,
            hostfile=str(tmp_path / "hosts"),
            memory_limit=2 * GIB,
            stage_map=str(tmp_path / "map.yaml"),
        )
    )
    assert first == second
    assert [budget.most for budget in first.budgets] == [4 * GIB] * 2
    assert [budget.process for budget in first.budgets] == [2 * GIB] * 2
    for rank, budget in enumerate(first.budgets):
        assert 0 < budget.outside <= GIB // 2 + rank_setup.GROWTH
        assert first.cluster.capacity(rank) == 2 * GIB - budget.outside
    assert first.stage_map.partition.sizes == (1, 1)
    assert first.sizes.shape.num_layers == 2


@pytest.mark.parametrize("option", ["hostfile", "profile", "stage_map"])
def test_a_file_that_only_rank_0_reads_is_the_error_of_all_ranks(model: Path, option: str) -> None:
    options: dict[str, Any] = {option: "nowhere.file"}
    first, second = on_two_ranks(partial(inputs, model, **options))
    assert first == second
    assert "nowhere.file" in first


def test_a_profile_of_other_work_is_found_before_anything_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UserError("p.json was measured with dtype 'bfloat16'", "measure again")

    monkeypatch.setattr(Cluster, "clock", fail)
    config = TrainConfig(num_layers=-1)
    read = partial(
        Workload.of, open_model(str(model)), FineTune.of(config), BatchOptions.of(config)
    )
    machines = MachineOptions(hostfile=None, memory_limit=None)
    work = partial(gather_plan_inputs, read_sizes=read, machines=machines, stage_map=None)
    expected = "p.json was measured with dtype 'bfloat16': measure again"
    assert on_two_ranks(work) == [expected, expected]
