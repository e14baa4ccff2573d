"""Chat templates: the messages that one accepts, and the place of the answer in its text. No MPI.

Templates are programs: an unknown form becomes a Python value in the text, or nothing, without an
error. Each form is therefore tried once, with a conversation of known words.
"""

from __future__ import annotations

import functools
import itertools
import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateSyntaxError
from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.common.yaml_reader import is_number
from shardmlx.compat import (
    backend_of,
    has_generation_marks,
    has_template_in_python,
    tokens_of_assistant,
    tokens_of_text,
)
from shardmlx.errors import UserError, one_line
from shardmlx.training.message_marks import Message, has_words, texts_of
from shardmlx.training.message_spans import MessageSpans, Reading, Span, Tools

_KEY, _WORD = "wxkey", "yzword"
_USER = {"role": "user", "content": "a"}
_RESULT = {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "b"}
_ANSWER = {"role": "assistant", "content": "c"}
KNOWN_ROLES = ("system", "user", "assistant", "tool")
"""Roles that are not tried alone: a template may require an order."""

_STRUCTURE = ("role", "type", "id")
"""Keys of a message whose values control how it is written."""


@dataclass(frozen=True, slots=True)
class Written:
    """Text of a conversation as a template writes it, its tokens, and the character at which each
    of them ends, which not every tokenizer tells. ``marked`` says which tokens the template marks
    as the assistant's; None if it marks none, or was not asked."""

    text: str
    tokens: list[int]
    ends: list[int] | None = None
    marked: list[bool] | None = None


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A key of a message some of whose words a template leaves out; ``is_all`` says that it writes
    no word of the whole message."""

    message: int
    key: str
    is_all: bool


class ChatTemplate:
    """The chat template of a tokenizer. Raises ``UserError`` without a valid one."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._spans = MessageSpans(self._write)
        self._complete: set[tuple[Any, ...]] = set()
        """Forms of conversations of which the template has written all words."""
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
                "fix it: chat_template.jinja beside the model, or in tokenizer_config.json",
            ) from None
        except Exception:
            pass  # it may require other conversations

    def tokens(self, messages: Sequence[Message], tools: Tools = None, **how: Any) -> list[int]:
        """Return a conversation's tokens as mlx-lm makes them. Raises the template's errors."""
        if has_template_in_python(self._tokenizer):
            how |= {} if tools is None else {"tools": tools}
        else:
            how |= {"tools": tools, "return_dict": False}
        tokens: list[int] = self._tokenizer.apply_chat_template(messages, **how)
        return tokens

    def text(self, messages: Sequence[Message], tools: Tools = None, **how: Any) -> str:
        """Return the text of a conversation. Raises the template's errors."""
        return str(self.tokens(messages, tools, tokenize=False, **how))

    # Accepted messages.

    def _takes_parts(self, role: str) -> bool:
        text = self._try({"role": role, "content": [{"type": "text", "text": _WORD}]})
        return _WORD in text and "'text'" not in text and '"text"' not in text

    def _drops(self, role: str) -> bool:
        message = {"role": role, "content": _WORD}
        # It may look for the role at the beginning, or behind a question.
        texts = (self._text_or_none([message, _USER]) or "", self._try(message))
        is_written = any(_WORD in text for text in texts)
        return role not in KNOWN_ROLES and any(texts) and not is_written

    @functools.cached_property
    def writes_calls(self) -> bool:
        """True if the template writes calls of tools."""
        # A template may join arguments with its own text, which only text allows.
        forms: tuple[Any, ...] = ({}, "{}")
        texts = [
            self._try({"role": "assistant", "tool_calls": _call_of(_WORD, form)}) for form in forms
        ]
        return any(_WORD in text and f"'{_WORD}" not in text for text in texts)

    @functools.cached_property
    def arguments(self) -> type | None:
        """Form of calls' arguments that the template wants: dict, or str for JSON; None for any."""
        value = {_KEY: _WORD}
        as_text, as_object = (
            self._try({"role": "assistant", "tool_calls": _call_of("f", form)})
            for form in (json.dumps(value), value)
        )
        is_read = _KEY in as_text and _WORD in as_text and as_object == ""
        takes_text = json.dumps(value) in as_text or is_read
        takes_object = _KEY in as_object and _WORD in as_object and str(value) not in as_object
        if takes_object and not (takes_text and as_text == as_object):
            return dict
        return str if takes_text and not takes_object else None

    @functools.cached_property
    def no_content(self) -> Message:
        """The content of a message that has calls alone: no key, or an empty text for a template
        that requires one."""
        forms: Sequence[Message] = ({}, {"content": ""})
        # It may require less of the last message, or refuse results.
        others: Sequence[Sequence[Message]] = ([_RESULT, _ANSWER], [])
        for after, form, arguments in itertools.product(others, forms, ({}, "{}")):
            call = {"role": "assistant", "tool_calls": _call_of(_WORD, arguments), **form}
            if _WORD in (self._text_or_none([_USER, call, *after]) or ""):
                return form
        return {}

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

    # Text, tokens, and those that count.

    @functools.cached_property
    def _backend(self) -> Any | None:
        return backend_of(self._tokenizer)

    def written(
        self, messages: Sequence[Message], tools: Tools, *, with_places: bool = True
    ) -> Written:
        """Return what the template writes for a conversation. Raises the template's errors.

        ``with_places`` asks also where each token ends, and for what the template marks as the
        assistant's (``{% generation %}``).
        """
        text = self.text(messages, tools)
        backend = self._backend
        found = tokens_of_text(self._tokenizer, text, with_ends=with_places, backend=backend)
        tokens, ends = (self.tokens(messages, tools), None) if found is None else found
        if not (with_places and has_generation_marks(self._tokenizer, tools)):
            return Written(text, tokens, ends)
        # The template is asked again, and says which of these tokens it marks.
        tokens_there, marked = tokens_of_assistant(self._tokenizer, messages, tools)
        return Written(text, tokens_there, ends if tokens_there == tokens else None, marked)

    def unwritten(
        self, messages: Sequence[Message], tools: Tools, written: Written
    ) -> Sequence[Unwritten]:
        """Return the words that the template leaves out."""
        form: tuple[Any, ...] = tuple((each["role"], *each) for each in messages)
        if form in self._complete and _has_all(written.text, messages):
            return ()
        reading = self._spans.read(messages, tools, written.text)
        found = _missing_of(messages, written.text, reading)
        if not found:
            self._complete.add(form)
        return found

    def counted(
        self,
        messages: Sequence[Message],
        tools: Tools,
        written: Written,
        counts: Sequence[bool],
        where: str,
    ) -> list[bool]:
        """Return for each token whether it belongs to a message that ``counts``, with the mark of
        its end; if the template marks what the assistant says, whether that counts. ``UserError``
        names ``where`` if the text does not show where a message lies.

        A message begins after the generation prompt, as in mlx-lm. Some templates add to that
        prompt, such as the mark of a thought, or write earlier messages differently when another
        follows: marks around its words then show where the message lies.
        """
        text = written.text
        if counts[-1] and not any(counts[:-1]):
            opens = messages[-1]["role"] == "assistant"
            prompt = self._text_or_none(messages[:-1], tools, add_generation_prompt=opens)
            if prompt is not None and text.startswith(prompt):
                return self._mask(written, [(len(prompt), len(text))])
        if written.marked is not None and [*counts] == [m["role"] == "assistant" for m in messages]:
            return [*written.marked]
        reading = self._spans.read(messages, tools, text)
        spans: list[Span] = []
        for number in (i for i, is_counted in enumerate(counts) if is_counted):
            found = None
            if reading is not None:
                found = self._spans.spans(messages, tools, reading, number)
            is_answer = messages[number]["role"] == "assistant"
            if found is None or (not found and is_answer and has_words(messages[number])):
                raise UserError(
                    f"{where}: it cannot be told where message {number} lies in what the chat "
                    "template writes",
                    "take the row out, or train without --loss-on, --mask-prompt and --objective",
                )
            spans += found
        mask = self._mask(written, spans)
        if written.marked is not None:
            mask = [*map(all, zip(mask, written.marked, strict=True))]
        return mask

    def head(self, messages: Sequence[Message], tools: Tools) -> int:
        """Return how many tokens stand before the first message that is not the system's: those of
        the system, and what every conversation begins with."""
        written = self.written(messages, tools)
        reading = self._spans.read(messages, tools, written.text)
        place = None if reading is None else self._spans.head(messages, reading)
        if place is not None:
            return self._token_at(written, place)
        return int(written.tokens[:1] == [getattr(self._tokenizer, "bos_token_id", None)])

    @functools.cached_property
    def ends(self) -> frozenset[int]:
        """The end tokens of the model."""
        ends = getattr(self._tokenizer, "eos_token_ids", None) or ()
        return frozenset(ends) - {None}

    def _write(self, messages: Sequence[Message], tools: Tools, asks: bool) -> str | None:
        return self._text_or_none(messages, tools, add_generation_prompt=asks)

    def _mask(self, written: Written, spans: Sequence[Span]) -> list[bool]:
        """Return which tokens lie in ``spans``: from the first that reaches beyond the begin."""
        mask = [False] * len(written.tokens)
        for span in spans:
            begin, end = (self._token_at(written, place) for place in span)
            mask[begin:end] = [True] * (end - begin)
        return mask

    def _token_at(self, written: Written, place: int) -> int:
        """Return the number of the first token that reaches beyond a character of the text."""
        if written.ends is not None:
            return bisect_right(written.ends, place)
        prompt = self._tokenizer.encode(written.text[:place], add_special_tokens=False)
        pairs = enumerate(zip(prompt, written.tokens, strict=False))
        shorter = min(len(prompt), len(written.tokens))
        return next((i for i, (a, b) in pairs if a != b), shorter)


def _has_all(text: str, messages: Sequence[Message]) -> bool:
    """Return whether a text has the words of all messages."""
    place = 0
    for message in messages:
        for words in texts_of(message):
            said = words.strip()
            # They mostly stand behind those before them.
            found = text.find(said, place)
            if found < 0 and said not in text:
                return False
            place = max(place, found + len(said))
    return True


def _missing_of(
    messages: Sequence[Message], text: str, reading: Reading | None
) -> Sequence[Unwritten]:
    """Return the words of messages that a text does not have, as its ``reading`` shows, or the text
    itself where the words have no marks."""
    found: dict[tuple[int, str], list[bool]] = {}
    if reading is not None:
        written = {each.number for each in reading.islands}
        for number, words in enumerate(reading.words):
            if not words.is_empty:
                found.setdefault((words.message, words.key), []).append(number in written)
    marked = {message for message, _ in found}
    for i, message in enumerate(messages):
        if i not in marked:
            for key in message:
                for said in texts_of(message, key):
                    found.setdefault((i, key), []).append(said.strip() in text)
    left = {i for (i, _), are_written in found.items() if any(are_written)}
    return [
        Unwritten(i, key, is_all=i not in left)
        for (i, key), are_written in found.items()
        if not all(are_written)
    ]


def _call_of(name: str, arguments: Any) -> list[dict[str, Any]]:
    # Mistral's templates want numbers of nine characters.
    function = {"name": name, "arguments": arguments}
    return [{"id": "call00001", "type": "function", "function": function}]


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
