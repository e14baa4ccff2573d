"""Cut long texts before they become tokens, where the first tokens provably stay the same. No MLX,
no MPI.

A tokenizer works on one word after the other where it divides a text before each space: words to
the right of a space then change nothing to its left. This holds for the parts of tokenizers that
are named here; a text for any other tokenizer stays whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.compat import backend_of

_LETTERS_A_TOKEN = 16
"""Characters that are kept for each token that is taken: four times as many as most texts need."""

_LONGEST_WORD = 32
"""Characters of the word before a cut, at most: the cut changes the tokens of this word alone."""

_PLACE = re.compile(rf" [a-z]{{1,{_LONGEST_WORD}}}(?= [a-z])")
"""Pattern of a word in front of which, and behind which, a text may be divided."""

_SPANS_WORDS = re.compile(r"[a-z] [a-z]")
"""Pattern of a special token that no division at a space leaves alone."""

_HAS_SPACE = re.compile("[^ \u2581][ \u2581]")
"""Pattern of a token that goes on behind a space, as SentencePiece writes it, or not."""

_ALTERNATIVES = frozenset(
    (
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r" ?\p{L}+",
        r"\p{N}",
        r"\p{N}{1,3}",
        r" ?\p{N}+",
        r" ?[^\s\p{L}\p{N}]+",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r"\s*[\r\n]",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Alternatives of the patterns of GPT-2, Llama 3, Qwen and their like: none matches a letter, a
space and a letter, or looks further than one character beyond what it matches."""

_LOCAL_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "BertNormalizer")

_DIVIDES = ("Metaspace", "Whitespace", "WhitespaceSplit", "BertPreTokenizer")
"""Pre-tokenizers that divide a text at each space."""

_LOCAL = ("Digits", "Punctuation", *_DIVIDES)


class TextCuts:
    """The cuts of texts for one tokenizer."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._is_possible: bool | None = None

    def beginning(self, text: str, most: int) -> str | None:
        """Return the beginning of a text that is much longer than its first ``most`` tokens, of
        which these are made all the same; None where it is not, or that is not certain."""
        length = _LETTERS_A_TOKEN * most
        if len(text) <= 2 * length:
            return None
        if self._is_possible is None:
            self._is_possible = _works_on_words(self._tokenizer)
        places = list(_PLACE.finditer(text, max(0, length - 1000), length))
        return text[: places[-1].end()] if self._is_possible and places else None

    def suffices(self, tokens: int, most: int) -> bool:
        """Return whether so many tokens of a beginning have the first ``most`` of the whole."""
        return tokens - 2 * _LONGEST_WORD > most  # the word's, and special ones at the end


def _works_on_words(tokenizer: TokenizerWrapper) -> bool:
    """Return whether a tokenizer provably works on one word after the other."""
    backend = backend_of(tokenizer)
    if backend is None:
        return False
    added = backend.get_added_tokens_decoder().values()
    if any(_SPANS_WORDS.search(token.content) for token in added):
        return False
    if not _is_local(_state(backend.normalizer), "normalizers", _is_local_normalizer):
        return False
    before = _state(backend.pre_tokenizer)
    if before is not None:
        is_local = _is_local(before, "pretokenizers", _is_local_division)
        return is_local and _divides_words(before)
    # A merge across a space would make a token that has one.
    is_bpe = type(backend.model).__name__ == "BPE" and backend.model.dropout is None
    return is_bpe and not any(map(_HAS_SPACE.search, backend.get_vocab()))


def _state(part: Any) -> Mapping[str, Any] | None:
    if part is None:
        return None
    state: Mapping[str, Any] = json.loads(part.__getstate__())
    return state


def _is_local(state: Mapping[str, Any] | None, key: str, test: Any) -> bool:
    """Return whether all parts of a sequence, under ``key``, pass a test."""
    if state is None:
        return True
    if state["type"] == "Sequence":
        return all(_is_local(each, key, test) for each in state[key])
    return bool(test(state))


def _is_local_normalizer(state: Mapping[str, Any]) -> bool:
    if state["type"] == "Replace":
        return len(state["pattern"].get("String", "  ")) == 1
    return state["type"] in _LOCAL_NORMALIZERS


def _is_local_division(state: Mapping[str, Any]) -> bool:
    return state["type"] in (*_LOCAL, "ByteLevel") or _is_known_split(state)


def _divides_words(state: Mapping[str, Any]) -> bool:
    """Return whether a pre-tokenizer divides a text at a space between letters."""
    if state["type"] == "Sequence":
        return any(map(_divides_words, state["pretokenizers"]))
    if state["type"] == "ByteLevel":
        return bool(state["use_regex"])
    return _is_known_split(state) or (state["type"] in _DIVIDES and state.get("split", True))


def _is_known_split(state: Mapping[str, Any]) -> bool:
    if state["type"] != "Split" or state.get("invert"):
        return False
    pattern = state["pattern"]
    if "String" in pattern:
        return bool(pattern["String"] == " ")
    is_known = _ALTERNATIVES.issuperset(_alternatives(pattern["Regex"]))
    return is_known and state["behavior"] == "Isolated"


def _alternatives(pattern: str) -> list[str]:
    """Return the alternatives of a regular expression, those in brackets undivided."""
    found = [""]
    depth = 0
    for piece in re.findall(r"\\.|[^\\]", pattern):
        depth += (piece in "([{") - (piece in ")]}")
        if piece == "|" and depth == 0:
            found.append("")
        else:
            found[-1] += piece
    return found
