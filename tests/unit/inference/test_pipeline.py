"""Generating on threads: whatever the layout, the tokens are those of mlx-lm in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors

from shardmlx.distributed.messages import TransportTimeout
from shardmlx.distributed.transport import Transport
from shardmlx.errors import EngineError
from shardmlx.inference.commands import Decode
from shardmlx.inference.kv_caches import KVCaches
from shardmlx.inference.later_stage import LaterStage
from shardmlx.inference.pipeline import FirstStage
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.inference.sampler import BatchSampler
from shardmlx.inference.sampling_params import SampledToken, SamplingParams
from shardmlx.inference.scheduler import Scheduler
from shardmlx.inference.stage import StageWorker
from shardmlx.models.runtime.slice import Slice
from shardmlx.models.sizes.kv_cache import CacheQuantisation
from testbed.tiny_models import VOCABULARY
from tests.helpers.generation import add_all, by_mlx_lm, finish_all, on_ranks, texts_of
from tests.helpers.local_transport import LocalNetwork
from tests.helpers.models_and_batches import move_trained, tiny_model, with_adapters

LAYERS = 6
WINDOW = 8
SLIDING = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention" if i % 3 else "full_attention" for i in range(LAYERS)],
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with windows": ("llama", SLIDING),
    "quantised and tied": ("llama", {"tied": True, "quantization": {"group_size": 32, "bits": 4}}),
    "adapters": ("mistral", {"lora": True}),
}
"""What makes a difference here; texts of all families are in test_conformance."""
WIDE = "heads that can be quantised"
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    WIDE: ("qwen3", {"head_dim": 32}),
}


@cache
def models(variant: str) -> list[nn.Module]:
    """The same model for each rank and for the reference: threads must not share one."""
    family, how = (VARIANTS | OTHERS)[variant]
    made = []
    for _ in range(5):
        options = dict(how)
        adapters = options.pop("lora", False)
        model = tiny_model(family, layers=LAYERS, **options)
        if adapters:
            move_trained(with_adapters(model, 4, scale=20.0, dropout=0.1), 0.1)
        model.eval()
        mx.eval(model.parameters())
        made.append(model)
    return made


def prompt(length: int, seed: int = 0) -> list[int]:
    random = np.random.RandomState(seed + 1000 * length)
    return [int(token) for token in random.randint(1, VOCABULARY, size=length)]


def expected(
    variant: str, tokens: Sequence[int], count: int, *, chunk: int = 2048, **how: Any
) -> list[int]:
    return [*_expected(variant, tuple(tokens), count, chunk, tuple(sorted(how.items())))]


@cache
def _expected(
    variant: str, tokens: tuple[int, ...], count: int, chunk: int, how: tuple[tuple[str, Any], ...]
) -> list[int]:
    return by_mlx_lm(models(variant)[-1], tokens, count, chunk=chunk, **dict(how))


def staged(variant: str, cut: Sequence[int], work: Callable[[FirstStage], Any], **how: Any) -> Any:
    """Return ``on_ranks`` with stages of so many layers."""
    ranges = [*pairwise([0, *accumulate(cut)])]
    return on_ranks(models(variant), ranges, work, **how)


def generate(
    variant: str,
    cut: Sequence[int],
    prompts: Sequence[Sequence[int]],
    counts: Sequence[int],
    *,
    choices: Sequence[SamplingParams] | None = None,
    chunk: int = 2048,
    **how: Any,
) -> list[list[int]]:
    """The tokens of each prompt."""

    def work(first_stage: FirstStage) -> list[list[int]]:
        for number, tokens in enumerate(prompts):
            first_stage.add(number, tokens, choices[number] if choices else SamplingParams())
        return [*texts_of(first_stage, dict(enumerate(counts))).values()]

    texts: list[list[int]] = staged(variant, cut, work, chunk=chunk, capacity=None, **how)
    return texts


CUTS = [
    pytest.param(variant, cut, id=f"{variant}-{cut}")
    for variant in VARIANTS
    for cut in ([2, 3, 1], *([[6], [1, 2, 2, 1]] if variant == "llama with windows" else ()))
]


@pytest.mark.parametrize(("variant", "cut"), CUTS)
def test_one_text_is_that_of_mlx_lm(variant: str, cut: list[int]) -> None:
    tokens = prompt(21)
    assert generate(variant, cut, [tokens], [8]) == [expected(variant, tokens, 8)]


@pytest.mark.parametrize(("variant", "cut"), CUTS)
def test_many_texts_at_once_are_those_of_each_alone(variant: str, cut: list[int]) -> None:
    """With patience, one chunk comes between two tokens: texts join groups on their way."""
    how: dict[str, Any] = (
        {"most": 9, "patience": 1} if variant == "llama with windows" else {"most": 3}
    )
    counts = [6, 3, 9, 1, 5]
    prompts = [prompt(length) for length in (5, 30, 2, 17, 11)]
    texts = generate(variant, cut, prompts, counts, chunk=8, **how)
    assert texts == [
        expected(variant, tokens, count, chunk=8)
        for tokens, count in zip(prompts, counts, strict=True)
    ]


LIMIT = 16


CHUNKS = (1, 3, 15, 16, 17, 20, 64)


@pytest.mark.parametrize(
    ("cut", "length", "chunks"),
    [
        *(([6], length, CHUNKS) for length in (7, 16, 17, 30, 61)),
        ([2, 3, 1], 17, (5, 16)),
        ([2, 3, 1], 61, (15, 20)),
    ],
    ids=str,
)
def test_with_a_limited_cache_a_text_does_not_depend_on_the_chunk(
    cut: list[int], length: int, chunks: tuple[int, ...]
) -> None:
    """It is mlx-lm's, if that takes a token at a time: each sees the first four and the last twelve
    of those before it. mlx-lm's text depends on its chunk."""
    tokens = prompt(length)
    alone = expected("qwen2", tokens, 25, chunk=1, max_kv_size=LIMIT)
    if length > 2 * LIMIT:
        assert alone != expected("qwen2", tokens, 25, max_kv_size=LIMIT)
        assert alone != expected("qwen2", tokens, 25)
    for chunk in chunks:
        texts = generate("qwen2", cut, [tokens], [25], chunk=chunk, max_kv_size=LIMIT)
        assert texts == [alone]


def test_a_family_that_chooses_its_caches_ignores_a_limit() -> None:
    tokens = prompt(30)
    texts = generate("llama", [3, 3], [tokens], [25], chunk=8, max_kv_size=LIMIT)
    assert texts == [expected("llama", tokens, 25)]


def quantised(start: int) -> tuple[CacheQuantisation, dict[str, int]]:
    """The options of ours and of mlx-lm for caches of four bits."""
    how = CacheQuantisation(bits=4, group_size=32, start=start)
    return how, {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": start}


@pytest.mark.parametrize(
    ("start", "cut", "chunks"),
    [
        (0, [6], (1, 8)),
        (1, [6], (16,)),
        (12, [6], (1, 8, 16, 64)),
        (16, [6], (8, 16)),
        (25, [6], (16, 64)),
        (0, [2, 3, 1], (5,)),
        (12, [2, 3, 1], (8,)),
    ],
    ids=str,
)
def test_with_quantised_caches_a_text_does_not_depend_on_the_chunk(
    start: int, cut: list[int], chunks: tuple[int, ...]
) -> None:
    """From the first token on, from within a prompt, and from an answer's token on. It is
    mlx-lm's, if that takes a token at a time."""
    how, theirs = quantised(start)
    prompts = [prompt(21), prompt(30)]
    alone = [expected(WIDE, tokens, 12, chunk=1, **theirs) for tokens in prompts]
    assert alone[0] != expected(WIDE, prompts[0], 12)
    for chunk in chunks:
        more: dict[str, Any] = {"chunk": chunk, "groups": 2, "quantisation": how}
        assert generate(WIDE, cut, prompts, [12, 12], **more) == alone


def serve(
    variant: str,
    cut: Sequence[int],
    work: Callable[[FirstStage], Any],
    trimmable: int = 10**9,
    **how: Any,
) -> Any:
    """What ``work`` makes of a first stage that keeps sequences."""
    prefixes = PrefixCache(trimmable, shortest=4)
    return staged(variant, cut, work, prefix_cache=prefixes, **how)


START = 20


@pytest.mark.parametrize("chunk", [4, 32])
@pytest.mark.parametrize(
    ("variant", "limit", "how", "theirs", "begun"),
    [
        ("qwen2", LIMIT, None, {"max_kv_size": LIMIT}, {20: 0, 21: 0, 22: 8}),
        (WIDE, None, *quantised(START), {20: 0, 21: 26, 22: 8}),
    ],
    ids=["limited", "quantised"],
)
def test_a_text_does_not_depend_on_what_others_left_in_the_prefix_cache(
    variant: str,
    limit: int | None,
    how: CacheQuantisation | None,
    theirs: dict[str, int],
    begun: dict[int, int],
    chunk: int,
) -> None:
    """Some wait, some go on from a kept text that was longer than the limit, and some begin like
    one. What is kept is quantised from a length on that a prompt may not have."""
    first = [prompt(length) for length in (30, 9, 22)]
    again = {20: [*first[0][:18], *prompt(11)], 21: [*first[0][:26], *prompt(5)]}
    again |= {22: [*first[1][:8], *prompt(30)], 23: first[0][:19], 24: first[0][:20]}

    def work(first_stage: FirstStage) -> tuple[dict[int, list[int]], dict[int, int]]:
        add_all(first_stage, dict(enumerate(first)), 80)
        texts = texts_of(first_stage, {0: 6, 1: 4, 2: 3})
        later = {10 + i: [*tokens, *texts[i], *prompt(11)] for i, tokens in enumerate(first)}
        cached: dict[int, int] = {}
        for group in (again, later):
            add_all(first_stage, group, 100)
            texts |= texts_of(first_stage, dict.fromkeys(group, 8), cached)
        return texts, cached

    border = 10**9 if how is None else how.border
    prefixes = PrefixCache(limit or 10**9, 4, quantised=border)
    more: dict[str, Any] = {"max_kv_size": limit, "quantisation": how, "chunk": chunk}
    more |= {"prefix_cache": prefixes, "groups": 4, "most": 2, "patience": 1}
    texts, cached = staged(variant, [3, 3], work, **more)
    later = {10 + i: [*tokens, *texts[i], *prompt(11)] for i, tokens in enumerate(first)}
    assert texts == {
        number: expected(variant, tokens, len(texts[number]), chunk=1, **theirs)
        for number, tokens in (dict(enumerate(first)) | again | later).items()
    }
    assert {number: cached[number] for number in later} == {10: 35, 11: 12, 12: 24}
    assert {number: cached[number] for number in begun} == begun


@pytest.mark.parametrize("cut", [[6], [2, 3, 1]], ids=str)
@pytest.mark.parametrize("variant", ["llama", "llama with windows"])
def test_a_conversation_does_not_pay_for_its_beginning_again(variant: str, cut: list[int]) -> None:
    first, more = prompt(20), prompt(9)

    def work(first_stage: FirstStage) -> tuple[list[int], list[int], int]:
        first_stage.add(0, first, SamplingParams(), context=40)
        answer = texts_of(first_stage, {0: 6})[0]
        first_stage.add(1, [*first, *answer, *more], SamplingParams(), context=60)
        cached: dict[int, int] = {}
        return answer, texts_of(first_stage, {1: 5}, cached)[1], cached[1]

    answer, second, cached = serve(variant, cut, work, trimmable=WINDOW)
    assert answer == expected(variant, first, 6)
    assert second == expected(variant, [*first, *answer, *more], 5)
    # All but the answer's last token, which never entered the pipeline.
    assert cached == len(first) + 5


def test_prompts_that_begin_alike_share_their_beginning() -> None:
    """While the text that was there first lives on in a group, or is kept, or has been taken."""
    common = prompt(30)
    prompts = [[*common, *prompt(3 + i, seed=i)] for i in range(5)]
    counts = {1: 3, 2: 9, 3: 5, 4: 7}

    def work(first_stage: FirstStage) -> tuple[dict[int, list[int]], dict[int, int]]:
        first_stage.add(0, prompts[0], SamplingParams(), context=64)
        texts = texts_of(first_stage, {0: 4})
        add_all(first_stage, {number: prompts[number] for number in counts}, 64)
        cached: dict[int, int] = {}
        texts |= texts_of(first_stage, counts, cached)
        first_stage.keep_alive()
        return texts, cached

    texts, cached = serve("llama", [3, 3], work)
    counts[0] = 4
    assert texts == {n: expected("llama", prompts[n], count) for n, count in counts.items()}
    assert [*cached.values()] == [30, 30, 30, 30]


def test_conversations_go_on_while_other_texts_are_generated() -> None:
    """A kept text is there until the prompt that begins like it has its turn."""
    first = [prompt(20, seed=i) for i in range(3)]

    def work(first_stage: FirstStage) -> dict[int, list[int]]:
        add_all(first_stage, dict(enumerate(first)), 64)
        texts = texts_of(first_stage, {0: 3, 1: 4, 2: 5})
        first_stage.add(9, prompt(7), SamplingParams(), context=64)
        begun: list[int] = []
        while len(begun) < 2:
            begun += [sampled.token for _, sampled in first_stage.step()]
        more = {10 + i: [*tokens, *texts[i], *prompt(12)] for i, tokens in enumerate(first)}
        add_all(first_stage, more, 64)
        texts |= texts_of(first_stage, {10: 6, 11: 6, 12: 6, 9: 30 - len(begun)})
        texts[9] = begun + texts[9]
        return texts

    texts = serve("llama", [2, 3, 1], work, patience=1, chunk=4)
    assert texts[9] == expected("llama", prompt(7), 30)
    for i, tokens in enumerate(first):
        assert texts[10 + i] == expected("llama", [*tokens, *texts[i], *prompt(12)], 6)


def test_texts_without_a_limit_leave_what_is_kept_until_they_need_its_room() -> None:
    """Two conversations by turns, each of which may fill all there is."""
    first = [prompt(20, seed=i) for i in range(2)]

    def work(first_stage: FirstStage) -> list[int]:
        for number, tokens in enumerate(first):
            first_stage.add(number, tokens, SamplingParams(), context=1024)
            finish_all(first_stage, {number: 3})
        cached: dict[int, int] = {}
        for number, tokens in enumerate(first, start=2):
            first_stage.add(number, [*tokens, *prompt(9)], SamplingParams(), context=1024)
            finish_all(first_stage, {number: 1}, cached)
        first_stage.add(9, prompt(250, seed=9), SamplingParams(), context=1024)
        finish_all(first_stage, {9: 2})
        assert first_stage.kept_tokens == 768
        first_stage.add(10, prompt(250, seed=8), SamplingParams(), context=1024)
        finish_all(first_stage, {10: 20})
        assert first_stage.kept_tokens == 512 + 256
        return [*cached.values()]

    assert serve("llama", [6], work, capacity=1024) == [20, 20]


@pytest.mark.parametrize(
    ("variant", "cut", "limits"),
    [
        ("llama", [2, 3, 1], {}),
        ("llama with windows", [6], {}),
        ("qwen2", [6], {"max_kv_size": 200}),
        (WIDE, [6], {"quantisation": quantised(255)[0]}),
    ],
    ids=["plain", "windows", "limited", "quantised"],
)
def test_a_text_that_is_put_back_goes_on_as_if_nothing_had_been(
    variant: str, cut: list[int], limits: dict[str, Any]
) -> None:
    prompts = {number: prompt(250 + number, seed=number) for number in range(3)}
    how = {
        0: SamplingParams(),
        1: SamplingParams(temp=1.0, seed=5, repetition_penalty=1.3),
        2: SamplingParams(temp=0.7, seed=6, logprobs=2),
    }

    def work(first_stage: FirstStage) -> dict[int, list[int]]:
        for number, tokens in prompts.items():
            first_stage.add(number, tokens, how[number], context=900)
        return texts_of(first_stage, {0: 20, 1: 12, 2: 12})

    plenty = serve(variant, cut, work, trimmable=WINDOW, chunk=64, groups=3, **limits)
    assert limits or plenty[0] == expected(variant, prompts[0], 20)
    # Room for all three prompts, and with the 257th token for one.
    limits |= {"capacity": 2 * 512, "groups": 3}
    assert serve(variant, cut, work, trimmable=WINDOW, chunk=64, **limits) == plenty


def test_a_text_that_is_put_back_may_be_cancelled() -> None:
    prompts = [prompt(250, seed=number) for number in range(3)]

    def work(first_stage: FirstStage) -> tuple[dict[int, list[int]], int]:
        add_all(first_stage, dict(enumerate(prompts[:2])), 700)
        texts: dict[int, list[int]] = {0: [], 1: []}
        while len(texts[0]) < 20:
            for number, sampled in first_stage.step():
                texts[number].append(sampled.token)
        assert len(texts[1]) < 10
        first_stage.cancel(1)
        first_stage.finish(0)
        first_stage.add(2, prompts[1], SamplingParams(), context=700)
        return texts_of(first_stage, {2: 9}), first_stage.kept_tokens

    texts, kept = serve("llama", [2, 3, 1], work, capacity=1024, chunk=64)
    assert texts[2] == expected("llama", prompts[1], 9)
    assert kept == 512


def test_a_text_may_be_cancelled_at_any_time() -> None:
    """Before it begins, in its prompt, and while a token of it is under way: the others go on, and
    what had been computed is kept."""
    prompts = [prompt(length) for length in (5, 40, 9, 12)]

    def work(first_stage: FirstStage) -> tuple[list[tuple[int, int]], dict[int, list[int]]]:
        came: list[tuple[int, int]] = []
        texts: dict[int, list[int]] = {}
        for after in (0, 3, 8):
            base = 10 * after
            add_all(first_stage, dict(enumerate(prompts, start=base)), 64)
            counts = {base: 6, base + 3: 8}
            texts |= {number: [] for number in counts}
            steps = 0
            cancelled = False
            while not first_stage.is_idle:
                if steps >= after and not cancelled:
                    first_stage.cancel(base + 1)
                    first_stage.cancel(base + 2)
                    cancelled = True
                steps += 1
                for number, sampled in first_stage.step():
                    if number in counts:
                        texts[number].append(sampled.token)
                        if len(texts[number]) == counts[number]:
                            first_stage.finish(number)
                    elif cancelled:
                        came.append((after, number))
            first_stage.keep_alive()
        return came, texts

    came, texts = serve("qwen2", [2, 3, 1], work, most=3)
    assert came == []
    assert all(
        tokens == expected("qwen2", prompts[number % 10], 6 if number % 10 == 0 else 8)
        for number, tokens in texts.items()
    )


def test_log_probabilities_are_those_of_the_logits() -> None:
    tokens = prompt(9)
    steps = generate_step(mx.array(tokens), models("llama")[-1], max_tokens=4)
    wanted = [(token, np.array(logprobs)) for token, logprobs in steps]

    def work(first_stage: FirstStage) -> dict[int, list[SampledToken]]:
        first_stage.add(0, tokens, SamplingParams(logprobs=3), context=64)
        first_stage.add(1, tokens, SamplingParams(), context=64)
        first_stage.add(2, tokens, SamplingParams(logprobs=0), context=64)
        return finish_all(first_stage, {0: 4, 1: 4, 2: 4})

    texts = serve("llama", [3, 3], work)
    for sampled, (token, logprobs) in zip(texts[0], wanted, strict=True):
        assert sampled.token == token
        assert sampled.logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
        best = np.argsort(-logprobs)[:3]
        assert [each for each, _ in sampled.top] == best.tolist()
        assert [p for _, p in sampled.top] == pytest.approx(logprobs[best].tolist(), abs=1e-4)
    assert texts[1] == [SampledToken(token) for token, _ in wanted]
    assert [each.logprob for each in texts[2]] == [each.logprob for each in texts[0]]
    assert not any(each.top for each in texts[2])


def test_biases_and_penalties_are_those_of_mlx_lm() -> None:
    tokens = prompt(12)
    greedy = expected("llama", tokens, 12)
    how: Any = {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    bias = {greedy[0]: -100.0, 5: 1.0}
    processors = make_logits_processors(bias, **how)
    wanted = by_mlx_lm(models("llama")[-1], tokens, 12, logits_processors=processors)
    choice = SamplingParams(logit_bias=tuple(bias.items()), context=tuple(tokens), **how)
    choices = [choice, SamplingParams(stream=1)]
    texts = generate("llama", [3, 3], [tokens, tokens], [12, 12], choices=choices)
    assert texts == [wanted, greedy]
    assert wanted != greedy


def test_the_same_seed_gives_the_same_text_in_every_layout() -> None:
    prompts = [prompt(length) for length in (5, 12, 9, 20)]
    choices = [
        SamplingParams(temp=0.8),
        SamplingParams(temp=1.0, top_p=0.9, stream=1),
        SamplingParams(stream=2),
        SamplingParams(temp=0.7, top_k=20, min_p=0.01, xtc_probability=0.3, stream=3),
    ]
    whole = generate("llama", [6], prompts, [8] * 4, most=4, choices=choices)
    assert generate("llama", [2, 3, 1], prompts, [8] * 4, most=3, choices=choices) == whole
    greedy = [expected("llama", tokens, 8) for tokens in prompts]
    alike = [text == likeliest for text, likeliest in zip(whole, greedy, strict=True)]
    assert alike == [False, False, True, False]
    again = [SamplingParams(temp=0.8, seed=11, stream=5)]
    assert generate("llama", [3, 3], prompts[:1], [8], choices=again)[0] != whole[0]


@pytest.mark.parametrize("variant", ["llama", "llama with windows"])
def test_what_one_process_foresees_changes_no_text(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a token depends on those before it, alone and in a group that sequences leave. A step
    that was begun has those that left meanwhile: sums of other rows may be rounded otherwise."""
    prompts = [prompt(length) for length in (12, 9, 20)]
    penalties: dict[str, Any] = {"repetition_penalty": 1.7, "frequency_penalty": 0.3}
    choices = [
        SamplingParams(temp=0.9, seed=3, logprobs=2, context=tuple(prompts[0]), **penalties),
        SamplingParams(logit_bias=((5, 1.0),), context=tuple(prompts[1]), **penalties),
        SamplingParams(temp=0.7, xtc_probability=0.5, xtc_threshold=0.01, stream=3),
    ]

    def work(first_stage: FirstStage) -> dict[int, list[SampledToken]]:
        for number in (0, 1, 2):
            first_stage.add(number, prompts[number], choices[number], context=64)
        texts = finish_all(first_stage, {0: 30, 1: 6, 2: 11})
        first_stage.add(3, prompts[0], choices[0], context=64)
        return texts | finish_all(first_stage, {3: 9})

    foreseen: list[Decode | None] = []
    real = Scheduler.foreseen

    def kept(scheduler: Scheduler) -> Decode | None:
        foreseen.append(real(scheduler))
        return foreseen[-1]

    monkeypatch.setattr(Scheduler, "foreseen", kept)
    texts = serve(variant, [6], work, trimmable=WINDOW)
    for sequences in ((0, 1, 2), (0, 2), (0,), (3,)):
        assert Decode(sequences, 0) in foreseen
    monkeypatch.setattr(Scheduler, "foreseen", lambda _: None)
    one_by_one = serve(variant, [6], work, trimmable=WINDOW)
    for number, text in texts.items():
        for sampled, other in zip(text, one_by_one[number], strict=True):
            assert sampled.token == other.token
            assert sampled.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [each for each, _ in sampled.top] == [each for each, _ in other.top]
    assert texts[3] == texts[0][:9]


def test_a_failure_names_rank_stage_and_item(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Slice, *_: Any) -> None:
        raise RuntimeError("Insufficient Memory")

    monkeypatch.setattr(Slice, "last_logits", fail)
    said = r"rank 1 on localhost, stage 1, decode of sequence 0: .*Insufficient Memory"
    with pytest.raises(EngineError, match=said):
        generate("llama", [3, 3], [prompt(4)], [2])


def test_a_wait_names_the_peer() -> None:
    def work(transport: Transport) -> None:
        if transport.rank == 1:
            part = Slice(models("llama")[1], 3, 6)
            caches = KVCaches(part.new_caches)
            LaterStage(StageWorker(transport, part, caches, BatchSampler(7))).run()

    with pytest.raises(
        TransportTimeout, match=r"^rank 1 on localhost, stage 1, waiting for rank 0 on localhost"
    ):
        LocalNetwork(2, timeout=0.3).run(work)
