"""Fields that bodies of all APIs have in common, and the reading of a body. No MLX, no MPI."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from shardmlx.server.accepted_fields import IGNORED, NEUTRAL, Body, Json, Listed, no_list
from shardmlx.server.json_texts import bytes_with_whole_characters
from shardmlx.server.model_names import ModelNames
from shardmlx.server.openai_errors import ApiError, refused, shown

MOST = 2**31 - 1
"""Upper bound of any number of tokens or texts."""

TOKENIZERS_OWN = """
    chat_template conversation messages tools documents tokenize add_generation_prompt
    continue_final_message padding truncation max_length return_tensors return_dict
    return_assistant_tokens_mask tokenizer_kwargs
"""
"""Refused in a chat template: one of the client's own could keep the server busy for ever."""

# Fields whose type pydantic does not know.


def _in_a_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _plain(arguments: dict[str, Any] | None) -> dict[str, Any] | None:
    for name, value in (arguments or {}).items():
        if isinstance(value, dict | list):
            raise ValueError(f"{shown(name)}: give a text, a number, true, false or null")
        if name in TOKENIZERS_OWN.split():
            raise ValueError(f"{name} is not a variable of a chat template: leave it out")
    return arguments


ALL_THAT_FIT = -1
"""The ``max_tokens`` of llama.cpp's clients that want no limit but the model's."""


def _not_zero(limit: int | None) -> int | None:
    if limit == 0:
        raise ValueError("give 1 or more, or -1 for as many as fit")
    return limit


TokenLimit = Annotated[int | None, Field(ge=ALL_THAT_FIT, le=MOST), AfterValidator(_not_zero)]


def _another(seed: int | None) -> int | None:
    return None if seed == -1 else seed  # llama.cpp's and vLLM's clients want another each time


StopStrings = Annotated[
    Listed[Annotated[str, Field(max_length=500)]],
    Field(max_length=16),
    BeforeValidator(_in_a_list),
]


TokenId = Annotated[int, Field(strict=False)]
"""A key of an object, and so a text."""

Bias = Annotated[float, Field(ge=-100, le=100)]


def _no_limit(share: float | None) -> float | None:
    return share or (None if share is None else 1.0)  # mlx_lm's 0, and others', means all


class StreamOptions(Body):
    """The ``stream_options`` of a request."""

    include_usage: bool | None = None

    passes = frozenset({"include_obfuscation"})


def in_an_object(choice: object) -> object:
    """Return a choice that is a word as the object of that type."""
    return {"type": choice} if isinstance(choice, str) else choice


class SamplingBody(Body):
    """The sampling parameters of a request, under their names in ``SamplingParams``."""

    temp: float | None = Field(None, alias="temperature", ge=0, le=2)
    top_p: Annotated[float | None, Field(ge=0, le=1), AfterValidator(_no_limit)] = None
    min_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MOST)
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**64), AfterValidator(_another)] = None
    logit_bias: Annotated[dict[TokenId, Bias], BeforeValidator(no_list)] = Field(
        default_factory=dict
    )
    xtc_probability: float | None = Field(None, ge=0, le=1)
    xtc_threshold: float | None = Field(None, ge=0, le=0.5)
    repetition_penalty: float | None = Field(None, ge=0, le=10)
    repetition_context_size: int | None = Field(None, ge=1, le=MOST)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    presence_context_size: int | None = Field(None, ge=1, le=MOST)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_context_size: int | None = Field(None, ge=1, le=MOST)

    @property
    def sampling(self) -> dict[str, Any]:
        """The parameters that the request names, with their values."""
        given = self.model_dump(include=set(SamplingBody.model_fields), exclude_none=True)
        return {**given, "logit_bias": tuple(sorted(self.logit_bias.items()))}


class ModelBody(Body):
    """A body that may name the model."""

    model: str | None = None


class AskedBody(SamplingBody, ModelBody):
    """The fields that requests of all APIs have in common."""

    stream: bool | None = None

    passes = IGNORED
    neutral: ClassVar = NEUTRAL


class AskedChat(AskedBody):
    """The fields that chats of all APIs have in common."""

    chat_template_kwargs: Annotated[Json | None, AfterValidator(_plain)] = None

    def template_arguments(self, effort: str | None) -> Json:
        """Return what the chat template is given beside messages and tools, for this effort of
        thinking: "none" turns it off."""
        own = self.chat_template_kwargs or {}
        if effort is None:
            return own
        how = {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
        return how | own


# From bytes to a model.

KIND = re.compile(r"str|(list|dict|json)\[.*|\[key\]")
"""A step in pydantic's path to a fault that is not a field, but a type that a field may have, or
that a key is at fault."""

_AnyBody = TypeVar("_AnyBody", bound=ModelBody)
_T = TypeVar("_T")


def read_body(kind: type[_AnyBody], body: bytes, names: ModelNames) -> _AnyBody:
    """Read the JSON of a body of this ``kind`` for the model with these ``names``. Raises
    ``ApiError`` for what is no such body, and for a field, at any depth, that is not known."""
    try:
        parsed = _parsed(kind, body)
    except ValidationError as error:
        raise _explained(error) from None
    parsed.refuse_unknown()
    names.check(parsed.model or None)
    return parsed


def _parsed(kind: type[_AnyBody], body: bytes) -> _AnyBody:
    """Return a body without halves of characters. Raises ``ValidationError``."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        whole = bytes_with_whole_characters(body) if _first(error)["type"] == NO_JSON else body
        if whole == body:
            raise
    return kind.model_validate_json(whole)


def validated(kind: TypeAdapter[_T], value: object, where: str) -> _T:
    """Return a part of a body, which is ``where`` in it, as this ``kind``. Raises ``ApiError``."""
    try:
        return kind.validate_python(value)
    except ValidationError as error:
        raise _explained(error, where) from None


SAID = {
    "model_type": "give an object",
    "model_attributes_type": "give an object",
    "dict_type": "give an object",
    "list_type": "give a list",
}
"""Messages of our own, by pydantic's names of faults."""

NO_JSON = "json_invalid"
"""Pydantic's name of that fault."""


def _first(error: ValidationError) -> Any:
    return error.errors(include_url=False)[0]


def _explained(error: ValidationError, where: str = "") -> ApiError:
    """Return the first fault of a body, or of the part of it which is ``where``."""
    first = _first(error)
    message = SAID.get(first["type"], first["msg"].removeprefix("Value error, "))
    if first["type"] == NO_JSON:
        return refused(f"the body is not JSON: {message.removeprefix('Invalid JSON: ')}")
    path = [where, *(str(each) for each in first["loc"] if not KIND.fullmatch(str(each)))]
    # A path may end in a key of the client's own.
    param = ".".join(filter(None, path))[:100] or None
    if first["type"] == "missing":
        return refused(f"{param} is missing", param)
    if param is None:
        return refused("the body is not a JSON object")
    given = first["input"]
    is_plain = given is None or isinstance(given, bool | int | float | str)
    value = f" (it is {shown(given)})" if is_plain else ""
    return refused(f"{param}: {message[:1].lower()}{message[1:]}{value}", param)
