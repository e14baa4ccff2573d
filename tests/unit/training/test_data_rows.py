"""Rows that are not what they seem: what has one meaning is trained, all else is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlx_lm.tuner.datasets import load_dataset as mlx_lm_load_dataset

from shardmlx.config.inference import EvaluateConfig
from shardmlx.config.train import TrainConfig
from shardmlx.engine.batches import make_batch
from shardmlx.errors import UserError
from shardmlx.evaluation.command import read_texts
from shardmlx.inference.prompts import PromptEncoder
from shardmlx.training.datasets import read_data
from testbed.rows import write
from tests.helpers.chat_families import FAMILIES
from tests.helpers.chat_templates import KINDS, tokenizer_with
from tests.helpers.letters import listed

CHATML = KINDS["chatml"].template
NO_TOOLS = KINDS["llama 3"].template
STRINGS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments }}){% endfor %};{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}|{% endfor %}{% endif %};{% endfor %}"
)
JSON_RESULTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'tool' and m.content is mapping %}"
    "{{ m.content | tojson }}{% else %}{{ m.content }}{% endif %};{% endfor %}"
)
RENAMED = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for r in m.tool_responses or [] %}{{ r.name }}={{ r.response }}{% endfor %};{% endfor %}"
)

USER = {"role": "user", "content": "a b"}
ANSWER = {"role": "assistant", "content": "c d"}


def call(arguments: Any, **others: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": function}],
    } | others


def texts(directory: Path | str, template: str = CHATML, **options: Any) -> list[str]:
    config = TrainConfig.from_flat(data=str(directory), batch_size=1, **options)
    tokenizer = tokenizer_with(template)
    data = read_data(config.wanted_data, tokenizer, None)
    return [tokenizer.decode(tokens) for tokens, _ in listed(data.train or data.test)]


def text_of(tmp_path: Path, row: Any, template: str = CHATML, **options: Any) -> str:
    (text,) = texts(write(tmp_path, train=[row]), template, **options)
    return text


def refusal(tmp_path: Path, row: Any, template: str = CHATML, **options: Any) -> UserError:
    good = {"prompt": "a", "completion": "b"} if "prompt" in row else {"messages": [USER, ANSWER]}
    if "conversations" in row:
        good = {"conversations": [USER, ANSWER]}
    with pytest.raises(UserError) as error:
        texts(write(tmp_path, train=[good, row]), template, **options)
    assert f"{tmp_path}/train.jsonl:2" in error.value.problem
    assert error.value.remedy
    return error.value


# Refused.


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], ("messages is []", "no list of messages")),
        (["hi"], ('messages[0] is "hi"', "no message")),
        ([USER, {"role": "assistant"}], ("messages[1]", "no content", "'role'")),
        ([{"content": "a"}, ANSWER], ("messages[0]", "role null", "'content'")),
        ([{"Role": "user", "Content": "a"}], ("messages[0]", "role null", "'Role', 'Content'")),
        ([USER, {"role": "assistant", "text": "c"}], ("messages[1]", "no content", "'text'")),
        ([USER, {**ANSWER, "content": None}], ("messages[1]", "content null")),
        ([USER, {**ANSWER, "content": None, "refusal": "no"}], ("messages[1]", "'refusal'")),
        ([{**USER, "role": 7}], ("messages[0]", "role 7")),
        ([USER, {**ANSWER, "content": {"a": 1}}], ('content is {"a": 1}', "not text")),
        ([USER, {**ANSWER, "content": ["c", "d"]}], ('content is ["c", "d"]', "not text")),
        ([USER, {**ANSWER, "tool_calls": "[]"}], ("messages[1].tool_calls", "no list of calls")),
        ([USER, {**ANSWER, "content": {}}], ("messages[1]", "content {}")),
        ([USER, {**ANSWER, "content": [{}]}], ("content is [{}]", "not text")),
        ([USER, call({}, tool_calls=[{"function": "f"}])], ("messages[1].tool_calls", "name")),
        ([USER, {**ANSWER, "function_call": {"name": "f"}}], ("messages[1]", "function_call")),
        ([USER, {**ANSWER, "role": "Assistant"}], ("messages[1]", '"Assistant"')),
        ([USER, call([1])], ("messages[1].tool_calls[0].function.arguments", "[1]")),
        ([USER, call("{")], ("messages[1].tool_calls[0].function.arguments", '"{"')),
        (
            [{**USER, "content": [{"type": "text", "text": "a"}, {"type": "image"}]}, ANSWER],
            ("messages[0].content", '"image"'),
        ),
        (
            [{**USER, "content": [{"type": "text", "text": None}]}, ANSWER],
            ("messages[0].content", '"text"'),
        ),
    ],
)
def test_messages_that_are_none_are_refused(
    tmp_path: Path, messages: list[Any], words: tuple[str, ...]
) -> None:
    problem = refusal(tmp_path, {"messages": messages}).problem
    assert all(word in problem for word in words), problem


def test_messages_of_other_spellings_are_refused_under_a_name_of_their_own(tmp_path: Path) -> None:
    row = {"conversations": [{"speaker": "user", "text": "a b"}]}
    found = refusal(tmp_path, row, chat_feature="conversations")
    assert "conversations[0]" in found.problem
    assert "'speaker', 'text'" in found.problem
    assert '"role"' in found.remedy


@pytest.mark.parametrize("value", [{"name": "x"}, ["c"], [USER], [], 3, None, True])
def test_prompts_are_text(tmp_path: Path, value: Any) -> None:
    problem = refusal(tmp_path, {"prompt": value, "completion": "b"}).problem
    assert f"prompt is {json.dumps(value)}" in problem
    assert "no key 'completion'" in refusal(tmp_path, {"prompt": "a"}).problem


@pytest.mark.parametrize(
    "tools",
    [
        json.dumps([{"type": "function"}]),
        {"type": "function"},
        ["f"],
        [{"type": "function", "function": {"name": "f", "parameters": "{}"}}],
    ],
)
def test_tools_are_objects(tmp_path: Path, tools: Any) -> None:
    found = refusal(tmp_path, {"messages": [USER, ANSWER], "tools": tools})
    assert "tools is" in found.problem
    assert "list of objects" in found.remedy


@pytest.mark.parametrize(
    "row",
    [{"messages": [{**USER, "content": "\ud800"}]}, {"prompt": "a", "completion": "a\udc00"}],
)
def test_half_a_character_is_named(tmp_path: Path, row: Any) -> None:
    assert "cannot be tokenised: " in refusal(tmp_path, row).problem


def test_what_the_template_leaves_out_is_no_answer(tmp_path: Path) -> None:
    for message in (call({}), call({}, content="c d")):
        problem = refusal(tmp_path, {"messages": [USER, message]}, NO_TOOLS).problem
        assert "messages[1]" in problem
        assert "tool_calls" in problem
    strict = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    row = {"messages": [USER, {"role": "gpt", "content": "c d"}]}
    assert 'role "gpt"' in refusal(tmp_path, row, strict).problem


def test_what_a_chat_template_refuses_is_named(tmp_path: Path) -> None:
    row = {"messages": [{"role": "system", "content": "a"}, USER, ANSWER]}
    assert "no system" in refusal(tmp_path, row, KINDS["gemma"].template).problem


def test_without_an_end_token_no_row_is_to_blame(tmp_path: Path) -> None:
    config = TrainConfig.from_flat(data=write(tmp_path, train=[{"text": "a"}]), batch_size=1)
    with pytest.raises(UserError) as error:
        read_data(config.wanted_data, tokenizer_with(None, eos=None), None)
    assert "end token" in error.value.problem
    assert "row" not in error.value.remedy
    assert "eos_token" in error.value.remedy


@pytest.mark.parametrize("template", ["{% if %}", None])
@pytest.mark.parametrize("row", [{"messages": [USER]}, {"prompt": "a", "completion": "b"}])
def test_a_template_that_cannot_be_used_is_to_blame(
    tmp_path: Path, row: Any, template: Any
) -> None:
    with pytest.raises(UserError) as error:
        text_of(tmp_path, row, template)
    assert "chat template" in error.value.problem
    assert ":1" not in error.value.problem
    assert "fix the row" not in error.value.remedy


# Trained.


def test_keys_of_other_formats_that_hold_nothing_are_no_part(tmp_path: Path) -> None:
    empty: dict[str, Any] = {
        "refusal": None,
        "tool_calls": None,
        "function_call": None,
        "annotations": [],
    }
    logged = {"messages": [{**USER, "name": None}, {**ANSWER, **empty}], "tools": None}
    everything = "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools is none }}"
    plain = {"messages": [USER, ANSWER]}
    for template in (CHATML, everything):
        assert text_of(tmp_path, logged, template) == text_of(tmp_path, plain, template)


@pytest.mark.parametrize("row", ["messages", "prompt"])
def test_parts_of_text_are_joined_unless_the_template_takes_them(tmp_path: Path, row: str) -> None:
    parts: Any = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "image_url": None}]
    rows: dict[str, dict[str, Any]] = {
        "messages": {"messages": [{"role": "user", "content": parts}, ANSWER]},
        "prompt": {"prompt": parts, "completion": "c d"},
    }
    assert "<|im_start|>user\nab<|im_end|>" in text_of(tmp_path, rows[row])
    assert text_of(tmp_path, rows[row], PARTS) == "user:a|b|;assistant:c d;"


def test_a_template_that_takes_parts_may_leave_a_thought_out(tmp_path: Path) -> None:
    spoken = PARTS.replace("{{ p.text }}", "{{ p.text.split('</think>')[-1] }}")
    parts = [{"type": "text", "text": "<think>why</think>c d"}]
    row = {"messages": [USER, {"role": "assistant", "content": parts}]}
    assert text_of(tmp_path, row, spoken) == "user:a b;assistant:c d|;"


@pytest.mark.parametrize("arguments", ['{"at": "sea"}', {"at": "sea"}])
def test_arguments_have_the_form_that_the_template_wants(tmp_path: Path, arguments: Any) -> None:
    row = {"messages": [USER, call(arguments)]}
    assert '"arguments": {"at": "sea"}' in text_of(tmp_path, row)
    assert text_of(tmp_path, row, STRINGS) == 'user:a b;assistant:look({"at": "sea"});'


@pytest.mark.parametrize("arguments", ["", "{}", {}, None])
def test_no_arguments_are_an_object(tmp_path: Path, arguments: Any) -> None:
    assert '"arguments": {}' in text_of(tmp_path, {"messages": [USER, call(arguments)]})


@pytest.mark.parametrize("others", [{}, {"content": None}, {"content": ""}])
def test_calls_without_content_are_trained_where_the_template_requires_one(
    tmp_path: Path, others: Any
) -> None:
    requires = (
        "{% for m in messages %}{{ m.role }}:{{ m.content + '' if loop.last else "
        "m.content.split('</think>')[-1] }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %};{% endfor %}"
    )
    row = {"messages": [USER, call({"at": "sea"}, **others), ANSWER]}
    assert text_of(tmp_path, row, requires) == (
        'user:a b;assistant:look({"at": "sea"});assistant:c d;'
    )


def test_a_role_that_the_template_knows_at_the_beginning_alone_is_trained(tmp_path: Path) -> None:
    begins = (
        "{% for m in messages %}{% if m.role != 'developer' or loop.first %}{{ m.role }}:"
        "{{ m.content }};{% endif %}{% endfor %}"
    )
    developer = {"role": "developer", "content": "be brief"}
    row = {"messages": [developer, USER, ANSWER]}
    assert text_of(tmp_path, row, begins) == "developer:be brief;user:a b;assistant:c d;"
    nowhere = begins.replace("or loop.first", "")
    assert '"developer"' in refusal(tmp_path, row, nowhere).problem


def test_nulls_in_arguments_of_json_lines_are_values(tmp_path: Path) -> None:
    assert '{"at": null}' in text_of(tmp_path, {"messages": [USER, call({"at": None})]})


def test_results_that_the_template_writes_as_json_are_trained(tmp_path: Path) -> None:
    row = {"messages": [USER, {"role": "tool", "content": {"sea": "blue"}}, ANSWER]}
    assert '{"sea": "blue"}' in text_of(tmp_path, row, JSON_RESULTS)
    assert '{"sea": "blue"}' in refusal(tmp_path, row).problem


def test_another_key_that_the_template_writes_is_a_content(tmp_path: Path) -> None:
    result = {"role": "assistant", "tool_responses": [{"name": "look", "response": "blue"}]}
    assert "look=blue" in text_of(tmp_path, {"messages": [USER, result, ANSWER]}, RENAMED)


ROWS = [
    {"messages": [USER, ANSWER]},
    {"messages": [USER, ANSWER, USER, ANSWER], "tools": [{"type": "function"}]},
    {
        "messages": [
            USER,
            call({"at": "sea", "how": None}),
            {"role": "tool", "content": "x"},
            ANSWER,
        ]
    },
    {"messages": [USER, call({"at": "sea"}, content="")]},
    {"messages": [USER, {"role": "gpt", "content": "c"}, {"role": "system", "content": ""}]},
    {"messages": [USER, {"role": "assistant", "content": ""}]},
    {"messages": [{**USER, "name": "Ann", "weight": 1}, ANSWER]},
]


@pytest.mark.parametrize("mask_prompt", [False, True])
def test_rows_that_are_what_they_seem_have_the_tokens_of_mlx_lm(
    tmp_path: Path, mask_prompt: bool
) -> None:
    data = write(tmp_path, train=ROWS, valid=[{"prompt": "a", "completion": "b"}] * 2)
    config = TrainConfig.from_flat(data=data, batch_size=1, mask_prompt=mask_prompt, train=True)
    tokenizer = tokenizer_with(CHATML)
    ours = read_data(config.wanted_data, tokenizer, None)
    train, valid, _ = mlx_lm_load_dataset(SimpleNamespace(**config.flat()), tokenizer)
    rows = sorted((train[i] for i in range(len(train))), key=len)
    assert listed(ours.train) == [(list(t), s) for t, s in map(train.process, rows)]
    assert listed(ours.valid) == [(list(t), s) for t, s in map(valid.process, valid)]


# Other files.

ONE = {"messages": [USER, call({"at": "sea"})]}
OTHER = {"messages": [USER, call({"from": ["a", "b"]}, content="so"), ANSWER]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"a": {"type": "string"}}}},
    {"type": "function", "function": {"name": "g", "parameters": {"b": {"enum": ["x"]}}}},
]


def test_nulls_that_parquet_adds_are_no_part(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{**ONE, "tools": TOOLS}, {**OTHER, "tools": None}]
    expected = texts(write(tmp_path / "lines", train=rows))
    (tmp_path / "columns").mkdir()
    table = pyarrow.Table.from_pylist(rows)
    assert "null" in json.dumps(table.to_pylist())
    parquet.write_table(table, tmp_path / "columns" / "train.parquet")
    assert texts(tmp_path / "columns") == sorted(expected, key=len, reverse=True)


def test_nulls_of_the_datasets_package_are_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    directory = write(tmp_path / "lines", train=[{**ONE, "tools": TOOLS}, {**OTHER, "tools": []}])
    lines = f"{directory}/train.jsonl"
    given = {"path": "json", "config": {"data_files": lines}, "test_split": "train"}
    how: dict[str, Any] = {"hf_dataset": given, "train": False, "test": True}
    assert texts(tmp_path, **how) == texts(directory)

    with pytest.raises(UserError) as error:
        texts(tmp_path, **how | {"hf_dataset": {**given, "chat_feature": "talk"}})
    assert "'messages', 'tools'" in error.value.problem
    assert "'talk'" in error.value.problem
    del given["test_split"]
    with pytest.raises(UserError) as error:
        texts(tmp_path, **how)
    assert "test_split has no default" in error.value.problem


def test_rows_of_other_sets_and_commands_are_the_same(tmp_path: Path) -> None:
    good, bad = [ROWS[0]], [{"messages": [USER, {"role": "assistant"}]}]
    for name in ("valid", "test"):
        rows: dict[str, Any] = {"valid": good, "test": good, name: bad}
        data = write(tmp_path, train=good, valid=rows["valid"], test=rows["test"])
        with pytest.raises(UserError) as error:
            texts(data, train=True, test=True)
        assert f"{name}.jsonl:1" in error.value.problem
    config = EvaluateConfig.from_flat(model="m", data=str(tmp_path))
    with pytest.raises(UserError) as error:
        read_texts(config, PromptEncoder(tokenizer=tokenizer_with(CHATML)), pytest.fail)
    assert "test.jsonl:1" in error.value.problem


# Messages that count in the loss.

TURNS = [
    {"role": "user", "content": "u one"},
    {"role": "assistant", "content": "a one"},
    {"role": "user", "content": "u two"},
    {"role": "assistant", "content": "a two"},
]


def counted(directory: Path, turns: Any, **options: Any) -> str:
    """What counts of a row, without the marks of the template."""
    data = write(directory, train=[{"messages": turns}], valid=[{"messages": turns}])
    config = TrainConfig.from_flat(data=data, batch_size=1, **options)
    tokenizer = tokenizer_with(CHATML)
    samples = read_data(config.wanted_data, tokenizer, None).train
    ((tokens, start),) = listed(samples)
    ids = [token for i, token in enumerate(tokens) if i >= start and token >= 0]
    batch = make_batch([(tokens, start)], 512)
    # The first token has no prediction, and of a last one that counts mlx-lm counts a padding too.
    assert batch.valid_tokens == len(ids) - (start == 0) + (tokens[-1] >= 0)
    assert samples.counted(512).tolist() == [len(ids) - (start == 0)]
    assert tokenizer.decode(batch.inputs[0].tolist()).startswith("<|im_start|>user")
    text = tokenizer.decode(ids).replace("<|im_start|>", " ").replace("<|im_end|>", "")
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "user u one assistant a one user u two assistant a two"),
        ({"loss_on": "all"}, "user u one assistant a one user u two assistant a two"),
        ({"mask_prompt": True}, "a two"),
        ({"loss_on": "last"}, "a two"),
        ({"loss_on": "assistant"}, "a one a two"),
    ],
)
def test_the_messages_that_the_user_names_count(
    tmp_path: Path, options: dict[str, Any], text: str
) -> None:
    assert counted(tmp_path, TURNS, **options) == text


@pytest.mark.parametrize("no", [{"train": False}, {"weight": 0}])
def test_a_message_may_say_that_it_does_not_count(tmp_path: Path, no: dict[str, Any]) -> None:
    first, answer, *rest = TURNS
    turns = [first, answer | no, *rest]
    assert counted(tmp_path, turns, loss_on="assistant") == "a two"
    assert "a one" not in counted(tmp_path, turns)
    assert counted(tmp_path, [first, answer, rest[0], rest[1] | no], loss_on="assistant") == "a one"
    with pytest.raises(UserError) as error:
        counted(tmp_path, [first, answer | {"weight": 0.5}])
    assert "weight 0.5" in error.value.problem


@pytest.mark.parametrize(
    "no",
    [
        *({"training": False}, {"trainable": False}, {"loss": False}, {"loss": 0}),
        *({"loss_mask": 0}, {"weight": 0.0}, {"masked": True}, {"train": False, "weight": 0}),
    ],
)
def test_a_message_may_say_so_in_the_words_of_other_tools(
    tmp_path: Path, no: dict[str, Any]
) -> None:
    first, answer, *rest = TURNS
    assert counted(tmp_path, [first, answer | no, *rest], loss_on="assistant") == "a two"
    yes = {key: not value for key, value in no.items()}
    assert counted(tmp_path, [first, answer | yes, *rest], loss_on="assistant") == "a one a two"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loss": "no"}, ('loss "no"',)),
        ({"loss_mask": [0, 1]}, ("loss_mask [0, 1]",)),
        ({"train": True, "weight": 0}, ("train true", "weight 0")),
        ({"loss": 1, "masked": True}, ("loss 1", "masked true")),
        ({"train_detail": [{"begin_offset": 0}]}, ("train_detail",)),
        ({"loss_scale": 0.3}, ("loss_scale",)),
    ],
)
def test_what_a_message_says_of_its_loss_is_read_or_named(
    tmp_path: Path, given: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as error:
        counted(tmp_path, [TURNS[0], TURNS[1] | given])
    assert "message 1" in error.value.problem
    assert all(word in error.value.problem for word in words)


# What is left out, or not there, is said once.


def warnings_of(
    tmp_path: Path,
    rows: list[Any],
    template: str = CHATML,
    ends: Any = "<|im_end|>",
    **options: Any,
) -> list[str]:
    """The warnings of the training set, without its name."""
    config = TrainConfig.from_flat(data=write(tmp_path, train=rows), batch_size=1, **options)
    found = read_data(config.wanted_data, tokenizer_with(template, eos=ends), None).warnings
    begin = f"{tmp_path}/train.jsonl: "
    return [each.removeprefix(begin) for each in found if each.startswith(begin)]


PLAIN = {"messages": [USER, ANSWER]}
THOUGHTFUL = {"messages": [USER, {**ANSWER, "reasoning_content": "for the sea"}]}
BESIDE_CALLS = FAMILIES["llama 3.1"].template
CUTS_THOUGHTS = FAMILIES["deepseek r1"].template


@pytest.mark.parametrize("loss_on", ["all", "last", "assistant"])
@pytest.mark.parametrize(
    ("row", "template", "key"),
    [
        (THOUGHTFUL, CHATML, "reasoning_content"),
        ({"messages": [USER, call({"at": "sea"}, content="c d")]}, BESIDE_CALLS, "content"),
        (
            {"messages": [USER, {**ANSWER, "content": "<think>for the sea</think>c d"}]},
            CUTS_THOUGHTS,
            "content",
        ),
        ({"messages": [{**USER, "name": "Ann"}, ANSWER]}, CHATML, "name"),
        # The words stand in another message, too.
        ({"messages": [USER, {**ANSWER, "reasoning_content": "a b"}]}, CHATML, "reasoning_content"),
    ],
)
def test_words_that_the_template_leaves_out_are_said_once(
    tmp_path: Path, row: Any, template: str, key: str, loss_on: str
) -> None:
    rows = [PLAIN, row, PLAIN, row]
    (warning,) = [
        each
        for each in warnings_of(tmp_path, rows, template, loss_on=loss_on)
        if "does not write" in each
    ]
    assert warning.startswith(f"2 of 4 rows have words in {key!r} of role ")
    assert f"{tmp_path}/train.jsonl:2" in warning


@pytest.mark.parametrize("loss_on", ["all", "last", "assistant"])
def test_an_answer_of_which_nothing_is_left_is_refused(tmp_path: Path, loss_on: str) -> None:
    thought = {**ANSWER, "content": "<think>for the sea</think>"}
    found = refusal(tmp_path, {"messages": [USER, thought]}, CUTS_THOUGHTS, loss_on=loss_on)
    assert "message 1" in found.problem
    assert "'content'" in found.problem
    beside = {"role": "assistant", "content": "", "reasoning_content": "for the sea"}
    found = refusal(tmp_path, {"messages": [USER, beside]}, loss_on=loss_on)
    assert "'reasoning_content'" in found.problem
    parts = (
        "{% for m in messages %}{% for p in m.content if p is mapping %}{{ p.text }}{% endfor %}"
    )
    with pytest.raises(UserError, match="message 1"):
        text_of(tmp_path, PLAIN, parts + "{% endfor %}", loss_on=loss_on)


def test_what_a_template_writes_in_its_own_way_is_written(tmp_path: Path) -> None:
    rows = [
        {"messages": [USER, call({"at": 'the "sea"\n', "depth": 5}, content="  c d\n")]},
        {"messages": [USER, {"role": "tool", "content": 'say "sea"\n'}, ANSWER]},
        {"messages": [USER, {**ANSWER, "content": "<b>c</b> & d"}]},
    ]
    as_json = CHATML.replace("{{ m.content or '' }}", "{{ (m.content or '') | trim | tojson }}")
    for template in (CHATML, as_json):
        assert warnings_of(tmp_path, rows, template) == []


@pytest.mark.parametrize("loss_on", ["all", "last", "assistant"])
def test_rows_without_an_end_token_are_said(tmp_path: Path, loss_on: str) -> None:
    without = FAMILIES["glm 4.5"].template
    (warning,) = warnings_of(tmp_path, [PLAIN, PLAIN], without, "<|user|>", loss_on=loss_on)
    assert warning.startswith("2 of 2 rows have no end token")
    assert warnings_of(tmp_path, [PLAIN, PLAIN], loss_on=loss_on) == []


def test_columns_that_are_not_read_are_said(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "completion": "b", "topic": "c", "id": 3},
        {"prompt": "a", "completion": "b", "source": None, "messages": []},
    ]
    (warning,) = warnings_of(tmp_path, rows)
    assert "'topic', 'id'" in warning
    assert "'source'" not in warning
    (warning,) = warnings_of(tmp_path, [{**PLAIN, "tools": [], "system": "d", "topic": "c"}])
    assert "'topic' are not read" in warning
    (warning,) = warnings_of(tmp_path, [{"text": "a b", "title": "c"}])
    assert "'title'" in warning


def test_a_last_message_of_the_user_counts_and_is_said(tmp_path: Path) -> None:
    rows = [PLAIN, {"messages": [USER, ANSWER, USER]}]
    (warning,) = warnings_of(tmp_path, rows, mask_prompt=True)
    assert warning.startswith("1 of 2 rows end in a message that is not the assistant's")


def test_rows_without_words_are_refused_and_empty_answers_said(tmp_path: Path) -> None:
    for row in (
        {"prompt": "", "completion": " "},
        {"messages": [{**USER, "content": ""}, {**ANSWER, "content": "\n"}]},
    ):
        assert "no words" in refusal(tmp_path, row).problem
    (warning,) = warnings_of(tmp_path, [PLAIN, {"messages": [USER, {**ANSWER, "content": ""}]}])
    assert warning.startswith("1 of 2 rows end in an empty answer")


def test_a_template_that_joins_arguments_with_its_text_takes_them_as_text(tmp_path: Path) -> None:
    joins = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    joins += "{{ c.function.name + '(' + c.function.arguments + ')' }}{% endfor %};{% endfor %}"
    for arguments in ('{"at": "sea"}', {"at": "sea"}):
        assert text_of(tmp_path, {"messages": [USER, call(arguments)]}, joins).endswith(
            'look({"at": "sea"});'
        )


def test_marks_count_where_the_text_depends_on_whether_the_model_thinks(tmp_path: Path) -> None:
    """As mlx-lm writes the conversation, and not as the tokenizer alone would."""
    thinks = "{% if enable_thinking %}system: think{% else %}b{% endif %}"
    data = write(tmp_path, train=[{"messages": [USER, ANSWER, USER, ANSWER]}])
    tokenizer = tokenizer_with(thinks + KINDS["marked"].template, special=("<think>", "</think>"))
    assert tokenizer.has_thinking
    config = TrainConfig.from_flat(data=data, batch_size=1, loss_on="assistant")
    ((tokens, start),) = listed(read_data(config.wanted_data, tokenizer, None).train)
    counts = [token for i, token in enumerate(tokens) if i >= start and token >= 0]
    assert tokenizer.decode(counts) == "c d<|im_end|>" * 2
    text = tokenizer.decode([max(token, ~token) for token in tokens])
    assert text.startswith("system: think<|im_start|>user")
