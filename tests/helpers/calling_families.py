"""Chat templates of families that call tools and think, in our own words, in the form of theirs.

Each marks what the assistant says, as TRL's training templates do, but begins after the prompt with
which the template asks for an answer. Without these marks, ``plain`` is what such models have.
"""

from __future__ import annotations

from typing import Any

BEGIN, END = "{% generation %}", "{% endgeneration %}"

_LATEST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
"""Sets ``ns.last`` to the number of the last question."""

_PARTS = (
    "{% set said = m.content or '' %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
"""Sets ``said`` and ``thought`` of a message."""


def plain(template: str) -> str:
    """Return a template without the marks."""
    return template.replace(BEGIN, "").replace(END, "")


def _turns(answer: str, others: str, ask: str, begin: str = "") -> str:
    return (
        f"{begin}{{% for m in messages %}}{{% if m.role == 'assistant' %}}{answer}"
        f"{{% else %}}{others}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{ask}{{% endif %}}"
    )


def _calls(each: str, between: str = "") -> str:
    """Return the calls of a message, each with its name for ``NAME`` and ``ARGS`` as JSON."""
    each = each.replace("NAME", "{{ c.function.name }}")
    each = each.replace("ARGS", "{{ c.function.arguments | tojson }}")
    separator = f"{{{{ '' if loop.last else '{between}' }}}}" if between else ""
    return f"{{% for c in m.tool_calls or [] %}}{each}{separator}{{% endfor %}}"


_JSON_CALLS = _calls('\n<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>')
_TAGGED_CALLS = _calls(
    "\n<tool_call>\n<function=NAME>\n{% for k, v in c.function.arguments.items() %}<parameter="
    "{{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
_IM_OTHERS = (
    "{% if m.role == 'tool' %}{{ '' if loop.previtem.role == 'tool' else '<|im_start|>user' }}\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>"
    "{{ '' if loop.nextitem and loop.nextitem.role == 'tool' else '<|im_end|>\n' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
)
_IM = "<|im_start|>assistant\n"

_IS_AFTER = "{% set is_after = loop.index0 > ns.last %}"

_GPT_CALL = (
    "{% set c = m.tool_calls[0].function %}{% set ns.name = c.name %}<|start|>assistant"
    + BEGIN
    + " to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}"
    + "<|call|>"
    + END
)

CALLING = {
    "qwen 2.5": _turns(
        f"{_IM}{BEGIN}{{{{ m.content or '' }}}}{_JSON_CALLS}<|im_end|>\n{END}", _IM_OTHERS, _IM
    ),
    # Opens a thought, and writes it after the last question only.
    "qwen 3.5": _LATEST
    + _turns(
        f"{_PARTS}{_IS_AFTER}{_IM}{{{{ '<think>\n' if is_after else '' }}}}{BEGIN}"
        "{{ thought ~ '\n</think>\n\n' if is_after else '' }}{{ said }}"
        f"{_TAGGED_CALLS}<|im_end|>\n{END}",
        _IM_OTHERS,
        f"{_IM}<think>\n",
    ),
    # Asks for an answer without a thought.
    "qwen 3.5, small": _LATEST
    + _turns(
        f"{_PARTS}{_IS_AFTER}{_IM}"
        "{{ '<think>\n\n</think>\n\n' if is_after and not thought else '' }}"
        f"{BEGIN}"
        "{{ '<think>\n' ~ thought ~ '\n</think>\n\n' if is_after and thought else '' }}{{ said }}"
        f"{_TAGGED_CALLS}<|im_end|>\n{END}",
        _IM_OTHERS,
        f"{_IM}<think>\n\n</think>\n\n",
    ),
    # A result stands in the turn of its call, before what is said there; so does the next answer.
    "gemma 4": (
        "<bos>{% for m in messages %}{% if m.role != 'tool' %}"
        "{% set goes_on = loop.previtem and loop.previtem.role == 'tool' %}"
        "{% if not goes_on %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{% endif %}"
        "{% if m.role == 'assistant' %}{% set n = loop.index0 %}"
        + BEGIN
        + _calls(
            "<|tool_call>call:NAME{ {% for k, v in c.function.arguments | dictsort %}{{ k }}:"
            "{{ v }}{% endfor %} }<tool_call|>"
        )
        + END
        + "{% set scan = namespace(on=true) %}{% for t in messages[n + 1:] %}"
        "{% if t.role != 'tool' %}{% set scan.on = false %}{% elif scan.on %}"
        "<|tool_response>response:{{ m.tool_calls[0].function.name }}:{{ t.content }}"
        "<tool_response|>{% endif %}{% endfor %}"
        + BEGIN
        + "{{ (m.content or '') | trim }}"
        + END
        + "{% set is_open = loop.nextitem and loop.nextitem.role == 'tool' %}"
        + "{% if not is_open %}" + BEGIN + "<turn|>\n" + END + "{% endif %}"
        "{% else %}{{ m.content | trim }}<turn|>\n{% endif %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn>model\n{% endif %}"
    ),
    # A result names its call; an answer's end is another one when a question follows.
    "gpt-oss": "{% set ns = namespace(name='') %}"
    + _turns(
        "{% if m.tool_calls %}"
        + _GPT_CALL
        + "{% else %}<|start|>assistant"
        + BEGIN
        + "{% if loop.last and m.reasoning_content %}<|channel|>analysis<|message|>"
        "{{ m.reasoning_content }}<|end|><|start|>assistant{% endif %}"
        "<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '' }}"
        + END
        + "{{ '' if loop.last else '<|end|>' }}{% endif %}",
        "{% if m.role == 'tool' %}<|start|>functions.{{ ns.name }} to=assistant<|channel|>"
        "commentary<|message|>{{ m.content | tojson }}<|end|>{% else %}<|start|>{{ m.role }}"
        "<|message|>{{ m.content }}<|end|>{% endif %}",
        "<|start|>assistant",
    ),
    # Joins arguments with its own text. What is said beside a call comes before it.
    "deepseek 3": _turns(
        "{{ '' if loop.previtem.role == 'tool' else '<｜Assistant｜>' }}" + BEGIN
        + "{{ (m.content or '').split('</think>')[-1] }}{% for c in m.tool_calls or [] %}"
        "{{ '<｜call｜>' + c.function.name + '\n```json\n' + c.function.arguments + '\n```' }}"
        "{% endfor %}<｜end｜>" + END,
        "{% if m.role == 'tool' %}<｜output｜>{{ m.content }}<｜/output｜>{% else %}"
        "{{ '<｜User｜>' if m.role == 'user' }}{{ m.content }}{% endif %}",
        "{{ '' if messages[-1].role == 'tool' else '<｜Assistant｜>' }}",
        begin="<｜begin｜>",
    ),
    # Leaves out what is said beside a call.
    "llama 3.1": _turns(
        "<|start|>assistant<|end|>\n\n" + BEGIN + "{% if m.tool_calls %}"
        + _calls('{"name": "NAME", "parameters": ARGS}')
        + "{% else %}{{ m.content | trim }}{% endif %}<|eot|>" + END,
        "<|start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end|>\n\n"
        "{{ m.content | tojson if m.role == 'tool' else m.content | trim }}<|eot|>",
        "<|start|>assistant<|end|>\n\n",
        begin="<|begin|>",
    ),
    # Nothing stands after an answer.
    "glm 4.5": _LATEST
    + _turns(
        f"{_PARTS}{_IS_AFTER}<|assistant|>{BEGIN}"
        "{{ '\n<think>' ~ (thought if is_after else '') ~ '</think>' }}"
        "{{ '\n' ~ said if said else '' }}"
        + _calls(
            "\n<tool_call>NAME\n{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}"
            "</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>"
        )
        + END,
        "<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}",
        "<|assistant|>",
        begin="[gMASK]<sop>",
    ),
    "lfm 2.5": _turns(
        f"{_IM}{BEGIN}{{{{ m.content or '' }}}}{{% if m.tool_calls %}}<|tool_call_start|>["
        + _calls(
            "NAME({% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}"
            "{% endfor %})",
            between=", ",
        )
        + f"]<|tool_call_end|>{{% endif %}}<|im_end|>\n{END}",
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n",
        _IM,
        begin="<|startoftext|>",
    ),
    # An empty thought stands before what is said, and the prompt opens one on a line of its own.
    "nemotron 3": _LATEST
    + _turns(
        f"{_PARTS}{_IS_AFTER}{_IM}{{{{ '<think>\n' if is_after and thought else '' }}}}{BEGIN}"
        "{{ thought ~ '\n</think>\n' if is_after and thought else '<think></think>' }}{{ said }}"
        f"{_TAGGED_CALLS}\n<|im_end|>\n{END}",
        _IM_OTHERS,
        f"{_IM}<think>\n",
        begin="<|im_start|>system\n<|im_end|>\n",
    ),
    "mistral 3": _turns(
        BEGIN + "{% if m.tool_calls %}[TOOL_CALLS] ["
        + _calls('{"name": "NAME", "arguments": ARGS, "id": "{{ c.id }}"}', between=", ")
        + "]{% else %} {{ m.content }}{% endif %}</s>" + END,
        "{% if m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]{% else %}"
        "[INST] {{ m.content }}[/INST]{% endif %}",
        "",
        begin="<s>",
    ),
    "kimi k2": _turns(
        "<|im_assistant|>assistant<|im_middle|>" + BEGIN + "{{ m.content or '' }}"
        + _calls("<|call|>functions.NAME:{{ loop.index0 }}<|argument|>ARGS<|/call|>")
        + "<|im_end|>" + END,
        "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{% if m.role == 'tool' %}## Return of "
        "{{ m.tool_call_id }}\n{% endif %}{{ m.content }}<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>",
    ),
    # Writes a plan beside a call, and marks an answer.
    "command r7b": _turns(
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>" + BEGIN
        + "{% if m.tool_calls %}{% if m.content %}<|START_THINKING|>{{ m.content }}"
        "<|END_THINKING|>{% endif %}<|START_ACTION|>["
        + _calls('{"tool_name": "NAME", "parameters": ARGS}', between=", ")
        + "]<|END_ACTION|>{% else %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}"
        "<|END_OF_TURN_TOKEN|>" + END,
        "<|START_OF_TURN_TOKEN|><|{{ 'SYSTEM' if m.role == 'tool' else m.role | upper }}_TOKEN|>"
        "{% if m.role == 'tool' %}<|START_TOOL_RESULT|>{{ {'content': m.content} | tojson }}"
        "<|END_TOOL_RESULT|>{% else %}{{ m.content }}{% endif %}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    ),
    # Leaves out thoughts.
    "deepseek r1": _turns(
        "<｜Assistant｜>" + BEGIN + "{{ (m.content or '').split('</think>')[-1] }}"
        + _calls("<｜call｜>NAME\n```json\nARGS\n```") + "<｜end｜>" + END,
        "{% if m.role == 'tool' %}<｜output｜>{{ m.content }}<｜/output｜>{% else %}"
        "{{ '<｜User｜>' if m.role == 'user' }}{{ m.content }}{% endif %}",
        "<｜Assistant｜><think>\n",
        begin="<｜begin｜>",
    ),
}  # fmt: skip


def _call(i: int, name: str, arguments: object) -> dict[str, object]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{i:05}", "type": "function", "function": function}


_CALL = _call(0, "get_weather", {"city": "Nassau"})
_OTHER = _call(1, "get_wind", {"days": 5})
_LATER = _call(2, "get_tide", {"harbour": "of Nassau"})


def _user(text: str = "Weather in Nassau?") -> dict[str, object]:
    return {"role": "user", "content": text}


def _tool(i: int = 0, text: str = "sunny, 30 degrees") -> dict[str, object]:
    return {"role": "tool", "tool_call_id": f"call{i:05}", "name": "get_weather", "content": text}


def _said(text: str | None, **others: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **others}


_REST = (_tool(), _said("Sunny."), _user("Thanks."), _said("Welcome."))

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "no content": [_user(), {"role": "assistant", "tool_calls": [_CALL]}, *_REST],
    "null": [_user(), _said(None, tool_calls=[_CALL]), *_REST],
    "an empty content": [_user(), _said("", tool_calls=[_CALL]), *_REST],
    "content and call": [_user(), _said("Let me look.", tool_calls=[_CALL]), *_REST],
    "a call last": [_user("Hi."), _said("Ahoy."), _user(), _said("", tool_calls=[_CALL])],
    "two calls": [
        *(_user(), _said("", tool_calls=[_CALL, _OTHER]), _tool(), _tool(1, "a breeze")),
        _said("Sunny."),
    ],
    "a call, a result, a call": [
        *(_user(), _said("", tool_calls=[_CALL]), _tool(), _said("", tool_calls=[_LATER])),
        *(_tool(2, "high"), _said("Sunny and high."), _user("Thanks."), _said("Welcome.")),
    ],
    "thoughts": [
        *(_user(), _said("", tool_calls=[_CALL], reasoning_content="I should look.")),
        *(_tool(), _said("Sunny.", reasoning_content="It is sunny.")),
    ],
    "thoughts in text": [
        *(_user("Hi."), _said("<think>\nA greeting.\n</think>\n\nAhoy."), _user("More.")),
        _said("<think>\nHow much?\n</think>\n\nAye."),
    ],
    "turns of the same words": [*(_user("Hi."), _said("Hi.")) * 3],
    "a system and tags": [
        {"role": "system", "content": "Write <b>HTML</b>."},
        *(_user("A <b>word</b>?"), _said("<b>sea</b>"), _user("[INST]"), _said("<br>")),
    ],
}
"""Conversations of each form in which an assistant may call."""
