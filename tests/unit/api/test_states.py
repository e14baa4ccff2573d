"""Saved states are whole or not there, outlive the server, and any layout goes on from them."""

from __future__ import annotations

import io
import json
import resource
import tarfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load as load_with_adapter

from shardmlx.api.client import TrainClient
from shardmlx.api.requests import SaveState
from shardmlx.api.states import StateStore
from shardmlx.common.reporter import Reporter
from shardmlx.errors import UserError
from tests.helpers.loops import learn, on_ranks, rows_of
from tests.helpers.models_and_batches import load_arrays

pytestmark = pytest.mark.usefixtures("limited_to_a_test")

QUIET = Reporter(quiet=True)


@pytest.fixture(scope="module")
def whole_curve(small: Path) -> list[float]:
    """Six steps without a stop."""
    found: list[float] = on_ranks(
        1, small, lambda client: learn(client.create_model(rank=4), range(6))
    )
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, {}), (2, {})),
        ((2, {}), (4, {"data_parallel": 2})),
        ((2, {"schedule": "zb-v"}), (1, {})),
    ],
    ids=["1 to 2", "2 to 2 x 2", "zb-v to 1"],
)
def test_another_layout_goes_on_from_a_state(
    before: tuple[int, Any],
    after: tuple[int, Any],
    small: Path,
    tmp_path: Path,
    whole_curve: list[float],
) -> None:
    def first(client: TrainClient) -> list[float]:
        model = client.create_model(rank=4)
        losses = learn(model, range(3))
        model.forward_backward(rows_of(8))  # gradients are no part of a state
        model.save("run/half")
        return losses

    def second(client: TrainClient) -> list[float]:
        assert [each.state for each in client.states()] == ["run/half"]
        return learn(client.load_model("run/half"), range(3, 6))

    directory = str(tmp_path / "states")
    losses = on_ranks(before[0], small, first, state_dir=directory, **before[1])
    losses += on_ranks(after[0], small, second, state_dir=directory, **after[1])
    assert losses == pytest.approx(whole_curve, rel=1e-5)


def test_a_state_goes_back_into_its_model_with_and_without_its_optimizer(
    small: Path, tmp_path: Path, whole_curve: list[float]
) -> None:
    def work(client: TrainClient) -> tuple[list[float], list[float], list[float]]:
        model = client.create_model(rank=4)
        learn(model, range(3))
        model.save("a")
        learn(model, range(3, 5))
        model.load("a")
        again = learn(model, range(3, 6))
        model.load("a", with_optimizer=False)
        anew = learn(model, range(3, 6))
        other = client.load_model("a", with_optimizer=False)
        return again, anew, learn(other, range(3, 6))

    again, anew, other = on_ranks(2, small, work, state_dir=str(tmp_path))
    assert again == pytest.approx(whole_curve[3:], rel=1e-5)
    assert anew[0] == pytest.approx(again[0], rel=1e-6)
    assert anew[2] != pytest.approx(again[2], rel=1e-4)
    assert other == anew


def test_names_are_written_over_only_when_asked(small: Path, tmp_path: Path) -> None:
    def work(client: TrainClient) -> tuple[str, str, list[str]]:
        model = client.create_model(rank=4)
        first = model.save("Run/a")
        with pytest.raises(UserError) as found:
            model.save("Run/a")
        learn(model, range(1))
        second = model.save("Run/a", overwrite=True)
        assert second.saved_at > first.saved_at
        model.save("run/a")  # another name, also where a disk tells no upper case from lower
        model.save("x" * 500)
        with pytest.raises(UserError) as outside:
            model.save("../a")
        client.delete_state("run/a")
        with pytest.raises(UserError):
            client.delete_state("run/a")
        names = [each.state for each in client.states()]
        return found.value.problem, outside.value.problem, names

    problem, outside, names = on_ranks(2, small, work, state_dir=str(tmp_path))
    assert "'Run/a'" in problem
    assert "'../a'" in outside
    assert names == ["Run/a", "x" * 500]


def test_what_cannot_be_loaded_is_refused_by_name(
    small: Path, small_tied: Path, tmp_path: Path
) -> None:
    def save(client: TrainClient) -> None:
        model = client.create_model(rank=4)
        model.save("a")

    def load(client: TrainClient) -> list[str]:
        problems = []
        for call in (
            lambda: client.create_model(rank=2).load("a"),
            lambda: client.load_model("b"),
        ):
            with pytest.raises(UserError) as found:
                call()
            problems.append(found.value.problem)
        return problems

    def of_another(client: TrainClient) -> str:
        with pytest.raises(UserError) as found:
            client.load_model("a")
        return found.value.problem

    directory = str(tmp_path)
    on_ranks(1, small, save, state_dir=directory)
    other_rank, unknown = on_ranks(1, small, load, state_dir=directory)
    assert "another LoRA" in other_rank
    assert "'b'" in unknown
    assert "another base" in on_ranks(1, small_tied, of_another, state_dir=directory)


def test_a_model_of_a_state_that_cannot_be_loaded_takes_no_room(
    small: Path, tmp_path: Path
) -> None:
    def work(client: TrainClient) -> str:
        model = client.create_model(rank=4)
        service = client.service
        service.finish(service.submit(SaveState(model.name, "weights", for_sampler=True)))
        for _ in range(3):
            with pytest.raises(UserError) as found:
                client.load_model("weights")
        client.load_model("weights", with_optimizer=False)
        return found.value.problem

    assert "optimizer" in on_ranks(2, small, work, state_dir=str(tmp_path), max_adapters=2)


def test_a_state_is_whole_or_not_there(small: Path, tmp_path: Path) -> None:
    """A file that a crash left half written, or cut, is not a state, and hides none."""

    def work(client: TrainClient) -> None:
        client.create_model(rank=4).save("a")

    on_ranks(1, small, work, state_dir=str(tmp_path))
    (file,) = tmp_path.glob("*.safetensors")
    (tmp_path / f"partial-{file.name}").write_bytes(file.read_bytes()[:5000])
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:5000])
    store = StateStore(tmp_path, QUIET)
    assert [each.state for each in store.all()] == ["a"]
    assert not [*tmp_path.glob("partial-*")]
    store.close()


def test_one_server_writes_to_a_directory(tmp_path: Path) -> None:
    store = StateStore(tmp_path, QUIET)
    with pytest.raises(UserError) as found:
        StateStore(tmp_path, QUIET)
    assert str(tmp_path) in found.value.problem
    store.close()
    StateStore(tmp_path, QUIET).close()


def test_a_disk_that_takes_no_more_ends_that_save_alone(
    small: Path, tmp_path: Path, whole_curve: list[float]
) -> None:
    def work(client: TrainClient) -> tuple[str, list[float]]:
        model = client.create_model(rank=4)
        losses = learn(model, range(1))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(UserError) as found:
                model.save("a")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        losses += learn(model, range(1, 2))
        model.save("b")
        assert [each.state for each in client.states()] == ["b"]
        return found.value.problem, losses

    problem, losses = on_ranks(2, small, work, state_dir=str(tmp_path))
    assert "'a' was not saved" in problem
    assert losses == pytest.approx(whole_curve[:2], rel=1e-5)
    assert len([*tmp_path.iterdir()]) == 1


def test_mlx_lm_loads_an_exported_state(small: Path, tmp_path: Path) -> None:
    row = rows_of(7, 1)[0]

    def work(client: TrainClient) -> tuple[bytes, np.ndarray]:
        model = client.create_model(rank=4, unembed=True)
        learn(model, range(3))
        model.save("a")
        (logps,) = model.forward_backward([row], forward_only=True).result().logprobs
        return client.export("a"), logps

    archive, logps = on_ranks(2, small, work, state_dir=str(tmp_path / "states"))
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(tmp_path / "adapter", filter="data")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["lora_parameters"]["rank"] == config["r"] == 4
    assert config["lora_alpha"] == 32
    of_peft = load_arrays(tmp_path / "adapter" / "adapter_model.safetensors")
    assert of_peft["base_model.model.lm_head.lora_A.weight"].shape[0] == 4
    model = load_with_adapter(str(small), adapter_path=str(tmp_path / "adapter"))[0]
    scores = nn.log_softmax(model(mx.array(row["tokens"])[None])[0])
    expected = np.array(scores)[np.arange(len(row["tokens"])), row["target_tokens"]]
    np.testing.assert_allclose(logps, expected, atol=1e-5)
