"""Which piece of which text a pipeline computes next. Pure.

The first rank decides, one ``Item`` at a time, and every stage computes the items in that order::

    stage 0   a0 a1 a2 b0 b1 .  A  B  A  B  A       a0 a1 a2: a prompt in chunks
    stage 1      a0 a1 a2 b0 b1 .  A  B  A  B       A, B: a token for every text of a group

A chunk of a prompt needs nothing but the chunk before it on the same stage, so that chunks follow
each other through the stages. A token of a text needs the one before, which the last stage
chooses: a stage has work all the time if as many groups of texts as there are stages take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from shardmlx.inference.prefix_cache import Beginning
from shardmlx.models.kv_cache import held


class Kind(Enum):
    PROMPT = "prompt"
    """Tokens of one prompt: all but its last, or an only one, with which the text's first token is
    chosen."""
    TOKEN = "token"
    """One token of every text in a group, the last of its prompt at first, and the choice of their
    next."""
    REST = "rest"
    """Nothing to compute, but news of texts, and of the first rank's being alive."""
    STOP = "stop"
    """There will be no more items."""


@dataclass(frozen=True, slots=True)
class Item:
    """One piece of work for every stage of the pipeline.

    ``texts`` are the texts it is of, in the order of its rows: one for a prompt. ``length`` tokens
    of each enter. ``opened`` says, with the first piece of a prompt, how its tokens are to be
    chosen, and ``begins`` what its caches begin with. Texts that have ended are ``kept``, out of
    their groups, before that, and ``dropped`` after it.
    """

    kind: Kind
    texts: tuple[int, ...] = ()
    length: int = 1
    chooses: bool = True
    group: int | None = None
    kept: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    begins: Beginning | None = None
    opened: Any = None

    def __str__(self) -> str:
        match self.kind:
            case Kind.PROMPT:
                return f"prompt of text {self.texts[0]}, {self.length} tokens"
            case Kind.TOKEN:
                return f"token of text{'s' * (len(self.texts) > 1)} {_listed(self.texts)}"
            case Kind.REST | Kind.STOP:
                return str(self.kind.value)


def _listed(texts: Sequence[int]) -> str:
    shown = ", ".join(map(str, texts[:4]))
    return shown + ", ..." * (len(texts) > 4)


@dataclass(slots=True)
class _Prompt:
    text: int
    left: int
    context: int
    opened: Any
    begins: Beginning | None = None
    is_begun: bool = False


@dataclass(slots=True)
class _Group:
    """Texts that advance together. ``in_flight`` while a token of them is being computed."""

    texts: list[int] = field(default_factory=list)
    joining: list[int] = field(default_factory=list)
    in_flight: bool = False

    @property
    def size(self) -> int:
        return len(self.texts) + len(self.joining)

    @property
    def is_ready(self) -> bool:
        return self.size > 0 and not self.in_flight


class Scheduler:
    """The order of items for texts that come and go.

    At most ``most`` texts are under way at a time, and with ``capacity`` only as many as it has
    room for, all as long as the longest may become; others wait in order. Prompts go first, in
    chunks of ``chunk`` tokens, so that groups are full when they take their turns; but with
    ``patience`` at most so many chunks come between two tokens of groups that are ready.

    ``begin`` is asked, when a text's turn has come, what of its prompt is there already.
    """

    def __init__(
        self,
        groups: int,
        most: int,
        chunk: int,
        patience: int | None = None,
        capacity: int | None = None,
    ) -> None:
        if min(groups, most, chunk) < 1 or (patience is not None and patience < 1):
            raise ValueError(f"groups {groups}, most {most}, chunk {chunk}, patience {patience}")
        self.begin: Callable[[int], Beginning | None] = lambda text: None
        self.capacity = capacity
        self._most = most
        self._chunk = chunk
        self._patience = patience
        self._chunks_since = 0
        self._groups = [_Group() for _ in range(groups)]
        self._turns = deque(range(groups))
        self._waiting: deque[_Prompt] = deque()
        self._current: _Prompt | None = None
        self._open: dict[int, int] = {}
        self._kept: list[int] = []
        self._dropped: list[int] = []

    @property
    def is_idle(self) -> bool:
        """Nothing is under way, and nothing waits."""
        return not self._open and not self._waiting

    @property
    def has_news(self) -> bool:
        """The stages have not been told of all texts that have ended."""
        return bool(self._kept or self._dropped)

    @property
    def reserved(self) -> int:
        """Tokens of caches for the texts under way: in a group all are as long as the longest."""
        return len(self._open) * held(max(self._open.values(), default=0))

    def add(self, text: int, tokens: int, opened: Any = None, context: int = 0) -> None:
        """A prompt of so many tokens, which may become a text of ``context`` tokens."""
        if tokens < 1:
            raise ValueError(f"a prompt of {tokens} tokens")
        if self.capacity is not None and held(context) > self.capacity:
            raise ValueError(f"a text of {context} tokens, where {self.capacity} are kept")
        self._waiting.append(_Prompt(text, tokens, context, opened))

    def next(self) -> Item | None:
        """What the pipeline computes next; None while that depends on items under way."""
        prompt = self._prompt()
        ready = next((g for g in self._turns if self._groups[g].is_ready), None)
        patient = self._patience is None or self._chunks_since < self._patience
        if prompt is not None and (ready is None or patient):
            self._chunks_since += 1
            return self._chunk_of(prompt)
        if ready is None:
            return None
        self._chunks_since = 0
        self._turns.remove(ready)
        self._turns.append(ready)
        group = self._groups[ready]
        group.texts += group.joining
        group.joining = []
        group.in_flight = True
        kept, dropped = self._take_ended()
        return Item(Kind.TOKEN, tuple(group.texts), group=ready, kept=kept, dropped=dropped)

    def rest(self) -> Item:
        """An item without work, to be issued while there is none."""
        kept, dropped = self._take_ended()
        return Item(Kind.REST, kept=kept, dropped=dropped)

    def foreseen(self) -> Item | None:
        """The next item, most likely, where ``next`` has none: the turn of the group that has been
        under way longest, if nobody joins or leaves it."""
        if self._prompt() is not None:
            return None
        longest = next((g for g in self._turns if self._groups[g].in_flight), None)
        if longest is None:
            return None
        group = self._groups[longest]
        return None if group.joining else Item(Kind.TOKEN, tuple(group.texts), group=longest)

    def returned(self, item: Item) -> None:
        """The tokens of an item have been chosen: its texts go on, unless ``finish`` is called."""
        if item.kind is Kind.TOKEN and item.group is not None:
            self._groups[item.group].in_flight = False
        elif item.kind is Kind.PROMPT and item.chooses:
            self._join(item.texts[0])

    def finish(self, text: int, *, keep: bool = False) -> None:
        """A text of which no token is under way has come to its end, perhaps before its beginning.
        Its caches are to be kept or dropped."""
        for group in self._groups:
            for texts in (group.texts, group.joining):
                if text in texts:
                    texts.remove(text)
        if self._open.pop(text, None) is None:
            self._waiting = deque(prompt for prompt in self._waiting if prompt.text != text)
            return
        if self._current is not None and self._current.text == text:
            self._current = None
        if keep:
            self._kept.append(text)
        else:
            self._dropped.append(text)

    def forget(self, texts: Sequence[int]) -> None:
        """Texts that were kept are not needed any more."""
        self._dropped += texts

    def _prompt(self) -> _Prompt | None:
        if self._current is None and self._waiting and self._has_room(self._waiting[0]):
            prompt = self._current = self._waiting.popleft()
            self._open[prompt.text] = prompt.context
        return self._current

    def _has_room(self, prompt: _Prompt) -> bool:
        texts = len(self._open) + 1
        longest = max(prompt.context, *self._open.values(), 0)
        return texts <= self._most and (
            self.capacity is None or texts * held(longest) <= self.capacity
        )

    def _chunk_of(self, prompt: _Prompt) -> Item:
        if not prompt.is_begun:
            # Now, and not when its turn has come: what is forgotten for it goes with this item.
            prompt.is_begun = True
            prompt.begins = self.begin(prompt.text)
            if prompt.begins is not None:
                prompt.left -= prompt.begins.length
        # The last token makes the first choice, as in mlx-lm: with its group's next step, or by
        # itself where nothing else of the prompt is to be computed.
        is_last = prompt.left == 1
        length = 1 if is_last else min(self._chunk, prompt.left - 1)
        kept, dropped = self._take_ended()
        item = Item(
            Kind.PROMPT,
            (prompt.text,),
            length,
            chooses=is_last,
            kept=kept,
            dropped=dropped,
            begins=prompt.begins,
            opened=prompt.opened,
        )
        prompt.left -= length
        prompt.opened = prompt.begins = None
        if prompt.left <= 1:
            self._current = None
        if prompt.left == 1:
            self._join(prompt.text)
        return item

    def _join(self, text: int) -> None:
        smallest = min(self._groups, key=lambda group: (group.size, group.in_flight))
        smallest.joining.append(text)

    def _take_ended(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        ended = tuple(self._kept), tuple(self._dropped)
        self._kept, self._dropped = [], []
        return ended
