"""Places of messages in what a template writes: their cost, and what a head is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from shardmlx.training.message_marks import Message
from shardmlx.training.message_spans import MessageSpans, Tools
from tests.helpers.calling_families import CALLING, CONVERSATIONS, plain
from tests.helpers.chat_templates import KINDS, tokenizer_with


class Writer:
    """Writes conversations with a template, and counts the messages that it has written."""

    def __init__(self, template: str) -> None:
        self._tokenizer = tokenizer_with(template)
        self.messages = 0

    def __call__(self, messages: Sequence[Message], tools: Tools, asks: bool) -> str | None:
        self.messages += len(messages)
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=asks
            )
        except Exception:  # a template may raise anything
            return None
        return text


def found_in(write: Writer, spans: MessageSpans, messages: Sequence[Message]) -> list[str]:
    """What the assistant says, as the spans show it."""
    text = write(messages, None, False)
    assert text is not None
    reading = spans.read(messages, None, text)
    assert reading is not None
    places: list[tuple[int, int]] = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            places += spans.spans(messages, None, reading, number) or []
    return [text[begin:end] for begin, end in places]


@pytest.mark.parametrize("name", ["qwen 3.5", "gemma 4", "llama 3.1", "mistral 3"])
def test_a_conversation_is_written_twice_however_long_it_is(name: str) -> None:
    write = Writer(plain(CALLING[name]))
    spans = MessageSpans(write)
    turns: list[dict[str, Any]] = []
    for i in range(40):
        turns += [{"role": "user", "content": f"why {i}"}, {"role": "assistant", "content": "so"}]
        if i == 3:
            found_in(write, spans, turns)
            write.messages = 0
    assert len(found_in(write, spans, turns)) == 40
    assert write.messages <= 3 * len(turns)


@pytest.mark.parametrize("template", [plain(each) for each in CALLING.values()], ids=CALLING)
def test_what_was_learnt_of_other_conversations_changes_nothing(template: str) -> None:
    write = Writer(template)
    spans = MessageSpans(write)
    for _ in range(2):
        for messages in CONVERSATIONS.values():
            if write(messages, None, False) is not None:
                alone = found_in(write, MessageSpans(write), messages)
                assert found_in(write, spans, messages) == alone


ASKED = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]
SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("template", "head"),
    [
        (KINDS["chatml"].template, "<|im_start|>system\nbe brief<|im_end|>\n"),
        (KINDS["llama 3"].template, "<|begin|><|start|>system<|end|>\n\nbe brief<|eot|>"),
        # The system's message is a part of the question.
        (
            "<bos>{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
            "{% for m in messages if m.role != 'system' %}<{{ m.role }}>"
            "{{ s if loop.first else '' }}: {{ m.content }}{% endfor %}",
            "<bos><user>be brief: ",
        ),
    ],
)
def test_a_head_is_what_stands_before_the_first_question(template: str, head: str) -> None:
    write = Writer(template)
    spans = MessageSpans(write)
    for messages in ([SYSTEM, *ASKED], [SYSTEM, *ASKED * 3]):
        text = write(messages, None, False)
        assert text is not None
        reading = spans.read(messages, None, text)
        assert reading is not None
        place = spans.head(messages, reading)
        assert place is not None
        assert text[:place] == head


def test_a_template_that_writes_other_words_once_they_are_marked_is_not_read() -> None:
    lengths = "{% for m in messages %}{{ m.content | length }}{{ m.content }}{% endfor %}"
    write = Writer(lengths)
    text = write(ASKED, None, False)
    assert text == "5hello3you"
    assert MessageSpans(write).read(ASKED, None, text) is None


def test_a_command_in_a_question_is_left_alone() -> None:
    command = (
        "{% for m in messages %}{{ 'quick ' if m.content.endswith('/quick') }}<{{ m.role }}>"
        "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    write = Writer(command)
    asked = {"role": "user", "content": "why /quick"}
    messages = [asked, ASKED[1], asked, ASKED[1]]
    assert found_in(write, MessageSpans(write), messages) == ["you", "you"]
