"""A text with drafts, good and bad ones, is that without: the tokens, the caches, what is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from shardmlx.inference.commands import Item
from shardmlx.inference.drafts import BackOff, Draft, DraftCounts, Drafter, Drafting
from shardmlx.inference.pipeline import FirstStage
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.inference.sampling_params import SampledToken, SamplingParams
from shardmlx.inference.stage import UNSENT, ItemGraph, StageWorker
from shardmlx.models.sizes.kv_cache import CacheQuantisation
from testbed.tiny_models import VOCABULARY
from tests.helpers.generation import by_mlx_lm, counted, finish_all, on_ranks, texts_of
from tests.helpers.models_and_batches import tiny_model

LAYERS = 4
WINDOW = 40
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    },
    "wide": {"head_dim": 32},
}


@cache
def models(kind: str) -> list[nn.Module]:
    """One for each rank: threads must not share one."""
    family = "qwen3" if kind == "wide" else "llama"
    made = [tiny_model(family, layers=LAYERS, **KINDS[kind]) for _ in range(4)]
    mx.eval([model.eval().parameters() for model in made])
    return made


class Spoiled(Drafter):
    """Drafts of random lengths that are the ``texts`` to come, but for some tokens. So many went
    ``on`` from others."""

    def __init__(self, texts: Mapping[int, Sequence[int]], wrong: float = 0.3) -> None:
        self._texts, self._wrong = texts, wrong
        self._random = np.random.RandomState(0)
        self.on = 0

    def draft(
        self, sequence: int, tokens: Sequence[int], ahead: Sequence[int], pays: Callable[[int], int]
    ) -> Draft:
        begin, length = len(tokens) + len(ahead), self._random.randint(0, pays(0) + 1)
        coming = self._texts[sequence][begin : begin + length]
        is_wrong = self._random.rand(len(coming)) < self._wrong
        pairs = zip(coming, is_wrong.tolist(), strict=True)
        self.on += len(ahead) > 0
        return Draft(tuple((each + wrong) % VOCABULARY for each, wrong in pairs))


class Always(BackOff):
    """Drafts pay, and so do those that go on where there are several stages."""

    def allows(self, kind: int) -> bool:
        return True

    def goes_on(self, kind: int) -> bool:
        return self.stages > 1


def drafting_of(drafter: Drafter, stages: int, **limits: Any) -> Drafting:
    return Drafting(drafter, 5, fixed=True, back_off=Always(stages=stages), **limits)


def prompt(length: int, seed: int = 0) -> list[int]:
    random = np.random.RandomState(seed + 1000 * length)
    return [int(token) for token in random.randint(1, VOCABULARY, size=length)]


Work = Callable[[FirstStage], Any]


def staged(kind: str, cut: Sequence[int], work: Work, **how: Any) -> Any:
    return on_ranks(models(kind), [*pairwise([0, *accumulate(cut)])], work, **how)


def both(
    kind: str, cut: Sequence[int], work: Work, prompts: Mapping[int, Sequence[int]], **how: Any
) -> tuple[Any, Any, DraftCounts]:
    """What ``work`` makes of a pipeline without and with drafts: texts of ``prompts``."""
    limits = {each: how.pop(each) for each in ("cuttable", "quantised") if each in how}
    kept = partial(PrefixCache, limits.get("cuttable", 10**9), shortest=4)
    plain = staged(kind, cut, work, prefix_cache=kept(), **how)
    known = {number: [*tokens, *plain[number]] for number, tokens in prompts.items()}
    drafter = Spoiled(known)
    how |= {"prefix_cache": kept(), "drafting": drafting_of(drafter, len(cut), **limits)}
    drafted, counts = staged(kind, cut, counted(work), **how)
    assert (drafter.on > 0) == (len(cut) > 1)
    return plain, drafted, counts


PENALTIES: Any = {
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.3,
    "logit_bias": ((5, 1.0), (9, -100.0)),
    "context": tuple(prompt(12)),
}
CHOICES = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temp=0.4, top_p=0.95, seed=3),
    "with XTC": SamplingParams(temp=0.6, xtc_probability=0.5, xtc_threshold=0.05, stream=4),
    "with penalties": SamplingParams(temp=0.3, seed=5, **PENALTIES),
    "greedy with penalties": SamplingParams(**PENALTIES),
}


@pytest.mark.parametrize("cut", [[4], [1, 2, 1]], ids=str)
@pytest.mark.parametrize("choice", CHOICES)
def test_a_text_is_the_same(choice: str, cut: list[int]) -> None:
    tokens = prompt(12)

    def work(first_stage: FirstStage) -> dict[int, list[int]]:
        first_stage.add(0, tokens, CHOICES[choice], context=60)
        return texts_of(first_stage, {0: 30})

    plain, drafted, counts = both("plain", cut, work, {0: tokens})
    assert drafted == plain
    assert 0 < counts.accepted < counts.drafted


def test_ranks_that_share_a_stage_compute_the_same_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same order, for in sums each waits for the others: with a text that is cancelled, and
    with kept beginnings. The first rank holds no messages that have been sent."""
    cut = [2, 2]
    begun: dict[int, list[Item]] = {rank: [] for rank in range(2 * len(cut))}
    start = StageWorker.start

    def noted(worker: StageWorker, graph: ItemGraph) -> None:
        begun[worker.transport.rank].append(graph.item)
        start(worker, graph)

    monkeypatch.setattr(StageWorker, "start", noted)
    prompts = {0: prompt(12), 1: prompt(9), 2: prompt(30), 3: prompt(12), 4: prompt(9)}

    def work(first_stage: FirstStage) -> dict[int, list[int]]:
        texts: dict[int, list[int]] = {}
        for number in range(3):
            first_stage.add(number, prompts[number], CHOICES["sampled"], context=60)
        while not first_stage.step():
            pass
        first_stage.cancel(1)
        texts |= texts_of(first_stage, {0: 20, 1: 30, 2: 15})
        for number in (3, 4):
            first_stage.add(number, prompts[number], CHOICES["greedy"], context=60)
            texts |= texts_of(first_stage, {number: 25})
        assert len(first_stage._worker.outbox.unsent) <= UNSENT
        return texts

    plain, drafted, counts = both("plain", cut, work, prompts, shares=2)
    for number in (3, 4):
        assert plain[number] == drafted[number]
        assert plain[number] == by_mlx_lm(models("plain")[0], prompts[number], 25)
    assert counts.accepted > 0
    assert begun[0]
    for rank in range(0, len(begun), 2):
        assert begun[rank] == begun[rank + 1]


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("windows", {"cuttable": WINDOW}),
        ("plain", {"cuttable": 24, "max_kv_size": 24}),
        ("wide", {"quantised": 24, "quantisation": CacheQuantisation(4, 32, 24)}),
    ],
    ids=["windows", "limited", "quantised"],
)
def test_a_text_is_the_same_beyond_its_caches(kind: str, how: dict[str, Any]) -> None:
    tokens = prompt(12)

    def work(first_stage: FirstStage) -> dict[int, list[int]]:
        first_stage.add(0, tokens, SamplingParams(), context=100)
        return texts_of(first_stage, {0: 50})

    plain, drafted, counts = both(kind, [2, 2], work, {0: tokens}, **how)
    assert drafted == plain
    assert counts.accepted > 0


@pytest.mark.parametrize("cut", [[4], [1, 2, 1]], ids=str)
@pytest.mark.parametrize("cancels", [False, True], ids=["ends", "cancelled"])
def test_a_text_ends_at_any_time_while_rounds_are_under_way(cut: list[int], cancels: bool) -> None:
    """Within a round, and before those behind it have come: the next goes on from what is kept."""
    tokens, texts = prompt(12), 11

    def work(first_stage: FirstStage) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(texts)]
        for number, text in enumerate(found):
            first_stage.add(number, tokens, CHOICES["greedy with penalties"], context=60)
            steps, is_open, most = 0, True, 30 if number == texts - 1 else number + 1
            while not first_stage.is_idle:
                for _, sampled in first_stage.step():
                    assert is_open
                    text.append(sampled.token)
                    if len(text) == most:
                        first_stage.finish(number)
                        is_open = False
                steps += 1
                if is_open and cancels and most < 30 and steps == 2 * number:
                    first_stage.cancel(number)
                    is_open = False
        return found

    *_, plain = staged("plain", cut, work, prefix_cache=PrefixCache(shortest=4))
    drafter = Spoiled({number: [*tokens, *plain] for number in range(texts)})
    how: Any = {"prefix_cache": PrefixCache(shortest=4), "drafting": drafting_of(drafter, len(cut))}
    found = staged("plain", cut, work, **how)
    assert (drafter.on > 0) == (len(cut) > 1)
    assert found[-1] == plain
    assert found == [plain[: len(text)] for text in found]
    assert cancels or [len(text) for text in found] == [*range(1, texts), 30]


def test_log_probabilities_come_with_each_token_of_a_round() -> None:
    tokens = prompt(12)

    def work(first_stage: FirstStage) -> list[SampledToken]:
        first_stage.add(0, tokens, SamplingParams(logprobs=2), context=60)
        return finish_all(first_stage, {0: 20})[0]

    plain = staged("plain", [2, 2], work)
    known = {0: [*tokens, *(each.token for each in plain)]}
    drafted = staged("plain", [2, 2], work, drafting=drafting_of(Spoiled(known), 2))
    for one, other in zip(plain, drafted, strict=True):
        assert one.token == other.token
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [each for each, _ in one.top] == [each for each, _ in other.top]


def test_drafts_count_as_accepted_when_their_tokens_come() -> None:
    tokens = prompt(12)

    def work(first_stage: FirstStage) -> tuple[list[int], list[int]]:
        first_stage.add(0, tokens, SamplingParams(), context=60)
        text: list[int] = []
        accepted: list[int] = []
        while len(text) < 30:
            for number, sampled in first_stage.step():
                text.append(sampled.token)
                accepted.append(first_stage.drafts(number).accepted)
        first_stage.finish(0)
        return text, accepted

    plain, none = staged("plain", [4], work)
    assert {*none} == {0}
    drafting = drafting_of(Spoiled({0: [*tokens, *plain]}), 1)
    (drafted, accepted), counts = staged("plain", [4], counted(work), drafting=drafting)
    assert drafted == plain
    assert {b - a for a, b in pairwise(accepted)} == {0, 1}
    assert accepted[-1] in range(8, counts.accepted + 1)


@pytest.mark.parametrize("cut", [[4], [1, 2, 1]], ids=str)
def test_many_random_rounds_leave_the_caches_of_plain_steps(cut: list[int]) -> None:
    tokens, count = prompt(12), 70

    def work(first_stage: FirstStage) -> tuple[list[int], list[np.ndarray]]:
        first_stage.add(0, tokens, SamplingParams(), context=400)
        text = texts_of(first_stage, {0: count})[0]
        first_stage.keep_alive()  # with the news of the last round
        caches = first_stage._worker.caches._alone[0]
        length = len(tokens) + count - 1
        assert {cache.offset for cache in caches} == {length}
        states = [each[..., :length, :] for cache in caches for each in (cache.keys, cache.values)]
        return text, [np.array(each) for each in states]

    plain, states = staged("plain", cut, work, prefix_cache=PrefixCache())
    drafting = drafting_of(Spoiled({0: [*tokens, *plain]}, wrong=0.6), len(cut))
    how: Any = {"prefix_cache": PrefixCache(), "drafting": drafting}
    (drafted, others), counts = staged("plain", cut, counted(work), **how)
    assert drafted == plain
    assert counts.rounds >= 30
    for state, other in zip(states, others, strict=True):
        np.testing.assert_allclose(state, other, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "most", "cut"),
    [("plain", 1, [2, 2]), ("plain", 4, [2, 2]), ("plain", 2, [4]), ("windows", 1, [2, 2])],
)
def test_conversations_go_on_after_a_round_in_which_one_ended(
    kind: str, most: int, cut: list[int]
) -> None:
    """Others are kept, cancelled, put back and join meanwhile."""
    first = prompt(20)
    answer = by_mlx_lm(models(kind)[-1], first, 11)
    counts = {0: 11, 1: 14, 3: 20, 4: 8}
    later = {1: [*first, *answer, *prompt(9)], 2: prompt(30), 3: prompt(250), 4: prompt(251)}

    def work(first_stage: FirstStage) -> dict[int, list[int]]:
        first_stage.add(0, first, SamplingParams(), context=60)
        texts = texts_of(first_stage, {0: 11}) | {number: [] for number in later}
        for number, tokens in later.items():
            first_stage.add(number, tokens, SamplingParams(), context=512)
        while not first_stage.is_idle:
            came = first_stage.step()
            if not came and len(texts[2]) > 2 and 2 in first_stage._sequences:
                first_stage.cancel(2)  # a token of it is under way
            for number, sampled in came:
                texts[number].append(sampled.token)
                if len(texts[number]) == counts.get(number):
                    first_stage.finish(number)
        assert first_stage.kept_tokens > 0
        return texts

    prompts = {0: first, **later}
    how: Any = {"most": most, "capacity": 1024, "cuttable": WINDOW if kind == "windows" else 10**9}
    plain, drafted, rounds = both(kind, cut, work, prompts, **how)
    assert drafted | {2: plain[2]} == plain
    assert plain[0] == answer
    assert rounds.accepted > 0


class Single(Drafter):
    """Drafts of a token each, all of them right."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def draft(
        self, sequence: int, tokens: Sequence[int], ahead: Sequence[int], pays: Callable[[int], int]
    ) -> Draft:
        begin = len(tokens) + len(ahead)
        return Draft(tuple(self._text[begin : begin + min(pays(0), 1)]))


def test_a_step_gives_a_token_at_most_though_rounds_that_go_on_have_come() -> None:
    """Its caller may end the text with any."""
    tokens = prompt(12)
    plain = by_mlx_lm(models("plain")[-1], tokens, 30)

    def work(first_stage: FirstStage) -> list[int]:
        first_stage.add(0, tokens, SamplingParams(), context=60)
        text: list[int] = []
        while not first_stage.is_idle:
            came = first_stage.step()
            assert len(came) <= 1
            text += [sampled.token for _, sampled in came]
            if came and len(text) == 29:
                first_stage.finish(0)
            time.sleep(0.02 * len(came))  # so that all rounds under way come back
        return text

    drafting = drafting_of(Single([*tokens, *plain]), 3)
    assert staged("plain", [1, 2, 1], work, drafting=drafting) == plain[:29]
