"""Commands: what rank 0 tells every stage to do, in order. No MLX, no MPI.

An announcement is a few of them, at most one of which computes::

    Reject 0, 2        the last round of sequence 0 had two wrong drafts
    Keep 3             sequence 3 has ended, and its caches stay
    Begin 5 like 3     sequence 5 begins with these caches
    Drop 1, 2          these have ended, and nothing of them stays
    Prefill 5, 128     128 tokens of sequence 5's prompt enter
    Border 5, 640      a copy of the states after these 640 tokens is kept

Each is applied by the object that owns the state: ``KVCaches`` and ``BatchSampler``, or
``PrefixFiles``. ``StageWorker`` hands them out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from shardmlx.inference.prefix_cache import CachedPrefix
from shardmlx.inference.sampling_params import SamplingParams


class ItemKind(Enum):
    """A chunk of one prompt, or a token of every sequence in a group."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Reject:
    """Forget the last ``count`` tokens of a ``sequence`` that is alone in its group."""

    sequence: int
    count: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the caches of ``sequences`` that have ended; of each the last ``cuts`` tokens are
    forgotten."""

    sequences: tuple[int, ...]
    cuts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PutBack:
    """Drop the caches of ``sequences``, which begin again later: their sampling goes on then."""

    sequences: tuple[int, ...]


NO_ADAPTER = 0
"""The number of the model itself among adapters."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Begin a ``sequence`` with the caches of a ``prefix``, or with empty ones. If it was not put
    back, it has ``params``. It is computed by an ``adapter``, of this number."""

    sequence: int
    params: SamplingParams | None = None
    prefix: CachedPrefix | None = None
    adapter: int = NO_ADAPTER


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget ``sequences`` that have ended, or were kept."""

    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Let the next ``length`` tokens of the prompt of a ``sequence`` enter. If it ``samples``, the
    chunk is the prompt's last token, and the next one is sampled. Where the model's own head
    drafts, ``following`` are the tokens after each that enters."""

    sequence: int
    length: int
    samples: bool = False
    following: tuple[int, ...] = ()

    @property
    def kind(self) -> ItemKind:
        """The kind ``ItemKind.PREFILL``."""
        return ItemKind.PREFILL

    @property
    def sequences(self) -> tuple[int, ...]:
        """The one sequence, as of ``Decode``."""
        return (self.sequence,)

    def __str__(self) -> str:
        return f"prefill of sequence {self.sequence}, {self.length} tokens"


@dataclass(frozen=True, slots=True)
class Decode:
    """Let a token of each of ``sequences`` enter, a row each, and sample the next ones.

    If there is a single one, ``drafts`` may enter after the known token, and a token is sampled
    after each. In place of the known token there may be a ``guess`` of what comes of the item
    before: if that is wrong, this one is void. Where the model's head drafts, the last stage is to
    guess so many tokens, ``guesses``, after those that are sampled.
    """

    sequences: tuple[int, ...]
    group: int
    drafts: tuple[int, ...] = ()
    guess: int | None = None
    guesses: int = 0

    @property
    def kind(self) -> ItemKind:
        """The kind ``ItemKind.DECODE``."""
        return ItemKind.DECODE

    @property
    def samples(self) -> bool:
        """True, as a chunk of a prompt need not be."""
        return True

    @property
    def length(self) -> int:
        """The number of tokens of each sequence that enter."""
        return 1 + len(self.drafts)

    @property
    def is_plain(self) -> bool:
        """True if nothing is guessed: the next step of the same sequences can be foreseen."""
        return self.guess is None and not (self.drafts or self.guesses)

    def __str__(self) -> str:
        more = f" and {len(self.sequences) - 1} more" if len(self.sequences) > 1 else ""
        tokens = f", {self.length} tokens" if self.drafts else ""
        return f"decode of sequence {self.sequences[0]}{more}{tokens}"


@dataclass(frozen=True, slots=True)
class Border:
    """Keep a copy of what cannot be cut of the caches of a ``sequence`` with so many ``tokens``."""

    sequence: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RestoreKept:
    """Read the files of ``kept`` sequences: pairs of a sequence and a key."""

    kept: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class StoreKept:
    """Have files of the ``kept`` sequences and of no others: pairs of a sequence and a key."""

    kept: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop: no command follows."""


Item = Prefill | Decode
"""A piece of work that every stage of the pipeline does in turn."""

Command = Reject | Keep | PutBack | Begin | Drop | Item | Border | RestoreKept | StoreKept | Stop
Commands = tuple[Command, ...]


def item_of(commands: Commands) -> Item | None:
    """Return the one of ``commands`` that computes, if there is one."""
    return next((each for each in commands if isinstance(each, (Prefill, Decode))), None)


@dataclass
class News:
    """The news of sequences since the last announcement."""

    _cut: dict[int, int] = field(default_factory=dict)
    _kept: dict[int, int] = field(default_factory=dict)
    _put_back: list[int] = field(default_factory=list)
    _dropped: list[int] = field(default_factory=list)

    def cut(self, sequence: int, count: int) -> None:
        """Note that the last ``count`` tokens of a sequence are to be forgotten."""
        if count > 0:
            self._cut[sequence] = self._cut.get(sequence, 0) + count

    def keep(self, sequence: int, cut: int = 0) -> None:
        """Note that a sequence has ended and is kept, but for its last ``cut`` tokens."""
        self._kept[sequence] = cut

    def put_back(self, sequence: int) -> None:
        """Note that a sequence begins again later."""
        self._put_back.append(sequence)

    def drop(self, sequence: int) -> None:
        """Note that nothing of a sequence is needed any more."""
        self._dropped.append(sequence)

    def take(self, begin: Begin | None = None) -> Commands:
        """Return what tells all this, once. One that begins takes the caches of others before
        these are dropped."""
        taken = (self._cut, self._kept, self._put_back, self._dropped)
        if begin is None and not any(taken):
            return ()
        told: list[Command] = [Reject(sequence, count) for sequence, count in self._cut.items()]
        if self._kept:
            told.append(Keep(tuple(self._kept), tuple(self._kept.values())))
        if self._put_back:
            told.append(PutBack(tuple(self._put_back)))
        if begin is not None:
            told.append(begin)
        if self._dropped:
            told.append(Drop(tuple(self._dropped)))
        for each in taken:
            each.clear()
        return tuple(told)
