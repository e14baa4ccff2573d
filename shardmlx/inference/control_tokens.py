"""Control tokens that a message only spells, kept apart from those of its chat template.

A template writes tokens like ``<|im_start|>`` between messages. In the text of a message the same
letters are letters: else whoever writes it could speak for the system or the model. So they are
broken by a mark before the template is filled in, and the mark's tokens are taken out afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from mlx.utils import tree_flatten, tree_map

from shardmlx.errors import UserError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Code points that are, and will be, no characters."""


def control_tokens(tokenizer: TokenizerWrapper) -> re.Pattern[str] | None:
    """Return a pattern for the special tokens of a tokenizer; None if it has none."""
    added = tokenizer.added_tokens_decoder.values()
    texts = {str(each.content) for each in added if each.special}
    # A single character has no middle to be broken in.
    known = {text for text in texts if len(text) > 1}
    return re.compile(any_of(known)) if known else None


def broken(
    messages: Sequence[Mapping[str, Any]], pattern: re.Pattern[str] | None
) -> tuple[list[Any], str | None]:
    """Return the messages with a mark in each control token, and the mark, None if they have none.
    Raises ``UserError`` where they hold all marks."""
    texts = [leaf for _, leaf in tree_flatten(messages) if isinstance(leaf, str)]
    if pattern is None or not any(map(pattern.search, texts)):
        return list(messages), None
    held = "".join(texts)
    mark = next((mark for mark in MARKS if mark not in held), None)
    if mark is None:
        raise UserError("the messages hold all of U+FDD0 to U+FDEF", "take out one of them")

    def broken_text(text: Any) -> Any:
        parts, end = [], 0
        while isinstance(text, str) and (found := pattern.search(text, end)):
            # From its second character on: a token may begin in the middle of another.
            begin, end = end, found.start() + 1
            parts.append(text[begin:end])
        return mark.join([*parts, text[end:]]) if parts else text

    return tree_map(broken_text, list(messages)), mark


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
    """Return the tokens of a text without those of its marks. Raises ``UserError``."""
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
