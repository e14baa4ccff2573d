"""Samples come from the base and from snapshots, in one batch, between the ranks' other commands.

The reference is mlx-lm in one process: greedy texts, and log-probabilities of whole texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from shardmlx.api.requests import SamplePrompt, SampleResult
from shardmlx.api.sampling import SHORTEST_SHARED, Sampler, SamplingWorker
from shardmlx.distributed.crew import Crew, lead
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.inference.adapters import Adapter
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.inference.route import TokenRoute
from shardmlx.models.runtime.slice import Slice
from shardmlx.pipeline.mesh import Mesh
from testbed.tiny_models import VOCABULARY
from tests.helpers.generation import by_mlx_lm
from tests.helpers.local_transport import LocalNetwork
from tests.helpers.models_and_batches import move_trained, tiny_model, with_adapters

LAYERS = 4

LONG = [int(each) for each in np.random.RandomState(0).randint(1, VOCABULARY, 40)]

PROMPTS = [LONG, LONG[5:12], [3], LONG[:25]]


class _Tokenizer:
    """A tokenizer of one token a letter, whose texts end with token 0."""

    eos_token_ids = (0,)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(33 + token) for token in tokens)


def adapted(scale: float) -> nn.Module:
    """Return the model with LoRA whose weights have moved by ``scale``."""
    return move_trained(with_adapters(tiny_model(layers=LAYERS)), scale)


class Ranks(SamplingWorker):
    """A rank that can also do something else between samples."""

    def add(self, numbers: Sequence[int]) -> int:
        return sum(numbers)


def on_ranks(
    mesh: Mesh,
    work: Callable[[Sampler, Crew[Ranks]], Any],
    *,
    scales: Mapping[int, float] | None = None,
    capacity: int | None = 4096,
    world: int | None = None,
    most: int = 8,
    placement: Sequence[int] | None = None,
) -> Any:
    """Return what ``work`` makes of a sampler on a ``mesh`` of ranks, all of which hold adapters
    moved by ``scales``; stages have a ``placement`` on these. The ``world`` may have further
    ranks."""
    size = world or mesh.size
    models = [tiny_model(layers=LAYERS) for _ in range(size)]
    others = [{n: adapted(scale) for n, scale in (scales or {}).items()} for _ in range(size)]

    def run(transport: Transport) -> Any:
        route = TokenRoute.of(mesh, placement)
        bounds = [LAYERS * i // len(route.hops) for i in range(len(route.hops) + 1)]
        layers = [(bounds[number], bounds[number + 1]) for number in route.numbers(transport.rank)]
        parts = [Slice(models[transport.rank], *each) for each in layers]
        worker = Ranks(transport, parts, route, 8, 7)
        for number, model in others[transport.rank].items():
            own = [Slice(model, *each) for each in layers]
            worker.hold(
                number,
                [Adapter(each, {name: each[name] for name in each.trainable}) for each in own],
            )

        def led(crew: Crew[Ranks]) -> Any:
            sampler = Sampler(
                crew,
                _Tokenizer(),
                VOCABULARY,
                most=most,
                context=100,
                capacity=capacity,
                prefixes=PrefixCache(shortest=SHORTEST_SHARED),
            )
            return work(sampler, crew)

        return lead(transport, worker, led)

    return LocalNetwork(size, timeout=20).run(run)[0]


def ask(sampler: Sampler, request: SamplePrompt, adapter: int = 0) -> Future[SampleResult]:
    """Ask for a sample; its future."""
    future: Future[SampleResult] = Future()
    sampler.add(request, adapter, future)
    return future


def finish(sampler: Sampler) -> None:
    """Sample until nothing is left, and let the ranks go."""
    while not sampler.is_idle:
        sampler.step()
    sampler.pause()


def logprobs_of(model: nn.Module, tokens: Sequence[int]) -> np.ndarray:
    """Return the log-probabilities (T - 1, V) at each token but the last."""
    logits = model(mx.array([*tokens[:-1]])[None])[0].astype(mx.float32)
    return np.array(nn.log_softmax(logits))


PLACEMENTS = {
    "one rank": [0],
    "a stage a rank": [0, 1, 2],
    "zb-v": [0, 1, 1, 0],
    "interleaved": [0, 1, 0, 1],
    "zb-v of one rank": [0, 0],
    "ranks out of order": [0, 2, 1],
}


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_texts_of_the_base_and_of_snapshots_are_mlx_lm_s(placement: list[int]) -> None:
    """All are under way at once, of three adapters; each answer's log-probabilities are those of
    the whole text."""
    scales = {1: 0.3, 2: 0.5}

    def work(sampler: Sampler, crew: Crew[Ranks]) -> dict[tuple[int, int], SampleResult]:
        asked = {}
        for i, prompt in enumerate(PROMPTS):
            for adapter in (0, *scales):
                how = SamplePrompt(prompt, max_tokens=9, temperature=0.0, stop_ids=())
                asked[i, adapter] = ask(sampler, how, adapter)
        finish(sampler)
        return {key: future.result(0) for key, future in asked.items()}

    mesh = Mesh(1, max(placement) + 1)
    found = on_ranks(mesh, work, scales=scales, placement=placement)
    for (i, adapter), result in found.items():
        model = adapted(scales[adapter]) if adapter else tiny_model(layers=LAYERS)
        (answer,) = result.answers
        assert answer.tokens.tolist() == by_mlx_lm(model, PROMPTS[i], 9)
        assert answer.reason == "length"
        text = [*PROMPTS[i], *answer.tokens.tolist()]
        theirs = logprobs_of(model, text)[len(PROMPTS[i]) - 1 :]
        own = theirs[np.arange(9), answer.tokens]
        assert np.allclose(answer.logprobs, own, atol=1e-4)


V = PLACEMENTS["zb-v"]


@pytest.mark.parametrize("placement", [[0, 1], V], ids=str)
def test_answers_to_one_prompt_share_its_prefill_and_differ(placement: list[int]) -> None:
    def work(sampler: Sampler, crew: Crew[Ranks]) -> list[SampleResult]:
        how = SamplePrompt(LONG, count=5, max_tokens=12, seed=3, stop_ids=(), top_logprobs=2)
        first = ask(sampler, how)
        finish(sampler)
        again = ask(sampler, how)
        finish(sampler)
        return [first.result(0), again.result(0)]

    first, again = on_ranks(Mesh(1, 2), work, placement=placement)
    texts = [each.tokens.tolist() for each in first.answers]
    assert len({tuple(each) for each in texts}) == 5
    assert texts == [each.tokens.tolist() for each in again.answers]
    assert first.cached == len(LONG) - 1
    for answer in first.answers:
        logprobs = logprobs_of(tiny_model(layers=LAYERS), [*LONG, *answer.tokens.tolist()])
        theirs = logprobs[len(LONG) - 1 :]
        assert answer.top is not None
        assert answer.top.ids.tolist() == np.argsort(-theirs, axis=1)[:, :2].tolist()
        assert np.allclose(answer.top.logprobs, -np.sort(-theirs, axis=1)[:, :2], atol=1e-4)


def test_a_short_prompt_is_computed_once_too() -> None:
    prompt = LONG[:5]

    def work(sampler: Sampler, crew: Crew[Ranks]) -> SampleResult:
        future = ask(sampler, SamplePrompt(prompt, count=4, max_tokens=6, temperature=0.0))
        finish(sampler)
        return future.result(0)

    found = on_ranks(Mesh(1, 2), work)
    assert found.cached == len(prompt) - 1
    expected = by_mlx_lm(tiny_model(layers=LAYERS), prompt, 6)
    assert [each.tokens.tolist() for each in found.answers] == [expected] * 4


def test_ranks_do_other_things_between_steps_and_answers_go_on() -> None:
    """A pause after every step changes no text."""

    def work(sampler: Sampler, crew: Crew[Ranks]) -> tuple[list[list[int]], int]:
        how = [SamplePrompt(p, max_tokens=10, stop_ids=(), seed=1) for p in PROMPTS]
        plain = [ask(sampler, each) for each in how]
        finish(sampler)
        between = [ask(sampler, each) for each in how]
        count = 0
        while not sampler.is_idle:
            sampler.step()
            sampler.pause()
            assert crew.all(Ranks.add, [1, 2]) == [3] * crew.size
            count += 1
        texts = [[*f.result(0).answers[0].tokens] for f in (*plain, *between)]
        return texts, count

    for placement in ([0], [0, 1], V):
        texts, count = on_ranks(Mesh(1, max(placement) + 1), work, placement=placement)
        assert texts[: len(PROMPTS)] == texts[len(PROMPTS) :]
        assert count > 10


def test_ranks_of_other_replicas_wait() -> None:
    """Two replicas of two stages: the first one samples."""

    def work(sampler: Sampler, crew: Crew[Ranks]) -> list[int]:
        future = ask(
            sampler, SamplePrompt(LONG, max_tokens=4, temperature=0.0, prompt_logprobs=True)
        )
        finish(sampler)
        crew.all(Ranks.add, [1])
        assert future.result(0).prompt_logprobs is not None
        tokens: list[int] = future.result(0).answers[0].tokens.tolist()
        return tokens

    assert on_ranks(Mesh(1, 2), work, world=4) == by_mlx_lm(tiny_model(layers=LAYERS), LONG, 4)


@pytest.mark.parametrize("placement", [[0, 1], V, PLACEMENTS["interleaved"], [0, 0]], ids=str)
def test_prompts_are_scored_by_their_own_snapshot(placement: list[int]) -> None:
    scales = {1: 0.4}
    others = np.random.RandomState(0).randint(-1, VOCABULARY, (len(LONG) - 1, 4))

    def work(sampler: Sampler, crew: Crew[Ranks]) -> list[SampleResult]:
        how = SamplePrompt(
            LONG,
            max_tokens=1,
            prompt_logprobs=True,
            top_prompt_logprobs=3,
            last_prompt_tokens=30,
            other_tokens=others,
        )
        asked = [ask(sampler, how, adapter) for adapter in (0, 1, 0)]
        asked.append(ask(sampler, SamplePrompt([7], max_tokens=1, prompt_logprobs=True)))
        finish(sampler)
        return [future.result(0) for future in asked]

    mesh = Mesh(1, max(placement) + 1)
    base, changed, _, single = on_ranks(mesh, work, scales=scales, placement=placement)
    assert single.prompt_logprobs is not None
    assert np.isnan(single.prompt_logprobs).tolist() == [True]
    for result, model in ((base, tiny_model(layers=LAYERS)), (changed, adapted(scales[1]))):
        theirs = logprobs_of(model, LONG)
        own = theirs[np.arange(len(LONG) - 1), LONG[1:]]
        assert result.prompt_logprobs is not None
        assert np.isnan(result.prompt_logprobs).tolist() == [True] * 10 + [False] * 30
        assert np.allclose(result.prompt_logprobs[10:], own[9:], atol=1e-4)
        of_others = np.where(others < 0, 0, np.take_along_axis(theirs, others.clip(0), axis=1))
        assert result.other_logprobs is not None
        assert np.allclose(result.other_logprobs, of_others, atol=1e-4)
        assert result.top_prompt is not None
        assert result.top_prompt.ids.shape == (len(LONG), 3)
        assert result.top_prompt.ids[10:].tolist() == np.argsort(-theirs, axis=1)[9:, :3].tolist()


def test_an_answer_ends_with_what_ends_it() -> None:
    """By a token, by a string that spans tokens, or by neither. What ends it is part of it."""
    how = SamplePrompt(LONG, max_tokens=12, seed=2, stop_ids=())

    def work(sampler: Sampler, crew: Crew[Ranks]) -> list[tuple[list[int], str]]:
        plain = ask(sampler, how)
        finish(sampler)
        text = plain.result(0).answers[0].tokens.tolist()
        at = next(i for i in range(3, 12) if text[i] not in text[:i])
        words = _Tokenizer().decode(text[at - 1 : at + 1])
        asked = [
            plain,
            ask(sampler, replace(how, stop_ids=(text[at],))),
            ask(sampler, replace(how, stop_strings=(words,))),
        ]
        finish(sampler)
        answers = [future.result(0).answers[0] for future in asked]
        assert [len(each.tokens) for each in answers[1:]] == [at + 1] * 2
        return [(each.tokens.tolist(), each.reason) for each in answers]

    (text, reason), *ended = on_ranks(Mesh(1, 1), work)
    assert (len(text), reason) == (12, "length")
    assert [(text[: len(tokens)], "stop") for tokens, _ in ended] == ended


@pytest.mark.parametrize("placement", [[0, 1], V], ids=str)
def test_cancelled_samples_end_and_others_go_on(placement: list[int]) -> None:
    def work(sampler: Sampler, crew: Crew[Ranks]) -> list[int]:
        gone = [ask(sampler, SamplePrompt(LONG, count=3, max_tokens=50)) for _ in range(2)]
        kept = ask(sampler, SamplePrompt(LONG[:9], max_tokens=6, temperature=0.0, stop_ids=()))
        for _ in range(9):
            sampler.step()
        for future in gone:
            future.cancel()
        finish(sampler)
        tokens: list[int] = kept.result(0).answers[0].tokens.tolist()
        return tokens

    expected = by_mlx_lm(tiny_model(layers=LAYERS), LONG[:9], 6)
    assert on_ranks(Mesh(1, 2), work, placement=placement) == expected


class CancelledAtLast(Future[SampleResult]):
    """A future whose client cancels it at the last moment."""

    def set_result(self, result: SampleResult) -> None:
        self.cancel()
        super().set_result(result)


def test_a_sample_may_be_cancelled_while_its_result_is_told() -> None:
    def work(sampler: Sampler, crew: Crew[Ranks]) -> tuple[bool, int]:
        gone = CancelledAtLast()
        sampler.add(SamplePrompt(LONG, max_tokens=2, stop_ids=()), 0, gone)
        kept = ask(sampler, SamplePrompt(LONG, max_tokens=6, stop_ids=()))
        finish(sampler)
        return gone.cancelled(), len(kept.result(0).answers[0].tokens)

    assert on_ranks(Mesh(1, 2), work) == (True, 6)


@pytest.mark.parametrize("placement", [[0, 1], V, PLACEMENTS["interleaved"]], ids=str)
def test_little_room_puts_answers_back_and_changes_none(placement: list[int]) -> None:
    def work(sampler: Sampler, crew: Crew[Ranks]) -> list[list[int]]:
        asked = [
            ask(sampler, SamplePrompt(p, count=2, max_tokens=20, stop_ids=(), temperature=0.0))
            for p in PROMPTS
        ]
        finish(sampler)
        return [f.result(0).answers[1].tokens.tolist() for f in asked]

    found = on_ranks(Mesh(1, 2), work, capacity=512, most=16, placement=placement)
    assert found == [by_mlx_lm(tiny_model(layers=LAYERS), p, 20) for p in PROMPTS]


@pytest.mark.parametrize(
    "wrong",
    [
        SamplePrompt([]),
        SamplePrompt([VOCABULARY]),
        SamplePrompt([-1]),
        SamplePrompt([1], max_tokens=0),
        SamplePrompt([1], max_tokens=100),
        SamplePrompt([1], max_tokens=1, count=0),
        SamplePrompt([1], max_tokens=1, count=10**6),
        SamplePrompt([1], max_tokens=1, temperature=float("nan")),
        SamplePrompt([1], max_tokens=1, temperature=-1.0),
        SamplePrompt([1], max_tokens=1, top_p=0.0),
        SamplePrompt([1], max_tokens=1, top_k=-2),
        SamplePrompt([1], max_tokens=1, top_logprobs=10**6),
        SamplePrompt([1], max_tokens=1, stop_ids=[0, VOCABULARY]),
        SamplePrompt([1], max_tokens=1, stop_ids=[-1]),
        SamplePrompt([1, 2], max_tokens=1, prompt_logprobs=True, last_prompt_tokens=2),
    ],
    ids=str,
)
def test_a_wrong_request_is_refused_and_nothing_begins(wrong: SamplePrompt) -> None:
    def work(sampler: Sampler, crew: Crew[Ranks]) -> bool:
        with pytest.raises(UserError):
            ask(sampler, wrong)
        return sampler.is_idle

    assert on_ranks(Mesh(1, 1), work)
