"""Ranks that compute each layer together, over MLX's ring, say what one process says."""

from __future__ import annotations

import json
import math
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardmlx.distributed.times import silence_limit
from testbed.jobs import AFTER_A_KILL, Job, patience
from testbed.runs import events, in_file
from testbed.small_models import small_directory
from tests.helpers.models_and_batches import load_weights
from tests.helpers.mpirun import mlx_lm, mpirun
from tests.helpers.programs import PROGRAMS
from tests.helpers.rank_pool import run_in_pool
from tests.helpers.share_orders import CELLS, faults_of
from tests.helpers.shared_texts import (
    FEW,
    NINE_HEADS,
    QUANTISED,
    TOGETHER,
    WHOLE_EXPERTS,
    expected_texts,
)

PROMPT = "What is the colour of the sea, and who sails on it?"


def generate(ranks: int, *args: str | Path) -> Job:
    return run_in_pool(ranks, "-m", "shardmlx.generate", *args, "--no-verbose")


def check(ranks: int, shares: str, *how: str | Path, drafts: Sequence[str] = ()) -> None:
    shared = ("--tensor-parallel", str(len(shares.split(","))), "--tensor-shares", shares)
    job = generate(ranks, *how, *drafts, *shared)
    assert job.well().stdout == mlx_lm(*how)


def test_two_ranks_with_equal_shares(small: Path, small_quantised: Path, adapters: Path) -> None:
    how: Sequence[str | Path] = ("--prompt", PROMPT, "--max-tokens", "20")
    check(2, "1,1", "--model", small, *how, "--adapter-path", adapters)
    sampled = "--temp", "0.9", "--seed", "3"
    check(2, "1,1", "--model", small_quantised, *how, *sampled, drafts=("--draft", "lookup"))


@pytest.mark.parametrize(
    ("ranks", "count", "models"),
    [
        (2, 2, ("gemma3", "gpt_oss", QUANTISED, WHOLE_EXPERTS)),
        (4, 2, ("mixtral", NINE_HEADS)),
    ],
)
def test_texts_are_those_of_mlx_lm(ranks: int, count: int, models: Sequence[str]) -> None:
    """Together, in a conversation that goes on, and with drafts; of nine heads one rank has six.
    Three and four shares are in ``tests/unit/models/test_shares.py``."""
    job = run_in_pool(ranks, PROGRAMS / "shared_texts.py", str(count), *models)
    found = json.loads(job.well().stdout)
    assert {name: texts for name, (texts, _, _) in found.items()} == {
        name: expected_texts(name) for name in models
    }
    assert all(cached == len(TOGETHER[0]) + FEW - 1 for _, cached, _ in found.values())
    assert sum(accepted for *_, accepted in found.values()) > 0


def test_a_step_has_the_same_bits_in_whatever_order_messages_come() -> None:
    """``python -m tests.helpers.share_orders`` tries 200 orders of every schedule: MLX's sums keep
    a core busy while they wait."""
    cells = [each for each in CELLS if each.layout.schedule == "zb-v" or each.layout.dp > 1]
    assert len(cells) == 2
    assert faults_of(cells, first=0, orders=1) == {str(each): [] for each in cells}


def test_two_stages_of_two_ranks_evaluate(small: Path, pirate: Path, tmp_path: Path) -> None:
    losses = []
    for ranks, how in ((1, ()), (4, ("--tensor-parallel", "2"))):
        output = tmp_path / f"{ranks}.json"
        words = ("--model", small, "--data", pirate, "--output", output, *how)
        run_in_pool(ranks, "-m", "shardmlx.evaluate", *words, timeout=60.0).well()
        losses.append(json.loads(output.read_text())["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


DROPPED = {"rank": 4, "scale": 10.0, "dropout": 0.1, "keys": ["self_attn.v_proj", "mlp.up_proj"]}
"""Adapters of matrices whose inputs are whole, so that the masks are those of one process."""


def train(
    ranks: int, output: Path, model: Path, data: Path, *how: str | Path, **options: object
) -> Path:
    """Train for three steps; return the directory of the weights, and of ``metrics.jsonl``."""
    output.mkdir()
    run_in_pool(
        ranks,
        *("-m", "shardmlx.train", "--model", model, "--data", data, *how),
        *in_file(output / "options.yaml", **{"learning_rate": 0.01, **options}, num_layers=4),
        *("--iters", "3", "--steps-per-report", "1"),
        *("--max-seq-length", "64", "--val-batches", "1"),
        *("--adapter-path", output, "--metrics-file", output / "metrics.jsonl"),
    ).well()
    return output


LARGE_EPS = {"optimizer_config": {"lamb": {"eps": 1e-3}}}
"""Adam's step of a gradient that is 0 but for rounding has the sign of the rounding."""


@pytest.mark.parametrize(
    ("options", "ranks", "how"),
    [
        ({"lora_parameters": DROPPED}, 2, ()),
        ({"fine_tune_type": "full"}, 4, ("--pipeline-stages", "2", "--recompute", "full")),
        ({"fine_tune_type": "dora"}, 4, ("--data-parallel", "2")),
        ({"fine_tune_type": "full", "optimizer": "lars", "learning_rate": 10.0}, 2, ()),
        ({"fine_tune_type": "full", "optimizer": "lamb", **LARGE_EPS}, 2, ()),
    ],
)
def test_training_is_that_of_one_process(
    options: Mapping[str, object],
    ranks: int,
    how: tuple[str, ...],
    small: Path,
    pirate: Path,
    tmp_path: Path,
) -> None:
    shared, uneven = ("--tensor-parallel", "2", *how), {"tensor_shares": "2,1"}
    check_training(small, pirate, tmp_path, options, {1: ((), {}), ranks: (shared, uneven)})


def test_a_run_takes_shares_by_itself_where_a_step_is_clearly_faster(
    small: Path, pirate: Path, tmp_path: Path
) -> None:
    """A pipeline of one micro-batch keeps one of two machines busy, and shares keep both."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{socket.gethostname()} slots=2 # memory=8GiB flops=100M\n")
    check_training(
        small,
        pirate,
        tmp_path,
        {"batch_size": 1},
        {1: ((), {}), 2: (("--hostfile", str(hosts)), {})},
    )
    (start,) = events(tmp_path / "2" / "metrics.jsonl", "start")
    assert start["chosen"]["tensor_parallel"] == 2


def test_peaks_of_unequal_shares_are_those_of_the_plan(
    small_tokenizer: Path, pirate: Path, tmp_path: Path
) -> None:
    size = {"hidden_size": 256, "intermediate_size": 704, "num_key_value_heads": 4}
    model = small_directory(tmp_path / "model", small_tokenizer, **size)
    options = {"fine_tune_type": "full", "tensor_shares": "3,1"}
    output = train(2, tmp_path / "run", model, pirate, "--tensor-parallel", "2", **options)
    (summary,) = events(output / "metrics.jsonl", "summary")
    peaks = [rank["peak_memory_bytes"] for rank in summary["ranks"]]
    for peak, planned in zip(peaks, summary["predicted"]["peak_memory_bytes"], strict=True):
        assert 0.95 * planned <= peak <= 1.03 * planned
    assert peaks[0] > 1.3 * peaks[1]


def test_training_with_whole_experts(small_tokenizer: Path, pirate: Path, tmp_path: Path) -> None:
    """Adapters of experts are among the weights."""
    mixture = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    model = small_directory(tmp_path / "model", small_tokenizer, **mixture)
    shared = ("--tensor-parallel", "2")
    runs = {1: ((), {}), 2: (shared, {"expert_parallel": True})}
    names = check_training(model, pirate, tmp_path, {}, runs)
    assert any("switch_mlp.down_proj.lora_b" in name for name in names)


def test_a_sweep_trains_as_in_one_process(small: Path, pirate: Path, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text("high: {learning_rate: 0.1}\nlow: {learning_rate: 0.01, seed: 3}\n")
    alone, shared = (
        train(ranks, tmp_path / f"{ranks}", small, pirate, "--sweep", sweep, *how, optimizer="sgd")
        for ranks, how in ((1, ()), (2, ("--tensor-parallel", "2")))
    )
    for name in ("high", "low"):
        expected, weights = load_weights(alone / name), load_weights(shared / name)
        for each, array in expected.items():
            np.testing.assert_allclose(weights[each], array, atol=1e-5, err_msg=each)


def check_training(
    model: Path,
    data: Path,
    directory: Path,
    options: Mapping[str, object],
    runs: Mapping[int, tuple[tuple[str, ...], Mapping[str, object]]],
) -> list[str]:
    """Check losses, gradients, and the weights that are saved, which are whole, of ``runs`` on so
    many ranks; return the names of the weights."""
    options = {"optimizer": "sgd", **options}
    losses, weights = [], []
    for count, (how, further) in runs.items():
        output = train(count, directory / f"{count}", model, data, *how, **options, **further)
        steps = events(output / "metrics.jsonl", "train")
        losses.append([each[key] for each in steps for key in ("loss", "grad_norm")])
        weights.append(load_weights(output))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert weights[1].keys() == weights[0].keys()
    for name, array in weights[0].items():
        np.testing.assert_allclose(weights[1][name], array, atol=1e-6, err_msg=name)
    return list(weights[0])


def test_a_run_that_was_killed_goes_on_with_other_shares(
    small: Path, pirate: Path, tmp_path: Path
) -> None:
    """To the bit in the same layout. Adam's moments are pieces, too."""

    def run(name: str, *how: str, after: str | None = None) -> Path:
        checkpoints = tmp_path / "checkpoints" / name
        if after is not None:
            step = "step-0000002"
            shutil.copytree(tmp_path / "checkpoints" / after / step, checkpoints / step)
        saves = ("--checkpoint-dir", checkpoints, "--checkpoint-every", "2")
        options = {"fine_tune_type": "full", "optimizer": "adam"}
        return train(2, tmp_path / name, small, pirate, *how, *saves, **options)

    shared, stages = ("--tensor-parallel", "2"), ("--pipeline-stages", "2")
    wholes = {"shared": run("shared", *shared), "stages": run("stages", *stages)}
    for name, how, after in (
        ("the same", shared, "shared"),
        ("as stages", stages, "shared"),
        ("as shares", shared, "stages"),
    ):
        output = run(name, *how, after=after)
        assert [each["step"] for each in events(output / "metrics.jsonl", "train")] == [3]
        weights, expected = load_weights(output), load_weights(wholes[after])
        most = 0.0 if name == "the same" else 1e-5
        for each, array in expected.items():
            np.testing.assert_allclose(weights[each], array, atol=most, err_msg=each)


def test_rdma_is_taken_where_all_ranks_have_it() -> None:
    """MLX is a stand-in, for no machine of the tests has RDMA; the messages are real."""
    job = run_in_pool(2, PROGRAMS / "fake_rdma.py").well()
    said, *lines = job.stdout.splitlines()
    assert said == "Tensor shares are summed over RDMA (jaccl)"
    for rank, line in enumerate(lines):
        rdma, ring = json.loads(line)
        mesh = [[None, "rdma_en5"], ["rdma_en6", None]]
        assert rdma == ["jaccl", "MLX_RANK", "MLX_IBV_DEVICES", [mesh], "abcbcdede"]
        backend, *names, [hosts], _ = ring
        assert (backend, names) == ("ring", ["MLX_RANK", "MLX_HOSTFILE"])
        assert hosts[rank][0].startswith("0.0.0.0:")


@pytest.mark.parametrize(
    ("how", "command", "during", "said"),
    [
        ("kill", "evaluate", "scoring, batch ", "died"),
        (
            "stop",
            "generate",
            "decode of sequence 0",
            "no sign of life for {seconds} s: its process is stopped",
        ),
    ],
)
def test_a_rank_of_a_group_that_dies_or_stops(
    how: str, command: str, during: str, said: str, small: Path, pirate: Path
) -> None:
    work: dict[str, tuple[str | Path, ...]] = {
        "generate": ("--prompt", PROMPT, "--max-tokens", "50"),
        "evaluate": ("--data", pirate, "--batch-size", "1"),
    }
    timeout = math.ceil(max(8, patience(2))) if how == "stop" else 60  # MPI must start, too
    job = mpirun(
        2,
        *(PROGRAMS / "dying_rank.py", how, command, "--model", small, *work[command]),
        *("--timeout", str(timeout), "--tensor-parallel", "2"),
    )
    line = replace(job, stdout="").failure(1, *AFTER_A_KILL)  # it may follow unfinished text
    assert during in line.partition("rank 1 on")[0]  # the batch depends on who is behind
    assert said.format(seconds=f"{silence_limit(timeout):g}") in line
