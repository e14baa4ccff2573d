"""Rows of preferences as tokens: pairs of a chosen and a rejected answer, or answers with a label.

A row is one of::

    {"prompt": ..., "chosen": ..., "rejected": ...}    texts, or lists of messages
    {"chosen": [...], "rejected": [...]}               conversations that differ in the last message
    {"messages": [...], "rejected": ...}               the last message is the chosen answer
    {"prompt": ..., "completion": ..., "label": true}  for KTO; or messages and a label

Each may have a text ``system``, with which the conversation then begins. Conversations may have
their ``prompt`` beside them, as UltraFeedback's do. The prompt may also be that of Alpaca's form,
or ``conversations`` of ShareGPT.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardmlx.config.data import FeatureKeys
from shardmlx.errors import UserError
from shardmlx.training.data_rows import (
    SYSTEM,
    TOOLS,
    Conversation,
    Conversations,
    named,
    value_of,
)
from shardmlx.training.foreign_rows import (
    CONVERSATIONS,
    HISTORY,
    INPUT,
    INSTRUCTION,
    alpaca_prompt,
    is_foreign,
)
from shardmlx.training.message_marks import has_words
from shardmlx.training.row_form import Row, RowForm, RowTokens
from shardmlx.training.row_notes import shown

_LABELS = {"true": True, "1": True, "false": False, "0": False}
"""Labels as CSV writes them."""


@dataclass(frozen=True)
class PreferenceRows(RowForm):
    """Rows of preferences, under ``keys``; ``is_paired`` tells those of pairs from KTO's."""

    conversations: Conversations
    keys: FeatureKeys
    is_paired: bool

    def check_first(self, row: Row, where: str) -> None:
        """Raise ``UserError`` for a set whose first ``row`` has none of the forms."""
        keys = self.keys
        pairs = (
            {keys.chosen_feature, keys.rejected_feature},
            {keys.chat_feature, keys.rejected_feature},
        )
        single = (
            {keys.prompt_feature, keys.completion_feature, keys.label_feature},
            {keys.chat_feature, keys.label_feature},
        )
        forms = pairs if self.is_paired else single
        if not any(form <= set(row) for form in forms):
            wanted = ", or ".join(" and ".join(map(repr, sorted(form))) for form in forms)
            raise UserError(
                f"{where}: its first row has {named(row)}, and not {wanted}",
                "rename them, or name yours in the YAML file: chosen_feature, rejected_feature, "
                "label_feature and the others",
            )

    def check(self, row: Row, where: str) -> Sequence[bool]:
        answers = self._answers(row, where)
        for _, conversation, _ in answers:
            self.conversations.check(conversation, where)
        return [is_wanted for _, _, is_wanted in answers]

    def samples(self, row: Row, where: str, most: int | None = None) -> list[RowTokens]:
        """Return the tokens of a row's answers, the chosen one first. Raises ``UserError``."""
        found: list[RowTokens] = []
        for name, conversation, _ in self._answers(row, where):
            tokens, start = self.conversations.tokenise(conversation, where)
            if start >= len(tokens):
                raise UserError(f"{where}: nothing of {name} counts", "take the row out")
            found.append((tokens, start))
        if len(found) > 1 and found[0][0] == found[1][0]:
            raise UserError(f"{where}: its two answers are the same", "take the row out")
        return found

    def head(self, row: Row, where: str) -> int:
        """Return how many tokens of a row's prompt a cut leaves: its system messages, and what
        every conversation begins with."""
        _, conversation, _ = self._answers(row, where)[0]
        return self.conversations.head(conversation)

    def _answers(self, row: Row, where: str) -> list[tuple[str, Conversation, bool]]:
        """Return the key, the conversation and the worth of a row's answers."""
        keys = self.keys
        self.conversations.notes.reads(TOOLS, SYSTEM)
        if self.is_paired:
            is_chat = keys.chat_feature in row and keys.chosen_feature not in row
            chosen, rejected = self._chat(row, where) if is_chat else self._pair(row, where)
            found = [
                (keys.chat_feature if is_chat else keys.chosen_feature, chosen, True),
                (keys.rejected_feature, rejected, False),
            ]
        else:
            is_chat = keys.chat_feature in row
            key = keys.chat_feature if is_chat else keys.completion_feature
            found = [(key, self._single(row, where), self._label(row, where))]
        for key, messages, _ in found:
            _check_answer(messages[-1], f"{where}: {key}")
        return [
            (key, self.conversations.of_messages(messages, row, where), is_wanted)
            for key, messages, is_wanted in found
        ]

    def _chat(self, row: Row, where: str) -> tuple[list[Row], list[Row]]:
        """Return the conversations of a chat, which ends in the chosen answer, and another one."""
        keys = self.keys
        self.conversations.notes.reads(keys.chat_feature, keys.rejected_feature)
        chosen = self.conversations.messages(keys.chat_feature, row, where)
        return chosen, [*chosen[:-1], self._answer(row, keys.rejected_feature, where)]

    def _pair(self, row: Row, where: str) -> tuple[list[Row], list[Row]]:
        """Return the conversations with the chosen and the rejected answer."""
        keys = self.keys
        both = keys.chosen_feature, keys.rejected_feature
        self.conversations.notes.reads(keys.prompt_feature, *both)
        has_prompt = row.get(keys.prompt_feature) not in (None, [])
        are_alone = not any(_begins_with_prompt(row.get(key)) for key in both)
        if are_alone and (has_prompt or self._has_foreign_prompt(row)):
            prompt = self._prompt(row, where)
            chosen, rejected = ([*prompt, self._answer(row, key, where)] for key in both)
            return chosen, rejected
        if not has_prompt:
            _check_conversations(row, both, keys.prompt_feature, where)
        chosen, rejected = (self.conversations.messages(key, row, where) for key in both)
        if chosen[:-1] != rejected[:-1]:
            raise UserError(
                f"{where}: {keys.chosen_feature} and {keys.rejected_feature} answer other prompts: "
                "their messages differ before the last",
                "write one prompt, or take the row out",
            )
        if has_prompt:
            self._check_prompt(chosen[:-1], row, where)
        return chosen, rejected

    def _check_prompt(self, messages: list[Row], row: Row, where: str) -> None:
        """Raise ``UserError`` if the prompt of a row is another one than its answers begin with."""
        key = self.keys.prompt_feature
        prompt = self._prompt(row, where)
        is_text = isinstance(row[key], str)
        questions = [each for each in messages if each["role"] == "user"]
        ends = (questions[:1], questions[-1:])
        if not (prompt in ends if is_text else messages == prompt):
            raise UserError(
                f"{where}: {key} is {shown(row[key])}, and {self.keys.chosen_feature} answers "
                "another prompt",
                f"leave out {key}, or write answers without their prompts",
            )

    def _label(self, row: Row, where: str) -> bool:
        key = self.keys.label_feature
        given: Any = value_of(row, key, where)
        label = _LABELS.get(str(given).strip().lower())
        if label is None:
            raise UserError(
                f"{where}: {key} is {shown(given)}",
                "write true for an answer that you want, false for one that you do not",
            )
        return label

    def _single(self, row: Row, where: str) -> list[Row]:
        """Return the conversation of a row with a label."""
        keys = self.keys
        self.conversations.notes.reads(keys.label_feature)
        if keys.chat_feature in row:
            self.conversations.notes.reads(keys.chat_feature)
            return self.conversations.messages(keys.chat_feature, row, where)
        self.conversations.notes.reads(keys.prompt_feature, keys.completion_feature)
        return [*self._prompt(row, where), self._answer(row, keys.completion_feature, where)]

    def _prompt(self, row: Row, where: str) -> list[Row]:
        """Return the messages of the prompt, which may be a text."""
        key = self.keys.prompt_feature
        if self._has_foreign_prompt(row):
            self.conversations.notes.reads(INSTRUCTION, INPUT, HISTORY, CONVERSATIONS)
            if CONVERSATIONS in row:
                return self.conversations.messages(CONVERSATIONS, row, where)
            return [self.conversations.message(each, where) for each in alpaca_prompt(row, where)]
        if isinstance(value_of(row, key, where), str):
            return [self.conversations.message({"role": "user", "content": row[key]}, where)]
        return self.conversations.messages(key, row, where)

    def _has_foreign_prompt(self, row: Row) -> bool:
        """Return whether a row has its prompt in the form of another tool."""
        return self.keys.prompt_feature not in row and is_foreign(row)

    def _answer(self, row: Row, key: str, where: str) -> Row:
        """Return an answer as a message: a text, a message, or a list of one."""
        given = value_of(row, key, where)
        if isinstance(given, str):
            given = {"role": "assistant", "content": given}
        if isinstance(given, list) and len(given) == 1:
            (given,) = given
        if isinstance(given, list):
            raise UserError(
                f"{where}: {key} has {len(given)} messages, and an answer is one",
                "write the last message as the answer, and those before it in the prompt",
            )
        return self.conversations.message(given, f"{where}: {key}")


def _begins_with_prompt(answer: Any) -> bool:
    """Return whether an answer is a conversation with its prompt."""
    if not isinstance(answer, list) or len(answer) < 2 or not isinstance(answer[0], Mapping):
        return False
    return answer[0].get("role") in (SYSTEM, "user")


def _check_conversations(row: Row, answers: tuple[str, str], prompt: str, where: str) -> None:
    """Raise ``UserError`` for an answer that is a text, in a row that has no prompt."""
    for key in answers:
        if isinstance(row.get(key), str):
            raise UserError(
                f"{where}: {key} is the text {shown(row[key])}, and the row, which has "
                f"{named(row)}, has no {prompt!r}",
                f"write the question as {prompt}, or name yours in the YAML file: prompt_feature",
            )


def _check_answer(message: Row, name: str) -> None:
    """Raise ``UserError`` for a message that is not an answer, or an empty one."""
    if message["role"] != "assistant":
        raise UserError(
            f"{name}: the answer is a message with role {shown(message['role'])}",
            "end in a message of the assistant, or take the row out",
        )
    if not has_words(message):
        raise UserError(f"{name}: the answer is empty", "take the row out")
