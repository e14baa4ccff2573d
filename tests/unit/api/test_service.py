"""The service answers clients on many threads, trains and samples by turns, and fails by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmlx.api.client import TrainClient
from shardmlx.api.requests import (
    CreateModel,
    ForwardBackward,
    LoopEnded,
    LoraOptions,
    LossRow,
    OptimStep,
    SamplePrompt,
    TakeSnapshot,
)
from shardmlx.api.service import TrainService
from shardmlx.errors import UserError
from shardmlx.pipeline.stage_map import StageMap, write_stage_map
from tests.helpers.loops import RATE, learn, on_ranks, rows_of

pytestmark = pytest.mark.usefixtures("limited_to_a_test")


def loss_rows(step: int) -> list[LossRow]:
    return [
        LossRow(
            row["tokens"].astype(np.int32),
            {"target_tokens": row["target_tokens"], "weights": row["weights"]},
        )
        for row in rows_of(step)
    ]


def client_of(service: TrainService, name: str, seed: int, steps: int) -> list[float]:
    """What a client on a thread of its own does: its losses."""
    service.submit(CreateModel(name, LoraOptions(4, seed))).result(30)
    losses = []
    for step in range(steps):
        loss = service.submit(ForwardBackward(name, loss_rows(step)))
        update = service.submit(OptimStep(name, RATE, weight_decay=0.01, grad_clip_norm=2.0))
        losses.append(loss.result(30).metrics["loss:sum"])
        update.result(30)
    return losses


def on_threads(service: TrainService, works: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run the service while clients work on threads; what these return."""
    results: list[Any] = [None] * len(works)

    def run(i: int) -> None:
        results[i] = works[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]

    def watch() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        service.close("all clients are done")

    watcher = threading.Thread(target=watch)
    watcher.start()
    service.run()
    watcher.join()
    return results


def test_clients_on_threads_have_the_curves_that_each_would_have_alone(small: Path) -> None:
    def work(client: TrainClient) -> list[list[float]]:
        alone = [learn(client.create_model(rank=4, seed=seed), range(4)) for seed in (0, 1)]
        works = [partial(client_of, client.service, f"client {seed}", seed, 4) for seed in (0, 1)]
        return [*alone, *on_threads(client.service, works)]

    *alone, first, second = on_ranks(2, small, work)
    assert [first, second] == alone


@pytest.mark.parametrize(
    ("ranks", "options", "model"),
    [
        pytest.param(2, {}, "small", id="2 ranks"),
        pytest.param(4, {"data_parallel": 2, "schedule": "zb-v"}, "small", id="2 x 2, zb-v"),
        pytest.param(2, {"schedule": "zb-v"}, "small_tied", id="zb-v, tied"),
    ],
)
def test_samples_of_a_snapshot_have_the_log_probabilities_of_forward(
    ranks: int, options: dict[str, Any], model: str, request: pytest.FixtureRequest
) -> None:
    """While another model trains; the snapshot does not move with the model that it is of. Other
    placements of stages are in ``test_sampling.py``."""
    path: Path = request.getfixturevalue(model)
    prompt = [5, 6, 7, 8]

    def work(client: TrainClient) -> list[tuple[np.ndarray, np.ndarray]]:
        model = client.create_model(rank=4)
        learn(model, range(2))
        snapshot = model.snapshot()
        other = client.create_model(rank=4, seed=3)
        before = None
        found = []
        for name in (None, snapshot):
            call = client.sample(prompt, name, count=3, max_tokens=12, seed=1, stop_ids=())
            learn(other, range(1))
            for answer in call.result().answers:
                tokens = [*prompt, *answer.tokens.tolist()]
                row = {"tokens": tokens[:-1], "target_tokens": tokens[1:]}
                of = model if name else client.create_model(rank=4)
                (logps,) = of.forward_backward([row], forward_only=True).result().logprobs
                found.append((answer.logprobs, logps[len(prompt) - 1 :]))
                if not name:
                    of.unload()
        call = client.sample(prompt, snapshot, max_tokens=8, temperature=0.0, stop_ids=())
        before = call.result().answers[0].tokens
        learn(model, range(2, 4))
        call = client.sample(prompt, snapshot, max_tokens=8, temperature=0.0, stop_ids=())
        assert call.result().answers[0].tokens.tolist() == before.tolist()
        client.drop_snapshot(snapshot)
        with pytest.raises(UserError):
            client.sample(prompt, snapshot).result()
        return found

    for sampled, trained in on_ranks(ranks, path, work, **options):
        np.testing.assert_allclose(sampled, trained, atol=1e-4)


def test_samples_are_refused_where_the_first_stage_is_not_on_rank_0(
    small: Path, tmp_path: Path
) -> None:
    stage_map = tmp_path / "map.yaml"
    write_stage_map(StageMap.from_sizes([2, 3], [1, 0]), stage_map)

    def work(client: TrainClient) -> list[UserError]:
        model = client.create_model(rank=4)
        learn(model, range(1))
        errors = []
        for call in (model.snapshot, lambda: client.sample([1, 2]).result()):
            with pytest.raises(UserError) as found:
                call()
            errors.append(found.value)
        learn(model, range(1, 2))
        return errors

    for error in on_ranks(2, small, work, stage_map=str(stage_map)):
        assert "map.yaml: stage 0 is on rank 1" in error.problem
        assert "rank 0" in error.remedy


def test_a_state_becomes_a_snapshot_without_a_model(small: Path, tmp_path: Path) -> None:
    def work(client: TrainClient) -> tuple[list[int], list[int]]:
        model = client.create_model(rank=4)
        learn(model, range(2))
        model.save("a")
        own = client.sample([5, 6], model.snapshot(), max_tokens=9, temperature=0.0, stop_ids=())
        expected = own.result().answers[0].tokens.tolist()
        model.unload()
        service = client.service
        service.finish(service.submit(TakeSnapshot("of a state", state="a")))
        found = client.sample([5, 6], "of a state", max_tokens=9, temperature=0.0, stop_ids=())
        return expected, found.result().answers[0].tokens.tolist()

    expected, found = on_ranks(2, small, work, state_dir=str(tmp_path))
    assert found == expected


def test_a_cancelled_request_is_not_carried_out_and_the_next_one_is(small: Path) -> None:
    def work(client: TrainClient) -> tuple[float, float]:
        service = client.service
        service.finish(service.submit(CreateModel("a", LoraOptions(4))))
        first = service.submit(ForwardBackward("a", loss_rows(0)))
        wrong = service.submit(ForwardBackward("a", loss_rows(1)))
        sample = service.submit(SamplePrompt([1, 2], max_tokens=50, stop_ids=()))
        wrong.cancel()
        sample.cancel()
        service.submit(OptimStep("a", RATE))
        value = service.finish(
            service.submit(ForwardBackward("a", loss_rows(2), forward_only=True))
        )
        assert first.done()
        model = client.create_model(rank=4)
        model.forward_backward(rows_of(0))
        model.optim_step(RATE)
        alone = model.forward_backward(rows_of(2), forward_only=True).result()
        return value.metrics["loss:sum"], alone.metrics["loss:sum"]

    value, alone = on_ranks(2, small, work)
    assert value == alone


def test_requests_fail_with_the_service(small: Path) -> None:
    def work(client: TrainClient) -> tuple[Future[Any], Future[Any]]:
        service = client.service
        waiting = service.submit(CreateModel("a", LoraOptions(4)))
        service.close("the door is shut")
        service.run()
        return waiting, service.submit(CreateModel("b", LoraOptions(4)))

    for future in on_ranks(1, small, work):
        with pytest.raises(LoopEnded, match="the door is shut"):
            future.result(0)


def test_many_rows_are_computed_in_turns_with_samples(small: Path) -> None:
    """A request of 600 rows while somebody samples: both come, and the sums are those of parts."""

    def work(client: TrainClient) -> tuple[float, float, int]:
        model = client.create_model(rank=2)
        rows = [row for step in range(100) for row in rows_of(step)]
        sample = client.sample([1, 2, 3], max_tokens=60, stop_ids=())
        whole = model.forward_backward(rows, forward_only=True)
        first = whole.result().metrics["loss:sum"]
        parts = [
            model.forward_backward(rows[i : i + 100], forward_only=True) for i in range(0, 600, 100)
        ]
        total = sum(part.result().metrics["loss:sum"] for part in parts)
        return first, total, len(sample.result().answers[0].tokens)

    first, total, count = on_ranks(2, small, work)
    assert first == pytest.approx(total, rel=1e-6)
    assert count == 60
