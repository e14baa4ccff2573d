"""Measure how long the parts of a model take on this machine, and their bytes, with random weights.

Neither depends on the weights' values, so only the model's config.json is needed, and only a few of
its layers are built. Ranks that share a machine measure at the same time, as they compute at the
same time in a run.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from shardmlx.common.environment import Blas
from shardmlx.common.reporter import Reporter, check_writable
from shardmlx.config.profile import ProfileOptions
from shardmlx.config.specs import FULL, NONE, SELECTIVE, BatchOptions, FineTune
from shardmlx.costmodel.measured_memory import MemorySample
from shardmlx.costmodel.profile_file import MachineProfile, Profile, Sample, work_of, write_profile
from shardmlx.costmodel.timing import Seconds
from shardmlx.costmodel.workload import Workload
from shardmlx.distributed.agreement import from_rank_0, on_all_ranks, on_rank_0
from shardmlx.distributed.transport import Transport
from shardmlx.engine.optimizer import build_optimizer
from shardmlx.loading.build import unfreeze
from shardmlx.loading.rank_setup import SETUP_SECONDS, this_backend, use_device
from shardmlx.modelfiles.model_files import open_model
from shardmlx.training.sample_model import SampleModel, build_sample_model, update_seconds


def measure(
    model: SampleModel,
    fine_tune: FineTune,
    shapes: Sequence[tuple[int, int]],
    transport: Transport,
    advance: Callable[[], None],
) -> tuple[list[Sample], list[MemorySample]]:
    """Measure each (rows, tokens a row), with two calls of ``advance``. Collective."""
    frozen = []
    for shape in shapes:
        transport.barrier("measuring")
        stages = model.stages(model.runs, is_trained=False)
        frozen.append([model.times(stage, *shape) for stage in stages])
    unfreeze(model.model, replace(fine_tune, num_layers=-1))
    count = len(model.pattern)
    stages = model.stages([(0, 1), *model.runs, (count - 1, count)])
    updates = [update_seconds(stage, build_optimizer(fine_tune)) for stage in stages]
    samples, memory = [], []
    for shape, of_frozen in zip(shapes, frozen, strict=True):
        transport.barrier("measuring")
        times = [
            replace(model.times(stage, *shape), update=update)
            for stage, update in zip(stages, updates, strict=True)
        ]
        samples.append(model.sample(*shape, of_frozen, times))
        for recompute in (NONE, FULL):
            memory += model.memory(*shape, recompute)
        advance()
    for shape in shapes:
        # Layers that recompute selectively do so from then on.
        transport.barrier("measuring")
        memory += model.memory(*shape, SELECTIVE)
        advance()
    return samples, memory


def run(options: ProfileOptions, transport: Transport, blas: Blas) -> None:
    """Measure on every rank; rank 0 writes the profile. Collective; raises ``AgreedError``."""
    fine_tune, shapes, output = FineTune.of(options), options.shapes, Path(options.output)
    reporter = Reporter(quiet=transport.rank != 0)
    with transport.longer_timeout(SETUP_SECONDS):
        model_config, workload = from_rank_0(transport, "reading the model", lambda: _read(options))
    reporter.say(str(blas))
    device = partial(use_device, options.device, reporter.say)
    on_all_ranks(transport, "choosing the device", device)
    shape = workload.shape
    _, pattern = shape.unlike_layers(max(length for _, length in shapes))
    built = build_sample_model(model_config, workload.dtype)
    savings = workload.savings(this_backend())
    model = SampleModel(built, pattern, shape.pattern, savings)
    with reporter.bar("measuring", 2 * len(shapes)) as bar:
        samples, memory = measure(model, fine_tune, shapes, transport, bar.advance)
    host = transport.hosts[transport.rank]
    mine = MachineProfile(host, _chip(), tuple(samples), tuple(memory))
    machines = transport.gather(mine, what="measurements") or ()  # empty on other ranks
    _show(reporter, machines)
    profile = Profile(work_of(workload), tuple(machines))
    on_rank_0(transport, "writing the profile", lambda: write_profile(profile, output))
    reporter.say(f"Wrote {output}")


def _read(options: ProfileOptions) -> tuple[dict[str, Any], Workload]:
    check_writable(Path(options.output), "--output")
    files, fine_tune = open_model(options.model, options.revision), FineTune.of(options)
    build_optimizer(fine_tune)  # refuses its settings before anything is measured
    return dict(files.config), Workload.of(files, fine_tune, BatchOptions.of(options))


def _chip() -> str:
    name = mx.device_info().get("device_name")
    return str(name) if name else platform.processor() or platform.machine()


def _show(reporter: Reporter, machines: Sequence[MachineProfile]) -> None:
    reporter.table(
        ("rank", "host", "micro-batch", "layer F", "I", "W", "embedding", "head F", "I", "W"),
        [
            (
                str(rank),
                machine.host,
                f"{each.rows} x {each.length}",
                *_milliseconds(each.layer),
                _milliseconds(each.embedding)[0],
                *_milliseconds(each.head),
            )
            for rank, machine in enumerate(machines)
            for each in machine.samples
        ],
    )


def _milliseconds(seconds: Seconds) -> list[str]:
    passes = (seconds.forward, seconds.input_gradient, seconds.weight_gradient)
    return [f"{1e3 * each:.2f} ms" for each in passes]
