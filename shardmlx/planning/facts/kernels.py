"""Kernels that a backend lacks, and what layers pay for that. No MLX, no MPI.

A gated delta rule (Qwen3.5, Qwen3-Next, Kimi Linear) goes from token to token: a fact of the layer,
``Recurrence.loops``. mlx-lm and MLX have one kernel for all tokens on Metal, and none on CUDA
(mlx-cuda-13 0.32.4 says of GatedDeltaUpdate that it "has no CUDA implementation"). There each token
takes some small operations of its own, one after the other, however fast the GPU is. So such layers
are not forbidden there, and have their price.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from shardmlx.common.formatting import duration, numbers_of, plural
from shardmlx.models.sizes.layer_shape import LayerShape
from shardmlx.models.sizes.shape import ModelShape
from shardmlx.planning.facts.chips import backend_of
from shardmlx.planning.facts.hostfile import Machine

TOKEN_SECONDS: Mapping[str, float] = MappingProxyType({"cuda": 90e-6})
"""Seconds of a token in such a layer, for all rows at once, on backends without the kernel. An
RTX 5090 read 605 tokens of a prompt a second in the 18 layers of Qwen3.5 0.8B, and 24018 with a
kernel, as pull request 14789 of ollama says. A token of an answer took 13 us in each, which is not
counted."""

BACKWARD_TOKENS = 3
"""The time of a token in the backward, over that in the forward: a piece is computed again, and its
graph has 3.3 times the operations. An estimate: on an H200 no step of Qwen3.5 ended in 100 s."""


def token_seconds(machine: Machine) -> float:
    """Return the seconds of a token in a layer that ``loops``, beside its products; 0 where there
    is a kernel for it, or nothing is known."""
    return TOKEN_SECONDS.get(backend_of(machine) or "", 0.0)


def tokens_in_turn(layer: LayerShape, length: int) -> int:
    """Return how many of ``length`` tokens a layer computes one after the other, without a kernel
    for all of them."""
    return length if layer.recurrence.loops else 0


Held = Sequence[tuple[Machine, Sequence[tuple[int, int]]]]
"""Machines, each with the ranges of layers that it has."""


def kernel_warnings(
    shape: ModelShape, held: Held, length: int, first_trained: int | None = None
) -> tuple[str, ...]:
    """Return a line for each machine that has layers for which it lacks a kernel: which they are,
    and what sequences of ``length`` tokens, together, take there beside the products of matrices;
    with the gradients of layers from ``first_trained`` on, if it is given."""
    lines = []
    for machine, ranges in held:
        layers = [i for start, stop in ranges for i in range(start, stop)]
        slow = [i for i in layers if shape.layer(i).recurrence.loops]
        trained = [i for i in slow if first_trained is not None and i >= first_trained]
        passes = len(slow) + BACKWARD_TOKENS * len(trained)
        seconds = length * token_seconds(machine) * passes
        if seconds:
            lines.append(
                f"{machine.host} has layer{_runs(slow)}, for whose recurrence CUDA has no "
                f"kernel: {length} tokens take {duration(seconds)} more there, an "
                "estimate"
            )
    return tuple(lines)


def kernel_lines(shape: ModelShape, held: Held, length: int, first_trained: int) -> tuple[str, ...]:
    """Return the warnings, or that no machine that lacks a kernel has a layer that wants it."""
    count = sum(shape.layer(i).recurrence.loops for i in range(shape.num_layers))
    names = dict.fromkeys(machine.host for machine, _ in held if token_seconds(machine))
    if not count or not names:
        return ()
    return kernel_warnings(shape, held, length, first_trained) or (
        f"CUDA has no kernel for the recurrence of {plural(count, 'layer')}: "
        f"{' and '.join(names)} has none of them",
    )


def _runs(numbers: Sequence[int]) -> str:
    """Return ascending numbers after a noun, neighbours together: ``s 0-2, 4-6``, or `` 0``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    named = ", ".join(numbers_of(run[0], run[-1] + 1) for run in runs)
    return f"{'s' * (len(numbers) > 1)} {named}"
