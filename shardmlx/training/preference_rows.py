"""Rows of preferences as tokens: pairs of a chosen and a rejected answer, or answers with a label.

A row is one of::

    {"prompt": ..., "chosen": ..., "rejected": ...}    texts, or lists of messages
    {"chosen": [...], "rejected": [...]}               conversations that differ in the last message
    {"messages": [...], "rejected": ...}               the last message is the chosen answer
    {"prompt": ..., "completion": ..., "label": true}  for KTO; or messages and a label
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardmlx.config.data import FeatureKeys
from shardmlx.engine.batches import Sample
from shardmlx.errors import UserError
from shardmlx.training.data_rows import Conversations, Row, named, shown, value_of

_LABELS = {"true": True, "1": True, "false": False, "0": False}
"""Labels as CSV writes them."""

Answer = tuple[Sample, bool]
"""A prompt with an answer, and whether the answer is wanted."""


@dataclass(frozen=True, slots=True)
class PreferenceRows:
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

    def tokenise(self, row: Row, where: str) -> list[Answer]:
        """Return a row's answers, the chosen one first. Raises ``UserError``, which names it."""
        if not self.is_paired:
            return [self._labelled(row, where)]
        keys, rows = self.keys, self.conversations
        if keys.chat_feature in row and keys.chosen_feature not in row:
            *prompt, chosen = rows.messages(keys.chat_feature, row, where)
            rejected = self._answer(row, keys.rejected_feature, where)
        elif keys.prompt_feature in row:
            prompt = self._prompt(row, where)
            chosen = self._answer(row, keys.chosen_feature, where)
            rejected = self._answer(row, keys.rejected_feature, where)
        else:
            *prompt, chosen = rows.messages(keys.chosen_feature, row, where)
            *other, rejected = rows.messages(keys.rejected_feature, row, where)
            if other != prompt:
                raise UserError(
                    f"{where}: {keys.chosen_feature} and {keys.rejected_feature} answer other "
                    "prompts: their messages differ before the last",
                    "write one prompt, or take the row out",
                )
        pair = [rows.tokenise([*prompt, answer], row, where) for answer in (chosen, rejected)]
        for name, (tokens, start) in zip(("chosen", "rejected"), pair, strict=True):
            if start >= len(tokens):
                raise UserError(f"{where}: its {name} answer is empty", "take the row out")
        if list(pair[0][0]) == list(pair[1][0]):
            raise UserError(f"{where}: its two answers are the same", "take the row out")
        return [(pair[0], True), (pair[1], False)]

    def _labelled(self, row: Row, where: str) -> Answer:
        keys = self.keys
        label: Any = value_of(row, keys.label_feature, where)
        label = _LABELS.get(str(label).strip().lower())
        if label is None:
            raise UserError(
                f"{where}: {keys.label_feature} is {shown(row[keys.label_feature])}",
                "write true for an answer that you want, false for one that you do not",
            )
        if keys.chat_feature in row:
            messages = self.conversations.messages(keys.chat_feature, row, where)
        else:
            messages = [
                *self._prompt(row, where),
                self._answer(row, keys.completion_feature, where),
            ]
        sample = self.conversations.tokenise(messages, row, where)
        if sample[1] >= len(sample[0]):
            raise UserError(f"{where}: its answer is empty", "take the row out")
        return sample, label

    def _prompt(self, row: Row, where: str) -> list[Row]:
        """Return the messages of the prompt, which may be a text."""
        key = self.keys.prompt_feature
        if isinstance(value_of(row, key, where), str):
            return [self.conversations.message({"role": "user", "content": row[key]}, where)]
        return self.conversations.messages(key, row, where)

    def _answer(self, row: Row, key: str, where: str) -> Row:
        """Return an answer as a message: a text, a message, or a list of one."""
        given = value_of(row, key, where)
        if isinstance(given, str):
            given = {"role": "assistant", "content": given}
        if isinstance(given, list) and len(given) == 1:
            (given,) = given
        return self.conversations.message(given, f"{where}: {key}")
