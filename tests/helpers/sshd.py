"""A real sshd on each host of a lab, where the first host logs in with its key."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import SkipTest

from testbed.hosts import HOME, TMP, Lab
from testbed.jobs import patience

_PROGRAMS = {"sshd": "openssh-server", "ssh": "openssh-client", "fish": "fish", "tcsh": "tcsh"}

_CONFIG = f"""\
HostKey {TMP}/hostkey
AuthorizedKeysFile {HOME}/.ssh/authorized_keys
PidFile {TMP}/sshd.pid
PermitRootLogin yes
PermitUserEnvironment yes
StrictModes no
UsePAM no
PrintMotd no
"""

_USERS = f"""\
root:x:0:0:root:{HOME}:{{shell}}
sshd:x:997:997:sshd:/run/sshd:/usr/sbin/nologin
"""

_START = f"""\
mount -t tmpfs tmpfs /run && mkdir -p /run/sshd && chmod 755 /run/sshd
exec $(command -v sshd) -f {TMP}/sshd_config -E {TMP}/sshd.log
"""


def require() -> None:
    """Skip the test where a program is not installed."""
    lacking = [package for name, package in _PROGRAMS.items() if shutil.which(name) is None]
    if lacking:
        raise SkipTest(f"apt-get install {' '.join(lacking)}")


def give_shell(lab: Lab, host: str, shell: str) -> None:
    """Give the user of a host a login shell."""
    lab.replace(host, Path("/etc/passwd"), _USERS.format(shell=shell))


@contextmanager
def logins(lab: Lab, ports: dict[str, int] | None = None) -> Iterator[None]:
    """Run an sshd on each host in the block, on port 22, or on one of the ``ports``."""
    require()
    own = lab.home(lab.hosts[0]) / ".ssh"
    for host in lab.hosts:
        directory = lab.home(host).parent
        os.chown(lab.home(host), 0, 0)
        lab.home(host).chmod(0o755)
        (lab.home(host) / ".ssh").mkdir(mode=0o700)
        _key(directory / "hostkey")
        port = (ports or {}).get(host, 22)
        (directory / "sshd_config").write_text(f"Port {port}\n{_CONFIG}")
        give_shell(lab, host, "/bin/bash")
    _key(own / "id_ed25519")
    known = [(lab.home(host).parent / "hostkey.pub").read_text() for host in lab.hosts]
    lines = [f"* {' '.join(each.split()[:2])}\n" for each in known]
    (own / "known_hosts").write_text("".join(lines))
    public = (own / "id_ed25519.pub").read_text()
    try:
        for host in lab.hosts:
            (lab.home(host) / ".ssh" / "authorized_keys").write_text(public)
            subprocess.run(lab.command(host, "sh", "-c", _START), check=True)
        for host in lab.hosts:
            _wait_for(lab.home(host).parent / "sshd.pid")
        yield
    finally:
        for host in lab.hosts:
            with suppress(OSError, ValueError):
                pid = int((lab.home(host).parent / "sshd.pid").read_text())
                os.kill(pid, signal.SIGTERM)


def _key(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True)


def _wait_for(path: Path) -> None:
    end = time.monotonic() + patience(10.0)
    while not path.exists() or not path.read_text().strip():
        assert time.monotonic() < end, f"{path} never came"
        time.sleep(0.02)
