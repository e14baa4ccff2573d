"""Generation through pipeline stages, one rank each.

The first rank knows the prompts and decides what is computed next. A token's way, with three
stages and a group of sequences that makes a decode step::

    rank 0  FirstStage         rank 1  LaterStage        rank 2  LaterStage, has the lm_head
    ------------------         ------------------        -----------------------------------
    Scheduler.next: an Item
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

While rank 0 waits for tokens it builds the graph of the item that likely comes next; where there is
one process, while it computes them itself.

The announcement of a sequence alone in its group may have drafts, which enter with its token: the
last stage samples a token after each. Both ends see how many drafts were right, and the next
announcement, whatever it is of, tells all stages to forget the others. A model's own head is on
the last stage; what it guesses comes with the sampled tokens, in further rows.

While such an item is in later stages rank 0 may issue more of them, each on a guess of what comes
of the one before. If that is wrong, both ends know that all of these are void: what they give is
dropped as it comes, and the next announcement has all stages forget their tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardmlx.distributed.messages import Handle, buffer_of
from shardmlx.inference.detokenize import IncrementalDetokenizer
from shardmlx.inference.drafts import NO_DRAFTS, Draft, DraftCounts, Drafter, Drafting, HeadDrafter
from shardmlx.inference.prefix_cache import CachedPrefix, KeptPrefix, PrefixCache
from shardmlx.inference.rounds import DecodeRounds, Round
from shardmlx.inference.sampler import packed_width, unpack
from shardmlx.inference.sampling_params import SampledToken, SamplingParams
from shardmlx.inference.scheduler import Item, ItemKind, Scheduler
from shardmlx.inference.stage import TOKENS_TAG, UNSENT, StageWorker


@dataclass(slots=True)
class _Sequence:
    """Tokens up to ``position`` have entered; those up to ``cached`` are of the prefix cache, those
    up to ``prompt`` were given. Stages have copies of the states at ``borders``."""

    tokens: list[int]
    params: SamplingParams
    context: int
    prompt: int
    position: int = 0
    cached: int = 0
    borders: tuple[int, ...] = ()
    drafts: DraftCounts = NO_DRAFTS
    is_cancelled: bool = False

    @property
    def has_begun(self) -> bool:
        return len(self.tokens) > self.prompt


class FirstStage:
    """Rank 0: prompts come in here, and tokens come out. With a ``prefix_cache`` the KV caches of
    ended sequences are kept for prompts that begin like them, within the scheduler's capacity, and
    on the disk where the worker has files. ``drafting`` lets one step give a sequence several
    tokens; they come as if by steps of their own."""

    def __init__(
        self,
        worker: StageWorker,
        scheduler: Scheduler,
        prefix_cache: PrefixCache | None = None,
        drafting: Drafting | None = None,
    ) -> None:
        self._worker = worker
        self._last = worker.last
        self._scheduler = scheduler
        self._prefix_cache = prefix_cache
        if prefix_cache is not None:
            scheduler.find_prefix = self._find_prefix
        self.drafting = drafting or Drafting(Drafter(), 0)
        self.drafted = NO_DRAFTS
        """Counts of all sequences that have ended."""
        self._sequences: dict[int, _Sequence] = {}
        self._rounds = DecodeRounds()
        # Tokens of a round that come after its first.
        self._others: deque[tuple[int, SampledToken]] = deque()
        self._stored: tuple[tuple[int, str], ...] = ()

    @property
    def is_idle(self) -> bool:
        return self._scheduler.is_idle and not self._rounds

    @property
    def kept_tokens(self) -> int:
        return self._prefix_cache.tokens if self._prefix_cache is not None else 0

    def add(
        self, sequence: int, tokens: Sequence[int], params: SamplingParams, context: int = 0
    ) -> None:
        """Take in a prompt. ``sequence`` is a number that no other has had, ``context`` the most
        tokens that it may have, where the scheduler has a capacity or there are drafts. Raises as
        ``Scheduler.add``."""
        self._sequences[sequence] = _Sequence(list(tokens), params, context, len(tokens))
        self._scheduler.add(sequence, len(tokens), params, context)

    def cached(self, sequence: int) -> int:
        """Return how many prompt tokens came from the prefix cache, once a token has come."""
        return self._sequences[sequence].cached

    def drafts(self, sequence: int) -> DraftCounts:
        """Count the drafts of a sequence, of those accepted the ones that ``step`` has returned."""
        counts = self._sequences[sequence].drafts
        others = sum(number == sequence for number, _ in self._others)  # the last was no draft
        return replace(counts, accepted=counts.accepted - max(others - 1, 0))

    def finish(self, sequence: int) -> None:
        """End a sequence: to be called when ``step`` has returned its last token."""
        known = self._sequences.pop(sequence)
        self.drafting.end(sequence)
        # It may have ended within a round, whose other tokens have entered.
        others = deque(each for each in self._others if each[0] != sequence)
        known.position -= self._rounds.reject(sequence, len(self._others) - len(others))
        self._others = others
        self._make_void(sequence, known)
        self.drafted += known.drafts
        keep = self._prefix_cache is not None and known.position > 0
        if self._scheduler.finish(sequence, keep=keep) and self._prefix_cache is not None:
            entered = known.tokens[: known.position]
            self._prefix_cache.keep(sequence, entered, known.borders)

    def cancel(self, sequence: int) -> None:
        """Give up a sequence at any time before its end. ``step`` returns no more tokens of it."""
        if self._rounds.awaits(sequence):
            self._sequences[sequence].is_cancelled = True
        else:
            self.finish(sequence)

    def keep_alive(self) -> None:
        """Tell the other ranks that all is well while nothing is generated, and store what is kept.
        Raises as ``step``."""
        item, files, cache = self._scheduler.idle_item(), self._worker.files, self._prefix_cache
        kept = {} if files is None or cache is None else cache.kept
        keys = _keys(kept)
        if files is None or keys == self._stored:
            self._tell(item)
            return
        self._stored = keys
        self._tell(replace(item, stored=keys))
        files.write_index([*kept.values()])

    def restore(self, prefixes: Sequence[KeptPrefix]) -> None:
        """Keep sequences of which all stages have files, as far as there is room."""
        assert self._prefix_cache is not None
        for number, prefix in enumerate(prefixes, -len(prefixes)):
            self._prefix_cache.keep(number, prefix.tokens.tolist(), prefix.borders)
        self._make_room()
        self._scheduler.idle_item()  # takes those without room, which no stage has
        self._stored = _keys(self._prefix_cache.kept)
        self._tell(Item(ItemKind.IDLE, restored=self._stored))

    def _tell(self, item: Item) -> None:
        self._worker.begin(None)
        item = replace(item, rejected=self._rounds.take_rejected())
        self._worker.announce(item)
        self._worker.outbox.drain(UNSENT)
        self._worker.retract()
        self._worker.update(item)

    def step(self) -> list[tuple[int, SampledToken]]:
        """Do what is to be done next, and return pairs of (sequence, token) that have come. Raises
        ``EngineError`` and what transports raise, with rank, stage and item."""
        with self._worker.named_errors():
            if self._others:
                return [self._given(*self._others.popleft())]
            if came := self._take():
                return came
            self._make_room()
            began = time.perf_counter()
            item = self._scheduler.next()
            if item is not None:
                self._issue(item, self._draft(item), began)
                return []
            if (on := self._draft_on()) is not None:
                self._issue(*on, began)
                return []
            if not self._rounds:
                return []
            self._foresee([each.item for each in self._rounds])
            self._worker.item = self._rounds[0].item
            self._worker.wait(self._rounds[0].handle, self._last)
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

    def stop(self) -> None:
        """Have all ranks return from ``LaterStage.run``, with all stored that is kept."""
        if self._worker.files is not None:
            self.keep_alive()
        self._worker.announce(Item(ItemKind.STOP))
        self._worker.outbox.drain(0)
        self._worker.begin(None)

    def _issue(self, item: Item, draft: Draft, began: float) -> None:
        item = self._prepare(item, draft)
        worker = self._worker
        worker.begin(item)
        worker.announce(item)
        if item.samples:
            width = packed_width([self._sequences[number].params for number in item.sequences])
            rows = len(item.sequences) * item.length + item.guesses
            sampled = np.zeros((rows, width), np.int32)
            handle = Handle(sampled, done=True)
            if self._last:
                handle = worker.transport.receive(sampled, self._last, TOKENS_TAG)
            self._rounds.append(Round(item, sampled, handle, draft, began))
        graph = worker.graph_of(item, worker.inputs(item))
        inputs = np.frombuffer(buffer_of(graph.inputs), np.int32).reshape(graph.inputs.shape)
        for row, number in zip(inputs, item.sequences, strict=True):
            sequence = self._sequences[number]
            begin, sequence.position = sequence.position, sequence.position + item.length
            row[:] = [*sequence.tokens[begin : sequence.position], *draft.tokens]
        worker.share_tokens(graph)
        worker.start(graph)
        if not self._last and item.samples:
            self._foresee([item])
        worker.finish(graph)
        if item.samples:
            self._rounds[-1].on_rank_0 = time.perf_counter() - began
        worker.pass_on(graph)
        if self._last:
            self._read_prompt(item)
        elif item.samples:
            sampled[:] = np.array(graph.outputs)

    def _prepare(self, item: Item, draft: Draft) -> Item:
        """Return an item as it is announced, with what it changes noted of its sequences."""
        drafts = draft.tokens[draft.goes_on :]
        item = replace(
            item,
            length=item.length + len(drafts),
            guess=draft.tokens[0] if draft.goes_on else None,
            drafts=drafts,
            guesses=self._guesses(item, draft),
            rejected=self._rounds.take_rejected(),
        )
        for number in item.put_back:
            if number in self._sequences:
                self._sequences[number].position = 0
                self._sequences[number].borders = ()
            self.drafting.drafter.forget(number)
        sequence = self._sequences[item.sequences[0]]
        if item.prefix is not None:
            sequence.position, sequence.borders = item.prefix.length, item.prefix.borders
            if item.params is not None:
                sequence.cached = item.prefix.length
        if item.border:
            sequence.borders += (item.border,)
        if self._head_drafter is not None and not item.samples:
            stop = sequence.position + item.length + 1
            item = replace(item, following=tuple(sequence.tokens[sequence.position + 1 : stop]))
        return item

    def _draft(self, item: Item) -> Draft:
        """Guess the tokens after the next of a sequence that is alone in its group. Its first step
        waits for the prompt in later stages, and tells nothing of the times of steps."""
        known = self._alone(item)
        if known is None or not known.has_begun:
            return Draft()
        return self.drafting.draft(item.sequences[0], known.tokens, known.context)

    def _draft_on(self) -> tuple[Item, Draft] | None:
        """Return a round of what may follow the drafts of the only sequence, and its draft."""
        under_way = self._rounds.valid
        is_full = len(self._rounds) >= self.drafting.back_off.stages
        if len(self._sequences) > 1 or not under_way or is_full:
            return None
        item, known = under_way[0].item, self._alone(under_way[0].item)
        if known is None or not known.has_begun or known.is_cancelled:
            return None
        # The first token of the first of them is known by now.
        ahead = [*item.drafts, *(token for each in under_way[1:] for token in each.draft.tokens)]
        draft = self.drafting.draft(item.sequences[0], known.tokens, known.context, ahead)
        on = Item(ItemKind.DECODE, item.sequences, group=item.group)
        return (on, draft) if draft.tokens else None

    @property
    def _head_drafter(self) -> HeadDrafter | None:
        """The drafter that repeats guesses of the model's own head, if this drafts."""
        drafter = self.drafting.drafter
        return drafter if isinstance(drafter, HeadDrafter) else None

    def _guesses(self, item: Item, draft: Draft) -> int:
        """Return how many tokens the model's head is to guess with those of an item."""
        known = self._alone(item)
        if known is None:
            return 0
        length = len(known.tokens) + len(draft.tokens)
        return self.drafting.guesses(item.sequences[0], length, known.context)

    def _read_prompt(self, item: Item) -> None:
        """Let the drafter read a prompt while later stages compute it."""
        known = self._alone(item)
        if known is not None and not known.has_begun:
            self.drafting.read(item.sequences[0], known.tokens)

    def _alone(self, item: Item) -> _Sequence | None:
        """Return the sequence of a step that may have drafts."""
        if item.kind is not ItemKind.DECODE or len(item.sequences) > 1:
            return None
        known = self._sequences[item.sequences[0]]
        return known if known.params.grammar is None else None

    def _foresee(self, under_way: Sequence[Item]) -> None:
        """Build the graph of the item that likely comes next, while others are ``under_way``."""
        # After a round it depends on how many drafts were right.
        are_plain = all(item.is_plain for item in under_way)
        if are_plain and (likely := self._scheduler.foreseen()) is not None:
            self._worker.foresee(likely)

    def _take(self) -> list[tuple[int, SampledToken]]:
        came: list[tuple[int, SampledToken]] = []
        goes_on = False
        # A sequence gets one token at a time: others of a round, and those of one that goes on from
        # it, come with the next steps.
        while not (self._others or goes_on):
            back = self._rounds.take(self._worker.has_come)
            if back is None:
                break
            item, count = back.item, len(back.right)
            following = self._rounds.following(back)
            goes_on = following is not None and following.item.guess == back.right[-1]
            if following is not None and not goes_on:
                self.drafting.back_off_of(item.sequences[0]).missed(following.draft)
            self._measure(back)
            self._scheduler.returned(item, count, goes_on=goes_on)
            for i, number in enumerate(item.sequences):
                sequence = self._sequences[number]
                if sequence.is_cancelled:
                    sequence.position -= self._rounds.reject(number, item.length - 1)
                    self.finish(number)
                    continue
                sequence.position -= self._rounds.reject(number, item.length - count)
                if not goes_on:
                    self._make_void(number, sequence)
                rows = back.tokens[i : i + count]
                first, *others = (unpack(row, sequence.params) for row in rows)
                came.append(self._given(number, first))
                self._others += ((number, each) for each in others)
        return came

    def _measure(self, back: Round) -> None:
        """Note of a round that has come what it tells of drafts, and what the head guessed."""
        known, count = self._alone(back.item), len(back.right)
        if known is None:
            return
        if known.has_begun:
            seconds = time.perf_counter() - back.began
            back_off = self.drafting.back_off_of(back.item.sequences[0])
            back_off.took(back.draft, count, seconds, back.on_rank_0)
            drafted, right = len(back.draft.tokens), count - 1 + back.draft.goes_on
            known.drafts += DraftCounts(int(drafted > 0), drafted, right)
        if back.item.guesses and self._head_drafter is not None:
            guessed = back.tokens[-back.item.guesses :, 0].tolist()
            self._head_drafter.take(back.item.sequences[0], len(known.tokens) + count, guessed)

    def _make_void(self, number: int, known: _Sequence) -> None:
        """Have the rounds of a sequence that are under way on a guess come in vain."""
        count = self._rounds.make_void(number)
        known.position -= count
        known.drafts += DraftCounts(drafted=count)

    def _given(self, number: int, sampled: SampledToken) -> tuple[int, SampledToken]:
        self._sequences[number].tokens.append(sampled.token)
        return number, sampled

    def _find_prefix(self, number: int) -> tuple[CachedPrefix | None, tuple[int, ...]]:
        assert self._prefix_cache is not None
        tokens = self._sequences[number].tokens
        borders = self._prefix_cache.borders(tokens)
        prefix = self._prefix_cache.take(tokens)
        if prefix is not None and prefix.is_whole:
            self._scheduler.forget([prefix.sequence])
        self._make_room()
        return prefix, borders

    def _make_room(self) -> None:
        """Forget what was kept, as far as the sequences under way need the room."""
        capacity = self._scheduler.capacity
        if self._prefix_cache is not None and capacity is not None:
            room = capacity - self._scheduler.reserved
            self._scheduler.forget(self._prefix_cache.shrink(room))


def _keys(kept: Mapping[int, KeptPrefix]) -> tuple[tuple[int, str], ...]:
    """Return the kept sequences, each with the name of its files."""
    return tuple((number, each.key) for number, each in kept.items())
