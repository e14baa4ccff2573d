"""The order in which a command of several ranks starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from testbed.jobs import PYTHONPATH, ROOT

_UNTIL_MPI = """
import runpy, sys

class AtMpi:
    def find_spec(self, name, path=None, target=None):
        if name == "mpi4py":
            print(*sorted(sys.modules))
            sys.stdout.flush()
            raise SystemExit(7)

sys.meta_path.insert(0, AtMpi())
module, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(module, run_name="__main__")
"""


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_mpi_starts_when_all_else_has_been_imported() -> None:
    """Before it does, whatever goes wrong ends a process without a trace on the others."""
    done = run(_UNTIL_MPI, "shardmlx.train", "--data", "DATA")
    assert done.returncode == 7, done.stderr
    assert {"shardmlx.training.command", "mlx_lm", "mlx.core"} <= set(done.stdout.split())


_END = """
import atexit, gc, sys
atexit.register(lambda: print(gc.get_freeze_count() > 10_000, len(gc.get_objects()) < 10_000))
from shardmlx.distributed.run_ranks import run_ranks

def load():
    import mlx_lm  # many objects
    return lambda options, transport, blas: None

sys.exit(run_ranks(lambda rank: None, lambda options: 9.0, load, alike=False))
"""


def test_a_process_ends_without_a_look_at_all_its_objects() -> None:
    """It takes Python a second, and several where ranks share a core."""
    done = run(_END)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True True"


_LEAVES = """
import sys, shardmlx
with shardmlx.connect(alike=False):
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("status", "lines"), [(0, 0), (5, 1)])
def test_sys_exit_is_a_failure_only_with_a_status_that_says_so(status: int, lines: int) -> None:
    done = run(_LEAVES, status)
    assert done.returncode == status, done.stderr
    assert done.stderr.count("shardmlx: failed: ") == lines
