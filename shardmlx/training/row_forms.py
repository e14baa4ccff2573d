"""Forms of the rows of a set: how a row is checked, and becomes samples. No MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.config.data import ALL, LAST, FeatureKeys, WantedData
from shardmlx.config.objective import facts_of
from shardmlx.errors import UserError
from shardmlx.training.chat_template import ChatTemplate
from shardmlx.training.data_rows import (
    SYSTEM,
    TOOLS,
    Conversation,
    Conversations,
    named,
    no_text,
    not_tokenised,
    value_of,
)
from shardmlx.training.foreign_rows import (
    CONVERSATIONS,
    HISTORY,
    INPUT,
    INSTRUCTION,
    OUTPUT,
)
from shardmlx.training.preference_rows import PreferenceRows
from shardmlx.training.row_form import Row, RowForm, RowTokens
from shardmlx.training.row_notes import RowNotes
from shardmlx.training.text_cuts import TextCuts


class TextRows(RowForm):
    """Rows of plain text under a ``key``."""

    def __init__(self, tokenizer: TokenizerWrapper, key: str) -> None:
        self._tokenizer = tokenizer
        self._key = key
        self._cuts = TextCuts(tokenizer)

    def check(self, row: Row, where: str) -> Sequence[bool]:
        """Return that the text is wanted. Raises ``UserError`` for a value that is not text."""
        text = value_of(row, self._key, where)
        if not isinstance(text, str):
            raise no_text(text, f"{where}: {self._key}")
        return (True,)

    def samples(self, row: Row, where: str, most: int | None = None) -> list[RowTokens]:
        text: str = row[self._key]
        beginning = None if most is None else self._cuts.beginning(text, most)
        try:
            if most is not None and beginning is not None:
                tokens = list(self._tokenizer.encode(beginning))
                if self._cuts.suffices(len(tokens), most):
                    self.has_cut = True
                    return [(tokens, 0)]
            tokens = list(self._tokenizer.encode(text))
        except Exception as error:
            raise not_tokenised(error, where) from None
        if not text.strip() and not tokens:
            raise no_text(text, f"{where}: {self._key}")
        if not tokens or tokens[-1] != self._tokenizer.eos_token_id:
            tokens.append(self._tokenizer.eos_token_id)
        return [(tokens, 0)]


class ConversationRows(RowForm):
    """Rows that are conversations, as ``read`` returns them."""

    def __init__(
        self, conversations: Conversations, read: Callable[[Row, str], Conversation]
    ) -> None:
        self._conversations = conversations
        self._read = read

    def check(self, row: Row, where: str) -> Sequence[bool]:
        self._conversations.check(self._read(row, where), where)
        return (True,)

    def samples(self, row: Row, where: str, most: int | None = None) -> list[RowTokens]:
        return [self._conversations.tokenise(self._read(row, where), where)]


def find_form(
    first: Row,
    wanted: WantedData,
    keys: FeatureKeys,
    tokenizer: TokenizerWrapper,
    notes: RowNotes,
    *,
    adds_nulls: bool,
) -> RowForm:
    """Return the form of rows like the ``first``, which have the text to learn under ``keys``: that
    of mlx-lm where it knows one, else that of another tool. ``adds_nulls`` says that each row has
    the keys of all rows, with nulls. Raises ``UserError``."""
    facts = facts_of(wanted.objective)
    loss_on = wanted.options.counts
    if facts is not None:
        conversations = Conversations(ChatTemplate(tokenizer), LAST, adds_nulls, notes)
        preferences = PreferenceRows(conversations, keys, facts.is_paired)
        preferences.check_first(first, notes.name)
        return preferences
    read = _reader_of(first, keys)
    if read is not None:
        columns, of_row = read
        notes.reads(*columns, TOOLS, SYSTEM)
        conversations = Conversations(ChatTemplate(tokenizer), loss_on, adds_nulls, notes)
        return ConversationRows(conversations, partial(of_row, conversations))
    _check_text(first, keys, tokenizer, notes.name, loss_on)
    notes.reads(keys.text_feature)
    return TextRows(tokenizer, keys.text_feature)


_ReadWith = Callable[[Conversations, Row, str], Conversation]


def _reader_of(first: Row, keys: FeatureKeys) -> tuple[Sequence[str], _ReadWith] | None:
    """Return the columns of a conversation, and how it is read; None if the ``first`` row is none.
    The forms of mlx-lm come first, in its order."""
    asked = (keys.prompt_feature, keys.completion_feature)
    if all(key in first for key in asked):
        return asked, partial(Conversations.of_completion, keys=asked)
    if keys.chat_feature in first:
        return (keys.chat_feature,), partial(Conversations.of_chat, key=keys.chat_feature)
    if keys.text_feature in first:
        return None
    if CONVERSATIONS in first:
        return (CONVERSATIONS,), partial(Conversations.of_chat, key=CONVERSATIONS)
    if INSTRUCTION in first and OUTPUT in first:
        return (INSTRUCTION, INPUT, OUTPUT, HISTORY), Conversations.of_instruction
    return None


def _check_text(
    first: Row, keys: FeatureKeys, tokenizer: TokenizerWrapper, where: str, loss_on: str
) -> None:
    """Raise ``UserError`` for rows that are no text either, or text of which not all can count."""
    if keys.text_feature not in first:
        raise UserError(
            f"{where}: its first row has {named(first)}, and neither {keys.chat_feature!r}, "
            f"{keys.prompt_feature!r} and {keys.completion_feature!r}, {keys.text_feature!r}, "
            f"{CONVERSATIONS!r}, nor {INSTRUCTION!r} and {OUTPUT!r}",
            "rename them, or name yours in the YAML file: chat_feature, prompt_feature and "
            "completion_feature, or text_feature",
        )
    if loss_on != ALL:
        others = {CONVERSATIONS, INSTRUCTION} & set(first)
        raise UserError(
            f"{where}: --mask-prompt and --loss-on need prompts, and this is plain text",
            f"take the column {keys.text_feature!r} out, so that {min(others)!r} is read"
            if others
            else "drop the flag, or write prompt and completion",
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{where}: a text ends with the end token, and the model's tokenizer has none",
            "set eos_token in its tokenizer_config.json",
        )
