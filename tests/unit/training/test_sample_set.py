"""Large data sets: a row becomes tokens when its turn comes, and the run is the one that it was."""

from __future__ import annotations

import json
from collections import Counter
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
from shardmlx.errors import AgreedFailure, UserError
from shardmlx.training.command import train_model
from shardmlx.training.data_files import parse_rows
from shardmlx.training.datasets import DataSets, read_data
from shardmlx.training.sample_set import RowError
from shardmlx.training.set_part import MOST_ROWS
from testbed.rows import write
from tests.helpers.letters import Letters, listed
from tests.helpers.local_transport import alone

pytestmark = pytest.mark.usefixtures("limited_to_a_test")

ROWS = 3 * MOST_ROWS
LOOKED_AT = range(0, ROWS, 3)
"""The rows of a set of so many that become tokens at the start."""


class Counting(Letters):
    """Letters that count how often each text became tokens, and refuse the text ``bad``."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if text == "bad":
            raise ValueError("it is bad")
        self.seen[text] += 1
        return super().encode(text)


def rows(**others: str) -> list[dict[str, str]]:
    """Rows of equal length, but for those of the given numbers, ``row_1``."""
    found = [{"text": f"{number:06d}"} for number in range(ROWS)]
    for name, text in others.items():
        found[int(name.removeprefix("row_"))] = {"text": text}
    return found


def read(directory: Path, *, tokenizer: Any = None, **options: Any) -> DataSets:
    config = TrainConfig.from_flat(data=str(directory), **{"batch_size": 4, **options})
    return read_data(config.wanted_data, tokenizer or Letters(), None)


def test_a_plan_looks_at_some_rows_and_a_batch_at_its_own(tmp_path: Path) -> None:
    tokenizer = Counting()
    data = read(Path(write(tmp_path, train=rows())), tokenizer=tokenizer).train
    assert {*tokenizer.seen} == {f"{number:06d}" for number in LOOKED_AT}
    tokenizer.seen.clear()
    batches = Batches(data, 4, 2048, np.random.RandomState(0), loop=True)
    for _ in range(10):
        next(batches)
    data[:1]  # waits for the batch that is made ready ahead
    assert len(tokenizer.seen) <= 11 * 4
    assert {*tokenizer.seen.values()} == {1}


def test_four_times_the_rows_take_no_more_calls_of_the_tokenizer(tmp_path: Path) -> None:
    counts = []
    for times in (1, 4):
        tokenizer = Counting()
        read(Path(write(tmp_path, train=rows() * times, valid=rows())), tokenizer=tokenizer)
        counts.append(tokenizer.seen.total())
    assert counts[1] <= counts[0] <= 2 * MOST_ROWS


def test_the_batches_are_those_of_mlx_lm(tmp_path: Path) -> None:
    given = [
        {"text": f"{number} " * (1 + number % 7), **({"id": number} if number % 5 == 0 else {})}
        for number in range(ROWS)
    ]
    directory = write(tmp_path, train=given)
    config = TrainConfig.from_flat(data=directory, batch_size=4, train=True)
    theirs, _, _ = mlx_lm_load_dataset(SimpleNamespace(**config.flat()), Letters())
    np.random.seed(3)
    expected = mlx_lm_iterate_batches(CacheDataset(theirs), 4, 2048)
    ours = Batches(read(tmp_path).train, 4, 2048, np.random.RandomState(3))
    for batch, _ in zip(ours, range(50), strict=False):
        tokens, _ = next(expected)
        assert batch.tokens.tolist() == tokens.tolist()


def test_a_run_that_goes_on_has_the_same_batches(tmp_path: Path) -> None:
    write(tmp_path, train=rows())
    random = np.random.RandomState(1)
    whole = Batches(read(tmp_path).train, 4, 2048, random, loop=True)
    for _ in range(5):
        next(whole)
    position = whole.position()
    later = Batches(read(tmp_path).train, 4, 2048, np.random.RandomState(9), loop=True)
    later.go_to(position)
    assert [next(later).tokens.tolist() for _ in range(3)] == [
        next(whole).tokens.tolist() for _ in range(3)
    ]


# What is said of rows.


def test_a_small_set_is_known_whole(tmp_path: Path) -> None:
    write(tmp_path, train=rows(row_1="bad")[:MOST_ROWS])
    with pytest.raises(UserError, match=r"train\.jsonl:2 .*it is bad"):
        read(tmp_path, tokenizer=Counting())


def test_what_shows_without_tokens_is_refused_at_the_start(tmp_path: Path) -> None:
    write(tmp_path, train=[*rows(), {"text": 3}])
    with pytest.raises(UserError, match=rf"train\.jsonl:{ROWS + 1}: text is 3"):
        read(tmp_path)
    write(tmp_path, train=[*rows()[:-1], "{"])
    with pytest.raises(UserError, match=rf"train\.jsonl:{ROWS} is not JSON"):
        read(tmp_path)


def test_a_row_that_cannot_be_used_is_named_when_its_turn_comes(tmp_path: Path) -> None:
    write(tmp_path, train=rows(row_1="bad"))
    data = read(tmp_path, tokenizer=Counting()).train
    data.prepare(0, 4)
    with pytest.raises(RowError, match=r"train\.jsonl:2 .*it is bad"):
        data[:4]
    assert len(data[4:8]) == 4


def test_a_cut_is_said_once_and_counts_are_no_more_than_known(tmp_path: Path) -> None:
    write(tmp_path, train=rows(row_0="x" * 30, row_1="y" * 12, row_4="z" * 12))
    data = read(tmp_path, max_seq_length=10)
    (warning,) = data.warnings[1:]
    assert "at least 1 of 3000 sequences are longer than --max-seq-length 10" in warning
    assert "the longest so far has 31" in warning
    data.train[:8]
    assert data.train.news() == []


def test_a_cut_of_a_row_that_was_not_looked_at_is_said_when_its_turn_comes(tmp_path: Path) -> None:
    """Bytes do not tell its length."""

    class Twice(Letters):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return super().encode(text.replace("#", "ab"))

    write(tmp_path, train=rows(row_1="######"))
    data = read(tmp_path, tokenizer=Twice(), max_seq_length=10)
    assert len(data.warnings) == 1  # there is no validation set
    data.train[:4]
    (news,) = data.train.news()
    assert "at least 1 of 3000 sequences are longer than --max-seq-length 10" in news
    assert data.train.news() == []


def test_what_shows_without_tokens_is_counted_over_all_rows(tmp_path: Path) -> None:
    talk = [{"prompt": "hi", "completion": "ho"} for _ in range(ROWS)]
    talk[1]["completion"] = talk[2]["completion"] = ""
    talk[4]["id"] = "x"
    data = read(Path(write(tmp_path, train=talk)))
    _, empty, unread = data.warnings
    assert f"2 of {ROWS} rows end in an empty answer (the first is {tmp_path}/train" in empty
    assert "'id'" in unread


def test_the_longest_row_is_looked_at(tmp_path: Path) -> None:
    data = read(Path(write(tmp_path, train=rows(row_1="x" * 99)))).train
    assert data.lengths.max() == 100
    assert (data.lengths == 7).sum() == ROWS - 1


def test_no_row_with_a_token_to_learn_is_an_error(tmp_path: Path) -> None:
    talk = [{"prompt": "hi" * 20, "completion": "ho"} for _ in range(ROWS)]
    write(tmp_path, train=talk)
    with pytest.raises(UserError, match="have no token to learn"):
        read(tmp_path, mask_prompt=True, max_seq_length=20)


# The identity of a run.


def facts(directory: Path, **how: Any) -> dict[str, Any]:
    return read(directory, **how).train.facts().as_json()


def test_a_set_is_known_by_what_its_rows_hold_wherever_it_lies(tmp_path: Path) -> None:
    first = Path(write(tmp_path / "first", train=rows()))
    expected = facts(first)
    assert {*expected} == {"samples", "content", "looked_at"}
    spaced = [json.dumps(row, indent=None, separators=(" , ", " : ")) for row in rows()]
    assert facts(Path(write(tmp_path / "spaced", train=spaced))) == expected
    table = tmp_path / "table"
    table.mkdir()
    lines = ["text", *(row["text"] for row in rows())]
    (table / "train.csv").write_text("\n".join(lines))
    assert facts(table) == expected
    for number in (0, 1):
        other = rows(**{f"row_{number}": "999999"})
        found = facts(Path(write(tmp_path / "other", train=other)))
        assert found["content"] != expected["content"]
        assert (found["looked_at"] != expected["looked_at"]) == (number in LOOKED_AT)
    assert facts(first, tokenizer=Counting()) == expected

    class Capitals(Letters):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [token + 1 for token in super().encode(text)]

    assert facts(first, tokenizer=Capitals())["looked_at"] != expected["looked_at"]


def test_a_checkpoint_that_knows_all_tokens_is_compared_by_them(tmp_path: Path) -> None:
    """One of an earlier version, or of a set that was small to the version that wrote it."""
    data = read(Path(write(tmp_path, train=rows()))).train
    then = data.facts({"samples": ROWS, "sha256": ""})
    assert {*then.as_json()} == {"samples", "sha256"}
    assert then == read(tmp_path).train.facts({"sha256": ""})
    small = read(Path(write(tmp_path / "small", train=rows()[:8]))).train
    assert {*small.facts().as_json()} == {"samples", "sha256"}
    assert {*small.facts({"content": ""}).as_json()} == {"samples", "content", "looked_at"}


# Preferences.


def test_of_a_large_set_of_pairs_the_same_are_left_out(tmp_path: Path) -> None:
    pairs = [
        {"prompt": "hi", "chosen": f"{number:06d}", "rejected": "no"} for number in range(ROWS)
    ]
    pairs[1]["chosen"] = "x" * 90
    pairs[2]["prompt"] = "y" * 40
    data = read(Path(write(tmp_path, train=pairs)), objective="dpo", max_seq_length=40)
    assert len(data.train) == 2 * (ROWS - 1)
    starts = [start for _, start in listed(data.train[:4])]
    too_long = len("<u>" + "y" * 40 + ";<a>000002;") - 40
    assert starts == [len("<u>hi;<a>")] * 2 + [len("<u>" + "y" * 40 + ";<a>") - too_long] * 2
    known = data.train[:6].known
    assert known is not None
    assert known[:, 0].tolist() == [1, 0] * 3
    cut, lost = (each for each in data.warnings if "--max-seq-length" in each)
    assert "the prompts of at least 1 of 3000 pairs are cut from the left" in cut
    assert "at least 1 of 3000 pairs have an answer that leaves no room" in lost


# Files.


def test_rows_of_a_file_stay_json_until_they_are_asked_for() -> None:
    content = b'{"text": "a"}\n{"text": "b"}\r\n{"text": 3}'
    found = parse_rows(Path("train.jsonl"), content)
    assert len(found) == 3
    assert found[1] == {"text": "b"}
    assert found[2] == {"text": 3}
    broken = parse_rows(Path("train.jsonl"), content + b"\n{")
    assert broken[0] == {"text": "a"}
    with pytest.raises(UserError, match=r"train\.jsonl:4 is not JSON"):
        broken[3]


# A run.


def test_a_run_ends_in_order_at_a_row_that_cannot_be_used(small: Path, tmp_path: Path) -> None:
    """Half a character, which shows when the row becomes tokens."""
    out = tmp_path / "out"
    data = write(tmp_path / "data", train=[{"text": f"hello {n}"} for n in range(ROWS)])
    unreadable = Path(data) / "train.jsonl"
    lines = unreadable.read_text().splitlines()
    order = np.random.RandomState(0).permutation(ROWS // 4)
    third = next(4 * int(n) + k for n in order[2:3] for k in range(4) if (4 * n + k) % 3)
    lines[third] = json.dumps({"text": "\ud800"})
    unreadable.write_text("\n".join(lines))
    config = TrainConfig.from_flat(
        model=str(small),
        data=data,
        adapter_path=str(out),
        batch_size=4,
        iters=5,
        num_layers=1,
        val_batches=0,
        steps_per_report=1,
        checkpoint_dir=str(tmp_path / "checkpoints"),
    )
    named = rf"train\.jsonl:{third + 1} "
    with pytest.raises(AgreedFailure, match=rf"step \d: .*{named}") as error:
        alone(lambda rank: train_model(config, rank))
    assert "take it out" in str(error.value)
    assert f"with others, start from what is in {out}" in str(error.value)
    assert (out / "adapters.safetensors").exists()
    dry = config.changed(dry_run=True)
    with pytest.raises(UserError, match=named):
        alone(lambda rank: train_model(dry, rank))
