"""A model that fits in the memory of no host, as the kernel counts it, on two hosts together."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.cgroups import MemoryCgroup, memory_cgroups
from testbed.hosts import Lab, hosts
from testbed.runs import events
from testbed.small_models import SMALL_VOCABULARY
from testbed.tiny_models import save_model_directory, tiny_config
from tests.helpers.mpirun import mpirun

SHARE = 0.94
"""The part of the model's weights that a host may have in memory."""

LAYERS = 14
"""So many that what Python and its libraries take beside the weights is little."""


@pytest.fixture(scope="module")
def model(small_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All layers have the weights of one: random numbers take longer than the file."""
    path = tmp_path_factory.mktemp("large") / "model"
    sizes: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 3584, "eos_token_id": 1}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": SMALL_VOCABULARY}
    save_model_directory(path, tiny_config("mistral", layers=LAYERS, **sizes), copies=True)
    for file in small_tokenizer.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


@pytest.fixture(scope="module")
def weights(model: Path) -> int:
    return (model / "model.safetensors").stat().st_size


@pytest.fixture(scope="module")
def cgroups(weights: int) -> Iterator[dict[str, MemoryCgroup]]:
    with memory_cgroups(("mac1", "mac2"), int(SHARE * weights)) as made:
        yield made


def row_of(number: int) -> str:
    """Return a row of a conversation: some twenty tokens."""
    said = ({"role": "user", "content": "Ahoy"}, {"role": "assistant", "content": f"Ye {number}"})
    return json.dumps({"messages": said}) + "\n"


@pytest.fixture(scope="module")
def lab(
    model: Path,
    cgroups: dict[str, MemoryCgroup],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Lab]:
    """Two hosts, of which the first has model and data: short conversations, since what is to be
    large here are the weights."""
    with hosts(tmp_path_factory.mktemp("hosts"), 2, cgroups=cgroups) as running:
        home = running.home("mac1")
        shutil.move(model, home / "model")
        (home / "data").mkdir()
        for name in ("train", "valid"):
            (home / "data" / f"{name}.jsonl").write_text("".join(map(row_of, range(4))))
        yield running


TRAIN = ("-m", "shardmlx.train", "--model", "model", "--data", "data")
LENGTH = (
    *("--iters", "2", "--batch-size", "2", "--val-batches", "0"),
    *("--steps-per-report", "1", "--num-layers", "-1"),
)
"""How long the run is; all else is left to it."""


def test_one_host_alone_is_refused_before_a_weight_is_read(
    lab: Lab, weights: int, cgroups: dict[str, MemoryCgroup]
) -> None:
    job = mpirun(1, command=lab.mpirun(1, *TRAIN, *LENGTH))
    assert (job.returncode, len(job.error_lines)) == (2, 1), job.output
    (line,) = job.error_lines
    assert re.search(
        r"rank 0 \(mac1\) would take \d\.\d\d GiB, 0\.\d\d GiB of it outside MLX, of its "
        r"0\.\d\d GiB \(the memory cgroup\): .* more machines? like mac1",
        line,
    ), line
    assert cgroups["mac1"].peak < weights / 3


@pytest.fixture(scope="module")
def pipeline_metrics(lab: Lab) -> Path:
    """The metrics of a run of two stages."""
    job = mpirun(2, command=lab.mpirun(2, *TRAIN, *LENGTH, "--metrics-file", "metrics")).well()
    assert "  the memory cgroup" in job.stdout
    return lab.home("mac1") / "metrics"


def test_two_hosts_train_and_generate(lab: Lab, weights: int, pipeline_metrics: Path) -> None:
    first, last = (event["loss"] for event in events(pipeline_metrics, "train"))
    assert first != last
    (summary,) = events(pipeline_metrics, "summary")
    for limits, rank in zip(summary["memory_limits"], summary["ranks"], strict=True):
        planned = limits["planned_process_bytes"]
        assert planned <= SHARE * weights
        # A busy machine computes less far behind the thread that allocates, and keeps less of what
        # is freed: the plan is an upper bound.
        assert 0.75 * planned <= rank["process_peak_bytes"] <= 1.03 * planned
    job = mpirun(
        2,
        command=lab.mpirun(
            *(2, "-m", "shardmlx.generate", "--model", "model", "--adapter-path", "adapters"),
            *("--prompt", "Who sails?", "--max-tokens", "4"),
        ),
    ).well()
    assert "Generation: 4 tokens" in job.stdout


def test_two_replicas_divide_the_weights_that_neither_can_hold(
    lab: Lab, pipeline_metrics: Path
) -> None:
    """The run chooses that, since without tensor shares nothing else fits; its loss is that of the
    pipeline."""
    layout = ("--pipeline-stages", "1", "--tensor-parallel", "1")
    files = ("--adapter-path", "other", "--metrics-file", "divided")
    command = lab.mpirun(2, *TRAIN, *LENGTH, "--iters", "1", *layout, *files)
    job = mpirun(2, command=command).well()
    assert "weights divided among replicas (--zero 3)" in job.stdout
    (divided,) = events(lab.home("mac1") / "divided", "train")
    expected, _ = events(pipeline_metrics, "train")
    assert divided["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_one_host_exports_in_a_third_of_the_memory(lab: Lab, weights: int) -> None:
    export = ("-m", "shardmlx.export", "model", "-o", "ours", "--quantize", "4")
    with memory_cgroups(("export",), weights // 3) as made:
        job = subprocess.run(
            made["export"].command(sys.executable, *export),
            cwd=lab.home("mac1"),
            capture_output=True,
            text=True,
        )
        assert job.returncode == 0, job.stdout + job.stderr
