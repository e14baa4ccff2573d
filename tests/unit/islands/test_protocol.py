"""The words of hub and islands."""

from __future__ import annotations

from typing import Any

import pytest

from shardmlx.errors import UserError
from shardmlx.islands.outer import OuterOptimizer
from shardmlx.islands.protocol import (
    Join,
    Joined,
    Progress,
    SharedTensor,
    Terms,
    fragments_of,
)

LAYERS = tuple(
    SharedTensor(f"model.layers.{layer}.self_attn.{name}", (4, size))
    for layer in range(4)
    for name, size in (("q_proj.lora_a", 2), ("v_proj.lora_a", 3))
)
JOIN = Join(name="ann", model={"type": "llama"}, tensors=LAYERS, adapter_config={"num_layers": 4})


@pytest.mark.parametrize(
    ("fragments", "steps"),
    [(1, {0: [6, 12]}), (2, {0: [3, 9], 1: [6, 12]}), (3, {0: [2, 8], 1: [4, 10], 2: [6, 12]})],
)
def test_a_fragment_is_due_once_in_six_steps_and_the_last_one_at_multiples_of_six(
    fragments: int, steps: dict[int, list[int]]
) -> None:
    terms = Terms(inner_steps=6, fragments=fragments)
    due = [(step, k) for step in range(1, 13) for k in terms.due(step)]
    assert due == sorted((step, k) for k, of_one in steps.items() for step in of_one)


def test_with_more_fragments_than_steps_each_is_due_once_all_the_same() -> None:
    terms = Terms(inner_steps=2, fragments=5)
    assert sorted([*terms.due(1), *terms.due(2)]) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"inner_steps": 4, "overlap": 4}, "overlap is 4"),
        ({"encoding": "int4"}, "int4"),
        ({"outer_optimizer": "elastic:1.5"}, "1.5"),
        ({"unheard": 1}, "unheard"),
    ],
)
def test_terms_that_cannot_be_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as refused:
        Terms.of_json(values)
    assert named in refused.value.problem
    assert refused.value.remedy


def test_fragments_have_whole_layers_and_about_equal_bytes() -> None:
    assert [len(each) for each in fragments_of(LAYERS, 2)] == [4, 4]
    assert [len(each) for each in fragments_of(LAYERS, 3)] == [4, 2, 2]
    assert [len(each) for each in fragments_of(LAYERS, 4)] == [2, 2, 2, 2]
    assert sum(fragments_of(LAYERS, 3), ()) == LAYERS
    with pytest.raises(UserError, match="fragments is 5"):
        fragments_of(LAYERS, 5)


def test_large_tensors_outside_of_layers_are_fragments_of_their_own() -> None:
    embedding, head = (
        SharedTensor("model.embed_tokens.weight", (100, 8)),
        SharedTensor("lm_head.weight", (9,)),
    )
    parts = fragments_of((embedding, *LAYERS, head), 2)
    assert [len(each) for each in parts] == [1, 9]


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        5,
        [["a"]],
        [["a", [0]]],
        [["a", [1 << 50]]],
        [["a", [1]], ["a", [1]]],
        [["a", "b"]],
    ],
)
def test_what_is_no_list_of_tensors_is_refused(value: Any) -> None:
    with pytest.raises(UserError):
        Join.of_json({**JOIN.to_json(), "tensors": value})


def test_messages_are_the_same_after_their_way_through_json() -> None:
    import json

    terms = Terms(outer_optimizer="elastic:0.5")
    joined = Joined(run="a", life=1, terms=terms, versions=[3, None])
    progress = Progress(step=3, tokens=100, val_loss=2.5)
    for message in (JOIN, joined, progress):
        assert type(message).of_json(json.loads(json.dumps(message.to_json()))) == message


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model": {"type": "qwen2"}}, "'qwen2'"),
        ({"tensors": LAYERS[1:]}, "v_proj"),
        ({"tensors": LAYERS[:-1]}, "no tensor"),
    ],
)
def test_another_model_is_refused_by_its_first_difference(
    changed: dict[str, Any], named: str
) -> None:
    values = {
        "name": "ann",
        "model": JOIN.model,
        "tensors": LAYERS,
        "adapter_config": {},
    }
    JOIN.check_same(JOIN)
    with pytest.raises(UserError) as refused:
        Join(**{**values, **changed}).check_same(JOIN)
    assert named in refused.value.problem


@pytest.mark.parametrize(
    "value", [None, {}, {"step": 1, "tokens": "x"}, {"step": 1, "tokens": 2, "loss": float("nan")}]
)
def test_progress_that_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(UserError):
        Progress.of_json(value)


@pytest.mark.parametrize(
    ("terms", "name"),
    [
        ({"encoding": "int8"}, "nesterov"),
        ({"encoding": "top-k:0.1"}, "sgd:2"),
        ({"encoding": "low-rank:4", "mode": "async"}, "sgd"),
        ({"encoding": "low-rank:4", "mode": "fedavg"}, "average"),
        ({"encoding": "top-k:0.1", "outer_optimizer": "nesterov"}, "nesterov"),
    ],
)
def test_no_momentum_is_the_default_where_most_of_a_difference_comes_late(
    terms: dict[str, Any], name: str
) -> None:
    assert Terms(**terms).optimizer == OuterOptimizer.of(name)
