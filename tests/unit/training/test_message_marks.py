"""Marks around words: a text without them is the same, and they show where words are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmlx.training.message_marks import Way, has_words, mark_words, texts_of, unused_nonce

ALL = Way(marks_empty=True)
NONCE = unused_nonce("")


def said(content: Any, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **others}


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return said("", tool_calls=[{"id": "call00001", "type": "function", "function": function}])


@settings(deadline=None)
@given(st.lists(st.text(), min_size=1))
def test_a_text_without_its_marks_is_the_text(contents: list[str]) -> None:
    messages = [said(content) for content in contents]
    marked = mark_words(messages, unused_nonce("".join(contents)), ALL)
    text, islands = marked.read("|".join(each["content"] for each in marked.messages))
    assert text == "|".join(contents)
    assert {each.message for each in islands} == {*range(len(contents))}
    for island in islands:
        words = text[island.begin : island.end]
        assert words.strip() == words
        assert words or marked.words[island.number].is_empty


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (" hello you\n", ["hello you"]),
        ("<think>\nwhy\n</think>\n\nhello", ["why", "hello"]),
        ("[INST] a [/INST]<b>c</b>", ["a", "c"]),
        ("a < b", ["a < b"]),
        ("<br>\n<br> ", ["<br>\n<br>"]),
        ("", [""]),
    ],
)
def test_tags_and_white_space_stay_outside(content: str, words: list[str]) -> None:
    marked = mark_words([said(content)], NONCE, ALL)
    text, islands = marked.read(marked.messages[0]["content"])
    assert [text[each.begin : each.end] for each in islands] == words


@pytest.mark.parametrize(
    "arguments",
    [
        {"at": "sea", "depth": 5, "more": ["a", {"b": None}]},
        {},
        {"a": 'x"y\n'},
        {"é": "\u2028", "b": "\\"},
        {"a": "!", "n": -1.5e3},
        {"a": ["{", "}"]},
    ],
)
def test_arguments_as_text_stay_json_with_marks(arguments: dict[str, Any]) -> None:
    for text in (json.dumps(arguments), json.dumps(arguments, ensure_ascii=False, indent=1)):
        marked = mark_words([call(text)], NONCE, ALL)
        written = marked.messages[0]["tool_calls"][0]["function"]["arguments"]
        assert isinstance(json.loads(written), dict)
        assert marked.read(written)[0] == text


def test_what_a_template_looks_up_has_no_marks() -> None:
    result = {"role": "tool", "tool_call_id": "call00001", "name": "look", "content": "blue"}
    marked = mark_words([call({"at": "sea"}), result], NONCE, ALL)
    assert marked.messages[0]["tool_calls"][0]["id"] == "call00001"
    assert {**marked.messages[1], "content": "blue"} == result
    assert [each.key for each in marked.words] == ["tool_calls", "tool_calls", "content"]
    assert [*texts_of(result)] == ["blue"]


def test_of_words_that_come_twice_the_second_is_an_echo() -> None:
    marked = mark_words([said("hello"), said("you")], NONCE, ALL)
    one, other = (each["content"] for each in marked.messages)
    text, islands = marked.read(f"{one}; {other} as to {one}")
    assert text == "hello; you as to hello"
    assert [(each.begin, each.end, each.message) for each in islands] == [(0, 5, 0), (7, 10, 1)]


def test_words_that_are_cut_are_one_place() -> None:
    marked = mark_words([said("hello there")], NONCE, ALL)
    text, (island,) = marked.read("> " + marked.messages[0]["content"][: len(NONCE) + 8])
    assert text.startswith("> hello")
    assert (island.begin, island.end) == (2, 2)


def test_a_way_marks_some_roles_and_may_leave_empty_contents_alone() -> None:
    messages = [{"role": "user", "content": "a"}, said(""), said("b")]
    way = Way(marks_empty=False, roles=("assistant",))
    marked = mark_words(messages, NONCE, way)
    assert [*marked.messages[:2]] == messages[:2]
    assert [each.message for each in marked.words] == [2]


def test_a_nonce_is_in_no_text() -> None:
    first = unused_nonce("")
    assert unused_nonce(f"so {first.upper()} it is") != first
    assert first.isalpha()


def test_white_space_is_no_words() -> None:
    assert not has_words(said(" \n"))
    assert has_words(said(None, reasoning_content="so"))
    assert has_words(call({}))
