"""What benchmarks train, and runs of ``shardmlx.train``: as contenders, or from start to end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.bench.benchmark import Bench, as_flags, environment, program, run
from scripts.bench.turns import Contender
from shardmlx.config.options import declared
from shardmlx.config.train import TrainConfig
from testbed.jobs import ROOT, ranks_command
from testbed.rows import write
from testbed.runs import events, in_file

SMOLLM2 = ROOT / ".cache/smollm2-135m-instruct"
PIRATE = ROOT / ".cache/pirate"

WIDE: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 1,
}
"""A Mistral-style model of 8 layers and width 512."""

TINY = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
"""Changes to it with which it runs soon."""

ROWS, CHARACTERS = 64, 12_000
"""Rows of the data that are made, and of each."""

NEVER = 10**9
"""Steps until something that is not to happen in a run."""

PATIENCE = 7200
"""Seconds that ranks wait for rank 0, which rests while others have their turns."""


def demo_lacks() -> str | None:
    """Return what to do unless the demo has prepared its model and data."""
    absent = [path for path in (SMOLLM2, PIRATE) if not path.is_dir()]
    if absent:
        return f"{absent[0]} is not there: run scripts/demo.sh once, which prepares it"
    return None


def of_width(width: int) -> dict[str, int]:
    """Return changes to ``WIDE``: another width, the inner one in proportion."""
    return {"hidden_size": width, "intermediate_size": 11 * width // 4}


def make_wide(directory: Path, **changes: Any) -> Path:
    """Write the 8-layer model with random weights and a tokenizer trained on the demo's data.

    ``changes`` are made to its configuration.
    """
    # Not before: a command line is read, and refused, without MLX.
    from testbed.small_models import tokenizer_directory, with_tokenizer

    config = {**WIDE, **changes}
    words = directory.with_name(f"{directory.name}-words")
    vocabulary = min(4096, config["vocab_size"])
    return with_tokenizer(directory, config, tokenizer_directory(words, PIRATE, vocabulary))


def make_long_rows(directory: Path) -> Path:
    """Write data with rows longer than any --max-seq-length here: cut, all have one length."""
    lines = (PIRATE / "train.jsonl").read_text().splitlines()
    text = " ".join(json.loads(line)["messages"][-1]["content"] for line in lines)
    text *= -(-(CHARACTERS + 100 * ROWS) // len(text))
    made = [{"text": text[100 * i : 100 * i + CHARACTERS]} for i in range(ROWS)]
    return Path(write(directory, train=made, valid=made))


def make_both(bench: Bench, **changes: Any) -> tuple[Path, Path]:
    """Write that model and that data for a benchmark: a tiny model if it is to be over soon."""
    sizes = {**TINY, **changes} if bench.quick else changes
    return make_wide(bench.directory / "model", **sizes), make_long_rows(bench.directory / "data")


def demo_model(bench: Bench) -> Path:
    """Return the demo's model, or a tiny one if a benchmark is to be over soon."""
    return make_wide(bench.directory / "tiny", **TINY) if bench.quick else SMOLLM2


def as_words(values: Mapping[str, object], config: Path) -> list[str]:
    """Write options of ``shardmlx.train`` as flags, and into ``config`` those that have none."""
    only_in_file = {each.name for each in declared(TrainConfig) if not each.rules.flag}
    in_yaml = {name: value for name, value in values.items() if name in only_in_file}
    flags = {name: value for name, value in values.items() if name not in only_in_file}
    named = map(str, in_file(config, **in_yaml)) if in_yaml else ()
    return [*as_flags(flags), *named]


def training(
    bench: Bench,
    name: str,
    flags: Mapping[str, object],
    *,
    ranks: int = 2,
    steps: int = 1,
    threads: int = 1,
    bind: str = "core",
) -> Contender:
    """Return a run that makes ``steps`` steps a turn, and sums up in the end.

    It has one turn to warm up, the benchmark's rounds, and one more for its summary.
    """
    own = bench.path(name)
    reports = {
        "iters": steps * (bench.rounds + 1), "steps_per_report": steps, "val_batches": 0,
        "save_every": NEVER, "metrics_file": f"{own}.jsonl", "adapter_path": own,
        "timeout": PATIENCE,
    }  # fmt: skip
    words = as_words({**flags, **reports}, Path(f"{own}-options.yaml"))
    command = ranks_command(ranks, *program("loops", "train", *words), bind=bind)
    environments = [environment(threads)]
    return Contender(name, [command], environments=environments, sums_up=True)


def trained(
    bench: Bench,
    name: str,
    flags: Mapping[str, object],
    *,
    ranks: int = 2,
) -> list[dict[str, Any]]:
    """Train from start to end, a report each step unless ``flags`` say otherwise; return all events
    of its metrics file, of which the last is the summary."""
    own = bench.path(name)
    metrics = own.with_suffix(".jsonl")
    metrics.unlink(missing_ok=True)
    files = {"steps_per_report": 1, "adapter_path": own, "metrics_file": metrics, **flags}
    words = as_words(files, own.with_suffix(".yaml"))
    run(ranks_command(ranks, "-m", "shardmlx.train", *words))
    return events(metrics)


def of_kind(told: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the events of one kind."""
    return [event for event in told if event["event"] == name]
