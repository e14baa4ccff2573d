"""The state of a sequence on rank 0: its tokens, how many have entered, and what was drafted. No
MLX, no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmlx.inference.commands import NO_ADAPTER
from shardmlx.inference.drafts import NO_DRAFTS, DraftCounts
from shardmlx.inference.prefix_cache import CachedPrefix
from shardmlx.inference.rounds import Round
from shardmlx.inference.sampling_params import SampledToken, SamplingParams


@dataclass(slots=True)
class SequenceState:
    """A sequence that may become ``context`` tokens, if that is known and not 0. Its first
    ``prompt`` tokens were given; those up to ``position`` have entered, those up to ``cached`` are
    of the prefix cache. Stages have copies of the states at ``borders``. It is computed by an
    ``adapter``."""

    tokens: list[int]
    params: SamplingParams
    context: int
    prompt: int
    position: int = 0
    cached: int = 0
    borders: tuple[int, ...] = ()
    drafts: DraftCounts = NO_DRAFTS
    adapter: int = NO_ADAPTER

    @property
    def has_begun(self) -> bool:
        """True once a token has been sampled."""
        return len(self.tokens) > self.prompt

    def begin(self, prefix: CachedPrefix | None, *, is_first: bool) -> None:
        """Begin with the caches of a ``prefix``, or with none: for the first time, or put back."""
        self.position = 0 if prefix is None else prefix.length
        self.borders = () if prefix is None else prefix.borders
        if is_first:
            self.cached = self.position

    def enter(self, count: int) -> list[int]:
        """Note that ``count`` further tokens enter; return those of them that are known."""
        begin = self.position
        self.position += count
        return self.tokens[begin : self.position]

    def reject(self, count: int) -> int:
        """Note that the last ``count`` tokens to enter are not of the text; return the count."""
        self.position -= count
        return count

    def void(self, rounds: Sequence[Round]) -> int:
        """Do the same with what may not be of the text in ``rounds`` that come in vain. Their
        drafts count, too."""
        drafted = sum(len(each.draft.tokens) for each in rounds)
        self.drafts += DraftCounts(drafted=drafted)
        return self.reject(sum(each.unsure for each in rounds))

    def take(self, sampled: SampledToken) -> SampledToken:
        """Add a token that has come, and return it."""
        self.tokens.append(sampled.token)
        return sampled

    @property
    def entered(self) -> list[int]:
        """The tokens that have entered."""
        return self.tokens[: self.position]
