"""A training loop's requests on ranks: curves are those of one process in plain MLX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_model

from shardmlx.api.client import TrainClient
from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.loading.tokenizer import read_tokenizer
from shardmlx.training.command import train_model
from shardmlx.training.datasets import read_data
from testbed.rows import write
from tests.helpers.local_transport import LocalNetwork
from tests.helpers.loops import (
    ATTENTION,
    EVERYTHING,
    MLP,
    RATE,
    Rows,
    learn,
    on_ranks,
    oracle,
    rows_of,
)

pytestmark = pytest.mark.usefixtures("limited_to_a_test")

LAYOUTS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "2 stages": (2, {}),
    "2 x 2": (4, {"data_parallel": 2}),
    "zb-v": (2, {"schedule": "zb-v"}),
    "zb-h1": (2, {"schedule": "zb-h1"}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_six_steps_have_the_losses_of_one_process(layout: str, small: Path) -> None:
    ranks, options = LAYOUTS[layout]
    found = on_ranks(ranks, small, lambda client: learn(client.create_model(rank=4)), **options)
    assert found == pytest.approx(oracle(small, (*ATTENTION, *MLP, "lm_head")), rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_tied_embeddings_have_adapters_at_both_ends(ranks: int, small_tied: Path) -> None:
    found = on_ranks(
        ranks, small_tied, lambda client: learn(client.create_model(rank=4), range(4), eps=1e-5)
    )
    keys = (*EVERYTHING, "model.embed_tokens")
    # Gradients of rare words are so small that rounding would decide the sign of their updates.
    assert found == pytest.approx(oracle(small_tied, keys, steps=4, eps=1e-5), rel=1e-5)


def test_a_base_of_4_bits_trains_on_two_ranks(small_quantised: Path) -> None:
    found = on_ranks(
        2, small_quantised, lambda client: learn(client.create_model(rank=4), range(4))
    )
    keys = (*EVERYTHING, "lm_head")
    assert found == pytest.approx(oracle(small_quantised, keys, steps=4), rel=1e-5)


@pytest.mark.parametrize(
    ("parts", "keys"),
    [
        ({"mlp": False, "unembed": False}, ATTENTION),
        ({"attention": False, "unembed": False}, MLP),
        ({"attention": False, "mlp": False}, ("lm_head",)),
    ],
    ids=["attention", "mlp", "unembed"],
)
def test_parts_of_a_model_train_alone_on_two_ranks(
    parts: dict[str, bool], keys: tuple[str, ...], small: Path
) -> None:
    found = on_ranks(2, small, lambda client: learn(client.create_model(rank=4, **parts), range(3)))
    assert found == pytest.approx(oracle(small, keys, steps=3), rel=1e-5)


@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (2, {}), (4, {"data_parallel": 2})])
def test_models_that_train_at_once_learn_bit_for_bit_what_each_would_alone(
    ranks: int, options: dict[str, Any], small: Path
) -> None:
    hows: list[dict[str, Any]] = [{"rank": 4}, {"rank": 2, "seed": 5}, {"rank": 8, "mlp": False}]

    def alone(client: TrainClient) -> list[list[float]]:
        return [learn(client.create_model(**how), range(3)) for how in hows]

    def together(client: TrainClient) -> list[list[float]]:
        models = [client.create_model(**how) for how in hows]
        losses: list[list[float]] = [[] for _ in hows]
        for step in range(3):
            calls = []
            for model in models:
                calls.append(model.forward_backward(rows_of(step)))
                model.forward_backward([])  # refused, and of no effect
                model.optim_step(RATE, weight_decay=0.01, grad_clip_norm=2.0)
            for curve, call in zip(losses, calls, strict=True):
                curve.append(call.result().metrics["loss:sum"])
        return losses

    assert on_ranks(ranks, small, together, **options) == on_ranks(ranks, small, alone, **options)


def test_gradients_add_up_until_the_update(small: Path) -> None:
    """Rows in three calls, and a forward between, make the update of all rows in one."""

    def work(client: TrainClient) -> tuple[float, float]:
        rows = rows_of(0)
        whole = client.create_model(rank=4)
        whole.forward_backward(rows)
        whole.optim_step(RATE)
        parts = client.create_model(rank=4)
        for i in range(3):
            parts.forward_backward(rows[2 * i : 2 * i + 2])
            parts.forward_backward(rows_of(9), forward_only=True)
        parts.optim_step(RATE)
        calls = [
            each.forward_backward(rows, forward_only=True).result().metrics["loss:sum"]
            for each in (whole, parts)
        ]
        return calls[0], calls[1]

    whole, parts = on_ranks(2, small, work)
    assert parts == pytest.approx(whole, rel=1e-6)


def test_log_probabilities_come_back_in_the_order_of_the_rows(small: Path) -> None:
    rows = rows_of(3, 9)

    def work(client: TrainClient) -> list[np.ndarray]:
        model = client.create_model(rank=4)
        return [*model.forward_backward(rows, forward_only=True).result().logprobs]

    found = on_ranks(2, small, work)
    base, _ = load_model(small)
    for row, logps in zip(rows, found, strict=True):
        scores = nn.log_softmax(base(mx.array(row["tokens"])[None])[0])
        expected = np.array(scores)[np.arange(len(row["tokens"])), row["target_tokens"]]
        np.testing.assert_allclose(logps, expected, atol=2e-6)


def test_soft_targets_and_plain_ones_may_stand_in_one_request(small: Path) -> None:
    plain, other = rows_of(1, 2)
    soft = {
        "tokens": other["tokens"],
        "target_tokens": np.stack([other["target_tokens"], other["target_tokens"]], axis=1),
        "weights": np.stack([other["weights"] * 0.25, other["weights"] * 0.75], axis=1),
    }

    def work(client: TrainClient) -> tuple[Any, Any]:
        model = client.create_model(rank=4)
        one = model.forward_backward([plain, other], forward_only=True).result()
        return one, model.forward_backward([plain, soft], forward_only=True).result()

    one, both = on_ranks(1, small, work)
    assert both.metrics["loss:sum"] == pytest.approx(one.metrics["loss:sum"], rel=1e-6)
    assert both.logprobs[1].shape == (len(other["tokens"]), 2)
    np.testing.assert_allclose(both.logprobs[1][:, 1], one.logprobs[1], atol=1e-6)


def tokens_of(count: int) -> dict[str, Any]:
    return {"tokens": [1] * count, "target_tokens": [2] * count}


SAMPLED = {**tokens_of(2), "logprobs": [-1.0, -1.0], "advantages": [1.0, 0.0]}

WRONG: Mapping[str, tuple[Rows, str, dict[str, float], str]] = {
    "no rows": ([], "cross_entropy", {}, "no rows"),
    "an empty row": ([tokens_of(2), tokens_of(0)], "cross_entropy", {}, "row 1: it has no tokens"),
    "a long row": ([tokens_of(49)], "cross_entropy", {}, "49 tokens, more than 48"),
    "an id beyond the vocabulary": (
        [{"tokens": [1, 10_000], "target_tokens": [1, 2]}],
        "cross_entropy",
        {},
        "10000",
    ),
    "a negative id": ([{"tokens": [1], "target_tokens": [-1]}], "cross_entropy", {}, "-1"),
    "lengths that differ": (
        [{"tokens": [1, 2], "target_tokens": [1]}],
        "cross_entropy",
        {},
        "1 target_tokens for 2",
    ),
    "weights that are too few": (
        [{**tokens_of(2), "weights": [1.0]}],
        "cross_entropy",
        {},
        "weights have the shape (1,)",
    ),
    "nan": ([{**tokens_of(2), "weights": [1.0, np.nan]}], "cross_entropy", {}, "not finite"),
    "infinity": ([{**SAMPLED, "advantages": [np.inf, 0]}], "ppo", {}, "not finite"),
    "an unknown loss": ([tokens_of(2)], "stable_reinforce", {}, "'stable_reinforce'"),
    "an unknown field": ([{**tokens_of(2), "mask": [1, 1]}], "cross_entropy", {}, "no mask"),
    "a field that lacks": ([tokens_of(2)], "ppo", {}, "advantages, logprobs"),
    "an unknown setting": ([SAMPLED], "ppo", {"beta": 0.1}, "'beta'"),
    "a setting that is not finite": ([SAMPLED], "dro", {"beta": np.nan}, "nan"),
    "thresholds that cross": ([SAMPLED], "ppo", {"clip_low_threshold": 2.0}, "2.0"),
    "several targets of a sample": (
        [{**SAMPLED, "target_tokens": [[1, 2], [1, 2]]}],
        "ppo",
        {},
        "one target",
    ),
    "no marked token": ([{**SAMPLED, "sequence_ratio_mask": [0, 0]}], "gspo", {}, "no token"),
}


def test_a_wrong_request_is_refused_by_name_and_changes_nothing(small: Path) -> None:
    def work(client: TrainClient) -> tuple[list[float], dict[str, str]]:
        model = client.create_model(rank=4)
        losses: list[float] = []
        problems = {}
        for name, (rows, loss, settings, _) in WRONG.items():
            call = model.forward_backward(rows, loss, settings)
            losses += learn(model, range(len(losses), len(losses) + 1)) if len(losses) < 4 else []
            with pytest.raises(UserError) as found:
                call.result()
            problems[name] = found.value.problem
        return losses, problems

    losses, problems = on_ranks(2, small, work)
    assert losses == pytest.approx(oracle(small, (*EVERYTHING, "lm_head"), steps=4), rel=1e-5)
    for name, (_, _, _, words) in WRONG.items():
        assert words in problems[name], (name, problems[name])


def test_requests_that_no_model_can_answer_are_refused(small: Path) -> None:
    def work(client: TrainClient) -> list[str]:
        model = client.create_model(rank=4)
        gone = client.create_model(rank=4)
        gone.unload()
        calls: list[Callable[[], object]] = [
            lambda: model.optim_step(1e-3).result(),
            lambda: model.optim_step(-1.0).result(),
            lambda: model.optim_step(1e-3, beta1=1.0).result(),
            lambda: model.optim_step(1e-3, eps=0.0).result(),
            lambda: model.optim_step(1e-3, eps=1e-46).result(),
            lambda: model.save("a"),
            lambda: client.create_model(rank=33),
            lambda: client.create_model(attention=False, mlp=False, unembed=False),
            lambda: gone.forward_backward(rows_of(0)).result(),
            lambda: gone.optim_step(1e-3).result(),
            lambda: client.sample([1, 2], "nothing").result(),
        ]
        problems = []
        for call in calls:
            with pytest.raises(UserError) as found:
                call()
            problems.append(found.value.problem)
        return problems

    words = [
        "no gradients",
        "-1.0",
        "1.0",
        "eps is 0.0",
        "eps is 1e-46",
        "directory",
        "33",
        "false",
        "model-2",
        "model-2",
    ]
    problems = on_ranks(1, small, work, max_adapters=2)
    for problem, word in zip(problems, [*words, "nothing"], strict=True):
        assert word in problem


def test_there_are_no_more_models_than_were_planned_for(small: Path) -> None:
    def work(client: TrainClient) -> str:
        first = client.create_model(rank=2)
        client.create_model(rank=2)
        with pytest.raises(UserError) as found:
            client.create_model(rank=2)
        first.unload()
        client.create_model(rank=2)
        return found.value.problem

    assert "2 models" in on_ranks(2, small, work, max_adapters=2)


def test_gradients_that_are_not_finite_make_no_update(small: Path) -> None:
    def work(client: TrainClient) -> tuple[float, float, str]:
        model = client.create_model(rank=4)
        rows = rows_of(0)
        learn(model, range(1))
        before = model.forward_backward(rows, forward_only=True).result().metrics["loss:sum"]
        large = [{**row, "weights": row["weights"] * 3e38} for row in rows]
        model.forward_backward(large).result()
        with pytest.raises(UserError) as found:
            model.optim_step(RATE).result()
        after = model.forward_backward(rows, forward_only=True).result().metrics["loss:sum"]
        learn(model, range(1))
        return before, after, found.value.problem

    before, after, problem = on_ranks(2, small, work)
    assert after == before
    assert "norm" in problem


ADAMW = {"weight_decay": 0.01, "bias_correction": True}


def test_cross_entropy_is_the_loss_of_train(small: Path, tmp_path: Path) -> None:
    """On the same rows, whose mean it is: `train` counts a token of the padding, as mlx-lm does."""
    texts = ["the sea is blue", "a ship", "ships sail on the sea by night", "hello"]
    data = write(tmp_path / "data", train=[{"text": text} for text in texts])
    keys = [*EVERYTHING]
    config = TrainConfig.from_flat(
        model=str(small),
        data=data,
        train=True,
        num_layers=-1,
        batch_size=len(texts),
        iters=5,
        val_batches=0,
        steps_per_report=1,
        max_seq_length=48,
        optimizer="adamw",
        optimizer_config={
            "adamw": {
                "betas": [0.9, 0.95],
                "eps": 1e-8,
                "weight_decay": 0.01,
                "bias_correction": True,
            }
        },
        learning_rate=RATE,
        lora_parameters={"rank": 4, "scale": 8.0, "dropout": 0.0, "keys": keys},
        adapter_path=str(tmp_path / "adapters"),
        device="cpu",
    )
    expected: list[float] = []

    def listen(event: str, values: Mapping[str, Any]) -> None:
        if event == "train":
            expected.append(values["loss"])

    LocalNetwork(2, timeout=30).run(lambda rank: train_model(config, rank, on_event=listen))
    sets = read_data(config.wanted_data, read_tokenizer(small, False, {}), None)
    rows = [[*map(int, sets.train[i][0])] for i in range(len(texts))]
    count = sum(map(len, rows))

    def work(client: TrainClient) -> list[float]:
        model = client.create_model(rank=4, unembed=False)
        losses = []
        for _ in expected:
            given = [
                {
                    "tokens": row,
                    "target_tokens": [*row[1:], 0],
                    "weights": np.full(len(row), 1 / count),
                }
                for row in rows
            ]
            loss = model.forward_backward(given)
            model.optim_step(RATE, weight_decay=0.01, eps=1e-8)
            losses.append(loss.result().metrics["loss:sum"])
        return losses

    assert on_ranks(2, small, work) == pytest.approx(expected, rel=1e-5)
    assert len(expected) == 5
