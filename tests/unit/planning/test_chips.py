"""Macs by chip and memory: what is sold, how fast it is, and what nobody sells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardmlx.common.units import GIB
from shardmlx.errors import UserError
from shardmlx.planning.facts.chips import (
    CHIPS,
    GPUS,
    HERTZ,
    THUNDERBOLT,
    as_macs,
    backend_of,
    bandwidth_of,
    flops_of,
    gpu_of,
    machines_of,
    shares_by_bandwidth,
)
from shardmlx.planning.facts.hostfile import Machine, kind_key


def test_every_chip_from_m1_to_m5_is_known_with_each_memory_that_it_is_sold_with() -> None:
    assert {chip.split()[0] for chip in CHIPS} == HERTZ.keys() == {f"M{i}" for i in range(1, 6)}
    for chip, (_, variants) in CHIPS.items():
        for cores, sizes in variants.items():
            for size in sizes:
                (mac,) = as_macs(machines_of(f"{chip} {cores}-core {size}GB"))
                assert (mac.host, mac.memory) == (f"{chip} {size}GB", size * GIB)
                assert mac.link == THUNDERBOLT
                assert mac.flops is not None
                assert mac.wired is not None
                least, most = (1.6e12, 1.7e12) if chip.startswith("M5") else (0.2e12, 0.5e12)
                assert least < mac.flops / cores < most
                assert 0.66 < mac.wired / (size * GIB) <= 0.75


@pytest.mark.parametrize(
    ("words", "tflops", "wired", "kind"),
    [
        ("M2 16GB", 3.58, 10.67, "apple-m2"),
        ("apple m1 ultra 64 GiB", 20.81, 48.0, "apple-m1-ultra"),
        ("M1 Max 32GB", 10.4, 21.33, "apple-m1-max"),
        ("M1 Max 24-core 32GB", 7.8, 21.33, "apple-m1-max"),
        ("M3 Max 36GB", 10.74, 27.0, "apple-m3-max"),  # sold with 30 cores alone
        ("M3 Max 64GB", 14.32, 48.0, "apple-m3-max"),
        ("M5 Ultra 96GB", 129.27, 72.0, "apple-m5-ultra"),
        ("MacBook Pro M2 16GB", 3.58, 10.67, "apple-m2"),
        ("M1 Ultra Mac Studio 64GB", 20.81, 48.0, "apple-m1-ultra"),
    ],
)
def test_memory_and_cores_give_the_speed(
    words: str, tflops: float, wired: float, kind: str
) -> None:
    (mac,) = as_macs(machines_of(words))
    assert mac.flops == pytest.approx(tflops * 1e12, rel=1e-3)
    assert mac.wired == pytest.approx(wired * GIB, rel=1e-3)
    assert mac.kind == kind


@pytest.mark.parametrize(
    ("words", "tflops", "bandwidth", "kind"),
    [
        ("DGX Spark 128GB", 125.0, 273e9, "nvidia-dgx-spark"),
        ("NVIDIA GeForce RTX 4090 24GB", 165.2, 1008e9, "nvidia-rtx-4090"),
        ("rtx pro 6000 96 GiB", 503.8, 1792e9, "nvidia-rtx-pro-6000"),
        ("H200 141GB", 989.4, 4800e9, "nvidia-h200"),
    ],
)
def test_a_box_has_the_speed_of_its_gpu_and_ethernet(
    words: str, tflops: float, bandwidth: float, kind: str
) -> None:
    mac, box = as_macs(machines_of(f"M3 Ultra 96GB, {words}"))
    assert box.memory is not None
    assert box.wired is not None
    assert box.flops == pytest.approx(tflops * 1e12)
    assert box.kind == kind
    assert bandwidth_of(Machine(host="box", kind=kind)) == box.bandwidth == bandwidth
    assert 0.9 < box.wired / box.memory < 1
    assert mac.link is not None
    assert box.link is not None
    assert box.link < mac.link


def test_flops_are_known_by_width_where_they_are_published() -> None:
    """An M5's core multiplies 1024 numbers of 16 bits in a cycle, and 2048 of 8."""
    m5 = flops_of("M5 Max", 40)
    assert m5.half == pytest.approx(40 * 1024 * 1.578e9)
    assert m5.int8 == 2 * m5.half
    assert m5.fp8 is None
    ultra = flops_of("M3 Ultra", 80)
    assert ultra.half == pytest.approx(28.63e12, rel=1e-3)
    assert (ultra.int8, ultra.fp8) == (None, None)
    teraflops = {
        "GB10": (125, 250, 250),
        "RTX 4090": (165.2, 660.6, 330.3),
        "RTX 5090": (209.5, 838, 419),
        "RTX PRO 6000": (503.8, 1007.6, 1007.6),
        "H100": (989.4, 1978.9, 1978.9),
    }
    for name, widths in teraflops.items():
        assert GPUS[name].flops == tuple(1e12 * each for each in widths)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA GB10", "DGX Spark"),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
    ],
)
def test_a_gpu_is_known_by_the_name_that_its_driver_has(driver: str, name: str) -> None:
    assert gpu_of(driver) == GPUS[name]
    box = Machine(host="box", kind=kind_key(driver))
    assert bandwidth_of(box) == 1e9 * GPUS[name].bandwidth
    assert backend_of(box) == "cuda"


@pytest.mark.parametrize(
    "other",
    ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 PCIe", "NVIDIA T4", "Apple M4", "x86_64"],
)
def test_a_gpu_of_other_numbers_is_not_known_by_a_part_of_its_name(other: str) -> None:
    assert gpu_of(other) is None


def test_what_mlx_computes_with_is_said_by_a_rank_or_told_by_the_kind() -> None:
    mac, box = machines_of("M4 24GB, RTX 4090 24GB")
    assert [backend_of(each) for each in (mac, box)] == ["metal", "cuda"]
    assert backend_of(replace(box, backend="cpu")) == "cpu"
    assert backend_of(Machine(host="pc", kind="amd-epyc")) is None


def test_what_a_machine_says_that_it_wires_counts() -> None:
    (mac,) = machines_of("M4 24GB")
    assert as_macs([replace(mac, wired=20 * GIB)])[0].wired == 20 * GIB
    assert as_macs([replace(mac, memory=None)])[0].wired is None


def test_shares_go_by_memory_bandwidth_the_least_of_a_chips_variants_and_of_all_groups() -> None:
    pair = machines_of("M2 Ultra 64GB, M2 16GB")
    assert shares_by_bandwidth(pair, 2) == (800, 100)
    assert shares_by_bandwidth((*pair, *reversed(pair)), 2) == (100, 100)
    max_ = Machine(host="max", kind="apple-m4-max")
    assert shares_by_bandwidth((max_, replace(max_, bandwidth=5e11)), 2) == (410, 500)
    assert shares_by_bandwidth((max_, Machine(host="unknown")), 2) == (1, 1)


def test_macs_that_are_alike_are_different_hosts_and_one_may_have_memory_alone() -> None:
    macs = machines_of("M4 24GB, M4 24GB,16GB")
    assert [mac.host for mac in macs] == ["M4 24GB", "M4 24GB #2", "16GB"]
    assert [mac.flops is None for mac in macs] == [False, False, True]


@pytest.mark.parametrize(
    ("words", "named", "remedy"),
    [
        ("M2 Ultar 64GB", "M2 Ultar 64GB", "the nearest is M2 Ultra"),
        ("16GB, M2 20GB", "M2 20GB", "the nearest is M2 8-core 16GB"),
        ("M1 Ultra 512GB", "M1 Ultra 512GB", "the nearest is M1 Ultra 48-core 128GB"),
        ("M3 Max 40-core 36GB", "M3 Max 40-core 36GB", "the nearest is M3 Max 40-core 48GB"),
        ("M1 Max 20-core 32GB", "20-core", "the nearest is M1 Max 24-core 32GB"),
        ("M2", "'M2'", "write chip and memory"),
        ("0GB", "'0GB'", "write chip and memory"),
        ("", "''", "write chip and memory"),
        ("Intel 16GB", "unknown chip", "About This Mac"),
        ("RTX 4091 24GB", "unknown chip", "the nearest is RTX 4090"),
        ("RTX 4090 48GB", "no such RTX 4090 is sold", "it has 24GB"),
        ("MacBook Pro 16GB", "names no chip", "About This Mac"),
        ("Mac mini 24GB, M2 16GB", "'Mac mini 24GB'", "'M2 16GB, M1 Ultra 64GB'"),
        ("M2 16GB and M1 Ultra 64GB", "and", "commas between"),
        ("M2 16GB; M1 Ultra 64GB", ";", "commas between"),
        ("M2 16GB + M1 Ultra 64GB", "+", "commas between"),
        ("16GB M2", "'16GB M2'", "'M2 16GB, M1 Ultra 64GB'"),
        ("2 x M2 16GB", "'2 x M2 16GB'", "'M2 16GB, M1 Ultra 64GB'"),
    ],
)
def test_what_nobody_sells_is_refused_with_the_nearest(words: str, named: str, remedy: str) -> None:
    with pytest.raises(UserError) as error:
        machines_of(words)
    assert named in error.value.problem
    assert remedy in error.value.remedy
