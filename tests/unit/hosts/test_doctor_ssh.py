"""``doctor --ssh``: what is asked of hosts before mpirun, and what is said of those that fail."""

from __future__ import annotations

import json
import socket
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest

import shardmlx
from shardmlx.hosts import probe_script
from shardmlx.hosts.doctor_ssh import (
    ProbedHost,
    addresses_of,
    find,
    listed_hosts,
    probe_hosts,
    report_text,
)
from shardmlx.hosts.mpirun import mpirun_path
from shardmlx.hosts.reachability import Probe
from shardmlx.hosts.remote_login import RemoteLogin
from shardmlx.main import main
from testbed.jobs import patience
from tests.helpers.doctor import VERSIONS, answer, interface

REMOTE = RemoteLogin(agent=("ssh",), python="/v/bin/python", daemon="/v/bin/prted")

ME = socket.gethostname()


def agent_at(path: Path, script: str = "") -> str:
    """An agent that runs on this machine what it is given for another, after ``script``."""
    path.write_text(f'#!/bin/sh\nhost=$1\nshift\n{script}\nexec sh -c "$*"\n')
    path.chmod(0o755)
    return str(path)


def hosts_at(path: Path, *names: str) -> str:
    path.write_text("".join(f"{name} slots=1\n" for name in names))
    return str(path)


def probed(agent: str, hostfile: str, python: str = sys.executable) -> tuple[Any, list[str], str]:
    """Return the hosts, their faults as lines, and what is printed."""
    remote = RemoteLogin.of(agent, python, mpirun_path())
    hosts, findings = probe_hosts(listed_hosts(hostfile), remote)
    return hosts, [*map(str, findings)], report_text(hosts, findings, mpirun_path(), remote)


def test_one_machine_that_stands_there_twice(tmp_path: Path) -> None:
    """Both are this machine; the second goes by an agent, and by a name that only it knows. But for
    that all is well."""
    connection = "export SSH_CONNECTION='127.0.0.1 4000 127.0.0.1 22'; echo Welcome!"
    agent = agent_at(tmp_path / "agent", connection)
    hostfile = hosts_at(tmp_path / "hosts", ME, "mini.invalid")
    (here, mini), faults, text = probed(agent, hostfile)
    (twice,) = faults
    assert twice.startswith("mini.invalid: ")
    assert (here.is_local, mini.is_local) == (True, False)
    assert here.versions["shardmlx"] == mini.versions["shardmlx"] == shardmlx.__version__
    assert (here.errors, mini.errors) == ({"mini.invalid": None}, {ME: None})
    assert "without a password" in text
    assert mini.reached == "127.0.0.1"


def test_a_host_that_ssh_cannot_reach_and_one_that_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = patience(3.0)  # in which this machine answers
    monkeypatch.setattr("shardmlx.hosts.login_faults.SECONDS_TO_ANSWER", seconds)
    script = (
        '[ "$host" = gone.invalid ] && { echo "ssh: connect to host gone.invalid port 22: '
        'Connection refused" >&2; exit 255; }\n'
        '[ "$host" = silent.invalid ] && sleep 600\n'
    )
    hostfile = hosts_at(tmp_path / "hosts", ME, "gone.invalid", "silent.invalid")
    began = time.monotonic()
    _, (refused, silent), text = probed(agent_at(tmp_path / "agent", script), hostfile)
    assert time.monotonic() - began < patience(30)
    assert refused.startswith("gone.invalid: no login (ssh: connect to host gone.invalid port")
    silence = f"silent.invalid: no answer within {seconds:g} s: see whether it is on, and try"
    assert silent.startswith(silence)
    assert "unknown" in text


def test_an_agent_and_a_python_that_are_not_there(tmp_path: Path) -> None:
    # The machine where mpirun is called is asked, though it runs no rank.
    hostfile = hosts_at(tmp_path / "hosts", "mini.invalid")
    _, faults, _ = probed(str(tmp_path / "nothing"), hostfile, "/nowhere/python")
    assert f"{ME}: cannot run /nowhere/python (No such file or directory): see --python" in faults
    assert faults[-1].startswith(f"mini.invalid: cannot run {tmp_path}/nothing (")


def asked(name: str, **changes: Any) -> ProbedHost:
    said = answer(name=name, **changes)
    return ProbedHost(name, name, is_local=False, address="10.0.0.1", answer=said)


def test_versions_that_differ_and_hosts_that_cannot_connect() -> None:
    other = asked("b", versions={**VERSIONS, "mlx": "0.30.0"})
    other.errors = {"a": "refused"}
    mlx, connection = (str(each) for each in find([asked("a"), other], REMOTE))
    assert mlx.startswith("mlx differs: 0.32.4 on a, 0.30.0 on b")
    assert connection.startswith("b: cannot connect to a (refused): let Python through")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("no route to host", "bring both into one network"),  # says Linux
        ("host is down", "bring both into one network"),  # says macOS
        ("no answer within 6 s", "let Python through the firewall of a"),
    ],
)
def test_another_network_and_a_firewall_have_remedies_of_their_own(error: str, remedy: str) -> None:
    other = asked("b")
    other.errors = {"a": error}
    (connection,) = (str(each) for each in find([asked("a"), other], REMOTE))
    assert connection.startswith(f"b: cannot connect to a ({error}): {remedy}")


def test_where_one_host_finds_another() -> None:
    here = ProbedHost("here", "here", is_local=True)
    known = asked("known")
    alias = asked("alias", ssh="10.25.0.1 4000 10.25.0.2 22")
    alias.address = None
    link_local = asked("far", ssh="fe80::1%en0 4000 fe80::2%en0 22")
    link_local.address = None
    assert addresses_of(known, here) == ["10.0.0.1"]
    assert addresses_of(alias, known) == ["10.25.0.2"]
    assert addresses_of(here, alias) == ["10.25.0.1"]
    # Open MPI uses IPv4.
    assert addresses_of(link_local, known) == []
    assert addresses_of(here, link_local) == []


def test_where_ssh_goes_by_another_machine_the_own_addresses_count() -> None:
    """The other end of a login through a ProxyJump is that machine's. What both have is no way."""
    docker = interface("docker0", "172.17.0.1")
    own = [*interface("en0", "10.25.0.1"), *interface("en1", "192.168.1.5"), *docker]
    here = ProbedHost("here", "here", is_local=True, answer=answer(interfaces=own))
    jumped = asked("far", ssh="10.9.9.9 4000 10.25.0.2 22", interfaces=docker)
    jumped.address = None
    assert addresses_of(here, jumped) == ["10.25.0.1", "192.168.1.5"]
    direct = asked("near", ssh="10.25.0.1 4000 10.25.0.2 22")
    assert addresses_of(here, direct) == ["10.25.0.1"]


def test_who_listens_can_be_connected_to_and_who_does_not_refuses() -> None:
    with probe_script.listen() as listener:
        port = listener.getsockname()[1]
        assert probe_script.connect_errors([("127.0.0.1", port)]) == [None]
    assert probe_script.connect_errors([("127.0.0.1", port)]) == ["refused"]
    assert probe_script.connect_errors([]) == []


def test_a_talk_ends_what_it_has_started(tmp_path: Path) -> None:
    agent = agent_at(tmp_path / "agent", "sleep 60 & echo $! > " + str(tmp_path / "pid"))
    probe = Probe([agent, "host", "sleep 60"])
    pid = tmp_path / "pid"
    while not pid.exists() or not pid.read_text().strip():
        time.sleep(0.01)
    probe.close()
    end = time.monotonic() + 10
    while Path(f"/proc/{pid.read_text().strip()}/exe").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid.read_text().strip()}/exe").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ssh"], "--ssh has no hosts: give --hostfile F, or --find instead"),
        (["--ssh-command", "ssh"], "--ssh-command is 'ssh': it is for --ssh and --find"),
        (
            ["--ssh", "--hostfile", "F", "--write-hostfile", "G"],
            "--write-hostfile measures under mpirun: leave out --ssh",
        ),
    ],
)
def test_bad_flags_are_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "error" in each]
    assert message in line


def test_json_has_what_the_hosts_have_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor = ["doctor", "--ssh", "--hostfile", hosts_at(tmp_path / "hosts", ME)]
    assert main([*doctor, "--json", "-"]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert "nothing to warn of" in captured.err
    (host,) = found["hosts"]
    assert (found["version"], found["command"], found["warnings"]) == (1, "doctor", [])
    assert (host["name"], host["is_local"], host["answers"]) == (ME, True, True)
    assert host["facts"]["memory"] == psutil.virtual_memory().total
    assert host["versions"]["mlx"] == version("mlx")
    assert found["python"] == sys.executable


def test_warnings_fail_only_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    doctor = ["doctor", "--ssh", "--hostfile", hosts_at(tmp_path / "hosts", ME)]
    assert main([*doctor, "--strict"]) == 0
    assert "nothing to warn of" in capsys.readouterr().out
    doctor += ["--python", "/nowhere/python"]
    assert main(doctor) == 0
    assert ": see --python\n" in capsys.readouterr().out
    assert main([*doctor, "--strict"]) == 1
