"""Chat data, and a tokenizer of one token a letter to read them with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardmlx.engine.batches import Sample

EOS = 1

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


class Letters:
    """A tokenizer of one token a letter: as much of one as mlx-lm's data sets ask for."""

    eos_token_id = EOS

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        tools: object = None,
        add_generation_prompt: bool = False,
        return_dict: bool = False,
        tokenize: bool = True,
    ) -> Any:
        text = self.conversation(messages, tools) + ("<a>" if add_generation_prompt else "")
        return self.encode(text) if tokenize else text

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: object) -> str:
        """Return the text of a conversation, without what asks for an answer."""
        return "".join(f"<{each['role'][0]}>{each['content']};" for each in messages)


def listed(samples: Sequence[Sample]) -> list[tuple[list[int], int]]:
    return [(list(tokens), start) for tokens, start in samples]
