"""``doctor --find``: machines that announce ssh, the network that joins them, the hostfile."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from shardmlx.hosts.doctor_find import fastest_links, others_of
from shardmlx.hosts.doctor_hostfile import found_hostfile
from shardmlx.hosts.doctor_ssh import ProbedHost, addresses_of, join_hosts, probe_hosts
from shardmlx.hosts.host_facts import Interface
from shardmlx.hosts.mpirun import mpirun_path
from shardmlx.hosts.remote_login import RemoteLogin
from shardmlx.main import main
from shardmlx.planning.facts.chips import as_macs
from shardmlx.planning.facts.hostfile import read_hostfile
from tests.helpers.doctor import GIB, facts

ME = socket.gethostname()

LOOPBACK = Interface("lo0", "127.0.0.1", "127.0.0.0/8")


def cable(last: int) -> Interface:
    return Interface("bridge0", f"169.254.7.{last}", "169.254.0.0/16", "Thunderbolt")


def wifi(last: int, name: str = "en0") -> Interface:
    return Interface(name, f"192.168.1.{last}", "192.168.1.0/24", "Wi-Fi")


def ethernet(last: int, network: str = "192.168.1") -> Interface:
    return Interface("en1", f"{network}.{last}", f"{network}.0/24", "Ethernet")


def docker() -> Interface:
    return Interface("docker0", "172.17.0.1", "172.17.0.0/16", "virtual")


def test_this_machine_and_names_that_cannot_be_typed_are_left_out() -> None:
    announced = {
        "studio.local": ["192.168.1.7", "169.254.7.2"],
        "renamed.local": ["192.168.1.5"],
        f"{ME}.local": ["192.168.9.9"],
        "silent.local": [],
        "-oProxyCommand=true": ["192.168.1.66"],
    }
    assert others_of(announced, own={"127.0.0.1", "192.168.1.5"}) == {
        "192.168.1.66": "192.168.1.66",
        "studio.local": "192.168.1.7",
    }


@pytest.mark.parametrize(
    ("hosts", "addresses"),
    [
        ([[wifi(1), cable(1)], [wifi(2), cable(2)]], ["169.254.7.1", "169.254.7.2"]),
        # One has no cable: all go by what all have.
        ([[wifi(1), cable(1)], [cable(2), wifi(2)], [wifi(3)]], [f"192.168.1.{n}" for n in "123"]),
        # In one network a machine may be twice.
        ([[wifi(1), ethernet(4)], [wifi(2), ethernet(5)]], ["192.168.1.4", "192.168.1.5"]),
        # The slower end decides.
        (
            [[ethernet(1), ethernet(1, "10.0.0")], [wifi(2), ethernet(2, "10.0.0")]],
            ["10.0.0.1", "10.0.0.2"],
        ),
        ([[docker(), wifi(1)], [docker(), wifi(2)]], ["192.168.1.1", "192.168.1.2"]),
        ([[LOOPBACK, wifi(1)], [LOOPBACK, ethernet(1, "10.0.0")]], []),
        ([[wifi(1), cable(1)]], []),
        ([], []),
    ],
)
def test_the_fastest_network_is_one_that_all_share(
    hosts: list[list[Interface]], addresses: list[str]
) -> None:
    assert [each.address for each in fastest_links(hosts)] == addresses


def asked(name: str, *interfaces: Interface) -> ProbedHost:
    return ProbedHost(name, name, is_local=False, machine=facts(interfaces=(LOOPBACK, *interfaces)))


def test_hosts_with_a_choice_of_networks_go_by_address_and_others_by_name() -> None:
    joined = [asked("a", wifi(1), cable(1)), asked("b.local", wifi(2), cable(2))]
    join_hosts(joined)
    assert [host.login for host in joined] == ["169.254.7.1", "169.254.7.2"]
    assert addresses_of(joined[1], joined[0]) == ["169.254.7.2"]
    named = [asked("a", wifi(1)), asked("b.local", wifi(2))]
    join_hosts(named)
    assert [host.login for host in named] == ["a", "b.local"]
    assert [host.link for host in named] == [wifi(1), wifi(2)]
    named[1].login = "192.168.1.2"  # a name that this machine cannot look up
    join_hosts(named)
    assert [host.login for host in named] == ["192.168.1.1", "192.168.1.2"]
    apart = [asked("a", wifi(1)), asked("b.local", cable(2))]
    join_hosts(apart)
    assert [(host.login, host.link) for host in apart] == [("a", None), ("b.local", None)]


def test_a_name_that_nobody_knows_is_asked_at_the_address_that_it_announced(
    tmp_path: Path,
) -> None:
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\n[ "$1" = 127.0.0.9 ] && shift && exec sh -c "$*"\n')
    agent.chmod(0o755)
    mini = ProbedHost("mini.invalid", "mini.invalid", is_local=False, announced="127.0.0.9")
    gone = ProbedHost("gone.invalid", "gone.invalid", is_local=False, announced="127.0.0.8")
    remote = RemoteLogin.of(str(agent), sys.executable, mpirun_path())
    hosts, _ = probe_hosts([mini, gone], remote, found=True)
    assert [(host.name, host.able) for host in hosts] == [
        (ME, True),
        ("mini.invalid", True),
        ("gone.invalid", False),
    ]
    assert hosts[0].is_local
    assert mini.login == "127.0.0.9"
    assert mini.machine is not None
    assert mini.machine.memory is not None


def test_plans_and_jobs_read_what_was_found(tmp_path: Path) -> None:
    hosts = {
        "169.254.7.1": facts(),
        "169.254.7.2": facts(chip="Apple M4", memory=16 * GIB, wired_limit=14 * GIB),
        "pc.local": facts(chip="AMD EPYC", memory=23 * GIB, memory_limit=8 * GIB),
        "old.local": None,
        "spark.local": facts(chip="NVIDIA GB10", memory=119 * GIB, wired_limit=None),
    }
    remarks = {host: f"mac{n}.local over bridge0 (Thunderbolt)" for n, host in enumerate(hosts)}
    path = tmp_path / "hosts"
    path.write_text(found_hostfile(hosts, remarks, "2026-11-26"))
    assert "kind=apple-m2-ultra, mac0.local over bridge0 (Thunderbolt)\n" in path.read_text()
    studio, mini, server, old, spark = read_hostfile(path)
    assert (studio.host, studio.slots, studio.kind) == ("169.254.7.1", 1, "apple-m2-ultra")
    assert [each.wired for each in as_macs([studio, mini])] == [48 * GIB, 14 * GIB]
    assert studio.memory == 64 * GIB
    assert studio.flops == pytest.approx(27.2e12, rel=1e-2)
    assert (mini.wired, mini.link) == (14 * GIB, None)
    assert (server.memory, server.flops, server.kind) == (8 * GIB, None, "amd-epyc")
    assert (old.host, old.memory, old.kind) == ("old.local", None, None)
    assert (spark.memory, spark.flops, spark.kind) == (119 * GIB, 125e12, "nvidia-gb10")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--find", "--hostfile", "F"], "--find asks the network for hosts: leave out --hostfile"),
        (["--find", "--write-hostfile", "THERE"], "exists: remove it, or give another name"),
    ],
)
def test_bad_flags_are_refused_before_the_network_is_asked(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").touch()
    places = {"THERE": str(tmp_path / "hosts")}
    assert main(["doctor", *(places.get(each, each) for each in arguments)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
