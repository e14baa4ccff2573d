"""Measure how long the parts of a model take on this machine, with random weights.

The times do not depend on the weights' values, so only the model's config.json is needed, and only
a few of its layers are built. Ranks that share a machine measure at the same time, as they compute
at the same time in a run.
"""

from __future__ import annotations

import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten

from shardmlx.common.environment import Blas
from shardmlx.common.reporter import Reporter, check_writable
from shardmlx.config.profile import ProfileOptions
from shardmlx.config.specs import NO_SAVINGS, NONE, BatchOptions, FineTune, Savings
from shardmlx.costmodel.profile_file import MachineProfile, Profile, work_of, write_profile
from shardmlx.costmodel.timing import LayerTimes, Sample, Seconds
from shardmlx.costmodel.workload import Workload
from shardmlx.distributed.agreement import on_rank_0
from shardmlx.distributed.transport import Transport
from shardmlx.engine.batches import MicroBatch
from shardmlx.engine.gathered_stage import build_stages
from shardmlx.engine.optimizer import Updater
from shardmlx.engine.stage import Stage
from shardmlx.loading.build import build_random, cut, unfreeze
from shardmlx.loading.rank_setup import SETUP_SECONDS, this_backend
from shardmlx.modelfiles.model_files import open_model
from shardmlx.models.parts import find_parts
from shardmlx.models.shape import ModelShape
from shardmlx.models.tensors import read_quantisation
from shardmlx.training.planned_run import optimizer_of

LAYER_BYTES = 500_000_000
"""Size up to which layers are measured together: more than caches hold, little for a machine."""

MAX_LAYERS = 16
"""Limit of layers that are measured together."""

MAX_ALIKE = 4
"""Limit of layers of a kind that are measured together, if not all are alike."""

REPEATS = 5
"""Number of measurements, whose median counts."""

WARM_UPS = 2
"""Runs before the measurements: the first allocate memory and compile kernels."""

_LAYER = re.compile(r"\blayers\.\d+\.")


@dataclass(slots=True)
class _Laps:
    """Stop watch: seconds of the work under ``lap``, by name."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)

    def median(self, name: str) -> float:
        """Return the median without the warm-up; 0 if it never ran."""
        return statistics.median(self.seconds.get(name, [])[WARM_UPS:] or [0.0])


def measure(
    model_config: Mapping[str, Any],
    dtype: str,
    fine_tune: FineTune,
    shapes: Sequence[tuple[int, int]],
    transport: Transport,
    advance: Callable[[], None],
    savings: Savings = NO_SAVINGS,
    pattern: Sequence[int] = (),
) -> list[Sample]:
    """Measure a sample for each (rows, tokens a row); call ``advance`` after each. Collective.

    ``pattern`` has the kind of each layer of a model that must be built as it is; other models get
    a few equal layers.
    """
    if pattern:
        model = _build(model_config, None, dtype)
        unlike = _Unlike(model, pattern, savings)
        return [
            unlike.sample(rows, length, seconds)
            for (rows, length), seconds in zip(
                shapes,
                unlike.measure(fine_tune, shapes, transport, advance),
                strict=True,
            )
        ]
    model = build_sample_model(model_config, dtype)
    frozen = []
    for rows, length in shapes:
        transport.barrier("measuring")
        _, middle, _ = _stages(model, savings)
        frozen.append(_times(middle, rows, length, model.args.vocab_size))
    unfreeze(model, replace(fine_tune, num_layers=-1))
    mx.eval(model.parameters())
    updates = [_update(stage, optimizer_of(fine_tune)) for stage in _stages(model, savings)]
    between = len(model.layers) - 2
    samples = []
    for (rows, length), of_frozen in zip(shapes, frozen, strict=True):
        times = []
        for stage, update in zip(_stages(model, savings), updates, strict=True):
            transport.barrier("measuring")
            seconds = _times(stage, rows, length, model.args.vocab_size)
            times.append(replace(seconds, update=update))
        first, middle_seconds, last = times
        layer = middle_seconds.scaled(1 / between)
        # The first stage has no I: its W is its whole backward.
        whole = Seconds(layer.forward, 0.0, layer.input_gradient + layer.weight_gradient)
        samples.append(
            Sample(
                rows=rows,
                length=length,
                layer=layer,
                frozen=of_frozen.scaled(1 / between),
                embedding=first + replace(whole, update=layer.update).scaled(-1),
                head=last + layer.scaled(-1),
            )
        )
        advance()
    return samples


def build_sample_model(model_config: Mapping[str, Any], dtype: str) -> nn.Module:
    """Build a frozen model of a few layers like those of ``model_config``, with random weights.

    The first and the last layer count with the ends; those between are measured as layers. All are
    quantised like the middle layer: recipes that mix widths give the outermost more bits.
    """
    one = _build(model_config, 1, dtype)
    nbytes = sum(array.nbytes for _, array in tree_flatten(one.layers[0].parameters()))
    between = max(1, min(MAX_LAYERS, LAYER_BYTES // nbytes))
    model = _build(model_config, between + 2, dtype)
    model.freeze()
    mx.eval(model.parameters())
    return model


def _build(model_config: Mapping[str, Any], num_layers: int | None, dtype: str) -> nn.Module:
    """Build mlx-lm's model with so many layers, or as it is, lazily, without computing anything."""
    plain = {k: v for k, v in model_config.items() if not k.startswith("quantization")}
    if num_layers is not None:
        plain["num_hidden_layers"] = num_layers
    if num_layers is not None and plain.get("layer_types") is not None:
        plain["layer_types"] = ["full_attention"] * num_layers  # with full attention in all layers
    model = build_random(plain)
    model.eval()
    model.set_dtype(getattr(mx, dtype))
    _quantise(model, model_config, as_it_is=num_layers is None)
    return model


def _quantise(model: nn.Module, model_config: Mapping[str, Any], *, as_it_is: bool) -> None:
    """Quantise as ``model_config`` says, or all layers like the middle one."""
    quantisation = read_quantisation(model_config)
    if quantisation is None:
        return

    def how(path: str, module: nn.Module) -> dict[str, Any] | bool:
        if not as_it_is:
            path = _LAYER.sub(f"layers.{model_config['num_hidden_layers'] // 2}.", path)
        own = quantisation.of(path)
        if own is None or not hasattr(module, "to_quantized"):
            return False
        # Weights that do not divide into groups stay unquantised, as in mlx-lm's convert.
        return False if module.weight.shape[-1] % own.group_size else asdict(own)

    nn.quantize(model, class_predicate=how)


def _stages(model: nn.Module, savings: Savings) -> list[Stage]:
    """Build three stages: first layer with embedding, the middle, last layer with lm_head."""
    count = len(model.layers)
    ranges = ((0, 1), (1, count - 1), (count - 1, count))
    return build_stages(cut(model, ranges), savings=savings)


class _Unlike:
    """Stages of a model with unlike layers: the first layer, the last one, and some of each kind
    between. The model is built as it is, but only these are computed."""

    def __init__(self, model: nn.Module, pattern: Sequence[int], savings: Savings) -> None:
        self._model, self._pattern, self._savings = model, pattern, savings
        count = len(pattern)
        self._runs = [self._run_of(kind) for kind in range(max(pattern) + 1)]
        self._ranges = [(0, 1), *self._runs, (count - 1, count)]
        model.freeze()

    def _run_of(self, kind: int) -> tuple[int, int]:
        """Return layers of a kind, one after the other, without the model's first and last if there
        are others: these count with the ends."""
        inner = range(1, len(self._pattern) - 1)
        start = next((i for i in inner if self._pattern[i] == kind), self._pattern.index(kind))
        layer = find_parts(self._model).layers[start]
        nbytes = sum(array.nbytes for _, array in tree_flatten(layer.parameters()))
        most = max(1, min(MAX_ALIKE, LAYER_BYTES // nbytes))
        stop = start + 1
        while start and stop in inner and stop < start + most and self._pattern[stop] == kind:
            stop += 1
        return start, stop

    def _stages(self, *, is_trained: bool) -> list[Stage]:
        parts = cut(self._model, self._ranges)
        return [
            Stage(
                index,
                part,
                needs_input_gradient=is_trained and not part.is_first,
                savings=self._savings,
            )
            for index, part in enumerate(parts)
        ]

    def measure(
        self,
        fine_tune: FineTune,
        shapes: Sequence[tuple[int, int]],
        transport: Transport,
        advance: Callable[[], None],
    ) -> list[tuple[list[Seconds], list[Seconds]]]:
        """Return for each shape the times of all stages, frozen and trained. Collective."""
        vocabulary = find_parts(self._model).vocabulary
        frozen = []
        for rows, length in shapes:
            transport.barrier("measuring")
            stages = self._stages(is_trained=False)
            frozen.append([_times(stage, rows, length, vocabulary) for stage in stages])
        unfreeze(self._model, replace(fine_tune, num_layers=-1))
        stages = self._stages(is_trained=True)
        updates = [_update(stage, optimizer_of(fine_tune)) for stage in stages]
        trained = []
        for rows, length in shapes:
            transport.barrier("measuring")
            times = [_times(stage, rows, length, vocabulary) for stage in stages]
            pairs = zip(times, updates, strict=True)
            trained.append([replace(each, update=update) for each, update in pairs])
            advance()
        return list(zip(frozen, trained, strict=True))

    def sample(
        self, rows: int, length: int, seconds: tuple[list[Seconds], list[Seconds]]
    ) -> Sample:
        """Return the sample of the times of all stages, frozen and trained."""
        kinds = []
        for (start, stop), frozen, trained in zip(
            self._runs, *(each[1:-1] for each in seconds), strict=True
        ):
            share = 1 / (stop - start)
            kinds.append(LayerTimes(trained.scaled(share), frozen.scaled(share)))
        first, last = seconds[1][0], seconds[1][-1]
        of_first, of_last = (kinds[self._pattern[i]].trained for i in (0, -1))
        # The first stage has no I: its W is its whole backward.
        backward = of_first.input_gradient + of_first.weight_gradient
        whole = Seconds(of_first.forward, 0.0, backward, of_first.update)
        return Sample(
            rows=rows,
            length=length,
            layer=kinds[0].trained,
            frozen=kinds[0].frozen,
            embedding=first + whole.scaled(-1),
            head=last + of_last.scaled(-1),
            others=tuple(kinds[1:]),
        )


def _times(stage: Stage, rows: int, length: int, vocabulary: int) -> Seconds:
    """Measure one micro-batch through a stage: seconds of F, I and W."""
    random = np.random.RandomState(0)
    tokens = random.randint(0, vocabulary, (rows, length + 1)).astype(np.int32)
    microbatch = MicroBatch(tokens, np.array([[0, length]] * rows, np.int32), 0)
    part = stage.part
    x = None
    if not part.is_first:
        x = mx.random.normal((rows, length, part.hidden_size)).astype(part.dtype)
        mx.eval(x)
    laps = _Laps()
    for j in range(WARM_UPS + REPEATS):
        with laps.lap("F"):
            stage.forward(j, microbatch, x, scale=1 / (rows * length))
        if not stage.is_trained:
            continue
        if not part.is_last:
            stage.fill_cotangent(j, mx.ones_like(stage.cotangent(j)))
        if stage.needs_input_gradient:
            with laps.lap("I"):
                stage.backward_input(j)
        with laps.lap("W"):
            stage.backward_weight(j)
    stage.gradients.clear()
    return Seconds(*map(laps.median, "FIW"))


def _update(stage: Stage, optimizer: Optimizer) -> float:
    """Measure the seconds of an optimizer update of a stage's trained weights."""
    updater = Updater(optimizer, [stage])
    laps = _Laps()
    for _ in range(WARM_UPS + REPEATS):
        for name in stage.names:
            # Transposed, like the backward pass leaves them.
            stage.gradients[name] = mx.random.normal(stage.part[name].shape[::-1]).T
        mx.eval(stage.gradients)
        with laps.lap("update"):
            updater.apply(0.5)
    return laps.median("update")


def run(options: ProfileOptions, transport: Transport, blas: Blas) -> None:
    """Measure the micro-batches of ``options`` on every rank; rank 0 writes the profile.

    All ranks must call it. Raises ``AgreedError``.
    """
    fine_tune, shapes, output = FineTune.of(options), options.shapes, Path(options.output)
    reporter = Reporter(quiet=transport.rank != 0)
    with transport.longer_timeout(SETUP_SECONDS):
        read = on_rank_0(transport, "reading the model", lambda: _read(options))
    model_config, workload = transport.broadcast(read, what="model")
    reporter.say(str(blas))
    with reporter.bar("measuring", len(shapes)) as bar:
        samples = measure(
            model_config,
            workload.dtype,
            fine_tune,
            shapes,
            transport,
            bar.advance,
            workload.savings(NONE, this_backend()),
            _pattern_of(workload.shape, max(length for _, length in shapes)),
        )
    mine = MachineProfile(transport.hosts[transport.rank], _chip(), tuple(samples))
    machines = transport.gather(mine, what="measurements") or ()  # empty on other ranks
    _show(reporter, machines)
    work = work_of(fine_tune, workload.shape, workload.dtype, model_config.get("quantization"))
    profile = Profile(work, tuple(machines))
    on_rank_0(transport, "writing the profile", lambda: write_profile(profile, output))
    reporter.say(f"Wrote {output}")


def _read(options: ProfileOptions) -> tuple[dict[str, Any], Workload]:
    check_writable(Path(options.output), "--output")
    files = open_model(options.model, options.revision)
    return dict(files.config), Workload.of(files, FineTune.of(options), BatchOptions.of(options))


def _pattern_of(shape: ModelShape, longest: int) -> tuple[int, ...]:
    """Return the kind of each layer for a model that is measured as it is: windows depend on a
    layer's place, and wrappers count layers inside."""
    _, pattern = shape.unlike_layers(longest)
    is_wrapped = not shape.is_declared or shape.outer_family.prefix != ""
    return pattern if is_wrapped or max(pattern) or any(shape.windows) else ()


def _chip() -> str:
    """Return the name of this machine's chip."""
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
                f"{1e3 * each.embedding.forward:.2f} ms",
                *_milliseconds(each.head),
            )
            for rank, machine in enumerate(machines)
            for each in machine.samples
        ],
    )


def _milliseconds(seconds: Seconds) -> tuple[str, str, str]:
    passes = (seconds.forward, seconds.input_gradient, seconds.weight_gradient)
    forward, input_gradient, weight_gradient = (f"{1e3 * each:.2f} ms" for each in passes)
    return forward, input_gradient, weight_gradient
