"""Find in a row of a data set what no tokenizer can read, and name it in plain words. No MPI.

A tokenizer that meets it says nothing that its user understands, or takes it for something else:
many chat templates make the word "None" of a null.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardmlx.errors import UserError

_LONGEST = 60
"""Characters of a value that a message shows."""

_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half of a pair: JSON can write it, and as text it stands for nothing."""

_TAKE_OUT = "write text, or take the row out"


def check_row(rows: Any, row: Mapping[str, Any], where: str) -> None:
    """Raise `UserError` if a row has no text where ``rows``, mlx-lm's data set, looks for it.

    ``where`` names the row. Sets that are several in one are not looked into.
    """
    for attribute, check in (
        ("text_key", _check_plain),
        ("prompt_key", _check_content),
        ("completion_key", _check_content),
        ("chat_key", _check_messages),
    ):
        key = getattr(rows, attribute, None)
        if key is None:
            continue
        if key not in row:
            keys = ", ".join(map(repr, row)) or "none"
            raise UserError(
                f"{where} has no key {key!r}, as the first row has, but {keys}",
                "add it, or take the row out",
            )
        check(row[key], f"{where}: {key}")
        _check_characters(row[key], f"{where}: {key}")
    text = row[rows.text_key] if hasattr(rows, "text_key") else "some"
    if not text.strip() and not rows.tokenizer.encode(text):
        raise UserError(f"{where}: {rows.text_key} is {_shown(text)}, which is no token", _TAKE_OUT)


def _check_plain(value: Any, name: str) -> None:
    if not isinstance(value, str):
        raise UserError(f"{name} is {_shown(value)}, not text", _remedy(value))


def _check_content(value: Any, name: str) -> None:
    """Leave lists and objects to the chat template: some know contents of several parts."""
    if value is None or isinstance(value, (bool, int, float)):
        raise UserError(f"{name} is {_shown(value)}, not text", _remedy(value))


def _check_messages(value: Any, name: str) -> None:
    remedy = 'write [{"role": "user", "content": "..."}, ...]'
    if not isinstance(value, list) or not value:
        raise UserError(f"{name} is {_shown(value)}, no list of messages", remedy)
    for i, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise UserError(f"{name}[{i}] is {_shown(message)}, no message", remedy)
        # A call of a tool has no content.
        if "content" in message and (
            message["content"] is not None or message.keys() <= {"role", "content", "name"}
        ):
            _check_content(message["content"], f"{name}[{i}].content")


def _check_characters(value: Any, name: str) -> None:
    for path, text in _texts(value, name):
        if found := _SURROGATE.search(text):
            raise UserError(
                f"{path} has {_shown(found[0])} at character {found.start() + 1}, half of a "
                "surrogate pair, which is no character",
                "write the whole character, or take it out",
            )


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield all texts in a value of JSON, each with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(each, f"{path}.{key}")
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from _texts(each, f"{path}[{i}]")


def _remedy(value: Any) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return f'write "{_shown(value)}" in quotes, or take the row out' if is_number else _TAKE_OUT


def _shown(value: Any) -> str:
    """Return a value as the file has it, or its beginning."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
