"""Histories that other servers have written, or that no model of texts can read as a whole: they
reach the template, and a line says what was left out."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import mistral

from shardmlx.inference.chat_forms import by_turns
from shardmlx.inference.prompts import PromptEncoder
from shardmlx.server.anthropic_api import counted, read_message
from shardmlx.server.call_ids import with_short_ids
from shardmlx.server.chat_request import ServedModel
from shardmlx.server.model_names import ModelNames
from shardmlx.server.openai_errors import ApiError
from shardmlx.server.openai_requests import read_chat
from shardmlx.server.other_blocks import LEFT_OUT
from shardmlx.server.responses_api import read_response
from tests.helpers.chat_templates import tokenizer_with
from tests.helpers.http_serving import Agent, Letters

READERS = {"chat": read_chat, "response": read_response, "message": read_message}
USER: Any = {"role": "user", "content": "?"}
NEXT: Any = {"role": "user", "content": "So?"}


def terms(encoder: PromptEncoder) -> ServedModel:
    return ServedModel(
        names=ModelNames(("ours",)), encoder=encoder, most_tokens=4000, most_requests=8
    )


def told(api: str, history: list[Any]) -> list[Any]:
    """What the template is given of a history."""
    encoder = Agent()
    field = {"input": history} if api == "response" else {"messages": history, "max_tokens": 9}
    READERS[api](json.dumps(field).encode(), terms(encoder))
    return list(encoder.messages)


def anthropics(content: Any, *beside: Any) -> list[Any]:
    use = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
    return [
        USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, *beside]},
        NEXT,
    ]


PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0K"}
PDF = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0"}
FOUND = {
    "type": "search_result",
    "source": "https://a.example",
    "title": "Seas",
    "content": [{"type": "text", "text": "Deep."}, {"type": "text", "text": "Wide."}],
    "citations": {"enabled": True},
}
NOTE = {"type": "document", "title": "Note", "source": {"type": "text", "data": "Written."}}
BLOCKS = [
    (
        {"type": "tool_reference", "tool_name": "mcp__x"},
        "[tool_reference: the tool mcp__x is available]",
    ),
    ({"type": "image", "source": PNG}, f"[image, image/png {LEFT_OUT}]"),
    (
        {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}},
        f"[image, https://a.example/b.png {LEFT_OUT}]",
    ),
    (
        {"type": "document", "title": "A", "source": PDF},
        f"[document, A, application/pdf {LEFT_OUT}]",
    ),
    (NOTE, "[document, Note]\nWritten."),
    (
        {"type": "document", "source": {"type": "content", "content": FOUND["content"]}},
        "[document]\nDeep.\nWide.",
    ),
    (FOUND, "[search_result, Seas, https://a.example]\nDeep.\nWide."),
    ({"type": "of_tomorrow", "data": 5}, f"[of_tomorrow {LEFT_OUT}]"),
    ({"type": ["x"]}, f"[block {LEFT_OUT}]"),
]  # fmt: skip
"""Blocks in results of tools, and what is told in their place."""


@pytest.mark.parametrize(("block", "line"), BLOCKS)
def test_a_block_that_is_no_text_has_a_line_in_a_result(block: Any, line: str) -> None:
    said = [{"type": "text", "text": "Here:"}, block, {"type": "text", "text": "Good."}]
    _, called, result, _ = told("message", anthropics(said))
    assert result["tool_call_id"] == called["tool_calls"][0]["id"] == "toolu_1"
    first, *middle, last = result["content"].split("\n")
    assert (first, last) == ("Here:", "Good.")
    assert "\n".join(middle).startswith(line)


def test_a_result_may_be_such_a_block_alone_and_a_count_takes_it() -> None:
    history = anthropics([{"type": "image", "source": PNG}])
    assert told("message", history)[2]["content"] == f"[image, image/png {LEFT_OUT}]"
    body = json.dumps({"messages": history}).encode()
    assert counted(body, terms(Letters())) == {"input_tokens": len("So?")}


def test_a_file_that_a_tool_has_read_may_stand_beside_its_result() -> None:
    """Claude Code writes it so; an image of the user alone is asked about, and refused."""
    *_, beside, _ = told("message", anthropics("Read.", {"type": "document", "source": PDF}))
    assert beside == {"role": "user", "content": f"[document, application/pdf {LEFT_OUT}]"}
    with pytest.raises(ApiError) as caught:
        told("message", [{"role": "user", "content": [{"type": "image", "source": PNG}]}])
    assert caught.value.param == "messages.0.content.0.type"


IMAGE_URL: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}
CALL: Any = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}


def test_the_same_in_results_of_openais_apis() -> None:
    text = {"type": "text", "text": "Here:"}
    chat = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": [text, IMAGE_URL]},
        NEXT,
    ]
    assert told("chat", chat)[2]["content"] == f"Here:\n[image_url {LEFT_OUT}]"
    parts = [
        {"type": "input_text", "text": "Here:"},
        {"type": "input_image", "image_url": "data:image/png;base64,iVBO"},
        {"type": "input_file", "filename": "a.pdf", "file_data": "JVBER"},
    ]
    response = [
        USER,
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": parts},
        NEXT,
    ]
    lines = ["Here:", f"[input_image {LEFT_OUT}]", f"[input_file, a.pdf {LEFT_OUT}]"]
    assert told("response", response)[2]["content"] == "\n".join(lines)
    for api in ("chat", "response"):
        with pytest.raises(ApiError) as caught:
            told(api, [{"role": "user", "content": [IMAGE_URL]}])
        assert str(caught.value.param).endswith(".0.content.0.type")


SERVERS_OWN = [
    (
        {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"q": "a"}},
        f"[server_tool_use, web_search {LEFT_OUT}]",
    ),
    (
        {
            "type": "web_search_tool_result",
            "tool_use_id": "srvtoolu_1",
            "content": [
                {"type": "web_search_result", "title": "Seas", "url": "u", "encrypted_content": "x"}
            ],
        },
        f"[web_search_tool_result]\n[web_search_result, Seas, u {LEFT_OUT}]",
    ),
    (
        {
            "type": "web_search_tool_result",
            "tool_use_id": "a",
            "content": {"type": "web_search_tool_result_error", "error_code": "unavailable"},
        },
        f"[web_search_tool_result]\n[web_search_tool_result_error, unavailable {LEFT_OUT}]",
    ),
    (
        {
            "type": "code_execution_tool_result",
            "tool_use_id": "a",
            "content": {"type": "code_execution_result", "stdout": "4", "return_code": 0},
        },
        "[code_execution_tool_result]\n[code_execution_result]\n4",
    ),
    (
        {"type": "mcp_tool_result", "content": [{"type": "text", "text": "fog"}]},
        "[mcp_tool_result]\nfog",
    ),
    (
        {"type": "compaction", "content": "They spoke of ships."},
        "[compaction]\nThey spoke of ships.",
    ),
]


@pytest.mark.parametrize(("block", "line"), SERVERS_OWN)
def test_what_anthropics_servers_did_has_a_line_in_the_answer(block: Any, line: str) -> None:
    said = [{"type": "text", "text": "I look."}, block, {"type": "text", "text": "Ships."}]
    history = [USER, {"role": "assistant", "content": said}, NEXT]
    assert told("message", history)[1]["content"] == f"I look.\n{line}\nShips."


def test_what_openais_servers_did_has_a_line_too() -> None:
    history = [
        USER,
        {"type": "mcp_list_tools", "id": "a", "server_label": "s", "tools": [{"name": "t"}]},
        {"type": "mcp_call", "id": "b", "name": "find", "arguments": "{}", "output": "fog"},
        {"type": "web_search_call", "id": "c", "action": {"type": "search", "query": "q"}},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Ships."}]},
        NEXT,
    ]
    _, answer, _ = told("response", history)
    assert answer["content"] == f"[mcp_list_tools {LEFT_OUT}]\n\n[mcp_call, find]\nfog\n\nShips."


def test_a_field_of_a_text_in_a_result_is_refused_by_its_place() -> None:
    said = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "language": "de"}]
    with pytest.raises(ApiError) as caught:
        told("message", anthropics(said))
    assert caught.value.param == "messages.2.content.0.content.1.language"
    output = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b", "n": 1}]
    with pytest.raises(ApiError) as caught:
        told("response", [USER, {"type": "function_call_output", "call_id": "a", "output": output}])
    assert caught.value.param == "input.1.output.1.n"


# Thoughts.


def test_all_thoughts_of_an_answer_are_kept() -> None:
    think = [{"type": "thinking", "thinking": text, "signature": ""} for text in ("One.", "Two.")]
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    history = anthropics("fog")
    history[1]["content"] = [think[0], {"type": "text", "text": "Hm."}, think[1], use]
    _, answer, *_ = told("message", history)
    assert (answer["reasoning_content"], answer["content"]) == ("One.\n\nTwo.", "Hm.")
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "One."}]},
        {"type": "text", "text": "Hm."},
    ]
    for more, thought in (
        ({"reasoning_content": "One.", "reasoning": "One."}, "One."),
        ({"content": parts, "reasoning_content": "Two."}, "One.\n\nTwo."),
    ):
        _, answer, _ = told("chat", [USER, {"role": "assistant", "content": "Hm.", **more}, NEXT])
        assert (answer["reasoning_content"], answer["content"]) == (thought, "Hm.")


def test_items_of_one_answer_are_one_message_however_often_it_thinks() -> None:
    """Many templates want the roles by turns."""

    def thought(text: str) -> Any:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "name": "look", "arguments": "{}"}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Hm."}]}
    history = [
        USER,
        *(thought("One."), said, thought("Two."), {**call, "call_id": "a"}),
        *(thought("Three."), {**call, "call_id": "b"}),
        {"type": "function_call_output", "call_id": "a", "output": "fog"},
        {"type": "function_call_output", "call_id": "b", "output": "sun"},
    ]
    _, answer, first, second = told("response", history)
    assert (answer["reasoning_content"], answer["content"]) == ("One.\n\nTwo.\n\nThree.", "Hm.")
    assert [each["id"] for each in answer["tool_calls"]] == ["a", "b"]
    assert (first["tool_call_id"], second["tool_call_id"]) == ("a", "b")
    summary = [{"type": "summary_text", "text": "In short."}]
    others = {"type": "reasoning", "summary": summary, "encrypted_content": "x"}
    assert told("response", [USER, others, said])[1]["reasoning_content"] == "In short."


# Ids of calls.

MISTRALS = """{% for m in messages %}\
{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]\
{% elif m.role == 'tool' %}\
{% if m.tool_call_id is not defined or m.tool_call_id|length != 9 %}\
{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}\
[TOOL_RESULTS]{{ m.content }}|{{ m.tool_call_id }}[/TOOL_RESULTS]\
{% elif m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}{% set tool_call = c.function %}\
{% if c.id is not defined or c.id|length != 9 %}\
{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}\
{{ tool_call.name }}{{ tool_call.arguments|tojson }}|{{ c.id }};{% endfor %}</s>\
{% else %}{{ m.content }}</s>{% endif %}{% endfor %}{#- tools #}"""
"""A template with the checks of Mistral's."""

MOST = """{% for m in messages %}{{ m.role }}:{{ m.content }}\
{% for c in m.tool_calls or [] %}{% set tool_call = c.function %}|{{ c.id }}{% endfor %}\
{{ '|' ~ m.tool_call_id if m.tool_call_id else '' }};{% endfor %}{#- tools #}"""
"""A template that takes any id."""


def text_of(template: str, api: str, history: list[Any]) -> str:
    plain = tokenizer_with(template, "</s>")
    tokenizer = TokenizerWrapper(
        plain._tokenizer,
        tool_call_start=mistral.tool_call_start,
        tool_call_end=mistral.tool_call_end,
        tool_parser=mistral.parse_tool_call,
    )
    encoder = PromptEncoder(tokenizer=tokenizer)
    field = {"input": history} if api == "response" else {"messages": history, "max_tokens": 9}
    (request,) = READERS[api](json.dumps(field).encode(), terms(encoder)).requests
    return encoder.untokenized(*request.tokens)


def history_of(api: str, *ids: str | None) -> list[Any]:
    """Calls with these ids, and their results in the other order."""
    function = {"name": "look", "arguments": "{}"}
    back = list(enumerate(ids))[::-1]
    if api == "chat":
        calls = [{"id": each, "type": "function", "function": function} for each in ids]
        results: list[Any] = [
            {"role": "tool", "tool_call_id": each, "content": f"r{n}"} for n, each in back
        ]
        return [USER, {"role": "assistant", "tool_calls": calls}, *results, NEXT]
    if api == "response":
        items = [{"type": "function_call", "call_id": each, **function} for each in ids]
        outputs = [
            {"type": "function_call_output", "call_id": e, "output": f"r{n}"} for n, e in back
        ]
        return [USER, *items, *outputs, NEXT]
    uses: list[Any] = [
        {"type": "tool_use", "id": each, "name": "look", "input": {}} for each in ids
    ]
    blocks = [{"type": "tool_result", "tool_use_id": e, "content": f"r{n}"} for n, e in back]
    return [USER, {"role": "assistant", "content": uses}, {"role": "user", "content": blocks}, NEXT]


def ids_in(text: str) -> tuple[list[str], dict[str, str]]:
    """The ids of calls in a text of Mistral's, and those of results by what they say."""
    calls = [each.rpartition("|")[2] for each in text.split(";")[:-1]]
    results = [each.partition("[/TOOL")[0] for each in text.split("[TOOL_RESULTS]")[1:]]
    return calls, {said: own for said, _, own in (each.partition("|") for each in results)}


@pytest.mark.parametrize("api", READERS)
def test_ids_of_other_servers_are_replaced_alike_in_calls_and_results(api: str) -> None:
    given = ("call_abcdefghijklmnop", "toolu_01ABC")
    text = text_of(MISTRALS, api, history_of(api, *given))
    calls, results = ids_in(text)
    assert results == {"r0": calls[0], "r1": calls[1]}
    assert [len(each) for each in calls] == [9, 9]
    assert calls[0].isalnum()
    assert calls[0] != calls[1]
    # A later turn has the same, so that its beginning is found in the prefix cache.
    assert text_of(MISTRALS, api, [*history_of(api, *given), USER]).startswith(text)
    for each in given:
        assert each not in text
        assert each in text_of(MOST, api, history_of(api, *given))


@pytest.mark.parametrize("api", READERS)
def test_ids_that_the_template_takes_stay(api: str) -> None:
    text = text_of(MISTRALS, api, history_of(api, "a1b2c3d4e", "call_2"))
    assert ids_in(text)[0][0] == ids_in(text)[1]["r0"] == "a1b2c3d4e"


def test_calls_without_ids_get_some_and_results_those_of_the_calls_before() -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    turn: list[Any] = [
        {"role": "assistant", "tool_calls": [{**call, "id": ""}, {**call, "id": ""}]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    first, one, two, second, three, four = with_short_ids([*turn, *turn])
    ids = [call["id"] for message in (first, second) for call in message["tool_calls"]]
    assert [each["tool_call_id"] for each in (one, two, three, four)] == ids
    assert len(set(ids)) == 4


def test_another_fault_of_the_template_is_told_as_it_is() -> None:
    template = "{{ raise_exception('no such chat') }}{#- tools #}"
    with pytest.raises(ApiError, match="no such chat"):
        text_of(template, "chat", history_of("chat", "call_1"))


# Halves of characters, and what no template can write.


def body_with(api: str, text: str, arguments: str = "{}") -> bytes:
    """A history of which a text and a call's arguments are written as they are given."""
    call = {
        "chat": '{"role": "assistant", "tool_calls": [{"id": "a", "function": '
        '{"name": "look", "arguments": "%s"}}]}',
        "response": '{"type": "function_call", "call_id": "a", "name": "look", "arguments": "%s"}',
        "message": '{"role": "assistant", "content": [{"type": "tool_use", "id": "a", '
        '"name": "look", "input": {}}, {"type": "text", "text": "%s"}]}',
    }[api]
    field = "input" if api == "response" else "messages"
    more = '"max_tokens": 9, ' if api == "message" else ""
    user = '{"role": "user", "content": "%s"}'
    items = ", ".join([user % text, call % arguments, user % "So?"])
    return f'{{{more}"{field}": [{items}]}}'.encode()


HALVES = [
    (r"cut\ud83d", "cut\ufffd"),
    (r"\ude00 and \uD83D\uDE00", "\ufffd and \N{GRINNING FACE}"),
    (r"\\ud83d \ud83d\\ \ud83dx", "\\ud83d \ufffd\\ \ufffdx"),
    (r"\ud83d\ud83d\ude00", "\ufffd\N{GRINNING FACE}"),
]
"""Texts as JSON writes them, and what they say."""


@pytest.mark.parametrize("api", READERS)
@pytest.mark.parametrize(("written", "said"), HALVES)
def test_half_a_character_is_told_as_the_replacement_character(
    api: str, written: str, said: str
) -> None:
    encoder = Agent()
    READERS[api](body_with(api, written), terms(encoder))
    assert encoder.messages[0]["content"] == said


@pytest.mark.parametrize("api", ["chat", "response"])
def test_half_a_character_within_the_arguments_of_a_call_too(api: str) -> None:
    encoder = Agent()
    READERS[api](body_with(api, "?", r"{\"at\": \"cut\\ud83d\"}"), terms(encoder))
    (call,) = encoder.messages[1]["tool_calls"]
    assert call["function"]["arguments"] == {"at": "cut\ufffd"}


def test_a_body_that_is_no_utf_8_is_refused_with_its_halves() -> None:
    body = json.dumps({"messages": [USER]}).encode().replace(b"?", b"\xff\\ud83d")
    with pytest.raises(ApiError, match="not JSON"):
        read_chat(body, terms(Letters()))


@pytest.mark.parametrize("depth", [20, 99, 100, 900, 20_000])
def test_arguments_too_deep_for_a_template_are_their_text(depth: int) -> None:
    written = '{"at": ' + "[" * depth + "]" * depth + "}"
    call = {"id": "a1b2c3d4e", "function": {"name": "look", "arguments": written}}
    history = [USER, {"role": "assistant", "tool_calls": [call]}, NEXT]
    if depth < 1000:  # the parrot's prompts have 4000 tokens
        assert "look{" in text_of(MISTRALS, "chat", history)
    given = told("chat", history)[1]["tool_calls"][0]["function"]["arguments"]
    assert given == (json.loads(written) if depth < 100 else {"arguments": written})


# What stands beside the result of a tool, in messages of their own.

SHOT: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}
SEEN: Any = {"type": "input_image", "image_url": "data:image/png;base64,iVBO"}


def beside(api: str, *messages: Any) -> list[Any]:
    """A call and its result, and then these messages."""
    if api == "chat":
        answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        return [USER, answer, {"role": "tool", "tool_call_id": "call_1", "content": "k"}, *messages]
    if api == "response":
        call = {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"}
        output = {"type": "function_call_output", "call_id": "call_1", "output": "k"}
        return [USER, call, output, *messages]
    *first, _ = anthropics("k")
    return [*first, *messages]


PICTURES = [
    ("chat", SHOT, f"[image_url {LEFT_OUT}]"),
    ("response", SEEN, f"[input_image {LEFT_OUT}]"),  # as Codex shows a picture
    ("message", {"type": "image", "source": PNG}, f"[image, image/png {LEFT_OUT}]"),
]


@pytest.mark.parametrize(("api", "picture", "line"), PICTURES)
def test_what_a_tool_has_read_may_come_as_messages_of_the_user(
    api: str, picture: Any, line: str
) -> None:
    shown = {"role": "user", "content": [picture]}
    *_, result, first, second, last = told(api, beside(api, shown, shown, NEXT))
    assert (result["content"], result["tool_call_id"][-2:]) == ("k", "_1")
    assert (first, second) == ({"role": "user", "content": line},) * 2
    assert last == NEXT


@pytest.mark.parametrize(("api", "picture", "line"), PICTURES)
def test_a_picture_of_the_user_is_refused_after_an_answer(
    api: str, picture: Any, line: str
) -> None:
    answer = {"role": "assistant", "content": "Fog."}
    with pytest.raises(ApiError) as caught:
        told(api, beside(api, answer, {"role": "user", "content": [picture]}))
    assert str(caught.value.param).endswith(".4.content.0.type")


def test_pictures_and_speech_of_an_answer_have_lines() -> None:
    for more, text in (
        ({"content": "Here.", "images": [SHOT]}, f"Here.\n[image_url {LEFT_OUT}]"),
        ({"content": None, "images": ["iVBO"]}, f"[images {LEFT_OUT}]"),
        ({"content": None, "audio": {"id": "audio_1"}}, f"[audio {LEFT_OUT}]"),
        ({"audio": {"id": "audio_1", "transcript": "Fog."}}, "[audio]\nFog."),
        ({"content": "a", "audio": None, "images": []}, "a"),
    ):
        assert told("chat", [USER, {"role": "assistant", **more}, NEXT])[1]["content"] == text


def test_texts_without_a_type_or_with_none_do_not_end_a_conversation() -> None:
    """LangChain writes an id into texts, and texts into lists of parts."""
    text = {"type": "text", "text": "b", "id": "lc_1"}
    assert told("chat", [{"role": "user", "content": ["a", text]}])[0]["content"] == "ab"
    empty = [{"type": "text", "text": None}, {"type": "refusal", "refusal": None}, "a"]
    assert told("chat", [USER, {"role": "assistant", "content": empty}])[1]["content"] == "a"
    assert told("message", anthropics(["a", {"type": "text"}]))[2]["content"] == "a\n"
    with pytest.raises(ApiError) as caught:
        told("chat", [{"role": "user", "content": [{"type": "text", "text": None}]}])
    assert caught.value.param == "messages.0.content.0.text"


# Tools that OpenAI describes to its own models, and what they alone can read.

RUN_BY_CLIENTS = [
    (
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "output": "a.txt"},
        ("local_shell", {"type": "exec", "command": ["ls"]}, "a.txt"),
    ),
    (
        {"type": "local_shell_call", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "function_call_output", "output": "a.txt"},  # Codex's
        ("local_shell", {"type": "exec", "command": ["ls"]}, "a.txt"),
    ),
    (
        {"type": "shell_call", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "output": [{"stdout": "a.txt", "stderr": ""}]},
        ("shell", {"commands": ["ls"]}, "[block]\na.txt"),
    ),
    (
        {"type": "apply_patch_call", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "status": "completed", "output": "ok"},
        ("apply_patch", {"type": "delete_file", "path": "a"}, "ok"),
    ),
    (
        {"type": "computer_call", "action": {"type": "click", "x": 1}},
        {
            "type": "computer_call_output",
            "output": {"type": "computer_screenshot", "file_id": "file_1"},
        },
        ("computer", {"type": "click", "x": 1}, f"[computer_screenshot, file_1 {LEFT_OUT}]"),
    ),
]


@pytest.mark.parametrize(("call", "output", "expected"), RUN_BY_CLIENTS)
def test_calls_of_tools_that_openai_describes_are_calls(
    call: Any, output: Any, expected: tuple[str, Any, str]
) -> None:
    history = [USER, {**call, "call_id": "c1"}, {**output, "call_id": "c1"}, NEXT]
    _, answer, result, _ = told("response", history)
    ((call_id, function),) = [(each["id"], each["function"]) for each in answer["tool_calls"]]
    assert (function["name"], function["arguments"], result["content"]) == expected
    assert call_id == result["tool_call_id"] == "c1"


@pytest.mark.parametrize("kind", ["compaction", "context_compaction", "program", "mcp_call"])
def test_what_only_openais_servers_can_read_has_a_line(kind: str) -> None:
    history = [USER, {"type": kind, "id": "a", "encrypted_content": "x" * 500}, NEXT]
    assert told("response", history)[1]["content"] == f"[{kind} {LEFT_OUT}]"


# Roles by turns.

BY_TURNS = """{%- set ns = namespace(count=0) %}{% for m in messages %}\
{% if m.role != 'tool' and not m.tool_calls %}\
{% if (m.role == 'user') != (ns.count % 2 == 0) %}{{ raise_exception('by turns') }}{% endif %}\
{% set ns.count = ns.count + 1 %}{% endif %}{{ m.role }}:{{ m.content }}\
{% for c in m.tool_calls or [] %}{% set tool_call = c.function %}!{{ tool_call.name }}\
{% endfor %};{% endfor %}{#- tools #}"""
"""A template with the check of Mistral's: calls and results do not count."""

KINDS = {"u": "user", "a": "assistant", "c": "assistant", "t": "tool"}


@pytest.mark.parametrize(
    ("chat", "text"),
    [
        ("ua ub", "user:a\n\nb;"),
        ("ua ab uc ud ue", "user:a;assistant:b;user:c\n\nd\n\ne;"),
        ("ua ab ac ud", "user:a;assistant:b\n\nc;user:d;"),
        ("ua cb tc ud", "user:a;assistant:b!look;tool:c\n\nd;"),
        ("ua cb tc td ue uf", "user:a;assistant:b!look;tool:c;tool:d\n\ne\n\nf;"),
        ("ua cb tc ad ae uf", "user:a;assistant:b!look;tool:c;assistant:d\n\ne;user:f;"),
        ("ua ub cc td", "user:a\n\nb;assistant:c!look;tool:d;"),
        ("ua cb tc ad ue", "user:a;assistant:b!look;tool:c;assistant:d;user:e;"),
    ],
)
def test_a_template_that_wants_the_roles_by_turns_gets_them(chat: str, text: str) -> None:
    """An interrupted answer leaves two messages of the user; Claude Code writes beside results."""
    calls = {"tool_calls": [CALL]}
    history: list[Any] = [
        {"role": KINDS[each[0]], "content": each[1:], **(calls if each[0] == "c" else {})}
        for each in chat.split()
    ]
    assert text_of(BY_TURNS, "chat", history) == text
    takes_all = BY_TURNS.replace("raise_exception", "")
    assert text_of(takes_all, "chat", history).count(":") == len(history)


def test_what_two_answers_thought_and_called_is_one_answer() -> None:
    first = {"role": "assistant", "content": "a", "reasoning_content": "One."}
    second = {"role": "assistant", "content": "b", "reasoning_content": "Two.", "name": "x"}
    last = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert by_turns([USER, first, second, last, last]) == [
        USER,
        {
            "role": "assistant",
            "content": "a\n\nb",
            "reasoning_content": "One.\n\nTwo.",
            "name": "x",
            "tool_calls": [CALL],
        },
        last,
    ]


def test_roles_by_turns_take_time_that_grows_with_the_text_alone() -> None:
    many = [{"role": "user", "content": 20 * "x"}] * 100_000
    begun = time.process_time()
    (only,) = by_turns(many)
    assert len(only["content"]) == 22 * len(many) - 2
    assert time.process_time() - begun < 5


def test_ids_and_turns_are_mended_together() -> None:
    """Claude Code with a model of Mistral's: foreign ids, and a reminder beside the result."""
    is_long = "m.tool_call_id and m.tool_call_id|length != 9"
    check = f"{{% if {is_long} %}}{{{{ raise_exception('9') }}}}{{% endif %}}"
    template = BY_TURNS.replace("{{ m.role }}:", check + "{{ m.role }}:")
    *first, _ = anthropics("k", {"type": "text", "text": "<system-reminder>"})
    answer = {"role": "assistant", "content": "Fog."}
    text = text_of(template, "message", [*first, answer, NEXT])
    said = "user:?;assistant:!look;tool:k\n\n<system-reminder>;assistant:Fog.;user:So?;"
    assert text == said
