"""Describe Macs and NVIDIA GPUs by chip and memory: the sizes that are sold, and their speed.

No MLX, no MPI. Sizes, numbers of GPU cores and bandwidths of Macs are Apple's, as two lists have
them that cite its specifications: huggingface.js's pull request 1937, and
github.com/rlindsey2/sunkcost. Numbers of GPUs are from NVIDIA's data sheets and white papers: of
Ada (RTX 4090), RTX Blackwell (RTX 5090, RTX PRO 6000) and Hopper (H100; an H200 has the same chip).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import NamedTuple

from shardmlx.common.units import GIB
from shardmlx.config.options import split_names
from shardmlx.errors import UserError
from shardmlx.planning.facts.hostfile import Machine, kind_key
from shardmlx.planning.facts.ring import RDMA_SUM_SECONDS


class Flops(NamedTuple):
    """Multiplications and additions a second by the width of what is multiplied: 16 bits with sums
    in 32, ``int8`` and ``fp8``; None where no such speed is published. Dense, as MLX computes."""

    half: float
    int8: float | None = None
    fp8: float | None = None


CORE_FLOPS = Flops(2 * 128)
"""FLOPs of a GPU core in a cycle: a multiply-add of each ALU, in 32 and in 16 bits alike
(github.com/philipturner/metal-benchmarks)."""

MATRIX_FLOPS = Flops(1024, int8=2048)
"""The same of the matrix units of an M5's core. Apple states four times the M4's alone; measured
by T. Zakharko at tzakharko.github.io/apple-neural-accelerators-benchmark. MLX uses them in 16 bits
from macOS 26.2 on, and then reads prompts 3.3 to 4.1 times as fast as an M4
(machinelearning.apple.com/research/exploring-llms-mlx-m5)."""

HERTZ: Mapping[str, float] = MappingProxyType(
    {"M1": 1.27e9, "M2": 1.398e9, "M3": 1.398e9, "M4": 1.578e9, "M5": 1.578e9}
)
"""Cycles a second of a GPU. M1 and M2: from the TFLOPS that Apple states, 10.4 of an M1 Max, 13.6
of an M2 Max. M3 and M4: as hmc-tech.com lists them. M5: measured on a MacBook Air at
michaelstinkerings.org/apple-m5-gpu-roofline-analysis."""

THUNDERBOLT = 2e9
"""Bytes a second, each way: TCP over Thunderbolt 4, measured at jiribrejcha.net."""


class Chip(NamedTuple):
    """The GB a second from a chip's memory, two where fewer GPU cores have less; and the GB of
    memory that it is sold with, by its GPU cores."""

    bandwidth: tuple[int, ...]
    sizes: Mapping[int, tuple[int, ...]]


CHIPS: Mapping[str, Chip] = MappingProxyType(
    {
        "M1": Chip((68,), {7: (8, 16), 8: (8, 16)}),
        "M1 Pro": Chip((200,), {14: (16, 32), 16: (16, 32)}),
        "M1 Max": Chip((400,), {24: (32, 64), 32: (32, 64)}),
        "M1 Ultra": Chip((800,), {48: (64, 128), 64: (64, 128)}),
        "M2": Chip((100,), {8: (8, 16, 24), 10: (8, 16, 24)}),
        "M2 Pro": Chip((200,), {16: (16, 32), 19: (16, 32)}),
        "M2 Max": Chip((400,), {30: (32, 64), 38: (32, 64, 96)}),
        "M2 Ultra": Chip((800,), {60: (64, 128, 192), 76: (64, 128, 192)}),
        "M3": Chip((100,), {8: (8, 16, 24), 10: (8, 16, 24)}),
        "M3 Pro": Chip((150,), {14: (18, 36), 18: (18, 36)}),
        "M3 Max": Chip((300, 400), {30: (36, 96), 40: (48, 64, 128)}),
        "M3 Ultra": Chip((819,), {60: (96, 256), 80: (96, 256, 512)}),
        "M4": Chip((120,), {8: (16, 24), 10: (16, 24, 32)}),
        "M4 Pro": Chip((273,), {16: (24, 48, 64), 20: (24, 48, 64)}),
        "M4 Max": Chip((410, 546), {32: (36,), 40: (48, 64, 128)}),
        "M5": Chip((153,), {8: (16, 24), 10: (16, 24, 32)}),
        "M5 Pro": Chip((307,), {16: (24, 48, 64), 20: (24, 48, 64)}),
        "M5 Max": Chip((460, 614), {32: (36,), 40: (48, 64, 128)}),
        "M5 Ultra": Chip((1200,), {64: (96,), 80: (96, 256, 512)}),
    }
)


class Gpu(NamedTuple):
    """An NVIDIA GPU: the GB a second from its memory, the GB of memory that it is sold with, and
    its published FLOP/s."""

    bandwidth: int
    sizes: tuple[int, ...]
    flops: Flops


_GB10 = Gpu(273, (128,), Flops(125e12, int8=250e12, fp8=250e12))
"""NVIDIA states 1 PFLOP/s in FP4 alone, sparse: dense it is half, and each doubling of the width
halves it again, as in the other GPUs of that architecture."""

_HOPPER = Flops(989.4e12, int8=1978.9e12, fp8=1978.9e12)


GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "DGX Spark": _GB10,
        "GB10": _GB10,
        "RTX 4090": Gpu(1008, (24,), Flops(165.2e12, int8=660.6e12, fp8=330.3e12)),
        "RTX 5090": Gpu(1792, (32,), Flops(209.5e12, int8=838.0e12, fp8=419.0e12)),
        "RTX PRO 6000": Gpu(1792, (96,), Flops(503.8e12, int8=1007.6e12, fp8=1007.6e12)),
        "H100": Gpu(3350, (80,), _HOPPER),
        "H200": Gpu(4800, (141,), _HOPPER),
    }
)
"""GPUs on which MLX runs on Linux. Nobody has run a Mac beside one. MLX reached 44% of the H200
in bfloat16, measured by doctor; the other numbers are of data sheets alone."""

_GPUS_BY_KIND = MappingProxyType({kind_key(name): gpu for name, gpu in GPUS.items()})

ETHERNET = 1.1e9
"""Bytes a second, each way: TCP over 10 Gbit/s Ethernet, which a Spark and Macs have."""

OF_GPU = 15 / 16
"""Share of a GPU's memory that MLX may take: the rest is CUDA's, and the display's."""

WITH_RDMA = ("M3 Ultra", "M4 Pro", "M4 Max", "M5 Pro", "M5 Max", "M5 Ultra")
"""Chips with Thunderbolt 5, between which macOS 26.2 has RDMA: Apple's technical note 3205."""

BACKENDS_OF_MAKERS: Mapping[str, str] = MappingProxyType({"apple": "metal", "nvidia": "cuda"})
"""The backend of MLX on the chips of each maker, which is the first word of a ``kind``."""

_OF_MACS = MappingProxyType(
    {kind_key(f"Apple {name}"): 1e9 * min(chip.bandwidth) for name, chip in CHIPS.items()}
)

_GPU_KIND = re.compile(
    r"nvidia-(?:geforce-)?(?P<name>.+?)(?:-80gb-hbm3|-blackwell-(?:workstation|server)-edition)?"
)
"""Kinds of GPUs as drivers name them: ``NVIDIA GeForce RTX 4090``, ``NVIDIA H100 80GB HBM3``. GPUs
of laptops, and on PCIe, have other numbers."""

_MAC = re.compile(
    r"(?:(?:apple )?(?P<chip>[a-z].*?) +(?:(?P<cores>\d+)[ -]?cores? +)?)?"
    r"(?P<memory>[1-9]\d{0,4}) ?Gi?B",
    re.IGNORECASE,
)


_MEMORY = re.compile(r"\d ?Gi?B", re.IGNORECASE)

_MODEL = re.compile(r"\b(?:macbook|imac|mac)\b(?:[ -](?:pro|air|mini|studio)\b)?", re.IGNORECASE)
"""The name of a Mac, which says nothing of its chip."""

_EXAMPLE = "'M2 16GB, M1 Ultra 64GB'"
_SHOWN = "Apple menu > About This Mac shows both"


def as_macs(machines: Iterable[Machine]) -> tuple[Machine, ...]:
    """Return the machines, each with what macOS lets the GPU wire of its memory, if nobody says.

    This is Metal's recommended working set in macOS 14 and 15, 10.67 GiB of 16 and 48 of 64, as
    llama.cpp's logs have it. macOS 26 gives more, 11.84 and 51.84 GiB (pull request 754 of
    AlexsJones/llmfit): a plan holds on each.
    """
    return tuple(
        mac
        if mac.memory is None or mac.wired is not None
        else replace(mac, wired=_wired(mac.memory))
        for mac in machines
    )


def _wired(memory: int) -> int:
    return memory * 2 // 3 if memory < 36 * GIB else memory * 3 // 4


def bandwidth_of(machine: Machine) -> float | None:
    """Return the bytes a second from a machine's memory, as stated or by its chip: the least of the
    chip's variants; None if both are unknown."""
    if machine.bandwidth or machine.kind is None:
        return machine.bandwidth
    gpu = gpu_of(machine.kind)
    return _OF_MACS.get(machine.kind) if gpu is None else 1e9 * gpu.bandwidth


def gpu_of(kind: str) -> Gpu | None:
    """Return the NVIDIA GPU of a ``kind``, by the name that a data sheet or its driver has; None of
    any other."""
    match = _GPU_KIND.fullmatch(kind_key(kind))
    return None if match is None else _GPUS_BY_KIND.get(match["name"])


def backend_of(machine: Machine) -> str | None:
    """Return what MLX computes with on a machine, ``metal``, ``cuda`` or ``cpu``: as the machine
    says, or by its ``kind``; None if both are unknown."""
    maker = (machine.kind or "").partition("-")[0]
    return machine.backend or BACKENDS_OF_MAKERS.get(maker)


def flops_of(chip: str, cores: int) -> Flops:
    """Return the FLOP/s of a chip of Apple's, by width, with so many GPU cores."""
    generation = chip.split()[0]
    core = MATRIX_FLOPS if generation == "M5" else CORE_FLOPS
    cycles = cores * HERTZ[generation]
    return Flops(
        half=cycles * core.half,
        int8=None if core.int8 is None else cycles * core.int8,
        fp8=None if core.fp8 is None else cycles * core.fp8,
    )


def shares_by_bandwidth(machines: Sequence[Machine], size: int) -> tuple[int, ...]:
    """Return the shares of the ranks of a group of ``size``, in proportion: GB a second from their
    memories, the least of all groups; equal if one is unknown."""
    known = [speed for speed in map(bandwidth_of, machines) if speed is not None]
    if len(known) < len(machines):
        return (1,) * size
    return tuple(max(1, round(min(known[place::size], default=0) / 1e9)) for place in range(size))


def machines_of(text: str) -> tuple[Machine, ...]:
    """Return Macs like ``M2 16GB, M1 Max 24-core 32GB, 64GB``, joined by Thunderbolt; the last one
    is of unknown speed. ``DGX Spark 128GB, RTX 4090 24GB`` are boxes on Ethernet.

    A chip of several variants has the most GPU cores that are sold with this memory, unless they
    are given. ``UserError`` names what nobody sells, and the nearest.
    """
    machines = [_machine(entry) for entry in split_names(text) or [text]]
    seen: Counter[str] = Counter()
    for place, machine in enumerate(machines):
        seen[machine.host] += 1
        if seen[machine.host] > 1:
            machines[place] = replace(machine, host=f"{machine.host} #{seen[machine.host]}")
    return tuple(machines)


def _machine(entry: str) -> Machine:
    if len(_MEMORY.findall(entry)) > 1:
        remedy = f"write commas between machines, as in {_EXAMPLE}"
        raise UserError(f"--machines has {entry!r}", remedy)
    match = _MAC.fullmatch(" ".join(_MODEL.sub(" ", entry).split()))
    if match is None:
        remedy = f"write chip and memory, as in {_EXAMPLE}: {_SHOWN}"
        raise UserError(f"--machines has {entry!r}", remedy)
    size = int(match["memory"])
    mac = Machine(host=f"{size}GB", memory=size * GIB, link=THUNDERBOLT, where="--machines")
    if match["chip"] is None:
        if _MODEL.search(entry):
            remedy = f"write its chip, as in {_EXAMPLE}, or memory alone: {_SHOWN}"
            raise UserError(f"--machines has {entry!r}, which names no chip", remedy)
        return mac
    chip = _known(match["chip"], entry)
    if chip in GPUS:
        return _box(mac, chip, size, entry)
    asked = match["cores"]
    sold = [(cores, gigabytes) for cores, sizes in CHIPS[chip].sizes.items() for gigabytes in sizes]
    fitting = [cores for cores, each in sold if each == size and asked in (None, str(cores))]
    if not fitting:
        cores, each = min(
            sold, key=lambda mac: (abs(mac[0] - int(asked or mac[0])), abs(mac[1] - size))
        )
        problem = f"--machines has {entry!r}: no such {chip} is sold"
        raise UserError(problem, f"the nearest is {chip} {cores}-core {each}GB")
    cores = max(fitting)
    return replace(
        mac,
        host=f"{chip} {size}GB",
        flops=flops_of(chip, cores).half,
        bandwidth=1e9 * CHIPS[chip].bandwidth[-1 if cores == max(CHIPS[chip].sizes) else 0],
        rdma=RDMA_SUM_SECONDS if chip in WITH_RDMA else None,
        kind=kind_key(f"Apple {chip}"),
    )


def _known(chip: str, entry: str) -> str:
    """Return the chip or GPU of this name. Raises ``UserError`` for an unknown one."""
    names = {name.casefold(): name for name in (*CHIPS, *GPUS)}
    asked = " ".join(chip.casefold().removeprefix("nvidia ").removeprefix("geforce ").split())
    if asked in names:
        return names[asked]
    near = get_close_matches(asked, names, n=1)
    remedy = f"chips are M1 to M5, {', '.join(GPUS)}: {_SHOWN}"
    if near:
        remedy = f"the nearest is {names[near[0]]}"
    raise UserError(f"--machines has {entry!r}: unknown chip", remedy)


def _box(machine: Machine, name: str, size: int, entry: str) -> Machine:
    """Return a machine with an NVIDIA GPU, of whose memory it has ``size`` GB."""
    gpu = GPUS[name]
    if size not in gpu.sizes:
        problem = f"--machines has {entry!r}: no such {name} is sold"
        raise UserError(problem, f"it has {gpu.sizes[0]}GB")
    return replace(
        machine,
        host=f"{name} {size}GB",
        wired=int(size * GIB * OF_GPU),
        flops=gpu.flops.half,
        bandwidth=1e9 * gpu.bandwidth,
        link=ETHERNET,
        kind=kind_key(f"NVIDIA {name}"),
    )
