"""What is begun before it is asked for: steps of one process, and the graphs of later stages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from shardmlx.distributed.transport import Outbox, Transport
from shardmlx.inference.announcements import Announcer
from shardmlx.inference.commands import Commands, Decode, Drop, Item, Keep, Prefill, item_of
from shardmlx.inference.drafts import BackOff, Drafting, LookupDrafter
from shardmlx.inference.kv_caches import Backup, KVCaches
from shardmlx.inference.pipeline import FirstStage
from shardmlx.inference.sampling_params import SamplingParams
from shardmlx.inference.stage import ItemGraph, StageWorker
from tests.helpers.generation import by_mlx_lm, on_ranks, texts_of
from tests.helpers.local_transport import LocalNetwork
from tests.helpers.models_and_batches import tiny_model

LAYERS, TOKENS = 2, 60
PROMPT = [5, 6, 7, 8]


@functools.cache
def models() -> list[nn.Module]:
    """One for each rank: threads must not share one."""
    made = [tiny_model("llama", layers=LAYERS).eval() for _ in range(3)]
    mx.eval([model.parameters() for model in made])
    return made


class Noted(StageWorker):
    """Notes what it does with decode steps, in order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.done: list[str] = []

    def note(self, what: str, item: Item) -> None:
        if isinstance(item, Decode):
            self.done.append(what)

    def start(self, graph: ItemGraph) -> None:
        self.note("begun", graph.item)
        super().start(graph)

    def finish(self, graph: ItemGraph) -> None:
        super().finish(graph)
        self.note("read", graph.item)

    def graph_of(self, commands: Commands, *args: Any, **how: Any) -> ItemGraph:
        item = item_of(commands)
        assert item is not None
        self.note("foreseen" if self.foreseen_by(commands) else "built", item)
        return super().graph_of(commands, *args, **how)


def done(ranks: int, work: Callable[[FirstStage], Any], **how: Any) -> list[list[str]]:
    """What each rank did."""
    workers: dict[int, Noted] = {}

    def noted(transport: Transport, *args: Any, **more: Any) -> Noted:
        return workers.setdefault(transport.rank, Noted(transport, *args, **more))

    cuts = [LAYERS * i // ranks for i in range(ranks + 1)]
    ranges = [*pairwise(cuts)]
    on_ranks(models(), ranges, work, worker=noted, **how)
    return [workers[rank].done for rank in range(ranks)]


def share_begun_ahead(done: list[str]) -> float:
    begun = ahead = 0
    for what in done:
        if what == "begun":
            begun += 1
        elif what == "read":
            begun -= 1
            ahead += begun > 0
    return ahead / done.count("read")


PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.2}


@pytest.mark.parametrize(
    "choices",
    [
        [SamplingParams()],
        [SamplingParams(temp=0.8, seed=3, **PENALTIES)],
        [SamplingParams(), SamplingParams(temp=0.8, seed=3), SamplingParams(logprobs=2)],
    ],
    ids=["greedy", "sampled with penalties", "a group"],
)
def test_one_process_begins_a_step_before_it_reads_the_one_before(
    choices: list[SamplingParams],
) -> None:
    texts: dict[int, list[int]] = {}

    def work(first_stage: FirstStage) -> None:
        for number, choice in enumerate(choices):
            first_stage.add(number, PROMPT, choice, context=len(PROMPT) + TOKENS)
        texts.update(texts_of(first_stage, dict.fromkeys(range(len(choices)), TOKENS)))

    ((*what,),) = done(1, work)
    assert what.count("read") == TOKENS
    assert share_begun_ahead(what) >= 0.95
    # There is no step after the last token that there may be.
    assert what.count("begun") == TOKENS
    assert [len(text) for text in texts.values()] == [TOKENS] * len(choices)


def test_while_drafts_are_wrong_steps_run_ahead() -> None:
    prompt = [1, 2, 3, 4, 9, 1, 2, 3]

    def work(first_stage: FirstStage) -> None:
        first_stage.add(0, prompt, SamplingParams(), context=len(prompt) + TOKENS)
        text = texts_of(first_stage, {0: TOKENS})[0]
        assert text == by_mlx_lm(models()[2], prompt, TOKENS)

    drafting = Drafting(LookupDrafter(), 4, back_off=BackOff(cost=2.0))  # each round is lost
    ((*what,),) = done(1, work, drafting=drafting)
    assert share_begun_ahead(what) >= 0.6


def test_later_stages_have_built_a_step_before_it_is_announced() -> None:
    def work(first_stage: FirstStage) -> None:
        for number in (0, 1):
            first_stage.add(number, PROMPT, SamplingParams(), context=len(PROMPT) + TOKENS)
        texts_of(first_stage, dict.fromkeys((0, 1), TOKENS))

    for what in done(2, work):
        plain = [each for each in what if each in ("built", "foreseen")]
        assert len(plain) == 2 * TOKENS
        # Each group's first one, and one after the other group has ended.
        assert plain.count("built") <= 0.05 * len(plain)


def test_a_step_that_repeats_the_last_one_of_its_group_is_a_single_message() -> None:
    one, other = Decode((1,), 0), Decode((2, 3), 1)
    told: list[Commands] = [
        (Prefill(1, 8),),
        (one,),
        (other,),
        (one,),
        (other,),
        (Drop((3,)), Decode((2,), 1)),
        (one,),
        (Decode((2,), 1),),
        (Keep((2,), (1,)), one),
    ]

    def work(transport: Transport) -> Any:
        announcer = Announcer(Outbox(transport), transport.size)
        if transport.rank == 0:
            sent = []
            for commands in told:
                before = len(announcer.outbox.unsent)
                announcer.announce(commands, "a test")
                sent.append(len(announcer.outbox.unsent) - before)
            announcer.outbox.drain(0)
            return sent
        heard = []
        for _ in told:
            announcement = announcer.await_next()
            transport.wait(announcement, partial(str, "a test"))
            heard.append(announcer.heard(announcement, partial(str, "a test")))
        announcer.outbox.drain(0)
        return heard

    sent, heard, last = LocalNetwork(3).run(work)
    assert sent == [2, 2, 2, 1, 1, 2, 1, 1, 2]
    assert heard == last == told


def entered(caches: KVCaches, item: Item, numbers: np.ndarray) -> list[np.ndarray]:
    """What a layer of each kind sees when tokens enter."""
    array = mx.array(numbers[None, None, :, None], mx.float32)
    seen = []
    for cache in caches.of(item):
        if isinstance(cache, ArraysCache):
            before = cache[0] if cache[0] is not None else mx.zeros((1, 1))
            cache[0] = before + array.sum()
            seen.append(np.array(cache[0]))
        else:
            keys, _ = cache.update_and_fetch(array, array)
            seen.append(np.sort(np.array(keys).reshape(-1)))
    return seen


@pytest.mark.parametrize("tokens", [3, 7, 8, 9, 20])
def test_a_token_that_entered_in_vain_leaves_nothing(tokens: int) -> None:
    """Whether a window of eight is full or not, and a state remembers the one before."""

    def seen(*, is_in_vain: bool) -> list[np.ndarray]:
        new = lambda: [KVCache(), RotatingKVCache(8), ArraysCache(1)]  # noqa: E731
        caches = KVCaches(new, remember=True)
        entered(caches, Prefill(0, 2), np.arange(2))
        for number in range(2, tokens):
            entered(caches, Decode((0,), 0), np.array([number]))
        if is_in_vain:
            entered(caches, Decode((0,), 0), np.array([1000]))
        caches.keep(Keep((0,), (int(is_in_vain),)))
        entered(caches, Prefill(0, 3), np.arange(tokens, tokens + 3))
        return entered(caches, Decode((0,), 0), np.array([tokens + 3]))

    for once, again in zip(seen(is_in_vain=False), seen(is_in_vain=True), strict=True):
        np.testing.assert_array_equal(once, again)


def test_what_is_foreseen_in_vain_is_put_back() -> None:
    caches = [KVCache(), RotatingKVCache(8), ArraysCache(1)]
    array = mx.random.normal((1, 2, 12, 4))
    for cache in caches[:2]:
        cache.update_and_fetch(array, array)
    caches[2][0] = array
    states = [[np.array(each) for each in mx_arrays(cache)] for cache in caches]
    backup = Backup(caches)
    for cache in caches[:2]:
        cache.update_and_fetch(array[:, :, :1], array[:, :, :1])
    caches[2][0] = array + 1
    backup.put_back()
    assert [cache.offset for cache in caches[:2]] == [12, 12]
    for cache, state in zip(caches, states, strict=True):
        for each, before in zip(mx_arrays(cache), state, strict=True):
            np.testing.assert_array_equal(np.array(each), before)


def mx_arrays(cache: Any) -> list[mx.array]:
    found = [cache.cache] if isinstance(cache, ArraysCache) else [cache.keys, cache.values]
    return found[0] if isinstance(found[0], list) else found
