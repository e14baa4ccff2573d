"""Layers of experts, computed one expert after the other, although mlx-lm stacks them.

mlx-lm treats the experts of a layer independently, so each is converted in a layer of one expert.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from shardmlx.checkpoint.export import SAFETENSORS_NAMES
from shardmlx.common.durable_files import read_exactly
from shardmlx.distributed.messages import buffer_of, new_buffer
from shardmlx.modelfiles.model_files import check_model_files
from shardmlx.modelfiles.safetensors_header import read_header
from shardmlx.models.runtime.tuner import LoRASwitchLinear

_KINDS = SwitchLinear, QuantizedSwitchLinear, LoRASwitchLinear
_LAYER = "layer"

Finish = Callable[[nn.Module, Callable[[str], str]], None]
"""Finishes a module in place. The function returns a parameter's name in the finished model."""


class OpenFile:
    """A file that stays readable until it is no longer used, even if its name is gone."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class Stored:
    """An array's place in a file, from byte ``start`` on."""

    file: OpenFile
    start: int
    nbytes: int

    def read(self, start: int, count: int) -> bytes:
        """Return some of the array's bytes, from ``start`` on. Raises ``OSError``."""
        return read_exactly(self.file.descriptor, self.start + start, count, self.file.name)


def stored_arrays(path: Path, read: Mapping[str, mx.array]) -> dict[int, Stored]:
    """Return, by ``id``, the places of arrays whose bytes lie in files. Raises ``UserError``."""
    files = check_model_files(path)
    opened = {file: (read_header(file), OpenFile(file)) for file in set(files.values())}
    found = {}
    for name, array in read.items():
        if name not in files:
            continue  # another thread's
        header, file = opened[files[name]]
        info = header.tensors[name]
        if info.nbytes == array.nbytes and info.dtype == SAFETENSORS_NAMES[array.dtype]:
            found[id(array)] = Stored(file, info.start, info.nbytes)
    return found


class _Stack:
    """An array whose first axis is read part by part, from stacked arrays or a file's bytes."""

    def __init__(self, array: mx.array, parts: Sequence[mx.array] | Stored) -> None:
        self._sides = (1, *array.shape[1:])
        self._dtype = array.dtype
        self._parts = parts if isinstance(parts, Stored) else dict(enumerate(parts))

    @property
    def leaves(self) -> Mapping[int, mx.array]:
        """The stacked arrays."""
        return {} if isinstance(self._parts, Stored) else self._parts

    def take(self, number: int) -> mx.array:
        """Return a part once, and drop it here."""
        if not isinstance(self._parts, Stored):
            return mx.expand_dims(self._parts.pop(number), 0)
        array = new_buffer(self._sides, self._dtype)
        buffer_of(array)[:] = self._parts.read(number * array.nbytes, array.nbytes)
        return array

    def like(self) -> mx.array:
        """Return a lazy array like a part."""
        return mx.zeros(self._sides, self._dtype)


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer of ``count`` experts, before it is finished: its arrays are stacks. ``path`` is its
    name in the model, ``packing`` its final quantisation, if any."""

    path: str
    count: int
    layer: nn.Module
    finish: Finish
    packing: Mapping[str, Any] | None = None

    def arrays(self, number: int) -> dict[str, mx.array]:
        """Return the finished arrays of an expert, lazily, by name: (1, ...). Once."""
        return self._arrays(lambda stack: stack.take(number), number)

    def like(self) -> dict[str, mx.array]:
        """Return lazy arrays with the shapes and types of an expert's."""
        return self._arrays(_Stack.like, 0)

    def leaves(self, number: int) -> list[mx.array]:
        """Return the arrays that an expert is stacked from; none if it is read from a stack."""
        values = [value for _, value in tree_flatten(self.layer)]
        stacks = [value for value in values if isinstance(value, _Stack)]
        return [stack.leaves[number] for stack in stacks if number in stack.leaves]

    def _arrays(self, get: Callable[[_Stack], mx.array], number: int) -> dict[str, mx.array]:
        model = nn.Module()
        model[_LAYER] = _with(self.layer, partial(_part, get, number))
        self.finish(model, self._name)
        if self.packing is not None and hasattr(model[_LAYER], "to_quantized"):
            model[_LAYER] = model[_LAYER].to_quantized(**self.packing)
        return {self._name(name): array for name, array in tree_flatten(model.parameters())}

    def _name(self, name: str) -> str:
        return self.path + name.removeprefix(_LAYER)


def _part(get: Callable[[_Stack], mx.array], number: int, value: mx.array | _Stack) -> mx.array:
    """Return one expert's part of what a layer of experts has."""
    if isinstance(value, _Stack):
        return get(value)
    return value[number : number + 1] if value.ndim else value


def part_name(path: str, number: int) -> str:
    """Return the name of one expert's matrix in a stack: ``PATH[NUMBER]``."""
    return f"{path}[{number}]"


def find_experts(
    model: nn.Module,
    stacks: Iterable[tuple[mx.array, Sequence[mx.array]]],
    stored: Mapping[int, Stored],
    finish: Finish,
) -> list[Experts]:
    """Find an unfinished model's layers of experts, in ``stacks`` with their parts, or in files."""
    parts: dict[int, Sequence[mx.array] | Stored] = {
        **stored,
        **{id(array): parts for array, parts in stacks},
    }
    layers = {path: each for path, each in model.named_modules() if isinstance(each, _KINDS)}
    stacked = partial(_stacked, parts)
    found = []
    for path, layer in layers.items():
        base = layer.linear if isinstance(layer, LoRASwitchLinear) else layer
        if path.rpartition(".")[0] not in layers and id(base.weight) in parts:
            found.append(Experts(path, base.num_experts, _with(layer, stacked), finish))
    return found


def _stacked(
    parts: Mapping[int, Sequence[mx.array] | Stored], array: mx.array | _Stack
) -> mx.array | _Stack:
    """Put a stack in place of an array that can be read by part."""
    if isinstance(array, mx.array) and id(array) in parts:
        return _Stack(array, parts[id(array)])
    return array


def by_tensor(
    found: Iterable[Experts], model: nn.Module, weights: Mapping[str, mx.array]
) -> dict[str, Experts]:
    """Return the experts of each tensor of the finished model that is computed by expert."""
    finished = dict(model.named_modules())
    result: dict[str, Experts] = {}
    for experts in found:
        layer = finished[experts.path]
        if isinstance(layer, QuantizedSwitchLinear):
            how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
            experts = replace(experts, packing=how)
        like = experts.like()
        if all(
            name in weights
            and weights[name].dtype == array.dtype
            and weights[name].shape == (experts.count, *array.shape[1:])
            for name, array in like.items()
        ):
            result |= dict.fromkeys(like, experts)
    return result


def _with(layer: nn.Module, change: Callable[[mx.array | _Stack], mx.array | _Stack]) -> nn.Module:
    """Return the layer with its arrays, or the stacks in their places, changed."""
    changed = copy.copy(layer)
    for key, value in layer.items():
        if isinstance(value, nn.Module):
            changed[key] = _with(value, change)
        elif isinstance(value, mx.array | _Stack):
            changed[key] = change(value)
    return changed
