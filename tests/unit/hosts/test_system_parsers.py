"""What tools print, as values. Nothing ran on a Mac: the texts are what others recorded there, each
with its source. Columns that the web had run together are apart again."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmlx.hosts import host_facts
from shardmlx.hosts.system_parsers import (
    ETHERNET,
    THUNDERBOLT,
    VIRTUAL,
    WIFI,
    Interface,
    available_by_meminfo,
    available_by_vm_stat,
    chip_by_cpuinfo,
    firewall_state,
    hardware_ports,
    interfaces_by_ifconfig,
    interfaces_by_ip,
    medium_of_port,
    route_by_bsd,
    route_by_ip,
    sysctl_values,
)

# superuser.com/questions/267660, an answer of 2013 from an iMac.
HARDWARE_PORTS_OF_AN_IMAC = """
Hardware Port: Bluetooth DUN
Device: Bluetooth-Modem
Ethernet Address: N/A

Hardware Port: Ethernet
Device: en0
Ethernet Address: a8:20:66:31:95:57

Hardware Port: MBBEthernet
Device: en5
Ethernet Address: 00:1e:10:1f:00:01

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: 8c:2d:aa:33:03:e9

Hardware Port: Bluetooth PAN
Device: en4
Ethernet Address: 8c:2d:aa:33:03:ea

Hardware Port: Thunderbolt 1
Device: en2
Ethernet Address: 32:00:1b:25:92:c0
"""

# networksetup as in a public post of 2015 on a MacBook, "List all networking hardware in OSX".
HARDWARE_PORTS_OF_A_MACBOOK = """
Hardware Port: Wi-Fi
Device: en0
Ethernet Address: 6c:40:08:b7:a1:06

Hardware Port: Bluetooth PAN
Device: en3
Ethernet Address: 6c:40:08:b7:a1:07

Hardware Port: Thunderbolt 1
Device: en1
Ethernet Address: 72:00:06:b8:cb:f0

Hardware Port: Thunderbolt 2
Device: en2
Ethernet Address: 72:00:06:b8:cb:f1

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 6e:40:08:7b:1c:00

VLAN Configurations
===================
"""

# bridge0 of github.com/ml-explore/mlx/issues/1903, a Mac mini of 2025; en0 and lo0 of
# stackoverflow.com/questions/29958143.
IFCONFIG = """\
lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384
\toptions=3<RXCSUM,TXCSUM>
\tinet6 ::1 prefixlen 128
\tinet 127.0.0.1 netmask 0xff000000
\tinet6 fe80::1%lo0 prefixlen 64 scopeid 0x1
\tnd6 options=1<PERFORMNUD>
gif0: flags=8010<POINTOPOINT,MULTICAST> mtu 1280
en0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500
\tether 64:76:ba:ae:a3:02
\tinet6 fe80::6676:baff:feae:a302%en0 prefixlen 64 scopeid 0x4
\tinet 172.30.7.47 netmask 0xffff0000 broadcast 172.30.255.255
\tnd6 options=1<PERFORMNUD>
\tmedia: autoselect
\tstatus: active
bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 9000
        options=63<RXCSUM,TXCSUM,TSO4,TSO6>
        ether 36:6a:0f:f5:b0:80
        inet6 fe80::1442:a0bf:3f10:95ba%bridge0 prefixlen 64 secured scopeid 0x12
        inet 10.25.0.1 netmask 0xffffff00 broadcast 10.25.0.255
        Configuration:
                id 0:0:0:0:0:0 priority 0 hellotime 0 fwddelay 0
                maxage 0 holdcnt 0 proto stp maxaddr 100 timeout 1200
                root id 0:0:0:0:0:0 priority 0 ifcost 0 port 0
                ipfilter disabled flags 0x0
        member: en2 flags=3<LEARNING,DISCOVER>
                ifmaxaddr 0 port 11 priority 0 path cost 0
        nd6 options=201<PERFORMNUD,DAD>
        media: autoselect
        status: active
"""

# real-world-systems.com/docs/route.1.html
ROUTE = """\
   route to: 192.0.43.10
destination: default
       mask: default
    gateway: 192.168.1.1
  interface: en1
      flags: <UP,GATEWAY,DONE,STATIC,PRCLONING>
 recvpipe  sendpipe  ssthresh  rtt,msec    rttvar  hopcount      mtu     expire
       0         0         0         0         0         0      1500         0
"""

# apple.stackexchange.com/questions/81581, a MacBook Pro with 2 GB.
VM_STAT_INTEL = """\
Mach Virtual Memory Statistics: (page size of 4096 bytes)
Pages free:                               90518.
Pages active:                            205479.
Pages inactive:                           32417.
Pages speculative:                       134461.
Pages wired down:                         61009.
"Translation faults":                  26323651.
"""

# sweepformac.com/guides/mac-vm-stat-command
VM_STAT_APPLE = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                              123456.
Pages active:                            789012.
Pages inactive:                          345678.
Pages speculative:                        12345.
Pages throttled:                              0.
Pages wired down:                        234567.
Pages purgeable:                          56789.
"""

# This project's own machine.
IP_ADDR = (
    "1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever\n"
    "4: eth0    inet 192.0.2.2/24 brd 192.0.2.255 scope global eth0\\       valid_lft forever\n"
    "7: veth1@if6    inet 10.77.0.1/24 scope global veth1\\       valid_lft forever\n"
)


def test_hardware_ports_by_device() -> None:
    ports = hardware_ports(HARDWARE_PORTS_OF_A_MACBOOK)
    assert ports["en0"] == "Wi-Fi"
    assert ports["bridge0"] == "Thunderbolt Bridge"
    assert hardware_ports(HARDWARE_PORTS_OF_AN_IMAC)["Bluetooth-Modem"] == "Bluetooth DUN"


@pytest.mark.parametrize(
    ("port", "medium"),
    [
        ("Wi-Fi", WIFI),
        ("AirPort", WIFI),
        ("Thunderbolt Bridge", THUNDERBOLT),
        ("Thunderbolt 1", THUNDERBOLT),
        ("Thunderbolt Ethernet Slot 1", ETHERNET),
        ("Ethernet", ETHERNET),
        ("USB 10/100/1000 LAN", ETHERNET),
        ("iPhone USB", None),
        ("", None),
    ],
)
def test_what_carries_a_hardware_port(port: str, medium: str | None) -> None:
    assert medium_of_port(port) == medium


def test_interfaces_of_a_mac() -> None:
    ports = hardware_ports(HARDWARE_PORTS_OF_A_MACBOOK)
    assert interfaces_by_ifconfig(IFCONFIG, ports) == (
        Interface("lo0", "127.0.0.1", "127.0.0.0/8", None),
        Interface("en0", "172.30.7.47", "172.30.0.0/16", WIFI),
        Interface("bridge0", "10.25.0.1", "10.25.0.0/24", THUNDERBOLT),
    )


def test_interfaces_of_linux() -> None:
    assert interfaces_by_ip(IP_ADDR) == (
        Interface("lo", "127.0.0.1", "127.0.0.0/8"),
        Interface("eth0", "192.0.2.2", "192.0.2.0/24"),
        Interface("veth1", "10.77.0.1", "10.77.0.0/24"),
    )


def test_the_interface_of_a_route() -> None:
    assert route_by_bsd(ROUTE) == "en1"
    assert route_by_ip("10.1.1.1 via 192.0.2.1 dev eth0 src 192.0.2.2 uid 0 \n    cache \n") == (
        "eth0"
    )
    assert route_by_ip("10.77.0.2 dev veth1 src 10.77.0.1 uid 0 \n    cache \n") == "veth1"


@pytest.mark.parametrize(
    ("text", "state"),
    [
        # Each as quoted in public threads and tests of other tools.
        ("Firewall is disabled. (State = 0)\n", "off"),
        ("Firewall is enabled. (State = 1) \n", "on"),
        (
            "Firewall is blocking all non-essential incoming connections. (State = 2)\n",
            "blocks all",
        ),
    ],
)
def test_the_firewall_of_a_mac(text: str, state: str) -> None:
    assert firewall_state(text) == state


def test_memory_that_can_be_had() -> None:
    assert available_by_vm_stat(VM_STAT_INTEL) == 4096 * (90518 + 32417 + 134461)
    assert available_by_vm_stat(VM_STAT_APPLE) == 16384 * (123456 + 345678 + 12345)
    meminfo = "MemTotal:       24684096 kB\nMemFree:  1 kB\nMemAvailable:   23970476 kB\n"
    assert available_by_meminfo(meminfo) == 23970476 * 1024


def test_values_of_sysctl() -> None:
    """Format of sysctl(8); the key is that of MLX's documentation of set_wired_limit."""
    text = "machdep.cpu.brand_string: Apple M2 Ultra\niogpu.wired_limit_mb: 0\n"
    assert sysctl_values(text) == {
        "machdep.cpu.brand_string": "Apple M2 Ultra",
        "iogpu.wired_limit_mb": "0",
    }


def test_the_processor_of_linux() -> None:
    assert chip_by_cpuinfo("processor\t: 0\nmodel name\t: AMD EPYC\n") == "AMD EPYC"
    assert chip_by_cpuinfo("processor\t: 0\nBogoMIPS\t: 50.00\n") is None


@pytest.mark.parametrize("text", ["", "command not found", "\x00", "12: 34\n Pages free: many."])
def test_what_cannot_be_read_is_unknown(text: str) -> None:
    assert available_by_vm_stat(text) is None
    assert available_by_meminfo(text) is None
    assert chip_by_cpuinfo(text) is None
    assert route_by_bsd(text) is None
    assert route_by_ip(text) is None
    assert firewall_state(text) is None
    assert hardware_ports(text) == {}
    assert interfaces_by_ifconfig(text, {}) == ()
    assert interfaces_by_ip(text) == ()


def test_addresses_that_are_none_are_left_out() -> None:
    assert interfaces_by_ip("2: eth0    inet 999.0.0.1/24 scope global eth0\n") == ()
    assert interfaces_by_ip("2: eth0    inet 10.0.0.1/99 scope global eth0\n") == ()


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


def test_a_machine_without_any_tool_has_unknown_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_facts, "_said", lambda *command: None)
    monkeypatch.setattr(host_facts, "_text", lambda path: None)
    for platform in ("darwin", "linux"):
        monkeypatch.setattr("sys.platform", platform)
        facts = host_facts.collect()
        assert facts.is_mac == (platform == "darwin")
        assert facts.memory_free is None
        assert facts.wired_limit is None
        assert facts.interfaces == ()
        assert facts.versions["shardmlx"]


def test_a_mac_is_asked_with_its_own_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "sysctl": "machdep.cpu.brand_string: Apple M2 Ultra\niogpu.wired_limit_mb: 57344\n",
        "vm_stat": VM_STAT_APPLE,
        "networksetup": HARDWARE_PORTS_OF_A_MACBOOK,
        "ifconfig": IFCONFIG,
        "route": ROUTE,
        "socketfilterfw": "Firewall is enabled. (State = 1)",
    }
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(host_facts, "_said", lambda *command: answers[Path(command[0]).name])
    facts = host_facts.collect()
    assert facts.chip == "Apple M2 Ultra"
    assert facts.wired_limit == 56 << 30
    assert facts.memory_free == 16384 * (123456 + 345678 + 12345)
    assert facts.firewall == "on"
    assert [each.medium for each in facts.interfaces] == [None, WIFI, THUNDERBOLT]
    assert host_facts.interface_to("192.0.43.10") == "en1"
