"""A few layers of a model with random weights, measured as stages: their seconds and bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten

from shardmlx.compat import begin_evaluation
from shardmlx.config.specs import NONE, Savings
from shardmlx.engine.batches import MicroBatch
from shardmlx.engine.optimizer import Updater
from shardmlx.engine.stage import Stage
from shardmlx.loading.build import cut
from shardmlx.modelfiles.tensors import read_quantisation
from shardmlx.models.runtime.parts import find_parts
from shardmlx.models.sizes.undeclared import build_random
from shardmlx.planning.facts.profile_file import LayerTimes, Sample
from shardmlx.planning.memory.measured import LEAST_LAYERS, MemorySample, StageBytes, sample_ranges
from shardmlx.planning.time.parts import Seconds

LAYER_BYTES = 500_000_000
"""Size up to which layers are measured together: more than caches hold, little for a machine."""

MAX_LAYERS = 16
"""Limit of layers of a kind that are measured together."""

REPEATS = 5
"""Number of measurements, whose median counts."""

MEMORY_REPEATS = 12
"""Number of measurements of bytes, whose maximum counts: MLX schedules less far ahead at times."""

MOST_BEGUN = 4
"""Arrays that are under way, at most, as a measurement of bytes begins. Their number decides in
which order MLX makes and frees the arrays of a layer, whose bytes differ by a fifth: measurements
with one number all see the same order, and a run may have another."""

WARM_UPS = 2
"""Runs before the measurements: the first allocate memory and compile kernels."""


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


@dataclass(slots=True)
class _Peaks:
    """The bytes that work under ``lap`` adds, at most and to its end; without first laps."""

    passing: dict[str, list[int]] = field(default_factory=dict)
    kept: dict[str, list[int]] = field(default_factory=dict)

    @contextmanager
    def lap(self, name: str) -> Iterator[None]:
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        # Other work lets the scheduling thread get as far ahead as in a run; it takes no memory.
        count = len(self.passing.get(name, ())) % (MOST_BEGUN + 1)
        ones = mx.broadcast_to(mx.array(1.0), (3000, 1000))
        begin_evaluation([ones.sum() for _ in range(count)])
        yield
        mx.synchronize()
        self.passing.setdefault(name, []).append(mx.get_peak_memory() - before)
        self.kept.setdefault(name, []).append(mx.get_active_memory() - before)

    def stage(self, message: int) -> StageBytes:
        """Return the stage's bytes. A run frees its input, of ``message`` bytes, with I."""
        kept, passing = (
            {name: max(laps[1:]) for name, laps in found.items()}
            for found in (self.kept, self.passing)
        )
        if "I" not in kept:
            return StageBytes(
                message + kept["F"], 0, passing["F"] - kept["F"], max(0, passing["W"])
            )
        # Arrays that I leaves behind do not pass.
        left = max(0, kept["I"] - message)
        return StageBytes(
            after_forward=message + kept["F"],
            after_input=max(0, kept["F"] + kept["I"]),
            during_forward=passing["F"] - kept["F"],
            during_backward=passing["I"] - left,
        )


@dataclass(frozen=True)
class SampleModel:
    """A lazily built model whose layers are measured as stages: the first, the last, some of each
    kind between, by ``pattern`` as to times and by ``memory_pattern`` as to bytes."""

    model: nn.Module
    pattern: Sequence[int]
    memory_pattern: Sequence[int]
    savings: Savings
    memory_repeats: int = MEMORY_REPEATS

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Layers of each kind, one after the other; the model's first and last only if alone."""
        return [self._run_of(kind) for kind in range(max(self.pattern) + 1)]

    def _run_of(self, kind: int) -> tuple[int, int]:
        # Recipes that mix widths quantise the outermost layers with more bits.
        count = len(self.pattern)
        from_the_middle = sorted(range(count), key=lambda i: abs(2 * i + 1 - count))
        start = stop = next(i for i in from_the_middle if self.pattern[i] == kind)
        layer = find_parts(self.model).layers[start]
        nbytes = sum(array.nbytes for _, array in tree_flatten(layer.parameters()))
        inner = range(1, count - 1)
        most = max(1, min(MAX_LAYERS, LAYER_BYTES // nbytes))
        while stop in inner and stop < start + most and self.pattern[stop] == kind:
            stop += 1
        return start, max(stop, start + 1)

    def stages(
        self, ranges: Sequence[tuple[int, int]], *, is_trained: bool = True, recompute: str = NONE
    ) -> list[Stage]:
        """Build stages of these layers: all but the model's first have an I, if they train."""
        savings = replace(self.savings, recompute=recompute)
        return [
            Stage(
                index, part, needs_input_gradient=is_trained and not part.is_first, savings=savings
            )
            for index, part in enumerate(cut(self.model, ranges))
        ]

    def times(self, stage: Stage, rows: int, length: int) -> Seconds:
        """Measure one micro-batch through a stage: seconds of F, I and W."""
        laps = _Laps()
        self._run(stage, rows, length, WARM_UPS + REPEATS, laps.lap)
        return Seconds(*map(laps.median, "FIW"))

    def memory(self, rows: int, length: int, recompute: str) -> list[MemorySample]:
        """Measure the bytes of a micro-batch in stages; none of models that have too few."""
        if len(self.pattern) < LEAST_LAYERS:
            return []
        found = []
        for stage in self.stages(sample_ranges(self.memory_pattern), recompute=recompute):
            peaks = _Peaks()
            message = self._run(stage, rows, length, 1 + self.memory_repeats, peaks.lap)
            found.append(peaks.stage(message))
        first, last, *kinds = found
        savings = replace(self.savings, recompute=recompute)
        sample = MemorySample(
            rows=rows, length=length, savings=savings, first=first, last=last, kinds=tuple(kinds)
        )
        return [sample]

    def _run(
        self,
        stage: Stage,
        rows: int,
        length: int,
        repeats: int,
        lap: Callable[[str], AbstractContextManager[None]],
    ) -> int:
        """Run micro-batches through a stage, each action in a ``lap``; return the input's bytes."""
        random = np.random.RandomState(0)
        tokens = random.randint(0, find_parts(self.model).vocabulary, (rows, length + 1))
        spans = np.array([[0, length]] * rows, np.int32)
        microbatch = MicroBatch(tokens.astype(np.int32), spans, 0)
        part = stage.part
        x = None
        if not part.is_first:
            x = mx.random.normal((rows, length, part.hidden_size)).astype(part.dtype)
            mx.eval(x)
        for j in range(repeats):
            with lap("F"):
                stage.forward(j, microbatch, x, scale=1 / (rows * length))
            if not stage.names:
                continue
            if not part.is_last:
                stage.fill_cotangent(j, mx.ones_like(stage.cotangent(j)))
            if stage.needs_input_gradient:
                with lap("I"):
                    stage.backward_input(j)
            with lap("W"):
                stage.backward_weight(j)
        stage.gradients.clear()
        return 0 if x is None else x.nbytes

    def sample(
        self, rows: int, length: int, frozen: Sequence[Seconds], trained: Sequence[Seconds]
    ) -> Sample:
        """Return the sample of the times of ``runs``, frozen, and of all stages, trained."""
        first, *between, last = trained
        kinds = [
            LayerTimes(each.scaled(1 / (stop - start)), of_frozen.scaled(1 / (stop - start)))
            for (start, stop), each, of_frozen in zip(self.runs, between, frozen, strict=True)
        ]
        of_first, of_last = (kinds[self.pattern[i]].trained for i in (0, -1))
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


def build_sample_model(model_config: Mapping[str, Any], dtype: str) -> nn.Module:
    """Build mlx-lm's model, frozen, with random weights, lazily, without computing anything."""
    plain = {k: v for k, v in model_config.items() if not k.startswith("quantization")}
    model = build_random(plain)
    model.eval()
    model.set_dtype(getattr(mx, dtype))
    quantisation = read_quantisation(model_config)
    if quantisation is not None:

        def how(path: str, module: nn.Module) -> dict[str, Any] | bool:
            own = quantisation.of(path)
            if own is None or not hasattr(module, "to_quantized"):
                return False
            # Weights that do not divide into groups stay unquantised, as in mlx-lm's convert.
            return False if module.weight.shape[-1] % own.group_size else asdict(own)

        nn.quantize(model, class_predicate=how)
    model.freeze()
    return model


def update_seconds(stage: Stage, optimizer: Optimizer) -> float:
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
