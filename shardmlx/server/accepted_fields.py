"""Fields of request bodies beside those that are supported. No MLX, no MPI.

Clients send the fields of whatever server they were written for. One that changes no answer is let
pass; one that would change it is refused by name, never ignored in silence. A field that is null
counts as one that is not there.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from shardmlx.server.openai_errors import refused, shown

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

IGNORED = OF_OPENAI | OF_LLAMA_CPP | OF_OTHERS
"""Fields that change no answer, whatever they say."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "web_search_options": ({},),
    # vLLM
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "documents": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "return_tokens_as_token_ids": (False,),
    "include_reasoning": (True,),
    # llama.cpp
    "typical_p": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
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
    "min_keep": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "grammar": ("",),
    "json_schema": ({},),
    "lora": ([],),
    "reasoning_format": ("auto", "none"),
    # Ollama
    "options": ({},),
    "format": ("",),
    "images": ([],),
    # Others
    "tfs_z": (1,),
    "top_a": (0,),
    "plugins": ([],),
    "transforms": ([],),
    "provider": ({},),
    "reasoning": ({},),
    "tool_servers": ([],),
    "files": ([],),
    "features": ({},),
    "variables": ({},),
    # Within stream_options
    "stream_options.continuous_usage_stats": (False,),
}
"""Fields that are not supported, with the values that change nothing: these are let pass."""


def refuse_unknown(
    extra: Mapping[str, Any] | None,
    prefix: str = "",
    *,
    ignored: Container[str] = IGNORED,
    neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL,
) -> None:
    """Raise ``ApiError`` for a field of ``extra`` that might change the answer.

    ``prefix`` is what stands before a field's name in an error message. Fields that are ``ignored``
    pass whatever they say, others with a value that is ``neutral``.
    """
    for name, value in (extra or {}).items():
        where = f"{prefix}{name}"
        if value is None or where in ignored or value in neutral.get(where, ()):
            continue
        raise refused(
            f"{shown(where)[1:-1]} is not supported by this server: leave it out",
            where[:200],
            "unsupported_parameter",
        )
