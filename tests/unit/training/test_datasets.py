"""Data sets: rows as mlx-lm reads them, and errors that name file and line."""

import codecs
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.tuner.datasets import CacheDataset
from mlx_lm.tuner.datasets import load_dataset as mlx_lm_load_dataset
from mlx_lm.tuner.trainer import iterate_batches as mlx_lm_iterate_batches

from shardmlx.config.specs import DataOptions
from shardmlx.config.train import TrainConfig
from shardmlx.engine.batches import Batches
from shardmlx.errors import UserError
from shardmlx.training.datasets import DataSets, read_data
from tests.helpers.letters import CHAT, EOS, Letters, listed, write


def read(data: str, max_positions: int | None = None, **options: Any) -> DataSets:
    config = TrainConfig(data=data, **{"batch_size": 1, **options})
    return read_data(DataOptions.of(config), Letters(), max_positions)


def error_of(data: str, max_positions: int | None = None, **options: Any) -> UserError:
    with pytest.raises(UserError) as error:
        read(data, max_positions, **options)
    assert "\n" not in str(error.value)
    assert error.value.remedy
    return error.value


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


# Rows.


def test_plain_text_ends_in_the_end_token(tmp_path: Path) -> None:
    data = read(write(tmp_path, train=[{"text": "abc"}]))
    assert listed(data.train) == [([*letters("abc"), EOS], 0)]


@pytest.mark.parametrize(
    "row", [{"messages": CHAT}, {"prompt": "hi", "completion": "ho"}], ids=["chat", "completion"]
)
@pytest.mark.parametrize(("mask_prompt", "start"), [(False, 0), (True, len("<u>hi;<a>"))])
def test_the_loss_starts_after_a_masked_prompt(
    tmp_path: Path, row: dict[str, Any], mask_prompt: bool, start: int
) -> None:
    data = read(write(tmp_path, train=[row]), mask_prompt=mask_prompt)
    assert listed(data.train) == [(letters("<u>hi;<a>ho;"), start)]


def test_keys_may_have_other_names(tmp_path: Path) -> None:
    data = read(write(tmp_path, train=[{"words": "abc"}]), text_feature="words")
    assert listed(data.train) == [([*letters("abc"), EOS], 0)]


def test_only_the_sets_that_the_run_needs_are_read(tmp_path: Path) -> None:
    rows = [{"text": "abc"}]
    directory = write(tmp_path, train=rows, valid=rows * 2, test=rows * 3)
    assert read(directory).sizes() == {"train": 1, "valid": 2, "test": 0}
    assert read(directory, test=True).sizes() == {"train": 0, "valid": 0, "test": 3}
    assert read(directory, train=True, test=True).sizes() == {"train": 1, "valid": 2, "test": 3}


def test_a_set_that_is_not_needed_may_be_broken(tmp_path: Path) -> None:
    directory = write(tmp_path, train=[{"text": "abc"}], test=["{"])
    assert read(directory).sizes()["train"] == 1


def test_training_without_validation_is_said(tmp_path: Path) -> None:
    directory = write(tmp_path, train=[{"text": "abc"}])
    assert read(directory).warnings == (
        f"{directory} has no validation set: training without validation",
    )


def test_sequences_that_are_cut_are_said(tmp_path: Path) -> None:
    rows = [{"text": "abc"}, {"text": "abcdefgh"}]
    data = read(write(tmp_path, train=rows, valid=rows[:1]), max_seq_length=6)
    assert data.warnings == (
        f"{tmp_path}/train.jsonl: 1 of 2 sequences are longer than --max-seq-length 6 and are cut "
        "(the longest has 9)",
    )


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_are_those_of_json_lines(tmp_path: Path, end: str) -> None:
    """U+2028 and U+0085 end lines of text, and may stand in a JSON string."""
    texts = ["a\u2028b", "c\x85d", "e\u2029f"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "train.jsonl").write_text(end.join(lines), encoding="utf-8", newline="")
    assert [tokens[:-1] for tokens, _ in listed(read(str(tmp_path)).train)] == [
        *map(letters, texts)
    ]


def test_the_order_of_rows_is_that_of_mlx_lm(tmp_path: Path) -> None:
    """mlx-lm sorts rows by their number of keys, whatever the length of their text."""
    rows = [
        {"messages": CHAT, "tools": [], "id": 1},
        {"messages": CHAT[:1]},
        {"messages": CHAT, "tools": []},
        {"messages": [*CHAT, *CHAT]},
        {"messages": [*CHAT, *CHAT[:1]], "tools": []},
    ]
    directory = write(tmp_path, train=rows)
    config = TrainConfig(data=directory, batch_size=1, train=True)
    theirs, _, _ = mlx_lm_load_dataset(config, Letters())
    np.random.seed(3)
    expected = [
        np.array(tokens).tolist()
        for tokens, _ in mlx_lm_iterate_batches(CacheDataset(theirs), 1, 2048)
    ]

    ours = Batches(read(directory).train, 1, 2048, np.random.RandomState(3))

    assert [batch.tokens.tolist() for batch in ours] == expected


def test_progress_is_shown_row_by_row(tmp_path: Path) -> None:
    shown: list[tuple[str, int]] = []

    def progress(text: str, items: Sequence[Any]) -> Iterator[Any]:
        shown.append((text, len(items)))
        return iter(items)

    rows = [{"text": "abc"}] * 3
    config = TrainConfig(data=write(tmp_path, train=rows, valid=rows[:2]), batch_size=1)
    read_data(DataOptions.of(config), Letters(), None, progress)
    assert shown == [("tokenising train", 3), ("tokenising valid", 2)]


# Errors name file and line.


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "ab', " is not JSON: Unterminated string starting at column 10"),
        ("", " is not JSON: Expecting value at column 1"),
        ('["text"]', "array"),
        ('"text"', "text"),
        ('["a",\n"b"]', "several lines"),
        ("\udcff", "at byte 0"),
        ('{"txt": "abc"}', "'txt'"),
        ("{}", "no key 'text'"),
        ('{"text": ""}', ': text is ""'),
        ('{"text": null}', ": text is null"),
        ('{"text": true}', ": text is true"),
        ('{"text": 7}', ": text is 7"),
        ('{"text": ["a", "b"]}', ': text is ["a", "b"]'),
        ('{"text": "abc\\ud800d"}', r': text has "\ud800" at character 4'),
        ('{"text": 1' + "0" * 5000 + "}", ""),
        ("[" * 100_000, ""),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    directory = write(tmp_path, train=[{"text": "abc"}, line, {"text": "abc"}])
    problem = error_of(directory).problem
    assert problem.startswith(f"{tmp_path}/train.jsonl:2")
    assert words in problem


HI = {"prompt": "hi", "completion": "ho"}


@pytest.mark.parametrize(
    ("good", "row", "words"),
    [
        (HI, {"prompt": None, "completion": "ho"}, "prompt is null"),
        (HI, {"prompt": "hi", "completion": 4.5}, "completion is 4.5"),
        (HI, {"prompt": "hi"}, "no key 'completion'"),
        (HI, {"prompt": "hi", "completion": "a\udc00"}, r'completion has "\udc00" at character 2'),
        ({"messages": CHAT}, {"messages": []}, "messages is []"),
        ({"messages": CHAT}, {"messages": "hi"}, 'messages is "hi"'),
        ({"messages": CHAT}, {"messages": ["hi"]}, 'messages[0] is "hi"'),
        (
            {"messages": CHAT},
            {"messages": [*CHAT, {"role": "user", "content": None}]},
            "messages[2] has content null",
        ),
        ({"messages": CHAT}, {"messages": [{**CHAT[0], "content": 7}]}, "messages[0].content is 7"),
        (
            {"messages": CHAT},
            {"messages": [{**CHAT[0], "content": "\ud800"}]},
            r'messages[0].content has "\ud800"',
        ),
    ],
)
def test_prompts_answers_and_messages_are_text(
    tmp_path: Path, good: Any, row: Any, words: str
) -> None:
    """A chat template would make the words "None" and "4.5" of them, and nobody would know."""
    problem = error_of(write(tmp_path, train=[good, row])).problem
    assert problem.startswith(f"{tmp_path}/train.jsonl:2")
    assert words in problem


def test_a_long_value_is_shown_by_its_beginning(tmp_path: Path) -> None:
    directory = write(tmp_path, train=[{"text": "abc"}, {"text": ["x" * 500]}])
    assert f'text is ["{"x" * 58}...,' in error_of(directory).problem


def test_an_empty_text_of_which_the_tokenizer_makes_tokens_is_one(tmp_path: Path) -> None:
    """mlx-lm trains on it too."""

    class Begins(Letters):
        def encode(self, text: str) -> list[int]:
            return [2, *super().encode(text)]

    config = TrainConfig(data=write(tmp_path, train=[{"text": ""}]), batch_size=1)
    data = read_data(DataOptions.of(config), Begins(), None)
    assert listed(data.train) == [([2, EOS], 0)]


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path) -> None:
    """As Windows puts it at the beginning of a file."""
    rows = [{"text": "abc"}, {"text": "def"}]
    plain = read(write(tmp_path / "plain", train=rows))
    directory = write(tmp_path / "marked", train=rows)
    path = Path(directory, "train.jsonl")
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert listed(read(directory).train) == listed(plain.train)


def test_a_broken_line_is_named_where_rows_are_sorted(tmp_path: Path) -> None:
    rows = [{"text": "abc", "id": 1}, {"text": "abcdef", "id": 1}, {"text": "abc"}]
    problem = error_of(write(tmp_path, train=rows), max_positions=5).problem
    assert problem.startswith(f"{tmp_path}/train.jsonl:2 has 7 tokens")


@pytest.mark.parametrize(
    "name", ["train.json", "train.jsonl.gz", "Train.jsonl", "train-00000-of-00001.parquet"]
)
def test_a_file_of_almost_the_right_name_is_said(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert name in error_of(str(tmp_path)).problem


@pytest.mark.parametrize("name", ["val.jsonl", "validation.jsonl", "dev.csv", "valid.json"])
def test_a_validation_set_of_another_name_is_said(tmp_path: Path, name: str) -> None:
    directory = write(tmp_path, train=[{"text": "abc"}])
    (tmp_path / name).touch()
    (warning,) = read(directory).warnings
    assert name in warning


@pytest.mark.parametrize(
    ("files", "options", "words"),
    [
        ({}, {}, "train.jsonl"),
        ({"train": []}, {}, "train.jsonl"),
        ({"train": [{"text": "abc"}]}, {"test": True}, "test.jsonl"),
        ({"train": [{"text": "abc"}], "valid": ["nonsense"]}, {}, "valid.jsonl:1"),
        ({"train": [{"question": "a", "answer": "b"}]}, {}, "'question', 'answer'"),
        ({"train": [{"text": "abc"}]}, {"mask_prompt": True}, "--mask-prompt"),
        ({"train": [{"text": "abc"}] * 3}, {"batch_size": 4}, "3 samples"),
    ],
    ids=["missing", "empty", "no test", "valid", "no format", "no prompt", "few"],
)
def test_a_set_that_cannot_be_used_is_named(
    tmp_path: Path, files: Any, options: dict[str, Any], words: str
) -> None:
    problem = error_of(write(tmp_path, **files), **options).problem
    assert str(tmp_path) in problem
    assert words in problem


def test_a_file_in_place_of_the_directory_and_the_other_way_round(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.mkdir()
    assert str(path) in error_of(str(tmp_path)).problem
    path.rmdir()
    path.touch()
    assert str(path) in error_of(str(path)).problem


def test_a_sequence_that_is_too_long_is_cut_or_named(tmp_path: Path) -> None:
    directory = write(tmp_path, train=[{"text": "abc"}, {"text": "abcdefgh"}])
    error = error_of(directory, max_positions=8)
    assert error.problem.startswith(f"{tmp_path}/train.jsonl:2 has 9 tokens")
    assert "--max-seq-length 8" in error.remedy
    assert len(read(directory, max_positions=8, max_seq_length=8).train) == 2
    error = error_of(directory, max_seq_length=8, long_sequences="error")
    assert error.problem.startswith(f"{tmp_path}/train.jsonl:2 has 9 tokens")
    assert "long_sequences" in error.remedy


class Open(Letters):
    """A tokenizer whose template writes nothing after a message."""

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: object) -> str:
        return super().conversation(messages, tools).replace(";", "")


LONG = {"prompt": "abcdefgh", "completion": "ho"}
EMPTY = {"prompt": "hi", "completion": ""}
GOOD = {"prompt": "hi", "completion": "ho"}


def test_rows_of_which_nothing_is_learnt_are_counted_with_the_cause(tmp_path: Path) -> None:
    config = TrainConfig(
        data=write(tmp_path, train=[GOOD, LONG, EMPTY, EMPTY]),
        batch_size=1,
        mask_prompt=True,
        max_seq_length=10,
    )
    _, _, only_prompt, empty = read_data(DataOptions.of(config), Open(), None).warnings
    assert "of 1 of 4 sequences" in only_prompt
    assert "--max-seq-length 10" in only_prompt
    assert "2 of 4 sequences" in empty
    assert "--max-seq-length" not in empty


@pytest.mark.parametrize("name", ["train", "valid", "test"])
@pytest.mark.parametrize(("row", "cause"), [(LONG, "--max-seq-length 10"), (EMPTY, "empty")])
def test_a_set_of_which_nothing_is_learnt_is_refused_with_the_cause(
    tmp_path: Path, name: str, row: dict[str, str], cause: str
) -> None:
    rows: dict[str, Any] = {"train": [GOOD], "valid": [GOOD], "test": [GOOD], name: [row] * 3}
    config = TrainConfig(
        data=write(tmp_path, **rows),
        batch_size=1,
        mask_prompt=True,
        max_seq_length=10,
        train=True,
        test=True,
    )
    with pytest.raises(UserError) as error:
        read_data(DataOptions.of(config), Open(), None)
    assert f"{name}.jsonl" in error.value.problem
    assert cause in error.value.problem


def test_texts_of_one_token_are_refused(tmp_path: Path) -> None:
    class Nothing(Letters):
        def encode(self, text: str) -> list[int]:
            return [EOS]

    config = TrainConfig(data=write(tmp_path, train=[{"text": "a"}] * 2), batch_size=1)
    with pytest.raises(UserError) as error:
        read_data(DataOptions.of(config), Nothing(), None)
    assert "one token" in error.value.problem


# Data sets of the Hugging Face hub.


def hub_gives(monkeypatch: pytest.MonkeyPatch, **sets: list[dict[str, str]]) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda name: sets)


def test_a_hub_data_set_may_have_more_sets_than_the_run_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [{"text": "abc"}]
    hub_gives(monkeypatch, train=rows, valid=rows, test=rows)
    assert read("someone/something").sizes() == {"train": 1, "valid": 1, "test": 0}


def test_splits_of_other_names_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": "abc"}]
    hub_gives(monkeypatch, train=rows, validation=rows)
    (warning,) = read("someone/something").warnings
    assert "train, validation" in warning
    assert "train, validation" in error_of("someone/something", test=True).problem


def test_a_row_of_a_hub_data_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_gives(monkeypatch, train=[{"text": "abc"}, {"words": "abc"}])
    message = error_of("someone/something").problem
    assert message.startswith("someone/something, train set, row 1 has no key 'text'")
    assert "'words'" in message


def test_a_hub_data_set_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ValueError("Not found\nHugging Face dataset")

    monkeypatch.setattr(pytest.importorskip("datasets"), "load_dataset", fail)
    assert "Not found Hugging Face dataset" in error_of("someone/something").problem


def test_a_missing_directory_without_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in error_of("no/such/directory").remedy


def test_a_token_that_the_model_does_not_know(tmp_path: Path) -> None:
    data = write(tmp_path, train=[{"text": "ab"}, {"text": "acz"}])
    options = DataOptions.of(TrainConfig(data=data, batch_size=1))
    assert len(read_data(options, Letters(), None, vocabulary=ord("z") + 1).train) == 2
    with pytest.raises(UserError) as error:
        read_data(options, Letters(), None, vocabulary=ord("z"))
    assert f"{tmp_path / 'train.jsonl'}:2 has token {ord('z')}" in error.value.problem
    # What is cut off no model sees.
    short = DataOptions.of(TrainConfig(data=data, batch_size=1, max_seq_length=2))
    assert len(read_data(short, Letters(), None, vocabulary=ord("z")).train) == 2
