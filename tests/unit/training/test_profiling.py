"""What ``shardmlx.profile`` measures, and how its ranks wait for one another."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten

from shardmlx.common.environment import Blas
from shardmlx.config.profile import LINE, ProfileOptions
from shardmlx.config.specs import FineTune, Savings
from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.messages import TransportTimeout
from shardmlx.distributed.transport import Transport
from shardmlx.errors import UserError
from shardmlx.planning.facts.hostfile import Machine
from shardmlx.planning.facts.profile_file import Sample, read_profile
from shardmlx.planning.memory.measured import MemorySample
from shardmlx.planning.time.parts import Seconds
from shardmlx.training import profiling, sample_model
from shardmlx.training.profiling import ProfileWorker
from testbed.tiny_models import tiny_config
from tests.helpers.fake_models import TINY, model_files, write
from tests.helpers.local_transport import LocalNetwork

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


class Quick(ProfileWorker):
    """A rank that measures nothing, in a given time."""

    seconds = 0.0

    def build(self, *given: Any) -> None:
        pass

    def time_frozen(self, shape: tuple[int, int]) -> None:
        pass

    def unfreeze(self, fine_tune: FineTune) -> None:
        pass

    def measure(self, shape: tuple[int, int]) -> tuple[Sample, list[MemorySample]]:
        if self._transport.rank == 1:
            time.sleep(self.seconds)
        return SAMPLE, []

    def measure_selective(self, shape: tuple[int, int]) -> list[MemorySample]:
        return []


class Slow(Quick):
    """A rank that measures for longer than a message may take."""

    seconds = 2.0


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
    read = profiling._read

    def read_slowly(options: ProfileOptions) -> Any:
        time.sleep(0.8)
        return read(options)

    monkeypatch.setattr(profiling, "ProfileWorker", Quick)
    monkeypatch.setattr(profiling, "_read", read_slowly)
    profile(model, tmp_path / "p.json")
    assert len(read_profile(tmp_path / "p.json").machines) == 2
    monkeypatch.setattr(profiling, "ProfileWorker", Slow)
    with pytest.raises(TransportTimeout, match="waiting for rank 1"):
        profile(model, tmp_path / "p.json")


def test_a_profile_that_cannot_be_written_is_the_error_of_all_ranks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise UserError("cannot write p.json: No space left on device")

    monkeypatch.setattr(profiling, "ProfileWorker", Quick)
    monkeypatch.setattr(profiling, "write_profile", full)
    options = options_of(model, tmp_path / "p.json")

    def rank(transport: Transport) -> None:
        with pytest.raises(AgreedError, match="No space left"):
            profiling.run(options, transport, Blas("none"))

    LocalNetwork(2, timeout=20).run(rank)
