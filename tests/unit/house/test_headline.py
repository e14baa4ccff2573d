"""What no Mac holds alone, as the first pages say, is refused for each Mac alone by the planner."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardmlx.common.units import GIB
from shardmlx.config.commands import BY_NAME
from shardmlx.config.train import TrainConfig
from shardmlx.errors import UserError
from shardmlx.planning.choice import Choice
from shardmlx.planning.facts.chips import machines_of
from shardmlx.planning.facts.hostfile import Machine, read_hostfile
from shardmlx.planning.training_plan import plan_training
from tests.helpers.fake_models import MISTRAL_7B, write_config

ROOT = Path(__file__).parents[3]

LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "quantization": {"group_size": 64, "bits": 4},
}

PAIR = "M2 16GB, M1 Ultra 64GB"

NEITHER = re.compile(r"\bneither\s+(Mac\s+)?(has the memory|holds)|on neither Mac", re.IGNORECASE)

EXAMPLE = "examples/lora-70b.yaml"

PLACES = {"README.md", "docs/what-fits.md", "docs/tutorial.md", EXAMPLE, "docs/training.md"}
"""Files that say so, each with a test below; training.md repeats what the example says."""


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def refused_alone(config: TrainConfig, machines: tuple[Machine, ...]) -> None:
    """Check that no machine holds the run by itself, with any answer to what is left open."""
    for machine in machines:
        with pytest.raises(UserError, match="does not fit"):
            plan_training(config, [machine])


def planned(config: TrainConfig, machines: tuple[Machine, ...]) -> Choice:
    refused_alone(config, machines)
    return plan_training(config, machines)


def tokens_of(text: str) -> int:
    (tokens,) = set(re.findall(r"([\d,]+)\s+tokens", text))
    return int(tokens.replace(",", ""))


def test_every_place_that_says_so_is_planned_below() -> None:
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/*.yaml")]
    saying = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if path.name != "CHANGELOG.md" and NEITHER.search(path.read_text(encoding="utf-8"))
    }
    assert saying == PLACES


def test_the_headline_is_a_plan_that_neither_mac_has_the_memory_for(tmp_path: Path) -> None:
    (said,) = re.findall(r"A MacBook with 16 GB and .*?\n\n", text_of("README.md"), re.DOTALL)
    model = str(write_config(tmp_path / "70b", LLAMA_70B))
    config = TrainConfig.from_flat(model=model, max_seq_length=tokens_of(said))
    prediction = planned(config, machines_of(PAIR)).prediction
    assert [float(each) for each in re.findall(r"([\d.]+) GiB", said)] == pytest.approx(
        [rank.peak / GIB for rank in prediction.ranks], abs=0.1
    )
    ((steps, days),) = re.findall(r"(\d+) steps of four sequences take\s+([\d.]+) days", said)
    assert config.batch.batch_size == 4
    seconds = int(steps) * prediction.step_seconds
    assert float(days) == pytest.approx(seconds / 86400, abs=0.06)
    (row,) = re.findall(r"With 16 and 64 GB, .*", text_of("docs/README.md"))
    assert tokens_of(row) == config.batch.max_seq_length
    (page,) = re.findall(r"On ([\d,]+) tokens neither holds it alone", text_of("docs/what-fits.md"))
    assert tokens_of(f"{page} tokens") == config.batch.max_seq_length


def test_the_example_is_a_plan_that_neither_mac_has_the_memory_for(tmp_path: Path) -> None:
    path = ROOT / EXAMPLE
    model = str(write_config(tmp_path / "70b", LLAMA_70B))
    config = BY_NAME["train"].line.load(["-c", str(path), "--model", model], 0)
    assert isinstance(config, TrainConfig)
    assert config.batch.max_seq_length == tokens_of(text_of(EXAMPLE).splitlines()[0])
    assert planned(config, read_hostfile(ROOT / "hostfiles/macbook-and-studio"))


def test_the_tutorial_s_model_fits_on_neither_mac_in_16_bits(tmp_path: Path) -> None:
    model = str(write_config(tmp_path / "7b", MISTRAL_7B))
    config = TrainConfig.from_flat(model=model, num_layers=8, batch_size=2)
    (lines,) = re.findall(
        r"cat > two-small-macs <<'END'\n(.*?)END", text_of("docs/tutorial.md"), re.S
    )
    hosts = tmp_path / "hosts"
    hosts.write_text(lines)
    refused_alone(config, read_hostfile(hosts))
    quantised = MISTRAL_7B | {"quantization": {"group_size": 64, "bits": 4}}
    fits = config.changed(model=str(write_config(tmp_path / "7b-4bit", quantised)))
    assert plan_training(fits, read_hostfile(hosts)[:1])
