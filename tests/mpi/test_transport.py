"""One specification of a transport, on threads and on the ranks of mpirun."""

from __future__ import annotations

import pytest

from shardmlx.transport import LocalNetwork, LocalTransport
from tests.mpi import transport_checks
from tests.mpi.mpirun import PROGRAMS, SECONDS_TO_END, mpirun, run_checks, verdict
from tests.mpi.transport_checks import CHECKS

SIZES = (2, 3, 4)
"""Three: sums over a number of ranks that is no power of two."""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CHECKS)
def test_on_threads(name: str, size: int) -> None:
    LocalNetwork(size, timeout=20.0).run(CHECKS[name])


@pytest.fixture(scope="module", params=SIZES)
def errors_under_mpirun(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    size: int = request.param
    return run_checks(size, transport_checks.__name__, tmp_path_factory.mktemp("checks"))


@pytest.mark.parametrize("name", CHECKS)
def test_under_mpirun(name: str, errors_under_mpirun: dict[str, str]) -> None:
    verdict(errors_under_mpirun, name)


def test_a_rank_that_aborts_ends_those_that_wait_for_it() -> None:
    job = mpirun(3, PROGRAMS / "abort.py", timeout=3 * SECONDS_TO_END)
    assert job.returncode == 7
    assert "rank 1 gives up" in job.stderr


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
