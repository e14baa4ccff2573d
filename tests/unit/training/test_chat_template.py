"""Where answers begin in what chat templates write, and which forms of a message they take."""

from __future__ import annotations

import json
import warnings
from itertools import groupby
from operator import itemgetter
from typing import Any

import pytest
from mlx_lm.chat_templates import deepseek_v32
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.datasets import ChatDataset

from shardmlx.compat import tokens_of_assistant
from shardmlx.errors import UserError
from shardmlx.training.chat_template import ChatTemplate
from tests.helpers.calling_families import CALLING, plain
from tests.helpers.calling_families import CONVERSATIONS as WITH_CALLS
from tests.helpers.chat_families import FAMILIES
from tests.helpers.chat_templates import KINDS, Kind, tokenizer_with

ALL = KINDS | FAMILIES
CALLERS = [name for name, kind in ALL.items() if "tool_calls" in kind.template]

CALLED = "look"
CALL = {"type": "function", "function": {"name": CALLED, "arguments": {"at": "sea"}}}


def said(role: str, content: str | None, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


ANSWERS = (
    *(
        "hello you",
        "<b>bold</b>",
        "\nhello",
        " hello",
        "hello there\n",
        "é日本",
        "<",
        "think>",
        "h",
    ),
    *("<think>\nwhy not\n</think>\n\nhello", "<think>\n\n</think>\n\nhello you"),
    *("assistant", "user: hello", ""),
)

BEFORE = {
    "a question": [said("user", "hello")],
    "another turn": [said("user", "hello"), said("assistant", "hello you"), said("user", "a<b")],
    "an earlier thought": [
        said("user", "why"),
        said("assistant", "<think>\nbecause of the sea\n</think>\n\nbecause"),
        said("user", "hello"),
    ],
    "a thought before a tool": [
        said("user", "why"),
        said("assistant", "<think>\nlet me look\n</think>\n\nlooking"),
        said("tool", "sea"),
    ],
    "two answers": [said("user", "why"), said("assistant", "<think>\nso\n</think>\n\nso")],
}


def start_of(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    where: str = "row",
) -> int:
    """Where the last message begins if it alone counts, which it does to the end."""
    counts = [False] * (len(messages) - 1) + [True]
    mask = template.counted(messages, tools, template.written(messages, tools), counts, where)
    assert mask == sorted(mask)
    return mask.count(False)


def start_by_oracle(kind: Kind, text: str, tokens: list[int], tokenizer: Any) -> int:
    """Find the last header, and what the template would have opened; then decode token by token
    until the text is longer than that."""
    place = text.rindex(kind.header) + len(kind.header)
    if text[place:].startswith(kind.opened):
        place += len(kind.opened)
    for i in range(len(tokens)):
        if len(tokenizer.decode(tokens[: i + 1])) > place:
            return i
    return len(tokens)


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_an_answer_begins_where_a_slow_reader_finds_it(
    kind: Kind, before: list[dict[str, Any]]
) -> None:
    if kind is KINDS["mistral"] and before[-1]["role"] == "assistant":
        pytest.skip("nothing stands between two of its answers")
    tokenizer = tokenizer_with(kind.template)
    template = ChatTemplate(tokenizer)
    for answer in ANSWERS:
        if answer == "" and kind is KINDS["words alone"]:
            continue
        messages = [*before, said("assistant", answer)]
        tokens = template.tokens(messages)
        text = template.text(messages)
        assert tokenizer.decode(tokens) == text
        found = start_of(template, messages)
        assert found == start_by_oracle(kind, text, tokens, tokenizer), (answer, text)


def test_where_the_prompt_is_the_beginning_an_answer_begins_as_in_mlx_lm() -> None:
    tokenizer = tokenizer_with(KINDS["chatml"].template)
    template = ChatTemplate(tokenizer)
    for before in BEFORE.values():
        for last in (said("assistant", "hello"), said("user", "hello"), said("tool", "hello")):
            row = {"messages": [*before, last], "tools": [CALL]}
            tokens, start = ChatDataset([row], tokenizer, mask_prompt=True).process(row)
            assert template.tokens(row["messages"], [CALL]) == tokens
            assert start_of(template, row["messages"], [CALL]) == start


@pytest.mark.parametrize("name", ["opens a thought", "ends a thought"])
def test_a_call_is_all_learnt(name: str) -> None:
    """Its mark begins like that of the thought that the template opens."""
    template = ChatTemplate(tokenizer := tokenizer_with(KINDS[name].template))
    messages = [said("user", "hello"), said("assistant", None, tool_calls=[CALL])]
    tokens = template.tokens(messages)
    start = start_of(template, messages)
    assert tokenizer.decode(tokens[start:]).startswith("<tool_call>")


def test_mlx_lm_leaves_out_the_beginning_of_an_answer() -> None:
    """What docs/developers/upstream.md says: if this fails, mlx-lm has mended it."""
    tokenizer = tokenizer_with(KINDS["opens a thought"].template)
    row = {"messages": [said("user", "hello"), said("assistant", "hello you there")]}
    tokens, start = ChatDataset([row], tokenizer, mask_prompt=True).process(row)
    assert "hello you there" not in tokenizer.decode(tokens[start:])


def test_mlx_lm_does_not_learn_to_open_a_call() -> None:
    """As docs/developers/upstream.md says, too."""
    tokenizer = tokenizer_with(KINDS["ends a thought"].template)
    row = {"messages": [said("user", "hello"), said("assistant", None, tool_calls=[CALL])]}
    tokens, start = ChatDataset([row], tokenizer, mask_prompt=True).process(row)
    assert "<tool_call>" in tokenizer.decode(tokens)
    assert "<tool_call>" not in tokenizer.decode(tokens[start:])


def test_mlx_lm_says_nothing_of_words_and_columns_that_are_left_out() -> None:
    """As docs/developers/upstream.md says, too."""
    tokenizer = tokenizer_with(KINDS["chatml"].template)
    answer = said("assistant", "you", reasoning_content="for the sea")
    row = {"messages": [said("user", "hello"), answer], "system": "be brief"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokens, _ = ChatDataset([row], tokenizer).process(row)
    text = tokenizer.decode(tokens)
    assert "you" in text
    assert "for the sea" not in text
    assert "be brief" not in text


def test_a_row_whose_answer_is_not_found_is_named() -> None:
    template = ChatTemplate(
        tokenizer_with("{% for m in messages %}{% if not loop.last %}{{ m.content }}{% endif %}"
                       "{% endfor %}{% if add_generation_prompt %}<b>{% endif %}")
    )  # fmt: skip
    messages = [said("user", "hello"), said("assistant", "you")]
    with pytest.raises(UserError) as error:
        start_of(template, messages, where="train.jsonl:3")
    assert "train.jsonl:3" in error.value.problem
    assert "--mask-prompt" in error.value.remedy


# All answers of a conversation.

THOUGHT = "<think>\nthe sea\n</think>\n\n"

CONVERSATIONS = {
    "one turn": [said("user", "hello"), said("assistant", "aye one")],
    "two turns": [
        *(said("user", "hello"), said("assistant", "aye one"), said("user", "more")),
        said("assistant", "aye two"),
    ],
    "three, the same questions": [
        *(said("user", "hello"), said("assistant", "aye one"), said("user", "hello")),
        *(said("assistant", "aye two"), said("user", "hello"), said("assistant", "aye three")),
    ],
    "thoughts": [
        *(said("user", "hello"), said("assistant", f"{THOUGHT}aye one"), said("user", "more")),
        said("assistant", f"{THOUGHT}aye two"),
    ],
    "the last is the user's": [
        *(said("user", "hello"), said("assistant", "aye one"), said("user", "more")),
    ],
}


def counted_by_oracle(
    kind: Kind, messages: list[dict[str, Any]], text: str, tokens: list[int], tokenizer: Any
) -> list[bool]:
    """Look for each answer's last words, from there back for the header, and forward for the mark
    of the end; then decode token by token."""
    spans, place = [], 0
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            header = kind.header
            if kind.after_tool and messages[i - 1]["role"] == "tool":
                header = kind.after_tool
            end = (message["content"] or CALLED).split("\n")[-1]
            words = text.index(end, place) + len(end)
            begin = text.rindex(header, place, words) + len(header)
            if text[begin:].startswith(kind.opened):
                begin += len(kind.opened)
            closing = kind.last if kind.last and message is messages[-1] else kind.closing
            place = text.index(closing, words) + len(closing)
            spans.append((begin, place))
    ends = [len(tokenizer.decode(tokens[: i + 1])) for i in range(len(tokens))]
    return [any(begin < each <= end for begin, end in spans) for each in ends]


def check_what_counts(kind: Kind, messages: list[dict[str, Any]]) -> None:
    template = ChatTemplate(tokenizer := tokenizer_with(kind.template))
    tokens, text = template.tokens(messages), template.text(messages)
    counts = [each["role"] == "assistant" for each in messages]
    expected = counted_by_oracle(kind, messages, text, tokens, tokenizer)
    written = template.written(messages, None)
    assert (written.text, written.tokens) == (text, tokens)
    assert template.counted(messages, None, written, counts, "row") == expected
    first = [each and i == 1 for i, each in enumerate(counts)]
    found = template.counted(messages, None, written, first, "row")
    assert sum(found) < sum(expected) or sum(counts) == 1
    assert all(mine <= all_of for mine, all_of in zip(found, expected, strict=True))


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("kind", ALL.values(), ids=ALL)
def test_all_answers_count_where_a_slow_reader_finds_them(
    kind: Kind, messages: list[dict[str, Any]]
) -> None:
    check_what_counts(kind, messages)


@pytest.mark.parametrize("kind", FAMILIES.values(), ids=FAMILIES)
def test_answers_count_after_a_system_message_too(kind: Kind) -> None:
    check_what_counts(kind, [said("system", "be brief"), *CONVERSATIONS["two turns"]])


@pytest.mark.parametrize("name", CALLERS)
def test_calls_count_and_what_tools_say_does_not(name: str) -> None:
    called = [
        *(said("user", "hello"), said("assistant", None, tool_calls=[CALL]), said("tool", "sea")),
        *(said("assistant", "aye one"), said("user", "more"), said("assistant", "aye two")),
    ]
    check_what_counts(ALL[name], called)


@pytest.mark.parametrize("messages", WITH_CALLS.values(), ids=WITH_CALLS)
@pytest.mark.parametrize("marked", CALLING.values(), ids=CALLING)
def test_what_counts_is_what_a_template_marks_that_is_the_same_but_for_its_marks(
    marked: str, messages: list[dict[str, Any]]
) -> None:
    if "function.arguments +" in marked:
        messages = with_arguments_as_text(messages)
    tokens, expected = tokens_of_assistant(tokenizer_with(marked), messages, None)
    template = ChatTemplate(tokenizer := tokenizer_with(plain(marked)))
    written = template.written(messages, None)
    assert (written.tokens, written.marked) == (tokens, None)
    counts = [each["role"] == "assistant" for each in messages]
    found = template.counted(messages, None, written, counts, "row")
    assert said_in(tokenizer, tokens, found) == said_in(tokenizer, tokens, expected)
    assert found == expected


def with_arguments_as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in found:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return found


def said_in(tokenizer: Any, tokens: list[int], mask: list[bool]) -> list[str]:
    """The texts of runs of tokens that count."""
    runs = groupby(zip(tokens, mask, strict=True), key=itemgetter(1))
    return [tokenizer.decode([token for token, _ in run]) for counts, run in runs if counts]


# Templates that cannot be used.


def test_a_template_that_cannot_be_compiled_is_to_blame() -> None:
    with pytest.raises(UserError) as error:
        ChatTemplate(tokenizer_with("a\n{% if %}"))
    assert "chat template" in error.value.problem
    assert "line 2" in error.value.problem
    assert "chat_template.jinja" in error.value.remedy


def test_a_model_without_a_template_is_named() -> None:
    with pytest.raises(UserError) as error:
        ChatTemplate(tokenizer_with(None))
    assert "no chat template" in error.value.problem


def test_templates_without_a_default_are_to_blame() -> None:
    tokenizer = tokenizer_with("a")
    tokenizer.chat_template = {"rag": "a", "tool_use": "b"}
    with pytest.raises(UserError, match="the chat templates rag, tool_use, and none is"):
        ChatTemplate(tokenizer)


def test_a_template_that_wants_other_messages_is_one() -> None:
    ChatTemplate(tokenizer_with("{{ raise_exception('no') }}"))


# Forms of messages.

PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}|{% endfor %}"
    "{% endfor %}"
)
TEXT_ARGUMENTS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments }}){% endfor %}{% endfor %}"
)
EITHER = TEXT_ARGUMENTS.replace(
    "{{ c.function.arguments }}",
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments|tojson }}",
)
PAIRS = TEXT_ARGUMENTS.replace(
    "{{ c.function.arguments }}",
    "{% if c.function.arguments is mapping %}{% for k, v in c.function.arguments.items() %}"
    "{{ k }}={{ v }}{% endfor %}{% else %}raw={{ c.function.arguments }}{% endif %}",
)


def test_what_a_template_takes() -> None:
    chatml = ChatTemplate(tokenizer_with(KINDS["chatml"].template))
    assert chatml.writes_calls
    assert not chatml.takes_parts("user")
    assert not chatml.drops("gpt")
    assert chatml.arguments is dict
    as_text = ChatTemplate(tokenizer_with(TEXT_ARGUMENTS))
    assert as_text.arguments is str
    assert ChatTemplate(tokenizer_with(EITHER)).arguments is None
    assert ChatTemplate(tokenizer_with(PAIRS)).arguments is dict
    assert not ChatTemplate(tokenizer_with(KINDS["gemma"].template)).writes_calls
    assert ChatTemplate(tokenizer_with(PARTS)).takes_parts("user")
    strict = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    assert ChatTemplate(tokenizer_with(strict)).drops("gpt")


def test_a_template_in_python_of_mlx_lm_is_one() -> None:
    inside = tokenizer_with("x", special=("</think>", "<｜end▁of▁sentence｜>"))._tokenizer
    tokenizer = TokenizerWrapper(inside, chat_template=deepseek_v32.apply_chat_template)
    template = ChatTemplate(tokenizer)
    assert template.writes_calls
    assert template.arguments is str
    for name in ("two turns", "turns of the same words", "a call, a result, a call"):
        messages = with_arguments_as_text((CONVERSATIONS | WITH_CALLS)[name])
        written = template.written(messages, None)
        counts = [each["role"] == "assistant" for each in messages]
        found = said_in(
            tokenizer, written.tokens, template.counted(messages, None, written, counts, "row")
        )
        assert len(found) == sum(counts)
        for said_there, message in zip(found, filter(is_answer, messages), strict=True):
            assert said_there.endswith("<｜end▁of▁sentence｜>")
            assert said_there.startswith(message["content"] or "\n\n<｜DSML｜function_calls>")


def is_answer(message: dict[str, Any]) -> bool:
    return bool(message["role"] == "assistant")
