"""What all runs set up before they load: the same on all ranks, or the same error on all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from shardmlx.common.reporter import Reporter
from shardmlx.config.specs import MachineOptions, ModelSource
from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.crew import Crew, lead
from shardmlx.distributed.transport import Transport
from shardmlx.loading import rank_setup
from shardmlx.loading.local_files import LocalFiles
from shardmlx.loading.rank_setup import (
    ModelWorker,
    OpenedModel,
    gather_facts,
    open_everywhere,
)
from shardmlx.modelfiles.model_files import open_model
from shardmlx.planning.facts.job_facts import Facts
from shardmlx.planning.facts.workload import model_sizes
from testbed.tiny_models import save_model_directory, tiny_config
from tests.helpers.local_transport import LocalNetwork

GIB = 1 << 30
QUIET = Reporter(quiet=True)


class Elsewhere(LocalFiles):
    """The files of a rank that finds them in a directory of its own."""

    def __init__(self, transport: Transport, place: Path) -> None:
        super().__init__(transport, QUIET)
        self._place = place

    def use_found(self) -> None:
        self.path = self._place


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model_directory(tmp_path / "model", tiny_config(layers=2, eos_token_id=1))


def on_two_ranks(work: Callable[[Crew[ModelWorker]], Any]) -> list[Any]:
    """What rank 0 returns and how rank 1 leaves; or the messages of the errors that both raise."""

    def rank(transport: Transport) -> Any:
        with closing(ModelWorker(transport, QUIET)) as worker:
            try:
                return lead(transport, worker, work)
            except AgreedError as error:
                return str(error)

    return LocalNetwork(2, timeout=10).run(rank)


def opened(model: Path, crew: Crew[ModelWorker]) -> OpenedModel:
    source = ModelSource(model=str(model), revision=None, weights="auto", weight_cache=None)
    return open_everywhere(crew, source, "", QUIET)


def inputs(
    model: Path,
    crew: Crew[ModelWorker],
    stage_map: str | None = None,
    later: int = 0,
    **options: Any,
) -> Facts:
    machines = MachineOptions(**{"hostfile": None, "memory_limit": None, **options})
    opened(model, crew)
    sizes = model_sizes(open_model(str(model)), None)
    return gather_facts(crew, sizes, machines, stage_map, later)


def test_every_rank_opens_the_same_model(model: Path) -> None:
    def digests(crew: Crew[ModelWorker]) -> list[str]:
        opened(model, crew)
        return crew.all(ModelWorker.open, "")

    (first, second), _ = on_two_ranks(digests)
    assert first == second
    found, _ = on_two_ranks(partial(opened, model))
    assert (found.path, found.adapters, found.shape.num_layers) == (model, "", 2)


def test_a_rank_whose_config_says_something_else_is_named(model: Path, tmp_path: Path) -> None:
    other = save_model_directory(tmp_path / "other", tiny_config(layers=2, rope_theta=5.0))

    def rank(transport: Transport) -> None:
        worker = ModelWorker(transport, QUIET)
        place = model if transport.rank == 0 else other

        def work(crew: Crew[ModelWorker]) -> None:
            open_everywhere(crew, ModelSource(model=str(model)), None, QUIET)

        worker.model_files = Elsewhere(transport, place)
        with closing(worker):
            lead(transport, worker, work)

    with pytest.raises(AgreedError, match="rank 1 on localhost, unlike rank 0"):
        LocalNetwork(2, timeout=10).run(rank)


@pytest.mark.parametrize(("text", "fault"), [("{", "config.json"), ("{}", "type None")])
def test_a_bad_configuration_is_the_error_of_all_ranks(model: Path, text: str, fault: str) -> None:
    (model / "config.json").write_text(text)
    first, second = on_two_ranks(partial(opened, model))
    assert first == second
    assert fault in first


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="there is a GPU")
def test_a_device_that_a_rank_lacks_is_the_error_of_all_ranks(model: Path) -> None:
    source = ModelSource(model=str(model), device="gpu")

    first, second = on_two_ranks(lambda crew: open_everywhere(crew, source, None, QUIET))
    assert first == second
    assert "--device gpu" in first
    assert "--device auto" in first


def test_a_run_is_planned_from_what_all_ranks_have(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This process holds what other tests left in it.
    monkeypatch.setattr(rank_setup, "resident_bytes", lambda: GIB // 2)
    (tmp_path / "hosts").write_text("localhost slots=2 # memory=8GiB\n")
    (tmp_path / "map.yaml").write_text("stages:\n- {num_layers: 1}\n- {num_layers: 1}\n")
    first, _ = on_two_ranks(
        partial(
            inputs,
            model,
            hostfile=str(tmp_path / "hosts"),
            memory_limit=2 * GIB,
            stage_map=str(tmp_path / "map.yaml"),
        )
    )
    assert [budget.most for budget in first.budgets] == [4 * GIB] * 2
    assert [budget.process for budget in first.budgets] == [2 * GIB] * 2
    for rank, budget in enumerate(first.budgets):
        assert 0 < budget.outside <= GIB // 2 + rank_setup.GROWTH
        assert first.cluster.capacity(rank) == 2 * GIB - budget.outside
    assert first.stage_map.partition.sizes == (1, 1)
    assert first.model.shape.num_layers == 2


@pytest.mark.parametrize("option", ["hostfile", "profile", "stage_map"])
def test_a_file_that_only_rank_0_reads_is_the_error_of_all_ranks(model: Path, option: str) -> None:
    options: dict[str, Any] = {option: "nowhere.file"}
    first, second = on_two_ranks(partial(inputs, model, **options))
    assert first == second
    assert "nowhere.file" in first


def test_bytes_for_requests_are_those_of_rank_0(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_setup, "resident_bytes", lambda: GIB // 2)
    plain, _ = on_two_ranks(partial(inputs, model))
    later, _ = on_two_ranks(partial(inputs, model, later=5))
    assert later.budgets[0].outside == plain.budgets[0].outside + 5
    assert later.budgets[1].outside == plain.budgets[1].outside
