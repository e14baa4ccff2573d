"""Rows of preferences: their forms, their tokens, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmlx.config.data import DataOptions
from shardmlx.config.train import TrainConfig
from shardmlx.engine.batches import REFERENCE, SWAPPED, WANTED, Samples, swapped
from shardmlx.errors import UserError
from shardmlx.training.datasets import DataSets, read_data
from tests.helpers.letters import Letters, write

HI = {"role": "user", "content": "hi"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(directory: Path, *rows: Any, **options: Any) -> DataSets:
    data = write(directory, train=rows, valid=rows)
    given: dict[str, Any] = {"objective": "dpo", "batch_size": 2} | options
    tokenizer: Any = Letters()
    return read_data(DataOptions.of(TrainConfig(data=data, **given)), tokenizer, None)


def texts(samples: Samples) -> list[tuple[str, str]]:
    """Prompt and answer of each sample."""
    found = (("".join(map(chr, tokens)), start) for tokens, start in samples)
    return [(text[:start], text[start:]) for text, start in found]


def known(samples: Samples, column: int) -> list[float]:
    assert samples.known is not None
    values: list[float] = samples.known[:, column].tolist()
    return values


PAIR = [("<u>hi;<a>", "aye;"), ("<u>hi;<a>", "no;")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "chosen": "aye", "rejected": "no"},
        {"prompt": [HI], "chosen": [said("aye")], "rejected": [said("no")]},
        {"prompt": [HI], "chosen": said("aye"), "rejected": "no"},
        {"chosen": [HI, said("aye")], "rejected": [HI, said("no")]},
        {"messages": [HI, said("aye")], "rejected": "no"},
        {"messages": [HI, said("aye")], "rejected": said("no")},
    ],
)
def test_every_form_of_a_pair_has_the_same_tokens(tmp_path: Path, row: dict[str, Any]) -> None:
    data = read(tmp_path, row)
    assert texts(data.train) == PAIR
    assert known(data.train, WANTED) == [1, 0]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "completion": "aye"},
        {"prompt": [HI], "completion": said("aye")},
        {"messages": [HI, said("aye")]},
    ],
)
@pytest.mark.parametrize(("label", "wanted"), [(True, 1), (False, 0), (1, 1), ("False", 0)])
def test_rows_with_a_label(tmp_path: Path, row: dict[str, Any], label: Any, wanted: int) -> None:
    row = row | {"label": label}
    data = read(tmp_path, row, row, objective="kto")
    assert texts(data.train) == PAIR[:1] * 2
    assert known(data.train, WANTED) == [wanted] * 2


def test_columns_with_other_names(tmp_path: Path) -> None:
    row = {"question": "hi", "better": "aye", "worse": "no"}
    names = {"prompt_feature": "question", "chosen_feature": "better", "rejected_feature": "worse"}
    assert texts(read(tmp_path, row, **names).train) == PAIR


def test_prompts_are_cut_from_the_left_alike_and_answers_never(tmp_path: Path) -> None:
    long = {"prompt": "what is the sea", "chosen": "blue", "rejected": "a"}
    lost = {"prompt": "hi", "chosen": "x" * 30, "rejected": "y"}
    data = read(tmp_path, long, lost, max_seq_length=12)
    assert texts(data.train) == [("sea;<a>", "blue;"), ("sea;<a>", "a;")]
    cut, left_out = data.warnings[:2]
    assert "1 of 2 pairs" in cut
    assert "1 of 2 pairs" in left_out


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "hi", "chosen": "aye", "rejected": "aye"}, "the same"),
        (
            {"chosen": [HI, said("aye")], "rejected": [HI | {"content": "ho"}, said("no")]},
            "other prompts",
        ),
        ({"prompt": "hi", "chosen": "aye", "rejected": 7}, "rejected"),
        ({"prompt": 7, "chosen": "aye", "rejected": "no"}, "prompt"),
        ({"chosen": [], "rejected": "no"}, "chosen"),
    ],
)
def test_a_bad_pair_is_named(tmp_path: Path, row: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, row)
    assert "train.jsonl:1" in error.value.problem
    assert named in error.value.problem


def test_a_label_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, {"prompt": "hi", "completion": "a", "label": "good"}, objective="kto")
    assert '"good"' in error.value.problem


def test_rows_of_another_format_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, {"prompt": "hi", "completion": "aye"})
    assert "'chosen'" in error.value.problem
    assert "chosen_feature" in error.value.remedy


def test_all_pairs_too_long_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, {"prompt": "hi", "chosen": "x" * 30, "rejected": "y"}, max_seq_length=12)
    assert "1 of 1 pairs" in error.value.problem


def test_each_prompt_gets_the_answer_of_the_row_before(tmp_path: Path) -> None:
    rows = [{"prompt": c, "completion": c.upper(), "label": True} for c in "abc"]
    samples = read(tmp_path, *rows, objective="kto").train
    assert samples.known is not None
    samples.known[:, SWAPPED] = np.arange(3)
    found = swapped(samples)
    assert texts(found) == [("<u>a;<a>", "C;"), ("<u>b;<a>", "A;"), ("<u>c;<a>", "B;")]
    assert known(found, REFERENCE) == [0, 1, 2]
