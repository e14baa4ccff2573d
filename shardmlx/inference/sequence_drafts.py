"""Drafts of the sequences of a first stage: when they enter, and what comes of them. No MLX, no
MPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardmlx.inference.commands import Decode, Item
from shardmlx.inference.drafts import NO_DRAFT, Draft, DraftCounts, Drafting, HeadDrafter
from shardmlx.inference.rounds import DecodeRounds, Round
from shardmlx.inference.sequence_state import SequenceState


@dataclass
class SequenceDrafts:
    """Drafts for the ``sequences`` of a first stage, of which ``rounds`` are under way."""

    drafting: Drafting
    sequences: Mapping[int, SequenceState]
    rounds: DecodeRounds

    @property
    def head(self) -> HeadDrafter | None:
        """The drafter that repeats guesses of the model's own head, if this drafts."""
        drafter = self.drafting.drafter
        return drafter if isinstance(drafter, HeadDrafter) else None

    def draft(self, item: Item | None) -> Draft:
        """Guess the tokens after the next of a sequence that is alone in its group."""
        known = self._alone(item)
        if known is None or not known.has_begun or not isinstance(item, Decode):
            return NO_DRAFT
        return self.drafting.draft(item.sequences[0], known.tokens, known.context)

    def draft_on(self) -> tuple[Decode, Draft] | None:
        """Return a round of what may follow the drafts of the only sequence, and its draft."""
        is_full = len(self.rounds) >= self.drafting.back_off.stages
        if is_full or len(self.sequences) > 1 or not self.drafting.most:
            return None
        under_way = self.rounds.valid
        item = under_way[0].item if under_way else None
        known = self._alone(item)
        if known is None or not known.has_begun or not isinstance(item, Decode):
            return None
        # The first token of the first of them is known by now.
        ahead = [*item.drafts, *(token for each in under_way[1:] for token in each.draft.tokens)]
        draft = self.drafting.draft(item.sequences[0], known.tokens, known.context, ahead)
        return (Decode(item.sequences, item.group), draft) if draft.tokens else None

    def expects(self, item: Decode) -> bool:
        """Return whether a draft is likely to enter with the next tokens of an item."""
        known = self._alone(item)
        if known is None:
            return False
        return self.drafting.expects(item.sequences[0], known.tokens, known.context)

    def with_drafts(self, item: Decode, draft: Draft) -> Decode:
        """Return an item with which a draft enters, and which asks the model's head for the next
        one."""
        guesses = self._guesses(item, draft)
        if not (draft.tokens or guesses):
            return item
        guess = draft.tokens[0] if draft.goes_on else None
        drafts = draft.tokens[draft.goes_on :]
        return replace(item, drafts=drafts, guess=guess, guesses=guesses)

    def read_prompt(self, item: Item) -> None:
        """Let the drafter read a prompt while later stages compute it."""
        known = self._alone(item)
        if known is not None and not known.has_begun:
            self.drafting.read(item.sequences[0], known.tokens)

    def goes_on(self, back: Round) -> bool:
        """Return whether a round that has come is followed by one that began with the right guess;
        note it where the guess was wrong."""
        following = self.rounds.following(back) if self.drafting.most else None
        if following is None or not isinstance(following.item, Decode):
            return False
        if following.item.guess == back.right[-1]:
            return True
        self.drafting.back_off_of(following.item.sequences[0]).missed(following.draft)
        return False

    def measure(self, back: Round) -> None:
        """Note of a round that has come what it tells of drafts, and what the head guessed."""
        known = self._alone(back.item)
        if known is None or not isinstance(back.item, Decode):
            return
        number = back.item.sequences[0]
        count = len(back.right)
        if known.has_begun:
            self.drafting.back_off_of(number).took(back.draft, count)
            drafted = len(back.draft.tokens)
            known.drafts += DraftCounts(int(drafted > 0), drafted, count - 1 + back.draft.goes_on)
        if back.item.guesses and self.head is not None:
            guessed = back.tokens[-back.item.guesses :, 0].tolist()
            self.head.take(number, len(known.tokens) + count, guessed)

    def _guesses(self, item: Decode, draft: Draft) -> int:
        """Return how many tokens the model's head is to guess with those of an item."""
        known = self._alone(item)
        if known is None:
            return 0
        length = len(known.tokens) + len(draft.tokens)
        return self.drafting.guesses(item.sequences[0], length, known.context)

    def _alone(self, item: Item | None) -> SequenceState | None:
        """Return the sequence of a step that may have drafts."""
        if not self.drafting.most or not isinstance(item, Decode) or len(item.sequences) > 1:
            return None
        known = self.sequences[item.sequences[0]]
        return known if known.params.grammar is None else None
