"""Prompts and chats: read from the command line, stdin or a file, and tokenised as mlx-lm does."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmlx.common.passed_stdin import DASH, StdinReader, tell_typist
from shardmlx.common.yaml_reader import check_keys
from shardmlx.distributed.processes import under_mpirun
from shardmlx.errors import PromptTooLong, UserError, file_access, refusing, unknown_token
from shardmlx.inference.answer_format import AnswerFormat, Tool
from shardmlx.inference.chat_forms import template_text
from shardmlx.inference.control_tokens import broken, control_tokens, encode_without
from shardmlx.training.data_files import parse_row

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

KEYS = ("prompt", "messages", "max_tokens")
"""Keys of a line of ``generate --prompts``."""

SECONDS_TO_BEGIN = 30.0  # for the first characters of stdin

SECONDS_TO_END = 1.0
"""Seconds of silence after which stdin of an mpirun that launch has not started is taken to have
ended: it may not tell."""

SHOWN = 30
"""Characters at the end of what was taken that are shown."""

USUAL_CHARACTERS = 4
"""Characters of a token, about: a text with fewer a token is not worth a look beforehand."""

PIECE = 1 << 14
"""Characters of a piece in which the tokens of a long text are counted."""

ChatMessage = Mapping[str, Any]
"""A message of a chat: ``role``, ``content`` and what else the model's template knows."""


@dataclass(frozen=True, kw_only=True)
class PromptEncoder:
    """The tokenizer with the settings that all prompts of a run share.

    ``system_prompt`` is for chats without their own; ``prefill_response`` begins the answer.
    ``vocabulary`` is the number of tokens that the model knows, and ``positions`` that of a
    sequence. A text of far more than ``most_tokens`` is refused before all of it is tokenised,
    which takes a hundred times its memory.
    """

    tokenizer: TokenizerWrapper
    system_prompt: str | None = None
    prefill_response: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    vocabulary: int | None = None
    positions: int | None = None
    most_tokens: int | None = None

    @property
    def has_template(self) -> bool:
        """True if there is a chat template."""
        return bool(self.tokenizer.has_chat_template)

    def encode(
        self, prompt: str | Sequence[ChatMessage], *, is_plain: bool = False
    ) -> tuple[int, ...]:
        """Return the tokens of a chat, or of a prompt: a user's message, unless it ``is_plain`` or
        there is no chat template. Raises as ``chat`` and ``text``."""
        if not isinstance(prompt, str):
            return self.chat(prompt)
        if is_plain or not self.has_template:
            return self.text(prompt)
        return self.chat([{"role": "user", "content": prompt}])

    def text(self, prompt: str) -> tuple[int, ...]:
        """Return the tokens of a prompt, without the chat template. Raises ``UserError``."""
        return self._tokens(prompt, self.tokenizer.encode)

    def answer(self, text: str) -> tuple[int, ...]:
        """Return the tokens that a text has in an answer. Raises ``UserError``."""
        return self._tokens(text, partial(self.tokenizer.encode, add_special_tokens=False))

    def checked(self, tokens: Iterable[int], where: str = "the prompt") -> tuple[int, ...]:
        """Return tokens, which are ``where``. Raises ``UserError`` for one that the model does not
        know."""
        found = tuple(tokens)
        if (known := self.vocabulary) is not None:
            for token in found:
                if not 0 <= token < known:
                    raise unknown_token(where, token, known)
        return found

    def _tokens(self, text: str, encode: Callable[[str], Sequence[int]]) -> tuple[int, ...]:
        most = self.most_tokens
        if most is not None and len(text) > USUAL_CHARACTERS * most:
            count = 0
            for start in range(0, len(text), PIECE):
                count += len(encode(text[start : start + PIECE]))
                # A cut makes a few tokens more, but not as many again.
                if count > 2 * most:
                    raise PromptTooLong(
                        f"the prompt is too long: more than {2 * most} tokens",
                        f"with its answer it may have at most {most}",
                    )
        tokens = encode(text)
        if not tokens:
            raise UserError("the prompt has no tokens", "give a longer text")
        return self.checked(tokens)

    @cached_property
    def answer_format(self) -> AnswerFormat:
        """The marks in answers of the model, and the way in which it is told of tools."""
        return AnswerFormat.of(self.tokenizer)

    @cached_property
    def _control_tokens(self) -> re.Pattern[str] | None:
        return control_tokens(self.tokenizer)

    def opens_thought(self, tokens: Sequence[int]) -> bool:
        """Return whether a chat ends in the mark before a thought: some templates write it."""
        known = self.tokenizer
        if not known.has_thinking:
            return False
        # No further back, where a message may spell it.
        tail = list(tokens[-len(known.think_start_tokens) - 2 :])
        start: int = known.rfind_think_start(tail)
        return start >= 0 and start > known.rfind_think_end(tail)

    def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        continue_final_message: bool = False,
        **arguments: Any,
    ) -> tuple[int, ...]:
        """Return the tokens of a chat up to its next message, or up to the rest of its last one.

        Control tokens that a message or a tool spells are text; only the template writes real ones.
        ``arguments`` of the template win over ``template_arguments``. Raises ``UserError`` where
        the template does not take them, or there is none.
        """
        if not self.has_template:
            raise UserError("messages need a chat template: the model has none", "give a prompt")
        if self.most_tokens is not None and len(messages) > self.most_tokens:
            raise PromptTooLong(
                f"the prompt is too long: {len(messages)} messages",
                f"with its answer it may have at most {self.most_tokens} tokens",
            )
        given, mark = broken([*messages, *tools], self._control_tokens)
        chat, tools = given[: len(messages)], given[len(messages) :]
        if self.system_prompt is not None and not (chat and chat[0].get("role") == "system"):
            chat.insert(0, {"role": "system", "content": self.system_prompt})
        is_begun = continue_final_message or self.prefill_response is not None
        if self.prefill_response is not None:
            chat.append({"role": "assistant", "content": self.prefill_response})
        text = template_text(
            self.tokenizer,
            self.answer_format.way,
            chat,
            tools,
            is_begun,
            {**self.template_arguments, **arguments},
        )
        if mark is not None:
            return self._tokens(text, partial(encode_without, mark, tokenizer=self.tokenizer))
        return self.answer(text)

    def untokenized(self, *tokens: int) -> str:
        """Return the text of tokens; that of a part of a character is U+FFFD."""
        text: str = self.tokenizer.decode(list(tokens))
        return text


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A request for an answer of at most ``max_tokens``; ``where`` names its file and line."""

    prompt: str | Sequence[ChatMessage]
    max_tokens: int
    where: str


def read_prompts(path: str | Path, max_tokens: int) -> list[PromptRequest]:
    """Read the JSON lines of ``generate --prompts``, of stdin if it is "-", but empty ones;
    ``max_tokens`` is that of lines without their own. Raises ``UserError``, which names file, line
    and value."""
    if path == DASH:
        path, content = "stdin", _read_stdin("--prompts")
    else:
        with file_access("read --prompts", path):
            content = Path(path).read_bytes()
    lines = enumerate(content.split(b"\n"), start=1)
    requests = [
        _request(line, f"{path}:{number}", max_tokens) for number, line in lines if line.strip()
    ]
    if not requests:
        raise UserError(f"--prompts {path} is empty", 'write lines like {"prompt": "hello"}')
    return requests


def read_stdin(fd: int = 0, *, hides_end: bool | None = None) -> str:
    """Read all text from stdin, but its last line end. Where mpirun ``hides_end``, by default in a
    job that launch has not started, silence is taken for the end, and stderr tells so. Raises
    ``UserError`` if no text comes."""
    read = _read_stdin("--prompt", fd, hides_end)
    with refusing("--prompt -: stdin is not UTF-8 text"):
        text = read.decode().removesuffix("\n").removesuffix("\r")
    if not text:
        raise UserError("--prompt -: nothing came from stdin", "write a text into it")
    return text


def _read_stdin(flag: str, fd: int = 0, hides_end: bool | None = None) -> bytes:
    """Read all of stdin for the option ``flag``, as ``read_stdin`` does."""
    if hides_end is None:
        hides_end = under_mpirun()
    if os.isatty(fd):
        tell_typist()
    source, read = StdinReader(fd), b""
    while (part := source.read(_patience(source, read, hides_end))) != b"":
        if part is None:
            break
        read += part
    if part is None and source.tells_end:
        raise UserError(
            f"{flag} -: the end of stdin did not come within {SECONDS_TO_BEGIN:g} s",
            "start it anew",
        )
    if part is None and read:
        text = read.decode(errors="replace").rstrip("\r\n")
        print(
            f"shardmlx: {flag} -: took {len(text)} characters, up to {text[-SHOWN:]!r}, for all: "
            f"nothing more came from stdin within {SECONDS_TO_END:g} s, and mpirun does not tell "
            "its end (shardmlx launch does)",
            file=sys.stderr,
            flush=True,
        )
    return read


def _patience(source: StdinReader, read: bytes, hides_end: bool) -> float | None:
    """Return the seconds that stdin, of which so much is ``read``, may be silent."""
    if not hides_end:
        return None
    return SECONDS_TO_END if read and not source.tells_end else SECONDS_TO_BEGIN


def _request(line: bytes, where: str, max_tokens: int) -> PromptRequest:
    row = parse_row(line, where)
    check_keys(row, KEYS, where, f"the keys are {', '.join(KEYS)}")
    if ("prompt" in row) == ("messages" in row):
        found = "both" if "prompt" in row else "neither"
        raise UserError(f"{where} has {found} of prompt and messages", "give one of them")
    most = row.get("max_tokens", max_tokens)
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise UserError(f"{where}: max_tokens is {most!r}", "give a whole number from 1")
    if "prompt" in row:
        prompt = row["prompt"]
        if not isinstance(prompt, str) or not prompt:
            raise UserError(f"{where}: prompt is {prompt!r}", "give a text")
        return PromptRequest(prompt, most, where)
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: messages is {messages!r}", "give a list of chat messages")
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise UserError(
                f"{where}: a message is {message!r}", 'write {"role": ..., "content": ...}'
            )
    return PromptRequest(messages, most, where)
