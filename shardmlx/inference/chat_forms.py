"""The text of a chat by its template, in another form where the template does not take it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.errors import UserError, one_line
from shardmlx.inference.answer_format import GENERIC_CALLS, Tool

Message = dict[str, Any]

HOW_TO_CALL = """You can call functions. Each line below describes one, as JSON:
{}

To call a function, answer with JSON alone, in this form:
{}
To call several, write each in a line of its own. You are then told their results. If no function \
helps, answer in words."""


def template_text(
    tokenizer: TokenizerWrapper,
    way: str | None,
    chat: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    is_begun: bool,
    arguments: Mapping[str, Any],
) -> str:
    """Return the text of a chat, up to its next message or, if that ``is_begun``, within it.

    The first form counts that the template takes and of which it leaves out no system message; else
    the first that it takes: it may write them otherwise. A template that refuses several system
    messages, or leaves one out, gets a single one at the beginning; if it refuses that too, within
    the first message of the user. One that refuses all of these gets the roles by turns. Tools, of
    which the model is told in this ``way``, are never left out. Raises ``UserError``.
    """
    forms, must_hold = [chat], ""
    if way == "generic":
        told = with_tools_as_text(chat, tools)
        knows_calls = "tool" in str(tokenizer.chat_template) and not tools
        forms = [chat, told] if knows_calls else [told]
        chat, must_hold, tools = told, description(tools) if tools else "", ()
    if any(message.get("role") == "system" for message in chat[1:]):
        chat = with_one_system(chat)
        forms.append(chat)
    if chat and chat[0].get("role") == "system":
        forms.append(without_system(chat))
    forms += [merged for form in forms if len(merged := by_turns(form)) < len(form)]
    options = {**({"tools": tools} if tools else {}), **arguments}
    systems = [each["content"].strip() for each in forms[0] if each.get("role") == "system"]
    refusal, otherwise = "", None
    for form in forms:
        try:
            text: str = tokenizer.apply_chat_template(
                form,
                tokenize=False,
                continue_final_message=is_begun,
                add_generation_prompt=not is_begun,
                **options,
            )
        except Exception as error:  # a template may raise whatever it likes
            refusal = refusal or one_line(error)
        else:
            if must_hold not in text:
                refusal = refusal or "it leaves out the system message"
            elif all(system in text for system in systems):
                return text
            else:
                otherwise = otherwise or text
    if otherwise is not None:
        return otherwise
    raise UserError(f"the chat template does not take it: {refusal}")


def description(tools: Sequence[Tool]) -> str:
    """Return what a model is told whose template knows no tools."""
    described = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return HOW_TO_CALL.format("\n".join(described), _call("NAME", {"ARGUMENT": "VALUE"}))


def with_tools_as_text(chat: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> list[Message]:
    """Return a chat of texts alone: the system message describes ``tools``, an earlier call is the
    text by which the model would call. Its result and what the user then says are one message, for
    templates want the roles by turns."""
    told: list[Message] = []
    names: dict[str, str] = {}
    follows_result = False
    for message in chat:
        said = {name: each for name, each in message.items() if not name.startswith("tool_call")}
        if calls := message.get("tool_calls"):
            functions = [call["function"] for call in calls]
            names |= {call.get("id"): call["function"]["name"] for call in calls}
            written = [_call(each["name"], each.get("arguments")) for each in functions]
            said["content"] = "\n".join(filter(None, [message.get("content"), *written]))
        is_result = message["role"] == "tool"
        if is_result:
            name = names.get(message.get("tool_call_id", ""), message.get("name"))
            which = f"Result of {name}" if name else "Result"
            said = {"role": "user", "content": f"{which}:\n{message.get('content') or ''}"}
        if told and told[-1]["role"] == said["role"] == "user" and (is_result or follows_result):
            told[-1]["content"] += f"\n\n{said['content']}"
        else:
            told.append(said)
        follows_result = said["role"] == "user" and (is_result or follows_result)
    if tools:
        if not (told and told[0]["role"] == "system"):
            told.insert(0, {"role": "system", "content": ""})
        parts = (told[0]["content"], description(tools))
        told[0]["content"] = "\n\n".join(filter(None, parts))
    return told


def with_one_system(chat: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a chat that begins with all that its system messages say, and has no other one."""
    said = [message["content"] for message in chat if message["role"] == "system"]
    others = [dict(message) for message in chat if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, said))}, *others]


def without_system(chat: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a chat whose first user message begins with what its system message says."""
    system, *rest = map(dict, chat)
    if not (rest and rest[0]["role"] == "user"):
        return [{**system, "role": "user"}, *rest]
    return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]


def by_turns(chat: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return a chat in which no two messages of the user, or of the assistant, follow each other,
    and none of the user a result: two of them are one. An interrupted answer leaves such, and what
    a client writes beside a result."""
    groups: list[list[Mapping[str, Any]]] = []
    for message in chat:
        last = groups[-1][-1] if groups else {}
        role, before = message.get("role"), last.get("role")
        is_more = role == "user" and before in ("user", "tool")
        goes_on = role == before == "assistant" and not last.get("tool_calls")
        if is_more or goes_on:
            groups[-1].append(message)
        else:
            groups.append([message])
    return [_joined(group) for group in groups]


def _joined(messages: Sequence[Mapping[str, Any]]) -> Message:
    """Return one message that says what several say; what they have besides, the first counts."""
    joined: Message = {}
    for message in reversed(messages):
        joined |= message
    for name in ("content", "reasoning_content"):
        if name in joined:
            said = (message.get(name) for message in messages)
            joined[name] = "\n\n".join(filter(None, said))
    return joined


def _call(name: str, arguments: Any) -> str:
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return GENERIC_CALLS.begun(name) + written + GENERIC_CALLS.after
