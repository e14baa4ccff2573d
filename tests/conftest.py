"""Sets the process up before any test module imports MLX, as the commands of shardmlx do."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmlx.common.environment import prepare
from tests.helpers.rank_pool import close_pools

prepare()

pytest_plugins = ["tests.helpers.small_models", "tests.helpers.lab"]

# A shell starts what it runs in the background without Ctrl-C; jobs of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


ONE_AT_A_TIME = {"mpi", "lab", "browser"}
"""Directories of tests that start jobs, each of which takes all cores."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Divide the tests among the workers of pytest-xdist: a file to one, all jobs to one."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        directory, *rest = item.path.relative_to(Path(__file__).parent).parts
        group = "jobs" if directory in ONE_AT_A_TIME else "/".join(rest)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep what runs leave for later runs out of anybody's home."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("caches"))


@pytest.fixture(scope="session", autouse=True)
def _pools() -> Iterator[None]:
    """End the ranks that have stayed for later tests."""
    yield
    close_pools()
