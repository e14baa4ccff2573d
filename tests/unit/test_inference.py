"""Generating on threads: whatever the layout, the tokens are those of mlx-lm in one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.tuner.utils import linear_to_lora_layers

from shardmlx.choice import Choice
from shardmlx.engine import EngineError
from shardmlx.inference import Follower, Leader
from shardmlx.models.families import FAMILIES
from shardmlx.models.slice import Slice
from shardmlx.token_schedule import Scheduler
from shardmlx.transport import LocalNetwork, Transport, TransportTimeout
from tests.support import VOCABULARY, tiny_model

LAYERS = 6
CUTS = [[6], [3, 3], [4, 2], [2, 3, 1], [1, 2, 2, 1]]
WINDOW = 8
SLIDING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention" if i % 3 else "full_attention" for i in range(LAYERS)],
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "tied": ("llama", {"tied": True}),
    "llama with windows": ("llama", SLIDING),
    "ministral3 with windows": ("ministral3", SLIDING),
    "quantised": ("qwen3", {"quantization": {"group_size": 32, "bits": 4}}),
    "quantised and tied": ("llama", {"tied": True, "quantization": {"group_size": 32, "bits": 4}}),
    "adapters": ("mistral", {"lora": True}),
}


@cache
def models(variant: str) -> list[nn.Module]:
    """The same model for each rank and for the reference: threads must not share one."""
    family, how = VARIANTS[variant]
    made = []
    for _ in range(5):
        options = dict(how)
        adapters = options.pop("lora", False)
        model = tiny_model(family, layers=LAYERS, **options)
        if adapters:
            linear_to_lora_layers(model, 4, {"rank": 4, "scale": 20.0, "dropout": 0.1})
            model.load_weights(
                [
                    (name, mx.random.normal(array.shape, scale=0.1))
                    for name, array in tree_flatten(model.parameters())
                    if "lora" in name
                ],
                strict=False,
            )
        model.eval()
        mx.eval(model.parameters())
        made.append(model)
    return made


def prompt(length: int, seed: int = 0) -> list[int]:
    random = np.random.RandomState(seed + 1000 * length)
    return [int(token) for token in random.randint(1, VOCABULARY, size=length)]


def expected(
    variant: str,
    tokens: Sequence[int],
    count: int,
    *,
    chunk: int = 2048,
    max_kv_size: int | None = None,
) -> list[int]:
    """What mlx-lm generates in one process."""
    steps = generate_step(
        mx.array(list(tokens)),
        models(variant)[-1],
        max_tokens=count,
        prefill_step_size=chunk,
        max_kv_size=max_kv_size,
    )
    return [token for token, _ in steps]


def generate(
    variant: str,
    cut: Sequence[int],
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    *,
    chunk: int = 2048,
    most: int = 8,
    groups: int | None = None,
    max_kv_size: int | None = None,
    choices: Sequence[Choice] | None = None,
    patience: int | None = None,
) -> list[list[int]]:
    """The tokens of each prompt, on as many ranks as ``cut`` has stages."""
    bounds = [sum(cut[:i]) for i in range(len(cut) + 1)]

    def work(transport: Transport) -> list[list[int]]:
        rank = transport.rank
        part = Slice(models(variant)[rank], bounds[rank], bounds[rank + 1])
        if rank > 0:
            Follower(transport, part, max_kv_size=max_kv_size, random_state=7).run()
            return []
        scheduler = Scheduler(groups or len(cut), most, chunk, patience)
        leader = Leader(transport, part, scheduler, max_kv_size=max_kv_size, random_state=7)
        texts: list[list[int]] = [[] for _ in prompts]
        for number, tokens in enumerate(prompts):
            leader.add(number, tokens, choices[number] if choices else Choice())
        while not leader.is_idle:
            for number, chosen in leader.step():
                texts[number].append(chosen.token)
                if len(texts[number]) == counts[number]:
                    leader.finish(number)
        leader.stop()
        return texts

    texts: list[list[int]] = LocalNetwork(len(cut)).run(work)[0]
    return texts


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_text_is_that_of_mlx_lm(variant: str, cut: list[int]) -> None:
    tokens = prompt(21)
    assert generate(variant, cut, [tokens], [12]) == [expected(variant, tokens, 12)]


@pytest.mark.parametrize("cut", [[3, 3], [2, 3, 1]], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_prompt_longer_than_a_chunk(variant: str, cut: list[int]) -> None:
    tokens = prompt(50)
    texts = generate(variant, cut, [tokens], [12], chunk=7)
    assert texts == [expected(variant, tokens, 12, chunk=7)]
    assert texts == [expected(variant, tokens, 12)]


@pytest.mark.parametrize("length", [1, 2, 8, 9])
def test_prompts_around_the_size_of_a_chunk(length: int) -> None:
    tokens = prompt(length)
    texts = generate("llama", [3, 3], [tokens], [5], chunk=8)
    assert texts == [expected("llama", tokens, 5, chunk=8)]


@pytest.mark.parametrize("cut", [[6], [3, 3], [2, 3, 1]], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_texts_at_once_are_those_of_each_alone(variant: str, cut: list[int]) -> None:
    lengths = [5, 30, 2, 17, 11, 23, 9]
    counts = [9, 3, 14, 1, 6, 12, 8]
    prompts = [prompt(length) for length in lengths]
    texts = generate(variant, cut, prompts, counts, chunk=8, most=5)
    assert texts == [
        expected(variant, tokens, count, chunk=8)
        for tokens, count in zip(prompts, counts, strict=True)
    ]


def test_texts_that_join_between_tokens() -> None:
    """One chunk of a prompt between two tokens: texts join groups that are on their way."""
    prompts = [prompt(length) for length in (5, 30, 2, 17, 11)]
    texts = generate("llama", [2, 3, 1], prompts, [20] * 5, chunk=4, most=9, patience=1)
    assert texts == [expected("llama", tokens, 20, chunk=4) for tokens in prompts]


@pytest.mark.parametrize("variant", ["qwen2", "llama"])
@pytest.mark.parametrize("cut", [[6], [3, 3]], ids=str)
def test_a_cache_of_limited_size(variant: str, cut: list[int]) -> None:
    tokens = prompt(30)
    texts = generate(variant, cut, [tokens], [25], chunk=8, max_kv_size=16)
    assert texts == [expected(variant, tokens, 25, chunk=8, max_kv_size=16)]


def test_the_same_seed_gives_the_same_text_in_every_layout() -> None:
    prompts = [prompt(length) for length in (5, 12, 9, 20)]
    counts = [15] * 4
    choices = [
        Choice(temp=0.8),
        Choice(temp=1.0, top_p=0.9, stream=1),
        Choice(stream=2),
        Choice(temp=0.7, top_k=20, min_p=0.01, xtc_probability=0.3, stream=3),
    ]
    layouts = [
        generate("llama", cut, prompts, counts, most=most, choices=choices)
        for cut, most in (([6], 4), ([3, 3], 4), ([2, 3, 1], 3), ([3, 3], 1))
    ]
    assert all(texts == layouts[0] for texts in layouts[1:])
    assert layouts[0][2] == expected("llama", prompts[2], 15)
    greedy = [expected("llama", tokens, 15) for tokens in prompts]
    assert all(layouts[0][i] != greedy[i] for i in (0, 1, 3))
    again = [Choice(temp=0.8, seed=11, stream=5), *choices[1:]]
    assert generate("llama", [3, 3], prompts, counts, choices=again)[0] != layouts[0][0]


def test_a_failure_names_rank_stage_and_item(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Slice, *_: Any) -> None:
        raise RuntimeError("Insufficient Memory")

    monkeypatch.setattr(Slice, "last_logits", fail)
    with pytest.raises(
        EngineError,
        match=r"^rank 1 on localhost, stage 1, prompt of text 0, 1 tokens: RuntimeError: Insuff",
    ):
        generate("llama", [3, 3], [prompt(4)], [2])


def test_a_wait_names_the_peer() -> None:
    def work(transport: Transport) -> None:
        if transport.rank == 1:
            Follower(transport, Slice(models("llama")[1], 3, 6)).run()

    with pytest.raises(
        TransportTimeout, match=r"^rank 1 on localhost, stage 1, waiting for rank 0 on localhost"
    ):
        LocalNetwork(2, timeout=0.3).run(work)
