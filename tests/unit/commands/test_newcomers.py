"""What a newcomer writes who knows other programs, and the remedy that mends it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from shardmlx.config import other_words
from shardmlx.config.commands import BY_NAME, COMMANDS
from shardmlx.config.options import with_parts, written
from shardmlx.config.train import TrainConfig
from shardmlx.main import main

Capture = pytest.CaptureFixture[str]

MISTAKES = [
    # Commands of other programs
    ("fuse --adapter-path a", "shardmlx export MODEL --adapter-path"),
    ("convert --hf-path m", "shardmlx export MODEL --quantize 4"),
    ("quantize m", "shardmlx export MODEL --quantize 4"),
    ("lora --train", "shardmlx train "),
    ("finetune", "shardmlx train "),
    ("help", "shardmlx --help"),
    ("help train", "shardmlx --help"),
    ("server", "shardmlx serve"),
    ("dpo", "shardmlx train --model MODEL --data DIR --objective dpo"),
    ("launch -n 2 fuse", "shardmlx export"),
    # Ranks and machines
    ("train -n 2 --data d", "shardmlx launch -n N train"),
    ("generate --num-gpus 2", "shardmlx launch -n N generate"),
    ("train --hostfile hosts --data d", "shardmlx launch --hostfile hosts train"),
    ("launch hosts train --data d", "--hostfile hosts"),
    ("launch train --data d", "--hostfile"),
    ("plan m", "--machines 'M2 16GB, M1 Ultra 64GB'"),
    ("plan m --machines 'MacBook Pro 16GB'", "About This Mac"),
    ("plan m --machines 'M2 16GB and M1 Ultra 64GB'", "commas"),
    # Words that stand in another place
    ("train --model m", "--data"),
    ("train lora.yaml", "-c lora.yaml"),
    ("train Qwen/Qwen3-0.6B --data d", "--model Qwen/Qwen3-0.6B"),
    ("generate 'Where is Tortuga?'", "--prompt 'Where is Tortuga?'"),
    ("chat Qwen/Qwen3-0.6B", "--model Qwen/Qwen3-0.6B"),
    ("export --model m -o out", "first word after export"),
    ("train --data d --mask-prompt true", "--no-mask-prompt"),
    ("train --data d --learning_rate 1e-4", "--learning-rate"),
    # Values
    ("train --data d --resume", "auto"),
    ("train --data d --resume", "never"),
    ("train --data d --schedule", "zb-h1"),
    ("train --data d --iters 1k", "a whole number"),
    ("train --data d --num-layers", "-1 for all"),
    ("inspect nothere", "OWNER/NAME"),
]


@pytest.mark.parametrize(("words", "mends"), MISTAKES)
def test_the_remedy_of_a_mistake_mends_it(
    words: str, mends: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("hosts", "lora.yaml"):
        Path(name).write_text("localhost slots=1\n")
    assert main(shlex.split(words)) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert mends in said


# The words of other programs

TRAINING: dict[str, dict[str, Any]] = {
    "lr 1": {"learning_rate": 1.0},
    "num-train-epochs 2": {"epochs": 2.0},
    "max-steps 9": {"iters": 9},
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    "torch-dtype float16": {"dtype": "float16"},
    "output-dir out": {"adapter_path": "out"},
    "save-dir out": {"adapter_path": "out"},
    "gradient-checkpointing": {"grad_checkpoint": True},
    "use-gradient-checkpointing": {"grad_checkpoint": True},
    "enable-activation-checkpointing": {"grad_checkpoint": True},
    "per-device-train-batch-size 2": {"batch_size": 2},
    "gradient-accumulation-steps 2": {"grad_accumulation_steps": 2},
    "eval-steps 7": {"steps_per_eval": 7},
    "val-every 7": {"steps_per_eval": 7},
    "logging-steps 7": {"steps_per_report": 7},
    "save-steps 7": {"save_every": 7},
    "save-total-limit 3": {"keep_checkpoints": 3},
    "sequence-len 512": {"max_seq_length": 512},
    "cutoff-len 512": {"max_seq_length": 512},
    "model-name-or-path m": {"model": "m"},
    "base-model m": {"model": "m"},
    "dataset-name d": {"data": "d"},
    "lora-r 16": {"lora_rank": 16},
    "lr-scheduler-type cosine_decay": {"lr_schedule": {"name": "cosine_decay"}},
    "warmup-steps 5": {"warmup": 5},
    "optim adamw": {"optimizer": "adamw"},
    "clip-grad-norm 1": {"max_grad_norm": 1.0},
    "packing": {"pack": True},
    "assistant-only-loss": {"loss_on": "assistant"},
    "completion-only-loss": {"mask_prompt": True},
    "load-best-model-at-end": {"keep": "best"},
    "resume-from-checkpoint c": {"resume": "c"},
    "early-stopping-patience 2": {"early_stop": 2},
    "finetuning-type full": {"fine_tune_type": "full"},
    "use-dora": {"fine_tune_type": "dora"},
    "pp 2": {"pipeline_stages": 2},
    "wandb": {"report_to": "wandb"},
}


@pytest.mark.parametrize("words", TRAINING)
def test_a_word_of_another_program_is_told_by_flag_and_key_what_it_is_here(words: str) -> None:
    """What is suggested is an option of train that takes the value, and means it."""
    word, _, value = words.partition(" ")
    (meant,) = TRAINING[words].items()
    known = {each.name: each for each in written(TrainConfig)}
    option = known[meant[0]]
    for as_flag in (True, False):
        given = f"--{word}" if as_flag else word.replace("-", "_")
        said = other_words.option_here(given, known.values(), "train", as_flag=as_flag)
        if as_flag and not option.rules.flag:
            assert meant[0] in said
            continue
        shown = option.flag if as_flag else option.name
        assert f"it is {shown}" in said
        told = said.removeprefix(f"it is {shown}").partition(" here")[0].lstrip(": ")
        read: Any = told or value or True
        if meant[0] == "lora_rank":
            whole = with_parts(TrainConfig, {"lora_rank": int(read)}, ())
            assert TrainConfig.from_flat(**whole).tune.lora_parameters["rank"] == 16
            continue
        kind = type(meant[1])
        read = kind(read) if kind in (int, float) else read
        written_value = TrainConfig.from_flat(**{meant[0]: read}).flat()[meant[0]]
        if isinstance(meant[1], dict):
            assert meant[1].items() <= written_value.items()
        else:
            assert written_value == meant[1]


@pytest.mark.parametrize(
    ("command", "word", "ours"),
    [
        ("serve", "max-model-len", "--cache-tokens"),
        ("serve", "tensor-parallel-size", "--tensor-parallel"),
        ("serve", "alias", "--served-model-name"),
        ("chat", "num-ctx", "--cache-tokens"),
        ("generate", "max-new-tokens", "--max-tokens"),
        ("generate", "temperature", "--temp"),
        ("evaluate", "num-fewshot", "--num-shots"),
        ("export", "save-dir", "--output-dir"),
        ("export", "load-in-4bit", "--quantize 4"),
        ("train", "load-in-4bit", "shardmlx export MODEL --quantize 4"),
        ("train", "weight-decay", "optimizer_config: {adamw: {weight_decay"),
        ("train", "warmup-ratio", "--warmup here (a number of updates)"),
        ("train", "dataset-text-field", "text_feature into the YAML file"),
        ("train", "val-set-size", "valid.jsonl"),
    ],
)
def test_a_word_means_what_the_command_has(
    command: str, word: str, ours: str, capsys: Capture
) -> None:
    positional = ["m"] if command == "export" else []
    assert main([command, *positional, f"--{word}", "1"]) == 2
    assert ours in capsys.readouterr().err


def test_all_that_is_suggested_exists() -> None:
    known = {each.name for command in COMMANDS for each in written(command.line.options)}
    suggested = {*other_words._NAMES, *(name for name, _ in other_words._VALUES.values())}
    assert suggested - known == set()
    for remedy in other_words._COMMANDS:
        program, name, *_ = remedy.split()
        assert program == "hf" or name in BY_NAME or name in ("--help", "--version")
