"""The options of ``shardmlx.chat``: those of ``mlx_lm.chat``, and ours."""

from __future__ import annotations

from dataclasses import dataclass

from shardmlx.config.command_line import CommandLine
from shardmlx.config.inference import MODEL, REFUSED, SAMPLING, InferenceConfig
from shardmlx.config.options import in_group, option
from shardmlx.models.kv_cache import held

_CHAT = "chat"


_chat = in_group(_CHAT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig(InferenceConfig):
    """The model to talk with, and how. Raises ``OptionError``, a ``UserError``."""

    max_tokens: int = option(
        256, "tokens of an answer at most", metavar="TOKENS", minimum=1, short="-m", group=SAMPLING
    )
    system_prompt: str | None = _chat(None, "system prompt of the chat template", metavar="TEXT")
    cache_tokens: int = _chat(
        8192, "tokens of a conversation at most, and of its KV cache", metavar="TOKENS", minimum=256
    )
    verbose: bool = _chat(True, "print more than the answers", takes_value=True)

    def __post_init__(self) -> None:
        super(ChatConfig, self).__post_init__()
        object.__setattr__(self, "cache_tokens", held(self.cache_tokens))


LINE = CommandLine(
    options=ChatConfig,
    command="chat",
    description="Talk with a model in the terminal, through pipeline stages, one MPI rank each.",
    groups=(MODEL, _CHAT),
    refused=REFUSED,
)
