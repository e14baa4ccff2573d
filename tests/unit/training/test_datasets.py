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


def error_of(data: str, max_positions: int | None = None, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        read(data, max_positions, **options)
    message = str(error.value)
    assert "\n" not in message
    return message


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


MEND = "mend the line, or take it out"
WRITE = "write text, or take the row out"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": "ab', f" is not JSON: Unterminated string starting at column 10: {MEND}"),
        ("", f" is not JSON: Expecting value at column 1: {MEND}"),
        ('["text"]', " is a JSON array, no object: write one object on each line"),
        ('"text"', " is a JSON text, no object: write one object on each line"),
        ('["a",\n"b"]', " begins JSON over several lines: write one object on each line"),
        ("\udcff", " is not UTF-8 text: invalid start byte at byte 0: save it as UTF-8"),
        (
            '{"txt": "abc"}',
            " has no key 'text', as the first row has, but the keys 'txt': add it, or take the",
        ),
        ("{}", " has no key 'text', as the first row has, but no key: add it, or take the row out"),
        ('{"text": ""}', f': text is "", which is no token: {WRITE}'),
        ('{"text": null}', f": text is null, not text: {WRITE}"),
        ('{"text": true}', f": text is true, not text: {WRITE}"),
        ('{"text": 7}', ': text is 7, not text: write "7" in quotes, or take the row out'),
        ('{"text": ["a", "b"]}', f': text is ["a", "b"], not text: {WRITE}'),
        (
            '{"text": "abc\\ud800d"}',
            r': text has "\ud800" at character 4, half of a surrogate pair, which is no character: '
            "write the whole character, or take it out",
        ),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    directory = write(tmp_path, train=[{"text": "abc"}, line, {"text": "abc"}])
    assert error_of(directory).startswith(f"{tmp_path}/train.jsonl:2{complaint}")


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"prompt": None, "completion": "ho"}, f"prompt is null, not text: {WRITE}"),
        ({"prompt": "hi", "completion": 4.5}, "completion is 4.5, not text: "),
        (
            {"prompt": "hi"},
            "has no key 'completion', as the first row has, but the keys 'prompt': ",
        ),
        ({"prompt": "hi", "completion": "a\udc00"}, r'completion has "\udc00" at character 2'),
    ],
)
def test_prompts_and_completions_are_text(
    tmp_path: Path, row: dict[str, Any], complaint: str
) -> None:
    """A chat template would make the words "None" and "4.5" of them, and nobody would know."""
    directory = write(tmp_path, train=[{"prompt": "hi", "completion": "ho"}, row])
    message = error_of(directory)
    assert message.startswith(f"{tmp_path}/train.jsonl:2")
    assert complaint in message


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "messages is [], no list of messages: write [{"),
        ("hi", 'messages is "hi", no list of messages: write [{'),
        (["hi"], 'messages[0] is "hi", no message: write [{'),
        (
            [*CHAT, {"role": "user", "content": None}],
            "messages[2] has content null, and the keys 'ro",
        ),
        ([{"role": "user", "content": 7}], "messages[0].content is 7, not text: "),
        ([*CHAT[:1], {"role": "assistant", "content": "\ud800"}], r'messages[1].content has "\ud8'),
    ],
)
def test_messages_have_contents_of_text(tmp_path: Path, messages: Any, complaint: str) -> None:
    directory = write(tmp_path, train=[{"messages": CHAT}, {"messages": messages}])
    assert error_of(directory).startswith(f"{tmp_path}/train.jsonl:2: {complaint}")


def test_a_long_value_is_shown_by_its_beginning(tmp_path: Path) -> None:
    directory = write(tmp_path, train=[{"text": "abc"}, {"text": ["x" * 500]}])
    assert error_of(directory).startswith(f'{tmp_path}/train.jsonl:2: text is ["{"x" * 58}..., not')


def test_an_empty_text_of_which_the_tokenizer_makes_tokens_is_one(tmp_path: Path) -> None:
    """mlx-lm trains on it too."""

    class Begins(Letters):
        def encode(self, text: str) -> list[int]:
            return [2, *super().encode(text)]

    config = TrainConfig(data=write(tmp_path, train=[{"text": ""}]), batch_size=1)
    data = read_data(DataOptions.of(config), Begins(), None)
    assert listed(data.train) == [([2, EOS], 0)]


@pytest.mark.parametrize("line", ['{"text": 1' + "0" * 5000 + "}", "[" * 100_000])
def test_a_line_that_python_does_not_read_is_named(tmp_path: Path, line: str) -> None:
    directory = write(tmp_path, train=[{"text": "abc"}, line])
    assert error_of(directory).startswith(f"{tmp_path}/train.jsonl:2 ")
    assert error_of(directory).endswith(MEND)


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
    assert error_of(write(tmp_path, train=rows), max_positions=5).startswith(
        f"{tmp_path}/train.jsonl:2 has 7 tokens"
    )


def test_a_broken_line_of_the_validation_set_is_named(tmp_path: Path) -> None:
    directory = write(tmp_path, train=[{"text": "abc"}], valid=["nonsense"])
    assert error_of(directory) == (
        f"{tmp_path}/valid.jsonl:1 is not JSON: Expecting value at column 1: {MEND}"
    )


@pytest.mark.parametrize(
    "name", ["train.json", "train.jsonl.gz", "Train.jsonl", "train-00000-of-00001.parquet"]
)
def test_a_file_of_almost_the_right_name_is_said(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert name in error_of(str(tmp_path))


@pytest.mark.parametrize("name", ["val.jsonl", "validation.jsonl", "dev.csv", "valid.json"])
def test_a_validation_set_of_another_name_is_said(tmp_path: Path, name: str) -> None:
    directory = write(tmp_path, train=[{"text": "abc"}])
    (tmp_path / name).touch()
    (warning,) = read(directory).warnings
    assert name in warning


@pytest.mark.parametrize("rows", [None, []], ids=["missing", "empty"])
def test_training_data_must_be_there(tmp_path: Path, rows: list[Any] | None) -> None:
    directory = write(tmp_path, **({} if rows is None else {"train": rows}))
    assert error_of(directory) == (
        f"{tmp_path}/train.jsonl is missing or empty: --data {tmp_path} must hold it"
    )


def test_test_data_must_be_there(tmp_path: Path) -> None:
    directory = write(tmp_path, train=[{"text": "abc"}])
    assert error_of(directory, test=True) == (
        f"{tmp_path}/test.jsonl is missing or empty: --data {tmp_path} must hold it"
    )


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    write(tmp_path, train=[{"text": "abc"}])
    path = tmp_path / "train.jsonl"
    assert error_of(str(path)) == f"--data {path} is a file: name the directory with train.jsonl"


def test_a_directory_in_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").mkdir()
    assert error_of(str(tmp_path)) == (
        f"cannot read {tmp_path}/train.jsonl: Is a directory: give a file that you may read"
    )


def test_rows_of_no_known_format(tmp_path: Path) -> None:
    directory = write(tmp_path, train=[{"question": "a", "answer": "b"}])
    assert error_of(directory) == (
        f"{tmp_path}/train.jsonl: its first row has the keys 'question', 'answer', and neither "
        "'messages', 'prompt' and 'completion', nor 'text': rename them, or name yours by "
        "chat_feature, prompt_feature and completion_feature, or text_feature"
    )


def test_prompts_cannot_be_masked_in_plain_text(tmp_path: Path) -> None:
    directory = write(tmp_path, train=[{"text": "abc"}])
    assert error_of(directory, mask_prompt=True) == (
        f"{tmp_path}/train.jsonl: --mask-prompt needs prompts, and this is plain text: drop the "
        "flag, or write prompt and completion"
    )


def test_fewer_samples_than_a_batch(tmp_path: Path) -> None:
    directory = write(tmp_path, train=[{"text": "abc"}] * 3)
    assert error_of(directory, batch_size=4) == (
        f"{tmp_path}/train.jsonl has 3 samples, fewer than --batch-size 4: lower the batch size "
        "or add data"
    )


def test_a_sequence_that_the_model_cannot_take(tmp_path: Path) -> None:
    directory = write(tmp_path, train=[{"text": "abc"}, {"text": "abcdefgh"}])
    assert error_of(directory, max_positions=8) == (
        f"{tmp_path}/train.jsonl:2 has 9 tokens, and the model's limit is 8: "
        "use --max-seq-length 8 to cut it"
    )
    assert len(read(directory, max_positions=8, max_seq_length=8).train) == 2


def test_a_sequence_longer_than_the_limit_where_none_shall_be_cut(tmp_path: Path) -> None:
    directory = write(tmp_path, train=[{"text": "abc"}, {"text": "abcdefgh"}])
    assert error_of(directory, max_seq_length=8, long_sequences="error") == (
        f"{tmp_path}/train.jsonl:2 has 9 tokens, more than --max-seq-length 8: raise it, split "
        "the text, or use long_sequences: cut"
    )


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
    assert "train, validation" in error_of("someone/something", test=True)


def test_a_row_of_a_hub_data_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hub_gives(monkeypatch, train=[{"text": "abc"}, {"words": "abc"}])
    message = error_of("someone/something")
    assert message.startswith("someone/something, train set, row 1 has no key 'text'")
    assert "'words'" in message


def test_a_hub_data_set_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ValueError("Not found\nHugging Face dataset")

    monkeypatch.setattr(pytest.importorskip("datasets"), "load_dataset", fail)
    assert error_of("someone/something") == (
        "--data someone/something: there is no such directory, and Hugging Face does not give "
        "it: Not found Hugging Face dataset: name another"
    )


def test_a_missing_directory_without_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert error_of("no/such/directory") == (
        "--data no/such/directory: there is no such directory: name another, or, to read it from "
        "Hugging Face, pip install datasets"
    )


def test_a_token_that_the_model_does_not_know(tmp_path: Path) -> None:
    data = write(tmp_path, train=[{"text": "ab"}, {"text": "acz"}])
    options = DataOptions.of(TrainConfig(data=data, batch_size=1))
    assert len(read_data(options, Letters(), None, vocabulary=ord("z") + 1).train) == 2
    with pytest.raises(UserError) as error:
        read_data(options, Letters(), None, vocabulary=ord("z"))
    assert str(error.value) == (
        f"{tmp_path / 'train.jsonl'}:2 has token {ord('z')}, and the model knows those from 0 to "
        f"{ord('z') - 1}: use the tokenizer that comes with the model"
    )
    # What is cut off no model sees.
    short = DataOptions.of(TrainConfig(data=data, batch_size=1, max_seq_length=2))
    assert len(read_data(short, Letters(), None, vocabulary=ord("z")).train) == 2
