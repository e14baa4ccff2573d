"""The file of times and bytes that ``shardmlx profile`` measures. No MLX, no MPI."""

from __future__ import annotations

import json
import reprlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from shardmlx.errors import UserError, file_access, refusing
from shardmlx.modelfiles.tensors import read_quantisation
from shardmlx.planning.facts.hostfile import kind_key, same_host
from shardmlx.planning.facts.workload import Workload
from shardmlx.planning.memory.measured import MemorySample
from shardmlx.planning.time.parts import ModelSeconds, Seconds

FORMAT = 2

_AGAIN = "measure again with shardmlx profile"


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Times of a layer that trains, with every gradient, and of one that runs only forward."""

    trained: Seconds
    frozen: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Times measured with micro-batches of ``rows`` x ``length`` tokens, of a ``layer`` that trains
    and a ``frozen`` one, of ``others`` of other kinds, and of embedding and lm_head, which are
    differences of times."""

    rows: int
    length: int
    layer: Seconds
    frozen: Seconds
    embedding: Seconds
    head: Seconds
    others: tuple[LayerTimes, ...] = ()

    @property
    def kinds(self) -> tuple[LayerTimes, ...]:
        """Times of each kind of layer, in the order in which the model has them."""
        return (LayerTimes(self.layer, self.frozen), *self.others)


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """The samples of one rank on a kind of ``chip``: equal rows, in ascending order of length."""

    host: str
    chip: str
    samples: tuple[Sample, ...]
    memory: tuple[MemorySample, ...] = ()

    def seconds(self, workload: Workload, rows: int, length: int) -> ModelSeconds:
        """Return times interpolated between samples; the outermost line goes on beyond them. A
        share of a layer takes its share of the FLOPs."""
        rows, length = workload.micro_batch(rows, length)
        part = partial(self._interpolated, rows, length)
        kinds = list(zip(*(sample.kinds for sample in self.samples), strict=True))
        trained = [part([times.trained for times in kind]) for kind in kinds]
        frozen = [part([times.frozen for times in kind]) for kind in kinds]
        first_trained = workload.first_trained
        shape = workload.shape
        _, pattern = shape.whole.unlike_layers(self.samples[-1].length)
        return ModelSeconds(
            layers=tuple(
                (frozen if i < first_trained else trained)[kind].scaled(shape.share(i, length))
                for i, kind in enumerate(pattern)
            ),
            embedding=part([sample.embedding for sample in self.samples]),
            head=part([sample.head for sample in self.samples]).of_share(workload.head_share),
            first_trained=first_trained,
            recompute=workload.batch.recomputed,
        )

    def _interpolated(self, rows: int, length: int, times: Sequence[Seconds]) -> Seconds:
        lengths = [sample.length for sample in self.samples]
        if len(times) == 1:
            mixed = times[0].scaled(length / lengths[0])
        else:
            upper = next((i for i, each in enumerate(lengths) if each >= length), len(times) - 1)
            upper = max(1, upper)
            low = lengths[upper - 1]
            high = lengths[upper]
            weight = (length - low) / (high - low)
            mixed = times[upper - 1].scaled(1 - weight) + times[upper].scaled(weight)
        return replace(mixed.scaled(rows / self.samples[0].rows), update=times[0].update)


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured times of one model, trained in one way; ``work`` is what ``work_of`` returns."""

    work: Mapping[str, Any]
    machines: tuple[MachineProfile, ...]
    path: str = "profile"

    def check(self, work: Mapping[str, Any]) -> None:
        """Raise ``UserError`` if the profile was measured for other work."""
        for key in work:
            if self.work.get(key) != work[key]:
                raise UserError(
                    f"{self.path} was measured with {key} {reprlib.repr(self.work.get(key))}, not "
                    f"{reprlib.repr(work[key])}",
                    _AGAIN,
                )

    def machine(self, host: str, kind: str | None = None) -> MachineProfile:
        """Return the slowest rank measured on a host, or its kind; ``UserError`` if none is."""
        name = socket.gethostname() if host == "localhost" else host
        found = [each for each in self.machines if same_host(each.host, name)]
        if not found and kind is not None:
            found = [
                each
                for each in self.machines
                if kind_key(kind) == kind_key(each.chip) or same_host(kind, each.host)
            ]
        if not found:
            known = ", ".join(dict.fromkeys(each.host for each in self.machines))
            kinds = dict.fromkeys(kind_key(each.chip or each.host) for each in self.machines)
            words = " or ".join(f"kind={each}" for each in kinds)
            raise UserError(
                f"{self.path} has no measurement of {host}, only of {known}",
                "measure there too, "
                f"or write {words} into its line of the hostfile if it is a machine like that",
            )
        return max(found, key=lambda each: each.samples[-1].layer.microbatch)

    def measured(self, workload: Workload, host: str, kind: str | None) -> MachineProfile:
        """Return the machine's measurements of this work; ``UserError`` if any are missing."""
        self.check(work_of(workload))
        machine = self.machine(host, kind)
        shape = workload.shape.whole
        longest = machine.samples[-1].length
        measured = min(len(sample.kinds) for sample in machine.samples)
        there = len(shape.unlike_layers(longest)[0])
        if measured != there:
            raise UserError(
                f"{self.path} has times of {measured} kinds of layers, of which "
                f"{shape.model_type} has {there} at {longest} tokens a row",
                _AGAIN,
            )
        return machine


def work_of(workload: Workload) -> dict[str, Any]:
    """Return the facts that times depend on: sizes of a whole layer and lm_head, and trained
    weights."""
    fine_tune = workload.fine_tune
    shape = workload.shape.whole
    trained: dict[str, Any] = {"fine_tune_type": fine_tune.fine_tune_type}
    if fine_tune.is_full:
        trained["unfreeze_all"] = fine_tune.unfreeze_all
    else:
        trained["lora_parameters"] = json.loads(json.dumps(dict(fine_tune.lora_parameters)))
    # Windows are left out: in long enough samples they distinguish layers.
    layer, *others = shape.unlike_layers(1)[0]
    if others:
        trained["other_layers"] = [
            [each.width, each.heads.queries, each.heads.keys, each.experts, each.experts_per_token]
            for each in others
        ]
    return {
        "model_type": shape.model_type,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "tied": shape.tied,
        "intermediate_size": layer.width,
        "num_heads": layer.heads.queries,
        "num_kv_heads": layer.heads.keys,
        "head_dim": layer.heads.key_dim,
        "num_experts": layer.experts,
        "experts_per_token": layer.experts_per_token,
        "dtype": workload.dtype,
        "quantization": _quantisation(workload.quantization),
        "optimizer": fine_tune.optimizer,
        **trained,
    }


def _quantisation(entry: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Fill in the defaults of a quantisation entry, which can be written in several ways."""
    quantisation = read_quantisation({"quantization": entry})
    if quantisation is None:
        return None
    modules = {
        path: how and asdict(how)
        for path, how in quantisation.modules.items()
        if how != quantisation.default
    }
    return {**asdict(quantisation.default), **modules}


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON, which ``read_profiles`` reads. Raises ``UserError``."""
    content = {
        "format": FORMAT,
        "work": dict(profile.work),
        "machines": [asdict(each) for each in profile.machines],
    }
    with file_access("write", path):
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_profile(path: str | Path) -> Profile:
    """Read a profile; ``UserError`` names the file and its fault."""
    with file_access("read", path):
        text = Path(path).read_bytes()
    with refusing(f"{path} is not a profile", _AGAIN):
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}: this shardmlx reads {FORMAT}")
        machines = _read(tuple[MachineProfile, ...], content["machines"])
        if not machines:
            raise ValueError("no machines")
        return Profile(dict(content["work"]), machines, str(path))


def read_profiles(names: str) -> Profile:
    """Read several comma-separated files as one; ``UserError`` if they are of different work."""
    first, *others = (read_profile(name.strip()) for name in names.split(","))
    for other in others:
        other.check(first.work)
    machines = tuple(machine for each in (first, *others) for machine in each.machines)
    return replace(first, machines=machines)


def _read(kind: Any, value: Any) -> Any:
    """Return a value of JSON as what ``asdict`` made it of."""
    if isinstance(kind, type) and is_dataclass(kind):
        types = get_type_hints(kind)
        return kind(**{key: _read(types[key], each) for key, each in value.items()})
    if get_origin(kind) is tuple:
        return tuple(_read(get_args(kind)[0], each) for each in value)
    return kind(value) if isinstance(kind, type) else value
