"""Generation through pipeline stages, one rank each.

The first rank knows the prompts and decides what is computed next. A token's way, with three
stages and a group of sequences that makes a decode step::

    rank 0  FirstStage         rank 1  LaterStage        rank 2  LaterStage, has the lm_head
    ------------------         ------------------        -----------------------------------
    Scheduler.next: commands
        | -- announcement ------> | -- announcement ------> |
        |                         posts its receive,        posts its receive,
        |                         builds its graph          builds its graph
    token ids in, layers
        | -- hidden states -----> layers
        |                         | -- hidden states -----> layers, logits of the last position,
        |                                                   BatchSampler: the next token ids
        | <------------------------- token ids ------------ |
    Scheduler.returned: the group may take its next turn

The announcement runs ahead of the hidden states, so that a stage has posted its receive and built
its graph when they come. Logits never travel. While this group's token is on its way, rank 0 issues
the items of the other groups, and chunks of prompts: scheduler.py has the clock table. A chunk goes
the same way, but no token ids come back.

While the tokens of a group are on their way, each stage builds the graph of the group's next step.

A process that samples what it reads next runs ahead: the sampled tokens stay an array, which is the
input of the next step, and this is begun before anybody has read them::

    device     | step 1      | step 2      | step 3      |
    host       begin 2, read 1 -> text, begin 3, read 2 -> text, begin 4 ...

Whatever depends on a token follows one step late. A sequence that ends with it has entered one
token in vain, which its caches give back if they are kept; grammars say which tokens may come when
the one before is known, while the layers compute. No step runs ahead of a prompt that waits, of a
draft, or of the last token that there may be.

The announcement of a sequence alone in its group may have drafts, which enter with its token: the
last stage samples a token after each. Both ends see how many drafts were right, and the next
announcement, whatever it is of, tells all stages to forget the others. A model's own head is on
the last stage; what it guesses comes with the sampled tokens, in further rows.

While such an item is in later stages rank 0 may issue more of them, each on a guess of what comes
of the one before. If that is wrong, both ends know that all of these are void: what they give is
dropped as it comes, and the next announcement has all stages forget their tokens.

Where ranks have several stages, as in a ring or a V, the way of an item comes back to them, as
route.py shows. A rank computes an item on all its hops, in order, before the next item.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from shardmlx.distributed.messages import Handle, buffer_of
from shardmlx.inference.commands import (
    NO_ADAPTER,
    Begin,
    Border,
    Command,
    Commands,
    Decode,
    Item,
    Prefill,
    PutBack,
    RestoreKept,
    Stop,
    StoreKept,
    item_of,
)
from shardmlx.inference.detokenize import IncrementalDetokenizer
from shardmlx.inference.drafts import NO_DRAFT, NO_DRAFTS, Draft, DraftCounts, Drafter, Drafting
from shardmlx.inference.prefix_cache import KeptPrefix, PrefixCache
from shardmlx.inference.rounds import DecodeRounds, Round
from shardmlx.inference.sampler import packed_width, unpack
from shardmlx.inference.sampling_params import SampledToken, SamplingParams
from shardmlx.inference.scheduler import FoundPrefix, Scheduler
from shardmlx.inference.sequence_drafts import SequenceDrafts
from shardmlx.inference.sequence_state import SequenceState
from shardmlx.inference.stage import TOKENS_TAG, UNSENT, ItemGraph, StageWorker

NONE_YET = np.zeros((0, 1), np.int32)
"""The tokens of a round that come out of its graph, before they do."""


class FirstStage:
    """Rank 0: prompts come in here, and tokens come out. With a ``prefix_cache`` the KV caches of
    ended sequences are kept for prompts that begin like them, within the scheduler's capacity, and
    on the disk where the worker has files. ``drafting`` lets one step give a sequence several
    tokens; they come as if by steps of their own. Where the way of a token comes back to rank 0,
    ``later`` are the workers of these hops."""

    def __init__(
        self,
        worker: StageWorker,
        scheduler: Scheduler,
        prefix_cache: PrefixCache | None = None,
        drafting: Drafting | None = None,
        later: Sequence[StageWorker] = (),
    ) -> None:
        self._worker = worker
        self._later = later
        self._last = worker.last
        self._scheduler = scheduler
        self._prefix_cache = prefix_cache
        if prefix_cache is not None:
            scheduler.find_prefix = self._find_prefix
            worker.caches.remember = worker.runs_ahead
        self.drafted = NO_DRAFTS
        """Counts of all sequences that have ended."""
        self._sequences: dict[int, SequenceState] = {}
        self._rounds = DecodeRounds()
        self._drafts = SequenceDrafts(
            drafting or Drafting(Drafter(), 0), self._sequences, self._rounds
        )
        # Tokens of a round that come after its first.
        self._others: deque[tuple[int, SampledToken]] = deque()
        self._stored: tuple[tuple[int, str], ...] = ()

    @property
    def _workers(self) -> Sequence[StageWorker]:
        return (self._worker, *self._later)

    @property
    def is_idle(self) -> bool:
        """True if no token is to come."""
        return self._scheduler.is_idle and not self._rounds

    @property
    def drafting(self) -> Drafting:
        """The drafts of all sequences; another one may take its place while none is under way."""
        return self._drafts.drafting

    @drafting.setter
    def drafting(self, drafting: Drafting) -> None:
        """Draft otherwise from the next sequence on."""
        self._drafts.drafting = drafting

    @property
    def kept_tokens(self) -> int:
        """Tokens for which the prefix cache has room taken."""
        return self._prefix_cache.tokens if self._prefix_cache is not None else 0

    def add(
        self,
        sequence: int,
        tokens: Sequence[int],
        params: SamplingParams,
        context: int = 0,
        adapter: int = NO_ADAPTER,
    ) -> None:
        """Take in a prompt. ``sequence`` is a number that no other has had, ``context`` the most
        tokens that it may have, where the scheduler has a capacity or there are drafts; all ranks
        have the ``adapter`` that computes it. Raises as ``Scheduler.add``."""
        self._scheduler.add(sequence, len(tokens), params, context, adapter)
        self._sequences[sequence] = SequenceState(
            [*tokens], params, context, len(tokens), adapter=adapter
        )

    def has_prefilled(self, sequence: int) -> bool:
        """Return whether all of a prompt but its last token has entered the first stage."""
        known = self._sequences[sequence]
        return known.position >= known.prompt - 1

    def cached(self, sequence: int) -> int:
        """Return how many prompt tokens came from the prefix cache, once a token has come."""
        return self._sequences[sequence].cached

    def drafts(self, sequence: int) -> DraftCounts:
        """Count the drafts of a sequence, of those accepted the ones that ``step`` has returned."""
        counts = self._sequences[sequence].drafts
        others = sum(number == sequence for number, _ in self._others)  # the last was not a draft
        return replace(counts, accepted=counts.accepted - max(others - 1, 0))

    def finish(self, sequence: int) -> None:
        """End a sequence: to be called when ``step`` has returned its last token."""
        known = self._sequences.pop(sequence)
        self.drafting.end(sequence)
        # It may have ended within a round, whose other tokens have entered.
        others = deque(each for each in self._others if each[0] != sequence)
        cut = known.reject(len(self._others) - len(others))
        self._others = others
        cut += known.void(self._rounds.leave(sequence))
        if self._worker.runs_ahead:
            self._rounds.forget_void()
        self.drafted += known.drafts
        keep = self._prefix_cache is not None and known.position > 0
        if self._scheduler.finish(sequence, keep=keep, cut=cut) and self._prefix_cache is not None:
            self._prefix_cache.keep(sequence, known.entered, known.borders, known.adapter)

    def cancel(self, sequence: int) -> None:
        """Give up a sequence at any time before its end. ``step`` returns no more tokens of it."""
        self.finish(sequence)

    def keep_alive(self) -> None:
        """Tell the other ranks that all is well while nothing is generated, and store what is kept.
        Raises as ``step``."""
        commands = self._scheduler.news.take()
        files = self._worker.files
        cache = self._prefix_cache
        kept = {} if files is None or cache is None else cache.kept
        keys = _keys(kept)
        if files is None or keys == self._stored:
            self._tell(commands)
            return
        self._stored = keys
        self._tell((*commands, StoreKept(keys)))
        files.write_index([each for each in kept.values() if each.adapter == NO_ADAPTER])

    def restore(self, prefixes: Sequence[KeptPrefix]) -> None:
        """Keep sequences of which all stages have files, as far as there is room."""
        assert self._prefix_cache is not None
        for number, prefix in enumerate(prefixes, -len(prefixes)):
            self._prefix_cache.keep(number, prefix.tokens.tolist(), prefix.borders)
        self._room_forgotten()  # no stage has those without room
        self._stored = _keys(self._prefix_cache.kept)
        self._tell((RestoreKept(self._stored),))

    def _tell(self, commands: Commands) -> None:
        self._worker.begin(None)
        self._worker.announce(commands)
        self._worker.outbox.drain(UNSENT)
        for worker in self._workers:
            worker.do(commands)

    def step(self, *, begins: bool = True) -> list[tuple[int, SampledToken]]:
        """Do what is to be done next, and return pairs of (sequence, token) that have come. Unless
        it ``begins`` something, only what is under way comes to its end. Raises ``EngineError`` and
        what transports raise, with rank, stage and item."""
        try:
            return self._step(begins=begins)
        except Exception as error:
            with self._worker.named_errors():
                raise error from error.__cause__

    def _step(self, *, begins: bool) -> list[tuple[int, SampledToken]]:
        if self._others:
            return [self._given(*self._others.popleft())]
        if self._last and (came := self._take()):
            return came
        if (begins and self._issue_next()) or not self._rounds:
            return []
        if not self._last:
            oldest = self._rounds[0]
            self._workers[-1].sample_late(oldest.graph, oldest.void)
        if begins:
            self._run_ahead()
        self._wait()
        return self._take()

    def stream(self, answers: Mapping[int, IncrementalDetokenizer]) -> Iterator[tuple[int, str]]:
        """Generate until all sequences have ended, where their ``answers`` say; yield pairs of
        (sequence, text) as text comes. Raises as ``step``."""
        while not self.is_idle:
            for number, sampled in self.step():
                text = answers[number].take(sampled.token)
                if answers[number].finish_reason is not None:
                    self.finish(number)
                yield number, text

    def forget_adapter(self, adapter: int) -> None:
        """Keep no sequence of an adapter any longer. None of those under way is affected."""
        if self._prefix_cache is not None:
            for number in self._prefix_cache.forget_adapter(adapter):
                self._scheduler.news.drop(number)

    @property
    def is_resting(self) -> bool:
        """True if no token is under way, though some may be to come."""
        return not (self._rounds or self._others)

    def stop(self) -> None:
        """Have all ranks return from ``LaterStage.run``, with all stored that is kept. If the stage
        ``is_resting``, they may go on later."""
        if self._worker.files is not None:
            self.keep_alive()
        for worker in self._workers:
            worker.retract()
        self._worker.announce((Stop(),))
        for worker in self._workers:
            worker.outbox.drain(0)
        self._worker.begin(None)

    def _issue_next(self) -> bool:
        """Issue what comes next, if it depends on nothing that is under way."""
        for number in self._room_forgotten():
            self._scheduler.news.drop(number)
        runs_ahead = self._worker.runs_ahead
        if runs_ahead and self._rounds and (len(self._rounds) > 1 or self._scheduler.has_prompt):
            return False  # tokens that have come do not wait for a chunk of a prompt
        commands = self._scheduler.next()
        if commands is not None:
            self._issue(commands, self._drafts.draft(item_of(commands)))
            return True
        if (on := self._drafts.draft_on()) is not None:
            self._issue((on[0],), on[1])
            return True
        return False

    def _run_ahead(self) -> None:
        """Begin the step after the one under way with the tokens that come of it, if this process
        samples them and the next step is sure to come."""
        under_way = self._rounds[0]
        item = under_way.item
        if not self._worker.runs_ahead or len(self._rounds) > 1 or not isinstance(item, Decode):
            return
        ahead = self._scheduler.foreseen() if item.is_plain else None
        if ahead is None or not all(map(self._may_run_ahead, ahead.sequences)):
            return
        if self._drafts.expects(ahead):
            return
        tokens = under_way.graph.outputs
        if tokens.shape[1] > 1:
            tokens = tokens[:, :1]
        if len(ahead.sequences) < len(item.sequences):
            rows = [item.sequences.index(number) for number in ahead.sequences]
            tokens = tokens[mx.array(rows)]
        self._issue((*self._scheduler.news.take(), self._scheduler.begin(ahead)), ahead=tokens)

    def _may_run_ahead(self, number: int) -> bool:
        """Return whether a sequence may have a token after the one under way."""
        known = self._sequences[number]
        return known.context == 0 or len(known.tokens) + 1 < known.context

    def _wait(self) -> None:
        """Wait for the tokens of the oldest round under way."""
        worker = self._worker
        oldest = self._rounds[0]
        worker.item = oldest.item
        if self._last:
            worker.wait(oldest.handle, self._last)
            return
        self._workers[-1].finish(oldest.graph)
        oldest.tokens = oldest.graph.tokens
        oldest.handle.done = True

    def _issue(
        self, commands: Commands, draft: Draft = NO_DRAFT, *, ahead: mx.array | None = None
    ) -> None:
        """Have all stages do what commands say. The item among them enters with the tokens that are
        known, and a ``draft``, or those that come of the round before, int32 (rows, 1)."""
        commands = self._prepare(commands, draft)
        item = item_of(commands)
        assert item is not None, "what is issued has one"
        worker = self._worker
        worker.begin(item)
        worker.announce(commands)
        rows = [
            [*self._sequences[number].enter(item.length), *draft.tokens]
            for number in item.sequences
        ]
        inputs = ahead
        if inputs is None and worker.foreseen_by(commands) is None:
            inputs = mx.array(rows, mx.int32)
        graph = worker.graph_of(commands, inputs, is_ahead=ahead is not None)
        if inputs is None:
            np.frombuffer(buffer_of(graph.inputs), np.int32)[:] = np.array(rows).reshape(-1)
        if worker.shares_tokens:
            worker.share_tokens(np.array(rows, np.int32))
        worker.start(graph)
        if item.samples:
            self._rounds.append(self._round_of(item, graph, draft, runs_ahead=ahead is not None))
        foresees = not worker.runs_ahead and not self._scheduler.has_prompt
        self._end(worker, graph, foresees=foresees)
        for later in self._later:
            later.begin(item)
            with later.named_errors():
                expected = later.expect(commands, item)
                graph = later.graph_of(commands, expected.inputs)
                later.start_with(graph, expected)
                self._end(later, graph, foresees=foresees)
        if self._last:
            self._drafts.read_prompt(item)
        elif item.samples:
            self._rounds[-1].graph = graph

    def _end(self, worker: StageWorker, graph: ItemGraph, *, foresees: bool) -> None:
        """Let a graph that has been started come to its end on this rank, and pass on what it
        gives. Tokens that are sampled here are awaited later."""
        if not graph.item.samples or not worker.part.is_last:
            worker.finish(graph)
        worker.pass_on(graph)
        if foresees:
            worker.foresee_next(graph.item)

    def _round_of(self, item: Item, graph: ItemGraph, draft: Draft, *, runs_ahead: bool) -> Round:
        """Return the round of an item that has been started: its tokens come in a message, or out
        of its ``graph``."""
        if not self._last:
            return Round(item, NONE_YET, Handle(NONE_YET), draft, graph, runs_ahead)
        width = packed_width([self._sequences[number].params for number in item.sequences])
        guesses = item.guesses if isinstance(item, Decode) else 0
        rows = len(item.sequences) * item.length + guesses
        sampled = np.zeros((rows, width), np.int32)
        return Round(
            item, sampled, self._worker.transport.receive(sampled, self._last, TOKENS_TAG), draft
        )

    def _prepare(self, commands: Commands, draft: Draft) -> Commands:
        """Return commands as they are announced, and note what they change of their sequences."""
        return tuple(self._prepared(command, draft) for command in commands)

    def _prepared(self, command: Command, draft: Draft) -> Command:
        match command:
            case Decode():
                return self._drafts.with_drafts(command, draft)
            case Prefill() if self._drafts.head is not None and not command.samples:
                known = self._sequences[command.sequence]
                after = known.position + 1
                following = tuple(known.tokens[after : after + command.length])
                return replace(command, following=following)
            case Begin():
                known = self._sequences[command.sequence]
                known.begin(command.prefix, is_first=command.params is not None)
            case PutBack():
                for number in command.sequences:
                    if number in self._sequences:
                        self._sequences[number].begin(None, is_first=False)
                    self.drafting.drafter.forget(number)
            case Border():
                self._sequences[command.sequence].borders += (command.tokens,)
        return command

    def _has_come(self, under_way: Round) -> bool:
        if not self._last:
            return under_way.handle.done
        return self._worker.has_come(under_way.handle)

    def _take(self) -> list[tuple[int, SampledToken]]:
        """Return the tokens that have come. A sequence gets one at a time: others of a round, and
        those of one that goes on from it, come with the next steps."""
        came: list[tuple[int, SampledToken]] = []
        while not self._others:
            back = self._rounds.take(self._has_come)
            if back is None:
                break
            goes_on = self._drafts.goes_on(back)
            self._drafts.measure(back)
            count = len(back.right)
            runs_ahead = bool(self._rounds) and self._rounds[0].runs_ahead
            self._scheduler.returned(back.item, count, goes_on=goes_on or runs_ahead)
            for i, number in enumerate(back.item.sequences):
                if number not in back.void:
                    came.append(self._taken(back, i, count, goes_on=goes_on))
            if goes_on:
                break
        return came

    def _taken(self, back: Round, i: int, count: int, *, goes_on: bool) -> tuple[int, SampledToken]:
        """Take ``count`` tokens of sequence ``i`` of a round that has come; return the first."""
        number = back.item.sequences[i]
        known = self._sequences[number]
        cut = known.reject(back.item.length - count)
        if self.drafting.most and not goes_on:
            cut += known.void(self._rounds.make_guesses_void(number))
        self._scheduler.news.cut(number, cut)
        for row in back.tokens[i + 1 : i + count]:
            self._others.append((number, unpack(row, known.params)))
        return self._given(number, unpack(back.tokens[i], known.params))

    def _given(self, number: int, sampled: SampledToken) -> tuple[int, SampledToken]:
        return number, self._sequences[number].take(sampled)

    def _find_prefix(self, number: int) -> FoundPrefix:
        assert self._prefix_cache is not None
        tokens = self._sequences[number].tokens
        adapter = self._sequences[number].adapter
        borders = self._prefix_cache.borders(tokens, adapter)
        prefix = self._prefix_cache.take(tokens, adapter)
        return FoundPrefix(prefix, borders, self._room_forgotten())

    def _room_forgotten(self) -> list[int]:
        """Forget what was kept, as far as the sequences under way need the room; return what."""
        capacity = self._scheduler.capacity
        if self._prefix_cache is None or capacity is None:
            return []
        return self._prefix_cache.shrink(capacity - self._scheduler.reserved)


def _keys(kept: Mapping[int, KeptPrefix]) -> tuple[tuple[int, str], ...]:
    """Return the kept sequences that no adapter computed, each with the name of its files."""
    return tuple((number, each.key) for number, each in kept.items() if each.adapter == NO_ADAPTER)
