"""Which model it is, what a stage needs of it, and who sends what. Without MLX."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardmlx.loading.hub_download import runs
from shardmlx.loading.manifest import (
    Transfer,
    fingerprint,
    is_needed,
    plan_transfers,
    read_model_manifest,
)
from shardmlx.modelfiles.parts import read_shape
from shardmlx.modelfiles.safetensors_header import PlacedTensor
from tests.helpers.fake_models import TINY, model_files, write

SHAPE = read_shape(TINY)
FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def place(file: str, start: int, end: int) -> PlacedTensor:
    return PlacedTensor(file, "U8", (end - start,), start, end)


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("model.embed_tokens.weight", [True, False, False]),
        ("model.layers.0.mlp.up_proj.weight", [True, False, False]),
        ("model.layers.2.mlp.up_proj.weight", [False, True, False]),
        # mlx-lm multiplies it in and drops it.
        ("model.layers.2.mlp.up_proj.weight_scale_inv", [False, True, False]),
        ("model.layers.3.self_attn.q_proj.lora_a", [False, False, True]),
        ("model.norm.weight", [False, False, True]),
        ("lm_head.weight", [False, False, True]),
        ("model.layers.4.mlp.up_proj.weight", [False, False, False]),
        ("something.else", [True, True, True]),
    ],
)
def test_what_a_stage_needs(name: str, stages: list[bool]) -> None:
    ranges = [(0, 1), (1, 3), (3, 4)]
    assert [is_needed(name, SHAPE, *each) for each in ranges] == stages


def test_a_tied_matrix_is_needed_at_both_ends_and_a_head_beside_it_nowhere() -> None:
    tied = read_shape(TINY | {"tie_word_embeddings": True})
    ranges = [(0, 1), (1, 3), (3, 4)]
    embedding = [is_needed("model.embed_tokens.weight", tied, *each) for each in ranges]
    assert embedding == [True, False, True]
    assert not any(is_needed("lm_head.weight", tied, *each) for each in ranges)


# Which model.


def test_a_model_is_the_same_wherever_it_lies(tmp_path: Path) -> None:
    one, two = (write(tmp_path / name, model_files(TINY, shards=2)) for name in ("one", "two"))
    (two / "tokenizer.json").write_text("{}")
    (two / "config.json").write_text((one / "config.json").read_text() + "\n")
    assert fingerprint(one, FILES) == fingerprint(two, FILES)


@pytest.mark.parametrize("offset", [-1, -3000])
def test_another_number_makes_another_model(tmp_path: Path, offset: int) -> None:
    one, two = (write(tmp_path / name, model_files(TINY, shards=2)) for name in ("one", "two"))
    with (two / FILES[1]).open("rb+") as file:
        file.seek(offset, os.SEEK_END)
        file.write(b"\1")
    own = [read_model_manifest(path, FILES, fingerprint(path, FILES)).key for path in (one, two)]
    assert own[0] != own[1]
    assert (fingerprint(one, FILES) == fingerprint(two, FILES)) == (offset == -3000)


# Who sends.

TENSORS = {name: place("f", 10 * i, 10 * i + 10) for i, name in enumerate("abcd")}


def chains(transfers: list[Transfer]) -> dict[str, tuple[int, ...]]:
    return {transfer.name: transfer.chain for transfer in transfers}


def test_replicas_form_a_chain() -> None:
    missing = {1: {"a", "b"}, 2: {"c"}, 3: {"a", "b"}, 5: {"a", "b"}}
    assert chains(plan_transfers(TENSORS, [0], {}, missing)) == {
        "a": (0, 1, 3, 5),
        "b": (0, 1, 3, 5),
        "c": (0, 2),
    }


def test_those_who_have_the_model_share_the_work() -> None:
    missing = {2: {"a"}, 3: {"b", "c"}, 5: {"d"}}
    sent = chains(plan_transfers(TENSORS, [0, 1], {}, missing))
    assert sent == {"a": (0, 2), "b": (1, 3), "c": (1, 3), "d": (0, 5)}


def test_who_has_kept_a_tensor_sends_it() -> None:
    missing = {1: {"a", "b"}}
    assert chains(plan_transfers(TENSORS, [], {0: {"a"}, 3: {"b"}}, missing)) == {
        "a": (0, 1),
        "b": (3, 1),
    }


# What is asked of a hub.


def test_neighbours_come_in_one_request() -> None:
    tensors = {
        "a": place("one", 100, 110),
        "b": place("one", 110, 140),
        "c": place("one", 140, 150),
        "d": place("one", 150, 150 + (1 << 26)),
        "e": place("two", 110, 120),
    }
    assert runs(["e", "b", "a", "d"], tensors) == [["a", "b"], ["d"], ["e"]]
    assert runs(tensors, tensors) == [["a", "b", "c"], ["d"], ["e"]]
    assert runs([], tensors) == []
