"""The options of training: mlx_lm.lora's names, defaults and YAML files, and ours beside them."""

import json
import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from shardmlx.config.options import declared, written
from shardmlx.config.train import LINE, TrainConfig
from shardmlx.errors import UserError
from tests.helpers.refusals import refusal

MLX_LM_EXAMPLE = """\
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


def load(*argv: str) -> TrainConfig:
    return LINE.load([*argv, "--train"])


def error_of(*argv: str) -> UserError:
    with pytest.raises(UserError) as caught:
        LINE.load(argv)
    assert "\n" not in str(caught.value)
    return caught.value


# The same as mlx_lm.lora


def test_every_option_of_mlx_lm_keeps_its_default() -> None:
    from mlx_lm.lora import CONFIG_DEFAULTS

    ours = TrainConfig.from_flat().to_adapter_config()
    # Left to the run: mlx_lm.lora does not look whether the model fits.
    implied = {"train": True, "grad_checkpoint": None}
    assert CONFIG_DEFAULTS["grad_checkpoint"] is False
    assert {key: ours[key] for key in CONFIG_DEFAULTS} == CONFIG_DEFAULTS | implied


def test_the_example_of_mlx_lm_loads_unchanged(tmp_path: Path) -> None:
    config = LINE.load(["--config", write(tmp_path, MLX_LM_EXAMPLE)])
    assert config.tune.learning_rate == 1e-5
    assert config.tune.lora_parameters["keys"] == ["self_attn.q_proj", "self_attn.v_proj"]
    assert config.tune.optimizer_config["adamw"]["eps"] == 1e-6
    assert config.tune.lr_schedule == {
        "name": "cosine_decay",
        "warmup": 100,
        "warmup_init": 1e-7,
        "arguments": [1e-5, 1000, 1e-7],
    }
    assert isinstance(config.sets.hf_dataset, dict)
    assert config.sets.hf_dataset["path"] == "billsum"
    assert config.resume_adapter_file is None


@pytest.mark.parametrize("name", ["attention_chunk", "loss_chunk"])
def test_off_needs_no_quotes_in_yaml(name: str, tmp_path: Path) -> None:
    """YAML reads the bare word as False."""
    for text in ("off", '"off"', "false"):
        assert load("-c", write(tmp_path, f"{name}: {text}")).flat()[name] == "off"
    assert "auto" in error_of("-c", write(tmp_path, f"{name}: on")).remedy


def test_gradient_checkpointing_is_full_recomputation() -> None:
    assert TrainConfig.from_flat().batch.recompute is None
    assert load("--grad-checkpoint").batch.recompute == "full"
    assert load("--no-grad-checkpoint").batch.recompute == "none"
    assert load("--grad-checkpoint", "--recompute", "full").batch.recompute == "full"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("optimizer", "muon"), ("optimizer", "adafactor"), ("zero", 1), ("zero", 3)),
        *(("unfreeze_all", True), ("sum_dtype", "int8"), ("stage_map", "map.yaml")),
    ],
)
def test_what_tensor_shares_cannot_do_is_refused(name: str, value: object, tmp_path: Path) -> None:
    kind = "full" if name == "unfreeze_all" else "lora"
    file = write(tmp_path, f"{name}: {value}\nfine_tune_type: {kind}")
    error = error_of("-c", file, "--tensor-parallel", "2")
    assert re.search(rf"{name.replace('_', '.')} is {value} with --tensor-parallel 2", str(error))
    assert load("--tensor-parallel", "2").tune.zero == 0


@pytest.mark.parametrize("ranks", ["1", "3"])
def test_there_is_a_share_for_each_rank(ranks: str, tmp_path: Path) -> None:
    file = write(tmp_path, "tensor_shares: 2,1")
    assert load("-c", file, "--tensor-parallel", "2").layout.tensor_shares == "2,1"
    error = error_of("-c", file, "--tensor-parallel", ranks)
    assert f"2,1: --tensor-parallel {ranks} " in error.problem


ISLAND = ("--island", "http://hub:8750", "--name", "ann")


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--sweep", (*ISLAND, "--sweep", "runs.yaml")),
        ("--keep", (*ISLAND, "--keep", "best")),
        ("--tensor-parallel", (*ISLAND, "--tensor-parallel", "2")),
        ("--island", ISLAND[:2]),
        ("--name", ISLAND[2:]),
        *(
            ("--island", ("--island", url, "--name", "ann"))
            for url in ("hub:8750", "http://", "http://hub:x", "http://hub 1", "http://hub:123456")
        ),
    ],
)
def test_what_an_island_cannot_do_is_refused(flag: str, words: tuple[str, ...]) -> None:
    for url in ("https://hub.example.org/islands/", "http://[fe80::1%en0]:8750", ISLAND[1]):
        assert load(*ISLAND, "--island", url).island == url
    assert error_of(*words).problem.startswith(flag)


def test_kto_compares_a_row_with_others_of_its_batch() -> None:
    error = error_of("--objective", "kto", "--batch-size", "1", "--train")
    assert error.problem.startswith("--batch-size is 1 with objective kto")
    assert "2 or more" in error.remedy
    assert load("--objective", "kto", "--batch-size", "2").batch.batch_size == 2
    assert load("--objective", "dpo", "--batch-size", "2").batch.batch_size == 2


def test_the_adapter_config_is_what_mlx_lm_reads() -> None:
    written = json.loads(json.dumps(TrainConfig.from_flat(num_layers=4).to_adapter_config()))
    assert written["fine_tune_type"] == "lora"
    assert written["num_layers"] == 4
    assert written["lora_parameters"] == {"rank": 8, "dropout": 0.0, "scale": 20.0}
    full = TrainConfig.from_flat(fine_tune_type="full").to_adapter_config()
    assert full["lora_parameters"] is None


# Where a value comes from


def test_flags_beat_the_file_and_the_file_beats_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "iters: 5\nbatch_size: 2\nmask_prompt: true\nlora_parameters: null\n")
    config = load("-c", path, "--batch-size", "8", "--no-mask-prompt")
    assert (config.iters, config.batch.batch_size, config.seed) == (5, 8, 0)
    assert config.sets.mask_prompt is False
    assert config.config == path
    assert config.tune.lora_parameters["rank"] == 8  # a key without a value counts as not given


@pytest.mark.parametrize(
    ("argv", "train", "test"),
    [
        (["--data", "data"], True, False),
        (["--train"], True, False),
        (["--test"], False, True),
        (["--train", "--test"], True, True),
    ],
)
def test_train_is_implied_unless_test_alone_is_given(
    argv: list[str], train: bool, test: bool
) -> None:
    config = LINE.load(argv)
    assert (config.tune.train, config.sets.test) == (train, test)


def test_a_run_needs_data_or_a_word_that_it_takes_mlx_lm_s(tmp_path: Path) -> None:
    for argv in ([], ["--model", "M"], ["--iters", "5"], ["-c", write(tmp_path, "model: M\n")]):
        error = error_of(*argv)
        assert (error.problem, "--data" in error.remedy) == ("train has no data", True)
    given = write(tmp_path, "hf_dataset: {path: csv, config: {data_files: all.csv}}\n")
    assert LINE.load(["-c", given]).sets.hf_dataset is not None
    assert LINE.load(["-c", write(tmp_path, "data: mine\n")]).sets.data == "mine"
    assert LINE.load(["--model", "M", "--train"]).sets.data == "mlx-community/WikiSQL"


Q_PROJ = "self_attn.q_proj"


@pytest.mark.parametrize(
    ("flags", "text", "differs"),
    [
        ("--lora-rank 16", "", {"rank": 16}),
        ("--lora-alpha 32", "", {"scale": 4.0}),
        ("--lora-rank 16 --lora-alpha 32", "", {"rank": 16, "scale": 2.0}),
        ("--lora-scale 2 --lora-dropout 0.1", "", {"scale": 2.0, "dropout": 0.1}),
        (f"--lora-keys {Q_PROJ} mlp.up_proj", "", {"keys": [Q_PROJ, "mlp.up_proj"]}),
        ("", "lora_parameters: {rank: 16}", {"rank": 16}),
        ("", "lora_parameters: {scale: 2.0}", {"scale": 2.0}),
        ("", "lora_parameters: {rank: 16, alpha: 32}", {"rank": 16, "scale": 2.0}),
        ("", f"lora_rank: 16\nlora_keys: [{Q_PROJ}]", {"rank": 16, "keys": [Q_PROJ]}),
        ("", "lora_rank: 4\nlora_parameters: {dropout: 0.5}", {"rank": 4, "dropout": 0.5}),
        # A flag wins over the file, also over what means the same there.
        ("--lora-rank 4", "lora_parameters: {rank: 16, scale: 2.0}", {"rank": 4, "scale": 2.0}),
        ("--lora-rank 4", "lora_parameters: {rank: 16, alpha: 2}", {"rank": 4, "scale": 0.5}),
        ("--lora-alpha 4", "lora_parameters: {scale: 9.0}", {"scale": 0.5}),
        ("--lora-scale 4", "lora_parameters: {alpha: 9.0}", {"scale": 4.0}),
        ("--lora-rank 4", "lora_rank: 16", {"rank": 4}),
        ("--lora-alpha 4", "lora_scale: 9", {"scale": 0.5}),
        ("--lora-scale 4", "lora_alpha: 9", {"scale": 4.0}),
    ],
)
def test_each_key_of_the_adapters_can_be_given_and_the_others_are_mlx_lm_s(
    flags: str, text: str, differs: dict[str, object], tmp_path: Path
) -> None:
    usual = {"rank": 8, "dropout": 0.0, "scale": 20.0}
    words = ["-c", write(tmp_path, text)] if text else []
    config = load(*words, *flags.split())
    assert config.tune.lora_parameters == usual | differs
    assert config.to_adapter_config()["lora_parameters"] == usual | differs
    assert not [key for key in config.to_adapter_config() if key in ("lora_rank", "lora_alpha")]


@pytest.mark.parametrize(
    ("flags", "text", "problem"),
    [
        ("--lora-alpha 4 --lora-scale 2", "", "--lora-alpha is given, and --lora-scale too"),
        ("", "lora_alpha: 4\nlora_scale: 2", "lora_alpha is given, and lora_scale too"),
        ("", "lora_rank: 4\nlora_parameters: {rank: 8}", "lora_rank is 4, and lora_p.* has rank 8"),
        ("", "lora_alpha: 4\nlora_parameters: {scale: 9}", "lora_alpha is 4.0, and .* has scale 9"),
        ("", "lora_scale: 4\nlora_parameters: {alpha: 9}", "lora_scale is 4.0, and .* has alpha 9"),
        ("--lora-rank 4", "lora_parameters: {alpha: 9, scale: 2}", "has alpha and scale"),
    ],
)
def test_two_values_of_the_adapters_that_contradict_each_other_are_named(
    flags: str, text: str, problem: str, tmp_path: Path
) -> None:
    words = ["-c", write(tmp_path, text)] if text else []
    error = error_of(*words, *flags.split())
    assert re.search(problem, error.problem)
    assert "leave one out" in error.remedy
    assert error.problem.startswith(str(tmp_path)) == bool(text)


def test_numbers_with_exponents_are_numbers(tmp_path: Path) -> None:
    """Text that only looks like one stays text."""
    for number in ("1e-5", "1.e-5", ".1e-4", "1E-5"):
        path = write(tmp_path, f"learning_rate: {number}")
        assert load("-c", path).tune.learning_rate == 1e-5
    for text in ("1e5x", "e5", "-e-5", "."):
        path = write(tmp_path, f"project_name: {text}")
        assert load("-c", path).project_name == text


def test_texts_of_flags_and_of_the_file_are_read_alike(tmp_path: Path) -> None:
    path = write(tmp_path, "clear_cache_threshold: 2 GiB\noptimizer: AdamW\n")
    flags = ["--clear-cache-threshold", "2 GiB", "--optimizer", "AdamW"]
    for config in (load("-c", path), load(*flags)):
        assert (config.clear_cache_threshold, config.tune.optimizer) == (2**31, "adamw")


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
        (
            "--lr-schedule cosine_decay:1e-4,run,1e-6 --warmup 20",
            {"name": "cosine_decay", "arguments": [1e-4, 480, 1e-6], "warmup": 20},
        ),
        ("--lr-schedule cosine_decay:1e-4", {"name": "cosine_decay", "arguments": [1e-4, 500]}),
        (
            "--lr-schedule linear_schedule:1e-4,1e-6,run",
            {"name": "linear_schedule", "arguments": [1e-4, 1e-6, 500]},
        ),
        (
            "--lr-schedule linear_schedule:1e-4,1e-6",
            {"name": "linear_schedule", "arguments": [1e-4, 1e-6, 500]},
        ),
    ],
)
def test_a_learning_rate_schedule_can_be_given_by_flags(
    flags: str, schedule: dict[str, object] | None
) -> None:
    """Without arguments it falls to 0 over the updates of the run: two steps make one here."""
    run = "--learning-rate 1e-3 --iters 1000 --grad-accumulation-steps 2"
    assert load(*run.split(), *flags.split()).tune.lr_schedule == schedule


@pytest.mark.parametrize("form", ["cosine_decay", "cosine_decay:1e-4,run,1e-6", "cosine_decay:1,9"])
def test_a_schedule_over_the_run_follows_another_length_of_it(form: str) -> None:
    config = load("--lr-schedule", form, "--iters", "100")
    longer = config.changed(iters=700, lr_schedule=config.asked_lr_schedule)
    assert longer == load("--lr-schedule", form, "--iters", "700")


def test_a_warm_up_alone_keeps_the_learning_rate_afterwards() -> None:
    from shardmlx.models.runtime.tuner import build_schedule

    schedule = load("--learning-rate", "1e-3", "--warmup", "10").tune.lr_schedule
    rate = build_schedule(schedule)
    assert float(rate(0)) == 0.0
    assert float(rate(5)) == pytest.approx(0.5e-3)
    assert float(rate(500)) == pytest.approx(1e-3)


def test_epochs_take_the_place_of_iters(tmp_path: Path) -> None:
    path = write(tmp_path, "iters: 5\n")
    config = load("-c", path, "--epochs", "2", "--lr-schedule", "cosine_decay")
    assert config.epochs == 2
    counted = config.with_iters(70)
    assert (counted.iters, counted.epochs) == (70, None)
    assert counted.tune.lr_schedule == {"name": "cosine_decay", "arguments": [1e-5, 70]}
    path = write(tmp_path, "lr_schedule: {name: cosine_decay, arguments: [1e-4, run, 1e-6]}\n")
    counted = load("-c", path, "--epochs", "2").with_iters(70)
    assert counted.tune.lr_schedule == {"name": "cosine_decay", "arguments": [1e-4, 70, 1e-6]}
    path = write(tmp_path, "epochs: 3\n")
    config = load("-c", path, "--iters", "7")
    assert (config.iters, config.epochs) == (7, None)


def test_keys_that_mlx_lm_passes_over_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, instead in (("lora_layers: 16", "num_layers"), ("use_dora: true", "fine_tune_type")):
        path = write(tmp_path, f"iters: 5\n{key}\n")
        assert load("-c", path).iters == 5
        said = capsys.readouterr().err
        assert path in said
        assert instead in said
        assert said.count("\n") == 1


# A frozen value


def test_a_config_is_frozen_and_owns_its_mappings() -> None:
    parameters = {"rank": 4, "scale": 10.0, "dropout": 0.0, "keys": ["mlp.up_proj"]}
    config = TrainConfig.from_flat(lora_parameters=parameters)
    parameters["rank"] = 16
    assert config.tune.lora_parameters["rank"] == 4
    assert (
        TrainConfig.from_flat().tune.lora_parameters
        is not TrainConfig.from_flat().tune.lora_parameters
    )
    with pytest.raises(FrozenInstanceError):
        config.iters = 3  # type: ignore[misc]
    assert config.changed(iters=3).iters == 3


# Bad input: one line with the value and the remedy


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        ("--batch-size 0", "1 or more"),
        ("--micro-batch-size 9", "4"),
        ("--learning-rate -1", "more than 0"),
        ("--learning-rate nan", "a number"),
        ("--num-layers 0", "-1 to train all"),
        ("--recompute selective --grad-checkpoint", "leave one out"),
        ("--epochs 2 --iters 5", "leave one out"),
        ("--optimizer adamm", "adam, adamw, muon, sgd, adafactor, lars, lamb"),
        ("--schedule 2f2b", "auto, gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-v"),
        ("--zero 2", "0, 1, 3"),
        ("--seed 4294967296", "4294967295 or less"),
        ("--clear-cache-threshold many", "2GB"),
        ("--report-to wanbd", "wandb, swanlab, trackio"),
        ("--lr-schedule cosine", "cosine_decay"),
        ("--lr-schedule step_decay:fast", "give numbers"),
        ("--data-parallel 2 --stage-map m", "leave one out"),
        ("--iters many", "a whole number"),
        ("--iters", "STEPS"),
        ("--itres 5", "--iters"),
        ("--batch 5", "--batch-size"),
        ("--fast", "shardmlx train --help"),
        ("fast", "shardmlx train --help"),
        ("--lora-parameters 8", "lora_parameters into the YAML file"),
        ("--lora-rank 0", "1 or more"),
        ("--lora-dropout 1", "less than 1"),
        ("--lora-scale inf", "a number"),
        ("--no-unfreeze-all", "unfreeze_all into the YAML file"),
    ],
)
def test_a_bad_command_line_is_named_in_one_line(argv: str, remedy: str) -> None:
    flag, *values = argv.split()
    error = error_of(*argv.split())
    assert flag in error.problem
    assert (
        not values
        or values[0] in error.problem
        or argv.startswith(("--itres", "--batch ", "--lora", "--epochs"))
    )
    assert remedy in error.remedy


LORA = "lora_parameters: {rank: 8, scale: 2.0, dropout: 0"


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        ("iter: 5", "'iter'", "iters"),
        ("foo_bar: 1", "'foo_bar'", "take it out"),
        ("iters: true", "iters is True", "a whole number"),
        ("train: 1", "train is 1", "true or false"),
        ("learning_rate: fast", "learning_rate is 'fast'", "a number"),
        ("model: 7", "model is 7", "text"),
        ("iters: 5\ngrad_accumulation_steps: 6", "is 6 with iters 5", "5 or less"),
        ("batch_size: 2\nmicro_batch_size: 4", "micro_batch_size is 4", "2"),
        ("lora_parameters: 8", "lora_parameters is 8", "a mapping"),
        ("lora_keys: q_proj", "lora_keys is 'q_proj'", "a list"),
        ("lora_keys: []", "keys []", "['self_attn.q_proj']"),
        ("lora_rank: true", "lora_rank is True", "a whole number"),
        (f"{LORA}, alpha: 20}}", "alpha and scale", "alpha / rank"),
        ("lora_parameters: {alpha: many}", "alpha 'many'", "a number"),
        ("lora_parameters: {rank: }", "rank None", "a whole number above 0"),
        (f"{LORA}, kyes: [mlp.up_proj]}}", "'kyes'", "keys"),
        (f"{LORA}, keys: q_proj}}", "keys 'q_proj'", "['self_attn.q_proj']"),
        (LORA.replace("8", "8.0") + "}", "rank 8.0", "a whole number above 0"),
        (LORA.replace(" 0", " 1.0") + "}", "dropout 1.0", "below 1"),
        ("hf_dataset: billsum", "'billsum'", "a mapping or a list"),
        ("hf_dataset: []", "[]", "path"),
        ("hf_dataset: [{name: x}]", "{'name': 'x'}", "path"),
        ("hf_dataset: [{path: x}, {path: x, promt_feature: q}]", "'promt_f", "prompt_feature"),
        ("hf_dataset: {path: x, test_split: 5}", "test_split 5", "text"),
        ("hf_dataset: {path: x, day: 2024-01-01}", "day", "give plain numbers"),
        ("optimizer_config: {adamx: {}}", "'adamx'", "adam"),
        ("optimizer_config: {adam: 1}", "adam 1", "a mapping"),
        ("lr_schedule: {name: cosine}\nepochs: 2", "'cosine'", "cosine_decay"),
        ("lr_schedule: {name: step_decay, arguments: [1, 1, run]}\nepochs: 2", "3", "second"),
        ("lr_schedule: {name: linear_schedule, arguments: [1, run, 0]}", "2", "third"),
        ("lr_schedule: {name: step_decay, arguments: [1, 1, 9], warmup: -1}", "-1", "steps"),
        ("loss_scale: fast", "loss_scale is 'fast'", "dynamic, or a number above 0"),
        ("loss_scale: 0", "loss_scale is 0", "dynamic, or a number above 0"),
        ("loss_scale: true", "loss_scale is True", "a number"),
        ("loss_scale: dynamic\nsum_dtype: int8", "int8 with loss_scale dynamic", "bfloat16"),
        ("unfreeze_all: true", "fine_tune_type lora", "use full"),
        ("master_weights: true", "fine_tune_type lora", "leave it out"),
        ("master_weights: true\nfine_tune_type: full\ndtype: float32", "float32", "leave one"),
        ("iters: 5\nmodel: [a\n", "line 3", "fix"),
        ("iters: 5\nseed: 1\niters: 6\n", "line 3: key 'iters'", "fix"),
        ("model: !!python/name:os.system\n", "line 1", "fix"),
        ("- iters\n", "a list", "key: value"),
        ("", "nothing", "key: value"),
        ("model: caf\udce9\n", "UTF-8 text (byte 10)", "YAML"),
    ],
)
def test_a_bad_file_is_named_with_key_and_value(
    tmp_path: Path, text: str, problem: str, remedy: str
) -> None:
    path = tmp_path / "lora.yaml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    error = error_of("-c", str(path))
    assert error.problem.startswith(str(path))
    assert problem in error.problem
    assert remedy in error.remedy


def test_what_a_full_fine_tune_does_not_use_is_not_checked(tmp_path: Path) -> None:
    path = write(tmp_path, "fine_tune_type: full\nlora_parameters: {}\nunfreeze_all: true\n")
    assert load("-c", path).tune.unfreeze_all


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
    used |= {"max-seq-length", "pipeline-stages", "hostfile", "dry-run", "lora-rank"}
    text, flags = help_of("--help", capsys)
    assert flags == used
    assert "--batch-size N sequences a step, over all replicas together (default: 4)" in text
    text, flags = help_of("--help-all", capsys)
    assert used < flags == {each.flag[2:] for each in written(TrainConfig) if each.rules.flag}
    of_adapters = {flag for flag in flags if flag.startswith("lora-")}
    assert len(flags - of_adapters) <= 65
    assert of_adapters == {f"lora-{key}" for key in ("rank", "scale", "alpha", "dropout", "keys")}
    assert "--schedule {auto,gpipe,1f1b,interleaved-1f1b,zb-h1,zb-v}" in text
    assert "In the YAML file only: prompt_feature, completion_feature," in text


def test_other_ranks_read_no_file_and_take_only_how_long_to_wait_for_rank_0(
    tmp_path: Path,
) -> None:
    old = tmp_path / "lora.yaml"
    old.write_text("modle: mistral\n")
    for path in (old, tmp_path / "nowhere.yaml"):
        config = LINE.load(["-c", str(path), "--iters", "7", "--timeout", "5"], rank=1)
        assert (config.timeout, config.iters) == (5.0, TrainConfig.from_flat().iters)


# Paths


@pytest.mark.parametrize("name", ["checkpoint_dir", "metrics_file", "model"])
def test_an_empty_path_is_refused(name: str) -> None:
    assert str(refusal(TrainConfig.from_flat, **{name: ""})).startswith(f"{name} is empty: ")
    assert TrainConfig.from_flat(adapter_path="").adapter_path == ""


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
        assert config.flat()[name] == str(tmp_path / name)
    assert config.machines.profile == f"{tmp_path}/a,{tmp_path}/b"
    assert config.sets.hf_dataset == [{"path": str(tmp_path / "rows")}]
    assert "~nobody-of-that-name/x" in error_of("--adapter-path", "~nobody-of-that-name/x").problem
