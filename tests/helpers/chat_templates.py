"""Small chat templates of the kinds that models have, and a tokenizer for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
_CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}{% endfor %}"
_NEXT = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
_SPOKEN = "{% set said = (m.content or '').split('</think>')[-1].lstrip('\n') %}"
_THOUGHT = (
    "{% set thought = (m.content or '').split('</think>')[0].replace('<think>', '').strip() %}"
)


@dataclass(frozen=True)
class Kind:
    """A chat template. ``header`` comes before each answer, or ``after_tool`` where a tool has
    spoken; ``closing`` comes after it, or ``last`` where it ends all; ``opened`` is what the
    template writes after the header to ask for one."""

    template: str
    header: str = "<|im_start|>assistant\n"
    opened: str = ""
    closing: str = "<|im_end|>\n"
    last: str = ""
    after_tool: str = ""


KINDS = {
    "chatml": Kind(_TOOLS + _TURN + "{{ m.content or '' }}" + _CALLS + _NEXT + "{% endif %}"),
    # Keeps the thought of the last message, and writes an empty one where there is none.
    "last thought": Kind(
        _TURN + _SPOKEN + _THOUGHT + "{% if m.role == 'assistant' and loop.last %}<think>\n"
        "{{ thought if '</think>' in m.content else '' }}\n</think>\n\n{% endif %}{{ said }}"
        + _CALLS + _NEXT + "{% endif %}"
    ),
    # Opens a thought, and keeps none.
    "opens a thought": Kind(
        _TURN + _SPOKEN + "{{ said }}" + _CALLS + _NEXT + "<think>\n{% endif %}",
        opened="<think>\n",
    ),
    # Says that there is to be no thought, and does not write so where there is an answer.
    "ends a thought": Kind(
        _TURN + "{{ m.content or '' }}" + _CALLS + _NEXT + "<think>\n\n</think>\n\n{% endif %}",
        opened="<think>\n\n</think>\n\n",
    ),
    "opens a thought that all have": Kind(
        _TURN + _SPOKEN + _THOUGHT + "{% if m.role == 'assistant' %}<think>\n"
        "{{ thought if '</think>' in m.content else '' }}\n</think>\n\n{% endif %}{{ said }}"
        + _NEXT + "<think>\n{% endif %}",
        opened="<think>\n",
    ),
    "llama 3": Kind(
        "<|begin|>{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}"
        "<|eot|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}",
        "<|start|>assistant<|end|>\n\n",
        closing="<|eot|>",
    ),
    "gemma": Kind(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<start_of_turn>model\n",
        closing="<end_of_turn>\n",
    ),
    "mistral": Kind(
        "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>{% else %}"
        "[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}",
        " [/INST]",
        closing="</s>",
    ),
    "words alone": Kind(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        "assistant: ",
        closing="\n",
    ),
    # Marks what the assistant says, which leaves out the end of its line.
    "marked": Kind(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}"
        + "<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        closing="<|im_end|>",
    ),
}  # fmt: skip

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|begin|>", "<|start|>", "<|end|>", "<|eot|>", "</s>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
)


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = [
        "user: hello there\nassistant: hello you\n\n",
        "<think>\n\n</think>\n\n<b>bold</b>",
    ] * 20
    tokenizer.train_from_iterator(text, trainer)
    written: str = tokenizer.to_str()
    return written


def tokenizer_with(
    template: str | None, eos: str | None = "<|im_end|>", special: Sequence[str] = ()
) -> TokenizerWrapper:
    """Return a tokenizer that has merges across spaces and line ends, with a chat template and more
    ``special`` tokens."""
    trained = Tokenizer.from_str(_trained())
    trained.add_special_tokens([*special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token=eos, chat_template=template
    )
    return TokenizerWrapper(tokenizer)
