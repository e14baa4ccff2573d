"""What is said of hosts that give no answer, by the words of ssh and by a second login."""

from __future__ import annotations

import pytest

from shardmlx.hosts.login_faults import Trial, asks_for_a_trial, login_problem, silence
from shardmlx.hosts.remote_login import WORD_OF_TRIAL, Login, RemoteLogin

REMOTE = RemoteLogin(agent=("ssh",), python="/v/bin/python", daemon="/v/bin/prted")
LOGIN = Login("a@mini")

CONNECTED = "debug1: Connection established.\r\n"
ACCEPTED = (
    CONNECTED + "debug1: Server accepts key: /h/.ssh/id_ed25519 ED25519 SHA256:x explicit\r\n"
)
LET_IN = ACCEPTED + 'Authenticated to mini ([10.0.0.2]:22) using "publickey".\r\n'
TOO_OPEN = """\
@         WARNING: UNPROTECTED PRIVATE KEY FILE!          @
Permissions 0644 for '/h/.ssh/id_ed25519' are too open.
This private key will be ignored.
Load key "/h/.ssh/id_ed25519": bad permissions
a@mini: Permission denied (publickey)."""
TOO_MANY = """\
Received disconnect from 10.77.0.2 port 22:2: Too many authentication failures
Disconnected from 10.77.0.2 port 22"""


# Messages of OpenSSH 9.2 on this project's machine, and on macOS as in public threads.
@pytest.mark.parametrize(
    ("status", "said", "problem", "remedy"),
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
        (255, TOO_OPEN, "Permissions 0644 for '/h/", "chmod 600 /h/.ssh/id_ed25519"),
        (
            255,
            "Bad owner or permissions on /h/.ssh/config",
            "permissions on /h/.ssh/config",
            "chmod 600 /h/.ssh/config",
        ),
        (255, TOO_MANY, "Too many authentication failures", "'Host mini', 'IdentityFile FILE'"),
        (
            255,
            'sign_and_send_pubkey: signing failed for ED25519 "k" from agent: agent refused '
            "operation\na@mini: Permission denied (publickey).",
            "agent refused operation",
            "ssh-add -l",
        ),
        (
            255,
            "/h/.ssh/config: line 3: Bad configuration option: usekeychain\r\n"
            "/h/.ssh/config: terminating, 1 bad configuration options",
            "line 3: Bad configuration option: usekeychain",
            "correct that line",
        ),
        (255, "Cannot execute command-line and remote command.", "remote", "RemoteCommand"),
        (255, "Connection closed by 10.0.0.7\r\n", "(Connection closed by 10.0.0.7)", "ssh a@mini"),
        (127, "zsh:1: no such file or directory", "no Python at /v/bin/python", "--python"),
        (126, "bash: /v/bin/python: Permission denied", "no Python at", "--python"),
        (1, "", "(status 1)", "ssh a@mini /v/bin/python --version"),
    ],
)
def test_a_host_that_does_not_answer(status: int, said: str, problem: str, remedy: str) -> None:
    found = login_problem("mini", status, said, LOGIN, REMOTE)
    assert found.host == "mini"
    assert problem in found.problem
    assert remedy in found.remedy


def test_the_port_stands_in_what_is_to_be_typed() -> None:
    login = Login("a@mini", 2222)
    denied = "a@mini: Permission denied (publickey)."
    assert login_problem("mini", 255, denied, login, REMOTE).remedy == "ssh-copy-id -p 2222 a@mini"


def test_a_key_that_the_host_takes_and_that_is_locked_needs_no_copy() -> None:
    """A passphrase, or an agent that refuses: ssh itself says only that it was denied."""
    denied = "a@mini: Permission denied (publickey)."
    locked = Trial(ACCEPTED + denied, "", ended=True)
    found = login_problem("mini", 255, denied, LOGIN, REMOTE, locked)
    assert found.remedy == "ssh-add /h/.ssh/id_ed25519"
    unknown = Trial(CONNECTED + denied, "", ended=True)
    found = login_problem("mini", 255, denied, LOGIN, REMOTE, unknown)
    assert found.remedy == "ssh-copy-id a@mini"


def test_the_login_of_a_jump_is_not_that_of_the_host() -> None:
    """With -v, the ssh of a ProxyJump tells of its own login, before that of the host."""
    jump = "debug1: Executing proxy command: exec ssh -v -W '[mini]:22' gate\r\n" + LET_IN
    denied = "a@mini: Permission denied (publickey)."
    outside = Trial(jump + denied, "", ended=True)
    assert not outside.is_let_in
    assert login_problem("mini", 255, denied, LOGIN, REMOTE, outside).remedy == "ssh-copy-id a@mini"
    inside = Trial(
        jump + 'Authenticated to mini (via proxy) using "publickey".\r\n', "", ended=True
    )
    assert inside.is_let_in


@pytest.mark.parametrize(
    ("status", "said", "asks"),
    [
        (None, "", True),
        (0, "", True),
        (1, "anything", True),
        (255, "a@mini: Permission denied (publickey).", True),
        (255, "", True),
        (255, "ssh: connect to host mini port 22: Connection refused", False),
        (255, TOO_OPEN, False),
    ],
)
def test_ssh_is_asked_again_where_its_words_leave_something_open(
    status: int | None, said: str, asks: bool
) -> None:
    assert asks_for_a_trial(status, said) is asks


@pytest.mark.parametrize("status", [0, 1, 127, 255])
def test_a_login_that_runs_no_command_is_that_of_its_scripts(status: int) -> None:
    replaced = Trial(LET_IN, "Welcome!\n", ended=True)
    found = login_problem("mini", status, "Welcome!\n", LOGIN, REMOTE, replaced)
    assert found.problem == "its login runs no command (Welcome!)"
    assert "~/.zshenv" in found.remedy


@pytest.mark.parametrize(
    ("trial", "problem", "remedy"),
    [
        (None, "no answer within 20 s", "ssh a@mini"),
        (Trial("", "", ended=False), "no answer within 20 s", "whether it is on"),
        (Trial(ACCEPTED, "", ended=False), "waits for a key", "ssh-add -l"),
        (Trial(LET_IN, "", ended=False), "its login runs no command", "~/.zshenv"),
        (Trial(LET_IN, "", ended=True), "its login runs no command", "~/.zshenv"),
        (Trial(LET_IN, WORD_OF_TRIAL, ended=True), "from /v/bin/python", "/v/bin/python --version"),
        (
            Trial(CONNECTED + "a@mini: Permission denied (publickey).", "", ended=True),
            "Permission denied",
            "ssh-copy-id",
        ),
    ],
)
def test_a_silent_host_is_told_by_how_far_a_second_login_comes(
    trial: Trial | None, problem: str, remedy: str
) -> None:
    found = silence("mini", LOGIN, REMOTE, trial)
    assert problem in found.problem
    assert remedy in found.remedy
