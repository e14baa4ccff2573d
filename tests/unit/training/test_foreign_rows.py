"""Rows in the forms of other tools, Alpaca's and ShareGPT's: each is read, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.training.datasets import DataSets, read_data
from testbed.rows import write
from tests.helpers.letters import EOS, Letters, listed

ALPACA = {"instruction": "add", "input": "1 2", "output": "3"}
HUMAN = {"from": "human", "value": "hi"}
GPT = {"from": "gpt", "value": "ho"}
CALL = {"from": "function_call", "value": '{"name": "look", "arguments": {"at": "sea"}}'}
SEEN = {"from": "observation", "value": "blue"}
TOOL = {"name": "look", "description": "see", "parameters": {"type": "object"}}


class Calls(Letters):
    """A tokenizer whose template knows tools, their calls, and the ids of these."""

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: object) -> str:
        parts = [f"[{json.dumps(tools)}]"] if tools else []
        for each in messages:
            calls = []
            for call in each.get("tool_calls", ()):
                function = call["function"]
                arguments = json.dumps(function["arguments"])
                calls.append(f"{call['id']} {function['name']} {arguments}")
            named = each.get("tool_call_id", "")
            parts.append(f"<{each['role'][0]}>{each['content']}{named}{''.join(calls)};")
        return "".join(parts)


def read(directory: Path, *rows: Any, tokenizer: Any = Letters, **options: Any) -> DataSets:
    data = write(directory, train=rows)
    config = TrainConfig.from_flat(data=data, **{"batch_size": 1, **options})
    return read_data(config.wanted_data, tokenizer(), None)


def texts(directory: Path, *rows: Any, **how: Any) -> list[str]:
    samples = listed(read(directory, *rows, **how).train)
    return ["".join(chr(token) for token in tokens if token != EOS) for tokens, _ in samples]


def problem(directory: Path, *rows: Any, **how: Any) -> str:
    with pytest.raises(UserError) as error:
        read(directory, *rows, **how)
    assert error.value.remedy
    return error.value.problem


def unread(directory: Path, *rows: Any, **how: Any) -> list[str]:
    return [each for each in read(directory, *rows, **how).warnings if "not read" in each]


# Alpaca.


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "<u>add\n1 2;<a>3;"),
        ({"input": ""}, "<u>add;<a>3;"),
        ({"input": None}, "<u>add;<a>3;"),
        ({"instruction": ""}, "<u>1 2;<a>3;"),
        ({"system": "be brief"}, "<s>be brief;<u>add\n1 2;<a>3;"),
        ({"system": ""}, "<u>add\n1 2;<a>3;"),
        ({"history": [["a", "b"], ["c", "d"]]}, "<u>a;<a>b;<u>c;<a>d;<u>add\n1 2;<a>3;"),
        ({"history": [], "system": None}, "<u>add\n1 2;<a>3;"),
    ],
)
def test_an_instruction_and_its_input_are_a_question(
    tmp_path: Path, more: dict[str, Any], text: str
) -> None:
    assert texts(tmp_path, {**ALPACA, **more}) == [text]
    assert unread(tmp_path, {**ALPACA, **more}) == []


def test_only_the_output_counts_with_a_masked_prompt(tmp_path: Path) -> None:
    ((_, start),) = listed(read(tmp_path, ALPACA, mask_prompt=True).train)
    assert start == len("<u>add\n1 2;<a>")


def test_rows_without_an_input_may_stand_among_others(tmp_path: Path) -> None:
    short = {"instruction": "add", "output": "3"}
    assert texts(tmp_path, ALPACA, short) == ["<u>add;<a>3;", "<u>add\n1 2;<a>3;"]
    assert texts(tmp_path, short, {**short, "history": [["a", "b"]]})[1].startswith("<u>a;<a>b;")


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({**ALPACA, "input": 3}, "input is 3"),
        ({**ALPACA, "output": None}, "output is null"),
        ({**ALPACA, "output": ["a", "b"]}, 'output is ["a", "b"]'),
        ({**ALPACA, "history": [["a"]]}, 'history[0] is ["a"]'),
        ({**ALPACA, "system": ["a"]}, 'system is ["a"]'),
        ({"instruction": "a"}, "no key 'output'"),
        ({"prompt": "a", "completion": "b"}, "no key 'instruction'"),
        ({"instruction": " ", "output": ""}, "no words"),
    ],
)
def test_an_instruction_that_is_none_is_refused(tmp_path: Path, row: Any, named: str) -> None:
    found = problem(tmp_path, ALPACA, row)
    assert named in found
    assert "train.jsonl:2" in found


def test_a_column_of_text_is_read_first_as_in_mlx_lm(tmp_path: Path) -> None:
    """Stanford's own rows have all of it in ``text``, in a form for models without a template."""
    row = {**ALPACA, "text": "Below is an instruction ..."}
    assert texts(tmp_path, row) == ["Below is an instruction ..."]
    (warning,) = unread(tmp_path, row)
    assert "'instruction', 'input', 'output'" in warning
    with pytest.raises(UserError) as error:
        read(tmp_path, row, mask_prompt=True)
    assert "'text'" in error.value.remedy
    assert "'instruction'" in error.value.remedy


def test_columns_beside_an_instruction_are_named_once(tmp_path: Path) -> None:
    rows = [{**ALPACA, "topic": "sums"}, {**ALPACA, "topic": "sums", "id": 3}]
    (warning,) = unread(tmp_path, *rows)
    assert "'topic', 'id'" in warning


# ShareGPT.


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        ([HUMAN, GPT], "<u>hi;<a>ho;"),
        ([{"from": "system", "value": "be brief"}, HUMAN, GPT], "<s>be brief;<u>hi;<a>ho;"),
        ([{"from": "user", "value": "hi"}, {"from": "assistant", "value": "ho"}], "<u>hi;<a>ho;"),
        ([HUMAN, {"from": "chatgpt", "value": "ho"}], "<u>hi;<a>ho;"),
        ([GPT, HUMAN, GPT], "<a>ho;<u>hi;<a>ho;"),
        ([HUMAN, HUMAN, GPT, GPT], "<u>hi;<u>hi;<a>ho;<a>ho;"),
        ([HUMAN, GPT, {"from": "tool", "value": "x"}, GPT], "<u>hi;<a>ho;<t>x;<a>ho;"),
        ([HUMAN, {"role": "assistant", "content": "ho"}], "<u>hi;<a>ho;"),
    ],
)
def test_turns_of_sharegpt_are_messages(tmp_path: Path, turns: Any, text: str) -> None:
    assert texts(tmp_path, {"conversations": turns}) == [text]
    assert texts(tmp_path, {"messages": turns}) == [text]
    assert texts(tmp_path, {"talk": turns}, chat_feature="talk") == [text]


def test_turns_of_a_table_have_nulls_for_the_keys_of_others(tmp_path: Path) -> None:
    turns = [{**HUMAN, "role": None, "content": None, "weight": None}]
    turns.append({"from": None, "value": None, "role": "assistant", "content": "ho"})
    assert texts(tmp_path, {"conversations": turns}) == ["<u>hi;<a>ho;"]


def test_calls_and_their_results_have_one_id(tmp_path: Path) -> None:
    row = {"conversations": [HUMAN, CALL, SEEN, CALL, SEEN, GPT], "tools": json.dumps([TOOL])}
    (text,) = texts(tmp_path, row, tokenizer=Calls)
    calls = ["call00001", "call00002"]
    said = "".join(f'<a>{each} look {{"at": "sea"}};<t>blue{each};' for each in calls)
    declared = json.dumps([{"type": "function", "function": TOOL}])
    assert text == f"[{declared}]<u>hi;{said}<a>ho;"


def test_several_calls_may_stand_in_one_turn(tmp_path: Path) -> None:
    call = json.loads(CALL["value"])
    turn = {"from": "function_call", "value": json.dumps([call, {**call, "name": "go"}])}
    row = {"conversations": [HUMAN, turn, SEEN, SEEN, GPT]}
    (text,) = texts(tmp_path, row, tokenizer=Calls)
    assert 'call00001 look {"at": "sea"}call00002 go {"at": "sea"};' in text
    assert "<t>bluecall00001;<t>bluecall00002;" in text


def test_the_column_system_begins_a_conversation(tmp_path: Path) -> None:
    for row in (
        {"conversations": [HUMAN, GPT], "system": "be brief"},
        {"messages": [{"role": "user", "content": "hi"}, GPT], "system": "be brief"},
        {"prompt": "hi", "completion": "ho", "system": "be brief"},
    ):
        assert texts(tmp_path, row) == ["<s>be brief;<u>hi;<a>ho;"]
        assert unread(tmp_path, row) == []
    begins = [{"from": "system", "value": "be long"}, HUMAN, GPT]
    assert "'system'" in problem(tmp_path, {"conversations": begins, "system": "be brief"})
    (warning,) = unread(tmp_path, {"text": "hi", "system": "be brief"})
    assert "'system'" in warning


@pytest.mark.parametrize(
    ("turn", "named"),
    [
        ({"from": "alien", "value": "x"}, 'conversations[1] is from "alien"'),
        ({"from": None, "value": "x"}, "conversations[1] is from null"),
        ({"from": "gpt"}, "conversations[1].value is null"),
        ({"from": "gpt", "value": ["x"]}, 'conversations[1].value is ["x"]'),
        ({"from": "function_call", "value": "look"}, 'conversations[1].value is "look"'),
        ({"from": "function_call", "value": '{"arguments": {}}'}, "conversations[1].value"),
        ({"value": "x"}, "conversations[1]"),
        ({**GPT, "content": "x"}, "conversations[1] has 'value'"),
        ("x", "conversations[1]"),
    ],
)
def test_a_turn_that_is_none_is_refused(tmp_path: Path, turn: Any, named: str) -> None:
    found = problem(tmp_path, {"conversations": [HUMAN, turn]})
    assert named in found
    assert "train.jsonl:1" in found


def test_a_turn_may_say_that_it_does_not_count(tmp_path: Path) -> None:
    row = {"conversations": [HUMAN, {**GPT, "weight": 0}, HUMAN, GPT]}
    ((tokens, start),) = listed(read(tmp_path, row, loss_on="assistant").train)
    counted = "".join(chr(token) for token in tokens[start:] if token >= 0)
    assert (start, counted) == (len("<u>hi;<a>ho;<u>hi;<a>"), "ho;")


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "hi"},
        {"conversations": [HUMAN]},
        {"instruction": "hi", "input": ""},
        {"instruction": "", "input": "hi"},
    ],
)
def test_preferences_may_have_these_forms(tmp_path: Path, prompt: Any) -> None:
    row = {**prompt, "chosen": GPT, "rejected": {"from": "gpt", "value": "no"}}
    found = texts(tmp_path, row, objective="dpo", batch_size=2)
    assert found == ["<u>hi;<a>ho;", "<u>hi;<a>no;"]
    assert unread(tmp_path, row, objective="dpo", batch_size=2) == []
