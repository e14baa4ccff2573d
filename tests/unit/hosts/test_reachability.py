"""Which hosts can run ranks, and what is said of those that cannot."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import shardmlx
from shardmlx.hosts import probe_script
from shardmlx.hosts.host_faults import HostCheck
from shardmlx.hosts.mpirun import mpirun_path
from shardmlx.hosts.reachability import check_hosts, is_local
from shardmlx.hosts.remote_login import Login, RemoteLogin
from tests.helpers.doctor import VERSIONS, answer

REMOTE = RemoteLogin(
    agent=("ssh",),
    python="/v/bin/python",
    daemon="/v/bin/prted",
    directory="/work",
    files=("/work/hosts",),
)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "127.0.0.1",
        socket.gethostname(),
        socket.gethostname().split(".")[0].upper() + ".local",
    ],
)
def test_names_of_this_machine(host: str) -> None:
    assert is_local(host)


@pytest.mark.parametrize("host", ["another-machine.local", "192.0.2.200", "2001:db8::1"])
def test_names_of_others(host: str) -> None:
    assert not is_local(host)


@pytest.mark.parametrize(
    ("host", "address", "is_own"),
    [
        ("studio", "127.0.0.1", True),  # an alias, or a Mac that DHCP has renamed since
        ("mini", "192.0.2.200", False),
        ("MYSELF", "192.0.2.200", True),  # an old address in a cache
        ("myself.elsewhere", "192.0.2.200", False),
        ("myself.local", None, True),
        ("mini.local", None, False),
    ],
)
def test_a_name_is_this_machine_s_by_its_addresses(
    host: str, address: str | None, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(name: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if address is None:
            raise socket.gaierror(name)
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (address, 0))]

    monkeypatch.setattr("socket.getaddrinfo", look_up)
    monkeypatch.setattr("socket.gethostname", lambda: "myself.home")
    assert is_local(host) == is_own


def test_ssh_is_asked_to_run_one_short_line_and_the_program_follows_on_stdin() -> None:
    *words, question = REMOTE.command(Login("anna@mini.lan", 2222))
    assert words[:2] == ["ssh", "-T"]
    # mpirun gives the port after the name, too.
    assert words[2:] == [
        *("-o", "BatchMode=yes", "-o", "ConnectTimeout=5"),
        *("anna@mini.lan", "-p", "2222"),
    ]
    assert question == (
        "/v/bin/python -c 'import json,sys;exec(json.loads(next(filter(str.strip,sys.stdin))))' "
        "/v/bin/prted /work mlx-cpu,mlx-cuda-12,mlx-cuda-13 /v/bin/python '' "
        "/work/hosts"
    )
    other = RemoteLogin(agent=("./agent", "-v"), python="python", daemon="prted")
    assert other.command(Login("mini"))[:3] == ["./agent", "-v", "mini"]


ANSWER = """\
#!/bin/sh
cd {directory}; touch $1
while ! [ -e a ] || ! [ -e b ]; do sleep 0.05; done
printf '\\033]0;mini\\a'
cat $1.json
echo Welcome!
"""
"""A login whose scripts print a title without a line end, as many do."""


def test_all_are_asked_at_once_and_an_older_version_is_named(tmp_path: Path) -> None:
    """Each of the two waits until the other has been asked. This machine is asked without it."""
    agent = tmp_path / "agent"
    agent.write_text(ANSWER.format(directory=tmp_path))
    agent.chmod(0o755)
    new = {**VERSIONS, "shardmlx": shardmlx.__version__}
    for host, versions in (("a", new), ("b", new), ("old", {**new, "shardmlx": "0.0.9"})):
        said = probe_script.MARK + json.dumps(answer(versions=versions))
        (tmp_path / f"{host}.json").write_text(said)
    remote = RemoteLogin.of(str(agent), sys.executable, mpirun_path())
    logins = {host: Login(host) for host in ("a", "b", "localhost")}
    checked = check_hosts(logins, remote)
    assert replace(checked, notes=()) == HostCheck()
    assert "macOS arm64 (a and b), " in checked.notes[0].problem
    assert "0.0.9" in check_hosts({"old": Login("old")}, remote).findings["old"].problem


def test_launchers_that_differ_are_told_of(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text(ANSWER.format(directory=tmp_path))
    agent.chmod(0o755)
    for host, openmpi in (("a", "5.0.11"), ("b", "5.0.10")):
        versions = {**VERSIONS, "shardmlx": shardmlx.__version__, "openmpi": openmpi}
        said = probe_script.MARK + json.dumps(answer(versions=versions))
        (tmp_path / f"{host}.json").write_text(said)
    remote = RemoteLogin.of(str(agent), sys.executable, mpirun_path())
    checked = check_hosts({"a": Login("a"), "b": Login("b")}, remote)
    assert checked.findings == {}
    assert any("openmpi differs: " in note.problem for note in checked.notes)


def test_a_host_has_its_own_python_with_the_daemon_beside_it_or_at_the_place_of_all() -> None:
    pythons = {"box": "/opt/y/bin/python"}
    remote = replace(REMOTE, pythons=pythons)
    assert remote.to("mac") is remote
    assert remote.to("box").daemon == "/opt/y/bin/prted"
    assert remote.to("box").command(None)[0] == "/opt/y/bin/python"
    assert replace(remote, place="/tmp/l", daemon="/tmp/l/bin/prted").to("box").daemon == (
        "/tmp/l/bin/prted"
    )


def test_rank_0_must_find_the_files_that_it_reads(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.touch()
    missing = tmp_path / "missing"
    files = [str(there), str(missing)]
    remote = RemoteLogin.of(None, sys.executable, mpirun_path(), files)
    found = check_hosts({"localhost": Login("localhost")}, remote).findings["localhost"]
    assert found.problem == f"has no {missing}, which rank 0 reads there"
