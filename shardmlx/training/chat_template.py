"""Chat templates: the messages that one accepts, and the place of the answer in its text. No MPI.

Templates are programs: an unknown form becomes a Python value in the text, or nothing, without an
error. Each form is therefore tried once, with a conversation of known words.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateSyntaxError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.common.yaml_reader import is_number
from shardmlx.compat import tokens_of_assistant
from shardmlx.errors import UserError, one_line

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None

_KEY, _WORD = "wxkey", "yzword"
_USER = {"role": "user", "content": "a"}
KNOWN_ROLES = ("system", "user", "assistant", "tool")
"""Roles that are not tried alone: a template may require an order."""

_STRUCTURE = ("role", "type", "id")
"""Keys of a message whose values control how it is written."""

_PIECES = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|\w+|\W")
"""Pattern of the marks, words and other characters in a template's text."""

_GENERATION = re.compile(r"\{%-?\s*generation\b")
"""The tag around what the assistant says."""

_LEAST = 4
"""Fewest characters of an answer's beginning that identify it if the rest is missing."""


class ChatTemplate:
    """The chat template of a tokenizer. Raises ``UserError`` without a valid one."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self.takes_parts = functools.cache(self._takes_parts)
        """Return whether the template takes the content of a role as a list of parts."""
        self.drops = functools.cache(self._drops)
        """Return whether the template leaves out messages of a role."""
        if not getattr(tokenizer, "has_chat_template", True):
            raise UserError(
                "the model has no chat template, and conversations need one",
                "use an Instruct model, or write rows of text",
            )
        named = getattr(tokenizer, "chat_template", None)
        if isinstance(named, Mapping) and "default" not in named:
            raise UserError(
                f"the model has the chat templates {', '.join(named)}, and none is the default",
                "call one of them default in tokenizer_config.json",
            )
        try:
            self.text([_USER])
        except TemplateSyntaxError as error:
            raise UserError(
                f"the model's chat template cannot be compiled: {one_line(error)} in line "
                f"{error.lineno}",
                "mend it: chat_template.jinja beside the model, or in tokenizer_config.json",
            ) from None
        except Exception:
            pass  # it may require other conversations

    def tokens(self, messages: Sequence[Message], tools: Tools = None, **how: Any) -> list[int]:
        """Return a conversation's tokens as mlx-lm makes them. Raises the template's errors."""
        tokens: list[int] = self._tokenizer.apply_chat_template(
            messages, tools=tools, return_dict=False, **how
        )
        return tokens

    def text(self, messages: Sequence[Message], tools: Tools = None, **how: Any) -> str:
        """Return the text of a conversation. Raises the template's errors."""
        return str(self.tokens(messages, tools, tokenize=False, **how))

    # Accepted messages.

    def _takes_parts(self, role: str) -> bool:
        text = self._try({"role": role, "content": [{"type": "text", "text": _WORD}]})
        return _WORD in text and "'text'" not in text and '"text"' not in text

    def _drops(self, role: str) -> bool:
        text = self._try({"role": role, "content": _WORD})
        return role not in KNOWN_ROLES and text != "" and _WORD not in text

    @functools.cached_property
    def writes_calls(self) -> bool:
        return self.writes({"role": "assistant", "tool_calls": _call_of(_WORD, {})})

    @functools.cached_property
    def arguments(self) -> type | None:
        """Form of calls' arguments that the template wants: dict, or str for JSON; None for any."""
        value = {_KEY: _WORD}
        as_text, as_object = (
            self._try({"role": "assistant", "tool_calls": _call_of("f", form)})
            for form in (json.dumps(value), value)
        )
        takes_text = json.dumps(value) in as_text
        takes_object = _KEY in as_object and _WORD in as_object and str(value) not in as_object
        if takes_object and not (takes_text and as_text == as_object):
            return dict
        return str if takes_text and not takes_object else None

    def writes(self, message: Message) -> bool:
        """Return whether the template writes all words of a message, and not like Python does."""
        marks: list[str] = []

        def mark(word: str) -> str:
            marks.append(f"{_WORD}{len(marks)}x")
            return marks[-1]

        text = self._try(_words(message, mark))
        return bool(marks) and all(each in text for each in marks) and f"'{_WORD}" not in text

    def _try(self, message: Message) -> str:
        """Return a conversation with a message, if need be of empty content; "" if refused."""
        role = message["role"]
        for each in (message, {"content": "", **message}):
            orders = {"user": [each], "system": [each, _USER]}
            text = self._text_or_none(orders.get(role, [_USER, each]))
            if text is not None:
                return text
        return ""

    def _text_or_none(self, *conversation: Any, **how: Any) -> str | None:
        try:
            return self.text(*conversation, **how)
        except Exception:  # a template may raise anything
            return None

    # Which tokens count.

    def counted(
        self,
        messages: Sequence[Message],
        tools: Tools,
        tokens: Sequence[int],
        counts: Sequence[bool],
        where: str,
    ) -> list[bool]:
        """Return for each token whether it belongs to a message that ``counts``, with the mark of
        its end; if the template marks what the assistant says, whether that counts. ``UserError``
        names ``where`` if the text does not show where a message lies.

        A message begins after the generation prompt, as in mlx-lm. Some templates add to that
        prompt, such as the mark of a thought, or write earlier messages differently when another
        follows: the message is then searched in the text.
        """
        if counts[-1] and not any(counts[:-1]):
            start = self._tokens_before(messages, tools, tokens)
            if start is not None:
                return [i >= start for i in range(len(tokens))]
        marked = self._marked(messages, tools)
        if marked is not None and list(counts) == [m["role"] == "assistant" for m in messages]:
            return marked
        text = self.text(messages, tools)
        ends = self._ends(text, tokens)
        mask = [False] * len(tokens)
        for i, is_counted in enumerate(counts):
            if not is_counted:
                continue
            bounds = self._bounds(messages, tools, text, i)
            if bounds is None:
                raise UserError(
                    f"{where}: it cannot be told where message {i} lies in what the chat template "
                    "writes",
                    "take the row out, or train without --loss-on, --mask-prompt and --objective",
                )
            begin, end = (self._token_at(text, place, tokens, ends) for place in bounds)
            mask[begin:end] = [True] * (end - begin)
        if marked is not None:
            mask = list(map(all, zip(mask, marked, strict=True)))
        return mask

    def _tokens_before(
        self, messages: Sequence[Message], tools: Tools, tokens: Sequence[int]
    ) -> int | None:
        """Return how many tokens stand before the last message, if all begin with its prompt's."""
        opens = messages[-1]["role"] == "assistant"
        try:
            prompt = self.tokens(messages[:-1], tools, add_generation_prompt=opens)
        except Exception:  # a template may require another order, or raise anything
            return None
        return len(prompt) if list(tokens[: len(prompt)]) == list(prompt) else None

    def _marked(self, messages: Sequence[Message], tools: Tools) -> list[bool] | None:
        """Return which tokens the template marks as the assistant's; None if it marks none."""
        if not _GENERATION.search(str(getattr(self._tokenizer, "chat_template", ""))):
            return None
        return [*map(bool, tokens_of_assistant(self._tokenizer, messages, tools))]

    def _bounds(
        self, messages: Sequence[Message], tools: Tools, text: str, i: int
    ) -> tuple[int, int] | None:
        """Return the characters at which message ``i`` begins and ends in the text of all."""
        upto, opens = messages[: i + 1], messages[i]["role"] == "assistant"
        is_last = i == len(messages) - 1
        alone = text if is_last else self._text_or_none(upto, tools) or ""
        begin = self._place_of_answer(upto, tools, alone, opens) if alone else None
        if begin is not None and text.startswith(alone):
            return begin, len(alone)
        if is_last:
            return None
        # A template may write a message otherwise once others follow.
        mark = _unused(text)
        marked = [*upto[:-1], _words(messages[i], lambda word: mark)]
        other = self._text_or_none([*marked, *messages[i + 1 :]], tools)
        if other is None or other == text:
            return None
        end, closing = len(text) - _common(text[::-1], other[::-1]), ""
        last = self._text_or_none(marked, tools)
        if last is not None:
            closing = alone[len(alone) - _common(alone[::-1], last[::-1]) :]
        if begin is None or not text.startswith(alone[:begin]):
            begin = _common(text, other)
        for piece in _PIECES.findall(closing):
            if not text.startswith(piece, end):
                break
            end += len(piece)
        return begin, end

    def _place_of_answer(
        self, messages: Sequence[Message], tools: Tools, text: str, opens: bool
    ) -> int | None:
        """Return the character at which the last message begins in the text of all."""
        *before, last = messages
        prompt = self._text_or_none(before, tools, add_generation_prompt=opens)
        if prompt is not None and text.startswith(prompt):
            return len(prompt)
        # Words that the text does not contain show how each message is written.
        mark = _unused(text)
        other = self._text_or_none([*before, _words(last, lambda word: mark)], tools)
        if other is None or other == text:
            return None
        end = _common(text, other)
        begin = 0
        if before:
            longer = _words(before[-1], lambda word: word + mark)
            other = self._text_or_none([*before[:-1], longer, last], tools)
            begin = 0 if other is None else min(end, _common(text, other))
        asked = self._text_or_none(before, tools) if opens and prompt is not None else None
        header = "" if asked is None or prompt is None else prompt[_common(asked, prompt) :]
        # The generation prompt, or its beginning, stands between the two messages.
        for piece in reversed([*_PIECES.finditer(header)]):
            found = text.rfind(header[: piece.end()], begin, end)
            if found >= 0 and (piece.end() == len(header) or piece.end() >= _LEAST):
                return found + piece.end()
        return end

    def _ends(self, text: str, tokens: Sequence[int]) -> list[int] | None:
        """Return the character at which each token ends, if the tokenizer tells."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        encoded = backend.encode(text, add_special_tokens=False)
        return [end for _, end in encoded.offsets] if encoded.ids == list(tokens) else None

    def _token_at(
        self, text: str, place: int, tokens: Sequence[int], ends: Sequence[int] | None
    ) -> int:
        """Return the number of the first token of ``text`` that reaches beyond a character."""
        if ends is not None:
            return next((i for i, end in enumerate(ends) if end > place), len(tokens))
        prompt = self._tokenizer.encode(text[:place], add_special_tokens=False)
        return _common(prompt, tokens)


def _call_of(name: str, arguments: Any) -> list[dict[str, Any]]:
    # Mistral's templates want numbers of nine characters.
    function = {"name": name, "arguments": arguments}
    return [{"id": "call00001", "type": "function", "function": function}]


def _unused(text: str) -> str:
    """Return a character that a text does not contain."""
    return next(each for each in map(chr, range(0x2460, 0x3000)) if each not in text)


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _words(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str) or is_number(value):
        return change(str(value))
    if isinstance(value, Mapping):
        return {
            key: each if key in _STRUCTURE else _words(each, change) for key, each in value.items()
        }
    if isinstance(value, list):
        return [_words(each, change) for each in value]
    return value
