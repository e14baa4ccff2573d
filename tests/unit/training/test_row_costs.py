"""What a row costs: as many templates and tokenisings as mlx-lm takes for it, or fewer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tuner.datasets import ChatDataset

from shardmlx.config.train import TrainConfig
from shardmlx.training.datasets import read_data
from testbed.rows import write
from tests.helpers.call_counts import calls_by_name
from tests.helpers.chat_templates import KINDS, tokenizer_with

CHATML = KINDS["chatml"].template
RENDERS = "render_jinja_template"
ENCODES = ("encode_batch", "encode_batch_fast", "encode")
"""Functions of transformers and tokenizers that write a conversation, and make its tokens."""


def talk(messages: int) -> dict[str, Any]:
    """A conversation of so many messages."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": f"a b {i}"} for i in range(messages)]}


def calls_of(directory: Path, row: Any, **options: Any) -> Counter[str]:
    """The calls for a row beside others like it: to check it, and to make its tokens."""
    given = {"batch_size": 1, "max_seq_length": 10**6, **options}
    counts = []
    for rows in (2, 2, 3):  # once to import what is imported when it is used
        config = TrainConfig.from_flat(data=write(directory, train=[row] * rows), **given)
        read = partial(read_data, config.wanted_data, tokenizer_with(CHATML), None)
        counts.append(calls_by_name(read))
    counts[2].subtract(counts[1])
    return counts[2]


def encodes(counts: Mapping[str, int]) -> int:
    return sum(counts[name] for name in ENCODES)


@pytest.mark.parametrize("mask_prompt", [False, True])
def test_a_row_is_written_and_tokenised_no_more_often_than_in_mlx_lm(
    tmp_path: Path, mask_prompt: bool
) -> None:
    row = talk(2)
    theirs = ChatDataset([row], tokenizer_with(CHATML), mask_prompt=mask_prompt)
    of_theirs = calls_by_name(lambda: theirs.process(row))
    ours = calls_of(tmp_path, row, mask_prompt=mask_prompt)
    assert ours[RENDERS] == of_theirs[RENDERS] == 1 + mask_prompt
    assert encodes(ours) == 1 <= encodes(of_theirs)


@pytest.mark.parametrize("loss_on", ["all", "last", "assistant"])
def test_the_cost_of_a_row_grows_with_its_messages(tmp_path: Path, loss_on: str) -> None:
    few, many = (calls_of(tmp_path, talk(count), loss_on=loss_on) for count in (100, 400))
    assert many.total() < 4.2 * few.total()
    assert many[RENDERS] == few[RENDERS] <= 2
    assert encodes(many) == encodes(few) == 1
