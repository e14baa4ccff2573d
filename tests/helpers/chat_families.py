"""Chat templates in the manner of model families, in our own words, each as short as it can be."""

from __future__ import annotations

from tests.helpers.chat_templates import Kind


def _turns(answer: str, other: str, ask: str, *, begin: str = "", last: str = "") -> str:
    """Return a template of an ``answer`` and any ``other`` message, in which ``@`` stands for what
    is said. At the end it has ``ask`` for an answer, or else ``last``."""
    template = (
        f"{begin}{{% for m in messages %}}{{% if m.role == 'assistant' %}}{answer}{{% else %}}"
        f"{other}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{ask}{{% else %}}{last}{{% endif %}}"
    )
    return template.replace("@", "{{ m.content or '' }}")


def _calls(each: str) -> str:
    """Return the calls of a message, each with its name for ``NAME`` and ``ARGS`` as JSON."""
    each = each.replace("NAME", "{{ c.function.name }}")
    each = each.replace("ARGS", "{{ c.function.arguments | tojson }}")
    return f"{{% for c in m.tool_calls or [] %}}{each}{{% endfor %}}"


_SPOKEN = "{{ (m.content or '').split('</think>')[-1].lstrip('\\n') }}"
"""What is said without the thought before it."""

_IF_LATEST = (
    "{% set users = messages | map(attribute='role') | list %}"
    "{% set after = users | length - (users[::-1].index('user') if 'user' in users else 0) - 1 %}"
)
"""Sets ``after`` to the number of the last question."""

_QWEN_CALLS = _calls('\n<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>')
_IM_TURN = "<|im_start|>{{ m.role }}\n@<|im_end|>\n"
_IM_ASK = "<|im_start|>assistant\n"

FAMILIES = {
    "llama 2": Kind(
        _turns(
            " @ </s>",
            "{% if m.role == 'system' %}<<SYS>>\n@\n<</SYS>>\n\n{% else %}<s>[INST] @ [/INST]"
            "{% endif %}",
            "",
        ),
        " [/INST]",
        closing=" </s>",
    ),
    "llama 3.1": Kind(
        _turns(
            "<|start|>assistant<|end|>\n\n{% if m.tool_calls %}"
            + _calls('{"name": "NAME", "parameters": ARGS}')
            + "{% else %}{{ m.content | trim }}{% endif %}<|eot|>",
            "<|start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end|>\n\n"
            "{{ m.content | trim }}<|eot|>",
            "<|start|>assistant<|end|>\n\n",
            begin="<|begin|>{% if messages[0].role != 'system' %}<|start|>system<|end|>\n\n"
            "Knowledge: today<|eot|>{% endif %}",
        ),
        "<|start|>assistant<|end|>\n\n",
        closing="<|eot|>",
    ),
    "llama 4": Kind(
        _turns(
            "<|header_start|>assistant<|header_end|>\n\n@<|eot|>",
            "<|header_start|>{{ m.role }}<|header_end|>\n\n@<|eot|>",
            "<|header_start|>assistant<|header_end|>\n\n",
        ),
        "<|header_start|>assistant<|header_end|>\n\n",
        closing="<|eot|>",
    ),
    "qwen 2.5": Kind(
        _turns(
            f"{_IM_ASK}@{_QWEN_CALLS}<|im_end|>\n",
            "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n@\n</tool_response>"
            f"<|im_end|>\n{{% else %}}{_IM_TURN}{{% endif %}}",
            _IM_ASK,
            begin="{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n"
            "{% endif %}",
        )
    ),
    # Thoughts stay after the last question only, and one that lacks is empty.
    "qwen 3": Kind(
        _IF_LATEST
        + _turns(
            f"{_IM_ASK}{{% if loop.index0 > after %}}<think>\n"
            "{{ (m.content or '').split('</think>')[0].split('<think>\\n')[1:] | join | trim }}"
            f"\n</think>\n\n{{% endif %}}{_SPOKEN}{_QWEN_CALLS}<|im_end|>\n",
            _IM_TURN,
            _IM_ASK,
        )
    ),
    "smollm 3": Kind(
        _turns(f"{_IM_ASK}{_SPOKEN}<|im_end|>\n", _IM_TURN, f"{_IM_ASK}<think>\n\n</think>\n"),
        opened="<think>\n\n</think>\n",
    ),
    "lfm 2": Kind(
        _turns(
            f"{_IM_ASK}{{% if loop.last %}}@{{% else %}}{_SPOKEN}{{% endif %}}"
            f"{_calls('<|tool_call_start|>[NAME(**ARGS)]<|tool_call_end|>')}<|im_end|>\n",
            _IM_TURN,
            _IM_ASK,
            begin="<|startoftext|>",
        )
    ),
    "mistral 3": Kind(
        _turns(
            "{% if m.tool_calls %}[TOOL_CALLS] ["
            + _calls('{"name": "NAME", "arguments": ARGS}')
            + "]</s>{% else %} @</s>{% endif %}",
            "{% if m.role == 'tool' %}[TOOL_RESULTS] @[/TOOL_RESULTS]{% else %}[INST] @[/INST]"
            "{% endif %}",
            "",
            begin="<s>",
        ),
        "[/INST]",
        closing="</s>",
        after_tool="[/TOOL_RESULTS]",
    ),
    "mistral 7": Kind(
        _turns(
            " @</s>",
            "{% if m.role == 'system' %}[SYSTEM_PROMPT] @[/SYSTEM_PROMPT]{% else %}[INST] @[/INST]"
            "{% endif %}",
            "",
            begin="<s>",
        ),
        "[/INST]",
        closing="</s>",
    ),
    # The system message stands before the first question.
    "gemma 3": Kind(
        _turns(
            "<start_of_turn>model\n{{ m.content | trim }}<end_of_turn>\n",
            "{% if m.role == 'user' %}<start_of_turn>user\n{{ messages[0].content ~ '\n\n' if "
            "loop.index0 == 1 and messages[0].role == 'system' else '' }}{{ m.content | trim }}"
            "<end_of_turn>\n{% endif %}",
            "<start_of_turn>model\n",
            begin="<bos>",
        ),
        "<start_of_turn>model\n",
        closing="<end_of_turn>\n",
    ),
    # A conversation that asks for nothing ends in a mark.
    "phi 3": Kind(
        _turns(
            "<|assistant|>\n@<|end|>\n",
            "<|{{ m.role }}|>\n@<|end|>\n",
            "<|assistant|>\n",
            last="<|endoftext|>",
        ),
        "<|assistant|>\n",
        closing="<|end|>\n",
        last="<|end|>\n<|endoftext|>",
    ),
    "phi 4": Kind(
        _turns(
            "<|im_start|>assistant<|im_sep|>@<|im_end|>",
            "<|im_start|>{{ m.role }}<|im_sep|>@<|im_end|>",
            "<|im_start|>assistant<|im_sep|>",
        ),
        "<|im_start|>assistant<|im_sep|>",
        closing="<|im_end|>",
    ),
    "deepseek 3": Kind(
        _turns(
            "<｜Assistant｜>@<｜end｜>",
            "{{ '<｜User｜>' if m.role == 'user' }}@",
            "<｜Assistant｜>",
        ),
        "<｜Assistant｜>",
        closing="<｜end｜>",
    ),
    "deepseek r1": Kind(
        _turns(
            "<｜Assistant｜>{{ (m.content or '').split('</think>')[-1] }}<｜end｜>",
            "{{ '<｜User｜>' if m.role == 'user' }}@",
            "<｜Assistant｜><think>\n",
        ),
        "<｜Assistant｜>",
        "<think>\n",
        closing="<｜end｜>",
    ),
    "granite": Kind(
        _turns(
            "<|start_of_role|>assistant<|end_of_role|>@<|end_of_text|>\n",
            "<|start_of_role|>{{ m.role }}<|end_of_role|>@<|end_of_text|>\n",
            "<|start_of_role|>assistant<|end_of_role|>",
        ),
        "<|start_of_role|>assistant<|end_of_role|>",
        closing="<|end_of_text|>\n",
    ),
    "command r": Kind(
        _turns(
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>@<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|{{ m.role | upper }}_TOKEN|>@<|END_OF_TURN_TOKEN|>",
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ),
        "<|CHATBOT_TOKEN|>",
        closing="<|END_OF_TURN_TOKEN|>",
    ),
    # Nothing stands after an answer.
    "glm 4": Kind(
        _turns("<|assistant|>\n@", "<|{{ m.role }}|>\n@", "<|assistant|>", begin="[gMASK]<sop>"),
        "<|assistant|>",
        closing="",
    ),
    "glm 4.5": Kind(
        _IF_LATEST
        + _turns(
            "<|assistant|>\n<think>{% if loop.index0 > after %}"
            "{{ (m.content or '').split('</think>')[0].split('<think>\\n')[1:] | join | trim }}"
            f"{{% endif %}}</think>\n{_SPOKEN}",
            "<|{{ m.role }}|>\n@",
            "<|assistant|>",
            begin="[gMASK]<sop>",
        ),
        "<|assistant|>",
        closing="",
    ),
    # A line ends only where another message follows.
    "olmo": Kind(
        _turns(
            "<|assistant|>\n@<|endoftext|>{{ '' if loop.last else '\n' }}",
            "<|{{ m.role }}|>\n@\n",
            "<|assistant|>\n",
            begin="<|endoftext|>",
        ),
        "<|assistant|>\n",
        closing="<|endoftext|>",
    ),
    "falcon": Kind(
        _turns("Falcon: @\n", "{{ m.role | title }}: @\n", "Falcon:"), "Falcon:", closing="\n"
    ),
    "zephyr": Kind(
        _turns("<|assistant|>\n@</s>\n", "<|{{ m.role }}|>\n@</s>\n", "<|assistant|>"),
        "<|assistant|>",
        closing="</s>\n",
    ),
    "vicuna": Kind(
        _turns(
            "ASSISTANT: @</s>",
            "{% if m.role == 'system' %}@\n\n{% else %}USER: @ {% endif %}",
            "ASSISTANT:",
        ),
        "ASSISTANT:",
        closing="</s>",
    ),
    "alpaca": Kind(
        _turns(
            "### Response:\n@\n\n",
            "{% if m.role == 'system' %}@\n\n{% else %}### Instruction:\n@\n\n{% endif %}",
            "### Response:\n",
        ),
        "### Response:\n",
        closing="\n\n",
    ),
    "minimax": Kind(
        _turns(f"]~b]ai\n{_SPOKEN}[e~[\n", "]~b]{{ m.role }}\n@[e~[\n", "]~b]ai\n<think>\n"),
        "]~b]ai\n",
        "<think>\n",
        closing="[e~[\n",
    ),
    "kimi k2": Kind(
        _turns(
            "<|im_assistant|>assistant<|im_middle|>@"
            + _calls("<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGS")
            + "<|im_end|>",
            "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>@<|im_end|>",
            "<|im_assistant|>assistant<|im_middle|>",
        ),
        "<|im_assistant|>assistant<|im_middle|>",
        closing="<|im_end|>",
    ),
    # The last answer ends otherwise than earlier ones, whose end is not learnt.
    "gpt-oss": Kind(
        _turns(
            "<|start|>assistant<|channel|>final<|message|>"
            f"{_SPOKEN}{{{{ '<|return|>' if loop.last else '<|end|>' }}}}",
            "<|start|>{{ m.role }}<|message|>@<|end|>",
            "<|start|>assistant",
        ),
        "<|start|>assistant",
        closing="",
        last="<|return|>",
    ),
    "hunyuan": Kind(
        _turns(
            f"<｜hy_Assistant｜>{_SPOKEN}<｜hy_end｜>",
            "{{ '<｜hy_User｜>' if m.role == 'user' }}@",
            "<｜hy_Assistant｜>",
            begin="<｜hy_begin｜>",
        ),
        "<｜hy_Assistant｜>",
        closing="<｜hy_end｜>",
    ),
    "exaone": Kind(
        _turns("[|assistant|]@[|endofturn|]\n", "[|{{ m.role }}|]@\n", "[|assistant|]"),
        "[|assistant|]",
        closing="[|endofturn|]\n",
    ),
    "nemotron": Kind(
        _turns(
            "<extra_id_1>Assistant\n@\n",
            "<extra_id_{{ 0 if m.role == 'system' else 1 }}>{{ m.role | title }}\n@\n",
            "<extra_id_1>Assistant\n",
        ),
        "<extra_id_1>Assistant\n",
        closing="\n",
    ),
}  # fmt: skip
