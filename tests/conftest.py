"""Sets the process up before any test module imports MLX, as the commands of shardmlx do."""

import os
import signal

import pytest

from shardmlx.common.environment import prepare

prepare()

pytest_plugins = ["tests.helpers.small_models", "tests.helpers.lab"]

# A shell starts what it runs in the background without Ctrl-C; jobs of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What runs keep for later runs does not get into anybody's home."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("caches"))
