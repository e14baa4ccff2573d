"""Sets the process up before any test module imports MLX, as the commands of shardmlx do."""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from shardmlx.common.environment import prepare
from tests.helpers.jobs import ROOT
from tests.helpers.rank_pool import close_pools

prepare()

pytest_plugins = ["tests.helpers.small_models", "tests.helpers.lab"]

# A shell starts what it runs in the background without Ctrl-C; jobs of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


ONE_AT_A_TIME = {
    "tests/browser/": "browser",  # a port range
    "tests/lab/": "lab",  # network namespaces
    # Ranks that stay between tests: four more take eight seconds to start.
    "tests/mpi/test_engine_mpi.py": "four ranks",
    "tests/mpi/test_layouts.py": "four ranks",
    "tests/mpi/test_resume.py": "four ranks",
    "tests/mpi/test_same_as_mlx_lm.py": "four ranks",
    "tests/mpi/test_transport.py": "four ranks",
}
"""What is shared by tests whose names begin so."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Spare later garbage collections all that lives when the tests are collected."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """Let Hypothesis, where it is imported only now, find who refers to what."""
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Divide the tests among the workers of pytest-xdist: each file, or what shares something,
    to one."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduler(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            shared = (what for each, what in ONE_AT_A_TIME.items() if nodeid.startswith(each))
            return next(shared, nodeid.partition("::")[0])

    return Scheduler(config, log)


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what runs leave for later runs out of anybody's home."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("caches"))
    # matplotlib looks at all fonts of the machine for some seconds, once.
    os.environ["MPLCONFIGDIR"] = str(ROOT / ".cache" / "matplotlib")


@pytest.fixture(scope="session", autouse=True)
def _pools() -> Iterator[None]:
    """End the ranks that have stayed for later tests."""
    yield
    close_pools()
