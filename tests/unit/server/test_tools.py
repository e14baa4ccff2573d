"""Tools and thoughts as clients see them: OpenAI's own package, against a model that repeats."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.helpers.http_serving import LOOK as TOOL
from tests.helpers.http_serving import MODEL, Agent, Serving

LOOK: Any = {"type": "function", "function": {**TOOL, "strict": True}}
CALLS = (
    '<think>Two things</think>I look<tool_call>{"name": "look", "arguments": {"at": "sea"}}'
    '</tool_call>\n<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>.'
)


def ask(client: openai.OpenAI, said: str, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": said}]
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def test_thought_text_and_parallel_calls_come_apart(client: openai.OpenAI, agent: Agent) -> None:
    (choice,) = ask(client, CALLS, tools=[LOOK], tool_choice="auto").choices
    assert choice.finish_reason == "tool_calls"
    message = choice.message
    assert (message.reasoning_content, message.content) == ("Two things", "I look")
    assert [call.model_dump(exclude={"id"}) for call in message.tool_calls] == [
        {"type": "function", "function": {"name": "look", "arguments": f'{{"at": "{where}"}}'}}
        for where in ("sea", "sky")
    ]
    assert agent.tools == [{"type": "function", "function": TOOL}]


@pytest.mark.parametrize("stop", ["Two", '"at"', "sea", "}", "call"])
def test_stop_strings_are_not_looked_for_in_thoughts_and_calls(
    stop: str, client: openai.OpenAI
) -> None:
    (choice,) = ask(client, CALLS, tools=[LOOK], stop=stop).choices
    assert choice.message == ask(client, CALLS, tools=[LOOK]).choices[0].message.model_copy(
        update={"tool_calls": choice.message.tool_calls}
    )
    calls = choice.message.tool_calls
    assert [call.function.arguments for call in calls] == ['{"at": "sea"}', '{"at": "sky"}']


@pytest.mark.parametrize(
    ("stop", "said"),
    [("I", ""), (["look", "loo"], "I "), ("k<tool_call>", "I look"), ("ok", "I lo")],
)
def test_what_is_said_ends_before_a_stop_string(
    stop: Any, said: str, client: openai.OpenAI
) -> None:
    whole = "<think>I ok?</think>I look at it again and again."
    answer = ask(client, CALLS if "<" in stop else whole, tools=[LOOK], stop=stop)
    (choice,) = answer.choices
    assert (choice.message.content or "") == said
    if "<" not in stop:
        assert choice.message.reasoning_content == "I ok?"
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert answer.usage.completion_tokens <= whole.index("at")
    chunks = ask(client, whole, stop=stop, stream=True)
    pieces = [each.choices[0].delta.content or "" for each in chunks if each.choices]
    assert "<" in stop or "".join(pieces) == said


def test_a_round_trip(client: openai.OpenAI, agent: Agent) -> None:
    """What was called and what came of it reaches the template, arguments as an object."""
    answer = ask(client, CALLS, tools=[LOOK]).choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"{number} ships."}
        for number, call in enumerate(answer.tool_calls)
    ]
    history: Any = [{"role": "user", "content": "?"}, answer.model_dump(), *results]
    client.chat.completions.create(model=MODEL, messages=history, tools=[LOOK])
    _, called, first, second = agent.messages
    assert called["content"] == "I look"
    assert called["reasoning_content"] == "Two things"
    arguments = [call["function"]["arguments"] for call in called["tool_calls"]]
    assert arguments == [{"at": "sea"}, {"at": "sky"}]
    assert first == {**results[0], "tool_call_id": called["tool_calls"][0]["id"]}
    assert second["content"] == "1 ships."


def history_with(arguments: Any, content: Any = "Ships.") -> Any:
    function = {"name": "look", "arguments": arguments}
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": None, "function": function}]},
        {"role": "tool", "tool_call_id": "a", "content": content},
        {"role": "user", "content": "So?."},
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", {}),
        (" ", {}),
        (None, {}),
        ("null", {}),
        ({"at": "sea"}, {"at": "sea"}),
        ('{"at": null}', {"at": None}),
        ('{"at": "se', {"arguments": '{"at": "se'}),
        ('["a"]', {"arguments": '["a"]'}),
    ],
)
def test_arguments_in_a_history_are_an_object(
    client: openai.OpenAI, agent: Agent, arguments: Any, told: dict[str, Any]
) -> None:
    """One call whose arguments were cut off does not end the conversation."""
    messages = history_with(arguments, content=None)
    client.chat.completions.create(model=MODEL, messages=messages, tools=[LOOK])
    _, called, result, _ = agent.messages
    assert called["tool_calls"][0]["function"] == {"name": "look", "arguments": told}
    assert result["content"] == ""


def test_choices_of_tools(client: openai.OpenAI, agent: Agent) -> None:
    (choice,) = ask(client, CALLS, tools=[LOOK], tool_choice="none").choices
    assert choice.finish_reason == "stop"
    assert choice.message.content.startswith("I look<tool_call>")
    assert agent.tools == []
    (choice,) = ask(client, CALLS, tools=[LOOK], parallel_tool_calls=False).choices
    assert len(choice.message.tool_calls) == 1


NAMED = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    ("choice", "options", "most"),
    [("required", {}, 2), ("required", {"parallel_tool_calls": False}, 1), (NAMED, {}, 1)],
)
def test_a_call_may_be_asked_for(
    client: openai.OpenAI, served: Serving, choice: Any, options: dict[str, Any], most: int
) -> None:
    """By a grammar; what it makes of noise is told by test_grammars."""
    (answer,) = ask(client, CALLS, tools=[LOOK], tool_choice=choice, **options).choices
    grammar = str(served.parrot.added[-1].sampling.grammar)
    assert ("(" in grammar.partition("\n")[2].partition("\n")[0]) == (most > 1)
    assert '\\"look\\"' in grammar
    assert len(answer.message.tool_calls) == (1 if options else 2)  # of one that keeps to none


def test_a_stream_has_no_empty_text(client: openai.OpenAI) -> None:
    """Some clients open a text at it: before a thought, or in the place of one."""
    for more in ({}, {"logprobs": True}):
        chunks = [each.choices[0] for each in ask(client, CALLS, tools=[LOOK], stream=True, **more)]
        assert chunks[0].delta.role == "assistant"
        texts = [chunk.delta.content for chunk in chunks]
        assert "" not in texts
        assert "".join(filter(None, texts)) == "I look"
    tokens = [token.token for each in chunks if each.logprobs for token in each.logprobs.content]
    assert "".join(tokens) == CALLS[:-1]


def test_arguments_of_calls_are_streamed_in_pieces(client: openai.OpenAI) -> None:
    chunks = [each.choices[0] for each in ask(client, CALLS, tools=[LOOK], stream=True)]
    calls = [call for each in chunks for call in each.delta.tool_calls or []]
    begun = [call for call in calls if call.id]
    assert [(call.index, call.type, call.function.name) for call in begun] == [
        (0, "function", "look"),
        (1, "function", "look"),
    ]
    assert len({call.id for call in begun}) == 2
    pieces = [[call.function.arguments for call in calls if call.index == at] for at in (0, 1)]
    assert ["".join(each) for each in pieces] == ['{"at": "sea"}', '{"at": "sky"}']
    assert min(map(len, pieces)) > 5  # a token is a character here
    assert chunks[-1].finish_reason == "tool_calls"


def test_openais_own_helper_puts_the_pieces_together(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": CALLS}]
    told = []
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=[LOOK]) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                told.append(event.arguments_delta)
        (choice,) = stream.get_final_completion().choices
    arguments = [call.function.arguments for call in choice.message.tool_calls]
    assert arguments == ['{"at": "sea"}', '{"at": "sky"}']
    assert "".join(told) == "".join(arguments)


def test_a_stream_keeps_a_call_that_is_cut_off(client: openai.OpenAI) -> None:
    """It has begun, and its reason says that it has no end, as with OpenAI."""
    length = CALLS.index('ea"}')
    chunks = ask(client, CALLS, tools=[LOOK], stream=True, max_tokens=length)
    choices = [each.choices[0] for each in chunks]
    calls = [call for each in choices for call in each.delta.tool_calls or []]
    assert "".join(call.function.arguments for call in calls) == '{"at": "s'
    assert choices[-1].finish_reason == "length"


def test_a_call_that_is_cut_off_is_text(client: openai.OpenAI) -> None:
    length = CALLS.index('ea"}')
    (choice,) = ask(client, CALLS, tools=[LOOK], max_tokens=length).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is None
    assert choice.message.content == CALLS[25:length]


def test_thoughts(client: openai.OpenAI) -> None:
    (choice,) = ask(client, "~hm</think>Aye.").choices  # as after a template that opens the thought
    assert (choice.message.reasoning_content, choice.message.content) == ("~hm", "Aye")


def test_logprobs_are_of_all_tokens(client: openai.OpenAI) -> None:
    (choice,) = ask(client, "<think>hm</think>Aye.", logprobs=True).choices
    tokens = [each.token for each in choice.logprobs.content]
    assert "".join(tokens) == "<think>hm</think>Aye"
