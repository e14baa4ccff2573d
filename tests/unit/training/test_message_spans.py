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


@pytest.mark.parametrize("name", ["qwen 3.5", "mistral 3"])
def test_so_is_a_trace_of_calls_whose_numbers_and_ids_all_differ(name: str) -> None:
    arguments = (
        "{% for c in m.tool_calls or [] %}{{ c.id }}({{ c.function.arguments }}){% endfor %}"
    )
    template = plain(CALLING[name]).replace("<|im_end|>", f"{arguments}<|im_end|>")
    write = Writer(template.replace("</s>", f"{arguments}</s>"))
    spans = MessageSpans(write)
    trace: list[dict[str, Any]] = [{"role": "user", "content": "why"}]
    for i in range(60):
        function = {"name": "look", "arguments": {"n": i, "at": f"sea {i}", "x": [i, i / 7]}}
        call = {"id": f"call{i:05}", "type": "function", "function": function}
        trace.append({"role": "assistant", "content": "", "tool_calls": [call]})
        trace.append({"role": "tool", "content": f"blue {i}", "tool_call_id": call["id"]})
        if i == 3:
            found_in(write, spans, trace)
            write.messages = 0
    found = found_in(write, spans, trace)
    assert all(f"sea {i}" in each for i, each in enumerate(found))
    assert len(found) == 60
    assert write.messages <= 3 * len(trace)


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


def _call(**arguments: str) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


QUESTION = {"role": "user", "content": "where"}
RESULT = {"role": "tool", "content": "here"}
ANSWER = {"role": "assistant", "content": "so"}

_ARGUMENT = "{{ m.tool_calls[0].function.arguments.at }}"


def _answers(call: str, others: str, ask: str) -> str:
    """A template of messages that call, and of others."""
    return (
        f"{{% for m in messages %}}{{% if m.tool_calls %}}{call}{{% else %}}{others}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{ask}{{% endif %}}"
    ).replace("ARG", _ARGUMENT)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        # The number of a call is written where its result follows, and so is white space.
        (
            _answers(
                "<assistant>look ARG{{ '' if loop.last else ', 1' }}</call>"
                "{{ '' if loop.last else '\n' }}<end>\n",
                "<{{ m.role }}>{{ m.content }}<end>\n",
                "<assistant>",
            ),
            ["look up, 1</call>\n<end>\n", "so<end>\n"],
        ),
        # An answer is a part of the turn whose call has a result, without the header of another.
        (
            _answers(
                "{{ '' if loop.previtem.role == 'tool' else '<bot>' }}<call>ARG</call>",
                "{% if m.role == 'tool' %}[{{ m.content }}]{% elif m.role == 'user' %}"
                "<user>{{ m.content }}</user>{% else %}"
                "{{ '' if loop.previtem.role == 'tool' else '<bot>' }}{{ m.content }}</bot>"
                "{% endif %}",
                "<bot>",
            ),
            ["<call>up</call>", "so</bot>"],
        ),
        # It asks for an answer by an empty thought, whose mark is not a tag.
        (
            _answers(
                "<turn>model\n<|channel>thought\nno<channel|>ARG<end>",
                "<turn>{{ m.role.replace('assistant', 'model') }}\n{{ m.content }}<end>",
                "<turn>model\n<|channel>thought\n<channel|>",
            ),
            ["<|channel>thought\nno<channel|>up<end>", "so<end>"],
        ),
    ],
    ids=["writes its end otherwise", "goes on", "thinks"],
)
def test_a_message_begins_and_ends_where_a_call_has_its_result(
    template: str, said: list[str]
) -> None:
    write = Writer(template)
    found = found_in(write, MessageSpans(write), [QUESTION, _call(at="up"), RESULT, ANSWER])
    assert found == said


def test_the_end_of_an_answer_does_not_depend_on_those_before_it() -> None:
    # What is said beside a call stands behind its result, as Gemma 4's template writes it.
    template = (
        "{% for m in messages %}{% if m.tool_calls %}<bot><call>ARG</call>{% if not loop.last %}"
        "<result>{{ loop.nextitem.content }}</result>{% endif %}{{ m.content }}"
        "{{ '<end>' if m.content and not loop.last else '' }}{{ '<result>' if loop.last else '' }}"
        "{% elif m.role != 'tool' %}{{ '<bot>' if m.role == 'assistant' and "
        "loop.previtem.role != 'tool' else '' }}{{ m.content }}<end>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}"
    ).replace("ARG", _ARGUMENT)
    silent = [QUESTION, {**_call(at="up"), "content": ""}, RESULT, ANSWER]
    speaking = [QUESTION, {**_call(at="up"), "content": "wait"}, RESULT, ANSWER]
    write = Writer(template)
    spans = MessageSpans(write)
    assert found_in(write, spans, speaking) == ["<call>up</call>", "wait<end>", "so<end>"]
    assert found_in(write, spans, silent) == ["<call>up</call><result>", "so<end>"]


def test_words_that_a_template_repeats_before_they_are_said_change_no_end() -> None:
    # A result names each call that has its number, also a later one, as Solar's template does.
    template = (
        "{% for m in messages %}{% if m.tool_calls %}<bot>{{ m.tool_calls[0].function.name }}<end>"
        "{% elif m.role == 'tool' %}<result>{% for c in messages if c.tool_calls %}"
        "{{ c.tool_calls[0].function.name }}{% endfor %}:{{ m.content }}<end>{% else %}"
        "<{{ 'bot' if m.role == 'assistant' else 'user' }}>{{ m.content }}<end>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
    )
    seek: Message = {"role": "assistant", "tool_calls": [{"function": {"name": "seek"}}]}
    look: Message = {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]}
    plain_turns: list[Message] = [QUESTION, ANSWER, QUESTION, ANSWER]
    write = Writer(template)
    spans = MessageSpans(write)
    trace: list[Message] = [QUESTION, seek, RESULT, *plain_turns, QUESTION, look, RESULT]
    text = write(trace, None, False)
    assert text is not None
    reading = spans.read(trace, None, text)
    assert reading is not None
    found = spans.spans(trace, None, reading, 4)
    assert found is not None
    assert [text[begin:end] for begin, end in found] == ["so<end>"]
    assert found_in(write, spans, plain_turns) == ["so<end>", "so<end>"]


def test_an_answer_whose_header_is_nowhere_shown_is_not_guessed() -> None:
    last_question = "{{ '!' if loop.last and m.role == 'user' else '?' }}"
    write = Writer(f"{{% for m in messages %}}{{{{ m.content }}}}{last_question}{{% endfor %}}")
    messages = [QUESTION, ANSWER, QUESTION, ANSWER]
    text = write(messages, None, False)
    assert text == "where?so?where?so?"
    spans = MessageSpans(write)
    reading = spans.read(messages, None, text)
    assert reading is not None
    assert spans.spans(messages, None, reading, 1) is None
