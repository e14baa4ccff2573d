"""A server that starts anew takes the beginnings of prompts from what the one before kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from shardmlx.inference.pipeline import FirstStage
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.inference.sampling_params import SamplingParams
from shardmlx.modelfiles.parts import read_shape
from shardmlx.models.sizes.kv_cache import CacheQuantisation
from testbed.family_configs import CONFIGS
from testbed.tiny_models import build, tiny_config
from testbed.undeclared_configs import UNDECLARED
from tests.helpers.generation import by_mlx_lm, on_ranks, texts_of
from tests.helpers.models_and_batches import move_trained, with_adapters

LAYERS, COUNT = 4, 6
PLAIN = "keys and values"
MODELS = {
    PLAIN: tiny_config("qwen3", layers=LAYERS, head_dim=32),
    "windows": CONFIGS["gemma3_text"],
    "states beside keys and values": UNDECLARED["falcon_h1"],
    "convolutions": UNDECLARED["lfm2"],
}
PROMPT = [1 + i % 50 for i in range(40)]
OTHER = [*PROMPT[:30], 7, 8]


def model_of(kind: str, seed: int = 1) -> nn.Module:
    model = build(MODELS[kind], seed)
    model.eval()
    mx.eval(model.parameters())
    return model


def serve(
    directory: Path,
    prompt: list[int],
    *,
    kind: str = PLAIN,
    cut: int = 2,
    seed: int = 1,
    change: Callable[[nn.Module], object] = lambda model: None,
    before: Callable[[], object] = lambda: None,
    **how: Any,
) -> tuple[list[int], int, list[str]]:
    """The text of one prompt, how many tokens of it were known, and the faults at the start."""
    cached: dict[int, int] = {}
    said: list[str] = []

    def work(first_stage: FirstStage) -> list[int]:
        before()
        first_stage.add(0, prompt, SamplingParams(), context=100)
        return texts_of(first_stage, {0: COUNT}, cached)[0]

    models = [model_of(kind, seed) for _ in range(2)]
    for model in models:
        change(model)
        mx.eval(model.parameters())
    text = on_ranks(
        models,
        [(0, cut), (cut, LAYERS)],
        work,
        prefix_cache=PrefixCache.of(read_shape(MODELS[kind]), shortest=4),
        directory=directory,
        said=said,
        **how,
    )
    return text, cached[0], said


def alone(prompt: list[int], kind: str = PLAIN) -> list[int]:
    return by_mlx_lm(model_of(kind), prompt, COUNT, chunk=2048)


@pytest.mark.parametrize("kind", [each for each in MODELS if each != PLAIN])
def test_a_conversation_goes_on_after_a_restart_with_another_stage_map(
    kind: str, tmp_path: Path
) -> None:
    text, cached, _ = serve(tmp_path, PROMPT, kind=kind)
    assert (text, cached) == (alone(PROMPT, kind), 0)
    further = [*PROMPT, *text, 11, 12]
    entered = len(PROMPT) + COUNT - 1
    cut = 2 if kind == "convolutions" else 1  # a stage of these alone counts tokens beside them
    assert serve(tmp_path, further, kind=kind, cut=cut) == (alone(further, kind), entered, [])


def test_quantised_caches_are_found_again(tmp_path: Path) -> None:
    how: dict[str, Any] = {"quantisation": CacheQuantisation(8, 32, 0)}
    fresh, *_ = serve(tmp_path / "empty", OTHER, **how)
    serve(tmp_path, PROMPT, **how)
    assert serve(tmp_path, OTHER, **how) == (fresh, 30, [])


def test_another_model_finds_nothing(tmp_path: Path) -> None:
    serve(tmp_path, PROMPT)
    assert serve(tmp_path, OTHER, seed=2)[1:] == (0, [])


def change_a_number(model: nn.Module) -> None:
    """In the middle of a matrix."""
    weight = model.layers[1].self_attn.k_proj.weight
    weight[9, 5] += 0.5


def exchange_rows(model: nn.Module) -> None:
    weight = model.layers[1].self_attn.k_proj.weight
    weight[8:10] = weight[mx.array([9, 8])]


def train_adapters(model: nn.Module, scale: float) -> None:
    move_trained(with_adapters(model, scale=scale), 0.1)


@pytest.mark.parametrize("change", [change_a_number, exchange_rows])
def test_a_model_that_differs_in_a_few_numbers_finds_nothing(
    change: Callable[[nn.Module], None], tmp_path: Path
) -> None:
    serve(tmp_path, PROMPT)
    assert serve(tmp_path, OTHER, change=change)[1:] == (0, [])
    assert serve(tmp_path, OTHER)[1:] == (30, [])


def test_adapters_of_another_scale_find_nothing(tmp_path: Path) -> None:
    serve(tmp_path, PROMPT, change=partial(train_adapters, scale=2.0))
    assert serve(tmp_path, OTHER, change=partial(train_adapters, scale=4.0))[1:] == (0, [])
    assert serve(tmp_path, OTHER, change=partial(train_adapters, scale=2.0))[1:] == (30, [])


def test_a_sequence_with_a_damaged_layer_or_without_one_is_passed_over_by_name(
    tmp_path: Path,
) -> None:
    serve(tmp_path, PROMPT)
    (damaged,) = tmp_path.rglob("*-3-*.safetensors")
    content = bytearray(damaged.read_bytes())
    content[-9] ^= 1
    damaged.write_bytes(content)
    text, cached, (said,) = serve(tmp_path, OTHER)
    assert (text, cached) == (alone(OTHER), 0)
    assert damaged.name in said
    (missing,) = tmp_path.rglob("*-0-*.safetensors")
    missing.unlink()
    assert len(serve(tmp_path, PROMPT)[2]) == 1


def test_files_go_with_the_sequences_that_are_forgotten(tmp_path: Path) -> None:
    for prompt in (PROMPT, PROMPT[::-1]):
        serve(tmp_path, prompt, capacity=256)
    assert len([*tmp_path.rglob("*.safetensors")]) == LAYERS


def test_a_disk_that_takes_nothing_holds_nobody_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fill_up() -> None:
        (here,) = tmp_path.iterdir()
        here.rmdir()
        here.touch()

    text, *_ = serve(tmp_path, OTHER, before=fill_up)
    assert text == alone(OTHER)
    assert str(tmp_path) in capfd.readouterr().err
