"""What tools print, as values. Nothing ran on a Mac: the texts are what others recorded there, each
with its source. Columns that the web had run together are apart again."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from shardmlx.common.http_listener import source_address
from shardmlx.hosts import host_facts
from shardmlx.hosts.host_facts import (
    ETHERNET,
    THUNDERBOLT,
    VIRTUAL,
    WIFI,
    Interface,
    media_of_ports,
    weak_power,
)


def address(address: str, netmask: str | None, family: int = socket.AF_INET) -> SimpleNamespace:
    return SimpleNamespace(family=family, address=address, netmask=netmask)


# networksetup as in a public post of 2015 on a MacBook, "List all networking hardware in OSX".
HARDWARE_PORTS_OF_A_MACBOOK = """
Hardware Port: Wi-Fi
Device: en0
Ethernet Address: 6c:40:08:b7:a1:06

Hardware Port: Bluetooth PAN
Device: en3
Ethernet Address: 6c:40:08:b7:a1:07

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 6e:40:08:7b:1c:00

VLAN Configurations
===================
"""

# bridge0 of github.com/ml-explore/mlx/issues/1903, a Mac mini of 2025; en0 and lo0 of
# stackoverflow.com/questions/29958143: as psutil gives them.
ADDRESSES = {
    "lo0": [address("::1", None, socket.AF_INET6), address("127.0.0.1", "255.0.0.0")],
    "gif0": [],
    "en0": [
        address("64:76:ba:ae:a3:02", None, psutil.AF_LINK),
        address("172.30.7.47", "255.255.0.0"),
    ],
    "bridge0": [address("10.25.0.1", "255.255.255.0")],
    "bridge0:1": [address("10.25.0.2", "255.255.255.0")],
}


def test_what_carries_a_device_of_a_mac() -> None:
    media = media_of_ports(HARDWARE_PORTS_OF_A_MACBOOK)
    assert media == {"en0": WIFI, "bridge0": THUNDERBOLT, "en3": None}
    cables = {"AirPort": WIFI, "Thunderbolt Ethernet Slot 1": ETHERNET, "iPhone USB": None}
    cables |= {"Ethernet": ETHERNET, "USB 10/100/1000 LAN": ETHERNET}
    for port, medium in cables.items():
        assert media_of_ports(f"Hardware Port: {port}\nDevice: en7\n") == {"en7": medium}


# pmset as in public posts of macOS 13 to 15.
SETTINGS = """System-wide power settings:
Currently in use:
 standby              1
 powernap             1
 hibernatemode        3
 lowpowermode         {}
 sleep                1 (sleep prevented by caffeinate)
"""


def plugged(monkeypatch: pytest.MonkeyPatch, is_plugged: bool | None) -> None:
    battery = SimpleNamespace(power_plugged=is_plugged)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery)


def test_a_machine_on_battery_or_in_low_power_mode_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plugged(monkeypatch, True)
    assert weak_power(SETTINGS.format(0)) == ()
    assert weak_power(" powermode            1\n") == ("in Low Power Mode",)  # M4 Max
    assert weak_power(" powermode            2\n") == ()  # its High Power Mode
    plugged(monkeypatch, False)
    assert weak_power(SETTINGS.format(1)) == ("on battery power", "in Low Power Mode")
    monkeypatch.setattr(psutil, "sensors_battery", lambda: None)
    assert weak_power("") == ()


def test_this_machine_has_memory_and_addresses() -> None:
    facts = host_facts.collect()
    assert facts.memory is not None
    assert facts.memory_free is not None
    assert 0 < facts.memory_free < facts.memory
    loopback = [each for each in facts.interfaces if each.address == "127.0.0.1"]
    assert [each.network for each in loopback] == ["127.0.0.0/8"]
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert source_address("no address") is None


def test_what_carries_an_interface_of_linux(tmp_path: Path) -> None:
    drivers = tmp_path / "drivers"
    for name, driver in (("eth0", "e1000e"), ("thunderbolt0", "thunderbolt-net")):
        (drivers / driver).mkdir(parents=True)
        (tmp_path / name / "device").mkdir(parents=True)
        (tmp_path / name / "device" / "driver").symlink_to(drivers / driver)
    (tmp_path / "wlan0" / "wireless").mkdir(parents=True)
    (tmp_path / "veth1").mkdir()
    media = {name: host_facts.medium_on_linux(name, tmp_path) for name in ("eth0", "wlan0")}
    assert media == {"eth0": ETHERNET, "wlan0": WIFI}
    assert host_facts.medium_on_linux("thunderbolt0", tmp_path) == THUNDERBOLT
    assert host_facts.medium_on_linux("veth1", tmp_path) == VIRTUAL
    assert host_facts.medium_on_linux("nothing", tmp_path) is None


def test_a_box_has_the_chip_with_which_mlx_computes(tmp_path: Path) -> None:
    processor = host_facts.chip_on_linux(tmp_path)
    gpu = tmp_path / "0000:01:00.0"
    gpu.mkdir()
    (gpu / "information").write_text("Model: \t\t NVIDIA GeForce RTX 4090\nIRQ:   \t\t 163\n")
    assert host_facts.chip_on_linux(tmp_path) == "NVIDIA GeForce RTX 4090" != processor


def test_a_machine_without_any_tool_has_unknown_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_facts, "_said", lambda *command: None)
    for platform in ("darwin", "linux"):
        monkeypatch.setattr("sys.platform", platform)
        facts = host_facts.collect()
        assert facts.is_mac == (platform == "darwin")
        assert facts.wired_limit is None
        assert facts.versions["shardmlx"]


def test_a_mac_is_asked_with_its_own_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "machdep.cpu.brand_string": "Apple M2 Ultra",
        "iogpu.wired_limit_mb": "57344",
        "ibv_devices": "device          node GUID\n------\nrdma_en5        8096a9d9edbaac05",
        "-g": SETTINGS.format(0),
        "-listallhardwareports": HARDWARE_PORTS_OF_A_MACBOOK,
    }
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(host_facts, "_said", lambda *command: answers[command[-1]])
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: ADDRESSES)
    plugged(monkeypatch, False)
    facts = host_facts.collect()
    assert facts.chip == "Apple M2 Ultra"
    assert facts.weak_power == ("on battery power",)
    assert facts.has_rdma
    assert facts.wired_limit == 56 << 30
    assert facts.interfaces == (
        Interface("lo0", "127.0.0.1", "127.0.0.0/8", None),
        Interface("en0", "172.30.7.47", "172.30.0.0/16", WIFI),
        Interface("bridge0", "10.25.0.1", "10.25.0.0/24", THUNDERBOLT),
        Interface("bridge0", "10.25.0.2", "10.25.0.0/24", THUNDERBOLT),
    )
