"""The file of ``generate --prompts``: JSON lines of prompts or chats. Pure."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmlx.common.yaml_reader import did_you_mean
from shardmlx.errors import UserError

KEYS = ("prompt", "messages", "max_tokens")

SECONDS_TO_BEGIN = 30.0
SECONDS_TO_END = 1.0
"""Of silence, after which a text from stdin is taken to be complete: mpirun of Open MPI 5 passes on
what comes, but not that it ends (openpmix/openpmix, pull request 4024)."""


@dataclass(frozen=True, slots=True)
class Request:
    """One text to be generated: the answer to a prompt, or the next message of a chat.

    ``where`` names file and line in messages.
    """

    messages: tuple[Mapping[str, Any], ...]
    max_tokens: int
    where: str
    prompt: str | None = None


def read_prompts(path: str | Path, max_tokens: int) -> list[Request]:
    """All requests of the file, in order; ``UserError`` names file, line and value.

    Empty lines count for nothing. ``max_tokens`` is that of lines without their own.
    """
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        raise UserError(f"cannot read --prompts {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts {path} is no UTF-8 text: {error.reason}") from None
    # Not splitlines: JSON texts may hold other line ends, like U+2028.
    lines = enumerate(text.split("\n"), start=1)
    requests = [
        _request(line, f"{path}:{number}", max_tokens) for number, line in lines if line.strip()
    ]
    if not requests:
        raise UserError(f'--prompts {path} is empty: write lines like {{"prompt": "hello"}}')
    return requests


def read_stdin(fd: int = 0) -> str:
    """All text from stdin; ``UserError`` if none comes."""
    parts: list[bytes] = []
    while True:
        seconds = SECONDS_TO_END if parts else SECONDS_TO_BEGIN
        ready, _, _ = select.select([fd], [], [], seconds)
        part = os.read(fd, 1 << 16) if ready else b""
        if not part:
            break
        parts.append(part)
    try:
        text = b"".join(parts).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt -: stdin is no UTF-8 text: {error.reason}") from None
    if not text:
        raise UserError("--prompt -: nothing came from stdin: write a text into it")
    return text


def _request(line: str, where: str, max_tokens: int) -> Request:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}): mend the line") from None
    if not isinstance(row, dict):
        raise UserError(f'{where} is {line.strip()}: write {{"prompt": ...}}')
    for key in row:
        if key not in KEYS:
            known = did_you_mean(key, list(KEYS)) or f"the keys are {', '.join(KEYS)}"
            raise UserError(f"{where}: unknown key {key!r}: {known}")
    if ("prompt" in row) == ("messages" in row):
        found = "both" if "prompt" in row else "neither"
        raise UserError(f"{where} has {found} of prompt and messages: give one of them")
    most = row.get("max_tokens", max_tokens)
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise UserError(f"{where}: max_tokens is {most!r}: give a whole number from 1")
    if "messages" in row:
        return Request(_messages(row["messages"], where), most, where)
    prompt = row["prompt"]
    if not isinstance(prompt, str) or not prompt:
        raise UserError(f"{where}: prompt is {prompt!r}: give a text")
    return Request(({"role": "user", "content": prompt},), most, where, prompt)


def _messages(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise UserError(f"{where}: messages is {value!r}: give a list of chat messages")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise UserError(
                f'{where}: message {index} is {message!r}: write {{"role": ..., "content": ...}}'
            )
    return tuple(value)
