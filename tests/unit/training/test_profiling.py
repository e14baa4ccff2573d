"""What ``shardmlx.profile`` measures, and how its ranks wait for one another."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten

from shardmlx.common.environment import Blas
from shardmlx.config.profile import LINE, ProfileOptions
from shardmlx.config.specs import Savings
from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.hostfile import Machine
from shardmlx.costmodel.measured_memory import MemorySample
from shardmlx.costmodel.profile_file import Sample, read_profile
from shardmlx.costmodel.timing import Seconds
from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.messages import TransportTimeout
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.planning.training_plan import plan_training
from shardmlx.training import profiling, sample_model
from tests.helpers.fake_models import TINY, model_files, write
from tests.helpers.family_configs import CONFIGS
from tests.helpers.local_transport import LocalNetwork
from tests.helpers.models_and_batches import tiny_config

PART = Seconds(1.0, 1.0, 1.0, 0.1)
SAMPLE = Sample(rows=1, length=8, layer=PART, frozen=PART, embedding=PART, head=PART)
MACHINES = [Machine(host="mac", kind="Mac", memory=2**34)]


def test_a_model_is_quantised_as_it_is_and_layers_are_measured_from_the_middle() -> None:
    quantization = {
        "bits": 4,
        "lm_head": {"bits": 8, "group_size": 32},
        "model.embed_tokens": False,
        "model.layers.0.self_attn.v_proj": {"bits": 8},
    }
    config = tiny_config(layers=8, hidden_size=64, intermediate_size=96, quantization=quantization)
    model = sample_model.build_sample_model(config, "float32")
    bits = {
        path: module.bits
        for path, module in tree_flatten(model.leaf_modules(), is_leaf=lambda m: "weight" in m)
        if "scales" in module
    }
    assert bits["lm_head"] == bits["model.layers.0.self_attn.v_proj"] == 8
    assert bits["model.layers.1.self_attn.v_proj"] == bits["model.layers.1.mlp.up_proj"] == 4
    assert not {"model.embed_tokens", "model.layers.1.mlp.down_proj"} & bits.keys(), (
        "96 columns are no groups of 64"
    )
    sample = sample_model.SampleModel(model, (0,) * 8, (0,) * 8, Savings())
    assert sample.runs == [(3, 7)]
    assert replace(sample, pattern=(0, 1, 1, 1, 1, 1, 1, 2)).runs == [(0, 1), (3, 7), (7, 8)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", model_files(TINY))


@contextmanager
def seconds_of(monkeypatch: pytest.MonkeyPatch, name: str, seconds: float) -> Iterator[None]:
    """``profiling.NAME`` takes as long on the highest rank, or wherever there is but one."""
    original = getattr(profiling, name)

    def slow(*arguments: Any) -> Any:
        transport = next((each for each in arguments if isinstance(each, Transport)), None)
        if transport is None or transport.rank == 1:
            time.sleep(seconds)
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(profiling, name, slow)
        yield


def measure(*arguments: Any) -> tuple[list[Sample], list[MemorySample]]:
    return [SAMPLE], []


def options_of(model: Path, output: Path, lengths: str = "8") -> ProfileOptions:
    words = [str(model), "--num-layers", "-1", "--rows", "1", "--lengths", lengths]
    return LINE.load([*words, "-o", str(output)])


def profile(model: Path, output: Path) -> None:
    options = options_of(model, output)
    LocalNetwork(2, timeout=0.3).run(
        lambda transport: profiling.run(options, transport, Blas("none"))
    )


def test_reading_may_take_long_and_measuring_may_not(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "measure", measure)
    monkeypatch.setattr(profiling, "build_sample_model", lambda *_: None)
    with seconds_of(monkeypatch, "_read", 0.8):
        profile(model, tmp_path / "p.json")
    assert len(read_profile(tmp_path / "p.json").machines) == 2
    with (
        seconds_of(monkeypatch, "measure", 2.0),
        pytest.raises(TransportTimeout, match="waiting for rank 1"),
    ):
        profile(model, tmp_path / "p.json")


def test_a_profile_that_cannot_be_written_is_the_error_of_all_ranks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise UserError("cannot write p.json: No space left on device")

    monkeypatch.setattr(profiling, "measure", measure)
    monkeypatch.setattr(profiling, "build_sample_model", lambda *_: None)
    monkeypatch.setattr(profiling, "write_profile", full)
    options = options_of(model, tmp_path / "p.json")

    def rank(transport: Transport) -> None:
        with pytest.raises(AgreedError, match="No space left"):
            profiling.run(options, transport, Blas("none"))

    LocalNetwork(2).run(rank)


def profiled(
    monkeypatch: pytest.MonkeyPatch, directory: Path, config: dict[str, Any], lengths: str
) -> tuple[Path, tuple[Sample, ...], TrainConfig]:
    """Profile a model on one rank; return the file, its samples, and a run that uses it."""
    for name in ("REPEATS", "MEMORY_REPEATS"):
        monkeypatch.setattr(sample_model, name, 1)
    monkeypatch.setattr(sample_model, "WARM_UPS", 0)
    monkeypatch.setattr(profiling, "_chip", lambda: "Mac")
    (directory / "config.json").write_text(json.dumps(config))
    output = directory / "profile.json"
    options = options_of(directory, output, lengths)
    LocalNetwork(1).run(lambda transport: profiling.run(options, transport, Blas("none")))
    (machine,) = read_profile(output).machines
    run = TrainConfig(model=str(directory), num_layers=-1, profile=str(output), pipeline_stages=1)
    return output, machine.samples, run


def test_layers_of_each_kind_are_measured_and_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First a dense layer, then experts."""
    quantised = {"quantization": {"group_size": 32, "bits": 4, "model.layers.2.mlp.gate": False}}
    config = {**CONFIGS["glm4_moe"], "num_hidden_layers": 6, **quantised}
    _, (sample,), run = profiled(monkeypatch, tmp_path, config, "8")
    dense, experts = sample.kinds
    assert dense.trained.forward > 0 < experts.frozen.forward
    # It is the first layer: its W is its whole backward.
    assert (dense.trained.input_gradient, dense.frozen.weight_gradient) == (0, 0)
    assert experts.trained.input_gradient > 0 < experts.trained.weight_gradient
    assert plan_training(run, MACHINES).prediction.step_seconds > 0


def test_a_window_tells_layers_apart_where_texts_are_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a wrapper too: windows of 8 in two of three layers."""
    output, samples, run = profiled(monkeypatch, tmp_path, CONFIGS["gemma3"], "4,9")
    assert [(sample.rows, sample.length) for sample in samples] == [(1, 4), (1, 9)]
    assert {len(sample.kinds) for sample in samples} == {2}
    assert plan_training(run, MACHINES).prediction.step_seconds > 0
    # As a profile was that passed over windows.
    content = json.loads(output.read_text())
    for sample in content["machines"][0]["samples"]:
        sample["others"] = []
    output.write_text(json.dumps(content))
    with pytest.raises(UserError, match="1 kinds of layers, of which gemma3 has 2 at 9 tokens"):
        plan_training(run, MACHINES)


@pytest.mark.parametrize(("flag", "value"), [("--lengths", "0"), ("--rows", "0")])
def test_bad_flags_are_refused(flag: str, value: str) -> None:
    with pytest.raises(UserError, match=f"^{flag} is "):
        LINE.load(["model", flag, value])
