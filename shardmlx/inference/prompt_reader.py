"""Prompts and chats to tokens, as mlx-lm makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from shardmlx.errors import UserError, one_line

Message = Mapping[str, Any]
"""Of a chat: ``role``, ``content`` and what else the model's template knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    """Reads all prompts of a run alike.

    ``system_prompt`` is for chats without their own; ``prefill_response`` begins the answer.
    ``template_arguments`` are further ones of the chat template.
    """

    tokenizer: TokenizerWrapper
    system_prompt: str | None = None
    prefill_response: str | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_template(self) -> bool:
        return bool(self.tokenizer.has_chat_template)

    def text(self, prompt: str) -> tuple[int, ...]:
        """Tokens of a prompt as it is. ``UserError`` if there are none."""
        return _some(self.tokenizer.encode(prompt))

    def chat(self, messages: Sequence[Message], **arguments: Any) -> tuple[int, ...]:
        """Tokens after which the next message of a chat comes. ``arguments`` win over
        ``template_arguments``. ``UserError`` where the template does not take them."""
        if not self.has_template:
            raise UserError("messages need a chat template, and the model has none: give a prompt")
        chat = list(messages)
        if self.system_prompt is not None and not (chat and chat[0].get("role") == "system"):
            chat.insert(0, {"role": "system", "content": self.system_prompt})
        is_begun = self.prefill_response is not None
        if is_begun:
            chat.append({"role": "assistant", "content": self.prefill_response})
        try:
            text = self.tokenizer.apply_chat_template(
                chat,
                tokenize=False,
                continue_final_message=is_begun,
                add_generation_prompt=not is_begun,
                **{**self.template_arguments, **arguments},
            )
        except Exception as error:  # a template may raise whatever it likes
            raise UserError(f"the chat template does not take it: {one_line(error)}") from None
        return _some(self.tokenizer.encode(text, add_special_tokens=False))

    def token_text(self, token: int) -> str:
        """What a token reads by itself; a part of a character reads as U+FFFD."""
        text: str = self.tokenizer.decode([token])
        return text


def _some(tokens: Sequence[int]) -> tuple[int, ...]:
    if not tokens:
        raise UserError("the prompt has no tokens: give a longer text")
    return tuple(tokens)
