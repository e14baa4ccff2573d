"""The options of training: mlx_lm.lora's names, defaults and YAML files, and ours beside them."""

import argparse
import inspect
import json
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from shardmlx.config.checks import LR_SCHEDULES, OPTIMIZERS
from shardmlx.config.options import declared
from shardmlx.config.train import LINE, TrainConfig
from shardmlx.errors import UserError

MLX_LM_EXAMPLE = """\
# The path to the local model directory or Hugging Face repo.
model: "mlx-community/Llama-3.2-1B-Instruct"
train: true
fine_tune_type: lora
optimizer: adamw
optimizer_config:
  adamw:
    betas: [0.9, 0.98]
    eps: 1e-6
    weight_decay: 0.05
    bias_correction: true
data: "mlx-community/WikiSQL"
seed: 0
num_layers: 16
batch_size: 4
iters: 1000
val_batches: 25
learning_rate: 1e-5
steps_per_report: 10
steps_per_eval: 200
grad_accumulation_steps: 1
resume_adapter_file: null
adapter_path: "adapters"
save_every: 100
test: false
test_batches: 100
max_seq_length: 2048
grad_checkpoint: false
lora_parameters:
  keys: ["self_attn.q_proj", "self_attn.v_proj"]
  rank: 8
  scale: 20.0
  dropout: 0.0
lr_schedule:
  name: cosine_decay
  warmup: 100
  warmup_init: 1e-7
  arguments: [1e-5, 1000, 1e-7]
hf_dataset:
  path: "billsum"
  train_split: "train[:1000]"
  valid_split: "train[-100:]"
  prompt_feature: "text"
  completion_feature: "summary"
"""


def write(directory: Path, text: str) -> str:
    path = directory / "lora.yaml"
    path.write_text(text)
    return str(path)


def error_of(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        LINE.load(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# The same as mlx_lm.lora


def test_every_option_of_mlx_lm_keeps_its_default() -> None:
    from mlx_lm.lora import CONFIG_DEFAULTS

    ours = TrainConfig().to_adapter_config()
    # Left to the run: mlx_lm.lora does not look whether the model fits.
    implied = {"train": True, "grad_checkpoint": None}
    assert CONFIG_DEFAULTS["grad_checkpoint"] is False
    assert {key: ours[key] for key in CONFIG_DEFAULTS} == CONFIG_DEFAULTS | implied


def test_every_flag_of_mlx_lm_keeps_its_spelling() -> None:
    from mlx_lm.lora import build_parser as build_mlx_lm_parser

    def flags(parser: argparse.ArgumentParser) -> set[str]:
        return {flag for action in parser._actions for flag in action.option_strings}

    theirs = build_mlx_lm_parser()
    assert flags(theirs) <= flags(LINE.parser())


def test_the_example_of_mlx_lm_loads_unchanged(tmp_path: Path) -> None:
    config = LINE.load(["--config", write(tmp_path, MLX_LM_EXAMPLE)])
    assert config.learning_rate == 1e-5
    assert config.lora_parameters["keys"] == ["self_attn.q_proj", "self_attn.v_proj"]
    assert config.optimizer_config["adamw"]["eps"] == 1e-6
    assert config.lr_schedule == {
        "name": "cosine_decay",
        "warmup": 100,
        "warmup_init": 1e-7,
        "arguments": [1e-5, 1000, 1e-7],
    }
    assert isinstance(config.hf_dataset, dict)
    assert config.hf_dataset["path"] == "billsum"
    assert config.resume_adapter_file is None


def test_optimizers_and_their_settings_are_those_of_mlx_and_our_own() -> None:
    import mlx.optimizers as optim

    from shardmlx.engine import optimizer

    for name, facts in OPTIMIZERS.items():
        cls = getattr(optim, facts.class_name, None) or getattr(optimizer, facts.class_name)
        assert cls.__name__.lower() == name
        settings = set(inspect.signature(cls).parameters) - {"learning_rate"}
        assert set(facts.settings) == settings, name
    assert len(OPTIMIZERS) == 7


def test_learning_rate_schedules_are_those_of_mlx() -> None:
    import mlx.optimizers.schedulers as schedulers

    for name, parameters in LR_SCHEDULES.items():
        signature = inspect.signature(getattr(schedulers, name)).parameters.values()
        expected = [p.name if p.default is p.empty else f"[{p.name}]" for p in signature]
        assert list(parameters) == expected, name


def test_no_layers_to_train_is_refused_where_mlx_lm_would_train_all(tmp_path: Path) -> None:
    """``model.layers[-max(0, 0):]`` are all of them."""
    remedy = (
        "is 0: give -1 to train all of them, as mlx_lm.lora does with 0, or the number of the last "
        "layers to train"
    )
    assert error_of("--num-layers", "0") == f"--num-layers {remedy}"
    path = write(tmp_path, "num_layers: 0")
    assert error_of("--config", path) == f"{path}: num_layers {remedy}"
    assert error_of("--num-layers", "-2") == "--num-layers is -2: give -1 or more"


@pytest.mark.parametrize(
    ("name", "words"),
    [("attention_chunk", ["auto", "off"]), ("loss_chunk", ["auto", "counted", "off"])],
)
def test_a_chunk_is_a_word(name: str, words: list[str], tmp_path: Path) -> None:
    flag = "--" + name.replace("_", "-")
    for word in words:
        assert getattr(LINE.load([flag, word]), name) == word
    remedy = f"choose from {', '.join(words)}"
    assert error_of(flag, "64") == f"{flag} is '64': {remedy}"
    path = write(tmp_path, f"{name}: 64")
    assert error_of("-c", path) == f"{path}: {name} is 64: {remedy}"


@pytest.mark.parametrize("name", ["attention_chunk", "loss_chunk"])
def test_off_needs_no_quotes_in_yaml(name: str, tmp_path: Path) -> None:
    """YAML reads the bare word as False."""
    for text in ("off", '"off"', "false"):
        assert getattr(LINE.load(["-c", write(tmp_path, f"{name}: {text}")]), name) == "off"
    path = write(tmp_path, f"{name}: on")
    assert error_of("-c", path).startswith(f"{path}: {name} is True: choose from auto, ")


def test_gradient_checkpointing_is_full_recomputation() -> None:
    assert LINE.load([]).recompute is None
    assert LINE.load(["--grad-checkpoint"]).recompute == "full"
    assert LINE.load(["--no-grad-checkpoint"]).recompute == "none"
    assert LINE.load(["--grad-checkpoint", "--recompute", "full"]).recompute == "full"
    error = error_of("--grad-checkpoint", "--recompute", "selective")
    assert error == "--recompute is selective with --grad-checkpoint: leave one out"


def test_the_adapter_config_is_what_mlx_lm_reads() -> None:
    written = json.loads(json.dumps(TrainConfig(num_layers=4).to_adapter_config()))
    assert written["fine_tune_type"] == "lora"
    assert written["num_layers"] == 4
    assert written["lora_parameters"] == {"rank": 8, "dropout": 0.0, "scale": 20.0}
    full = TrainConfig(fine_tune_type="full").to_adapter_config()
    assert full["lora_parameters"] is None


# Where a value comes from


def test_flags_beat_the_file_and_the_file_beats_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "iters: 5\nbatch_size: 2\nmask_prompt: true\n")
    config = LINE.load(["-c", path, "--batch-size", "8", "--no-mask-prompt"])
    assert (config.iters, config.batch_size, config.seed) == (5, 8, 0)
    assert config.mask_prompt is False
    assert config.config == path


def test_a_key_without_value_counts_as_not_given(tmp_path: Path) -> None:
    config = LINE.load(["-c", write(tmp_path, "iters:\nlora_parameters: null\n")])
    assert config.iters == 1000
    assert config.lora_parameters["rank"] == 8


@pytest.mark.parametrize(
    ("argv", "train", "test"),
    [
        ([], True, False),
        (["--train"], True, False),
        (["--test"], False, True),
        (["--train", "--test"], True, True),
    ],
)
def test_train_is_implied_unless_test_alone_is_given(
    argv: list[str], train: bool, test: bool
) -> None:
    config = LINE.load(argv)
    assert (config.train, config.test) == (train, test)


@pytest.mark.parametrize("number", ["1e-5", "1.e-5", "1.0e-5", "0.00001", ".1e-4", "1E-5"])
def test_numbers_with_exponents_are_numbers(tmp_path: Path, number: str) -> None:
    assert LINE.load(["-c", write(tmp_path, f"learning_rate: {number}")]).learning_rate == 1e-5


@pytest.mark.parametrize("text", ["1e5x", "e5", "-e-5", "."])
def test_text_that_only_looks_like_a_number_stays_text(tmp_path: Path, text: str) -> None:
    assert LINE.load(["-c", write(tmp_path, f"project_name: {text}")]).project_name == text


@pytest.mark.parametrize(
    ("size", "count"),
    [("2GB", 2 * 10**9), ("1.5 m", 1_500_000), ("7", 7), ("2 GiB", 2**31), ("3mi", 3 << 20)],
)
def test_sizes_may_have_units(tmp_path: Path, size: str, count: int) -> None:
    assert LINE.load(["--clear-cache-threshold", size]).clear_cache_threshold == count
    path = write(tmp_path, f"clear_cache_threshold: {size}")
    assert LINE.load(["-c", path]).clear_cache_threshold == count


def test_optimizer_names_may_be_capitalised_as_in_mlx_lm() -> None:
    assert LINE.load(["--optimizer", "AdamW"]).optimizer == "adamw"


# What YAML has, by flags


@pytest.mark.parametrize(
    ("flags", "schedule"),
    [
        ("", None),
        ("--lr-schedule cosine_decay", {"name": "cosine_decay", "arguments": [1e-3, 500]}),
        (
            "--lr-schedule cosine_decay --warmup 100",
            {"name": "cosine_decay", "arguments": [1e-3, 400], "warmup": 100},
        ),
        (
            "--lr-schedule linear_schedule",
            {"name": "linear_schedule", "arguments": [1e-3, 0.0, 500]},
        ),
        (
            "--lr-schedule step_decay:1e-3,0.9,10",
            {"name": "step_decay", "arguments": [1e-3, 0.9, 10]},
        ),
        ("--warmup 10", {"name": "linear_schedule", "arguments": [1e-3, 1e-3, 1], "warmup": 10}),
    ],
)
def test_a_learning_rate_schedule_can_be_given_by_flags(
    flags: str, schedule: dict[str, object] | None
) -> None:
    """Without arguments it falls to 0 over the updates of the run: two steps make one here."""
    run = "--learning-rate 1e-3 --iters 1000 --grad-accumulation-steps 2"
    assert LINE.load([*run.split(), *flags.split()]).lr_schedule == schedule


def test_a_warm_up_alone_keeps_the_learning_rate_afterwards() -> None:
    from mlx_lm.tuner.utils import build_schedule

    schedule = LINE.load(["--learning-rate", "1e-3", "--warmup", "10"]).lr_schedule
    rate = build_schedule(schedule)
    assert float(rate(0)) == 0.0
    assert float(rate(5)) == pytest.approx(0.5e-3)
    assert float(rate(500)) == pytest.approx(1e-3)


def test_epochs_take_the_place_of_iters(tmp_path: Path) -> None:
    path = write(tmp_path, "iters: 5\n")
    config = LINE.load(["-c", path, "--epochs", "2", "--lr-schedule", "cosine_decay"])
    assert config.epochs == 2
    counted = config.with_iters(70)
    assert (counted.iters, counted.epochs) == (70, None)
    assert counted.lr_schedule == {"name": "cosine_decay", "arguments": [1e-5, 70]}
    assert error_of("--epochs", "2", "--iters", "5") == (
        "--epochs is given, and --iters too: leave one out"
    )
    path = write(tmp_path, "epochs: 3\n")
    config = LINE.load(["-c", path, "--iters", "7"])
    assert (config.iters, config.epochs) == (7, None)


@pytest.mark.parametrize(
    ("key", "line"),
    [
        (
            "lora_layers: 16",
            "lora_layers is passed over, as mlx_lm.lora does: the number of layers",
        ),
        ("use_dora: true", "use_dora is passed over, as mlx_lm.lora does: DoRA is fine_tune_type"),
    ],
)
def test_keys_that_mlx_lm_passes_over_are_named(
    key: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, f"iters: 5\n{key}\n")
    assert LINE.load(["-c", path]).iters == 5
    said = capsys.readouterr().err
    assert said.startswith(f"shardmlx: {path}: {line}")
    assert said.count("\n") == 1


# A frozen value


def test_a_config_is_frozen_and_owns_its_mappings() -> None:
    parameters = {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["mlp.up_proj"]}
    config = TrainConfig(lora_parameters=parameters)
    parameters["rank"] = 16
    assert config.lora_parameters["rank"] == 4
    assert TrainConfig().lora_parameters is not TrainConfig().lora_parameters
    with pytest.raises(FrozenInstanceError):
        config.iters = 3  # type: ignore[misc]
    assert replace(config, iters=3).iters == 3


# Bad input: one line with the value and the remedy


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--batch-size 0", "--batch-size is 0: give 1 or more"),
        ("--iters 0", "--iters is 0: give 1 or more"),
        ("--micro-batch-size 0", "--micro-batch-size is 0: give 1 or more"),
        ("--micro-batch-size 9", "--micro-batch-size is 9: give at most the batch size, 4"),
        ("--learning-rate -1", "--learning-rate is -1.0: give more than 0"),
        ("--learning-rate nan", "--learning-rate is nan: give a number"),
        ("--num-layers -2", "--num-layers is -2: give -1 or more"),
        ("--optimizer adamm", "--optimizer is 'adamm': choose from adam, adamw, muon, sgd, ada"),
        ("--fine-tune-type qlora", "--fine-tune-type is 'qlora': choose from lora, dora, full"),
        (
            "--schedule 2f2b",
            "--schedule is '2f2b': choose from auto, gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-v",
        ),
        ("--partitioner even", "--partitioner is 'even': choose from auto, balanced, uniform"),
        ("--dtype int8", "--dtype is 'int8': choose from float32, bfloat16, float16"),
        ("--pipeline-stages 0", "--pipeline-stages is 0: give 1 or more"),
        ("--max-grad-norm 0", "--max-grad-norm is 0.0: give more than 0"),
        ("--seed 4294967296", "--seed is 4294967296: give less than 2**32"),
        ("--clear-cache-threshold many", "'many': give bytes, or a size like 500MiB or 2GB"),
        ("--report-to wanbd", "--report-to names 'wanbd': choose from wandb, swanlab, tensorboard"),
        ("--metrics-port 65536", "--metrics-port is 65536: give 65535 or less"),
        ("--lr-schedule cosine", "--lr-schedule is 'cosine': did you mean cosine_decay?"),
        ("--lr-schedule step_decay:fast", "give numbers after the colon: init, decay_rate, step"),
        ("--lr-schedule step_decay", "lr-schedule has arguments None: step_decay takes numbers"),
        ("--data-parallel 2 --stage-map m", "--data-parallel is 2 with a stage map"),
        ("--unfreeze-all", "--unfreeze-all is set with fine_tune_type lora: use full"),
        ("--iters many", "--iters: invalid int value: 'many': see shardmlx train"),
        ("--iters", "--iters: expected one argument"),
        ("--itres 5", "unknown argument '--itres': did you mean --iters?"),
        ("--batch 5", "unknown argument '--batch': did you mean --batch-size"),
        ("--fast", "unknown argument '--fast': see shardmlx train --help"),
        ("fast", "unknown argument 'fast'"),
        ("-c nowhere.yaml", "cannot read nowhere.yaml: No such file or directory"),
    ],
)
def test_a_bad_command_line_is_named_in_one_line(argv: str, message: str) -> None:
    assert message in error_of(*argv.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("iter: 5", "unknown key 'iter': did you mean iters"),
        ("iters: many", "iters is 'many': give a whole number"),
        ("iters: true", "iters is True: give a whole number"),
        ("iters: 10.5", "iters is 10.5: give a whole number"),
        ("train: 1", "train is 1: give true or false"),
        ("learning_rate: fast", "learning_rate is 'fast': give a number"),
        ("model: 7", "model is 7: give text"),
        ("lora_parameters: 8", "lora_parameters is 8: give a mapping"),
        ("hf_dataset: billsum", "hf_dataset is 'billsum': give a mapping or a list"),
        (
            "hf_dataset: [{name: x}]",
            "hf_dataset has {'name': 'x'}: give a mapping with 'path: NAME",
        ),
        (
            "lora_parameters: {rank: 8, alpha: 16, scale: 2.0, dropout: 0.0}",
            "lora_parameters has 'alpha': mlx-lm scales by 'scale'",
        ),
        (
            "lora_parameters: {rank: 8, scale: 2.0, dropout: 0, kyes: [mlp.up_proj]}",
            "lora_parameters has unknown key 'kyes': did you mean keys?",
        ),
        (
            "lr_schedule: {name: linear_schedule, arguments: [1, 0, 9], warm_up: 5}",
            "lr_schedule has unknown key 'warm_up': did you mean warmup",
        ),
        (
            "hf_dataset: [{path: x}, {path: x, promt_feature: question}]",
            "hf_dataset has unknown key 'promt_feature': did you mean prompt_feature",
        ),
        ("hf_dataset: {path: x, config: main}", "has x with config 'main': give a mapping"),
        ("hf_dataset: {path: x, test_split: 5}", "has x with test_split 5: give text"),
        ("foo_bar: 1", "unknown key 'foo_bar': take it out"),
        ("alpha: 16", "unknown key 'alpha': take it out"),
        ("lr_schedule: {name: cosine}\nepochs: 2", "has name 'cosine': choose from"),
        (
            "iters: 5\ngrad_accumulation_steps: 6",
            "is 6 with iters 5: no update is made: give 5 or less",
        ),
        ("lora_parameters: {scale: 2.0, dropout: 0.0}", "lacks 'rank': add a whole number above 0"),
        (
            "lora_parameters: {rank: 8.0, scale: 2.0, dropout: 0.0}",
            "lora_parameters has rank 8.0: give a whole number above 0",
        ),
        (
            "lora_parameters: {rank: 8, scale: 2.0, dropout: 1.0}",
            "lora_parameters has dropout 1.0: give a number from 0 to below 1",
        ),
        (
            "lora_parameters: {rank: 8, scale: 2.0, dropout: 0, keys: q_proj}",
            "lora_parameters has keys 'q_proj': list module names",
        ),
        ("optimizer_config: {adamx: {}}", "unknown optimizer 'adamx': did you mean "),
        ("optimizer_config: {adam: {beta: 1}}", "unknown adam setting 'beta': did you mean betas"),
        ("optimizer_config: {adam: {betas: [0.9, 1]}}", "has adam.betas [0.9, 1]: give two number"),
        ("optimizer_config: {sgd: {nesterov: true}}", "has sgd.nesterov: it needs momentum above"),
        ("lr_schedule: {name: cosine}", "lr_schedule has name 'cosine': choose from exponential"),
        (
            "lr_schedule: {name: cosine_decay, arguments: [1e-5]}",
            "arguments [1e-05]: cosine_decay takes numbers [init, decay_steps, [end]]",
        ),
        (
            "lr_schedule: {name: step_decay, arguments: [1, 0.9, 10], warmup: -1}",
            "lr_schedule has warmup -1: give a whole number of steps",
        ),
        ("batch_size: 2\nmicro_batch_size: 4", "micro_batch_size is 4: give at most the batch si"),
        ("zero: 2", "zero is 2: give 0, 1 or 3"),
        ("loss_scale: 1000", "loss_scale is 1000.0: give auto, none, or a power of two"),
        ("loss_scale: often", "loss_scale is 'often': give auto, none, or a power of two"),
        ("loss_scale: -2", "loss_scale is -2.0: give auto, none, or a power of two"),
        (
            "master_weights: true",
            "master_weights is set with fine_tune_type lora, whose adapters are float32: leave it",
        ),
        (
            "master_weights: true\nfine_tune_type: full\ndtype: float32",
            "master_weights is set with dtype float32: leave one out",
        ),
        ("project_name: 2024-01-01", "project_name is datetime.date(2024, 1, 1): give text"),
        ("hf_dataset: {path: x, day: 2024-01-01}", "give plain numbers, text, lists and mappings"),
    ],
)
def test_a_bad_file_is_named_with_key_and_value(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    error = error_of("-c", path)
    assert error.startswith(f"{path}: ")
    assert message in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("iters: 5\nmodel: [a\n", r", line 3: .*: mend the YAML"),
        ("iters: 5\n\ttabbed: 1\n", r", line 2: found character .* that cannot start any token"),
        ("iters: 5\nseed: 1\niters: 6\n", r", line 3: key 'iters' is given twice: mend"),
        ("model: !!python/name:os.system\n", r", line 1: could not determine a constructor"),
        ("- iters\n", r" holds a list: write one 'key: value' a line"),
        ("", r" holds nothing: write one 'key: value' a line"),
        ("model: \x01\n", r": .*special characters are not allowed.*: mend the YAML"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    assert re.fullmatch(re.escape(path) + message + ".*", error_of("-c", path))


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\xff\xfe")
    assert error_of("-c", str(path)) == f"{path} is no UTF-8 text (byte 4): is it a YAML file?"


def test_what_a_full_fine_tune_does_not_use_is_not_checked(tmp_path: Path) -> None:
    path = write(tmp_path, "fine_tune_type: full\nlora_parameters: {}\nunfreeze_all: true\n")
    assert LINE.load(["-c", path]).unfreeze_all


# --help


@pytest.mark.parametrize("flag", ["--help", "-h", "--version"])
def test_help_and_version_are_printed_on_rank_0_only(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, prints in ((0, True), (1, False)):
        with pytest.raises(SystemExit) as caught:
            LINE.load([flag], rank)
        assert caught.value.code == 0
        assert bool(capsys.readouterr().out) == prints


def help_of(flag: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, set[str]]:
    """Return the help, and the long flags of the options that it lists."""
    with pytest.raises(SystemExit):
        LINE.load([flag])
    text = capsys.readouterr().out
    flags = set(re.findall(r"^  (?:-\w \w+, )?--([a-z-]+)", text, re.MULTILINE))
    return " ".join(text.split()), flags - {"version", "help-all"}


def test_help_lists_what_most_runs_need_and_help_all_everything(
    capsys: pytest.CaptureFixture[str],
) -> None:
    used = {"model", "data", "train", "iters", "batch-size", "fine-tune-type", "num-layers"}
    used |= {"learning-rate", "adapter-path", "resume-adapter-file", "mask-prompt", "config"}
    used |= {"max-seq-length", "pipeline-stages", "hostfile", "dry-run"}
    text, flags = help_of("--help", capsys)
    assert flags == used
    assert "--batch-size N sequences a step, over all replicas together (default: 4)" in text
    text, flags = help_of("--help-all", capsys)
    assert used < flags == {each.flag[2:] for each in declared(TrainConfig) if each.rules.flag}
    assert len(flags) <= 65
    assert "--schedule {auto,gpipe,1f1b,interleaved-1f1b,zb-h1,zb-v}" in text
    assert "In the YAML file only: long_sequences, hf_dataset, prompt_feature," in text


def test_an_option_of_the_file_is_no_flag() -> None:
    problem, _, remedy = error_of("--lora-parameters", "8").partition(": ")
    assert problem == "unknown argument '--lora-parameters'"
    assert "lora_parameters into the YAML file" in remedy


def test_planning_starts_neither_mlx_nor_mpi() -> None:
    script = (
        "import sys, shardmlx.config.train, shardmlx.pipeline.stage_map, shardmlx.models.shape, "
        "shardmlx.partitioners, shardmlx.modelfiles.safetensors_header; "
        "print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm', 'mpi4py')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_other_ranks_read_no_file_and_take_only_how_long_to_wait_for_rank_0(
    tmp_path: Path,
) -> None:
    old = tmp_path / "lora.yaml"
    old.write_text("modle: mistral\n")
    for path in (old, tmp_path / "nowhere.yaml"):
        config = LINE.load(["-c", str(path), "--iters", "7", "--timeout", "5"], rank=1)
        assert (config.timeout, config.iters) == (5.0, TrainConfig().iters)


# Paths


def test_the_home_directory_is_expanded_in_every_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of flags, which a shell leaves alone between quotes, and of the YAML file itself."""
    monkeypatch.setenv("HOME", str(tmp_path))
    names = [
        each.name
        for each in declared(TrainConfig)
        if each.rules.metavar in ("DIR", "FILE", "MODEL") and each.name != "config"
    ]
    assert {"model", "data", "adapter_path", "checkpoint_dir", "stage_map", "trace"} < set(names)
    lines = [f"{name}: ~/{name}" for name in names]
    write(tmp_path, "\n".join([*lines, "hf_dataset: [{path: ~/rows}]"]))
    config = LINE.load(["-c", "~/lora.yaml", "--profile", "~/a,~/b"])
    for name in set(names) - {"profile"}:
        assert getattr(config, name) == str(tmp_path / name)
    assert config.profile == f"{tmp_path}/a,{tmp_path}/b"
    assert config.hf_dataset == [{"path": str(tmp_path / "rows")}]
    assert "~nobody-of-that-name/x" in error_of("--adapter-path", "~nobody-of-that-name/x")
