"""Drafts of a model's own head, on the last stage: as by formula, and the text is that without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from shardmlx.inference.drafts import BackOff, Drafting, HeadDrafter
from shardmlx.inference.pipeline import FirstStage
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.inference.sampling_params import SamplingParams
from shardmlx.loading.build import build_draft_head, build_to_generate
from shardmlx.models.sizes.kv_cache import CacheQuantisation
from testbed.tiny_models import VOCABULARY, save_model_directory, tiny_config
from tests.helpers.draft_heads import guess_by_formula, head_config, save_with_head, without_head
from tests.helpers.generation import counted, on_ranks, texts_of
from tests.helpers.refusals import refusal

FAMILIES = ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "mimo")
SOME_NOISE = 1.5

Models = Callable[[str, float | None], tuple[Path, list[nn.Module]]]


def read_from(path: Path) -> list[nn.Module]:
    """One for each rank: threads must not share one."""
    read = [build_to_generate(path, dtype=None, adapter_path=None, seed=None) for _ in range(3)]
    mx.eval([each.parameters() for each in read])
    return read


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The files of a family's model with a head of so much noise, and a model for each rank."""
    made: dict[tuple[str, float | None], tuple[Path, list[nn.Module]]] = {}

    def make(family: str, noise: float | None) -> tuple[Path, list[nn.Module]]:
        if (family, noise) not in made:
            path = tmp_path_factory.mktemp(family) / "model"
            save_with_head(path, head_config(family), noise=noise)
            # Of DeepSeek-V3 mlx-lm drops layer 61 alone, and this is a smaller one.
            plain = without_head(path, path.with_name("plain"))
            made[family, noise] = path, read_from(plain if family == "deepseek_v3" else path)
        return made[family, noise]

    return make


@dataclass
class Recorded(HeadDrafter):
    """Keeps what the head guessed after so many tokens of a sequence."""

    guesses: list[tuple[int, int, list[int]]] = field(default_factory=list)

    def take(self, sequence: int, length: int, guessed: list[int]) -> None:
        self.guesses.append((sequence, length, guessed))
        super().take(sequence, length, guessed)


def drafting(most: int = 3, **how: Any) -> Drafting:
    return Drafting(Recorded(), most, fixed=True, back_off=BackOff(cost=0.0), **how)


def prompt(length: int, seed: int = 0) -> list[int]:
    random = np.random.RandomState(seed + 1000 * length)
    return [int(token) for token in random.randint(1, VOCABULARY, size=length)]


def ranges(cut: Sequence[int], layers: int) -> list[tuple[int, int]]:
    return [*pairwise([0, *accumulate(cut), layers])]


@pytest.mark.parametrize(
    ("family", "cut"), [*((each, [2]) for each in FAMILIES), (FAMILIES[0], [])], ids=str
)
def test_guesses_are_those_by_formula_and_the_text_is_the_same(
    family: str, cut: list[int], models: Models
) -> None:
    path, read = models(family, SOME_NOISE)
    tokens, stages = prompt(20), ranges(cut, 4)

    def work(first_stage: FirstStage) -> list[int]:
        first_stage.add(0, tokens, SamplingParams(), context=60)
        return texts_of(first_stage, {0: 20})[0]

    plain = on_ranks(read, stages, work)
    drafts = drafting()
    drafted, counts = on_ranks(read, stages, counted(work), drafting=drafts, head=path)
    assert drafted == plain
    assert 0 < counts.accepted < counts.drafted
    text = [*tokens, *plain]
    assert isinstance(drafts.drafter, Recorded)
    for _, length, guessed in drafts.drafter.guesses[:8]:
        if length <= len(text):
            assert guessed == guess_by_formula(path, read[2], text[:length], len(guessed))


@pytest.mark.parametrize(
    ("noise", "temp", "cut"),
    [
        *((None, 0.0, cut) for cut in ([2], [1, 1])),
        *((SOME_NOISE, 0.7, cut) for cut in ([], [2], [1, 1])),
    ],
    ids=str,
)
def test_a_text_is_the_same_whatever_the_head_guesses(
    noise: float | None, temp: float, cut: list[int], models: Models
) -> None:
    path, read = models("mimo", noise)
    tokens = prompt(20)

    def work(first_stage: FirstStage) -> list[int]:
        first_stage.add(0, tokens, SamplingParams(temp=temp, seed=3, logprobs=2), context=60)
        return texts_of(first_stage, {0: 30})[0]

    plain = on_ranks(read, ranges(cut, 4), work)
    how: Any = {"drafting": drafting(4), "head": path}
    drafted, counts = on_ranks(read, ranges(cut, 4), counted(work), **how)
    assert drafted == plain
    assert counts.accepted < counts.drafted


@pytest.mark.parametrize("cut", [[], [2]], ids=["1 stage", "2 stages"])
def test_a_head_that_knows_the_next_token_is_always_right(cut: list[int], models: Models) -> None:
    path, read = models("glm4_moe", 0.0)

    def work(first_stage: FirstStage) -> list[int]:
        first_stage.add(0, prompt(20), SamplingParams(), context=100)
        return texts_of(first_stage, {0: 40})[0]

    how: Any = {"drafting": drafting(4), "head": path}
    _, counts = on_ranks(read, ranges(cut, 4), counted(work), **how)
    assert counts.accepted == counts.drafted
    assert counts.rounds <= 9  # after the plain steps 37 tokens come, five a round


@pytest.mark.parametrize(
    ("how", "limits"),
    [
        ({"max_kv_size": 40}, {"cuttable": 40}),
        ({"quantisation": CacheQuantisation(4, 32, 30)}, {"quantised": 30}),
    ],
    ids=["limited", "quantised"],
)
def test_the_heads_cache_has_the_kind_of_the_layers(
    how: dict[str, Any], limits: dict[str, Any], tmp_path: Path
) -> None:
    config = head_config("mimo", hidden_size=128)
    path = save_with_head(tmp_path / "model", config, noise=0.2)
    read = read_from(path)

    def work(first_stage: FirstStage) -> list[int]:
        first_stage.add(0, prompt(20), SamplingParams(), context=100)
        return texts_of(first_stage, {0: 50})[0]

    plain = on_ranks(read, ranges([2], 4), work, **how)
    how = {**how, "drafting": drafting(**limits), "head": path}
    drafted, counts = on_ranks(read, ranges([2], 4), counted(work), **how)
    assert drafted == plain
    assert counts.accepted > 0


@pytest.mark.parametrize("cut", [[], [2]], ids=["1 stage", "2 stages"])
def test_conversations_are_kept_put_back_and_share_steps(cut: list[int], models: Models) -> None:
    """Their texts are the same; caches of head and layers stay equally long."""
    path, read = models("mimo", SOME_NOISE)
    first = prompt(20)

    def work(first_stage: FirstStage) -> dict[int, list[int]]:
        first_stage.add(0, first, SamplingParams(), context=60)
        texts = texts_of(first_stage, {0: 11})
        later = {1: [*first, *texts[0], *prompt(9)], 3: prompt(250), 4: prompt(251), 5: [7]}
        for number, tokens in later.items():
            first_stage.add(number, tokens, SamplingParams(), context=512)
        texts |= texts_of(first_stage, {1: 14, 3: 20, 4: 8, 5: 30})
        assert first_stage.kept_tokens > 0
        first_stage.keep_alive()  # with the news of the last round
        caches = first_stage._worker.caches
        every = [*caches._alone.values(), *(each.caches for each in caches._groups.values())]
        assert {len({cache.offset for cache in each}) for each in every} == {1}
        return texts

    how: Any = {"most": 4, "capacity": 1024}
    plain = on_ranks(read, ranges(cut, 4), work, prefix_cache=PrefixCache(shortest=4), **how)
    how |= {"drafting": drafting(), "head": path, "prefix_cache": PrefixCache(shortest=4)}
    drafted, counts = on_ranks(read, ranges(cut, 4), counted(work), **how)
    assert drafted == plain
    assert counts.accepted > 0


def test_a_server_that_starts_anew_reads_the_heads_cache_too(
    models: Models, tmp_path: Path
) -> None:
    path, read = models("glm4_moe", 0.0)
    first, said = prompt(30), list[str]()

    def work(first_stage: FirstStage) -> tuple[dict[int, list[int]], dict[int, int]]:
        cached: dict[int, int] = {}
        first_stage.add(0, [*first, 5, 6], SamplingParams(), context=100)
        return texts_of(first_stage, {0: 20}, cached), cached

    def started() -> Any:
        how: Any = {"prefix_cache": PrefixCache(shortest=4), "directory": tmp_path, "said": said}
        return on_ranks(read, ranges([2], 4), work, drafting=drafting(), head=path, **how)

    (plain, _), (again, cached) = started(), started()
    assert again == plain
    assert (cached[0], said) == (31, [])
    assert {each.stem.split("-")[1] for each in tmp_path.glob("*/*.safetensors")} == {
        *("0", "1", "2", "3", "mtp")
    }


def test_a_head_in_4_bits_is_loaded_so_whatever_single_layers_are(tmp_path: Path) -> None:
    how = {"group_size": 32, "bits": 4, "model.layers.0.self_attn.q_proj": False}
    path = save_with_head(
        tmp_path / "model", head_config("glm4_moe", quantization=how), noise=0.0, bits=4
    )
    head = build_draft_head(path, None)
    kinds = {name: type(module) for name, module in head._model.named_modules() if "proj" in name}
    assert len(kinds) > 8
    assert not [name for name, kind in kinds.items() if kind is nn.Linear]
    stored: Any = mx.load(str(path / "model.safetensors"))
    own = [
        each.nbytes
        for name, each in stored.items()
        if name.startswith("model.layers.4.") and "embed" not in name and ".head." not in name
    ]
    assert head.nbytes == sum(own)
    wide = build_draft_head(path, "float16")
    assert {each.dtype for _, each in tree_flatten(wide._model.parameters())} == {
        mx.float16,
        mx.uint32,
    }


@pytest.mark.parametrize("family", ["glm4_moe", "llama"])
def test_files_without_a_head_are_refused(family: str, tmp_path: Path) -> None:
    path = save_with_head(tmp_path / "model", head_config("glm4_moe"))
    if family == "llama":
        save_model_directory(path, tiny_config("llama"))
    error = refusal(build_draft_head, without_head(path, tmp_path / "plain"), None)
    assert error.problem.startswith("--draft mtp: ")
    assert "--draft lookup" in error.remedy
