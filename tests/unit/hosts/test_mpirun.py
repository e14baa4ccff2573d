"""What mpirun is told on this machine beside what the user gives."""

from __future__ import annotations

from ipaddress import IPv4Interface
from pathlib import Path

import pytest

from shardmlx.errors import UserError
from shardmlx.hosts import mpirun
from shardmlx.hosts.mpirun import (
    check_path,
    common_network,
    is_of_wheel,
    knows_as_own,
    mpirun_path,
    settings_for,
)

CABLE = IPv4Interface("10.77.0.1/24")
WLAN = IPv4Interface("192.168.1.7/24")
LOOPBACK = IPv4Interface("127.0.0.1/8")
RANKS = ("--mca", "btl_tcp_if_include", "10.77.0.0/24")
POLICY = "PRTE_MCA_rmaps_default_mapping_policy"
DAEMONS = ("--prtemca", "prte_if_include", "10.77.0.0/24")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this machine one of two cores and two networks, and its user not root."""
    for name in (*mpirun._AS_ROOT, *mpirun._INCLUDE, *mpirun._SECRETS, POLICY):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 501)
    monkeypatch.setattr(mpirun, "_cores", lambda: 2)
    own = [("lo0", LOOPBACK), ("en0", WLAN), ("en1", CABLE)]
    monkeypatch.setattr(mpirun, "own_addresses", lambda: own)


def test_root_is_allowed_unless_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_for((), 2) == ()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert settings_for((), 2) == ("--allow-run-as-root",)
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        monkeypatch.setenv(name, "1")
    assert settings_for((), 2) == ()


def test_ranks_may_share_the_cores_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_for((), 3) == ("--oversubscribe", "--bind-to", "none")
    assert settings_for((), 3, ("--bind-to", "core")) == ("--oversubscribe",)
    assert settings_for((), 3, ("--map-by", "core")) == ()
    assert settings_for(("mac1.local", "mac2.local"), 3) == ()  # it has slots
    monkeypatch.setenv(POLICY, ":oversubscribe")
    assert settings_for((), 3) == ()


def test_mpirun_asks_for_a_shell_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ("mac1.local", "mac2.local")
    ask = ("--prtemca", "plm_ssh_assume_same_shell", "0")
    assert settings_for(hosts, 2, asks_for_shell=True) == ask
    assert settings_for(hosts, 2, ask, asks_for_shell=True) == ()
    monkeypatch.setenv("PRTE_MCA_plm_ssh_assume_same_shell", "0")
    assert settings_for(hosts, 2, asks_for_shell=True) == ()


def test_networks_with_one_address_on_two_hosts_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the loopback, which Open MPI leaves out where nothing is said. What the user has chosen
    stays."""
    hosts = ("mac1.local", "mac2.local")
    docker = ("172.17.0.0/16", "192.168.64.0/24")
    exclude = ("--mca", "btl_tcp_if_exclude", "127.0.0.0/8,172.17.0.0/16,192.168.64.0/24")
    assert settings_for(hosts, 2, without=docker) == exclude
    assert settings_for(hosts, 2, ("--mca", "btl_tcp_if_include", "en0"), without=docker) == ()
    assert settings_for(hosts, 2, ("--mca", "btl_tcp_if_exclude", "en0"), without=docker) == ()
    assert settings_for(("10.77.0.1", "10.77.0.2"), 2, without=docker) == RANKS + DAEMONS
    monkeypatch.setenv("OMPI_MCA_btl_tcp_if_include", "en0")
    assert settings_for(hosts, 2, without=docker) == ()


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        ("localhost", True),
        ("10.77.0.1", True),
        ("mac1", True),
        ("mac1.local", True),
        ("mac1.office.example", True),
        ("Mac1", False),
        ("MAC1.local", False),
        ("studio", False),
        ("10.77.0.2", False),
    ],
)
def test_mpirun_knows_its_own_machine_by_the_letter(
    host: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As tried with PRRTE 3 in the lab: it logged in to itself by the others."""
    monkeypatch.setattr("socket.gethostname", lambda: "mac1.example.org")
    assert knows_as_own(host) is is_known


@pytest.mark.parametrize("directory", ["/my env/bin", "/a&b/bin", "/a:b/bin", "/it's/bin"])
def test_a_path_that_other_hosts_shells_would_divide_is_refused(directory: str) -> None:
    check_path(Path("/Users/Shared/Büro/shardmlx-1.0_a+b/.venv/bin/mpirun"))
    with pytest.raises(UserError, match="does not quote") as error:
        check_path(Path(directory, "mpirun"))
    assert directory in error.value.problem


def test_messages_keep_to_the_network_of_the_addresses_in_the_hostfile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosts = ("10.77.0.1", "10.77.0.2")
    assert settings_for(hosts, 2) == RANKS + DAEMONS
    assert settings_for(hosts, 2, ("--mca", "btl_tcp_if_include", "en0")) == DAEMONS
    monkeypatch.setenv("PRTE_MCA_prte_if_include", "en0")
    assert settings_for(hosts, 2) == RANKS


@pytest.mark.parametrize(
    "hosts",
    [
        ("mac1.local", "10.77.0.2"),
        ("10.77.0.1",),
        ("10.77.0.1", "192.168.1.8"),
        ("127.0.0.1", "127.0.0.2"),
        ("fe80::1", "fe80::2"),
    ],
)
def test_no_network_is_named_where_it_is_not_known(hosts: tuple[str, ...]) -> None:
    assert common_network(hosts, [LOOPBACK, WLAN, CABLE]) is None


def test_other_hosts_get_secrets_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*mpirun._SECRETS]
    for name in names:
        monkeypatch.setenv(name, "secret")
    assert settings_for((), 2) == ()
    hosts = ("mac1", "mac2")
    assert settings_for(hosts, 2) == ("-x", names[0], "-x", names[1])
    assert settings_for(hosts, 2, ("-x", names[0])) == ("-x", names[1])


def test_an_mpirun_that_pip_did_not_install_is_told_from_ours(tmp_path: Path) -> None:
    assert is_of_wheel(mpirun_path())
    assert not is_of_wheel(tmp_path / "mpirun")
