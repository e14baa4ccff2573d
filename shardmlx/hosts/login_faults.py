"""Says why a host gave no answer, by the words of ssh and by a second login. No MLX, no MPI."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from shardmlx.errors import LOCAL_NETWORK
from shardmlx.hosts.findings import Finding
from shardmlx.hosts.remote_login import WORD_OF_TRIAL, Login, RemoteLogin

SECONDS_TO_ANSWER = 20.0
"""Seconds for all hosts together: an ssh login, and the start of a Python from a cold disk."""

SECONDS_FOR_TRIALS = 6.0
"""Seconds for the second login on all silent hosts: more than ssh needs to connect."""

_SSH_FAILED = 255
_NOT_FOUND = (126, 127)
_DENIED = "Permission denied"
_LET_IN = "Authenticated to "

_SSH_SAYS = (
    ("Could not resolve", "write its address, or NAME.local, into the hostfile or /etc/hosts"),
    (
        "Connection refused",
        "turn on Remote Login there (System Settings, General, Sharing), or install openssh-server",
    ),
    ("timed out", "see that it is on, awake, and in the same network, and see its firewall"),
    (
        "No route to host",
        f"see that it is on and in the same network: cable, Wi-Fi, address ({LOCAL_NETWORK})",
    ),
    ("IDENTIFICATION HAS CHANGED", "if it is new: ssh-keygen -R {host}, then log in once by hand"),
    ("are too open", "chmod 600 {file}"),
    ("Bad owner or permissions on", "chmod 600 {file}"),
    ("Bad configuration option", "correct that line"),
    ("remote command", "remove RemoteCommand from what ~/.ssh/config says of {host}"),
    (
        "Too many authentication failures",
        "name its key in ~/.ssh/config: 'Host {host}', 'IdentityFile FILE', 'IdentitiesOnly yes'",
    ),
    ("refused operation", "unlock the agent of your keys (ssh-add -l), and confirm where it asks"),
    (_DENIED, "ssh-copy-id {login}"),
    ("Host key verification failed", "log in once by hand: {agent} {login}"),
)
"""Words of ssh's message, and the remedy: the first match counts."""

_LOGIN_SCRIPTS = "~/.zshenv, ~/.bashrc, ..."


@dataclass(frozen=True, slots=True)
class Trial:
    """A second login, that only says a word: the ``account`` of ssh, what the host ``said``, and
    whether ssh ``ended``."""

    account: str
    said: str
    ended: bool

    @property
    def runs_commands(self) -> bool:
        return WORD_OF_TRIAL in self.said

    @property
    def is_let_in(self) -> bool:
        jumps = "Executing proxy command" in self.account  # whose ssh tells of its own login, too
        logins = [line for line in self.account.splitlines() if line.startswith(_LET_IN)]
        return any("(via proxy)" in line or not jumps for line in logins)

    @property
    def is_connected(self) -> bool:
        return "Connection established" in self.account

    @property
    def unusable_key(self) -> str | None:
        """The key that the host takes, and that ssh cannot use."""
        found = re.search(r"Server accepts key: (\S+)", self.account.rpartition(_LET_IN)[2])
        return found[1] if found is not None and self.ended and not self.is_let_in else None


def try_login(login: Login, remote: RemoteLogin) -> Trial:
    """Log in with ssh once more, within ``SECONDS_FOR_TRIALS``."""
    try:
        done = subprocess.run(
            remote.trial(login),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS_FOR_TRIALS,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        account, said = (
            text.decode(errors="replace") if isinstance(text, bytes) else text or ""
            for text in (error.stderr, error.stdout)
        )
        return Trial(account, said, ended=False)
    return Trial(done.stderr, done.stdout, ended=True)


def asks_for_a_trial(status: int | None, said: str) -> bool:
    """Return whether a second login may tell more of a host that ended with a ``status``, None if
    its login still runs: not where ssh has named a cause that is certain."""
    certain = (words for words, _ in _SSH_SAYS if words != _DENIED)
    return status != _SSH_FAILED or not any(words in said for words in certain)


def silence(host: str, login: Login, remote: RemoteLogin, trial: Trial | None) -> Finding:
    """Return why a host has said nothing in time; there is no ``trial`` with another agent."""
    nothing = f"no answer within {SECONDS_TO_ANSWER:g} s"
    by_hand = f"{remote.agent[0]} {login}"
    if trial is None or (not trial.is_connected and not trial.ended):
        return Finding(host, nothing, f"see whether it is on, and try: {by_hand}")
    if trial.runs_commands:
        problem = f"{nothing} from {remote.python}, though the login works"
        return Finding(host, problem, f"try {by_hand} {remote.python} --version")
    if trial.is_let_in:
        return login_script_fault(host, trial)
    if not trial.ended:
        problem = f"no login within {SECONDS_TO_ANSWER:g} s: ssh has connected, and waits for a key"
        remedy = (
            "confirm it where the agent of your keys asks (a touch, a finger, a window), or see "
            f"whether that agent answers: ssh-add -l; then try: {by_hand}"
        )
        return Finding(host, problem, remedy)
    return login_problem(host, _SSH_FAILED, trial.account, login, remote, trial)


def login_script_fault(host: str, trial: Trial) -> Finding:
    """Return the finding of a login that runs none of the commands it is given."""
    last = _last_line(trial.said)
    said = f" ({last})" if last else ""
    remedy = f"see exit, exec and questions in its login scripts ({_LOGIN_SCRIPTS}), and its shell"
    return Finding(host, f"its login runs no command{said}", remedy)


def login_problem(
    host: str,
    status: int,
    said: str,
    login: Login,
    remote: RemoteLogin,
    trial: Trial | None = None,
) -> Finding:
    """Return why a host has given no answer, by its ssh's status and message, and a ``trial``."""
    agent, python = remote.agent[0], remote.python
    if trial is not None and trial.is_let_in and not trial.runs_commands:
        return login_script_fault(host, trial)
    if status == _SSH_FAILED:
        return _no_login(host, said, login, remote, trial)
    if status in _NOT_FOUND:
        remedy = "install it there, or name another one: --python, or for this host alone "
        remedy += "# python=/PATH/bin/python in the hostfile"
        return Finding(host, f"no Python at {python}", remedy)
    problem = f"cannot run Python ({_last_line(said) or f'status {status}'})"
    return Finding(host, problem, f"try {agent} {login} {python} --version")


def _no_login(
    host: str, said: str, login: Login, remote: RemoteLogin, trial: Trial | None
) -> Finding:
    lines = [line.strip() for line in said.splitlines() if not line.startswith("debug")]
    reason = _last_line("\n".join(lines)) or "no reason given"
    remedy = "try {agent} {login}"
    file = ""
    for words, known in _SSH_SAYS:
        found = next((line for line in lines if words in line), None)
        if found is not None:
            remedy = known
            # Later lines say less, but for the key of a host.
            reason = reason if "HAS CHANGED" in words else found
            file = _named_file(found)
            break
    key = trial.unusable_key if trial is not None else None
    if key is not None and _DENIED in reason:
        reason = f"{reason} It knows the key {key}, which cannot be used here"
        remedy = f"ssh-add {key}"
    text = remedy.format(host=host, login=login, agent=remote.agent[0], file=file)
    return Finding(host, f"no login ({reason})", text)


def _named_file(line: str) -> str:
    """Return the file of which a line of ssh says that others may read or write it."""
    found = re.search(r"'([^']+)'|permissions on (\S+)", line)
    return "" if found is None else found[1] or found[2]


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
