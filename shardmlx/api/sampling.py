"""Samples of a training loop: answers to prompts by the base, and by snapshots of its LoRAs, on the
ranks that train, between their other commands.

All answers under way are one continuous batch: sequences of a snapshot advance together, and those
of several snapshots take turns. Where several answers to a prompt are wanted, the prompt is
computed once: a sequence of its own enters it, ends, and leaves its caches to the answers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.api.plan import WAITING
from shardmlx.api.requests import SampledAnswer, SamplePrompt, SampleResult, TopTokens
from shardmlx.common.formatting import plural
from shardmlx.distributed.crew import Crew, takes_long, together
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.evaluation.scoring import Scorer, Scores, Sequences
from shardmlx.inference.adapters import Adapter
from shardmlx.inference.detokenize import StopStrings, TokenText
from shardmlx.inference.grammars import Grammars, has_llguidance
from shardmlx.inference.kv_caches import KVCaches
from shardmlx.inference.later_stage import LaterStage
from shardmlx.inference.pipeline import FirstStage
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.inference.route import TokenRoute
from shardmlx.inference.sampler import BatchSampler
from shardmlx.inference.sampling_params import SampledToken, SamplingParams
from shardmlx.inference.scheduler import Scheduler
from shardmlx.inference.stage import StageWorker
from shardmlx.models.runtime.slice import Slice

SHORTEST_SHARED = 2
"""Tokens of the shortest prompt whose answers share its prefill: a loop asks for many answers to
short ones."""

SCORED_ROWS = 4
"""Prompts that are scored at a time."""

MOST_ANSWERS = 4096
"""Limit of the answers to one prompt."""

MOST_TOP = 256
"""Limit of the likeliest tokens that are told at a place."""


class SamplingWorker:
    """The part of one rank in sampling: ``parts`` are the layers of its hops on a ``route``. Ranks
    beyond the route's mesh have no part in it. ``chunk`` is the most tokens of a prompt that are
    computed at a time, ``random_state`` the run's own."""

    def __init__(
        self,
        transport: Transport,
        parts: Sequence[Slice],
        route: TokenRoute,
        chunk: int,
        random_state: int,
    ) -> None:
        self._route = route
        self._transport = transport
        self._chunk = chunk
        self._has_part = transport.rank < route.mesh.size
        self._samplers = [BatchSampler(random_state) for _ in parts]
        self._workers = [
            StageWorker(
                transport,
                part,
                KVCaches(part.new_caches),
                sampler,
                route=route,
                hop=hop,
            )
            for hop, part, sampler in zip(
                route.numbers(transport.rank), parts, self._samplers, strict=True
            )
        ]

    def hold(self, number: int, adapters: Sequence[Adapter]) -> None:
        """Let sequences be computed by an adapter of this number from now on: it is given for each
        hop."""
        for worker, adapter in zip(self._workers, adapters, strict=True):
            worker.adapters.by_number[number] = adapter

    def release(self, number: int) -> None:
        """Forget an adapter, once the sequences under way no longer need it."""
        for worker in self._workers:
            del worker.adapters.by_number[number]

    def takes_grammars(self) -> bool:
        """Return whether this rank has llguidance, or needs none: it reads no requests, and does
        not sample."""
        samples = any(worker.part.is_last for worker in self._workers)
        return has_llguidance() or not (self._transport.rank == 0 or samples)

    def keep_to(self, grammars: Grammars) -> None:
        """Let answers keep to grammars."""
        for sampler in self._samplers:
            sampler.grammars = grammars

    @takes_long
    def follow(self) -> None:
        """Do what rank 0's first stage announces until it stops. On all other ranks."""
        if self._has_part:
            LaterStage(*self._workers).run()
        self._transport.activity.begin(WAITING)

    def lead(self, most: int, capacity: int | None, prefixes: PrefixCache | None) -> FirstStage:
        """Return the first stage, on rank 0: for so many sequences at ``most``, which have room for
        ``capacity`` tokens together."""
        # A rank computes an item on all its hops before the next one: several groups would wait for
        # each other, and one of all sequences reads the weights less often.
        groups = 1 if self._route.comes_back else self._route.mesh.pp
        scheduler = Scheduler(groups, most, self._chunk, 1, capacity)
        first, *later = self._workers
        return FirstStage(first, scheduler, prefixes, later=later)

    @together
    def score(
        self,
        sequences: Sequences,
        number: int,
        top: int,
        others: Sequence[np.ndarray | None],
    ) -> list[Scores]:
        """Return, on rank 0, the scores of sequences by an adapter of this number, or by none, as
        ``Scorer.score``."""
        with ExitStack() as holding:
            parts = [
                holding.enter_context(worker.adapters.computing(number)) for worker in self._workers
            ]
            scorer = Scorer(self._transport, parts, SCORED_ROWS, self._chunk, self._route)
            return scorer.score(sequences, top, others)


@dataclass(slots=True)
class _Answer:
    """An answer in the making. It ends with a token of ``ends``, or where ``stops`` find the end of
    its ``words``."""

    ends: frozenset[int]
    most: int
    words: TokenText | None
    stops: StopStrings
    tokens: list[SampledToken] = field(default_factory=list)
    reason: str | None = None

    def take(self, sampled: SampledToken) -> None:
        """Take in a token: also that which ends the answer is of it."""
        self.tokens.append(sampled)
        if self.words is not None:
            self.stops.take(self.words.take(sampled.token, is_last=False), is_last=False)
        if sampled.token in self.ends or self.stops.found is not None:
            self.reason = "stop"
        elif len(self.tokens) == self.most:
            self.reason = "length"

    def result(self, top: int) -> SampledAnswer:
        """Return the answer, with the ``top`` likeliest tokens at each place."""
        likeliest = None
        if top:
            likeliest = TopTokens(
                np.array([[token for token, _ in each.top] for each in self.tokens], np.int32),
                np.array(
                    [[logprob for _, logprob in each.top] for each in self.tokens], np.float32
                ),
            )
        assert self.reason is not None, "it has ended"
        return SampledAnswer(
            tokens=np.array([each.token for each in self.tokens], np.int32),
            logprobs=np.array([each.logprob for each in self.tokens], np.float32),
            reason=self.reason,
            top=likeliest,
        )


@dataclass(eq=False, slots=True)
class _Asked:
    """A request, its result to come, and what there is of it. Its sequences are numbered: that of
    the ``prompt``, while it is computed for several answers, and those of ``answers``."""

    request: SamplePrompt
    adapter: int
    future: Future[SampleResult]
    prompt: int | None = None
    answers: dict[int, _Answer] = field(default_factory=dict)
    scores: Scores | None = None
    needs_scores: bool = False
    cached: int = 0

    @property
    def is_done(self) -> bool:
        """True if all of its result is there."""
        has_ended = all(each.reason is not None for each in self.answers.values())
        return self.prompt is None and has_ended and not self.needs_scores

    def result(self) -> SampleResult:
        """Return the result, in the order of the answers' numbers."""
        request = self.request
        answers = [each.result(request.top_logprobs) for each in self.answers.values()]
        if self.scores is None:
            return SampleResult(answers, cached=self.cached)
        of_others = None
        if request.other_tokens is not None:
            is_wanted = request.other_tokens >= 0
            of_others = np.where(is_wanted, self.scores.of_others, 0.0).astype(np.float32)
        # Nothing comes before the first token.
        logprobs = np.concatenate([[np.nan], self.scores.logprobs]).astype(np.float32)
        wanted = request.last_prompt_tokens or len(request.tokens)
        is_left_out = np.arange(len(logprobs)) < len(logprobs) - wanted
        logprobs[is_left_out] = np.nan
        top = None
        if request.top_prompt_logprobs:
            none = np.full((1, request.top_prompt_logprobs), np.nan, np.float32)
            of_top = np.concatenate([none, self.scores.top_logprobs])
            ids = np.concatenate([np.zeros(none.shape, np.int32), self.scores.top])
            of_top[is_left_out] = np.nan
            top = TopTokens(ids, of_top)
        given = logprobs if request.prompt_logprobs else None
        return SampleResult(answers, given, top, self.cached, of_others)


class Stream(Protocol):
    """A text in the making that is told token by token, as to a client of OpenAI's API."""

    @property
    def tokens(self) -> Sequence[int]:
        """The prompt's tokens."""

    @property
    def params(self) -> SamplingParams:
        """The parameters by which it is sampled."""

    @property
    def context(self) -> int:
        """The tokens of prompt and text together, at most."""

    def take(self, sampled: SampledToken, cached: int) -> bool:
        """Take in a token, and return True if it was the last; ``cached`` tokens of the prompt came
        from the prefix cache."""


class Sampler:
    """Samples on rank 0, with the workers of all ranks: at most so many sequences at a time, which
    have room for ``capacity`` tokens together, each for ``context``.

    It takes the ranks with the first ``step`` that has something to do. Before they can do anything
    else it has to ``pause``: answers under way stay, and go on with the next step.
    """

    def __init__(
        self,
        crew: Crew[SamplingWorker],
        tokenizer: TokenizerWrapper,
        vocabulary: int,
        *,
        most: int,
        context: int,
        capacity: int | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self._crew = crew
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._context = min(context, capacity or context)
        self._stage = crew.worker.lead(most, capacity, prefixes)
        self._prefixes = prefixes
        self._following: ExitStack | None = None
        self._next = 0
        self._asked: dict[int, _Asked] = {}
        """Requests by the numbers of their sequences under way."""
        self._to_score: deque[_Asked] = deque()
        self._streams: dict[int, Stream] = {}

    @property
    def is_idle(self) -> bool:
        """True if nothing is to do."""
        return not (self._asked or self._to_score or self._streams)

    @property
    def context(self) -> int:
        """The tokens of a prompt and its answer together, at most."""
        return self._context

    @property
    def kept_tokens(self) -> int:
        """Tokens in the prefix cache."""
        return self._stage.kept_tokens

    def stream(self, stream: Stream) -> int:
        """Begin a text by the base; return its number, by which ``give_up`` ends it."""
        number = self._next
        self._next += 1
        self._streams[number] = stream
        self._stage.add(number, stream.tokens, stream.params, stream.context)
        return number

    def give_up(self, number: int) -> None:
        """End a stream before its last token, if it has not come."""
        if self._streams.pop(number, None) is not None:
            self._stage.finish(number)

    def add(self, request: SamplePrompt, adapter: int, future: Future[SampleResult]) -> None:
        """Begin to sample by an adapter, or by none: the ``future`` gets the result. Raises
        ``UserError`` if the request is wrong."""
        self._check(request)
        asked = _Asked(request, adapter, future)
        others = request.other_tokens
        if request.prompt_logprobs or request.top_prompt_logprobs or others is not None:
            asked.needs_scores = len(request.tokens) > 1
            if not asked.needs_scores:
                nothing = np.zeros((0, request.top_prompt_logprobs))
                none = np.zeros(0 if others is None else others.shape)
                asked.scores = Scores(
                    np.zeros(0), np.zeros(0), nothing.astype(np.int32), nothing, none
                )
            else:
                self._to_score.append(asked)
        length = len(request.tokens)
        if request.count > 1 and self._prefixes is not None and length > self._prefixes.shortest:
            # One token more than is computed, so that all of the prompt is.
            asked.prompt = self._number(asked)
            tokens = [*request.tokens, request.tokens[-1]]
            self._stage.add(asked.prompt, tokens, SamplingParams(), len(tokens), adapter)
            return
        self._begin_answers(asked)

    def forget(self, adapter: int) -> None:
        """Keep nothing that an adapter has computed any longer: its number goes to another."""
        self._stage.forget_adapter(adapter)

    def step(self) -> None:
        """Do the next step, with all ranks. Raises as ``FirstStage.step``."""
        self._drop_cancelled()
        if self._to_score:
            self._score()
        elif not self._asked and not self._streams:
            self.pause()
        else:
            self._follow()
            self._take(self._stage.step())
            self._share_prompts()

    def pause(self) -> None:
        """Let the ranks do other things: what is under way comes to its end."""
        if self._following is None:
            return
        while not self._stage.is_resting:
            self._take(self._stage.step(begins=False))
        self._stage.stop()
        self._following.close()
        self._following = None
        self._crew.transport.activity.begin(WAITING)

    def _check(self, request: SamplePrompt) -> None:
        """Raise ``UserError`` if a request is wrong."""
        tokens = np.asarray(request.tokens)
        if not tokens.size:
            raise UserError("the prompt has no tokens", "give it one at least")
        if tokens.min() < 0 or tokens.max() >= self._vocabulary:
            wrong = tokens.min() if tokens.min() < 0 else tokens.max()
            raise UserError(
                f"the prompt has token {wrong}, and the vocabulary ends with "
                f"{self._vocabulary - 1}",
                "tokenize it by the base's own tokenizer",
            )
        room = self._context - len(tokens)
        if not 0 < request.max_tokens <= room:
            raise UserError(
                f"max_tokens is {request.max_tokens}, after a prompt of "
                f"{plural(len(tokens), 'token')}: {self._context} have room together",
                "shorten the prompt, lower max_tokens, or raise --max-seq-length",
            )
        limits: Sequence[tuple[str, float, float, float]] = (
            ("num_samples", request.count, 1, MOST_ANSWERS),
            ("temperature", request.temperature, 0.0, 1e6),
            ("top_p", request.top_p, 1e-9, 1.0),
            ("top_k", request.top_k, 0, self._vocabulary),
            ("topk_sample_logprobs", request.top_logprobs, 0, min(MOST_TOP, self._vocabulary)),
            (
                "topk_prompt_logprobs",
                request.top_prompt_logprobs,
                0,
                min(MOST_TOP, self._vocabulary),
            ),
        )
        for name, value, least, most in limits:
            if not (math.isfinite(value) and least <= value <= most):
                raise UserError(f"{name} is {value}", f"give it from {least:g} to {most:g}")
        last = request.last_prompt_tokens
        if last is not None and not 1 <= last < len(tokens):
            raise UserError(
                f"prompt_logprobs_last_n is {last}, of {plural(len(tokens), 'token')}",
                "give it from 1 to the tokens before the last one",
            )
        wrong_ends = [each for each in request.stop_ids or () if not 0 <= each < self._vocabulary]
        if wrong_ends:
            raise UserError(
                f"stop has token {wrong_ends[0]}, and the vocabulary ends with "
                f"{self._vocabulary - 1}",
                "an answer never has it: give ids of the base's own tokenizer",
            )
        if request.other_tokens is not None:
            self._check_others(request.other_tokens, len(tokens) - 1)

    def _check_others(self, others: np.ndarray, places: int) -> None:
        """Raise ``UserError`` if the other tokens of a request are wrong."""
        name = "target_prompt_logprobs"
        if others.ndim != 2 or len(others) != places or others.shape[1] > MOST_TOP:
            raise UserError(
                f"{name} has the shape {list(others.shape)}",
                f"give it {places} rows, one for each token of the prompt but the first, of "
                f"{MOST_TOP} ids at most",
            )
        if others.size and (others.min() < -1 or others.max() >= self._vocabulary):
            wrong = others.min() if others.min() < -1 else others.max()
            raise UserError(
                f"{name} has token {wrong}, and the vocabulary ends with {self._vocabulary - 1}",
                "give ids of the vocabulary, or -1 for none",
            )

    def _number(self, asked: _Asked) -> int:
        """Return a number for a new sequence of a request."""
        number = self._next
        self._next += 1
        self._asked[number] = asked
        return number

    def _begin_answers(self, asked: _Asked) -> None:
        request = asked.request
        ends = request.stop_ids
        if ends is None:
            ends = [*self._tokenizer.eos_token_ids]
        context = len(request.tokens) + request.max_tokens
        for i in range(request.count):
            number = self._number(asked)
            words = TokenText(self._tokenizer.decode) if request.stop_strings else None
            stops = StopStrings(tuple(request.stop_strings))
            asked.answers[number] = _Answer(frozenset(ends), request.max_tokens, words, stops)
            params = SamplingParams(
                temp=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                seed=request.seed,
                # Answers that share a seed differ, and are the same again.
                stream=i if request.seed is not None else number,
                logprobs=request.top_logprobs,
            )
            self._stage.add(number, request.tokens, params, context, asked.adapter)

    def _follow(self) -> None:
        """Have the other ranks follow this one's first stage."""
        if self._following is None:
            following = ExitStack()
            following.enter_context(self._crew.others(SamplingWorker.follow))
            # It is left by ``pause`` alone: after an error nobody ends the others' command.
            self._following = following

    def _take(self, came: Sequence[tuple[int, SampledToken]]) -> None:
        for number, sampled in came:
            stream = self._streams.get(number)
            if stream is not None:
                if stream.take(sampled, self._stage.cached(number)):
                    self.give_up(number)
                continue
            asked = self._asked[number]
            answer = asked.answers[number]
            answer.take(sampled)
            asked.cached = max(asked.cached, self._stage.cached(number))
            if answer.reason is not None:
                self._end(number)
                self._tell(asked)

    def _share_prompts(self) -> None:
        """Begin the answers to prompts that have been computed for them."""
        for number, asked in list(self._asked.items()):
            if asked.prompt == number and self._stage.has_prefilled(number):
                self._end(number)
                asked.prompt = None
                self._begin_answers(asked)

    def _end(self, number: int) -> None:
        self._stage.finish(number)
        del self._asked[number]

    def _tell(self, asked: _Asked) -> None:
        """Give a request its result if all of it is there."""
        if asked.is_done:
            result = asked.result()
            with suppress(InvalidStateError):  # its client may cancel it at any moment
                asked.future.set_result(result)

    def _drop_cancelled(self) -> None:
        """Give up the requests that nobody waits for any more."""
        for number, asked in list(self._asked.items()):
            if asked.future.cancelled():
                self._end(number)
        self._to_score = deque(each for each in self._to_score if not each.future.cancelled())

    def _score(self) -> None:
        """Score the prompts that wait for it and have the first one's adapter."""
        adapter = self._to_score[0].adapter
        mine = [each for each in self._to_score if each.adapter == adapter]
        self._to_score = deque(each for each in self._to_score if each.adapter != adapter)
        top = max(each.request.top_prompt_logprobs for each in mine)
        self.pause()
        sequences = [[*map(int, each.request.tokens)] for each in mine]
        # Something is computed where nothing is wanted.
        others = [
            None if each.request.other_tokens is None else np.maximum(each.request.other_tokens, 0)
            for each in mine
        ]
        scores = self._crew.all(SamplingWorker.score, sequences, adapter, top, others)[0]
        for asked, found in zip(mine, scores, strict=True):
            wanted = asked.request.top_prompt_logprobs
            count = 0 if asked.request.other_tokens is None else asked.request.other_tokens.shape[1]
            asked.scores = Scores(
                found.logprobs,
                found.is_likeliest,
                found.top[:, :wanted],
                found.top_logprobs[:, :wanted],
                found.of_others[:, :count],
            )
            asked.needs_scores = False
            self._tell(asked)
