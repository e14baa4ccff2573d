"""What ``shardmlx.profile`` measures, and how its ranks wait for one another."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten

from shardmlx.common.environment import Blas
from shardmlx.config.profile import LINE, ProfileOptions
from shardmlx.config.train import TrainConfig
from shardmlx.costmodel.hostfile import Machine
from shardmlx.costmodel.measured_memory import MemorySample
from shardmlx.costmodel.profile_file import read_profile
from shardmlx.costmodel.timing import Sample, Seconds
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


def bits(**quantization: Any) -> dict[str, int]:
    """Bits of each quantised matrix of the sample model, by path; ends and the layers between."""
    config = tiny_config(
        layers=8, hidden_size=64, intermediate_size=96, quantization=dict(quantization)
    )
    model = sample_model.build_sample_model(config, "float32")
    return {
        path: module.bits
        for path, module in tree_flatten(model.leaf_modules(), is_leaf=lambda m: "weight" in m)
        if "scales" in module
    }


def test_settings_of_single_modules_are_followed() -> None:
    found = bits(
        group_size=64,
        bits=4,
        lm_head={"bits": 8, "group_size": 32},
        **{
            "model.embed_tokens": False,
            "model.layers.0.self_attn.v_proj": {"bits": 8},
            "model.layers.4.self_attn.q_proj": {"bits": 6},
        },
    )
    last = max(int(path.split(".")[2]) for path in found if path.startswith("model.layers."))
    assert found["lm_head"] == 8
    assert "model.embed_tokens" not in found
    for layer in (0, 1, last):
        assert found[f"model.layers.{layer}.self_attn.q_proj"] == 6  # as in the middle of eight
        assert found[f"model.layers.{layer}.self_attn.v_proj"] == 4


def test_what_is_not_said_is_mlx_s_default_and_what_cannot_be_grouped_stays() -> None:
    found = bits(bits=4)
    assert found["model.layers.1.mlp.up_proj"] == 4
    assert "model.layers.1.mlp.down_proj" not in found  # 96 columns in groups of 64
    assert set(bits(mode="mxfp8").values()) == {8}


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


def options_of(model: Path, output: Path) -> ProfileOptions:
    words = [str(model), "--num-layers", "-1", "--rows", "1", "--lengths", "8", "-o", str(output)]
    return LINE.load(words)


def profile(model: Path, output: Path) -> None:
    options = options_of(model, output)
    LocalNetwork(2, timeout=0.3).run(
        lambda transport: profiling.run(options, transport, Blas("none", None))
    )


def test_reading_may_take_long_and_measuring_may_not(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "measure", measure)
    monkeypatch.setattr(sample_model.SampleModel, "of", lambda *_: None)
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
    monkeypatch.setattr(sample_model.SampleModel, "of", lambda *_: None)
    monkeypatch.setattr(profiling, "write_profile", full)
    options = options_of(model, tmp_path / "p.json")

    def rank(transport: Transport) -> None:
        with pytest.raises(AgreedError, match="No space left"):
            profiling.run(options, transport, Blas("none", None))

    LocalNetwork(2).run(rank)


@pytest.mark.parametrize("rank", [0, 1])
def test_help_ends_every_rank_and_is_printed_by_rank_0(
    rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        LINE.load(["--help"], rank)
    assert ended.value.code == 0
    assert ("usage: shardmlx profile" in capsys.readouterr().out) == (rank == 0)


def test_layers_of_each_kind_are_measured_and_planned_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First a dense layer, then experts."""
    monkeypatch.setattr(sample_model, "REPEATS", 1)
    monkeypatch.setattr(sample_model, "MEMORY_REPEATS", 1)
    quantised = {"quantization": {"group_size": 32, "bits": 4, "model.layers.2.mlp.gate": False}}
    config = {**CONFIGS["glm4_moe"], "num_hidden_layers": 6, **quantised}
    (tmp_path / "config.json").write_text(json.dumps(config))
    output = tmp_path / "profile.json"
    words = [str(tmp_path), "--num-layers", "-1", "--rows", "1", "--lengths", "8"]
    options = LINE.load([*words, "-o", str(output)])
    LocalNetwork(1).run(lambda transport: profiling.run(options, transport, Blas("none", None)))
    (machine,) = read_profile(output).machines
    (sample,) = machine.samples
    dense, experts = sample.kinds
    assert dense.trained.forward > 0 < experts.frozen.forward
    # It is the first layer: its W is its whole backward.
    assert (dense.trained.input_gradient, dense.frozen.weight_gradient) == (0, 0)
    assert experts.trained.input_gradient > 0 < experts.trained.weight_gradient
    run = TrainConfig(model=str(tmp_path), num_layers=-1, profile=str(output), pipeline_stages=1)
    plan = plan_training(run, [Machine(host="mac", kind=machine.chip, memory=2**34)])
    assert plan.prediction.step_seconds > 0


def test_a_window_tells_layers_apart_where_texts_are_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a wrapper too: windows of 8 in two of three layers."""
    monkeypatch.setattr(sample_model, "WARM_UPS", 0)
    monkeypatch.setattr(sample_model, "REPEATS", 1)
    monkeypatch.setattr(sample_model, "MEMORY_REPEATS", 1)
    monkeypatch.setattr(profiling, "_chip", lambda: "Mac")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["gemma3"]))
    output = tmp_path / "profile.json"
    words = [str(tmp_path), "--num-layers", "-1", "--rows", "1", "--lengths", "4,9"]
    options = LINE.load([*words, "-o", str(output)])
    LocalNetwork(1).run(lambda transport: profiling.run(options, transport, Blas("none", None)))
    (measured,) = read_profile(output).machines
    assert {len(sample.kinds) for sample in measured.samples} == {2}
    run = TrainConfig(model=str(tmp_path), num_layers=-1, profile=str(output), pipeline_stages=1)
    machines = [Machine(host="mac", kind="Mac", memory=2**34)]
    assert plan_training(run, machines).prediction.step_seconds > 0
    # As a profile was that passed over windows.
    content = json.loads(output.read_text())
    for sample in content["machines"][0]["samples"]:
        sample["others"] = []
    output.write_text(json.dumps(content))
    with pytest.raises(UserError, match="1 kinds of layers, of which gemma3 has 2 at 9 tokens"):
        plan_training(run, machines)
