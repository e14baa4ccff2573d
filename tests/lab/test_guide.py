"""Guide, tutorial and troubleshooting: what they tell to type is typed here, in their order, on two
hosts of the lab. What cannot be typed here is at least known.

A block ``sh run`` is typed on the first host, ``sh run second`` on the second one, ``sh mac`` needs
macOS, ``sh hand`` asks for a password or for the internet. Other blocks show output.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from testbed.hosts import TMP, Lab, seen_by_all
from testbed.jobs import ROOT, STARTUP
from testbed.small_models import small_directory
from tests.helpers.markdown import Block, blocks
from tests.helpers.models_and_batches import load_weights
from tests.helpers.mpirun import mpirun
from tests.helpers.shown import strange

GUIDE = ROOT / "docs" / "guide.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
MPIRUN = ROOT / "docs" / "mpirun-messages.md"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
TYPED = (GUIDE, TUTORIAL, MPIRUN, TROUBLESHOOTING)
"""In this order: the guide makes what the others use."""

RUN, SECOND, MAC, HAND = ("sh", "run"), ("sh", "run", "second"), ("sh", "mac"), ("sh", "hand")

ON_A_MAC = {
    "ifconfig bridge0",
    "networksetup -getinfo 'Thunderbolt Bridge'",
    "networksetup -listallhardwareports",
    "ping -c 3 10.77.0.2",
    "sudo /usr/libexec/ApplicationFirewall/socketfilterfw --add $(realpath .venv/bin/python)",
    "sudo /usr/libexec/ApplicationFirewall/socketfilterfw --add $PWD/.venv/bin/prted",
    "sudo /usr/libexec/ApplicationFirewall/socketfilterfw --add $PWD/.venv/bin/prterun",
    "sudo networksetup -setmanual 'Thunderbolt Bridge' 10.77.0.1 255.255.255.0",
    "sudo networksetup -setmanual 'Thunderbolt Bridge' 10.77.0.2 255.255.255.0",
    "sudo sysctl iogpu.wired_limit_mb=57344",
    "sudo systemsetup -setremotelogin on",
}
"""What nobody has tried, beside the commands of ours that need a model of 7B."""

BY_HAND = {
    "export PRTE_MCA_oob_tcp_dynamic_ipv4_ports=47000-47099",
    "export OMPI_MCA_btl_tcp_port_min_v4=47100 OMPI_MCA_btl_tcp_port_range_v4=100",
    "pip wheel . -w wheels",
    "pip install --no-index --find-links wheels shardmlx",
    "ssh-copy-id mac2.local",
    "ssh-keygen -t ed25519",
}

PROVOKED = {
    "There are not enough slots available": "mpirun -n 3 --hostfile hosts hostname",
    "prterun has detected an attempt to run as root": (
        "env -u OMPI_ALLOW_RUN_AS_ROOT mpirun hostname"
    ),
    "prterun was unable to find the specified executable": (
        "mpirun --hostfile hosts python --version"
    ),
    "prterun was unable to launch the specified application": (
        "mpirun --hostfile hosts /nowhere/bin/python"
    ),
    "No network interfaces were found for out-of-band": (
        # It ends so early that it does not always come to print why.
        "until PRTE_MCA_prte_if_include=bridge0 mpirun --hostfile hosts hostname 2>&1 "
        "| tee said | grep interfaces >/dev/null; do :; done; cat said"
    ),
    "WARNING: An invalid value was given for btl_tcp_if_include": (
        "OMPI_MCA_btl_tcp_if_include=bridge0 mpirun -n 1 python -c 'from mpi4py import MPI'"
    ),
    "A daemon failed to report back": (
        "echo mac9.local slots=1 > nine; mpirun --hostfile nine hostname"
    ),
    "Could not resolve hostname": "mpirun --hostfile nine hostname",
    "The PMIx server's listener thread failed to start": (
        # Each mpirun has the same process number.
        "again='unshare --pid --fork --mount-proc bash -c'; "
        "$again 'mpirun -n 1 bash -c \"kill -9 \\$PPID\" & wait $!'; "
        "$again 'mpirun -n 1 hostname & wait $!'"
    ),
    ".cache/smollm does not exist: check the path": "shardmlx generate --model .cache/smollm",
}
"""What makes mpirun, or us, say some of the messages on the pages."""

SHARED = ("/Users/Shared", str(TMP / "Shared"))
"""Macs have the first; the second is each host's own, and can be written to."""

NAMES = "127.0.0.1 localhost\n10.77.0.1 mac1 mac1.local\n10.77.0.2 mac2 mac2.local\n"

QUICKER = ("doctor --write-hostfile", "doctor --seconds 0.2 --write-hostfile")
"""In the place of the command that measures for a second each."""

EVEN = """\
sed -i 's/flops=[^ ]* link=[^ ]* latency=[^ ]*/flops=40G link=4Gbps latency=25us/' measured
grep -q latency=25us measured"""
"""Typed after that: on a busy machine the same cores measure unlike, and replicas would have
unequal rows; beside a slow link the run would choose other micro-batches."""

SHORTER = {"iters": 2, "batch_size": 4, "val_batches": 1}
SHORTER |= {"steps_per_report": 1, "steps_per_eval": 2}
"""In the place of the values of the demo's configuration file."""

_LOGIN = """#!/bin/sh
# In the place of ssh: a login has a short PATH, and none of the variables that are set here.
while [ "${{1#-}}" != "$1" ]; do
    [ "$1" = -o ] && shift
    shift
done
host=${{1%.local}}
shift
exec env -i PATH=/usr/bin:/bin:/usr/sbin:/sbin {environment} \\
    SHARDMLX_TEST_JOB="$SHARDMLX_TEST_JOB" {agent} "$host" "$@"
"""

_PYTHON = f"""#!/bin/sh
# A new environment finds pip as it finds other packages: to install it takes four seconds.
[ "$1 $2" = "-m venv" ] || exec {sys.executable} "$@"
{sys.executable} -m venv --without-pip "$3" || exit
printf '#!/bin/sh\\nexec python -m pip "$@"\\n' > "$3/bin/pip"
chmod +x "$3/bin/pip"
"""

_COMPILED = TMP / "compiled"

_PACKAGES = {
    "PYTHONPATH": f"{STARTUP}:{sysconfig.get_path('purelib')}",
    "LD_LIBRARY_PATH": str(Path(sys.prefix, "lib")),
    "PYTHONPYCACHEPREFIX": str(_COMPILED),
    "PIP_NO_INDEX": "1",
    "PIP_NO_BUILD_ISOLATION": "0",  # pip's word for: without isolation
    "PIP_NO_COMPILE": "1",
    "PIP_NO_DEPS": "1",  # looking at a hundred packages is half of an installation
}
"""With which a new environment finds all packages that pip would download, and mpi4py finds MPI."""


def commands(path: Path, *info: str) -> Iterator[str]:
    """What the blocks of one kind tell to type, one command each."""
    for block in blocks(path):
        if block.info == info:
            yield from re.sub(r"\\\n\s*", "", block.text).splitlines()


@pytest.fixture
def bench(lab: Lab, tmp_path: Path) -> Path:
    """Where mac1's /tmp is: with the login, the repository, and names as Macs have them."""
    for host in lab.hosts:
        lab.replace(host, Path("/etc/hosts"), NAMES)
        # What lies in /tmp differs between the hosts; all else is compiled once for both.
        compiled = tmp_path / host / _COMPILED.name
        compiled.mkdir()
        if sys.pycache_prefix is not None:
            prefix = Path(sys.pycache_prefix)
            outside = [path for path in prefix.iterdir() if path.name != TMP.name]
            for path in (*outside, *(prefix / each.relative_to("/") for each in seen_by_all())):
                link = compiled / path.relative_to(prefix)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path)
        write_program(tmp_path / host / "bin" / "python3", _PYTHON)
    first = tmp_path / lab.hosts[0]
    environment = " ".join(f"{name}={value}" for name, value in _PACKAGES.items())
    login = _LOGIN.format(environment=environment, agent=lab.agent)
    write_program(first / "bin" / "ssh", login)
    # One core would be bound to all ranks, since all hosts are this machine.
    settings = first / "home" / ".prte" / "mca-params.conf"
    settings.parent.mkdir()
    settings.write_text("hwloc_default_binding_policy = none\n")
    repository = first / "Shared" / "shardmlx"
    repository.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, repository)
    for name in ("shardmlx", "models", "partitioners", "scripts", "hostfiles"):
        ignored = shutil.ignore_patterns("bench")
        shutil.copytree(ROOT / name, repository / name, symlinks=True, ignore=ignored)
    return first


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


MOST_SECONDS = 1100
"""Time for all pages, which on a busy machine take ten times as long."""


def type_in(lab: Lab, bench: Path, typed: Sequence[Block], timeout: float) -> dict[str, str]:
    """Type blocks, one after the other, into one terminal of the first host, as far as they
    succeed; what came, by where the block stands."""
    path = _path()
    script = ["exec 2>&1", "set -eo pipefail", _TWICE]
    for block in typed:
        text = block.text.replace(*SHARED).replace(*QUICKER)
        script.append(f"printf '\\n<<<{block.where}>>>\\n'")
        if block.info == SECOND:
            text = f"ssh mac2.local env PATH={path} bash -e <<'SECOND'\n{text}SECOND"
        script.append(text)
        if QUICKER[0] in block.text:
            script.append(EVEN)
    (bench / "script").write_text("\n".join(script))
    job = mpirun(
        2,
        command=lab.command(lab.hosts[0], "bash", TMP / "script"),
        env={**_PACKAGES, "PATH": path},
        timeout=timeout,
        longest=MOST_SECONDS,
    )
    _, *parts = re.split(r"^<<<(.*)>>>$", job.stdout, flags=re.MULTILINE)
    came = dict(zip(parts[::2], parts[1::2], strict=True))
    assert job.returncode == 0, f"{parts[-2]}: {parts[-1]}"
    return came


_TWICE = """\
mpirun() {
    timeout -k 1 30 mpirun "$@" || timeout -k 1 60 mpirun "$@"
}
"""
"""On a busy machine Open MPI 5.0.11 may hang after a job as short as ``hostname``."""


def _path() -> str:
    return f"{TMP / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin"


def small_smollm2(path: Path, tokenizer: Path) -> None:
    """A model directory like the one that scripts/prepare_smollm2.py makes, so that it finds its
    work done: as many layers, each very small."""
    small_directory(
        path, tokenizer, num_hidden_layers=30, tie_word_embeddings=True, torch_dtype="float32"
    )
    (path / "generation_config.json").write_text("{}")
    index = {"weight_map": dict.fromkeys(load_weights(path), "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def shorten(config: Path) -> None:
    text = config.read_text()
    for key, value in SHORTER.items():
        text, count = re.subn(rf"^{key}: .*$", f"{key}: {value}", text, flags=re.MULTILINE)
        assert count == 1, key
    config.write_text(f"{text}test_batches: 1\n")


def test_every_block_is_of_a_known_kind() -> None:
    kinds = {(), ("text",), RUN, SECOND, MAC, HAND}
    for path in TYPED:
        for block in blocks(path):
            assert block.info in kinds, block.where


def test_what_is_not_typed_here_is_known() -> None:
    for kind, known in ((MAC, ON_A_MAC), (HAND, BY_HAND)):
        found = {command for path in TYPED for command in commands(path, *kind)}
        assert {each for each in found if not each.startswith("shardmlx ")} == known


def test_what_needs_a_mac_is_said_not_to_be_tried() -> None:
    assert "**Nothing on this page has run on a Mac.**" in GUIDE.read_text()
    for path in TYPED:
        sign = "⌘" if path == TUTORIAL else "n a Mac, not tried"
        for section in re.split(r"^#+ ", path.read_text(), flags=re.MULTILINE):
            if "```sh mac" in section:
                assert sign in " ".join(section.split()), section[:40]


@pytest.mark.timeout(MOST_SECONDS + 100)
def test_two_hosts_do_what_the_guide_says(lab: Lab, bench: Path, small_tokenizer: Path) -> None:
    repository = bench / "Shared" / "shardmlx"
    small_smollm2(repository / ".cache" / "smollm2-135m-instruct", small_tokenizer)
    shorten(repository / "scripts" / "demo-config.yaml")
    typed = [block for path in TYPED for block in blocks(path) if block.info[:2] == RUN]
    came = type_in(lab, bench, typed, timeout=280.0)

    def said(words: str) -> str:
        """What came of the block in which these words were typed."""
        where = next(block.where for block in typed if words in block.text)
        return came[where]

    assert "822 in train.jsonl" in said("prepare_pirate_data")
    assert "mac2" in said("ssh mac2.local hostname")
    assert "nothing to warn of" in said("doctor --ssh --hostfile hosts\n")
    assert "Wrote measured" in said("--write-hostfile")
    assert "wrote map.yaml" in said("-o map.yaml")
    assert 'host: "mac2.local"' in said("cat map.yaml")
    trained = said("--checkpoint-every 10")
    assert re.search(r"^weights: .* over MPI .*\(rank 1 on mac2 ", trained, re.MULTILINE)
    assert re.search(r"^step 2: loss", trained, re.MULTILINE)
    assert "Saved to pirate-adapters" in trained
    assert (repository / "pirate-adapters" / "checkpoints" / "step-0000002").exists()
    assert "<html" in (repository / "run.html").read_text()
    assert "2 data parallel x 1 pipeline parallel" in said("--pipeline-stages 1 --iters 2")
    shown = pairwise(block for path in (GUIDE, TUTORIAL) for block in blocks(path))
    outputs = [(came[a.where], b) for a, b in shown if a in typed and b.info == ()]
    assert len(outputs) > 8
    others = {b.where: strange(b.text, output) for output, b in outputs}
    assert {where: lines for where, lines in others.items() if lines} == {}
    second = Path(lab.home("mac2").parent, "Shared", "shardmlx")
    assert not any((second / name).exists() for name in ("map.yaml", "measured", ".cache"))


def test_messages_are_those_of_mpirun(lab: Lab, bench: Path) -> None:
    pages = (MPIRUN, TROUBLESHOOTING)
    quoted = "".join(b.text for page in pages for b in blocks(page) if b.info == ("text",))
    home = bench / "home"
    (home / "hosts").write_text("mac1.local slots=1\nmac2.local slots=1\n")
    script = [f"PATH={_path()}"]
    for number, command in enumerate(PROVOKED.values()):
        script.append(f"printf '\\n<<<{number}>>>\\n'; {{ {command}; }} 2>&1")
    (bench / "script").write_text("\n".join(script))
    job = mpirun(2, command=lab.command("mac1", "bash", TMP / "script"), env=_PACKAGES)
    came = re.split(r"^<<<\d+>>>$", job.stdout, flags=re.MULTILINE)[1:]
    for message, output in zip(PROVOKED, came, strict=True):
        assert message in quoted
        assert message in output
