"""Fields of request bodies: how each is read, and those beside the ones that are supported. No MLX,
no MPI.

Clients send the fields of whatever server they were written for. One that changes no answer is let
pass; one that would change it is refused by name, never ignored in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shardmlx.server.openai_errors import refused, shown

_Item = TypeVar("_Item")

Listed = Annotated[list[_Item], Field(fail_fast=True)]
"""A list in a body, of which the first fault is enough. Pydantic would tell a hundred thousand, and
no other thread runs while it does: for seconds."""


class Body(BaseModel):
    """An object in the body of a request, or all of it.

    A field that is null counts as one that is not there, and a whole number may have a point (8.0).
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _plainly(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: _whole(value) for name, value in given.items() if value is not None}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


OF_OPENAI = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "parallel_tool_calls",
        "verbosity",
        "prediction",  # a guess that saves time
        "max_tool_calls",  # of tools that run on the server
        "client_metadata",
    }
)

OF_ANTHROPIC = frozenset(
    {
        "betas",
        "billing_policy",
        "cache_control",
        "container",
        "context_management",  # what may be forgotten of a history: nothing is
        "diagnostics",
        "inference_geo",
        "speed",
    }
)

OF_LLAMA_CPP = frozenset(
    {
        "cache_prompt",
        "id_slot",
        "slot_id",
        "n_keep",
        "timings_per_token",
        "return_progress",
        # Of samplers that NEUTRAL keeps off.
        "repeat_last_n",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "dynatemp_exponent",
        "mirostat_tau",
        "mirostat_eta",
    }
)

OF_OTHERS = frozenset(
    {
        "keep_alive",  # Ollama
        "chat_id",  # Open WebUI
        "session_id",
        "conversation_id",
        "id",
        "request_id",  # vLLM
        "priority",
        "cache_salt",
        "route",  # OpenRouter
        "num_draft_tokens",  # mlx_lm.server
    }
)

IGNORED = OF_OPENAI | OF_ANTHROPIC | OF_LLAMA_CPP | OF_OTHERS
"""Fields that change no answer, whatever they say."""

EMPTY: tuple[Any, ...] = (False, 0, "", [], {})
"""Values that ask for nothing."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "n": (1,),
    "best_of": (1,),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": ([], ["text"]),
    "include": ([], ["reasoning.encrypted_content"]),
    "truncation": ("disabled",),
    # vLLM, SGLang
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "length_penalty": (1,),
    "detokenize": (True,),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    # llama.cpp
    "typical_p": (1,),
    "top_n_sigma": (-1,),
    "repeat_penalty": (1,),
    "samplers": (
        "edkypmxt",
        "",
        [],
        [
            "penalties",
            "dry",
            "top_n_sigma",
            "top_k",
            "typ_p",
            "top_p",
            "min_p",
            "xtc",
            "temperature",
        ],
    ),
    "n_predict": (-1,),
    "reasoning_format": ("auto", "none"),
    "reasoning_budget": (-1,),
    "parse_tool_calls": (True,),
    # Others
    "do_sample": (True,),
    "num_beams": (1,),
    "guidance_scale": (1,),
    "encoder_repetition_penalty": (1,),
    "add_bos_token": (True,),
    "enable_thinking": (True,),
    "think": (True,),
    "thinking_budget": (-1,),
    "tfs_z": (1,),
    "typical": (1,),
}
"""Fields that are not supported and ask for something where they are empty, with the values that
change nothing."""


def refuse_unknown(extra: Mapping[str, Any] | None, prefix: str = "") -> None:
    """Raise ``ApiError`` for a field of ``extra`` that might change the answer.

    ``prefix`` is what stands before a field's name in an error message. Those of ``IGNORED`` pass
    whatever they say, others with a value that is ``NEUTRAL``, or ``EMPTY`` where none is.
    """
    for name, value in (extra or {}).items():
        where = f"{prefix}{name}"
        if where in IGNORED or value in NEUTRAL.get(where, EMPTY):
            continue
        raise refused(
            f"{shown(where)[1:-1]} is not supported by this server: leave it out",
            where[:200],
            "unsupported_parameter",
        )
