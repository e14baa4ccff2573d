"""What client libraries are asked to do by clients.py: a function for each, which yields features.

Each feature is a name and a function that raises where the client does not get what it wants.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

NAME = "smollm2"
QUESTION = "What is the capital of France? Answer in one word."
MOST = 100
"""Tokens of an answer."""

LOOP = asyncio.new_event_loop()

CLIENTS: dict[str, Callable[[str], Iterator[tuple[str, Callable[[], Any]]]]] = {}
"""Functions that yield the features of a client, for a server at an address."""


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]
    sunny: bool


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Get the weather of a city."""
    return f"It is sunny in {city}."


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Get the weather", "parameters": PARAMETERS}
ASKED = {"role": "user", "content": QUESTION}


def client(function: Any) -> Any:
    CLIENTS[function.__name__.replace("_", " ")] = function
    return function


def check_call(name: str, arguments: Any) -> None:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "get_weather", name
    assert given in ({"city": "Paris"}, {"city": "Rome"}), given


@client
def openai_chat(address: str) -> Any:
    import openai

    api = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
    tools: Any = [{"type": "function", "function": FUNCTION}]

    def ask(*more: Any, **options: Any) -> Any:
        messages = [ASKED, *more]
        return api.chat.completions.create(
            model=NAME, messages=messages, max_tokens=MOST, **options
        )

    def stream() -> None:
        assert [chunk for chunk in ask(stream=True) if chunk.choices]

    def forced(**options: Any) -> Any:
        message = ask(tools=tools, **options).choices[0].message
        check_call(message.tool_calls[0].function.name, message.tool_calls[0].function.arguments)
        return message

    def streamed_call() -> None:
        options: Any = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
        with api.chat.completions.stream(
            model=NAME, messages=[ASKED], max_tokens=MOST, **options
        ) as events:
            for _ in events:
                pass
            (call,) = events.get_final_completion().choices[0].message.tool_calls
        check_call(call.function.name, call.function.arguments)

    def structured(**options: Any) -> None:
        completion = api.chat.completions.parse(
            model=NAME, messages=[ASKED], response_format=City, max_tokens=MOST, **options
        )
        assert isinstance(completion.choices[0].message.parsed, City)

    def history() -> None:
        message = forced(tool_choice="required", parallel_tool_calls=False)
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny."}
        assert ask(message, result, tools=tools).choices
        assert ask(message, result).choices[0].message.content

    named = {"type": "function", "function": {"name": "get_weather"}}
    yield "text", lambda: ask().choices[0].message.content
    yield "stream", stream
    yield "tool required", lambda: forced(tool_choice="required")
    yield "tool named", lambda: forced(tool_choice=named)
    yield "tool streamed", streamed_call
    yield "tool free", lambda: ask(tools=tools).choices
    yield "structure", structured
    yield "history", history


@client
def openai_responses(address: str) -> Any:
    import openai

    api = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
    tools: Any = [{"type": "function", "strict": True, **FUNCTION}]

    def ask(*more: Any, **options: Any) -> Any:
        return api.responses.create(
            model=NAME, input=[ASKED, *more], max_output_tokens=MOST, **options
        )

    def forced() -> Any:
        call = ask(tools=tools, tool_choice="required").output[0]
        check_call(call.name, call.arguments)
        return call

    def structured() -> None:
        response = api.responses.parse(model=NAME, input=QUESTION, text_format=City)
        assert isinstance(response.output_parsed, City)

    def history() -> None:
        call = forced()
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
        assert ask(call, result, tools=tools).output

    yield "text", lambda: ask().output_text
    yield "stream", lambda: list(ask(stream=True))
    yield "tool required", forced
    yield "tool free", lambda: ask(tools=tools).output
    yield "structure", structured
    yield "history", history


@client
def anthropic(address: str) -> Any:
    from anthropic import Anthropic

    api = Anthropic(base_url=address, api_key="any", max_retries=0)
    tools: Any = [
        {"name": "get_weather", "description": "Get the weather", "input_schema": PARAMETERS}
    ]

    def ask(*more: Any, **options: Any) -> Any:
        messages: Any = [ASKED, *more]
        return api.messages.create(model=NAME, messages=messages, max_tokens=MOST, **options)

    def stream() -> None:
        with api.messages.stream(model=NAME, messages=[ASKED], max_tokens=MOST) as events:
            assert list(events.text_stream)

    def forced() -> Any:
        message = ask(tools=tools, tool_choice={"type": "any"})
        assert message.stop_reason == "tool_use"
        check_call(message.content[0].name, message.content[0].input)
        return message

    def structured() -> None:
        message = api.messages.parse(
            model=NAME, messages=[ASKED], max_tokens=MOST, output_format=City
        )
        assert isinstance(message.parsed_output, City)

    def history() -> None:
        called = forced()
        result = {"type": "tool_result", "tool_use_id": called.content[0].id, "content": "Sunny."}
        results = [result, {"type": "text", "text": "And now?"}]
        answer = [called.content[0]]
        assert ask(
            {"role": "assistant", "content": answer},
            {"role": "user", "content": results},
            tools=tools,
        ).content

    yield "text", lambda: ask().content[0].text
    yield "stream", stream
    yield "tool any", forced
    yield "tool free", lambda: ask(tools=tools).content
    yield "structure", structured
    yield "history", history


def langchain(model: Any) -> Any:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    def forced() -> None:
        answer = model.bind_tools([get_weather], tool_choice="any").invoke(QUESTION)
        check_call(answer.tool_calls[0]["name"], answer.tool_calls[0]["args"])

    def structured(**options: Any) -> None:
        assert isinstance(model.with_structured_output(City, **options).invoke(QUESTION), City)

    def history() -> None:
        call = {"name": "get_weather", "args": {"city": "Paris"}, "id": "call12345"}
        chat = [
            HumanMessage(QUESTION),
            AIMessage("", tool_calls=[call]),
            ToolMessage("Sunny.", tool_call_id="call12345"),
        ]
        model.bind_tools([get_weather]).invoke(chat)

    yield "text", lambda: model.invoke(QUESTION).text
    yield "stream", lambda: list(model.stream(QUESTION))
    yield "tool any", forced
    yield "tool free", lambda: list(model.bind_tools([get_weather]).stream(QUESTION))
    yield "structure", structured
    yield "structure by call", lambda: structured(method="function_calling")
    yield "history", history


@client
def langchain_openai(address: str) -> Any:
    from langchain_openai import ChatOpenAI

    options: Any = {"base_url": f"{address}/v1", "api_key": "any", "max_tokens": MOST}
    yield from langchain(ChatOpenAI(model=NAME, **options))


@client
def langchain_anthropic(address: str) -> Any:
    from langchain_anthropic import ChatAnthropic

    yield from langchain(
        ChatAnthropic(model=NAME, base_url=address, api_key="any", max_tokens=MOST)
    )


@client
def instructor(address: str) -> Any:
    import instructor
    import openai

    api = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)

    def ask(mode: Any, *more: Any, **options: Any) -> None:
        made = instructor.from_openai(api, mode=mode)
        asked: Any = {"model": NAME, "messages": [ASKED, *more], "max_tokens": MOST, **options}
        assert isinstance(made.chat.completions.create(response_model=City, **asked), City)

    def stream() -> None:
        made = instructor.from_openai(api)
        asked: Any = {"model": NAME, "messages": [ASKED], "max_tokens": MOST}
        *_, last = made.chat.completions.create_partial(response_model=City, **asked)
        assert City.model_validate(last.model_dump())

    call = {"type": "function", "id": "call12345", "function": {"name": "get_weather"}}
    call["function"]["arguments"] = '{"city": "Paris"}'  # type: ignore[index]
    history = (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call12345", "content": "Sunny."},
    )
    yield "structure by call", lambda: ask(instructor.Mode.TOOLS)
    yield "structure", lambda: ask(instructor.Mode.JSON_SCHEMA)
    yield "stream", stream
    yield "history", lambda: ask(instructor.Mode.TOOLS, *history)


@client
def pydantic_ai(address: str) -> Any:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{address}/v1", api_key="any")
    models = {
        "chat": OpenAIChatModel(NAME, provider=provider),
        "responses": OpenAIResponsesModel(NAME, provider=provider),
    }
    settings: Any = {"max_tokens": MOST}

    def run(agent: Any, **options: Any) -> Any:
        return LOOP.run_until_complete(agent.run(QUESTION, **options))

    async def stream(agent: Any) -> None:
        async with agent.run_stream(QUESTION) as result:
            assert [text async for text in result.stream_text()]

    for name, model in models.items():
        plain = Agent(model, model_settings=settings)
        by_call = Agent(model, output_type=City, model_settings=settings)
        native = Agent(model, output_type=NativeOutput(City), model_settings=settings)

        def structured(agent: Any) -> None:
            assert isinstance(run(agent).output, City)

        def history(plain: Any = plain, by_call: Any = by_call) -> None:
            messages = run(by_call).all_messages()
            assert run(plain, message_history=messages).output

        yield f"{name}: text", lambda plain=plain: run(plain).output
        yield f"{name}: stream", lambda plain=plain: LOOP.run_until_complete(stream(plain))
        yield f"{name}: structure by call", lambda agent=by_call: structured(agent)
        yield f"{name}: structure", lambda agent=native: structured(agent)
        yield f"{name}: history", history


@client
def openai_agents(address: str) -> Any:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    api = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
    tool = agents.function_tool(get_weather)
    forced = agents.ModelSettings(max_tokens=MOST, tool_choice="required")
    free = agents.ModelSettings(max_tokens=MOST)

    async def stream(agent: Any) -> None:
        run = agents.Runner.run_streamed(agent, QUESTION)
        assert [event async for event in run.stream_events()]

    def run(agent: Any) -> Any:
        return LOOP.run_until_complete(agents.Runner.run(agent, QUESTION, max_turns=3)).final_output

    def history(agent: Any) -> None:
        try:
            run(agent)
        except agents.MaxTurnsExceeded:
            pass  # it may call again and again
        except agents.ModelBehaviorError as error:
            if "max_output_tokens" not in str(error):  # or talk on and on
                raise

    for name, kind in {
        "chat": agents.OpenAIChatCompletionsModel,
        "responses": agents.OpenAIResponsesModel,
    }.items():
        made: Any = {"name": "A", "model": kind(model=NAME, openai_client=api)}
        plain = agents.Agent(**made, model_settings=free)
        calls = agents.Agent(
            **made, tools=[tool], model_settings=forced, tool_use_behavior="stop_on_first_tool"
        )
        answers = agents.Agent(**made, tools=[tool], model_settings=forced)
        shaped = agents.Agent(**made, output_type=City, model_settings=free)
        both = agents.Agent(**made, tools=[tool], output_type=City, model_settings=free)

        def called(agent: Any) -> None:
            assert run(agent).startswith("It is sunny in "), "the tool is not called"

        def structured(agent: Any) -> None:
            assert isinstance(run(agent), City)

        yield f"{name}: text", lambda agent=plain: run(agent)
        yield f"{name}: stream", lambda agent=plain: LOOP.run_until_complete(stream(agent))
        yield f"{name}: tool required", lambda agent=calls: called(agent)
        yield f"{name}: history", lambda agent=answers: history(agent)
        yield f"{name}: structure", lambda agent=shaped: structured(agent)
        yield f"{name}: structure and tools", lambda agent=both: structured(agent)


@client
def llm(address: str) -> Any:
    with tempfile.TemporaryDirectory() as home:
        os.environ["LLM_USER_PATH"] = home
        Path(home, "extra-openai-models.yaml").write_text(
            f"- model_id: ours\n  model_name: {NAME}\n  api_base: {address}/v1\n"
            "  supports_tools: true\n  supports_schema: true\n"
        )
        import llm

        model = llm.get_model("ours")
        model.key = "any"
        options: Any = {"max_tokens": MOST}

        def structured() -> None:
            response = model.prompt(QUESTION, schema=City, stream=False, **options)
            City.model_validate_json(response.text())

        def history() -> None:
            talk = model.conversation()
            talk.prompt(QUESTION, stream=False, **options).text()
            result = llm.ToolResult(name="get_weather", output="Sunny.", tool_call_id="c1")
            talk.prompt(tools=[get_weather], tool_results=[result], stream=False, **options).text()

        def free() -> None:
            model.prompt(QUESTION, tools=[get_weather], **options).tool_calls()

        yield "text", lambda: model.prompt(QUESTION, stream=False, **options).text()
        yield "stream", lambda: list(model.prompt(QUESTION, **options))
        yield "tool free", free
        yield "structure", structured
        yield "history", history
