"""Rows of preferences: their forms, their tokens, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmlx.config.train import TrainConfig
from shardmlx.engine.batches import REFERENCE, SWAPPED, WANTED, Sample, Samples, swapped
from shardmlx.errors import UserError
from shardmlx.training.datasets import DataSets, read_data
from shardmlx.training.sample_set import SampleSet
from testbed.rows import write
from tests.helpers.chat_templates import tokenizer_with
from tests.helpers.letters import Letters

HI = {"role": "user", "content": "hi"}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(directory: Path, *rows: Any, **options: Any) -> DataSets:
    data = write(directory, train=rows, valid=rows)
    given: dict[str, Any] = {"objective": "dpo", "batch_size": 2} | options
    tokenizer: Any = Letters()
    return read_data(TrainConfig.from_flat(data=data, **given).wanted_data, tokenizer, None)


def texts(samples: Sequence[Sample]) -> list[tuple[str, str]]:
    """Prompt and answer of each sample."""
    found = (("".join(map(chr, tokens)), start) for tokens, start in samples)
    return [(text[:start], text[start:]) for text, start in found]


def known(samples: Samples | SampleSet, column: int) -> list[float]:
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


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_cut_leaves_what_the_system_says_and_the_begin(tmp_path: Path, objective: str) -> None:
    """Of Llama's template, whose conversations begin in a token of their own."""
    begins = "<|begin|>{% for m in messages %}<|start|>{{ m.role }}<|end|>{{ m.content }}<|eot|>"
    asks = "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>{% endif %}"
    tokenizer = tokenizer_with(begins + asks, eos="<|eot|>")
    tokenizer.bos_token = "<|begin|>"
    answers = (
        {"chosen": "blue", "rejected": "red"}
        if objective == "dpo"
        else {"completion": "blue", "label": True}
    )
    rows = [
        {"prompt": "what is the sea? " * 20, **answers, **more}
        for more in (
            {},
            {"system": "be brief"},
        )
    ]
    data = write(tmp_path, train=rows, valid=rows)
    config = TrainConfig.from_flat(data=data, objective=objective, batch_size=2, max_seq_length=60)
    samples = read_data(config.wanted_data, tokenizer, None).train
    together = len(samples) // len(rows)
    for i, (tokens, start) in enumerate(samples):
        text = tokenizer.decode([*map(int, tokens[:start])])
        head = "<|begin|>" + "<|start|>system<|end|>be brief<|eot|>" * (i // together)
        assert text.startswith(head)
        assert text.endswith("what is the sea? <|eot|><|start|>assistant<|end|>")
        assert text.count("<|begin|>") == 1
    assert samples.lengths.max() == 60
    assert tokenizer.decode([*map(int, samples[0][0])]).endswith("blue<|eot|>")


def test_a_system_message_that_leaves_no_room_is_not_cut(tmp_path: Path) -> None:
    long = {"system": "x" * 30, "prompt": "what is the sea", "chosen": "blue", "rejected": "a"}
    short = {"prompt": "hi", "chosen": "x", "rejected": "y"}
    data = read(tmp_path, long, short, max_seq_length=20)
    assert texts(data.train) == [("<u>hi;<a>", "x;"), ("<u>hi;<a>", "y;")]
    assert "1 of 2 pairs" in data.warnings[0]


WHOLE = {"chosen": [HI, said("aye")], "rejected": [HI, said("no")]}
"""Conversations with their prompt."""


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", **WHOLE},
        {"prompt": [HI], **WHOLE},
        {"prompt": None, **WHOLE},
        {"prompt": [], **WHOLE},
        {"prompt": "hi", "messages": [HI, said("aye")], "score_chosen": 7.0, **WHOLE},
    ],
)
def test_answers_may_have_their_prompt_beside_them(tmp_path: Path, row: dict[str, Any]) -> None:
    data = read(tmp_path, row)
    assert texts(data.train) == PAIR
    unread = [each for each in data.warnings if "not read" in each]
    assert len(unread) == ("messages" in row) * 2, "training and validation"
    assert all("'messages', 'score_chosen'" in each for each in unread)


def test_a_prompt_may_be_the_last_question_of_its_answers(tmp_path: Path) -> None:
    before = [{"role": "user", "content": "ho"}, said("ha"), HI]
    row = {"prompt": "hi", "chosen": [*before, said("aye")], "rejected": [*before, said("no")]}
    assert texts(read(tmp_path, row).train)[0] == ("<u>ho;<a>ha;<u>hi;<a>", "aye;")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "chosen": "aye", "rejected": "no"},
        {"prompt": [HI], "chosen": [said("aye")], "rejected": "no"},
        WHOLE,
        {"messages": [HI, said("aye")], "rejected": "no"},
    ],
)
def test_a_system_text_begins_the_conversation(tmp_path: Path, row: dict[str, Any]) -> None:
    data = read(tmp_path, {"system": "be brief", **row})
    assert texts(data.train) == [("<s>be brief;" + prompt, answer) for prompt, answer in PAIR]
    assert texts(read(tmp_path, {"system": "", **row}).train) == PAIR
    assert not any("not read" in each for each in data.warnings)
    labelled = {"system": "be brief", "prompt": "hi", "completion": "aye", "label": 1}
    found = read(tmp_path, labelled, labelled, objective="kto").train
    assert texts(found)[0] == ("<s>be brief;<u>hi;<a>", "aye;")


SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "hi", "chosen": "aye", "rejected": "aye"}, "the same"),
        ({"prompt": "hi", "chosen": "", "rejected": "no"}, "chosen: the answer is empty"),
        ({"prompt": "hi", "chosen": "aye", "rejected": " \n"}, "rejected: the answer is empty"),
        ({"prompt": [HI], "chosen": [said("")], "rejected": "no"}, "chosen: the answer is empty"),
        ({"messages": [HI, said("")], "rejected": "no"}, "messages: the answer is empty"),
        (
            {"messages": [HI, said("aye"), HI], "rejected": "no"},
            "messages: the answer is a message",
        ),
        ({"prompt": "hi", "chosen": [HI], "rejected": "no"}, 'role "user"'),
        ({"prompt": "hi", "chosen": "aye", "rejected": HI}, 'role "user"'),
        ({"chosen": [HI, HI], "rejected": [HI, said("no")]}, 'role "user"'),
        ({"prompt": "ho", **WHOLE}, 'prompt is "ho"'),
        ({"prompt": [SYSTEM, HI], **WHOLE}, "another prompt"),
        ({"prompt": "hi", "chosen": [said("a"), said("b")], "rejected": "no"}, "has 2 messages"),
        ({"prompt": "hi", "chosen": "aye", "rejected": "no", "system": 7}, "system is 7"),
        (
            {"prompt": [SYSTEM, HI], "chosen": "aye", "rejected": "no", "system": "be long"},
            "'system', and a message",
        ),
        (
            {"prompt": [HI], "chosen": said("aye") | {"weight": 0}, "rejected": "no"},
            "nothing of chosen counts",
        ),
        (
            {"chosen": [HI, said("aye")], "rejected": [HI | {"content": "ho"}, said("no")]},
            "other prompts",
        ),
        ({"prompt": "hi", "chosen": "aye", "rejected": 7}, "rejected"),
        ({"prompt": 7, "chosen": "aye", "rejected": "no"}, "prompt"),
        ({"chosen": [], "rejected": "no"}, "chosen"),
        ({"question": "hi", "chosen": "aye", "rejected": "no"}, "has no 'prompt'"),
        ({"chosen": [HI, said("aye")], "rejected": "no"}, 'rejected is the text "no"'),
    ],
)
def test_a_bad_pair_is_named(tmp_path: Path, row: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, row)
    assert "train.jsonl:1" in error.value.problem
    assert named in error.value.problem


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "completion": " ", "label": True},
        {"messages": [HI, said("")], "label": False},
        {"messages": [HI], "label": True},
        {"prompt": "hi", "completion": HI, "label": True},
    ],
)
def test_a_labelled_answer_that_is_none_is_named(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, row, row, objective="kto")
    assert "train.jsonl:1" in error.value.problem
    assert "answer is" in error.value.problem


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
    found = swapped(samples[:])
    assert texts(found) == [("<u>a;<a>", "C;"), ("<u>b;<a>", "A;"), ("<u>c;<a>", "B;")]
    assert known(found, REFERENCE) == [0, 1, 2]
