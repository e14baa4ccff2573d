"""Bad input ends on all ranks, in one line that names the value and the remedy, with status 2.

What the first rank finds in the data reaches all in one way: most of it is found by one rank here.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from tests.helpers.jobs import Job
from tests.helpers.mpirun import mpirun, train


@pytest.fixture
def model(small: Path, tmp_path: Path) -> Path:
    """A model directory of the test's own, to be spoiled."""
    return Path(shutil.copytree(small, tmp_path / "model"))


@pytest.fixture
def data(pirate: Path, tmp_path: Path) -> Path:
    """A data directory of the test's own, to be spoiled."""
    return Path(shutil.copytree(pirate, tmp_path / "data"))


def in_a_job_of_its_own(ranks: int, *arguments: str | Path) -> Job:
    return mpirun(ranks, "-m", "shardmlx.train", *arguments)


def refused(
    tmp_path: Path, ranks: int, *flags: str | Path, start: Callable[..., Job] = train
) -> str:
    """Return the one line with which a job must end; nothing else may be left of it."""
    output = tmp_path / "adapters"
    job = start(
        ranks,
        *("--model", tmp_path / "model", "--data", tmp_path / "data"),
        *("--adapter-path", output, "--iters", "1", "--batch-size", "2", "--num-layers", "-1"),
        *flags,
    )
    assert job.returncode == 2, job.output
    assert "Traceback" not in job.output
    assert "loaded in" not in job.output
    assert len(job.error_lines) == 1, job.output
    assert not output.exists()
    (line,) = job.error_lines
    assert line.startswith("shardmlx: error: ")
    return line.removeprefix("shardmlx: error: ")


def stage_map(tmp_path: Path, *sizes: int) -> Path:
    path = tmp_path / "stages.yaml"
    path.write_text("stages:\n" + "".join(f"  - num_layers: {size}\n" for size in sizes))
    return path


def test_a_number_of_ranks_that_the_stage_map_cannot_use(
    model: Path, data: Path, tmp_path: Path
) -> None:
    path = stage_map(tmp_path, 2, 2, 1)
    assert refused(tmp_path, 2, "--stage-map", path) == (
        f"stage map {path} needs 3 ranks, or a multiple of it for data parallelism, "
        "and there are 2: start mpirun with -n 3"
    )


def test_layers_that_do_not_add_up(model: Path, data: Path, tmp_path: Path) -> None:
    path = stage_map(tmp_path, 2, 2)
    assert refused(tmp_path, 2, "--stage-map", path) == (
        f"stage map {path} divides 4 layers (2 + 2), but the model has 5: "
        "make its num_layers add up to 5"
    )


def test_a_stage_map_that_the_schedule_cannot_run(model: Path, data: Path, tmp_path: Path) -> None:
    path = stage_map(tmp_path, 2, 3)
    line = refused(tmp_path, 2, "--stage-map", path, "--schedule", "zb-v")
    assert f"{path} suits no schedule zb-v on 2 ranks" in line


def test_an_unknown_schedule(model: Path, data: Path, tmp_path: Path) -> None:
    assert refused(tmp_path, 2, "--schedule", "2f2b", start=in_a_job_of_its_own) == (
        "--schedule is '2f2b': choose from auto, gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-v"
    )


def test_a_batch_that_cannot_be_divided_among_the_replicas(
    model: Path, data: Path, tmp_path: Path
) -> None:
    assert refused(tmp_path, 2, "--pipeline-stages", "1", "--batch-size", "3") == (
        "--batch-size 3 cannot be divided among 2 replicas: use a multiple of 2, or "
        "--replica-rows auto"
    )


def test_a_microbatch_larger_than_what_a_replica_has(
    model: Path, data: Path, tmp_path: Path
) -> None:
    assert refused(tmp_path, 2, "--pipeline-stages", "1", "--micro-batch-size", "2") == (
        "--micro-batch-size 2 is more than the 1 rows that each of 2 replicas has of "
        "--batch-size 2: use at most 1"
    )


def test_packing_for_a_model_whose_positions_depend_on_the_length_of_the_row(
    model: Path, data: Path, tmp_path: Path
) -> None:
    config = json.loads((model / "config.json").read_text())
    config["rope_scaling"] = {"type": "dynamic", "factor": 2.0}
    (model / "config.json").write_text(json.dumps(config))
    assert refused(tmp_path, 2, "--pack") == (
        "--pack: the model's rotary embeddings are of type dynamic, and change with the length of "
        "the row: train without --pack"
    )


def test_a_missing_data_file(model: Path, data: Path, tmp_path: Path) -> None:
    (data / "train.jsonl").unlink()
    assert refused(tmp_path, 2, start=in_a_job_of_its_own) == (
        f"{data}/train.jsonl is missing or empty: --data {data} must hold it"
    )


def test_an_empty_data_set(model: Path, data: Path, tmp_path: Path) -> None:
    (data / "train.jsonl").write_text("")
    assert refused(tmp_path, 2) == (
        f"{data}/train.jsonl is missing or empty: --data {data} must hold it"
    )


def test_a_line_that_is_not_json(model: Path, data: Path, tmp_path: Path) -> None:
    path = data / "train.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], '{"messages": [', *lines[4:]]) + "\n")
    assert refused(tmp_path, 2) == (
        f"{path}:5 is not JSON: Expecting value at column 15: mend the line, or take it out"
    )


def test_a_line_without_the_keys_of_the_others(model: Path, data: Path, tmp_path: Path) -> None:
    path = data / "valid.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:6], '{"prompt": "Ahoy"}', *lines[6:]]) + "\n")
    assert refused(tmp_path, 1) == (
        f"{path}:7 has no key 'messages', as the first row has, but the keys 'prompt': add it, or "
        "take the row out"
    )


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ('{"text": ""}', 'text is "", which is no token: write text'),
        ('{"text": null}', "text is null, not text: write text"),
        ('{"text": "\\ud800"}', r'text has "\ud800" at character 1, half of a surrogate pair'),
    ],
)
def test_a_text_that_is_none(
    row: str, complaint: str, model: Path, data: Path, tmp_path: Path
) -> None:
    """What a real tokenizer says of them, nobody understands: "list index out of range"."""
    for name in ("train", "valid"):
        (data / f"{name}.jsonl").write_text('{"text": "Ahoy there, matey"}\n' * 4)
    path = data / "valid.jsonl"
    path.write_text(path.read_text() + row)
    assert refused(tmp_path, 1).startswith(f"{path}:5: {complaint}")


def test_fewer_samples_than_a_batch(model: Path, data: Path, tmp_path: Path) -> None:
    assert refused(tmp_path, 1, "--batch-size", "64") == (
        f"{data}/train.jsonl has 32 samples, fewer than --batch-size 64: "
        "lower the batch size or add data"
    )


def test_a_memory_limit_below_what_the_plan_needs(model: Path, data: Path, tmp_path: Path) -> None:
    line = refused(tmp_path, 2, "--memory-limit", "0.6MiB")
    assert re.fullmatch(
        r"rank \d \(\S+\) would take \S+ GiB, \S+ GiB of it outside MLX, of its 0\.6 MiB "
        r"\(--memory-limit\): give --memory-limit \d+MiB or more, use more machines, or machines "
        r"with more memory",
        line,
    )


def longest(data: Path, words: int) -> Path:
    path = data / "train.jsonl"
    turns = [
        {"role": "user", "content": "Ahoy " * words},
        {"role": "assistant", "content": "Arr!"},
    ]
    path.write_text(path.read_text() + json.dumps({"messages": turns}) + "\n")
    return path


def test_a_sequence_longer_than_the_limit_where_none_may_be_cut(
    model: Path, data: Path, tmp_path: Path
) -> None:
    path = longest(data, 100)
    file = tmp_path / "lora.yaml"
    file.write_text("long_sequences: error\n")
    line = refused(tmp_path, 1, "-c", file, "--max-seq-length", "200")
    assert line.startswith(f"{path}:33 has ")
    assert line.endswith(
        "more than --max-seq-length 200: raise it, split the text, or use long_sequences: cut"
    )


def test_a_sequence_beyond_the_positions_of_the_model(
    model: Path, data: Path, tmp_path: Path
) -> None:
    path = longest(data, 400)
    line = refused(tmp_path, 1)
    assert line.startswith(f"{path}:33 has ")
    assert line.endswith("the model's limit is 512: use --max-seq-length 512 to cut it")


def test_a_token_that_the_model_does_not_know(model: Path, data: Path, tmp_path: Path) -> None:
    """The tokenizer was given one more, and the model was not."""
    path = model / "tokenizer.json"
    known = json.loads(path.read_text())
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    extra = {"id": vocabulary, "content": "<mate>", "special": True}
    switches = ("single_word", "lstrip", "rstrip", "normalized")
    known["added_tokens"].append({**extra, **dict.fromkeys(switches, False)})
    path.write_text(json.dumps(known))
    rows = data / "train.jsonl"
    text = rows.read_text()
    rows.write_text(text.replace('"content": "', '"content": "<mate> ', 1))
    assert refused(tmp_path, 2) == (
        f"{rows}:1 has token {vocabulary}, and the model knows those from 0 to "
        f"{vocabulary - 1}: use the tokenizer that comes with the model"
    )


def test_masking_the_prompt_of_plain_text(model: Path, data: Path, tmp_path: Path) -> None:
    for name in ("train", "valid"):
        (data / f"{name}.jsonl").write_text('{"text": "Ahoy there, matey"}\n' * 4)
    assert refused(tmp_path, 1, "--mask-prompt") == (
        f"{data}/train.jsonl: --mask-prompt needs prompts, and this is plain text: "
        "drop the flag, or write prompt and completion"
    )


def without_config(model: Path) -> str:
    (model / "config.json").unlink()
    return "config.json"


def truncated(model: Path) -> str:
    path = model / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1000])
    return f"{path}"


def another_family(model: Path) -> str:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "gpt2"}))
    return "mlx-lm cannot build this model"


def without_weights(model: Path) -> str:
    (model / "model.safetensors").unlink()
    return f"{model}"


def without_tokenizer(model: Path) -> str:
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    return f"{model} holds no tokenizer"


@pytest.mark.parametrize(
    "spoil", [without_config, truncated, another_family, without_weights, without_tokenizer]
)
def test_a_model_directory_that_is_not_whole(
    spoil: Callable[[Path], str], model: Path, data: Path, tmp_path: Path
) -> None:
    named = spoil(model)
    assert named in refused(tmp_path, 2)


def test_a_truncated_file_is_said_to_lack_bytes(model: Path, data: Path, tmp_path: Path) -> None:
    truncated(model)
    assert "1000 bytes" in refused(tmp_path, 2)


def test_an_unknown_key_in_the_configuration(model: Path, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "lora.yaml"
    path.write_text("batch_sise: 4\n")
    line = refused(tmp_path, 2, "--config", path, start=in_a_job_of_its_own)
    assert "batch_sise" in line
    assert "batch_size" in line
    assert str(path) in line


def test_too_many_layers_to_train(model: Path, data: Path, tmp_path: Path) -> None:
    assert refused(tmp_path, 2, "--num-layers", "6") == (
        "--num-layers 6: the model has 5 layers; -1 trains all of them"
    )


@pytest.mark.parametrize("flag", ["--metrics-file", "--trace"])
def test_an_output_that_cannot_be_written(
    flag: str, model: Path, data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "model" / "config.json" / "output"
    assert refused(tmp_path, 2, flag, path) == f"{flag} {path} cannot be written: Not a directory"


def test_a_file_in_the_place_of_a_model_directory(model: Path, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    flags = ("--fine-tune-type", "full", "--adapter-path", path)
    line = (
        f"--adapter-path {path} cannot be written: {path} is not a directory that you may write to"
    )
    assert refused(tmp_path, 2, *flags) == line
    assert path.read_text() == "mine"


def test_metrics_of_the_last_run_stay(model: Path, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("{}\n")
    refused(tmp_path, 2, "--batch-size", "64", "--metrics-file", path)
    assert path.read_text() == "{}\n"


def test_adapters_of_another_model(model: Path, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "adapters.safetensors"
    mx.save_safetensors(str(path), {"model.layers.99.mlp.up_proj.lora_a": mx.zeros((2, 2))})
    line = f"--resume-adapter-file {path}: it holds no weight of this model"
    assert refused(tmp_path, 2, "--resume-adapter-file", path) == line


def test_testing_without_adapters(model: Path, data: Path, tmp_path: Path) -> None:
    line = refused(tmp_path, 2, "--test")
    assert line.startswith(f"--adapter-path {tmp_path}/adapters holds no adapters of this model")
    assert line.endswith('use --adapter-path "" to test the model without')


def test_a_full_fine_tune_in_the_place_of_the_model_it_starts_from(
    model: Path, data: Path, tmp_path: Path
) -> None:
    before = sorted(path.name for path in model.iterdir())
    line = refused(tmp_path, 2, "--fine-tune-type", "full", "--adapter-path", model)
    assert line.startswith(f"--adapter-path {model} is the model itself")
    assert sorted(path.name for path in model.iterdir()) == before


def test_a_schedule_of_the_learning_rate_that_mlx_refuses(
    model: Path, data: Path, tmp_path: Path
) -> None:
    path = tmp_path / "lora.yaml"
    path.write_text("lr_schedule: {name: step_decay, arguments: [1e-3, 0.5, 0]}\n")
    assert "step_decay" in refused(tmp_path, 2, "--config", path)
