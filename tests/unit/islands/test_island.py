"""Islands train alone, exchange their weights through a hub, and do what the formulas say."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
import numpy as np
import pytest

from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.islands import hub_link
from shardmlx.islands.client import Heartbeat, Hub, HubAway
from shardmlx.islands.encodings import ENCODINGS
from shardmlx.islands.protocol import body_bytes
from shardmlx.islands.rounds import Rounds
from shardmlx.islands.shared_weights import SharedWeights
from shardmlx.planning.facts.chips import machines_of
from shardmlx.planning.report.island_lines import exchanges
from shardmlx.planning.training_plan import plan_training
from shardmlx.training.command import train_model
from testbed.rows import write
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
from tests.helpers.local_transport import LocalNetwork, alone
from tests.helpers.ports import free_port

pytestmark = pytest.mark.usefixtures("limited_to_a_test")

H, ROUNDS = 2, 2
LORA: dict[str, Any] = {"num_layers": -1, "learning_rate": 1e-2}
FULL: dict[str, Any] = {"fine_tune_type": "full", "num_layers": -1, "learning_rate": 1e-3}


Islands = dict[str, dict[str, Any]]


class Lab:
    """Islands of one test, and hubs for them."""

    def __init__(self, model: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._model, self._path, self._monkeypatch = model, path, monkeypatch

    def islands(self, count: int, **options: Any) -> Islands:
        return islands_of(self._model, self._path, count, **{"iters": H * ROUNDS, **options})

    @contextmanager
    def hub(self, names: Iterable[str], at: str = "hub", **options: Any) -> Iterator[RunningHub]:
        options = {"inner_steps": H, **options}
        with running_hub(self._path / at, ",".join(names), **options) as hub:
            use_tokens(self._monkeypatch, hub)
            yield hub

    def train(
        self, made: Islands, ranks: Mapping[str, int] | None = None, **how: Any
    ) -> RunningHub:
        """Train islands with a hub of their own, which has ended then."""
        with self.hub(made, **how) as hub:
            train_islands(hub, made, ranks or {})
        return hub


@pytest.fixture
def lab(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(small, tmp_path, monkeypatch)


def test_diloco_is_the_simulation_to_the_bit(lab: Lab, tmp_path: Path) -> None:
    made = lab.islands(3, **FULL)
    hub = lab.train(made, {"bob": 2})  # a pipeline
    assert hub.rounds.version == ROUNDS
    expected = simulated(made, tmp_path, Nesterov(), every=H)
    check_equal(weights_of(hub), expected)
    for name in made:
        check_equal(saved(made, name), expected)
    check_planned(hub, made, FULL)


def check_planned(hub: RunningHub, made: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check that ``plan --islands`` counts the bytes of this hub's fragment."""
    config = TrainConfig.from_flat(model=made["ann"]["model"], **options)
    planned = plan_training(config, machines_of("M2 16GB"))
    (fragment,) = hub.rounds.run.fragments
    for each in exchanges(planned, [20e6, 100e6])[: len(ENCODINGS)]:
        assert each.nbytes == body_bytes(fragment.tensors, each.way)


def average(name: str, weights: np.ndarray, mix: np.ndarray) -> np.ndarray:
    return np.asarray(weights - mix)


def test_fedavg_weighs_islands_by_their_rows(lab: Lab, tmp_path: Path) -> None:
    made = lab.islands(2, **LORA)
    made["bob"]["batch_size"] = 4
    hub = lab.train(made, mode="fedavg")
    rows = {"ann": H * 2, "bob": H * 4}
    check_equal(weights_of(hub), simulated(made, tmp_path, average, every=H, weights=rows))
    check_planned(hub, made, LORA)


def test_elastic_averaging_pulls_islands_and_hub_to_each_other(lab: Lab, tmp_path: Path) -> None:
    made = lab.islands(2, **LORA)
    hub = lab.train(made, outer_optimizer="elastic:0.25")

    def outer(name: str, weights: np.ndarray, mix: np.ndarray) -> np.ndarray:
        return np.asarray(weights - np.float32(0.5) * mix)

    check_equal(weights_of(hub), simulated(made, tmp_path, outer, every=H, elastic=0.25))


def test_a_parameter_server_is_data_parallel(lab: Lab, tmp_path: Path) -> None:
    """Rows of one length weigh the same alone and together."""
    made = lab.islands(2, optimizer="sgd", num_layers=-1, learning_rate=0.03, iters=3)
    rows = {name: [{"text": f"{i} says {k}"} for i in (3, 8)] for k, name in enumerate(made)}
    for name, each in made.items():
        each["data"] = write(tmp_path / f"rows-{name}", train=rows[name], valid=rows[name])
    hub = lab.train(made, mode="parameter-server", inner_steps=1)
    assert hub.rounds.version == made["ann"]["iters"]
    found = weights_of(hub)
    both = [*rows["ann"], *rows["bob"]]
    whole = {**made["ann"], "batch_size": 4, "adapter_path": str(tmp_path / "whole")}
    whole["data"] = write(tmp_path / "both", train=both, valid=both)
    alone(lambda rank: train_model(TrainConfig.from_flat(**whole), rank))
    for name, array in saved({"whole": whole}, "whole").items():
        np.testing.assert_allclose(found[name], array, atol=1e-6, err_msg=name)


def test_async_takes_each_report_at_once(lab: Lab) -> None:
    made = lab.islands(2, **LORA)
    hub = lab.train(made, {"ann": 2}, mode="async")
    assert hub.rounds.version == 2 * ROUNDS
    newest = weights_of(hub)
    assert any(
        all(np.array_equal(newest[each], array) for each, array in saved(made, name).items())
        for name in made
    )


def test_islands_that_send_less_have_the_hubs_weights_and_learn(lab: Lab) -> None:
    made = lab.islands(2, **LORA, iters=4 * H, val_batches=2)
    with lab.hub(made, encoding="low-rank:2", fragments=2) as hub:
        events = train_islands(hub, made, {"ann": 2})
    assert hub.rounds.version == 4
    newest, tensors = weights_of(hub), hub.rounds.run.fragments[1].tensors
    for name in made:
        check_equal(saved(made, name), {each.name: newest[each.name] for each in tensors})
    # The hub lets the first island validate for all.
    first, last = (values["loss"] for event, values in events["ann"] if event == "val")
    assert last < first - 0.3


@pytest.mark.parametrize(("encoding", "ranks"), [("int8", 2), ("top-k:0.2", 1), ("low-rank:2", 1)])
def test_what_an_encoding_leaves_out_is_told_later(encoding: str, ranks: int, lab: Lab) -> None:
    """It learns in the first round alone; then it has its rest to tell, and the hub as well."""
    falls = {"name": "step_decay", "arguments": [1e-2, 0.0, H]}
    made = lab.islands(1, **LORA, iters=10 * H, optimizer="sgd", lr_schedule=falls)
    how = {"outer_optimizer": "average", "encoding": encoding}
    newest = weights_of(lab.train(made, {"ann": ranks}, **how))
    config = TrainConfig.from_flat(**{**made["ann"], "iters": H})
    alone(lambda rank: train_model(config, rank))
    for name, array in saved(made, "ann").items():
        learnt = np.abs(array).max()
        np.testing.assert_allclose(newest[name], array, atol=0.01 * learnt, err_msg=name)


def test_an_island_outlives_a_hub_that_is_away_and_loses_nothing(
    lab: Lab,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the average for an outer optimizer, one island trains as if it were alone. Of its first
    weights, it never hears that they have come."""
    made = lab.islands(1, **LORA, iters=4 * H, optimizer="sgd")
    put, seeds = Hub.put, list[str]()

    def put_unheard(hub: Hub, path: str, body: IO[bytes]) -> None:
        put(hub, path, body)
        if path.endswith("seed"):
            seeds.append(path)
            raise HubAway("the answer got lost")

    monkeypatch.setattr(Hub, "put", put_unheard)
    with ExitStack() as stack:
        port = free_port()  # which nobody else gets meanwhile
        hub = stack.enter_context(lab.hub(made, port=port, outer_optimizer="average"))

        def listen(event: str, values: Mapping[str, Any]) -> None:
            if event == "train" and values["step"] == H + 1:
                stack.close()
                monkeypatch.setattr(hub_link, "PATIENCE", 0.3)
            if event == "train" and values["step"] == 3 * H - 1:
                again = lab.hub(made, port=port, outer_optimizer="average")
                restarted.append(stack.enter_context(again))
                monkeypatch.setattr(hub_link, "PATIENCE", 60.0)

        restarted: list[RunningHub] = []
        config = TrainConfig.from_flat(**made["ann"], island=hub.url, name="ann")
        LocalNetwork(2).run(lambda rank: train_model(config, rank, on_event=listen))
        (hub,) = restarted
        # If the report of step 2 H came later than step 3 H, that step made none.
        assert hub.rounds.version in (3, 4)
        check_equal(saved(made, "ann"), weights_of(hub))
    assert seeds == ["/fragments/0/seed"]  # the second is told that there are weights
    assert f"{hub.url} gave no new weights in 0.3 s" in capsys.readouterr().out
    alone = {**made["ann"], "adapter_path": str(tmp_path / "alone")}
    LocalNetwork(2).run(lambda rank: train_model(TrainConfig.from_flat(**alone), rank))
    for name, array in saved({"alone": alone}, "alone").items():
        np.testing.assert_allclose(saved(made, "ann")[name], array, atol=1e-6, err_msg=name)


def test_an_island_that_joins_anew_replaces_none_of_its_reports_that_wait(
    lab: Lab,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a checkpoint it has nothing of what it reported before."""
    made, take = lab.islands(1, **LORA, iters=H), Rounds.take

    def take_and_end_the_wait(*arguments: Any) -> None:
        take(*arguments)
        monkeypatch.setattr(hub_link, "PATIENCE", 0.0)

    monkeypatch.setattr(Rounds, "take", take_and_end_the_wait)
    with lab.hub(("ann", "bob")) as hub:
        hub.rounds.run.lives["bob"] = 1
        hub.rounds.hear("bob")  # the round waits for it
        for _ in range(2):
            monkeypatch.setattr(hub_link, "PATIENCE", 60.0)
            train_islands(hub, made, {})
        pending = hub.rounds.fragment(0).pending
        assert [(each.life, each.base) for each in pending] == [(1, 0), (2, 0)]


def test_an_island_whose_difference_is_refused_goes_on_with_the_hubs_weights(
    lab: Lab,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is alone: nobody else makes a new version, for which it could wait."""
    encoded, refused = SharedWeights._encoded, list[str]()

    def encoded_once_as_nan(self: SharedWeights, name: str) -> np.ndarray:
        data = encoded(self, name)
        if not refused:
            refused.append(name)
            data[:4] = np.array([np.nan], np.float32).view(np.uint8)
        return data

    made = lab.islands(1, **LORA)
    monkeypatch.setattr(SharedWeights, "_encoded", encoded_once_as_nan)
    hub = lab.train(made, {"ann": 2})
    assert (hub.rounds.version, hub.rounds.islands["ann"].refused) == (ROUNDS - 1, 1)
    check_equal(saved(made, "ann"), weights_of(hub))
    assert f"update {H}: the hub refused" in capsys.readouterr().out


def test_a_checkpoint_of_another_run_of_a_hub_is_refused_by_its_name(
    lab: Lab,
    tmp_path: Path,
) -> None:
    kept = {"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_every": H}
    made = lab.islands(1, **LORA, **kept)
    before = lab.train(made).rounds.run.id
    made["ann"]["iters"] += H
    with lab.hub(made, at="another") as hub, pytest.raises(UserError, match=before) as refused:
        train_islands(hub, made, {})
    assert hub.rounds.run.id in refused.value.problem
    assert "--checkpoint-dir" in refused.value.remedy


class HeardAtOnce(Heartbeat):
    """One that has heard that the run has ended."""

    def __init__(self, hub: Hub) -> None:
        super().__init__(hub)
        while not self.ended:
            time.sleep(0.01)


def test_an_island_that_comes_after_the_end_is_told_so(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = lab.islands(2, **LORA)
    ann, bob = ({name: made[name]} for name in made)
    with lab.hub(made, rounds=ROUNDS) as hub:
        train_islands(hub, ann, {})
        monkeypatch.setattr(hub_link, "Heartbeat", HeardAtOnce)
        with pytest.raises(UserError, match="the hub has ended its run"):
            train_islands(hub, bob, {})


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
    lab: Lab,
) -> None:
    iters = H * ROUNDS * options.get("grad_accumulation_steps", 1)
    made = lab.islands(2, **FULL, iters=iters, pipeline_stages=1, **options)
    hub = lab.train(made, {"ann": 2}, overlap=1, fragments=2, encoding=encoding)
    assert [each["version"] for each in hub.rounds.status()["fragments"]] == [ROUNDS] * 2
    newest = weights_of(hub)
    if "dtype" in options:
        newest = {each: rounded(array) for each, array in newest.items()}
    last = {each.name: newest[each.name] for each in hub.rounds.run.fragments[-1].tensors}
    for name in made:
        check_equal(saved(made, name), last)


@pytest.mark.parametrize("how", [{}, {"encoding": "int8"}, {"overlap": 1}], ids=str)
def test_steps_after_the_last_update_keep_no_island_from_its_last_round(
    how: dict[str, Any], lab: Lab
) -> None:
    made = lab.islands(2, **LORA, grad_accumulation_steps=2)
    for each in made.values():
        each["iters"] = 2 * H * ROUNDS + 1
    hub = lab.train(made, **how)
    assert hub.rounds.version == ROUNDS
    for name in made:
        check_equal(saved(made, name), weights_of(hub))


def test_updates_that_are_not_due_to_be_reported_are_named(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    made = lab.islands(1, **LORA, iters=H * ROUNDS + 1)
    hub = lab.train(made)
    assert hub.rounds.version == ROUNDS
    said = capsys.readouterr().out
    assert f"--iters {H * (ROUNDS + 1)} has them all reported" in said
    assert f"Updates {H * ROUNDS + 1} to {H * ROUNDS + 1} " in said


def rounded(array: np.ndarray) -> np.ndarray:
    return np.array(mx.array(array).astype(mx.bfloat16).astype(mx.float32))
