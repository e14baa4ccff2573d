"""Grammars to which answers keep: which tokens may come next, by llguidance.

A grammar is text in llguidance's Lark. The rank that samples keeps to it, rank 0 checks it before.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from threading import Lock
from typing import Any

import mlx.core as mx
import numpy as np

from shardmlx.inference.prompts import PromptEncoder

READY_CHARACTERS = 2_000_000
"""Characters of grammars that are kept ready: they take a hundred times as many bytes."""


@dataclass(frozen=True)
class Grammars:
    """Grammars over the tokens of a model: ``tokenizer`` is the JSON of a Hugging Face tokenizer,
    ``size`` the width of the logits, ``eos`` the tokens that end an answer."""

    tokenizer: str
    size: int
    eos: tuple[int, ...]

    def matcher(self, grammar: str) -> Matcher:
        """Return a matcher at the beginning of an answer. May be called on any thread."""
        return Matcher(self._ready.matcher(grammar), self.size)

    def complaint(self, grammar: str) -> str:
        """Return what is wrong with a grammar in one line; empty if nothing is."""
        matcher = self.matcher(grammar)
        if said := matcher.error:
            return said
        matcher.allowed()
        return "nothing keeps to it, as where a rule is only itself" if matcher.error else ""

    @cached_property
    def _ready(self) -> _ReadyGrammars:
        return _ReadyGrammars(self)

    @cached_property
    def tokens(self) -> Any:
        """The tokens as llguidance has them: made when first needed, in two seconds."""
        from llguidance import LLTokenizer, TokenizerWrapper

        tokens = TokenizerWrapper(_Tokens(self))
        return LLTokenizer(tokens, eos_token=list(self.eos))


class _ReadyGrammars:
    """The matchers of the grammars that were asked for last, at their beginnings. A thousand tools
    take a second to be made ready, and a copy of what is ready no time."""

    def __init__(self, known: Grammars) -> None:
        self._known = known
        self._lock = Lock()
        self._ready: OrderedDict[str, Any] = OrderedDict()

    def matcher(self, grammar: str) -> Any:
        """Return llguidance's matcher of a grammar."""
        from llguidance import LLMatcher

        with self._lock:
            if grammar not in self._ready:
                self._ready[grammar] = LLMatcher(self._known.tokens, grammar, log_level=0)
                self._forget_old()
            self._ready.move_to_end(grammar)
            return self._ready[grammar].deep_copy()

    def _forget_old(self) -> None:
        while len(self._ready) > 1 and sum(map(len, self._ready)) > READY_CHARACTERS:
            self._ready.popitem(last=False)


class _Tokens:
    """The tokens of a model, in the way in which llguidance asks for them. It takes all added ones
    that look like ``<think>`` for control tokens, which no text of a grammar matches; here they are
    text, unless the tokenizer says that they are special."""

    bos_token_id = None

    def __init__(self, known: Grammars) -> None:
        from llguidance import LLTokenizer

        self._known = LLTokenizer(known.tokenizer, slices=[])
        added = json.loads(known.tokenizer)["added_tokens"]
        plain = {each["id"]: each["content"].encode() for each in added if not each["special"]}
        numbers = range(max(known.size, self._known.vocab_size))
        special = set(filter(self._known.is_special_token, numbers)) - plain.keys()
        self.eos_token_id = known.eos[0]
        self.special_token_ids = sorted(special)
        self._special = special
        self.tokens = [
            plain[number]
            if number in plain and self._known.is_special_token(number)
            else self._known.decode_bytes([number])
            for number in numbers
        ]

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text, which is no control token even where it reads like one."""
        tokens: list[int] = self._known.tokenize_str(text)
        if self._special.intersection(tokens):
            tokens = self._known.greedy_tokenize(text)
        return tokens


class Matcher:
    """The place in its grammar that one answer has come to."""

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher = matcher
        self._size = size

    @property
    def error(self) -> str:
        """The reason for which the answer cannot go on, in one line; empty if it can."""
        said: str = self._matcher.get_error()
        return " ".join(said.partition("<backtrace>")[0].split())

    def allowed(self) -> mx.array:
        """Return whether each token may come next: bool (1, V). At the end of the grammar
        only the answer's end may; where it cannot go on, there is an ``error`` from now on."""
        biases = np.frombuffer(self._matcher.compute_logit_bias(), np.uint8)
        return mx.array(biases[None, : self._size] > 0)

    def take(self, token: int) -> None:
        """Go on past a token that was sampled."""
        self._matcher.consume_token(token)


def has_llguidance() -> bool:
    """Return whether llguidance is installed on this rank."""
    return find_spec("llguidance") is not None


def grammars_of(encoder: PromptEncoder, size: int) -> Grammars | None:
    """Return the grammars of a model with logits of this ``size``; None for a tokenizer that is not
    Hugging Face's own, or that has no token for the end of an answer."""
    if not getattr(encoder.tokenizer, "is_fast", False):
        return None
    eos = tuple(sorted(token for token in encoder.tokenizer.eos_token_ids if token < size))
    if not eos:
        return None
    return Grammars(encoder.tokenizer.backend_tokenizer.to_str(), size, eos)
