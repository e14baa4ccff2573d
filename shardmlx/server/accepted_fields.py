"""Fields of request bodies that clients of other servers send. No MLX, no MPI.

One that changes no answer is let pass; one that would is refused by name, never ignored in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shardmlx.server.openai_errors import refused, shown

Json = dict[str, Any]
"""A JSON object."""

_Item = TypeVar("_Item")

Listed = Annotated[list[_Item], Field(fail_fast=True)]
"""A list of which one fault is told: to tell a hundred thousand stops all threads for seconds."""


class Body(BaseModel):
    """An object in a request's body. Null counts as not there; a whole number may be 8.0."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _plainly(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: _whole(value) for name, value in given.items() if value is not None}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Fields that change no answer, whatever they say.
# OpenAI's: "prediction" is a guess that saves time; "max_tool_calls" counts tools of the server.
# Anthropic's: "context_management" is what may be forgotten of a history: nothing is.
# Others: Ollama's, Open WebUI's, vLLM's, OpenRouter's, mlx_lm.server's.
_IGNORED = """
    user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention
    prompt_cache_options parallel_tool_calls verbosity prediction max_tool_calls client_metadata
    stream_options.include_obfuscation

    betas billing_policy cache_control container context_management diagnostics inference_geo speed
    output_config.task_budget

    cache_prompt id_slot timings_per_token return_progress keep_alive chat_id session_id
    conversation_id id request_id priority cache_salt route num_draft_tokens
"""

IGNORED = frozenset(_IGNORED.split())

EMPTY: tuple[Any, ...] = (False, 0, "", [], {})
"""Values that ask for nothing."""

SWITCHED_ON = """
    skip_special_tokens spaces_between_special_tokens add_generation_prompt include_reasoning
    separate_reasoning parse_tool_calls do_sample enable_thinking think
"""

ONE = "n best_of length_penalty typical_p repeat_penalty"

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(SWITCHED_ON.split(), (True,)),
    **dict.fromkeys(ONE.split(), (1,)),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": ([], ["text"]),
    "include": ([], ["reasoning.encrypted_content"]),
    "truncation": ("disabled",),
    "reasoning_format": ("auto",),
}
"""Unsupported fields that ask for something where they are empty, and values that do not."""


def refuse_unknown(extra: Mapping[str, Any] | None, prefix: str = "") -> None:
    """Raise ``ApiError`` for a field of ``extra`` that might change the answer."""
    for name, value in (extra or {}).items():
        where = f"{prefix}{name}"
        if where in IGNORED or value in NEUTRAL.get(where, EMPTY):
            continue
        raise refused(
            f"{shown(where)[1:-1]} is not supported by this server: leave it out",
            where[:200],
            "unsupported_parameter",
        )
