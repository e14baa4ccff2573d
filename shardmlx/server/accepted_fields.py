"""Fields of request bodies: one rule for objects at every depth. No MLX, no MPI.

A field is known; or it changes no answer, and is let pass; or it is refused by its name and path,
never ignored in silence.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from shardmlx.server.openai_errors import refused, shown

Json = dict[str, Any]
"""A JSON object."""

_Item = TypeVar("_Item")


def no_list(value: Any) -> Any:
    """Return an empty object in the place of an empty list: PHP writes it so."""
    return {} if value == [] else value


JsonObject = Annotated[Json, BeforeValidator(no_list)]
"""An object, which may be an empty list."""

Listed = Annotated[list[_Item], Field(fail_fast=True)]
"""A list of which one fault is told: to tell a hundred thousand stops all threads for seconds."""


class Body(BaseModel):
    """An object in a request's body. Null counts as not there; a whole number may be 8.0.

    Fields that the object ``passes`` may say anything. Others that are not known must be empty, or
    have one of the values that ``neutral`` lists for them.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    passes: ClassVar[frozenset[str]] = frozenset()
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _plainly(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: _whole(value) for name, value in given.items() if value is not None}

    def refuse_unknown(self, where: str = "") -> None:
        """Raise ``ApiError`` for a field of this object, which is ``where``, or of one within it,
        that might change the answer."""
        if extra := self.__pydantic_extra__:
            refuse_unknown(extra, where, self.passes, self.neutral)
        for name, value in self.__dict__.items():
            if isinstance(value, Body):
                value.refuse_unknown(self._place(where, name))
            elif isinstance(value, list):
                place = self._place(where, name)
                for at, each in enumerate(value):
                    if isinstance(each, Body):
                        each.refuse_unknown(f"{place}.{at}")

    def _place(self, where: str, name: str) -> str:
        """Return the path of a field of this object, which is ``where``, as requests name it."""
        own = type(self).model_fields[name].alias or name
        return f"{where}.{own}" if where else own


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


# Fields that all APIs let pass on the top level.

IGNORED = words("""
    user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention
    prompt_cache_options parallel_tool_calls verbosity prediction max_tool_calls client_metadata

    betas billing_policy cache_control container context_management diagnostics inference_geo speed
    user_profile_id workspace_id

    cache_prompt id_slot timings_per_token return_progress keep_alive chat_id session_id
    conversation_id id request_id priority cache_salt route num_draft_tokens

    mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
    dynatemp_exponent dynatemp_low dynatemp_high smoothing_curve adaptive_decay
""")
"""Fields that change no answer, whatever they say.

OpenAI's: "prediction" is a guess that saves time; "max_tool_calls" counts tools of the server.
Anthropic's: "context_management" is what may be forgotten of a history: nothing is. Others:
Ollama's, Open WebUI's, vLLM's, OpenRouter's, mlx_lm.server's. The last set samplers that are
refused, unless they are off.
"""

EMPTY: tuple[Any, ...] = (False, 0, "", [], {})
"""Values that ask for nothing."""

SWITCHED_ON = """
    skip_special_tokens spaces_between_special_tokens add_generation_prompt include_reasoning
    separate_reasoning stream_reasoning parse_tool_calls do_sample enable_thinking think detokenize
    add_bos_token
"""

ONE = """
    n best_of num_beams length_penalty typical_p typical typ_p tfs tfs_z repeat_penalty rep_pen
    encoder_repetition_penalty guidance_scale
"""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(SWITCHED_ON.split(), (True,)),
    **dict.fromkeys(ONE.split(), (1,)),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "modalities": ([], ["text"]),
    "truncation": ("disabled",),
    "reasoning_format": ("auto", "deepseek"),
    "top_n_sigma": (-1, 0),
    "adaptive_target": (-1,),
}
"""Unsupported fields that ask for something where they are empty, and values that do not."""

CALLERS: Mapping[str, tuple[Any, ...]] = {"allowed_callers": ([], ["direct"])}
"""Neutral values of tools in the APIs of OpenAI and Anthropic: the model itself calls them."""


def refuse_unknown(
    extra: Mapping[str, Any],
    where: str = "",
    passes: Collection[str] = (),
    neutral: Mapping[str, tuple[Any, ...]] | None = None,
) -> None:
    """Raise ``ApiError`` for a field of ``extra``, those that are not known of an object which is
    ``where``, unless the object ``passes`` it, or its value is empty or ``neutral``."""
    for name, value in extra.items():
        if name in passes or value is None or value in (neutral or {}).get(name, EMPTY):
            continue
        path = f"{where}.{name}" if where else name
        raise refused(
            f"{shown(path)[1:-1]} is not supported by this server: leave it out",
            path[:200],
            "unsupported_parameter",
        )


def refuse_other_keys(
    given: Mapping[str, Any],
    known: Collection[str],
    where: str,
    passes: Collection[str] = (),
) -> None:
    """Raise ``ApiError`` as ``refuse_unknown``, for an object of which these keys are ``known``."""
    extra = {name: value for name, value in given.items() if name not in known}
    refuse_unknown(extra, where, passes)
