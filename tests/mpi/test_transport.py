"""One specification of a transport, on threads and on the ranks of mpirun."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

import pytest

from shardmlx.distributed.messages import PeerLost
from testbed.jobs import ROOT, SECONDS_TO_END
from tests.helpers import transport_checks
from tests.helpers.local_transport import LocalNetwork, LocalTransport
from tests.helpers.mpirun import mpirun, run_checks, verdict
from tests.helpers.programs import PROGRAMS
from tests.helpers.transport_checks import CHECKS

OF_SUMS = [name for name in CHECKS if "sum" in name or "scatter" in name or "gather" in name]


# Three: a number that is not a power of two. Sums depend on how many there are, messages do not.
@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, 3) for name in CHECKS), *((name, 2) for name in OF_SUMS)],
)
def test_on_threads(name: str, size: int) -> None:
    LocalNetwork(size, timeout=20.0).run(CHECKS[name])


@pytest.fixture(scope="module")
def errors_under_mpirun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_checks(4, transport_checks.__name__, tmp_path_factory.mktemp("checks"))


@pytest.mark.parametrize("name", CHECKS)
def test_under_mpirun(name: str, errors_under_mpirun: dict[str, str]) -> None:
    verdict(errors_under_mpirun, name)


def test_a_rank_that_aborts_ends_those_that_wait_for_it() -> None:
    job = mpirun(3, PROGRAMS / "abort.py", timeout=3 * SECONDS_TO_END)
    assert job.returncode == 7
    assert "rank 1 gives up" in job.stderr


def test_a_process_without_mpirun_fails_in_one_line() -> None:
    program = (
        "from shardmlx.distributed.run_ranks import connect\nwith connect(): raise KeyError(1)"
    )
    job = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert job.returncode == 1
    assert re.fullmatch(r"shardmlx: failed: rank 0 on \S+: KeyError: 1\n", job.stderr)


def test_a_rank_that_dies_ends_those_that_wait_for_it() -> None:
    job = mpirun(3, PROGRAMS / "abort.py", "--die", timeout=3 * SECONDS_TO_END)
    assert job.returncode != 0


def test_an_abort_wakes_all_threads() -> None:
    def work(transport: LocalTransport) -> None:
        if transport.rank == 1:
            raise KeyError("rank 1 gives up")
        transport.receive_object(1)

    with pytest.raises(KeyError, match="rank 1 gives up"):
        LocalNetwork(3).run(work)


def test_a_failure_ends_the_wait_and_names_what_was_waited_for() -> None:
    def work(transport: LocalTransport) -> None:
        if transport.rank == 1:
            return
        timer = threading.Timer(0.1, transport.fail, [PeerLost("rank 1 on localhost died")])
        timer.start()
        transport.receive_object(1, "step 3")

    what = "rank 0 on localhost, step 3, waiting for rank 1 on localhost: rank 1 on localhost died"
    with pytest.raises(PeerLost, match=what):
        LocalNetwork(2).run(work)


def test_a_failure_of_this_rank_is_raised_as_it_is_at_the_next_wait() -> None:
    def work(transport: LocalTransport) -> None:
        if transport.rank == 0:
            transport.fail(OSError("rank 0: disk full"))
            transport.receive_object(1)

    with pytest.raises(OSError, match=r"^rank 0: disk full$"):
        LocalNetwork(2).run(work)
