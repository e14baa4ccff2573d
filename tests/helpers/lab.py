"""Two hosts, for the tests that need them, and hosts that have their Python at other paths."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from testbed.hosts import TMP, Lab, two_hosts


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with two_hosts(tmp_path) as lab:
        yield lab


def needs_own_python() -> None:
    """Skip the test without a virtual environment, which hosts have at other paths."""
    if Path(sys.prefix) == Path(sys.base_prefix):
        pytest.skip("needs a virtual environment, which hosts have at other paths")


def move_python(lab: Lab, host: str) -> Path:
    """Give a host its environment at a path of its own, and at no other; return that Python."""
    own = TMP / host / "env"
    script = f"mkdir -p {own} && mount --bind {sys.prefix} {own} && mount -t tmpfs no {sys.prefix}"
    subprocess.run(lab.command(host, "sh", "-c", script), check=True)
    return own / "bin" / "python"


def start_pythons_with(lab: Lab, host: str, source: str) -> None:
    """Let each Python that a login on this host starts run ``source`` first."""
    foreign = lab.home(host).parent / "foreign"
    foreign.mkdir()
    (foreign / "sitecustomize.py").write_text(source)
    (lab.home(host) / ".bashrc").write_text(f"export PYTHONPATH={TMP}/foreign\n")


def write_hosts(lab: Lab, pythons: Mapping[str, Path]) -> None:
    """Write the hostfile of the first host: a rank on each, with the Python of that host."""
    lines = [f"{host} slots=1  # python={python}\n" for host, python in pythons.items()]
    (lab.home(next(iter(pythons))) / "hosts").write_text("".join(lines))


def doctor_with(constants: Mapping[str, float], *words: str) -> tuple[str, ...]:
    """Return the command of ``shardmlx doctor WORDS`` with other constants of modules of its hosts,
    as ``login_faults.SECONDS_TO_ANSWER``: machines that share two cores need longer."""
    modules = dict.fromkeys(name.partition(".")[0] for name in constants)
    lines = [
        "import sys",
        f"from shardmlx.hosts import {', '.join(modules)}",
        "from shardmlx.main import main",
        *(f"{name} = {value}" for name, value in constants.items()),
        'sys.exit(main(["doctor", *sys.argv[1:]]))',
    ]
    return (sys.executable, "-c", "\n".join(lines), *words)
