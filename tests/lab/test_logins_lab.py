"""What the check of hosts finds through a real sshd, and that mpirun starts where it finds
nothing."""

from __future__ import annotations

import sys
from pathlib import Path

from testbed.hosts import TMP, Lab, hosts
from testbed.jobs import patience
from tests.helpers.lab import doctor_with
from tests.helpers.mpirun import mpirun
from tests.helpers.sshd import give_shell, logins, require

SCRIPTS = {
    "mac2": "printf '\\033]0;mac2\\a'; read line",  # a title, and a question
    "mac3": "exit 0",
    "mac4": "exec sh",
    "mac5": "export TMPDIR=/nowhere",
    "mac6": f"export PYTHONPATH={TMP}/other",
}
"""Login scripts; all is well on the first of these hosts."""

EXPECTED = {
    "mac3": "its login runs no command",
    "mac4": "its login runs no command",
    "mac5": "cannot write 4 MiB into its temporary directory /nowhere",
    "mac7": "its login shell /usr/bin/fish",
    "mac8": "Permission denied",
    "mac9": "calls itself mac2, as mac2 does",
}


def test_the_check_names_what_keeps_mpirun_from_a_host(tmp_path: Path) -> None:
    require()
    with hosts(tmp_path, 10) as lab, logins(lab, {"mac10": 2222}):
        for host, script in SCRIPTS.items():
            (lab.home(host) / ".bashrc").write_text(f"{script}\n")
        other = lab.home("mac6").parent / "other" / "shardmlx"
        other.mkdir(parents=True)
        (other / "__init__.py").write_text('__version__ = "0.0.7"\n')
        give_shell(lab, "mac7", "/usr/bin/fish")
        (lab.home("mac8") / ".ssh" / "authorized_keys").unlink()
        mpirun(1, command=lab.command("mac9", "hostname", "mac2")).well()
        lines = [f"{host} slots=1\n" for host in lab.hosts[:-1]]
        lines.append("mac10 port=2222 slots=1\n")
        (lab.home("mac1") / "hosts").write_text("".join(lines))
        limits = ("login_faults.SECONDS_TO_ANSWER", "login_faults.SECONDS_FOR_TRIALS")
        constants = dict.fromkeys(limits, max(8.0, patience(4.0)))
        doctor = doctor_with(constants, "--ssh", "--hostfile", "hosts")
        job = mpirun(1, command=lab.command("mac1", *doctor)).well()
    for host, problem in EXPECTED.items():
        assert f"warning: {host}: {problem}" in job.stdout or (
            host == "mac8" and "warning: mac8: no login (root@mac8: Permission denied" in job.stdout
        ), (host, job.stdout)
    assert "shardmlx differs: " in job.stdout
    assert "0.0.7 on mac6" in job.stdout
    for host in ("mac1", "mac2", "mac10"):
        assert f"warning: {host}: " not in job.stdout


def with_docker(lab: Lab, host: str) -> None:
    """Give a host the network that Docker makes on each machine, with the same address."""
    script = "ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && "
    script += "ip link set docker0 up"
    mpirun(1, command=lab.command(host, "sh", "-c", script)).well()


def test_what_passes_the_check_starts(tmp_path: Path) -> None:
    """With csh as login shell there, this machine in other letters, a network of one address on
    both, and a hostfile that can be read once; and with user and port. Rank 0 refuses the model
    once it has heard from the other rank."""
    require()
    with hosts(tmp_path, 2) as lab, logins(lab, {"mac2": 2222}):
        for host in lab.hosts:
            with_docker(lab, host)
        home = lab.home("mac1")
        (home / "hosts").write_text("MAC1 slots=1\nmac2 slots=1 port=2222 username=root\n")
        generate = "generate --model nowhere --prompt Ahoy"
        command = f"{sys.executable} -m shardmlx.launch --hostfile <(cat hosts) {generate}"
        launch = lab.command("mac1", "bash", "-c", command)
        by_port = mpirun(2, command=launch)
        give_shell(lab, "mac2", "/bin/tcsh")
        (home / ".ssh" / "config").write_text("Host mac2\n  Port 2222\n")
        (home / "hosts").write_text("mac1 slots=1\nmac2 slots=1\n")
        with_csh = mpirun(2, command=launch)
    for job in (by_port, with_csh):
        assert "nowhere" in job.failure(2)
        assert " and mac2 have one address in 172.17.0.0/16: it is left out" in job.stdout
    assert "plm_ssh_assume_same_shell" not in by_port.stdout
    assert "--prtemca plm_ssh_assume_same_shell 0" in with_csh.stdout
