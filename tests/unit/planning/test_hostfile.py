"""Hostfiles that mpirun and the planner both read."""

from pathlib import Path

import pytest

from shardmlx.planning.facts.hostfile import Machine, machine_of_each_rank, read_hostfile, same_host
from tests.helpers.refusals import refusal

ROOT = Path(__file__).parents[3]


def read(directory: Path, text: str | bytes) -> tuple[Machine, ...]:
    path = directory / "hosts"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_hostfile(path)


# What the planner is told


def test_a_comment_says_what_a_machine_has(tmp_path: Path) -> None:
    line = (
        "mac-studio.local slots=1  "
        "# memory=64GiB wired=48GiB flops=27T link=40Gbps latency=1us kind=m2 "
        "python=/opt/x/bin/python3.12\n"
    )
    assert read(tmp_path, line) == (
        Machine(
            host="mac-studio.local",
            slots=1,
            memory=64 * 2**30,
            wired=48 * 2**30,
            flops=27e12,
            link=5e9,
            latency=1e-6,
            kind="m2",
        ),
    )


@pytest.mark.parametrize(
    ("comment", "field", "value"),
    [
        ("memory=8GB", "memory", 8_000_000_000),
        ("flops=3.8TFLOPS", "flops", 3.8e12),
        ("bandwidth=400GB/s", "bandwidth", 4e11),
        ("link=1Gbps", "link", 125e6),
        ("link=1.25GB/s", "link", 1.25e9),
        ("link=3MiB/s", "link", 3 * 2**20),
        ("latency=1ms", "latency", 1e-3),
    ],
)
def test_units(tmp_path: Path, comment: str, field: str, value: float) -> None:
    (machine,) = read(tmp_path, f"mac slots=1 # {comment}\n")
    assert getattr(machine, field) == pytest.approx(value, rel=1e-12)
    others = {"memory", "flops", "bandwidth", "link", "latency"} - {field}
    assert all(getattr(machine, each) is None for each in others)


@pytest.mark.parametrize(
    "comment",
    [
        "in the cellar: memory=8GiB, of Anna (Büro)",
        "memory = 8GiB",
        "see https://example.org/?id=3 memory=8GiB",
    ],
)
def test_other_words_of_a_comment_are_prose(tmp_path: Path, comment: str) -> None:
    assert read(tmp_path, f"mac slots=1 # {comment}\n") == (Machine(host="mac", memory=8 * 2**30),)


def test_comments_on_their_own_lines_are_prose(tmp_path: Path) -> None:
    text = "# memory=many: each has that\n\n  \t\n// a=b\nmac slots=1\n# the end, memory=1"
    assert read(tmp_path, text) == (Machine(host="mac"),)


@pytest.mark.parametrize(
    ("comment", "problem", "remedy"),
    [
        ("memory=64GBit", "'64GBit'", "1MiB to 1PB, like 64GiB"),
        ("link=40Gb", "'40Gb'", "40Gbps"),
        ("memory=0GiB", "'0GiB'", "1MiB to 1PB"),
        ("flops=1e999", "'1e999'", "1M to 1000P"),
        ("latency=1e308s", "'1e308s'", "1ns to 1000s"),
        ("memroy=1GiB", "'memroy'", "memory"),
        (
            "colour=grey",
            "'colour'",
            "memory, wired, flops, bandwidth, link, latency, rdma, kind, python",
        ),
        ("kind=", "kind", "kind=m2-ultra"),
        ("python=python3", "python is 'python3'", "python=/opt/shardmlx/bin/python"),
        ("python=/opt/my", "python is '/opt/my'", "python=/opt/shardmlx/bin/python"),
        ("python=/a;b/bin/python", "python is '/a;b/bin/python'", "without spaces"),
        ("link=1Gbps link=1Gbps", "link", "once"),
        ("memory=8GiB wired=9GiB", "'mac'", "wired"),
    ],
)
def test_a_mistake_in_a_comment_is_named(
    tmp_path: Path, comment: str, problem: str, remedy: str
) -> None:
    error = refusal(read, tmp_path, f"# hosts\nmac slots=1 # {comment}\n")
    assert "hosts, line 2: " in error.problem
    assert problem in error.problem
    assert remedy in error.remedy


# What mpirun is told


@pytest.mark.parametrize(
    "line",
    [
        "mac slots=3",
        "  mac\tslots = 3",
        "mac slots=3 port=22 username=anna",
        "anna@mac slots=3",
    ],
)
def test_slots_are_those_that_mpirun_reads(tmp_path: Path, line: str) -> None:
    (machine,) = read(tmp_path, line + "\n")
    assert machine.host.split(".")[0] == "mac"
    assert machine.slots == 3


@pytest.mark.parametrize(
    ("line", "login", "port"),
    [
        ("mini slots=1", "mini", None),
        ("anna@mini slots=1 port=2222", "anna@mini", 2222),
        ("mini port = 22 slots=1 username=anna", "anna@mini", 22),
        ("mini user_name=a-b_2 slots=1 max_slots=3", "a-b_2@mini", None),
        ("mini user-name=anna slots=1", "anna@mini", None),
        ("ben@mini slots=1 username=anna", "anna@mini", None),
        ("anna@10.0.0.2 slots=1", "anna@10.0.0.2", None),
    ],
)
def test_user_and_port_are_those_with_which_mpirun_logs_in(
    tmp_path: Path, line: str, login: str, port: int | None
) -> None:
    (machine,) = read(tmp_path, line + "\n")
    assert (machine.login, machine.port) == (login, port)
    (again,) = read(tmp_path, machine.entry + "\n")
    assert (again, again.login, again.port) == (machine, login, port)


def test_hosts_are_names_or_addresses(tmp_path: Path) -> None:
    text = "a_b-c.lan slots=1\n10.0.0.2 slots=1\n10.0.0.3 slots=1\nfe80::1 slots=1\n"
    assert [each.host for each in read(tmp_path, text)] == [
        "a_b-c.lan", "10.0.0.2", "10.0.0.3", "fe80::1",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b", "are_same"),
    [
        ("Mac-Studio.local", "mac-studio", True),
        ("mac-studio.lan", "mac-studio.local", True),
        ("mac-studio", "mac-mini", False),
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "10.0.0.1", True),
        ("fe80::1", "FE80:0::1", True),
    ],
)
def test_names_of_one_host_differ_in_case_and_domain_and_addresses_are_whole(
    a: str, b: str, are_same: bool
) -> None:
    assert same_host(a, b) is are_same


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("mac slots=0\n", "line 1: slots is '0'"),
        ("mac slots\n", "line 1: 'slots'"),
        ("mac slot=2\n", "line 1: 'slot=2'"),
        ("mac count=2\n", "line 1: 'count=2'"),
        ("mac max_slots=2\n", "has no slots"),
        ("mac slots=1 slots=2\n", "line 1: 'slots=2'"),
        ("mac slots=1 memory=8GiB\n", "line 1: 'memory=8GiB'"),
        ("\nmac:2\n", "line 2: host 'mac:2'"),
        ("^mac slots=1\n", "line 1: host '^mac'"),
        ("mac slots=1 /* x */\n", "line 1: '/*'"),
        ("mac slots=1\r\n", "line 1: mpirun reads no Windows line ends"),
        ("mac slots=1 # x", "line 1: mpirun reads no comment without a line end"),
        (b"mac slots=1\n\xff\n", "line 2: host "),
        ("# no host\n", "hosts: no hosts"),
        ("mac\n", "line 1: host 'mac' has no slots"),
        ("mac\u00a0slots=1\n", "line 1: no-break space (U+00A0)"),
        ("mac\u2003slots=1\n", "line 1: em space (U+2003)"),
        ("mac slots=1\u3000\n", "line 1: ideographic space (U+3000)"),
        ("\ufeffmac slots=1\n", "line 1: zero width no-break space (U+FEFF)"),
        ("mac\u200b slots=1\n", "line 1: zero width space (U+200B)"),
        ("mac slots=1 \x1c\n", "line 1: a control character (U+001C)"),
        ("mac slots=1\x85\n", "line 1: a control character (U+0085)"),
        ("fe80::1%en0 slots=1\n", "line 1: host 'fe80::1%en0'"),
        ("anna@fe80::1%en0 slots=1\n", "line 1: host 'fe80::1%en0'"),
        ("::ffff:10.0.0.2 slots=1\n", "line 1: host '::ffff:10.0.0.2'"),
        ("first.last@mac slots=1\n", "line 1: mpirun does not take the user 'first.last'"),
        ("mac slots=1 username=first.last\n", "line 1: mpirun does not take the user 'first.last'"),
        ("mac slots=1 username=501\n", "line 1: mpirun does not take the user '501'"),
        ("mac slots=1 username=\n", "line 1: mpirun does not take the user ''"),
        ("a@b@mac slots=1\n", "line 1: mpirun does not take the user 'a@b'"),
        ("@mac slots=1\n", "line 1: mpirun does not take the user ''"),
        ("mac slots=1 port=ssh\n", "line 1: port is 'ssh'"),
        ("mac slots=1 port=70000\n", "line 1: port is '70000'"),
        ("mac slots=1 port=22 port=23\n", "line 1: 'port=23'"),
        ("mac slots=2 max_slots=1\n", "line 1: max_slots is less than slots"),
        ("slot slots=1\n", "line 1: host 'slot'"),
        ("-mac slots=1\n", "line 1: host '-mac'"),
        ("12 slots=1\n", "line 1: host '12'"),
        ("mac slots=1\nmac slots=2\n", "line 2: host 'mac' is the host of "),
        ("mac.home slots=1\nmac.office slots=1\n", "line 2: host 'mac.office' is the host of "),
        ("fe80::1 slots=1\nFE80::1 slots=1\n", "line 2: host 'FE80::1' is the host of "),
    ],
)
def test_what_mpirun_refuses_or_guesses_is_named(
    tmp_path: Path, text: str | bytes, problem: str
) -> None:
    assert problem in refusal(read, tmp_path, text).problem


def test_a_user_that_mpirun_does_not_take_goes_into_the_configuration_of_ssh(
    tmp_path: Path,
) -> None:
    error = refusal(read, tmp_path, "first.last@mac.local slots=1\n")
    assert "~/.ssh/config: 'Host mac.local' and 'User first.last'" in error.remedy


def test_strange_spaces_in_a_comment_are_prose(tmp_path: Path) -> None:
    assert read(tmp_path, "mac slots=1 #\u00a0memory=8GiB\u00a0old\n") == (
        Machine(host="mac", memory=8 * 2**30),
    )


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "hosts: No such file" in str(refusal(read_hostfile, tmp_path / "hosts"))


# Ranks


def test_ranks_fill_one_host_after_the_other_and_share_it(tmp_path: Path) -> None:
    machines = read(tmp_path, "b slots=2 # memory=9GiB flops=3T link=1GB/s\na slots=1\n")
    half = Machine(host="b", memory=9 * 2**29, flops=1.5e12, link=1e9)
    assert machine_of_each_rank(machines) == (half, half, Machine(host="a"))


@pytest.mark.parametrize("path", sorted((ROOT / "hostfiles").iterdir()), ids=lambda path: path.name)
def test_the_examples_have_all_that_the_planner_wants(path: Path) -> None:
    machines = read_hostfile(path)
    for machine in machines:
        assert machine.memory is not None
        assert machine.flops is not None
        assert (machine.link is not None) == (len(machines) > 1)
