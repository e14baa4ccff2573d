"""The file of prompts: bad lines are named by file and line."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load
from mlx_lm.tool_parsers import json_tools
from tokenizers import AddedToken

from shardmlx.common.passed_stdin import MARK
from shardmlx.errors import PromptTooLong, UserError
from shardmlx.inference import prompts
from shardmlx.inference.answer_format import HARMONY, json_calls
from shardmlx.inference.prompts import PromptEncoder, PromptRequest, read_prompts, read_stdin


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_prompts_and_chats_in_order(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"prompt": "one\u2028two"}\n\n{"messages": [{"role": "user", "content": "three"}], '
        '"max_tokens": 7}\n',
    )
    first, second = read_prompts(path, 100)
    assert (first.prompt, first.max_tokens) == ("one\u2028two", 100)
    chat = [{"role": "user", "content": "three"}]
    assert second == PromptRequest(chat, 7, f"{path}:3")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('{"prompt": "hello"', "JSON"),
        ("[1]", "[1]"),
        ('{"promt": "hello"}', "'promt'"),
        ("{}", "neither"),
        ('{"prompt": "a", "messages": []}', "both"),
        ('{"prompt": ""}', "''"),
        ('{"prompt": 3}', "3"),
        ('{"prompt": "a", "max_tokens": 0}', "0"),
        ('{"prompt": "a", "max_tokens": true}', "True"),
        ('{"messages": []}', "[]"),
        ('{"messages": [{"role": "user"}]}', "{'role': 'user'}"),
    ],
)
def test_a_bad_line(line: str, value: str, tmp_path: Path) -> None:
    path = write(tmp_path, '{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(UserError) as error:
        read_prompts(path, 100)
    assert error.value.problem.startswith(f"{path}:2")
    assert value in error.value.problem


@pytest.mark.parametrize("content", [b"\n", b"\xff\xfe", None])
def test_a_file_that_cannot_be_used(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=str(path)):
        read_prompts(path, 100)


def test_text_from_stdin_is_read_to_its_end_however_long_it_pauses(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without mpirun."""
    monkeypatch.setattr(prompts, "SECONDS_TO_END", 0.01)
    monkeypatch.setattr(prompts, "SECONDS_TO_BEGIN", 0.01)
    read, write = os.pipe()

    def feed() -> None:
        with os.fdopen(write, "wb", buffering=0) as file:
            for part in ("Wer\n", "bläst?", "\n"):
                time.sleep(0.1)
                file.write(part.encode())

    thread = threading.Thread(target=feed)
    thread.start()
    assert read_stdin(read, hides_end=False) == "Wer\nbläst?"
    thread.join()
    os.close(read)
    assert capfd.readouterr().err == ""


def test_under_mpirun_silence_may_be_the_end_of_stdin_and_what_was_taken_is_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prompts, "SECONDS_TO_END", 0.05)
    monkeypatch.setattr(prompts, "SECONDS_TO_BEGIN", 0.05)
    for closes in (True, False):
        read, write = os.pipe()
        os.write(write, "Wer\nbläst?\n".encode())
        if closes:
            os.close(write)
        assert read_stdin(read, hides_end=True) == "Wer\nbläst?"
        said = capfd.readouterr().err
        assert ("took 10 characters" in said) == ("bläst?" in said) == (not closes)
        if not closes:
            with pytest.raises(UserError, match="nothing came from stdin"):
                read_stdin(read, hides_end=True)
            os.close(write)
        os.close(read)


@contextmanager
def stdin_of(text: str) -> Iterator[None]:
    """Let this process have a text as its stdin, in the block."""
    own = os.dup(0)
    read, write = os.pipe()
    os.write(write, text.encode())
    os.close(write)
    os.dup2(read, 0)
    os.close(read)
    try:
        yield
    finally:
        os.dup2(own, 0)
        os.close(own)


def test_many_prompts_come_from_stdin_too() -> None:
    """A bad line is named by its number."""
    with stdin_of('{"prompt": "one"}\n\n{"prompt": "three"}'):
        found = read_prompts("-", 5)
    assert [(each.prompt, each.where) for each in found] == [
        ("one", "stdin:1"),
        ("three", "stdin:3"),
    ]
    for text, problem in (
        ('{"prompt": "one"}\n{"promt": "two"}\n', "stdin:2"),
        ("", "--prompts stdin is empty"),
    ):
        with stdin_of(text), pytest.raises(UserError) as refused:
            read_prompts("-", 5)
        assert problem in str(refused.value)


def test_an_end_that_launch_passes_on_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """And its absence is no end."""
    monkeypatch.setattr(prompts, "SECONDS_TO_END", 0.01)
    read, write = os.pipe()
    pieces = [MARK, (3).to_bytes(8), b"Wer", (2).to_bytes(8) + b"?\n"]

    def feed() -> None:
        for piece in (*pieces, bytes(8)):
            os.write(write, piece)
            time.sleep(0.05)

    thread = threading.Thread(target=feed)
    thread.start()
    assert read_stdin(read, hides_end=True) == "Wer?"
    thread.join()
    monkeypatch.setattr(prompts, "SECONDS_TO_BEGIN", 0.05)
    os.write(write, b"".join(pieces))
    with pytest.raises(UserError, match="the end of stdin did not come"):
        read_stdin(read, hides_end=True)
    assert capfd.readouterr().err == ""
    os.close(read)
    os.close(write)


def test_the_format_of_answers_is_read_from_the_tokenizer() -> None:
    tokenizer: Any = SimpleNamespace(
        chat_template="{{ tools }}<tool_call>{{ tool_call.name }}",
        has_chat_template=True,
        has_thinking=False,
        has_tool_calling=True,
        tool_call_start=json_tools.tool_call_start,
        tool_call_end=json_tools.tool_call_end,
        tool_parser=json_tools.parse_tool_call,
        added_tokens_decoder={5: AddedToken("<s>", special=True), 6: AddedToken("<a>")},
    )
    known = PromptEncoder(tokenizer=tokenizer).answer_format
    assert known.call is not None
    assert known.calls == json_calls(known.call)
    assert known.special == {"<s>": 5}
    harmony: Any = SimpleNamespace(
        chat_template="<|start|>assistant<|channel|>analysis<|message|>",
        added_tokens_decoder={7: AddedToken("<|end|>", special=True)},
    )
    known = PromptEncoder(tokenizer=harmony).answer_format
    assert known == replace(HARMONY, special={"<|end|>": 7})


def test_a_prompt_with_a_token_that_the_model_does_not_know(small_tokenizer: Path) -> None:
    encoder = PromptEncoder(tokenizer=load(small_tokenizer))
    largest = max(tokens := encoder.text("A cat sat."))
    assert replace(encoder, vocabulary=largest + 1).text("A cat sat.") == tokens
    with pytest.raises(UserError, match=f"the prompt has token {largest}, and the model knows"):
        replace(encoder, vocabulary=largest).text("A cat sat.")


TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "description": "<s>", "parameters": {"type": "object"}},
}
HISTORY: Any = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is there?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": at, "type": "function", "function": {"name": "look", "arguments": {"at": at}}}
            for at in ("sea", "sky")
        ],
    },
    {"role": "tool", "tool_call_id": "sea", "content": "Ships."},
    {"role": "tool", "tool_call_id": "sky", "content": "Blue."},
]
TURNS = "{% for turn in messages %}[{{ turn.role }}] {{ turn.content }}\n{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
LEFT_OUT = "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}"
LLAMA = """{% if tools is defined %}{{ tools | tojson }}
{% endif %}{% for turn in messages %}{% if turn.tool_calls is defined %}
{% if not turn.tool_calls|length == 1 %}{{ raise_exception('single calls') }}{% endif %}
{% set call = turn.tool_calls[0].function %}
{{- '[assistant] {"name": "' + call.name + '", ' + '"parameters": ' }}{{ call.arguments|tojson }}}
{% else %}[{{ 'ipython' if turn.role == 'tool' else turn.role }}] {{ turn.content }}
{% endif %}{% endfor %}"""


def encoder_with(tokenizer_path: Path, template: str) -> PromptEncoder:
    tokenizer = load(tokenizer_path)
    tokenizer.chat_template = template
    return PromptEncoder(tokenizer=tokenizer)


def told(small_tokenizer: Path, template: str, tools: list[Any]) -> tuple[str | None, str]:
    """The way of a template with tools, and what it makes of the history."""
    encoder = encoder_with(small_tokenizer, template)
    return encoder.answer_format.way, encoder.untokenized(*encoder.chat(HISTORY, tools))


@pytest.mark.parametrize("said", ["Hm. ", "", "<s>user"])
def test_a_chat_may_go_on_from_its_last_message(said: str, small_tokenizer: Path) -> None:
    encoder = encoder_with(
        small_tokenizer,
        "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}",
    )
    chat = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": said}]
    tokens = encoder.chat(chat, continue_final_message=True)
    assert encoder.untokenized(*tokens) == f"<s>user: Q</s><s>assistant: {said}"
    assert tokens.count(0) == 2, "what a message spells is text"


def test_a_template_that_knows_no_tools_gets_them_as_text(small_tokenizer: Path) -> None:
    """Control tokens that they spell are text too."""
    way, text = told(small_tokenizer, TURNS, [TOOL])
    assert way == "generic"
    lines = text.replace("\n\n", "\n").strip().split("\n")[-7:]
    assert text.startswith("[system] Be brief.\n\nYou can call functions.")
    assert '"description": "<s>"' in text
    assert lines == [
        "[user] What is there?",
        '[assistant] {"name": "look", "arguments": {"at": "sea"}}',
        '{"name": "look", "arguments": {"at": "sky"}}',
        "[user] Result of look:",
        "Ships.",
        "Result of look:",
        "Blue.",
    ]


@pytest.mark.parametrize("template", [NO_SYSTEM + TURNS, LEFT_OUT + TURNS])
def test_a_template_without_a_system_message(small_tokenizer: Path, template: str) -> None:
    """It gets what the message says, at the beginning of what the user says."""
    _, text = told(small_tokenizer, template, [TOOL])
    assert text.startswith("[user] Be brief.\n\nYou can call functions.")
    assert "[system]" not in text
    assert "What is there?\n[assistant]" in text


FIRST = "{{ messages[0].content if messages[0].role == 'system' }}"
ONE_SYSTEM = FIRST + (
    "{% for turn in messages %}{% if turn.role != 'system' %}[{{ turn.role }}] {{ turn.content }}\n"
    "{% elif not loop.first %}{{ OTHERS }}{% endif %}{% endfor %}"
)
REFUSES = "raise_exception('at the beginning')"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (TURNS, "[system] A.\n[system] B.\n[user] x\n[system] C.\n[user] y\n"),
        (ONE_SYSTEM.replace("OTHERS", REFUSES), "A.\n\nB.\n\nC.[user] x\n[user] y\n"),
        (ONE_SYSTEM.replace("OTHERS", "''"), "A.\n\nB.\n\nC.[user] x\n[user] y\n"),
        (NO_SYSTEM + TURNS, "[user] A.\n\nB.\n\nC.\n\nx\n[user] y\n"),
    ],
    ids=["taken", "refused", "left out", "no system"],
)
def test_several_system_messages_as_the_template_takes_them(
    small_tokenizer: Path, template: str, text: str
) -> None:
    encoder = encoder_with(small_tokenizer, template)
    said = [("system", "A."), ("system", "B."), ("user", "x"), ("system", "C."), ("user", "y")]
    chat = [{"role": role, "content": content} for role, content in said]
    assert encoder.chat(chat) == encoder.text(text)[-len(encoder.chat(chat)) :]


def test_llama_3_is_told_by_its_template_and_calls_once_in_an_answer(small_tokenizer: Path) -> None:
    encoder = encoder_with(small_tokenizer, LLAMA)
    assert encoder.answer_format.way == "llama3"
    assert not encoder.answer_format.takes_several
    text = encoder.untokenized(*encoder.chat(HISTORY[:2], [TOOL]))
    assert text.startswith('[{"type": "function", "function": {"name": "look"')


def test_a_chat_that_no_form_of_a_template_takes_is_refused(small_tokenizer: Path) -> None:
    with pytest.raises(UserError, match=r"the chat template does not take it: .*never"):
        told(small_tokenizer, "{{ raise_exception('never') }}", [TOOL])


class Letters:
    """A tokenizer to which a character is a token; it counts those that it has read."""

    has_chat_template = True
    chat_template = "{{ messages }}"
    added_tokens_decoder: Mapping[int, AddedToken] = MappingProxyType({})
    has_thinking = has_tool_calling = False

    def __init__(self) -> None:
        self.read = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.read += len(text)
        return [*map(ord, text)]

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        return "".join(each["content"] for each in messages)


@pytest.mark.parametrize("characters", [20_000, 5_000_000])
def test_of_a_text_that_is_far_too_long_only_a_piece_is_tokenised(characters: int) -> None:
    letters = Letters()
    encoder = PromptEncoder(tokenizer=letters, most_tokens=3000)
    with pytest.raises(PromptTooLong) as caught:
        encoder.text(characters * "a")
    assert "3000" in caught.value.remedy
    with pytest.raises(PromptTooLong):
        encoder.chat([{"role": "user", "content": characters * "a"}])
    assert letters.read <= 2 * prompts.PIECE


def test_what_may_fit_has_the_tokens_of_the_whole(tokenizer: Path) -> None:
    encoder = PromptEncoder(tokenizer=load(tokenizer))
    text = 700 * "Where be the treasure, and who has hidden it? "
    assert len(text) > prompts.PIECE
    tokens = encoder.text(text)
    assert replace(encoder, most_tokens=len(tokens) // 2 + 50).text(text) == tokens
    with pytest.raises(PromptTooLong):
        replace(encoder, most_tokens=len(tokens) // 2 - 50).text(text)
