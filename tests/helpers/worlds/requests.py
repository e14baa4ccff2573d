"""Requests that come and go: a ``FirstStage`` with its scheduler, prefix cache and drafts, over toy
stages, and clients that ask, go on with conversations, and give up at any moment."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from shardmlx.inference.drafts import (
    BackOff,
    Draft,
    Drafter,
    Drafting,
    HeadDrafter,
    LookupDrafter,
)
from shardmlx.inference.pipeline import FirstStage
from shardmlx.inference.prefix_cache import PrefixCache
from shardmlx.inference.sampling_params import SamplingParams
from shardmlx.inference.scheduler import Scheduler
from shardmlx.models.sizes.kv_cache import STEP, held
from tests.helpers.worlds.rooms import Room
from tests.helpers.worlds.simulation import Simulation
from tests.helpers.worlds.toy_stages import STOP, VOCABULARY, Kind, Stages, Text

MOST_STEPS = 4000
"""Steps after which a world stands still. The longest texts take a few hundred."""

SHORTEST = 4
"""Tokens of the shortest prefix that is taken."""


@dataclass
class Request:
    """What a client asks for, and what it has got. It gives up at step ``gives_up``, if ever."""

    number: int
    at: int
    prompt: list[int]
    max_tokens: int
    params: SamplingParams
    adapter: int
    gives_up: int | None
    text: Text
    tokens: list[int] = field(default_factory=list)
    end: str = ""


@dataclass
class GuessingDrafter(Drafter):
    """A drafter that knows the texts, and is now and then wrong, as a small model is."""

    random: Random
    requests: dict[int, Request]

    def draft(self, sequence: int, tokens: Sequence[int], ahead: Sequence[int], pays: Any) -> Draft:
        """Guess what follows."""
        request = self.requests[sequence]
        begin = len(tokens) + len(ahead) - len(request.prompt)
        count = pays(0)
        guessed = request.text.tokens(begin + count)[begin:]
        return Draft(
            tuple(
                self.random.randrange(VOCABULARY) if self.random.random() < 0.15 else token
                for token in guessed
            )
        )


class World:
    """A server over ``stages``, and its clients."""

    def __init__(self, simulation: Simulation, stages: type[Stages] = Stages) -> None:
        self.simulation = simulation
        self.requests: dict[int, Request] = {}
        self._random = random = simulation.random
        self._stages_count = random.choice([1, 1, 2, 2, 3, 4])
        self._most = random.choice([1, 2, 4, 6])
        self._kind = random.choice(
            [Kind(), Kind(), Kind(), Kind(0), Kind(40), Kind(quantised=STEP)]
        )
        self._capacity = random.choice([None, 3, 4, 6, 8])
        if self._capacity is not None:
            self._capacity *= STEP
        self.cache = self._prefix_cache() if random.random() < 0.8 else None
        self._drafting = self._new_drafting()
        self._adapters = random.choice([1, 1, 1, 3])
        self._long = random.choice([0.0, 0.2, 0.7])
        self._beginnings = [self._tokens(random.choice([6, 30, 200])) for _ in range(3)]
        self.stages = stages(
            random,
            self._stages_count,
            self._kind,
            self._most,
            self._capacity,
            isinstance(self._drafting.drafter, HeadDrafter),
        )
        is_cut = self._kind.quantised or self._kind.cuttable == 40
        self.scheduler = Scheduler(
            self._most if is_cut else min(self._stages_count, self._most),
            self._most,
            random.choice([7, 32, 100, 300]),
            random.choice([None, 1, 2]),
            self._capacity,
            self._kind.quantised,
        )
        worker: Any = self.stages
        self.first_stage = FirstStage(worker, self.scheduler, self.cache, self._drafting)
        self._clients = self._drawn_clients()

    def _prefix_cache(self) -> PrefixCache:
        kind = self._kind
        return PrefixCache(
            kind.cuttable,
            SHORTEST,
            has_borders=kind.cuttable == 0,
            quantised=kind.quantised or sys.maxsize,
        )

    def _new_drafting(self) -> Drafting:
        random = self._random
        drafter = random.choice(
            [
                None,
                LookupDrafter(),
                HeadDrafter(),
                GuessingDrafter(random, self.requests),
            ]
        )
        if drafter is None or self._kind.cuttable == 0:
            return Drafting(Drafter(), 0)
        stages = 1 if isinstance(drafter, HeadDrafter) else self._stages_count
        return Drafting(
            drafter,
            random.choice([1, 3, 8]),
            fixed=random.random() < 0.5,
            cuttable=self._kind.cuttable,
            quantised=self._kind.quantised,
            back_off=BackOff(random.choice([0.0, 0.2]), stages),
        )

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(1, VOCABULARY), k=count)

    def _drawn_clients(self) -> list[tuple[int, int | None]]:
        """Return when clients come, and after how many steps they give up, if they do."""
        random = self._random
        count = random.randint(1, 9)
        span = random.choice([1, 1, 10, 60])
        return sorted(
            (
                (random.randrange(span), random.choice([None, None, None, random.randrange(40)]))
                for _ in range(count)
            ),
            key=lambda client: client[0],
        )

    def _prompt(self) -> tuple[list[int], int]:
        """Return a prompt, and the adapter that computes it."""
        random = self._random
        ended = [each for each in self.requests.values() if each.end in ("stop", "length")]
        if ended and random.random() < 0.4:
            before = random.choice(ended)
            turn = [*before.prompt, *before.tokens, *self._tokens(random.randint(1, 8))]
            if len(turn) < 2 * STEP:
                return turn, before.adapter
        prompt = [*random.choice(self._beginnings), *self._tokens(random.randint(0, 9))]
        if random.random() < 0.2:
            prompt = prompt[: random.randint(1, 3)]
        if random.random() < self._long:  # soon the caches grow
            prompt += self._tokens(max(STEP - random.randint(0, 8) - len(prompt), 0))
        return prompt, random.randrange(self._adapters)

    def _ask(self, gives_up: int | None) -> None:
        random = self._random
        prompt, adapter = self._prompt()
        max_tokens = random.choice([1, 5, 20, 40])
        if len(prompt) > STEP // 2:  # it may come to need more room than there is
            max_tokens = random.choice([5, 20, 20, STEP + 20])
        if self._capacity is not None:
            max_tokens = min(max_tokens, self._capacity - len(prompt))
        number = len(self.requests)
        params = SamplingParams(
            stream=random.randrange(3), grammar="list" if random.random() < 0.15 else None
        )
        text = Text(prompt, params.stream, adapter, self._kind)
        until = None if gives_up is None else self.stages.clock + gives_up
        request = Request(
            number, self.stages.clock, prompt, max_tokens, params, adapter, until, text
        )
        self.requests[number] = request
        is_open = self._capacity is None and not self._drafting.most and random.random() < 0.5
        context = 0 if is_open else len(prompt) + max_tokens
        self._note(f"{number} asks: {len(prompt)} tokens, then {max_tokens}, adapter {adapter}")
        self.first_stage.add(number, prompt, params, context, adapter)

    def _note(self, what: str) -> None:
        self.simulation.note(f"step {self.stages.clock}:", what)

    def run(self) -> None:
        """Live until all clients have got their texts or have given up, and check what stays."""
        waiting = list(self._clients)
        rests = False
        while waiting or not self.first_stage.is_idle:
            assert self.stages.clock < MOST_STEPS, "the world stands still"
            while waiting and waiting[0][0] <= self.stages.clock:
                self._ask(waiting.pop(0)[1])
            self._give_up()
            if self._random.random() < 0.01:
                rests = True
            if rests and self.first_stage.is_resting:
                self._note("stops, and goes on")
                self.first_stage.stop()
                rests = False
            self._meddle()
            if self.first_stage.is_idle:
                self.first_stage.keep_alive()
            else:
                self._step(begins=not rests)
            self.stages.clock += 1
        self._check_end()

    def _give_up(self) -> None:
        for request in self.requests.values():
            until = request.gives_up
            if not request.end and until is not None and until <= self.stages.clock:
                self._note(f"{request.number} gives up")
                request.end = "given up"
                self.first_stage.cancel(request.number)

    def _meddle(self) -> None:
        """Now and then do what programs do between two steps."""
        if self._random.random() < 0.01:
            adapter = self._random.randrange(self._adapters)
            self._note(f"adapter {adapter} is forgotten")
            self.first_stage.forget_adapter(adapter)

    def _step(self, *, begins: bool) -> None:
        came = self.first_stage.step(begins=begins)
        for number, sampled in came:
            request = self.requests[number]
            self._note(f"{number} gets {sampled.token}")
            assert not request.end, f"a token of request {number}, which has ended"
            place = len(request.tokens)
            request.tokens.append(sampled.token)
            assert sampled.token == request.text.token(place), f"{number}: another token {place}"
            self.first_stage.drafts(number)
            if sampled.token == STOP or len(request.tokens) == request.max_tokens:
                request.end = "stop" if sampled.token == STOP else "length"
                self._note(f"{number} ends")
                self.first_stage.finish(number)

    def _check_end(self) -> None:
        """Raise ``AssertionError`` unless nothing is left but what the prefix cache knows of."""
        self.first_stage.keep_alive()
        for request in self.requests.values():
            assert request.end, f"request {request.number} has not ended"
        kept = {} if self.cache is None else self.cache.kept
        stages = self.stages
        assert stages.held.keys() == stages.kept == kept.keys()
        for number, prefix in kept.items():
            assert stages.held[number].tokens == prefix.tokens.tolist()
            assert stages.held[number].borders >= set(prefix.borders)
        if self.cache is not None:
            assert self.cache.tokens == sum(held(len(each.tokens)) for each in kept.values())
        assert not stages.sampled
        assert self.scheduler.is_idle
        assert self.scheduler.reserved == 0
        assert self.first_stage.is_resting
        assert not any(group.size or group.in_flight for group in self.scheduler._groups)
        counts = self.first_stage.drafted
        assert 0 <= counts.accepted <= counts.drafted


def play(simulation: Simulation) -> None:
    """Each text is the text alone, and ends once. There are never more sequences or tokens than
    there is room for. At the end nothing is held but what the prefix cache knows of."""
    World(simulation).run()


REQUESTS = Room("requests", play)
