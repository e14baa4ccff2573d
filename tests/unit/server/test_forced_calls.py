"""Calls that noise is made to write, between the marks of every parser of mlx-lm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import numpy as np
import pytest
from mlx_lm import tool_parsers

from shardmlx.inference.answer_format import HARMONY
from shardmlx.server.openai_errors import ApiError
from shardmlx.server.structure import Structure, call_rules, grammar_of, json_term
from tests.helpers.answers import BARE_JSON, format_of, parts_of

llguidance: Any = pytest.importorskip("llguidance", reason="needs llguidance: pip install it")
jsonschema: Any = pytest.importorskip("jsonschema", reason="needs jsonschema: pip install it")

TOKENS = llguidance.LLTokenizer("byte")
END = TOKENS.eos_token
MOST = 5000
SHORT = {"type": "string", "maxLength": 6}
DAYS = {"Day": {"type": "string", "enum": ["mon", "tue"]}}


def tool(name: str, /, *required: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required, "$defs": DAYS}
    closed = {**schema, "required": list(required), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": closed}}


PLAIN = tool(
    "look", "at", "deep", "day",
    at=SHORT, deep={"type": "integer"}, far={"type": "number"}, lit={"type": "boolean"},
    day={"$ref": "#/$defs/Day"}, code={"type": "string", "pattern": "^[a-c]{2,4}$"},
    number={"enum": ["5", "null!", " a b".strip()]},
)  # fmt: skip
PERHAPS = tool(
    "hear", "how",
    how={"anyOf": [SHORT, {"type": "null"}]},
    often={"anyOf": [{"type": "integer"}, {"type": "null"}]},
    loud={"type": ["number", "null"]}, name={"type": "string", "minLength": 2, "maxLength": 4},
)  # fmt: skip
NESTED = tool(
    "mark", "places",
    places={"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
    ship={"type": "object", "properties": {"name": SHORT, "day": {"$ref": "#/$defs/Day"}},
          "required": ["name"], "additionalProperties": False},
    names={"type": "array", "items": SHORT, "maxItems": 2},
)  # fmt: skip
BARE = tool("wait")
WITH_NAME = {
    "type": "object", "properties": {"name": {"enum": ["Paris", "Rome"]}}, "required": ["name"],
    "additionalProperties": False,
}  # fmt: skip
TOOLS = [PLAIN, PERHAPS, NESTED, BARE]
PARSERS = sorted(
    each.name
    for each in iter_modules(tool_parsers.__path__)
    if hasattr(import_module(f"mlx_lm.tool_parsers.{each.name}"), "tool_call_start")
)


def grammar(parser: str, tools: Sequence[Any], *, parallel: bool = True) -> str:
    written = format_of(parser).calls
    assert written is not None
    return grammar_of(call_rules(tools, written, {}, parallel=parallel))


def noise(grammar: str, seed: int) -> str:
    """What is said at temperature 1 by logits that prefer letters to control codes."""
    assert llguidance.LLMatcher.validate_grammar(grammar) == ""
    matcher, random = llguidance.LLMatcher(TOKENS, grammar), np.random.default_rng(seed)
    said: list[int] = []
    chances = np.where(np.arange(TOKENS.vocab_size) < 32, 0.05, 1.0)
    while not matcher.is_stopped() and len(said) < MOST:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        chance = chances * bits[: len(chances)]
        token = int(random.choice(len(chance), p=chance / chance.sum()))
        assert matcher.consume_token(token)
        if token != END:
            said.append(token)
    return bytes(said).decode()


def calls_of(parser: str, text: str, tools: Sequence[Any]) -> list[tuple[str, Any]]:
    parts = parts_of(text, len(text), format_of(parser), tools=tools)
    calls = [part for part in parts if part.kind == "call"]
    assert calls == parts, text
    return [(each.name, json.loads(each.text)) for each in calls]


@pytest.mark.parametrize("parser", [*PARSERS, *BARE_JSON])
def test_every_call_is_of_a_tool_and_keeps_to_its_schema(parser: str) -> None:
    """JSON, also where the model's own calls are not."""
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}
    said = grammar(parser, TOOLS)
    seen = set()
    for seed in range(8):
        text = noise(said, seed)
        calls = calls_of(parser, text, TOOLS)
        assert calls, text
        for name, arguments in calls:
            jsonschema.validate(arguments, schemas[name])
            seen.add(name)
    assert len(seen) > 1


def test_a_structure_or_a_call() -> None:
    answer = Structure("response_format", [f"body: {json_term(WITH_NAME)}"])
    shapes, calls = set(), set()
    for parser in ("generic", "json_tools", "qwen3_coder"):
        written = format_of(parser).calls
        assert written is not None
        said = grammar_of(answer.or_body(call_rules([PLAIN], written, {}, parallel=True)).rules)
        for seed in range(12):
            text = noise(said, seed)
            parts = parts_of(text, len(text), format_of(parser), tools=[PLAIN])
            if parts and parts[0].kind == "call":
                calls.add(parser)
            else:
                jsonschema.validate(json.loads(text), WITH_NAME)
                shapes.add(parser)
    assert "generic" in shapes & calls
    assert calls | shapes == {"generic", "json_tools", "qwen3_coder"}
    with pytest.raises(ApiError, match="structured_outputs"):
        Structure("structured_outputs", ["start: /a/"], is_whole=True).or_body([])


def test_gpt_oss_may_think_before_it_calls() -> None:
    """Its marks are control tokens: here bytes that are in no text."""
    special = {"<|channel|>": 0xF8, "<|message|>": 0xF9, "<|end|>": 0xFA, "<|start|>": 0xFB}
    assert HARMONY.calls is not None
    said = grammar_of(call_rules([PLAIN], HARMONY.calls, special, parallel=True))
    head = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at":"","deep":1,'
    call = f'{head}"day":"mon"}}'
    for text in (call, f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{call}"):
        tokens = text.encode()
        for mark, number in special.items():
            tokens = tokens.replace(mark.encode(), bytes([number]))
        matcher = llguidance.LLMatcher(TOKENS, said)
        assert matcher.consume_tokens(list(tokens))
        assert matcher.is_accepting()
        arguments = {"at": "", "deep": 1, "day": "mon"}
        *_, called = parts_of(text, len(text), HARMONY, tools=[PLAIN])
        assert (called.name, json.loads(called.text)) == ("look", arguments)
