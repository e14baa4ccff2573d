"""Measure how long the parts of a model take on this machine, and their bytes, with random weights.

Neither depends on the weights' values, so only the model's config.json is needed, and only a few of
its layers are built. Ranks that share a machine measure at the same time, as they compute at the
same time in a run.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from shardmlx.common.environment import Blas
from shardmlx.common.reporter import Reporter, check_writable
from shardmlx.config.profile import ProfileOptions
from shardmlx.config.specs import FULL, NONE, SELECTIVE, FineTune
from shardmlx.distributed.crew import Crew, lead
from shardmlx.distributed.transport import Transport
from shardmlx.engine.optimizer import build_optimizer
from shardmlx.engine.stage import Stage
from shardmlx.loading.build import unfreeze
from shardmlx.loading.rank_setup import this_backend, use_device
from shardmlx.modelfiles.model_files import open_model
from shardmlx.planning.facts.profile_file import (
    MachineProfile,
    Profile,
    Sample,
    work_of,
    write_profile,
)
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.memory.measured import MemorySample
from shardmlx.planning.time.parts import Seconds
from shardmlx.training.sample_model import SampleModel, build_sample_model, update_seconds


class ProfileWorker:
    """The part of one rank that measures. Ranks that share a machine measure at the same time, as
    they compute at the same time in a run."""

    def __init__(self, transport: Transport, reporter: Reporter) -> None:
        self._transport = transport
        self._reporter = reporter
        self._model: SampleModel | None = None
        self._stages: list[Stage] = []
        self._updates: list[float] = []
        self._frozen: dict[tuple[int, int], list[Seconds]] = {}

    def build(self, options: ProfileOptions, config: Mapping[str, Any], workload: Workload) -> None:
        """Build a few layers with random weights. Raises ``UserError`` for a missing device."""
        use_device(options.run.source.device, self._reporter.say)
        _, pattern = workload.shape.unlike_layers(max(length for _, length in options.shapes))
        built = build_sample_model(dict(config), workload.dtype)
        savings = workload.savings(this_backend())
        self._model = SampleModel(built, pattern, workload.shape.pattern, savings)

    def time_frozen(self, shape: tuple[int, int]) -> None:
        """Time layers without trained weights, for (rows, tokens a row)."""
        model = self._built
        stages = model.stages(model.runs, is_trained=False)
        self._frozen[shape] = [model.times(stage, *shape) for stage in stages]

    def unfreeze(self, fine_tune: FineTune) -> None:
        """Train all layers from now on, and time their updates."""
        model = self._built
        unfreeze(model.model, replace(fine_tune, num_layers=-1))
        count = len(model.pattern)
        self._stages = model.stages([(0, 1), *model.runs, (count - 1, count)])
        self._updates = [
            update_seconds(stage, build_optimizer(fine_tune)) for stage in self._stages
        ]

    def measure(self, shape: tuple[int, int]) -> tuple[Sample, list[MemorySample]]:
        """Time layers that train, and measure the bytes of those that recompute nothing or all."""
        model = self._built
        times = [
            replace(model.times(stage, *shape), update=update)
            for stage, update in zip(self._stages, self._updates, strict=True)
        ]
        sample = model.sample(*shape, self._frozen[shape], times)
        memory = [each for how in (NONE, FULL) for each in model.memory(*shape, how)]
        return sample, memory

    def measure_selective(self, shape: tuple[int, int]) -> list[MemorySample]:
        """Measure the bytes of layers that recompute selectively, as they do from then on."""
        return list(self._built.memory(*shape, SELECTIVE))

    def machine(self) -> tuple[str, str]:
        """Return the names of this rank's host and chip."""
        return self._transport.hosts[self._transport.rank], _chip()

    @property
    def _built(self) -> SampleModel:
        assert self._model is not None, "it was built"
        return self._model


def run(options: ProfileOptions, transport: Transport, blas: Blas) -> None:
    """Measure on every rank; rank 0 writes the profile. On all ranks; raises as ``lead``."""
    reporter = Reporter(quiet=transport.rank != 0)
    worker = ProfileWorker(transport, reporter)
    lead(transport, worker, partial(profile, options, reporter, blas))


def profile(
    options: ProfileOptions, reporter: Reporter, blas: Blas, crew: Crew[ProfileWorker]
) -> None:
    """Let all ranks measure, and write the profile. On rank 0. Raises ``UserError``."""
    fine_tune = options.run.tune
    shapes = options.shapes
    model_config, workload = _read(options)
    reporter.say(str(blas))
    crew.all(ProfileWorker.build, options, model_config, workload)
    samples: list[list[Sample]] = []
    memory: list[list[list[MemorySample]]] = []
    with reporter.bar("measuring", 2 * len(shapes)) as bar:
        for shape in shapes:
            crew.all(ProfileWorker.time_frozen, shape)
        crew.all(ProfileWorker.unfreeze, fine_tune)
        for shape in shapes:
            of_ranks = crew.all(ProfileWorker.measure, shape)
            samples.append([sample for sample, _ in of_ranks])
            memory.append([measured for _, measured in of_ranks])
            bar.advance()
        # Last: layers that recompute selectively do so from then on.
        for shape in shapes:
            memory.append(crew.all(ProfileWorker.measure_selective, shape))
            bar.advance()
    machines = []
    for rank, (host, chip) in enumerate(crew.all(ProfileWorker.machine)):
        own = tuple(of_ranks[rank] for of_ranks in samples)
        held = tuple(each for of_ranks in memory for each in of_ranks[rank])
        machines.append(MachineProfile(host, chip, own, held))
    _show(reporter, machines)
    output = Path(options.output)
    write_profile(Profile(work_of(workload), tuple(machines)), output)
    reporter.say(f"Wrote {output}")


def _read(options: ProfileOptions) -> tuple[dict[str, Any], Workload]:
    check_writable(Path(options.output), "--output")
    files = open_model(options.run.source.model, options.run.source.revision)
    fine_tune = options.run.tune
    build_optimizer(fine_tune)  # refuses its settings before anything is measured
    return dict(files.config), Workload.of(
        files, fine_tune, options.run.batch, options.run.spec.saves
    )


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
