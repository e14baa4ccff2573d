"""``--json`` of the commands that look before a run, beside what others know of the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from shardmlx.main import main
from testbed.tiny_models import tiny_config
from tests.helpers.fake_models import TINY, model_files, write, write_config

Capture = pytest.CaptureFixture[str]

GIB = 2**30

PAGE = Path(__file__).parents[3] / "docs/json.md"

HOSTS = """\
studio.local slots=1  # memory=64GiB flops=27T link=40Gbps latency=30us
mini.local slots=1    # memory=16GiB flops=4T link=10Gbps
"""


def found(capsys: Capture, *words: object, status: int = 0) -> tuple[dict[str, Any], str]:
    """Return the JSON that a command prints, and the text beside it."""
    assert main([*map(str, words), "--json", "-"]) == status
    captured = capsys.readouterr()
    content: dict[str, Any] = json.loads(captured.out)
    assert content["version"] == 1
    assert content["command"] == words[0]
    named = set(re.findall(r"`(\w+)`", PAGE.read_text(encoding="utf-8")))
    assert set(names_in(content)) - named == set()
    return content, captured.err


def names_in(content: Any) -> Iterator[str]:
    """Yield the names of fields at every depth, but for what has its names from a model."""
    if isinstance(content, dict):
        for name, value in content.items():
            yield name
            if name not in ("dtypes", "quantisations"):
                yield from names_in(value)
    elif isinstance(content, list):
        for each in content:
            yield from names_in(each)


def text_of(capsys: Capture, *words: object) -> str:
    main([*map(str, words)])
    return capsys.readouterr().out


def test_a_schedule_in_numbers(capsys: Capture) -> None:
    """1F1B on 4 ranks: a step of (8 + 4 - 1) micro-batches of 4, of which 3 of 11 are bubble."""
    size = ("--pipeline-stages", 4, "--micro-batches", 8, "--costs", "1,2,1")
    content, text = found(capsys, "schedule", *size)
    assert content["makespan"] == 44
    assert content["bubble"] == pytest.approx(3 / 11, rel=1e-15)
    assert content["peak_in_flight"] == [4, 3, 2, 1]
    assert content["actions"][3][:4] == ["3F0", "3B0", "3F1", "3B1"]
    assert content["lowered"][0][:2] == ["0F0", "0SEND_F0"]
    assert content["spans"][3][0] == ["3F0", 3.0, 4.0]
    assert content["costs"] == {"forward": 1, "input_gradient": 2, "weight_gradient": 1}
    assert text == text_of(capsys, "schedule", *size)


def test_a_model_in_exact_bytes(tmp_path: Path, capsys: Capture) -> None:
    model = write(tmp_path / "tiny", model_files(TINY, shards=2))
    split = ("inspect", model, "--pipeline-stages", 2)
    content, text = found(capsys, *split)
    sizes: dict[str, int] = {}
    for file in model.glob("*.safetensors"):
        weights = mx.load(str(file))
        assert isinstance(weights, dict)
        sizes |= {name: array.nbytes for name, array in weights.items()}
    assert content["whole"]["tensors"] == len(sizes)
    assert content["whole"]["bytes"] == sum(sizes.values())
    assert sum(part["bytes"] for part in content["parts"]) == sum(sizes.values())
    assert sum(file["bytes"] for file in content["files"]) == sum(
        file.stat().st_size for file in model.glob("*.safetensors")
    )
    assert [stage["layers"] for stage in content["stages"]] == [[0, 2], [2, 4]]
    assert text == text_of(capsys, *split)

    of_rank, _ = found(capsys, *split, "--rank", 1)
    held = {tensor["tensor"]: tensor["bytes"] for tensor in of_rank["tensors"]}
    assert held.items() <= sizes.items()
    assert sum(held.values()) == content["stages"][1]["bytes"]


def test_what_verify_finds_is_a_list_and_the_status_stays(tmp_path: Path, capsys: Capture) -> None:
    model = write(tmp_path / "tiny", model_files(TINY, shards=2))
    content, _ = found(capsys, "inspect", model, "--verify")
    assert content["faults"] == []
    next(model.glob("*-00002-of-*.safetensors")).unlink()
    content, text = found(capsys, "inspect", model, "--verify", status=1)
    assert len(content["faults"]) == text.count("wrong: ") >= 1


@pytest.fixture
def plan(tmp_path: Path) -> tuple[str, ...]:
    config = tiny_config(layers=16, hidden_size=256, intermediate_size=512)
    hosts = tmp_path / "hosts"
    hosts.write_text(HOSTS)
    return "plan", str(write_config(tmp_path / "model", config)), "--hostfile", str(hosts)


def test_a_plan_in_exact_bytes_and_seconds(plan: tuple[str, ...], capsys: Capture) -> None:
    content, text = found(capsys, *plan)
    assert text == text_of(capsys, *plan)
    assert f"best of {content['tried']} plans" in text
    assert sum(content["num_layers"]) == 16
    for rank in content["ranks"]:
        assert f"{rank['peak_memory_bytes'] / GIB:.2f} GiB" in text
        assert rank["peak_memory_bytes"] >= rank["weights_bytes"] > 0
        assert rank["limit_bytes"] < 64 * GIB
    tokens = content["batch_size"] * content["max_seq_length"]
    assert content["tokens_per_second"] == pytest.approx(tokens / content["step_seconds"])
    last = max(end for rank in content["spans"] for _, _, end in rank)
    rest = content["reduce_seconds"] + content["update_seconds"]
    assert content["step_seconds"] == pytest.approx(last + rest)
    assert " ".join(content["run"]) in text
    assert {each["host"] for each in content["alone"]} == {"studio.local", "mini.local"}


def test_times_that_are_not_known_are_null(tmp_path: Path, capsys: Capture) -> None:
    model = write_config(tmp_path / "model", tiny_config(layers=4))
    content, _ = found(capsys, "plan", model, "--machines", "16GB, 16GB", "--num-layers", -1)
    assert content["step_seconds"] is None
    assert content["spans"] is None
    assert content["ranks"][0]["forward_seconds"] is None
    assert content["ranks"][0]["peak_memory_bytes"] > 0


def test_the_longest_sequence_and_islands(plan: tuple[str, ...], capsys: Capture) -> None:
    content, text = found(capsys, *plan, "--max-of", "seq")
    assert content["is_longest"] is True
    assert text.startswith(f"longest sequence that fits: {content['max_seq_length']} tokens\n")
    islands, _ = found(capsys, *plan, "--island-lines", "20,100")
    float32, *_ = islands["islands"]
    assert float32["seconds"] == pytest.approx(8 * float32["nbytes"] / 20e6)


@pytest.mark.parametrize("target", ["-", "found.json"])
def test_a_refusal_stays_one_line_with_its_status(
    target: str,
    plan: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = (
        (*plan, "--pipeline-stages", "17"),
        ("inspect", str(tmp_path / "nowhere")),
        ("schedule", "--pipeline-stages", "2", "--micro-batches", "2", "--costs", "1"),
    )
    for words in refused:
        assert main([*words, "--json", target]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1, captured.err
    assert not (tmp_path / "found.json").exists()
