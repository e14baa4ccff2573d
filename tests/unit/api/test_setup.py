"""The plan of a loop counts all that its ranks will hold, before any weight is read."""

from __future__ import annotations

import io
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from safetensors.numpy import load

from shardmlx.api.client import TrainClient, train_client
from shardmlx.api.plan import WAITING, LoopPlan
from shardmlx.api.setup import prepare
from shardmlx.api.worker import LoopWorker
from shardmlx.common.reporter import Reporter
from shardmlx.config.loop import LoopConfig
from shardmlx.distributed.crew import Crew, lead
from shardmlx.errors import UserError
from shardmlx.modelfiles.sources import ADAPTER_FILE
from shardmlx.planning.loop import COPIES, FLOAT32, SNAPSHOTS
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.loops import learn, on_ranks

pytestmark = pytest.mark.usefixtures("limited_to_a_test")

RANK = 16


def planned(model: Path, ranks: int = 1, **options: Any) -> LoopPlan:
    """Return the plan of ranks that were prepared with these options."""
    config = LoopConfig.from_flat(
        model=str(model), max_train_length=48, max_lora_rank=RANK, device="cpu", **options
    )

    def work(crew: Crew[LoopWorker]) -> LoopPlan:
        prepare(config.spec, crew)
        return crew.worker.plan

    def run(transport: LocalTransport) -> LoopPlan | None:
        with closing(LoopWorker(transport, Reporter(quiet=True))) as worker:
            return lead(transport, worker, work)

    plan = LocalNetwork(ranks, timeout=30).run(run)[0]
    assert isinstance(plan, LoopPlan)
    return plan


def peak(plan: LoopPlan) -> int:
    return sum(each.planned.peak for each in plan.limits)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_more_takes_weights_gradients_moments_and_snapshots(
    ranks: int, small: Path, tmp_path: Path
) -> None:
    weights = on_ranks(1, small, trained, max_lora_rank=RANK, state_dir=str(tmp_path))
    one, three = (planned(small, ranks, max_adapters=count) for count in (1, 3))
    assert (one.most_models, three.most_models) == (1, 3)
    assert peak(three) - peak(one) == 2 * (COPIES + SNAPSHOTS) * FLOAT32 * weights


def trained(client: TrainClient) -> int:
    """How many weights a LoRA of that rank has: a saved state without its optimizer has these."""
    model = client.create_model(rank=RANK)
    learn(model, range(1))
    model.save("a")
    with tarfile.open(fileobj=io.BytesIO(client.export("a"))) as tar:
        content = tar.extractfile(ADAPTER_FILE)
        assert content is not None
        return sum(each.size for each in load(content.read()).values())


def test_tokens_of_answers_take_their_keys_and_values(small: Path) -> None:
    few, many = (planned(small, cache_tokens=tokens) for tokens in (1024, 4096))
    layers, heads, size = 5, 2 * 2, 8
    more = peak(many) - peak(few)
    assert more >= (4096 - 1024) * layers * heads * size * FLOAT32 * 0.99


def test_ranks_between_two_requests_are_not_said_to_do_the_last_one(small: Path) -> None:
    seen: dict[int, list[str]] = {0: [], 1: []}

    def run(transport: LocalTransport) -> None:
        how = {"model": str(small), "max_train_length": 48, "device": "cpu"}
        with train_client(transport, quiet=True, **how) as client:
            if client is not None:
                seen[0].append(str(transport.activity))
                model = client.create_model(rank=RANK)
                client.sample([1, 2], max_tokens=2).result()
                assert client.service.sampler is not None
                client.service.sampler.pause()
                seen[0].append(str(transport.activity))
                learn(model, range(1))
                seen[0].append(str(transport.activity))
        seen[1].append(str(transport.activity))

    LocalNetwork(2, timeout=30).run(run)
    assert seen[0] == [WAITING] * 3
    assert seen[1] == [WAITING] * 2


def test_what_is_planned_is_enough(small: Path) -> None:
    plan = planned(small, max_adapters=2)

    def work(client: TrainClient) -> int:
        models = [client.create_model(rank=RANK, seed=seed) for seed in (0, 1)]
        mx.reset_peak_memory()
        for model in models:
            learn(model, range(2))
            client.sample([1, 2], model.snapshot(), max_tokens=8).result()
        return mx.get_peak_memory()

    others = mx.get_active_memory()  # of tests before in this process
    measured = on_ranks(1, small, work, max_adapters=2, max_lora_rank=RANK)
    assert measured - others < peak(plan)


def test_a_memory_that_is_too_small_is_refused_before_weights_are_read(small: Path) -> None:
    with pytest.raises(UserError) as found:
        planned(small, memory_limit=400 * 2**20, max_adapters=4000)
    assert "rank 0" in found.value.problem
