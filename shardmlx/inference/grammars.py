"""Grammars to which answers keep: which tokens may come next, by llguidance.

A grammar is text in llguidance's Lark. The rank that samples keeps to it, rank 0 checks it before.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import mlx.core as mx
import numpy as np

from shardmlx.distributed.transport import Transport
from shardmlx.inference.prompts import PromptReader

PACKAGE = "llguidance"

BITS = 32


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, as another rank gets to know them.

    ``tokenizer`` is the JSON of a Hugging Face tokenizer, ``size`` the width of the logits, ``eos``
    the tokens that end an answer.
    """

    tokenizer: str
    size: int
    eos: tuple[int, ...]


class Grammars:
    """Grammars over a vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the beginning of an answer."""
        from llguidance import LLMatcher

        return Matcher(LLMatcher(self._tokens, grammar), self._vocabulary)

    def complaint(self, grammar: str) -> str:
        """Return what is wrong with a grammar in one line; empty if nothing is."""
        from llguidance import LLMatcher

        said: str = LLMatcher.validate_grammar(grammar)
        return said.partition("\n")[0]

    @cached_property
    def _tokens(self) -> Any:
        """The tokens as llguidance has them: made when first needed, in a second."""
        from llguidance import LLTokenizer

        known = self._vocabulary
        return LLTokenizer(known.tokenizer, n_vocab=known.size, eos_token=list(known.eos))


class Matcher:
    """The place in its grammar that one answer has come to."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def allowed(self) -> mx.array:
        """Return, for each token, whether it may come next: bool (1, V), lazy.

        Where the grammar has come to its end, or is too much for llguidance, only the answer's end
        may come.
        """
        size = self._vocabulary.size
        if self._matcher.is_error() or self._matcher.is_stopped():
            ends = np.zeros((1, size), np.bool_)
            ends[0, list(self._vocabulary.eos)] = True
            return mx.array(ends)
        words = mx.array(np.frombuffer(self._matcher.compute_bitmask(), np.uint32))
        bits = (words[:, None] >> mx.arange(BITS, dtype=mx.uint32)) & 1
        return bits.reshape(1, -1)[:, :size].astype(mx.bool_)

    def take(self, token: int) -> None:
        """Go on by a token."""
        if not self._matcher.consume_token(token) and not self._matcher.is_stopped():
            error = self._matcher.get_error().partition("\n")[0]
            print(f"shardmlx: an answer ends within its grammar: {error}", file=sys.stderr)


def share_grammars(transport: Transport, reader: PromptReader | None, size: int) -> Grammars | None:
    """Return the grammars of the model that ``reader`` on rank 0 knows, with logits of this
    ``size``; None where they cannot be had. All ranks must call it.

    They need llguidance on the first and the last rank, and a tokenizer of Hugging Face's own.
    """
    have = transport.all_gather(find_spec(PACKAGE) is not None, "packages")
    if not (have[0] and have[-1]):
        return None
    mine = None if reader is None else _vocabulary(reader, size)
    vocabulary = transport.broadcast(mine, what="the vocabulary")
    return None if vocabulary is None else Grammars(vocabulary)


def _vocabulary(reader: PromptReader, size: int) -> Vocabulary | None:
    tokenizer = reader.tokenizer
    if not getattr(tokenizer, "is_fast", False):
        return None
    eos = tuple(sorted(token for token in tokenizer.eos_token_ids if token < size))
    return Vocabulary(tokenizer.backend_tokenizer.to_str(), size, eos) if eos else None
