"""Answers of a model that knows nothing keep to their grammar: its logits are noise."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tokenizer_utils import load
from tokenizers import AddedToken

from shardmlx.inference.grammars import Grammars, grammars_of
from shardmlx.inference.prompts import PromptEncoder
from shardmlx.inference.sampler import BatchSampler
from shardmlx.inference.sampling_params import BROKEN, SamplingParams
from shardmlx.server.openai_errors import ApiError
from shardmlx.server.structure import (
    Structure,
    StructureBody,
    StructuredBody,
    call_rules,
    grammar_of,
)
from tests.helpers.answers import format_of, parts_of
from tests.helpers.call_counts import calls_by_name

pytest.importorskip("llguidance", reason="needs llguidance: pip install llguidance")

SIZE = 448
"""Logits are wider than the vocabulary of 400, as those of many models."""
MOST = 400
SHORT = {"type": "string", "maxLength": 8}
NUMBER = {"type": "integer", "minimum": -99, "maximum": 99}
DAY = {"enum": ["mon", "tue", "wed"]}


@pytest.fixture(scope="module")
def encoder(small_tokenizer: Path) -> PromptEncoder:
    return PromptEncoder(tokenizer=load(small_tokenizer))


@pytest.fixture(scope="module")
def grammars(encoder: PromptEncoder) -> Grammars:
    return known_grammars(encoder)


def known_grammars(encoder: PromptEncoder) -> Grammars:
    """Return the grammars of a model; pickled, as ranks are sent them."""
    found = pickle.loads(pickle.dumps(grammars_of(encoder, SIZE)))
    assert isinstance(found, Grammars)
    return found


def asked(
    grammars: Grammars, end: str | None = None, special: dict[str, int] | None = None, **fields: Any
) -> str:
    structure = StructuredBody(structured_outputs=StructureBody(**fields)).structure()
    assert structure is not None
    return structure.grammar(grammars.complaint, end, special or {})


def answer(encoder: PromptEncoder, grammars: Grammars, grammar: str, seed: int = 0) -> str:
    """The text that noise says at temperature 1 up to its own end."""
    *tokens, end = sampled(grammars, grammar, seed)
    text: str = encoder.tokenizer.decode(tokens)
    assert end in encoder.tokenizer.eos_token_ids, text
    return text


def sampled(grammars: Grammars, grammar: str, seed: int = 0) -> list[int]:
    """The tokens of noise at temperature 1 up to an end or a break."""
    sampler = BatchSampler(0, grammars)
    sampler.open(0, SamplingParams(temp=1.0, seed=seed, grammar=grammar))
    noise = mx.random.key(seed)
    tokens: list[int] = []
    while len(tokens) < MOST:
        noise, key = mx.random.split(noise)
        row = sampler.sample([0], 3 * mx.random.normal((1, SIZE), key=key))
        (token,) = np.array(row)[:, 0].tolist()
        tokens.append(token)
        sampler.settle([0], [token])
        if token in (1, BROKEN):
            break
    return tokens


def closed(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def is_number(value: Any) -> bool:
    return isinstance(value, int) and -99 <= value <= 99


def is_short(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 8


CASES: list[tuple[dict[str, Any], Callable[[Any], bool]]] = [
    (NUMBER, is_number),
    (SHORT, is_short),
    ({"const": {"a": [1]}}, lambda v: v == {"a": [1]}),
    ({"type": "string", "pattern": "^[a-c]{2,4}$"}, lambda v: bool(re.fullmatch("[a-c]{2,4}", v))),
    ({"type": "string", "format": "date"}, lambda v: bool(re.fullmatch(r"\d{4}-\d\d-\d\d", v))),
    (
        {"type": "array", "items": DAY, "minItems": 2, "maxItems": 3},
        lambda v: 2 <= len(v) <= 3 and set(v) <= set(DAY["enum"]),
    ),
    ({"type": "array", "prefixItems": [NUMBER, SHORT], "items": False, "minItems": 2},
     lambda v: is_number(v[0]) and is_short(v[1]) and len(v) == 2),
    (closed(a=closed(b=closed(c=DAY))), lambda v: v["a"]["b"]["c"] in DAY["enum"]),
    (
        {**closed(a=NUMBER, b=NUMBER), "required": ["b"]},
        lambda v: is_number(v["b"]) and set(v) <= {"a", "b"},
    ),
    (
        {"anyOf": [closed(kind={"const": "a"}, x=NUMBER), closed(kind={"const": "b"}, y=DAY)]},
        lambda v: is_number(v["x"]) if v["kind"] == "a" else v["y"] in DAY["enum"],
    ),
    (
        {"$ref": "#/$defs/day", "$defs": {"day": DAY}},
        lambda v: v in DAY["enum"],
    ),
    ({"type": ["integer", "null"], "minimum": 0, "maximum": 9}, lambda v: v is None or 0 <= v <= 9),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_schema_is_satisfied_whatever_the_model_says(
    number: int, encoder: PromptEncoder, grammars: Grammars
) -> None:
    schema, holds = CASES[number]
    grammar = asked(grammars, json=schema)
    for seed in range(2):
        value = json.loads(answer(encoder, grammars, grammar, seed))
        assert holds(value), value


def test_patterns_choices_and_grammars(encoder: PromptEncoder, grammars: Grammars) -> None:
    for fields, pattern in (
        ({"regex": r"\d{2}/[ab]+x{1}"}, r"\d{2}/[ab]+x"),
        ({"choice": ["port", 'star"board']}, 'port|star"board'),
        ({"grammar": 'start: "a" B\nB: /[xy]{3}/'}, "a[xy]{3}"),
    ):
        assert re.fullmatch(pattern, answer(encoder, grammars, asked(grammars, **fields)))


def test_a_thought_comes_first_and_is_free(encoder: PromptEncoder, grammars: Grammars) -> None:
    grammar = asked(grammars, "e", choice=["aye"])
    assert re.fullmatch(r"[^e]*eaye", answer(encoder, grammars, grammar), re.DOTALL)


@pytest.fixture
def marked(small_tokenizer: Path) -> PromptEncoder:
    """An encoder whose marks are tokens, one of them special: as Qwen's and Magistral's are."""
    tokenizer = load(small_tokenizer)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    tokenizer.add_special_tokens({"additional_special_tokens": ["[/THINK]", "<|end|>"]})
    return PromptEncoder(tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"choice": ["<think>aye</think>"]}, "<think>aye</think>"),
        ({"choice": ["<think>aye", "<think>aye"]}, "<think>aye"),
        ({"regex": "<think>[a]{2}</think>"}, "<think>aa</think>"),
        ({"json": {"const": "<think>"}}, '"<think>"'),
        ({"grammar": 'start: "<think>" "aye"'}, "<think>aye"),
    ],
)
def test_added_tokens_that_are_not_special_are_text(
    fields: dict[str, Any], text: str, marked: PromptEncoder
) -> None:
    grammars = known_grammars(marked)
    assert answer(marked, grammars, asked(grammars, **fields)) == text


def test_special_tokens_that_a_structure_spells_are_letters(marked: PromptEncoder) -> None:
    grammars = known_grammars(marked)
    end = marked.tokenizer.convert_tokens_to_ids("<|end|>")
    for fields, text in (
        ({"choice": ["<|end|>aye"]}, "<|end|>aye"),
        ({"json": {"enum": ["<|end|>"]}}, '"<|end|>"'),
        ({"regex": r"<\|end\|>"}, "<|end|>"),
    ):
        tokens = sampled(grammars, asked(grammars, **fields))
        assert end not in tokens
        assert marked.untokenized(*tokens[:-1]) == text


@pytest.mark.parametrize("mark", ["</think>", "[/THINK]"])
def test_a_thought_ends_with_the_token_of_its_mark(mark: str, marked: PromptEncoder) -> None:
    grammars = known_grammars(marked)
    special = {"[/THINK]": marked.tokenizer.convert_tokens_to_ids("[/THINK]")}
    grammar = asked(grammars, mark, special, choice=["aye"])
    matcher = grammars.matcher(grammar)
    for token in marked.tokenizer.encode(f"Hm.{mark}aye", add_special_tokens=False):
        assert matcher.allowed()[0, token].item()
        matcher.take(token)
    assert np.flatnonzero(np.array(matcher.allowed())).tolist() == [1]


ITSELF = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"$ref": "#"}},
        {"json": {"anyOf": [{"$ref": "#"}]}},
        {"json": ITSELF},
        {"grammar": "start: start"},
    ],
)
def test_what_is_only_itself_is_refused(fields: dict[str, Any], grammars: Grammars) -> None:
    for thought_end in (None, "e") if "json" in fields else (None,):
        with pytest.raises(ApiError) as caught:
            asked(grammars, thought_end, **fields)
        assert (caught.value.status, caught.value.param) == (400, "structured_outputs")


def test_an_answer_that_cannot_go_on_is_broken(
    grammars: Grammars, capsys: pytest.CaptureFixture[str]
) -> None:
    grammar = asked(grammars, grammar='start: "a" start')
    assert sampled(grammars, grammar)[-1] == BROKEN
    assert len(capsys.readouterr().err.splitlines()) == 1


LOOK = {"type": "function", "function": {"name": "look", "parameters": closed(at=SHORT)}}
WAIT = {"type": "function", "function": {"name": "wait", "parameters": closed(days=NUMBER)}}
MARKS = ["[TOOL_CALLS]", "[ARGS]", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
         "<|tool_call>", "<tool_call|>", '<|"|>']  # fmt: skip


@pytest.mark.parametrize("tools", [[LOOK], [LOOK, WAIT]], ids=["named", "required"])
@pytest.mark.parametrize("parser", ["mistral", "kimi_k2", "gemma4"])
def test_calls_that_are_asked_for(parser: str, tools: list[Any], small_tokenizer: Path) -> None:
    """In the words of the model's own format, some of which are control tokens."""
    tokenizer = load(small_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    encoder = PromptEncoder(tokenizer=tokenizer)
    special = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in MARKS}
    known = format_of(parser)
    assert known.calls is not None
    rules = call_rules(tools, known.calls, special, parallel=len(tools) > 1)
    grammar = grammar_of(rules)
    grammars = Grammars(tokenizer.backend_tokenizer.to_str(), SIZE, (1,))
    numbers = set()
    for seed in range(3):
        text = answer(encoder, grammars, grammar, seed)
        calls = parts_of(text, len(text), known, tools=tools)
        for part in calls:
            assert part.kind == "call", text
            value = json.loads(part.text)
            assert is_short(value["at"]) if part.name == "look" else is_number(value["days"])
        numbers.add(len(calls))
    assert numbers == {1} if len(tools) == 1 else max(numbers) >= 1


def test_a_thousand_tools_are_made_ready_once(small_tokenizer: Path) -> None:
    grammars = known_grammars(PromptEncoder(tokenizer=load(small_tokenizer)))
    known = format_of("kimi_k2")
    assert known.calls is not None
    tools = [
        {"type": "function", "function": {"name": f"look_{n}", "parameters": closed(at=SHORT)}}
        for n in range(1000)
    ]
    rules = call_rules(tools, known.calls, {}, parallel=True)
    grammar = Structure("tool_choice", rules).grammar(grammars.complaint, None, {})
    known_by_now = calls_by_name(lambda: grammars.matcher(grammar))
    assert known_by_now["deep_copy"] == 1
    assert known_by_now.total() < 20
    # Two answers are at places of their own.
    first = grammars.matcher(grammar)
    allowed = first.allowed()
    (token,) = np.flatnonzero(np.array(allowed)[0])[:1].tolist()
    first.take(token)
    assert first.error == ""
    assert mx.array_equal(grammars.matcher(grammar).allowed(), allowed)


def test_one_of_three_thousand_texts(encoder: PromptEncoder, grammars: Grammars) -> None:
    texts = [f"{n} and {n}" for n in range(3000)]
    grammar = asked(grammars, choice=texts)
    assert {answer(encoder, grammars, grammar, seed) for seed in range(3)} <= {*texts}
    assert answer(encoder, grammars, asked(grammars, choice=["a", "ab"])) in ("a", "ab")


def test_what_is_too_large_for_llguidance_is_refused_in_a_line(grammars: Grammars) -> None:
    rules = [f"r{n}: {' '.join(40 * [chr(34) + 'a' + chr(34)])}" for n in range(3000)]
    rules.append(f"body: {' | '.join(f'r{n}' for n in range(3000))}")
    with pytest.raises(ApiError) as refused:
        Structure("tool_choice", rules).grammar(grammars.complaint, None, {})
    assert "backtrace" not in str(refused.value)


def test_sequences_of_a_batch_have_each_their_own(
    encoder: PromptEncoder, grammars: Grammars
) -> None:
    sampler = BatchSampler(0, grammars)
    for sequence, grammar in enumerate(['start: "a"', None, 'start: "b"']):
        sampler.open(sequence, SamplingParams(grammar=grammar))
    logits = mx.zeros((3, SIZE))
    logits[:, 7] = 9
    tokens = sampler.sample([0, 1, 2], logits)[:, 0].tolist()
    assert tokens == [encoder.text("a")[-1], 7, encoder.text("b")[-1]]


def test_bad_grammars_are_named_in_a_line(grammars: Grammars) -> None:
    assert "foo" in grammars.complaint("start: foo")
    assert "unclosed group" in grammars.complaint("start: /(/")
    assert grammars.complaint('start: %json {"type": "objct"}') != ""
