"""Control tokens that a message only spells, kept apart from those of its chat template.

A template writes tokens like ``<|im_start|>`` between messages. In the text of a message the same
letters are letters: else whoever writes it could speak for the system or the model. So they are
broken by a mark before the template is filled in, and the mark's tokens are taken out afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from shardmlx.errors import UserError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Code points that are, and will be, no characters."""


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The control tokens of a tokenizer, as a pattern."""

    pattern: re.Pattern[str] | None

    @classmethod
    def of(cls, tokenizer: TokenizerWrapper) -> ControlTokens:
        """Return those of a tokenizer: its special tokens, which no text should have."""
        added = tokenizer.added_tokens_decoder.values()
        texts = {str(each.content) for each in added if each.special}
        # A single character has no middle to be broken in.
        known = {text for text in texts if len(text) > 1}
        return cls(re.compile(any_of(known)) if known else None)

    def broken(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Any], str | None]:
        """Return the messages with a mark in each control token, and the mark; None if there is no
        control token in them. Raises ``UserError`` where they hold all marks."""
        if self.pattern is None or not any(map(self.pattern.search, _texts(messages))):
            return list(messages), None
        held = "".join(_texts(messages))
        mark = next((mark for mark in MARKS if mark not in held), None)
        if mark is None:
            raise UserError("the messages hold all of U+FDD0 to U+FDEF", "take out one of them")
        return [self._mapped(message, mark) for message in messages], mark

    def _mapped(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._break(value, mark)
        if isinstance(value, Mapping):
            return {key: self._mapped(each, mark) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self._mapped(each, mark) for each in value]
        return value

    def _break(self, text: str, mark: str) -> str:
        assert self.pattern is not None, "there is something to break"
        parts, end = [], 0
        while found := self.pattern.search(text, end):
            # From its second character on: a token may begin in the middle of another.
            begin, end = end, found.start() + 1
            parts.append(text[begin:end])
        return mark.join([*parts, text[end:]])


def any_of(texts: Collection[str]) -> str:
    """Return a pattern for the beginning of any of these texts, as far as it tells that one is
    there. Their common settings are read once: models have a thousand such tokens."""
    if "" in texts:
        return ""
    branches = [
        re.escape(first) + any_of({text[1:] for text in each})
        for first, each in groupby(sorted(texts), key=lambda text: text[0])
    ]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def encode_without(mark: str, text: str, tokenizer: TokenizerWrapper) -> list[int]:
    """Return the tokens of a text without those of its marks.

    Raises ``UserError`` where a token cannot be told from those of a mark.
    """
    if getattr(tokenizer, "is_fast", False):
        encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        spans = [text[start:end] for start, end in encoding.offsets]
        if not any(mark in span and span != mark for span in spans):
            return [token for token, span in zip(encoding.ids, spans, strict=True) if span != mark]
    raise UserError(
        "a message spells a control token of the model, which this tokenizer cannot tell from a "
        "real one",
        "leave it out",
    )


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for each in value.values() for text in _texts(each)]
    if isinstance(value, list | tuple):
        return [text for each in value for text in _texts(each)]
    return []
