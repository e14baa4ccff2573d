"""RDMA links a group whose ranks have a device in a network with each other one."""

from __future__ import annotations

import pytest

from shardmlx.distributed.mlx_group import Offer, mesh_of

LINKS = {"01": "10.77.0.0/30", "02": "10.77.0.4/30", "12": "10.77.0.8/30"}
MACS = (
    Offer(["192.168.1.10", "10.77.0.1", "10.77.0.5"], 1, {LINKS["01"]: "a1", LINKS["02"]: "a2"}),
    Offer(["192.168.1.11", "10.77.0.2", "10.77.0.9"], 1, {LINKS["01"]: "b0", LINKS["12"]: "b2"}),
    Offer(["192.168.1.12", "10.77.0.6", "10.77.0.10"], 1, {LINKS["02"]: "c0", LINKS["12"]: "c1"}),
)


def test_three_macs_with_a_cable_between_each_two() -> None:
    assert mesh_of(MACS) == [[None, "a1", "a2"], ["b0", None, "b2"], ["c0", "c1", None]]
    assert mesh_of(MACS[:2]) == [[None, "a1"], ["b0", None]]


@pytest.mark.parametrize("link", LINKS.values())
def test_one_cable_that_is_missing_leaves_the_ring(link: str) -> None:
    devices = [{net: each for net, each in mac.devices.items() if net != link} for mac in MACS]
    assert (
        mesh_of([mac._replace(devices=own) for mac, own in zip(MACS, devices, strict=True)]) is None
    )
    assert mesh_of([MACS[0], MACS[1]._replace(devices={})]) is None


def test_ranks_of_one_mac_have_no_link() -> None:
    assert mesh_of([MACS[0], MACS[0]._replace(port=2), MACS[1]]) is None
