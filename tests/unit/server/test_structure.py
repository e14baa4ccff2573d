"""What structure a request asks for, and when it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from shardmlx.inference.answer_format import AnswerFormat, Marks
from shardmlx.server.chat_request import ServedModel
from shardmlx.server.model_names import ModelNames
from shardmlx.server.openai_errors import ApiError
from shardmlx.server.openai_requests import read_chat, read_completion
from shardmlx.server.structure import SPACE
from tests.helpers.http_serving import Letters

SCHEMA = {
    "additionalProperties": False,
    "type": "object",
    "properties": {"a": {"type": "integer"}},
}
RULE = f"%json {json.dumps({**SCHEMA, 'x-guidance': {'whitespace_pattern': SPACE}})}"


PARTS = ("json", "json_object", "regex", "choice", "grammar")


class Thinker(Letters):
    answer_format = AnswerFormat(Marks("<think>", "</think>"))

    def opens_thought(self, tokens: Any) -> bool:
        return True


def complaint(grammar: str) -> str:
    return "" if "objct" not in grammar else "Invalid type: objct"


def terms(complaint: Callable[[str], str] | None, encoder: Letters | None = None) -> ServedModel:
    return ServedModel(
        names=ModelNames(("ours",)),
        encoder=encoder or Letters(),
        most_tokens=600,
        most_requests=8,
        complaint=complaint,
    )


def grammar(encoder: Letters | None = None, knows: bool = True, **fields: Any) -> str | None:
    """That of a chat with these fields, or with such a part of ``structured_outputs``."""
    served = terms(complaint if knows else None, encoder)
    named = {name: fields.pop(name) for name in [*fields] if name in PARTS}
    more = {**fields, "structured_outputs": named} if named else fields
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **more}).encode()
    (request,) = read_chat(body, served).requests
    return request.sampling.grammar


def refusal(**fields: Any) -> tuple[str | None, str]:
    with pytest.raises(ApiError) as caught:
        grammar(**fields)
    assert caught.value.status == 400
    return caught.value.param, str(caught.value)


NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": NAMED},
        {"json": SCHEMA},
        {"json": json.dumps(SCHEMA)},
    ],
)
def test_a_schema(fields: dict[str, Any]) -> None:
    assert grammar(**fields) == f"start: body\nbody: {RULE}"


def test_an_object_has_the_properties_that_are_named_unless_its_schema_says_more() -> None:
    named: dict[str, Any] = {"properties": {"a": {"type": "null"}}}
    for schema, says in (
        (named, False),
        ({**named, "additionalProperties": True}, True),
        ({**named, "allOf": [{"required": ["b"]}]}, False),
        ({"type": "object"}, None),
    ):
        rule = str(grammar(json=schema)).partition("%json ")[2]
        assert json.loads(rule).get("additionalProperties") is says


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        ({"regex": r"[0-9]{2}/\d\n"}, r"/[0-9]{2}\/\d\n/"),
        ({"regex": "a\\/b\n"}, r"/a\/b\n/"),
        ({"choice": ["yes", 'n"o']}, 'CHOICE\nCHOICE: "yes" | "n\\"o"'),
    ],
)
def test_a_pattern_and_a_choice(fields: dict[str, Any], body: str) -> None:
    assert grammar(**fields) == f"start: body\nbody: {body}"


def test_any_object_and_a_grammar_as_it_is() -> None:
    any_object = grammar(response_format={"type": "json_object"})
    assert any_object is not None
    assert any_object.startswith('start: body\nbody: %json {"type": "object", "x-guid')
    assert any_object == grammar(json_object=True)
    assert grammar(grammar='start: "a"') == 'start: "a"'


def test_of_a_model_that_thinks_only_the_answer_has_a_structure() -> None:
    assert grammar(Thinker(), choice=["a"]) == (
        'start: thought body\nbody: CHOICE\nCHOICE: "a"\nthought[suffix="</think>"]: /(?s:.*)/'
    )
    assert refusal(encoder=Thinker(), grammar="start: A")[0] == "structured_outputs"


def test_completions_have_it_too() -> None:
    served = terms(complaint)
    body = json.dumps({"prompt": "hi", "structured_outputs": {"choice": ["a"]}}).encode()
    (request,) = read_completion(body, served).requests
    assert request.sampling.grammar == 'start: body\nbody: CHOICE\nCHOICE: "a"'


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"json": {"type": "objct"}}, "structured_outputs", "objct"),
        ({"json": "{"}, "structured_outputs.json", "an object"),
        ({"json": "[]"}, "structured_outputs.json", "an object"),
        ({"response_format": NAMED, "regex": "a"}, "response_format", "structured_outputs"),
        ({"json": {}, "regex": "a"}, "structured_outputs", "(json) and structured_outputs (regex)"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"choice": []}, "structured_outputs", "texts"),
        ({"choice": ["a"], "knows": False}, "structured_outputs", "pip install llguidance"),
    ],
)
def test_what_cannot_be(fields: dict[str, Any], param: str, named: str) -> None:
    where, said = refusal(**fields)
    assert where == param
    assert named in said


def test_a_grammar_that_would_keep_all_answers_waiting_is_refused() -> None:
    assert refusal(choice=20_000 * ["word"])[0] == "structured_outputs"
    optional = {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(9000)}}
    assert refusal(json=optional)[0] == "structured_outputs"
