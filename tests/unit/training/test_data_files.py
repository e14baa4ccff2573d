"""Data files: JSON lines, CSV and Parquet, mixtures, and the examples of docs/data.md."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from mlx_lm.tuner.datasets import load_dataset as mlx_lm_load_dataset

from shardmlx.config.train import LINE, TrainConfig
from shardmlx.errors import UserError
from shardmlx.training.data_files import parse_rows
from shardmlx.training.datasets import DataSets, read_data
from testbed.jobs import ROOT
from tests.helpers.letters import EOS, Letters, listed
from tests.helpers.markdown import Block, blocks
from tests.helpers.refusals import refusal

PAGE = ROOT / "docs" / "data.md"
EXAMPLES = [block for block in blocks(PAGE) if len(block.info) > 1]


def example(name: str) -> Block:
    return next(block for block in EXAMPLES if " ".join(block.info[1:]) == name)


def read(data: Path, tokenizer: Any = Letters, **options: Any) -> DataSets:
    config = TrainConfig.from_flat(data=str(data), **{"batch_size": 1, **options})
    return read_data(config.wanted_data, tokenizer(), None)


def decoded(samples: Sequence[Any]) -> list[str]:
    return ["".join(chr(letter) for letter in tokens if letter != EOS) for tokens, _ in samples]


# The page.


class Template(Letters):
    """A tokenizer whose template knows tools and their calls."""

    def conversation(self, messages: Sequence[Mapping[str, Any]], tools: object) -> str:
        parts = [json.dumps(tools)] if tools else []
        for each in messages:
            calls = json.dumps(each.get("tool_calls"))
            parts.append(f"<{each['role'][0]}>{each['content']}{calls};")
        return "".join(parts)


@pytest.mark.parametrize(
    "block",
    [block for block in EXAMPLES if block.info[0] in ("jsonl", "csv")],
    ids=lambda block: " ".join(block.info[1:]),
)
@pytest.mark.parametrize("mask_prompt", [False, True])
def test_an_example_of_the_page_is_read(tmp_path: Path, block: Block, mask_prompt: bool) -> None:
    (tmp_path / f"train.{block.info[0]}").write_text(block.text)
    if mask_prompt and "text" in block.info:
        assert "need prompts" in str(refusal(read, tmp_path, Template, mask_prompt=True))
        return
    data = read(tmp_path, Template, mask_prompt=mask_prompt)
    rows = len(block.text.splitlines()) - (block.info[0] == "csv")
    assert len(data.train) == rows
    starts = [start for _, start in listed(data.train)]
    assert all(start > 0 for start in starts) if mask_prompt else starts == [0] * rows
    text = "".join(decoded(data.train))
    assert ("weather" in text and "Nassau" in text) if "tools" in block.info else "o" in text


def test_the_parquet_example_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    exec(example("train.parquet").text, {})
    assert decoded(read(tmp_path).train) == ["<u>Where to?;<a>Tortuga.;"]


def test_the_example_of_keys_is_read(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("question,answer\nhi,ho\n")
    config = tmp_path / "keys.yaml"
    config.write_text(example("keys").text)
    options = LINE.load(["-c", str(config), "--data", str(tmp_path), "--batch-size", "1"])
    data = read_data(options.wanted_data, Letters(), None)
    assert decoded(data.train) == ["<u>hi;<a>ho;"]


def test_a_csv_with_other_columns_gets_them_named_and_the_keys_that_take_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.csv").write_text("question,answer\nhi,ho\n")
    error = refusal(read, tmp_path)
    assert f"{tmp_path}/train.csv: its first row has the keys 'question', 'answer'" in error.problem
    assert "prompt_feature and completion_feature" in error.remedy
    with pytest.raises(UserError, match="write prompt_feature into the YAML file: -c FILE"):
        LINE.load(["--prompt-feature", "question"])


def test_the_example_that_converts_other_rows_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text('{"title": "a", "body": "b", "reply": "c"}\n')
    exec(example("convert").text, {})
    assert decoded(read(tmp_path).train) == ["<u>a\nb;<a>c;"]


def test_the_example_of_the_hub_is_taken(tmp_path: Path) -> None:
    (tmp_path / "hub.yaml").write_text(example("hub").text)
    assert LINE.load(["-c", str(tmp_path / "hub.yaml")]).sets.hf_dataset is not None


def test_the_example_that_divides_a_file_loses_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = {f'{{"text": "{i}"}}' for i in range(25)}
    Path("all.jsonl").write_text("\n".join(sorted(lines)))
    exec(example("divide").text, {})
    valid, train = (Path(f"{name}.jsonl").read_text().splitlines() for name in ("valid", "train"))
    assert len(valid) == 2
    assert {*valid, *train} == lines


# Mixtures.


@pytest.fixture
def local_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the files of the page's mixture; ``datasets`` keeps its files there too."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"q{i},a{i}\n" for i in range(10))
    Path("questions.csv").write_text("question,answer\n" + rows)
    Path("talk.jsonl").write_text("".join(f'{{"text": "t{i}"}}\n' for i in range(10)))
    return tmp_path


def test_the_mixture_of_the_page_has_its_weights(local_sets: Path) -> None:
    given = yaml.safe_load(example("mixture").text)["hf_dataset"]
    data = read(local_sets, hf_dataset=given)
    texts = decoded(data.train)
    questions = [f"<u>q{i};<a>a{i};" for i in range(8) for _ in range(3)]
    assert texts == [*(f"t{i}" for i in (0, 2, 4, 6)), *questions]
    assert decoded(data.valid) == ["t8", "t9", "<u>q8;<a>a8;", "<u>q9;<a>a9;"]


def test_pairs_of_a_mixture_stay_together(local_sets: Path) -> None:
    keys = {
        "prompt_feature": "question",
        "chosen_feature": "answer",
        "rejected_feature": "question",
    }
    files = {"path": "csv", "config": {"data_files": "questions.csv"}, **keys}
    given = [{**files, "weight": weight} for weight in (1, 0.25)]
    data = read(local_sets, hf_dataset=given, objective="dpo", batch_size=2)
    pairs = [f"<u>q{i};<a>{each}{i};" for i in (*range(8), 0, 4) for each in "aq"]
    assert decoded(data.train) == pairs


def test_the_one_file_of_the_page_is_divided(local_sets: Path) -> None:
    Path("all.csv").write_text("prompt,completion\n" + "".join(f"q{i},a{i}\n" for i in range(10)))
    data = read(local_sets, hf_dataset=yaml.safe_load(example("one file").text)["hf_dataset"])
    assert decoded(data.train) == [f"<u>q{i};<a>a{i};" for i in range(9)]
    assert decoded(data.valid) == ["<u>q9;<a>a9;"]


def test_a_mixture_without_weights_is_that_of_mlx_lm(local_sets: Path) -> None:
    given = yaml.safe_load(example("mixture").text)["hf_dataset"]
    for each in given:
        del each["weight"]
    config = TrainConfig.from_flat(hf_dataset=given, batch_size=1, train=True)
    theirs, _, _ = mlx_lm_load_dataset(SimpleNamespace(**config.flat()), Letters())
    order = sorted(range(len(theirs)), key=lambda i: len(theirs[i]))
    expected = [theirs.process(theirs[i])[0] for i in order]
    assert [tokens for tokens, _ in listed(read(local_sets, hf_dataset=given).train)] == expected


def test_a_row_of_a_mixture_is_named(local_sets: Path) -> None:
    Path("talk.jsonl").write_text('{"text": "t"}\n{"text": null}\n')
    given = [{"path": "json", "config": {"data_files": "talk.jsonl"}, "train_split": "train"}]
    with pytest.raises(UserError, match=r"^json, train set, row 2: text is null, not text: "):
        read(local_sets, hf_dataset=given)


def test_a_data_set_that_is_not_there_is_named(local_sets: Path) -> None:
    given = {"path": "csv", "config": {"data_files": "none.csv"}}
    with pytest.raises(
        UserError,
        match=r"^hf_dataset csv gives no train set .*none.csv.*config and train_split",
    ):
        read(local_sets, hf_dataset=given)


@pytest.mark.parametrize("weight", [0, -1, "3", True, float("nan")])
def test_a_weight_is_a_number_above_0(weight: Any) -> None:
    with pytest.raises(UserError, match=r"weight .*: give a number above 0"):
        TrainConfig.from_flat(hf_dataset={"path": "csv", "weight": weight})


# Files.


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text\na,b\n", "train.csv, row 1 has more cells, or fewer, than the first line names"),
        (b'text\n"a\n', "train.csv, row 1 is not CSV: unexpected end of data: fix it"),
        (b"text,a,text\nx,y,z\n", "train.csv has the column 'text' twice: rename one"),
        (b"text\n\xff\n", "train.csv is not UTF-8 text: invalid start byte at byte 5"),
    ],
)
def test_csv_that_is_none_is_refused(content: bytes, message: str) -> None:
    assert str(refusal(parse_rows, Path("train.csv"), content)).startswith(message)


def test_cells_may_have_commas_quotes_and_lines_and_empty_lines_are_none() -> None:
    content = b'\xef\xbb\xbfprompt,completion\r\n"a, ""b""","c\nd"\r\n\r\n'
    assert [*parse_rows(Path("x.csv"), content)] == [{"prompt": 'a, "b"', "completion": "c\nd"}]


def test_parquet_that_is_none_is_refused() -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(UserError, match=r"^train\.parquet is not Parquet: "):
        parse_rows(Path("train.parquet"), b"PAR1")


def test_parquet_with_a_column_twice_is_refused() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_arrays([["x"], ["y"]], names=["text", "text"]), file)
    with pytest.raises(UserError, match=r"^train\.parquet has the column 'text' twice: "):
        parse_rows(Path("train.parquet"), file.getvalue().to_pybytes())


def test_parquet_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"^train\.parquet needs the pyarrow package: "):
        parse_rows(Path("train.parquet"), b"PAR1")


def test_two_files_of_one_set_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    shutil.copy(tmp_path / "train.jsonl", tmp_path / "train.csv")
    with pytest.raises(UserError, match=r"has train\.jsonl and train\.csv: keep one of them"):
        read(tmp_path)


@pytest.mark.parametrize(
    "content", [b'[{"text": "a"}]', b'[\n{"text": "a"}\n]', b'{\n  "text": "a"\n}\n']
)
def test_json_that_is_not_in_lines_is_named(content: bytes) -> None:
    with pytest.raises(UserError, match=r"^train\.jsonl:1 is .* one object on each line"):
        list(parse_rows(Path("train.jsonl"), content))


def test_a_cell_may_be_a_whole_document() -> None:
    text = "a" * 200_000
    assert [*parse_rows(Path("train.csv"), f"text\n{text}\n".encode())] == [{"text": text}]


def test_empty_cells_of_csv_hold_nothing() -> None:
    content = b"prompt,completion,source\na,b,\nc,d, \n"
    rows = [{"prompt": p, "completion": c, "source": None} for p, c in ("ab", "cd")]
    assert [*parse_rows(Path("x.csv"), content)] == rows


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("prompt,completion\nhi,ho\n,\n", "row 2 has empty cells alone"),
        ("prompt,completion\nhi,ho\nhi, \n", "row 2: completion is null, not text"),
        ("prompt,completion\nhi,ho\n,ho\n", "row 2: prompt is null, not text"),
        ("text,title\nhi,ho\n,ho\n", "row 2: text is null, not text"),
    ],
)
def test_an_empty_cell_trains_no_empty_turn(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "train.csv").write_text(content)
    assert problem in refusal(read, tmp_path).problem
