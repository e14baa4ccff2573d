"""Data sets: rows as mlx-lm reads them, and errors that name file and line."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mlx_lm.tuner.datasets import CacheDataset
from mlx_lm.tuner.datasets import load_dataset as mlx_lm_load_dataset
from mlx_lm.tuner.trainer import iterate_batches as mlx_lm_iterate_batches

from shardmlx.config.train import TrainConfig
from shardmlx.engine.batches import Batches
from shardmlx.errors import UserError
from shardmlx.training.datasets import DataSets, read_data
from testbed.rows import write
from tests.helpers.letters import CHAT, EOS, Letters, listed


def read(data: str, max_positions: int | None = None, **options: Any) -> DataSets:
    config = TrainConfig.from_flat(data=data, **{"batch_size": 1, **options})
    return read_data(config.wanted_data, Letters(), max_positions)


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


def test_only_the_sets_that_the_run_needs_are_read(tmp_path: Path) -> None:
    rows = [{"text": "abc"}]
    directory = write(tmp_path, train=rows, valid=rows * 2, test=rows * 3)
    assert read(directory, test=True).sizes() == {"train": 0, "valid": 0, "test": 3}
    assert read(directory, train=True, test=True).sizes() == {"train": 1, "valid": 2, "test": 3}
    write(tmp_path, test=["{"])
    assert read(directory).sizes() == {"train": 1, "valid": 2, "test": 0}


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
    path = tmp_path / "train.jsonl"
    path.write_text(end.join(lines), encoding="utf-8-sig", newline="")  # as Windows marks it
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
    config = TrainConfig.from_flat(data=directory, batch_size=1, train=True)
    theirs, _, _ = mlx_lm_load_dataset(SimpleNamespace(**config.flat()), Letters())
    np.random.seed(3)
    expected = [
        np.array(tokens).tolist()
        for tokens, _ in mlx_lm_iterate_batches(CacheDataset(theirs), 1, 2048)
    ]

    ours = Batches(read(directory).train, 1, 2048, np.random.RandomState(3))

    assert [batch.tokens.tolist() for batch in ours] == expected


# Errors name file and line.


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "ab', " is not JSON: Unterminated string starting at (column 10)"),
        ("", " is not JSON: Expecting value (column 1)"),
        ('["text"]', 'is ["text"], no object'),
        ('["a",\n"b"]', "is not JSON"),
        ("\udcff", "at byte 0"),
        ('{"txt": "abc"}', "has no key 'text', as the first row has, but the keys 'txt'"),
        ('{"text": ""}', ': text is ""'),
        ('{"text": null}', ": text is null"),
        ('{"text": 1' + "0" * 5000 + "}", ""),
        ("[" * 100_000, ""),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    directory = write(tmp_path, train=[{"text": "abc"}, line, {"text": "abc"}])
    problem = error_of(directory).problem
    assert problem.startswith(f"{tmp_path}/train.jsonl:2")
    assert words in problem


def test_an_empty_text_of_which_the_tokenizer_makes_tokens_is_one(tmp_path: Path) -> None:
    """mlx-lm trains on it too."""

    class Begins(Letters):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [2, *super().encode(text)]

    config = TrainConfig.from_flat(data=write(tmp_path, train=[{"text": ""}]), batch_size=1)
    data = read_data(config.wanted_data, Begins(), None)
    assert listed(data.train) == [([2, EOS], 0)]


def test_a_broken_line_is_named_where_rows_are_sorted(tmp_path: Path) -> None:
    rows = [{"text": "abc", "id": 1}, {"text": "abcdef", "id": 1}, {"text": "abc"}]
    problem = error_of(write(tmp_path, train=rows), max_positions=5).problem
    assert problem.startswith(f"{tmp_path}/train.jsonl:2 has 7 tokens")


@pytest.mark.parametrize("name", ["train.json", "Train.jsonl", "val.jsonl", "dev.csv"])
def test_a_file_of_almost_the_right_name_is_said(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert f"and {name} is not read" in error_of(str(tmp_path)).problem
    (warning,) = read(write(tmp_path, train=[{"text": "abc"}])).warnings
    assert f"no validation set, and {name} is not read" in warning


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


class Open(Letters):
    """A tokenizer whose template writes nothing after a message."""

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: object) -> str:
        return super().conversation(messages, tools).replace(";", "")


@pytest.mark.parametrize("name", ["train", "valid", "test"])
def test_rows_of_which_nothing_is_learnt_are_counted_and_refused_if_all_are(
    tmp_path: Path, name: str
) -> None:
    """Of the first the prompt is too long, and the answer of the second is empty."""
    idle = [{"prompt": "abcdefgh", "completion": "ho"}, {"prompt": "hi", "completion": ""}]
    good = [{"prompt": "hi", "completion": "ho"}]
    how: dict[str, Any] = {"mask_prompt": True, "max_seq_length": 10, "batch_size": 1}
    sets = {"train": good, "valid": good, "test": good}
    config = TrainConfig.from_flat(data=str(tmp_path), train=True, test=True, **how)

    write(tmp_path, **sets | {name: good + idle})
    *_, warning = read_data(config.wanted_data, Open(), None).warnings
    assert f"{name}.jsonl: 2 of 3 sequences have no token to learn" in warning
    write(tmp_path, **sets | {name: idle})
    with pytest.raises(UserError, match=f"{name}.jsonl: 2 of 2 sequences") as error:
        read_data(config.wanted_data, Open(), None)
    assert "--max-seq-length 10" in error.value.problem


# Data sets of the Hugging Face hub.


def hub_gives(monkeypatch: pytest.MonkeyPatch, **sets: list[dict[str, str]]) -> None:
    def load(path: str, split: str) -> list[dict[str, str]]:
        if split not in sets:
            raise ValueError(f"Unknown split {split!r}.\nShould be one of {list(sets)}.")
        return sets[split]

    monkeypatch.setattr(pytest.importorskip("datasets"), "load_dataset", load)


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
    assert "has no validation set" in warning
    assert "Should be one of ['train', 'validation']" in warning
    error = error_of("someone/something", test=True)
    assert (
        "no directory someone/something; as a Hugging Face data set it gives no test set"
        in error.problem
    )
    assert "test_split of hf_dataset" in error.remedy


def test_a_row_of_a_hub_data_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_gives(monkeypatch, train=[{"text": "abc"}, {"words": "abc"}])
    message = error_of("someone/something").problem
    assert message.startswith("someone/something, train set, row 2 has no key 'text'")
    assert "'words'" in message


def test_a_missing_directory_without_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in error_of("no/such/directory").remedy


def test_a_token_that_the_model_does_not_know(tmp_path: Path) -> None:
    data = write(tmp_path, train=[{"text": "ab"}, {"text": "acz"}])
    options = TrainConfig.from_flat(data=data, batch_size=1).wanted_data
    assert len(read_data(options, Letters(), None, vocabulary=ord("z") + 1).train) == 2
    with pytest.raises(UserError) as error:
        read_data(options, Letters(), None, vocabulary=ord("z"))
    assert f"{tmp_path / 'train.jsonl'}:2 has token {ord('z')}" in error.value.problem
    # What is cut off no model sees.
    short = TrainConfig.from_flat(data=data, batch_size=1, max_seq_length=2).wanted_data
    assert len(read_data(short, Letters(), None, vocabulary=ord("z")).train) == 2
