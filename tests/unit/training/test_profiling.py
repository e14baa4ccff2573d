"""What ``shardmlx.profile`` measures and writes, and how long its ranks wait for one another."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten

from shardmlx.common.environment import Blas
from shardmlx.common.reporter import Reporter
from shardmlx.config.profile import LINE
from shardmlx.config.specs import FineTune, Savings
from shardmlx.distributed.agreement import AgreedError
from shardmlx.distributed.crew import lead
from shardmlx.distributed.transport import Transport
from shardmlx.planning.facts.profile_file import Sample, read_profile
from shardmlx.planning.memory.measured import MemorySample
from shardmlx.planning.time.parts import Seconds
from shardmlx.training import sample_model
from shardmlx.training.profiling import ProfileWorker, profile
from testbed.tiny_models import tiny_config
from tests.helpers.commands import commands
from tests.helpers.fake_models import TINY, model_files, write
from tests.helpers.local_transport import alone

PART = Seconds(1.0, 1.0, 1.0, 0.1)
SAMPLE = Sample(rows=1, length=8, layer=PART, frozen=PART, embedding=PART, head=PART)
QUIET = Reporter(quiet=True)


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
        "96 columns are not groups of 64"
    )
    sample = sample_model.SampleModel(model, (0,) * 8, (0,) * 8, Savings())
    assert sample.runs == [(3, 7)]
    assert replace(sample, pattern=(0, 1, 1, 1, 1, 1, 1, 2)).runs == [(0, 1), (3, 7), (7, 8)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", model_files(TINY))


class Quick(ProfileWorker):
    """A rank that measures nothing. It ends with ``output`` in the place of a file."""

    output: Path | None = None

    def build(self, *given: Any) -> None:
        pass

    def time_frozen(self, shape: tuple[int, int]) -> None:
        pass

    def unfreeze(self, fine_tune: FineTune) -> None:
        pass

    def measure(self, shape: tuple[int, int]) -> tuple[Sample, list[MemorySample]]:
        return SAMPLE, []

    def measure_selective(self, shape: tuple[int, int]) -> list[MemorySample]:
        if self.output is not None:
            self.output.mkdir()
        return []


def test_measuring_may_take_no_longer_than_a_message() -> None:
    """What rank 0 reads before the first command may, as before any command."""
    own = [method for name, method in commands().items() if name.startswith("ProfileWorker.")]
    assert len(own) == 6
    assert not [method for method in own if hasattr(method, "takes_long")]


def test_a_profile_that_cannot_be_written_is_the_error_of_all_ranks(
    model: Path, tmp_path: Path
) -> None:
    output = tmp_path / "p.json"
    words = [str(model), "--num-layers", "-1", "--rows", "1", "--lengths", "8", "-o", str(output)]
    options = LINE.load(words)

    def profiled(output_becomes: Path | None) -> None:
        def rank(transport: Transport) -> None:
            worker = Quick(transport, QUIET)
            worker.output = output_becomes
            lead(transport, worker, partial(profile, options, QUIET, Blas("none")))

        alone(rank)

    profiled(None)
    assert len(read_profile(output).machines) == 1
    output.unlink()
    with pytest.raises(AgreedError, match=f"cannot write {output}: Is a directory"):
        profiled(output)
