"""Rows of data as tokens, as in mlx-lm's data sets, but checked: a chat template writes a null as
"None", a list like Python, and nothing for a misnamed key. No MPI.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from shardmlx.config.data import ALL, ASSISTANT, LAST
from shardmlx.errors import UserError, one_line
from shardmlx.training.chat_template import KNOWN_ROLES, ChatTemplate, Written
from shardmlx.training.foreign_rows import (
    alpaca_messages,
    is_foreign,
    is_turn,
    message_of,
    messages_of,
    tools_of,
)
from shardmlx.training.loss_switches import counts_by_itself, without_switches
from shardmlx.training.message_marks import has_words
from shardmlx.training.row_form import Row, RowTokens
from shardmlx.training.row_notes import NOTHING, RowNotes, shown

_TAKE_OUT = "write text (a number in quotes), or take the row out"
_MESSAGES = (
    'write [{"role": "user", "content": "..."}, ...] with the roles "system", "user", "assistant" '
    'and "tool"'
)
_LIST_OF_TOOLS = (
    'write a list of objects, without quotes: [{"type": "function", "function": {...}}]'
)

_END = 4
"""Tokens at the end of a conversation of which one may be an end token."""

TOOLS = "tools"
"""The column of the tools that a row declares."""

SYSTEM = "system"
"""The role, and the column, of the system's message."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a row, as the template takes them, and the tools that it declares."""

    messages: Sequence[Row]
    tools: Any


@dataclass(frozen=True, slots=True)
class Conversations:
    """Rows that go through the chat template, and the messages that count: one of ``LOSS_ON``. The
    ``notes`` take down what is to be said of them."""

    template: ChatTemplate
    loss_on: str
    adds_nulls: bool
    notes: RowNotes

    def of_completion(self, row: Row, where: str, *, keys: tuple[str, str]) -> Conversation:
        """Return the conversation of a row with a prompt and a completion, under ``keys``."""
        messages = []
        for role, key in zip(("user", "assistant"), keys, strict=True):
            value = value_of(row, key, where)
            if not isinstance(value, str) and not _are_text_parts(value):
                raise no_text(value, f"{where}: {key}")
            messages.append({"role": role, "content": self._content(value, role, where)})
        return self.of_messages(messages, row, where)

    def of_chat(self, row: Row, where: str, *, key: str) -> Conversation:
        """Return the conversation in a column."""
        return self.of_messages(self.messages(key, row, where), row, where)

    def of_instruction(self, row: Row, where: str) -> Conversation:
        """Return the conversation of a row in Alpaca's form."""
        return self.of_messages(alpaca_messages(row, where), row, where)

    def of_messages(self, messages: Sequence[Row], row: Row, where: str) -> Conversation:
        """Return a conversation with a row's system message and tools."""
        return Conversation(self._with_system(messages, row, where), self._tools(row, where))

    def messages(self, key: str, row: Row, where: str) -> list[Row]:
        """Return the messages in a column, as the template takes them."""
        name = f"{where}: {key}"
        value = value_of(row, key, where)
        if not isinstance(value, list) or not value:
            raise UserError(f"{name} is {shown(value)}, no list of messages", _MESSAGES)
        if all(map(is_plain, value)):
            return value
        if any(map(is_turn, value)):
            value = messages_of(value, name)
        return [self.message(each, f"{name}[{i}]") for i, each in enumerate(value)]

    def check(self, conversation: Conversation, where: str) -> None:
        """Take down what is to be said of a conversation. Raises ``UserError`` for one without
        words, and for what its messages say of the loss."""
        messages = conversation.messages
        self._counted(messages, where)
        last = messages[-1]
        if self.loss_on == LAST and last["role"] != "assistant":
            self._note("end in a message that is not the assistant's, which counts", where)
        if has_words(last):
            return
        if not any(map(has_words, messages)):
            raise UserError(f"{where} holds no words", "take the row out")
        if last["role"] == "assistant":
            self._note("end in an empty answer", where)

    def _note(self, what: str, where: str) -> None:
        self.notes.add(what, where, is_of_all=True)

    def tokenise(self, conversation: Conversation, where: str) -> RowTokens:
        """Return the tokens of a conversation that was checked, some of which count."""
        tools = conversation.tools
        counts = self._counted(conversation.messages, where)
        messages = [without_switches(each) for each in conversation.messages]
        is_all = all(counts)
        try:
            written = self.template.written(messages, tools, with_places=not is_all)
            self._note_unwritten(messages, tools, written, counts, where)
            if is_all:
                self._note_end(written.tokens, messages, where)
                return written.tokens, 0
            mask = self.template.counted(messages, tools, written, counts, where)
        except UserError:
            raise
        except Exception as error:
            raise not_tokenised(error, where) from None
        counted = [
            token for token, is_counted in zip(written.tokens, mask, strict=True) if is_counted
        ]
        if counted:
            self._note_end(counted, (), where)
        start = mask.index(True) if counted else len(mask)
        return [
            token if is_counted or i < start else ~token
            for i, (token, is_counted) in enumerate(zip(written.tokens, mask, strict=True))
        ], start

    def head(self, conversation: Conversation) -> int:
        """Return how many tokens a conversation begins with that belong to no message but those of
        the system."""
        messages = [without_switches(each) for each in conversation.messages]
        return self.template.head(messages, conversation.tools)

    def _tools(self, row: Row, where: str) -> Any:
        tools = row.get(TOOLS) or None
        if tools is not None and is_foreign(row):
            tools = tools_of(tools)
        if tools is not None and not (isinstance(tools, list) and all(map(_is_tool, tools))):
            raise UserError(f"{where}: tools is {shown(tools)}, no list of objects", _LIST_OF_TOOLS)
        return without_nulls(tools) if self.adds_nulls else tools

    def _with_system(self, messages: Sequence[Row], row: Row, where: str) -> Sequence[Row]:
        """Return messages that begin with the text of the row's column ``system``, if it has
        one."""
        given = row.get(SYSTEM)
        if given in NOTHING:
            return messages
        if not isinstance(given, str):
            raise UserError(f"{where}: {SYSTEM} is {shown(given)}, not text", "write text")
        if any(each["role"] == SYSTEM for each in messages):
            raise UserError(
                f"{where}: it has the key {SYSTEM!r}, and a message with that role", "keep one"
            )
        return [self.message({"role": SYSTEM, "content": given}, where), *messages]

    def _note_unwritten(
        self,
        messages: Sequence[Row],
        tools: Any,
        written: Written,
        counts: Sequence[bool],
        where: str,
    ) -> None:
        """Take down words that the template leaves out; raise ``UserError`` if it leaves out all
        words of an answer that counts."""
        for each in self.template.unwritten(messages, tools, written):
            message = messages[each.message]
            if each.is_all and counts[each.message] and message["role"] == "assistant":
                raise UserError(
                    f"{where}: message {each.message} has {named(message)}, and the model's chat "
                    "template writes nothing of it",
                    "write what the model shall learn as content, or take the row out",
                )
            self.notes.add(
                f"have words in {each.key!r} of role {message['role']!r} that the model's chat "
                "template does not write: nothing is learnt of them",
                where,
                is_of_all=False,
            )

    def _note_end(self, tokens: Sequence[int], messages: Sequence[Row], where: str) -> None:
        """Take down that no token of those that count ends an answer; of a whole conversation,
        whose ``messages`` are given, that none of the last ones does if it ends in an answer."""
        if messages and messages[-1]["role"] == "assistant":
            tokens = tokens[-_END:]
        ends = self.template.ends
        if ends and ends.isdisjoint(tokens):
            self.notes.add(
                "have no end token of the model where an answer ends, from which it would learn to "
                "stop",
                where,
                is_of_all=False,
            )

    def _counted(self, messages: Sequence[Row], where: str) -> list[bool]:
        """Return which messages count in the loss, which they may deny themselves."""
        last = len(messages) - 1
        counts = []
        for i, message in enumerate(messages):
            is_asked = self.loss_on == ALL or i == last
            if self.loss_on == ASSISTANT:
                is_asked = message["role"] == "assistant"
            counts.append(counts_by_itself(message, i, where) and is_asked)
        return counts

    def message(self, given: Any, name: str) -> Row:
        """Return a message without empty keys, which other formats add."""
        if not isinstance(given, Mapping):
            raise UserError(f"{name} is {shown(given)}, no message", _MESSAGES)
        if is_plain(given):
            return given
        if is_turn(given):
            given = message_of(given, name)
        message = {key: value for key, value in given.items() if value not in (None, [], {})}
        role = message.get("role")
        if (
            not isinstance(role, str)
            or (role not in KNOWN_ROLES and role.strip().lower() in ("", *KNOWN_ROLES))
            or self.template.drops(role)
        ):
            raise UserError(
                f"{name} has {named(message)} and role {shown(role)}, which the model's chat "
                "template does not know",
                _MESSAGES,
            )
        if "tool_calls" in message:
            message["tool_calls"] = self._calls(message["tool_calls"], f"{name}.tool_calls")
        if self.adds_nulls:
            message = without_nulls(message)
        self._check_written(message, given, name)
        if "content" in message:
            message["content"] = self._content(message["content"], role, f"{name}.content")
        elif "tool_calls" in message:
            message |= self.template.no_content
        return message

    def _check_written(self, message: Row, given: Row, name: str) -> None:
        """Raise ``UserError`` for calls, or keys of a message without content, left unwritten."""
        what = f"content {shown(given['content'])}" if "content" in given else "no content"
        old = {key: message[key] for key in ("role", "function_call") if key in message}
        for key, is_written in (
            ("tool_calls", self.template.writes_calls),
            ("function_call", len(old) < 2 or self.template.writes(old)),
        ):
            if key in message and not is_written:
                raise UserError(
                    f"{name} has {what}, and the model's chat template does not write {key}",
                    "write the call as content, or take the row out",
                )
        is_written = "content" in message or "tool_calls" in message
        if not is_written and not self.template.writes(message):
            raise UserError(f"{name} has {what}, and {named(message)}", _MESSAGES)

    def _content(self, value: Any, role: str, name: str) -> Any:
        """Return a content in the template's form: text, or parts of text as they are."""
        if isinstance(value, str):
            return value
        if not _are_text_parts(value):
            parts = value if isinstance(value, list) else ()
            has_others = any(isinstance(part, Mapping) and "type" in part for part in parts)
            if has_others or not self.template.writes({"role": role, "content": value}):
                raise UserError(
                    f"{name} is {shown(value)}, not text, which the model's chat template does "
                    "not write",
                    "write the text that the model shall see, in quotes, or take the row out",
                )
            return value
        parts = [{key: each for key, each in part.items() if each is not None} for part in value]
        takes = self.template.takes_parts(role)
        return parts if takes else "".join(part["text"] for part in parts)

    def _calls(self, calls: Any, name: str) -> list[Row]:
        if not isinstance(calls, list) or not all(_has_name(each) for each in calls):
            raise UserError(
                f"{name} is {shown(calls)}, no list of calls that have names",
                'write [{"type": "function", "function": {"name": ..., "arguments": {...}}}]',
            )
        return [self._call(each, f"{name}[{i}]") for i, each in enumerate(calls)]

    def _call(self, given: Row, name: str) -> Row:
        """Return a call with its arguments in the form that the template wants."""
        call = {key: value for key, value in given.items() if value is not None}
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._call(call["function"], f"{name}.function")}
        if "arguments" not in given:
            return call
        value = call.get("arguments", {})
        value = without_nulls(value) if self.adds_nulls else value
        return {**call, "arguments": self._arguments(value, f"{name}.arguments")}

    def _arguments(self, value: Any, name: str) -> Any:
        wanted = self.template.arguments
        if wanted is str and not isinstance(value, str):
            return json.dumps(value, ensure_ascii=False)
        if wanted is not dict:
            return value
        if isinstance(value, str):
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(value or "{}")
        if not isinstance(value, Mapping):
            raise UserError(
                f"{name} is {shown(value)}, no JSON object, which the model's chat template wants",
                'write {"NAME": VALUE, ...}',
            )
        return value


def is_plain(message: Any) -> bool:
    """Return whether this is a message with nothing but a role that every template knows, and
    words: there is nothing to check about it."""
    if not isinstance(message, dict):
        return False
    content = message.get("content")
    return (
        len(message) == 2
        and isinstance(content, str)
        and content != ""
        and message.get("role") in KNOWN_ROLES
    )


def _has_name(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return isinstance(name, str) and name != ""


def without_nulls(value: Any) -> Any:
    """Return a value without the keys that hold null, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value


def _is_tool(tool: Any) -> bool:
    """Return whether a value may be a tool: none of its objects is written as text."""
    function = tool.get("function") if isinstance(tool, Mapping) else ""
    schema = function.get("parameters") if isinstance(function, Mapping) else None
    return not isinstance(function, str) and not isinstance(schema, str)


def _are_text_parts(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(part, Mapping)
            and part.get("type") == "text"
            and isinstance(part.get("text"), str)
            for part in value
        )
    )


def named(row: Row) -> str:
    """Return the keys of a row, in words."""
    return f"the keys {', '.join(map(repr, row))}" if row else "no key"


def value_of(row: Row, key: str, where: str) -> Any:
    """Return a row's value of a key that the first row has; ``UserError`` without it."""
    if key not in row:
        raise UserError(
            f"{where} has no key {key!r}, as the first row has, but {named(row)}",
            "add it, or take the row out",
        )
    return row[key]


def no_text(value: Any, name: str) -> UserError:
    """Return the error of a value, called ``name``, that is not text."""
    return UserError(f"{name} is {shown(value)}, not text", _TAKE_OUT)


def not_tokenised(error: Exception, where: str) -> UserError:
    """Return the error of a row of which a template, or a tokenizer, makes no tokens."""
    what = f"it has no key {error}" if isinstance(error, KeyError) else one_line(error)
    if isinstance(error, TemplateError):
        what = f"the model's chat template says: {what}"
    return UserError(f"{where} cannot be tokenised: {what}", "fix the row, or take it out")
