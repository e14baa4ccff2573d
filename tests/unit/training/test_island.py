"""Islands train alone, exchange their weights through a hub, and do what the formulas say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
import numpy as np
import pytest

from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.chips import machines_of
from shardmlx.errors import UserError
from shardmlx.islands.client import Hub, HubAway
from shardmlx.islands.encodings import ENCODINGS
from shardmlx.islands.protocol import body_bytes
from shardmlx.planning.island_lines import exchanges
from shardmlx.planning.training_plan import plan_training
from shardmlx.training import island
from shardmlx.training.command import train_model
from tests.helpers.island_hub import RunningHub, running_hub
from tests.helpers.islands import (
    Nesterov,
    check_equal,
    islands_of,
    saved,
    simulated,
    train_islands,
    use_tokens,
    weights_of,
)
from tests.helpers.letters import write
from tests.helpers.local_transport import LocalNetwork

pytestmark = pytest.mark.usefixtures("limited_to_a_test")

H, ROUNDS = 2, 2
LORA: dict[str, Any] = {"num_layers": -1, "learning_rate": 1e-2}
FULL: dict[str, Any] = {"fine_tune_type": "full", "num_layers": -1, "learning_rate": 1e-3}


@pytest.fixture
def islands(small: Path, tmp_path: Path) -> Callable[..., dict[str, dict[str, Any]]]:
    def make(count: int, **options: Any) -> dict[str, dict[str, Any]]:
        return islands_of(small, tmp_path, count, **{"iters": H * ROUNDS, **options})

    return make


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> Callable[[RunningHub], None]:
    return partial(use_tokens, monkeypatch)


def test_diloco_is_the_simulation_to_the_bit(
    islands: Callable[..., dict[str, dict[str, Any]]],
    tokens: Callable[[RunningHub], None],
    tmp_path: Path,
) -> None:
    made = islands(3, **FULL)
    with running_hub(tmp_path / "hub", ",".join(made), inner_steps=H) as hub:
        tokens(hub)
        train_islands(hub, made, {"bob": 2})  # a pipeline
        assert hub.rounds.version == ROUNDS
        expected = simulated(made, tmp_path, Nesterov(), every=H)
        check_equal(weights_of(hub), expected)
        for name in made:
            check_equal(saved(made, name), expected)
        check_planned(hub, made, FULL)


def check_planned(hub: RunningHub, made: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check that ``plan --islands`` counts the bytes of this hub's fragment."""
    config = TrainConfig(model=made["ann"]["model"], **options)
    planned = plan_training(config, machines_of("M2 16GB"))
    (fragment,) = hub.rounds.run.fragments
    for each in exchanges(planned, [20e6, 100e6])[: len(ENCODINGS)]:
        assert each.nbytes == body_bytes(fragment.tensors, each.way)


def average(name: str, weights: np.ndarray, mix: np.ndarray) -> np.ndarray:
    return np.asarray(weights - mix)


def test_fedavg_weighs_islands_by_their_rows(
    islands: Callable[..., dict[str, dict[str, Any]]],
    tokens: Callable[[RunningHub], None],
    tmp_path: Path,
) -> None:
    made = islands(2, **LORA)
    made["bob"]["batch_size"] = 4
    with running_hub(tmp_path / "hub", "ann,bob", inner_steps=H, mode="fedavg") as hub:
        tokens(hub)
        train_islands(hub, made, {})
        rows = {"ann": H * 2, "bob": H * 4}
        expected = simulated(made, tmp_path, average, every=H, weights=rows)
        check_equal(weights_of(hub), expected)
        check_planned(hub, made, LORA)


def test_elastic_averaging_pulls_islands_and_hub_to_each_other(
    islands: Callable[..., dict[str, dict[str, Any]]],
    tokens: Callable[[RunningHub], None],
    tmp_path: Path,
) -> None:
    made = islands(2, **LORA)
    how: dict[str, Any] = {"inner_steps": H, "outer_optimizer": "elastic:0.25"}
    with running_hub(tmp_path / "hub", "ann,bob", **how) as hub:
        tokens(hub)
        train_islands(hub, made, {})

        def outer(name: str, weights: np.ndarray, mix: np.ndarray) -> np.ndarray:
            return np.asarray(weights - np.float32(0.5) * mix)

        check_equal(weights_of(hub), simulated(made, tmp_path, outer, every=H, elastic=0.25))


def test_a_parameter_server_is_data_parallel(
    islands: Callable[..., dict[str, dict[str, Any]]],
    tokens: Callable[[RunningHub], None],
    tmp_path: Path,
) -> None:
    """Rows of one length weigh the same alone and together."""
    made = islands(2, optimizer="sgd", num_layers=-1, learning_rate=0.03, iters=3)
    rows = {name: [{"text": f"{i} says {k}"} for i in (3, 8)] for k, name in enumerate(made)}
    for name, each in made.items():
        each["data"] = write(tmp_path / f"rows-{name}", train=rows[name], valid=rows[name])
    with running_hub(tmp_path / "hub", "ann,bob", mode="parameter-server") as hub:
        tokens(hub)
        train_islands(hub, made, {})
        assert hub.rounds.version == made["ann"]["iters"]
        found = weights_of(hub)
    both = [*rows["ann"], *rows["bob"]]
    whole = {**made["ann"], "batch_size": 4, "adapter_path": str(tmp_path / "whole")}
    whole["data"] = write(tmp_path / "both", train=both, valid=both)
    LocalNetwork(1).run(lambda rank: train_model(TrainConfig(**whole), rank))
    for name, array in saved({"whole": whole}, "whole").items():
        np.testing.assert_allclose(found[name], array, atol=1e-6, err_msg=name)


def test_async_takes_each_report_at_once(
    islands: Callable[..., dict[str, dict[str, Any]]],
    tokens: Callable[[RunningHub], None],
    tmp_path: Path,
) -> None:
    made = islands(2, **LORA)
    with running_hub(tmp_path / "hub", "ann,bob", inner_steps=H, mode="async") as hub:
        tokens(hub)
        train_islands(hub, made, {"ann": 2})
        assert hub.rounds.version == 2 * ROUNDS
        newest = weights_of(hub)
        is_newest = [
            all(np.array_equal(newest[each], array) for each, array in saved(made, name).items())
            for name in made
        ]
        assert any(is_newest)


def test_islands_that_send_less_have_the_hubs_weights_and_learn(
    islands: Callable[..., dict[str, dict[str, Any]]],
    tokens: Callable[[RunningHub], None],
    tmp_path: Path,
) -> None:
    made = islands(2, **LORA, iters=4 * H, val_batches=2)
    options: dict[str, Any] = {"inner_steps": H, "encoding": "low-rank:2", "fragments": 2}
    with running_hub(tmp_path / "hub", "ann,bob", **options) as hub:
        tokens(hub)
        events = train_islands(hub, made, {"ann": 2})
        assert hub.rounds.version == 4
        newest = weights_of(hub)
    tensors = hub.rounds.run.fragments[1].tensors
    for name in made:
        check_equal(saved(made, name), {each.name: newest[each.name] for each in tensors})
    # The hub lets the first island validate for all.
    first, last = (values["loss"] for event, values in events["ann"] if event == "val")
    assert last < first - 0.3


@pytest.mark.parametrize("encoding", ["int8", "top-k:0.2", "low-rank:2"])
def test_what_an_encoding_leaves_out_is_told_later(
    encoding: str,
    islands: Callable[..., dict[str, dict[str, Any]]],
    tokens: Callable[[RunningHub], None],
    tmp_path: Path,
) -> None:
    """It learns in the first round alone; then it has its rest to tell, and the hub as well."""
    falls = {"name": "step_decay", "arguments": [1e-2, 0.0, H]}
    made = islands(1, **LORA, iters=10 * H, optimizer="sgd", lr_schedule=falls)
    how: dict[str, Any] = {"inner_steps": H, "outer_optimizer": "average", "encoding": encoding}
    with running_hub(tmp_path / "hub", "ann", **how) as hub:
        tokens(hub)
        train_islands(hub, made, {"ann": 2})
        newest = weights_of(hub)
    config = TrainConfig(**{**made["ann"], "iters": H})
    LocalNetwork(1, timeout=60).run(lambda rank: train_model(config, rank))
    for name, array in saved(made, "ann").items():
        learnt = np.abs(array).max()
        np.testing.assert_allclose(newest[name], array, atol=0.01 * learnt, err_msg=name)


def test_an_island_outlives_a_hub_that_is_away_and_loses_nothing(
    islands: Callable[..., dict[str, dict[str, Any]]],
    tokens: Callable[[RunningHub], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the average for an outer optimizer, one island trains as if it were alone. Of its first
    weights, it never hears that they have come."""
    made = islands(1, **LORA, iters=4 * H, optimizer="sgd")
    put, seeds = Hub.put, list[str]()

    def put_unheard(hub: Hub, path: str, body: IO[bytes]) -> None:
        put(hub, path, body)
        if path.endswith("seed"):
            seeds.append(path)
            raise HubAway("the answer got lost")

    monkeypatch.setattr(Hub, "put", put_unheard)
    how: dict[str, Any] = {"inner_steps": H, "outer_optimizer": "average"}
    with ExitStack() as stack:
        hub = stack.enter_context(running_hub(tmp_path / "hub", "ann", **how))
        tokens(hub)
        port = int(hub.url.rpartition(":")[2])

        def listen(event: str, values: Mapping[str, Any]) -> None:
            if event == "train" and values["step"] == H + 1:
                stack.close()
                monkeypatch.setattr(island, "PATIENCE", 0.3)
            if event == "train" and values["step"] == 3 * H - 1:
                again = running_hub(tmp_path / "hub", "ann", port=port, **how)
                restarted.append(stack.enter_context(again))
                monkeypatch.setattr(island, "PATIENCE", 60.0)

        restarted: list[RunningHub] = []
        config = TrainConfig(**made["ann"], island=hub.url, name="ann")
        LocalNetwork(2).run(lambda rank: train_model(config, rank, on_event=listen))
        (hub,) = restarted
        # If the report of step 2 H came later than step 3 H, that step made none.
        assert hub.rounds.version in (3, 4)
        check_equal(saved(made, "ann"), weights_of(hub))
    assert seeds == ["/fragments/0/seed"]  # the second is told that there are weights
    assert f"{hub.url} gave no new weights in 0.3 s" in capsys.readouterr().out
    alone = {**made["ann"], "adapter_path": str(tmp_path / "alone")}
    LocalNetwork(2).run(lambda rank: train_model(TrainConfig(**alone), rank))
    for name, array in saved({"alone": alone}, "alone").items():
        np.testing.assert_allclose(saved(made, "ann")[name], array, atol=1e-6, err_msg=name)


def test_an_island_that_joins_anew_replaces_none_of_its_reports_that_wait(
    islands: Callable[..., dict[str, dict[str, Any]]],
    tokens: Callable[[RunningHub], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a checkpoint it has nothing of what it reported before."""
    made = islands(1, **LORA, iters=H)
    monkeypatch.setattr(island, "PATIENCE", 4.0)
    with running_hub(tmp_path / "hub", "ann,bob", inner_steps=H) as hub:
        tokens(hub)
        hub.rounds.run.lives["bob"] = 1
        hub.rounds.hear("bob")  # the round waits for it
        for _ in range(2):
            train_islands(hub, made, {})
        pending = hub.rounds.fragment(0).pending
        assert [(each.life, each.base) for each in pending] == [(1, 0), (2, 0)]


def test_an_island_whose_difference_is_refused_goes_on_with_the_hubs_weights(
    islands: Callable[..., dict[str, dict[str, Any]]],
    tokens: Callable[[RunningHub], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is alone: nobody else makes a new version, for which it could wait."""
    encoded, refused = island.Island._encoded, list[str]()

    def encoded_once_as_nan(self: island.Island, name: str) -> np.ndarray:
        data = encoded(self, name)
        if not refused:
            refused.append(name)
            data[:4] = np.array([np.nan], np.float32).view(np.uint8)
        return data

    made = islands(1, **LORA)
    monkeypatch.setattr(island.Island, "_encoded", encoded_once_as_nan)
    with running_hub(tmp_path / "hub", "ann", inner_steps=H) as hub:
        tokens(hub)
        train_islands(hub, made, {"ann": 2})
        assert (hub.rounds.version, hub.rounds.islands["ann"].refused) == (ROUNDS - 1, 1)
        check_equal(saved(made, "ann"), weights_of(hub))
    assert f"update {H}: the hub refused" in capsys.readouterr().out


def test_a_checkpoint_of_another_run_of_a_hub_is_refused_by_its_name(
    islands: Callable[..., dict[str, dict[str, Any]]],
    tokens: Callable[[RunningHub], None],
    tmp_path: Path,
) -> None:
    kept = {"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_every": H}
    made, runs = islands(1, **LORA, **kept), list[str]()
    for path in ("hub", "another"):
        with running_hub(tmp_path / path, "ann", inner_steps=H) as hub:
            tokens(hub)
            if not runs:
                train_islands(hub, made, {})
                runs.append(hub.rounds.run.id)
                continue
            made["ann"]["iters"] += H
            with pytest.raises(UserError, match=runs[0]) as refused:
                train_islands(hub, made, {})
            assert hub.rounds.run.id in refused.value.problem
            assert "--checkpoint-dir" in refused.value.remedy


BF16: dict[str, Any] = {"dtype": "bfloat16", "master_weights": True, "zero": 1}


@pytest.mark.parametrize(
    ("encoding", "options"),
    [
        pytest.param("int8", {"zero": 3}, id="weights divided"),
        pytest.param("top-k:0.1", {**BF16, "grad_accumulation_steps": 2}, id="master weights"),
    ],
)
def test_replicas_that_train_on_while_they_wait_end_with_the_hubs_weights(
    encoding: str,
    options: dict[str, Any],
    islands: Callable[..., dict[str, dict[str, Any]]],
    tokens: Callable[[RunningHub], None],
    tmp_path: Path,
) -> None:
    iters = H * ROUNDS * options.get("grad_accumulation_steps", 1)
    made = islands(2, **FULL, iters=iters, pipeline_stages=1, **options)
    how: dict[str, Any] = {"inner_steps": H, "overlap": 1, "fragments": 2, "encoding": encoding}
    with running_hub(tmp_path / "hub", "ann,bob", **how) as hub:
        tokens(hub)
        train_islands(hub, made, {"ann": 2})
        assert [each["version"] for each in hub.rounds.status()["fragments"]] == [ROUNDS] * 2
        newest = weights_of(hub)
        tensors = {each.name: each for each in hub.rounds.run.fragments[-1].tensors}
    for name in made:
        found = saved(made, name)
        if "dtype" in options:
            newest = {each: rounded(array) for each, array in newest.items()}
        check_equal(found, {each: newest[each] for each in tensors})


def rounded(array: np.ndarray) -> np.ndarray:
    return np.array(mx.array(array).astype(mx.bfloat16).astype(mx.float32))
